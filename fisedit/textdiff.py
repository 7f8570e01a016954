"""Which words an edit changes, and which nouns show where: a prompt pair becomes an `EditScript`.

Pure text. It knows CLIP's tokenizer by its call alone, and neither models, attention, nor pictures; what a word means
is `grammar`'s business. Every pair of strings gives a script. Prompt-to-prompt (arXiv 2208.01626) and its successors
are told the changed words; here they are found.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fisedit.grammar import Role, Sentence, focus, placeless, weight
from fisedit.values import EditKind, EditScript, Hunk, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT_LENGTH = 77
"""Tokens that a CLIP text encoder reads, start and end token included."""

_SPOKEN = (Role.STOP, Role.VERB, Role.CONTENT)


class Tokenizer(Protocol):
    """What is asked of a tokenizer; `transformers.CLIPTokenizer` fits, with any vocabulary."""

    model_max_length: int

    def __call__(self, text: str, **options: Any) -> Any:
        """A BatchEncoding: token ids, character offsets, `word_ids()`."""


def words(prompt: str, tokenizer: Tokenizer) -> tuple[Word, ...]:
    """The words of a prompt as CLIP splits them: lower-cased runs of letters, single digits, runs of punctuation.

    Args:
        prompt: any text.
        tokenizer: a CLIPTokenizer; its own splitting decides, so that tokens and words always agree.

    Returns:
        The words in order, with characters [start, end) of `prompt` and token positions (the first word's is 1). Words
        beyond the text encoder's reach have no tokens.
    """
    text = re.sub("[\ud800-\udfff]", "\ufffd", prompt)  # lone surrogates are no text to the tokenizer
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans: dict[int, list[int]] = {}  # word -> [start, end, token, token, ...]
    for token, (word, (start, end)) in enumerate(zip(encoded.word_ids(), encoded["offset_mapping"], strict=True), 1):
        spans.setdefault(word, [start, end])[1] = end
        spans[word].append(token)
    ordered = list(spans.values())
    follows = [*(span[0] for span in ordered), len(text)][1:]
    reach = min(tokenizer.model_max_length, CONTEXT_LENGTH) - 2
    return tuple(_word(text, span, follow, reach) for span, follow in zip(ordered, follows, strict=True))


def _word(text: str, span: list[int], follow: int, reach: int) -> Word:
    start, end, *tokens = span
    # The tokenizer's offsets leave out a combining mark that it composed; up to the next word only spaces may lie.
    end = max(end, start + len(text[start:follow].rstrip()))
    lowered = "".join(c.lower() for c in unicodedata.normalize("NFC", text[start:end]))
    return Word(lowered, start, end, tuple(t for t in tokens if t <= reach))


def diff(source_prompt: str, prompt: str, tokenizer: Tokenizer) -> EditScript:
    """What turns one prompt into the other, with the words whose attention shows where.

    Words are aligned by their longest common subsequence, in which one telling word outweighs all stop words; changes
    with nothing but stop words and punctuation between them are one hunk. Only words that the text encoder reads count.

    Args:
        source_prompt: the text of the source.
        prompt: the text of the edit.
        tokenizer: a CLIPTokenizer.

    Returns:
        The script. Its kind is the hunks' common kind, MIXED for several, IDENTICAL for no hunk, and GLOBAL with a
        `reason` when the change has no place of its own: style, weather, time, scene, order, or punctuation alone.
    """
    old, new = (Sentence.of(words(text, tokenizer)) for text in (source_prompt, prompt))
    pairs = _align([w.text for w in old.words], [w.text for w in new.words])
    hunks, reasons = [], []
    for span in _merge(_changes(pairs, len(old.words), len(new.words)), old):
        reasons.append(placeless(old, span.old) or placeless(new, span.new))
        hunks.append(_hunk(old, new, dict(pairs), span, bool(reasons[-1])))
    kind, reason = _classify(old, new, hunks, reasons)
    if kind is EditKind.IDENTICAL and _beyond(source_prompt, tokenizer) != _beyond(prompt, tokenizer):
        reason = "only words beyond the text encoder's reach changed"
    return EditScript(source_prompt, prompt, kind, tuple(hunks), reason)


def _beyond(prompt: str, tokenizer: Tokenizer) -> list[str]:
    return [w.text for w in words(prompt, tokenizer) if not w.tokens]


def _classify(old: Sentence, new: Sentence, hunks: list[Hunk], reasons: list[str]) -> tuple[EditKind, str]:
    if not hunks:
        return EditKind.IDENTICAL, ""
    pointed = [hunk for hunk in hunks if hunk.focus_old or hunk.focus_new]
    reason = next(filter(None, reasons), "") or _whole_reason(old, new, pointed)
    if reason:
        return EditKind.GLOBAL, reason
    kinds = {hunk.kind for hunk in pointed}
    return (kinds.pop() if len(kinds) == 1 else EditKind.MIXED), ""


def _whole_reason(old: Sentence, new: Sentence, pointed: list[Hunk]) -> str:
    if not pointed:
        return "the change points at no thing"
    if not old.words or not new.words:
        return "one of the prompts is empty"
    if old.count(*_SPOKEN) == new.count(*_SPOKEN):
        return "the same words in another order"
    kept = old.count(Role.CONTENT) & new.count(Role.CONTENT)
    things = max(len(focus) for hunk in pointed for focus in (hunk.focus_old, hunk.focus_new))
    return "no word of the source prompt is left" if not kept and things > 2 else ""


@dataclass(frozen=True)
class _Span:
    """One change: word indices in the source prompt and in the new one."""

    old: range
    new: range


def _align(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Index pairs of the heaviest common subsequence; of equals, the one whose matches lie last."""
    best = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i, a in enumerate(old):
        for j, b in enumerate(new):
            best[i + 1][j + 1] = best[i][j] + weight(a) if a == b else max(best[i][j + 1], best[i + 1][j])
    pairs, i, j = [], len(old), len(new)
    while i and j:
        if old[i - 1] == new[j - 1]:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif best[i - 1][j] >= best[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def _changes(pairs: list[tuple[int, int]], n: int, m: int) -> list[_Span]:
    spans, i, j = [], 0, 0
    for a, b in [*pairs, (n, m)]:
        if (i, j) != (a, b):
            spans.append(_Span(range(i, a), range(j, b)))
        i, j = a + 1, b + 1
    return spans


def _merge(spans: list[_Span], old: Sentence) -> list[_Span]:
    merged: list[_Span] = []
    for span in spans:
        first = span
        if merged and not old.tells(range(merged[-1].old.stop, span.old.start)):
            first = merged.pop()
        merged.append(_Span(range(first.old.start, span.old.stop), range(first.new.start, span.new.stop)))
    return merged


def _hunk(old: Sentence, new: Sentence, pairs: dict[int, int], span: _Span, everywhere: bool) -> Hunk:
    before = focus(old, span.old, new.tells(span.new))
    after = focus(new, span.new, old.tells(span.old))
    # a noun outside the change ("a [red] car") stands in both prompts
    back = {j: i for i, j in pairs.items()}
    before, after = before | {back[j] for j in after if j in back}, after | {pairs[i] for i in before if i in pairs}
    kind = EditKind.GLOBAL if everywhere else _kind(old, new, span)
    return Hunk(kind, old.pick(span.old), new.pick(span.new), old.pick(before), new.pick(after))


def _kind(old: Sentence, new: Sentence, span: _Span) -> EditKind:
    gone, come = old.tells(span.old), new.tells(span.new)
    if not gone and not come:  # small words or punctuation alone
        gone, come = bool(span.old), bool(span.new)
    return EditKind.REPLACE if gone and come else EditKind.INSERT if come else EditKind.DELETE
