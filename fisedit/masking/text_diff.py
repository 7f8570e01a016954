"""Which words an edit changes, and which nouns show where: a prompt pair becomes an `EditScript`.

Pure text. It knows CLIP's tokenizer by its call alone, and neither models, attention, nor pictures; word classes are
`word_classes`'s. Every pair of strings gives a script. Prompt-to-prompt (arXiv 2208.01626) and its successors
are told the changed words; here they are found.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fisedit.masking.whole_picture import global_reason
from fisedit.masking.word_classes import TaggedPrompt, WordClass, focus, importance
from fisedit.models.prompt_weighting import WeightedPrompt, parse
from fisedit.values import EditKind, EditScript, Hunk, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT_LENGTH = 77
"""Tokens that a CLIP text encoder reads, start and end token included."""

_NOT_PUNCTUATION = (WordClass.STOP, WordClass.VERB, WordClass.CONTENT)


class Tokenizer(Protocol):
    """What is asked of a tokenizer; `transformers.CLIPTokenizer` fits, with any vocabulary."""

    model_max_length: int

    def __call__(self, text: str, **options: Any) -> Any:
        """A BatchEncoding: token ids, character offsets, `word_ids()`."""


def words(prompt: str, tokenizer: Tokenizer) -> tuple[Word, ...]:
    """The words of a prompt as CLIP splits them: lower-cased runs of letters, single digits, runs of punctuation.

    Args:
        prompt: any text; `(word:1.3)` and the like are read as weights.
        tokenizer: a CLIPTokenizer; its own splitting decides, so that tokens and words always agree.

    Returns:
        The words in order, with characters [start, end) of `prompt`, weights, and token positions (the first word's is
        1). Words beyond the text encoder's reach have no tokens.
    """
    read = parse(prompt)
    encoded = tokenizer(read.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans: dict[int, list[int]] = {}  # word -> [start, end, token, token, ...]
    for token, (word, (start, end)) in enumerate(zip(encoded.word_ids(), encoded["offset_mapping"], strict=True), 1):
        spans.setdefault(word, [start, end])[1] = end
        spans[word].append(token)
    ordered = list(spans.values())
    next_starts = [*(span[0] for span in ordered), len(read.text)][1:]
    last_token = min(tokenizer.model_max_length, CONTEXT_LENGTH) - 2
    return tuple(
        _word(read, span, next_start, last_token) for span, next_start in zip(ordered, next_starts, strict=True)
    )


def _word(read: WeightedPrompt, span: list[int], next_start: int, last_token: int) -> Word:
    start, end, *tokens = span
    # The tokenizer's offsets leave out a combining mark that it composed; up to the next word only spaces may lie.
    end = max(end, start + len(read.text[start:next_start].rstrip()))
    lowered = "".join(c.lower() for c in unicodedata.normalize("NFC", read.text[start:end]))
    fed = tuple(t for t in tokens if t <= last_token)
    return Word(lowered, read.prompt_positions[start], read.prompt_positions[end - 1] + 1, fed, read.weights[start])


def diff(source_prompt: str, prompt: str, tokenizer: Tokenizer) -> EditScript:
    """What turns one prompt into the other, with the words whose attention shows where.

    Words are aligned by their longest common subsequence, in which one content word outweighs all stop words; changes
    with nothing but stop words and punctuation between them are one hunk. A word that stays and counts more or less is
    a change of its own. Only words that the text encoder reads count.

    Args:
        source_prompt: the text of the source.
        prompt: the text of the edit.
        tokenizer: a CLIPTokenizer.

    Returns:
        The script. Its kind is the hunks' common kind, MIXED for several, IDENTICAL for no hunk, and GLOBAL with a
        `reason` when the change has no place of its own: style, weather, time, scene, order, or punctuation alone.
    """
    old, new = (TaggedPrompt.of(words(text, tokenizer)) for text in (source_prompt, prompt))
    pairs = _align(old.words, new.words)
    hunks, reasons = [], []
    for span in _merge(_changes(pairs, old.words, new.words), old):
        removed, added = old.has_content(span.old), new.has_content(span.new)
        reasons.append(global_reason(old, span.old, added) or global_reason(new, span.new, removed))
        hunks.append(_hunk(old, new, dict(pairs), span, bool(reasons[-1])))
    kind, reason = _classify(old, new, hunks, reasons)
    if kind is EditKind.IDENTICAL and _beyond(source_prompt, tokenizer) != _beyond(prompt, tokenizer):
        reason = "only words beyond the text encoder's reach changed"
    return EditScript(source_prompt, prompt, kind, tuple(hunks), reason)


def _beyond(prompt: str, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    return [(w.text, w.weight) for w in words(prompt, tokenizer) if not w.tokens]


def _classify(old: TaggedPrompt, new: TaggedPrompt, hunks: list[Hunk], reasons: list[str]) -> tuple[EditKind, str]:
    if not hunks:
        return EditKind.IDENTICAL, ""
    localized = [hunk for hunk in hunks if hunk.focus_old or hunk.focus_new]
    reason = next(filter(None, reasons), "") or _whole_reason(old, new, localized)
    if reason:
        return EditKind.GLOBAL, reason
    kinds = {hunk.kind for hunk in localized}
    return (kinds.pop() if len(kinds) == 1 else EditKind.MIXED), ""


def _whole_reason(old: TaggedPrompt, new: TaggedPrompt, localized: list[Hunk]) -> str:
    if not localized:
        return "the change points at no thing"
    if not old.words or not new.words:
        return "one of the prompts is empty"
    before, after = ([w.text for w in s.having(*_NOT_PUNCTUATION)] for s in (old, new))
    reweighted = before == after
    if not reweighted and sorted(before) == sorted(after):
        return "the same words in another order"
    left, right = ({(w.text, w.weight if reweighted else 1) for w in s.having(WordClass.CONTENT)} for s in (old, new))
    things = max(len(focus) for hunk in localized for focus in (hunk.focus_old, hunk.focus_new))
    return "no word of the source prompt is left as it was" if not left & right and things > 2 else ""


@dataclass(frozen=True)
class _Change:
    """One change: word indices in the source prompt and in the new one; whether the words are the same, reweighted."""

    old: range
    new: range
    reweighted: bool = False


def _align(old: Sequence[Word], new: Sequence[Word]) -> list[tuple[int, int]]:
    """Index pairs of the heaviest common subsequence; of equals, the one that keeps most weights, and of those the one
    whose matches lie last."""

    def gain(i: int, j: int) -> int:
        a, b = old[i], new[j]
        matched = importance(a.text) * CONTEXT_LENGTH + (a.weight == b.weight)
        return matched * 2 * CONTEXT_LENGTH**2 + i + j if a.text == b.text else 0

    best = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i in range(len(old)):
        for j in range(len(new)):
            best[i + 1][j + 1] = max(best[i][j] + gain(i, j), best[i][j + 1], best[i + 1][j])
    pairs, i, j = [], len(old), len(new)
    while i and j:
        if best[i][j] == best[i - 1][j]:
            i -= 1
        elif best[i][j] == best[i][j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


def _changes(pairs: list[tuple[int, int]], old: Sequence[Word], new: Sequence[Word]) -> list[_Change]:
    spans, i, j = [], 0, 0
    for a, b in [*pairs, (len(old), len(new))]:
        if (i, j) != (a, b):
            spans.append(_Change(range(i, a), range(j, b)))
        i, j = a + 1, b + 1
        if a < len(old) and old[a].weight != new[b].weight:
            spans.append(_Change(range(a, i), range(b, j), reweighted=True))
    return spans


def _merge(spans: list[_Change], old: TaggedPrompt) -> list[_Change]:
    merged: list[_Change] = []
    for span in spans:
        first = merged.pop() if merged and _are_one(merged[-1], span, old) else span
        whole = range(first.old.start, span.old.stop), range(first.new.start, span.new.stop)
        merged.append(_Change(*whole, first.reweighted and span.reweighted))
    return merged


def _are_one(a: _Change, b: _Change, old: TaggedPrompt) -> bool:
    if old.has_content(range(a.old.stop, b.old.start)):
        return False
    # what becomes of stop words' weights beside a changed word is part of its change
    return a.reweighted == b.reweighted or not old.has_content(a.old if a.reweighted else b.old)


def _hunk(old: TaggedPrompt, new: TaggedPrompt, pairs: dict[int, int], span: _Change, everywhere: bool) -> Hunk:
    before = focus(old, span.old, new.has_content(span.new))
    after = focus(new, span.new, old.has_content(span.old))
    # a noun outside the change ("a [red] car") stands in both prompts
    back = {j: i for i, j in pairs.items()}
    before, after = before | {back[j] for j in after if j in back}, after | {pairs[i] for i in before if i in pairs}
    kind = EditKind.GLOBAL if everywhere else EditKind.REWEIGHT if span.reweighted else _kind(old, new, span)
    return Hunk(kind, old.pick(span.old), new.pick(span.new), old.pick(before), new.pick(after))


def _kind(old: TaggedPrompt, new: TaggedPrompt, span: _Change) -> EditKind:
    removed, added = old.has_content(span.old), new.has_content(span.new)
    if not removed and not added:  # small words or punctuation alone
        removed, added = bool(span.old), bool(span.new)
    return EditKind.REPLACE if removed and added else EditKind.INSERT if added else EditKind.DELETE
