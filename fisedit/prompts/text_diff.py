"""The words that an edit changes, and the nouns that show where: a prompt pair becomes an `EditScript`.

Pure text. It knows CLIP's tokenizer by its call alone, and neither models, attention, nor pictures; word classes are
`word_classes`'s. Every pair of strings gives a script. Prompt-to-prompt (arXiv 2208.01626) and its successors
are told the changed words; here they are found.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from fisedit.prompts.chunks import MAX_CHUNKS, WordSpan, context_length, split_chunks, word_spans
from fisedit.prompts.weighting import WeightedPrompt, parse
from fisedit.prompts.whole_picture import background_text, global_reason
from fisedit.prompts.word_classes import TaggedPrompt, WordClass, focus, importance
from fisedit.values import EditKind, EditScript, Hunk, Word

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NOT_PUNCTUATION = (WordClass.STOP, WordClass.VERB, WordClass.CONTENT)


JOINING = frozenset({",", ";", "&", "and", "or"})
"""Words and marks that join the things of a list."""


class Tokenizer(Protocol):
    """The protocol of a tokenizer; `transformers.CLIPTokenizer` fits, with any vocabulary."""

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
    length = context_length(tokenizer)
    return tuple(
        word
        for i, chunk in enumerate(split_chunks(parse(prompt), tokenizer))
        for word in _words_of_chunk(chunk, tokenizer, range(i * length, (i + 1) * length - 1 if i < MAX_CHUNKS else 0))
    )


def _words_of_chunk(chunk: WeightedPrompt, tokenizer: Tokenizer, positions: range) -> Iterator[Word]:
    """The words of a part of a prompt, whose tokens stand behind a start token at `positions`."""
    first = positions.start + 1
    for span in word_spans(chunk, tokenizer):
        tokens = range(first, first + span.tokens)
        yield _word(chunk, span, tuple(token for token in tokens if token in positions))
        first += span.tokens


def _word(parsed: WeightedPrompt, span: WordSpan, tokens: tuple[int, ...]) -> Word:
    # The tokenizer's offsets leave out a combining mark that it composed; up to the next word only spaces may lie.
    start, end = span.start, max(span.stop, span.start + len(parsed.text[span.start : span.limit].rstrip()))
    lower_text = "".join(c.lower() for c in unicodedata.normalize("NFC", parsed.text[start:end]))
    return Word(
        lower_text,
        parsed.prompt_positions[start],
        parsed.prompt_positions[end - 1] + 1,
        tokens,
        parsed.weights[start],
    )


def diff(source_prompt: str, prompt: str, tokenizer: Tokenizer) -> EditScript:
    """Compare two prompts: find the changed words, with those whose attention shows where.

    Words are aligned by their longest common subsequence. One content word outweighs all stop words in it. Changes with
    nothing but stop words and punctuation between them are one hunk. A word that stays and counts more or less is a
    change of its own. Only words that the text encoder reads count.

    Args:
        source_prompt: the text of the source.
        prompt: the text of the edit.
        tokenizer: a CLIPTokenizer.

    Returns:
        The script. Its kind is the hunks' common kind, MIXED for several, IDENTICAL for no hunk, and GLOBAL with a
        `reason` when the change has no place of its own: style, weather, time, scene, order, or punctuation alone.
    """
    old, new = (TaggedPrompt.from_words(words(text, tokenizer)) for text in (source_prompt, prompt))
    pairs = _align(old.words, new.words)
    hunks, reasons = [], []
    for span in _merge(_changes(pairs, old.words, new.words), old):
        removed, added = old.has_content(span.old), new.has_content(span.new)
        reasons.append(global_reason(old, span.old, added) or global_reason(new, span.new, removed))
        hunks.append(_hunk(old, new, dict(pairs), span, bool(reasons[-1])))
    if not all(map(_joins, hunks)):
        hunks = [replace(hunk, focus_old=(), focus_new=()) if _joins(hunk) else hunk for hunk in hunks]
    kind, reason = _classify(old, new, hunks, reasons)
    if kind is EditKind.IDENTICAL and _truncated_words(source_prompt, tokenizer) != _truncated_words(prompt, tokenizer):
        reason = "only words beyond the text encoder's reach changed"
    return EditScript(source_prompt, prompt, kind, tuple(hunks), reason)


def removes_objects(script: EditScript) -> bool:
    """Return whether a prompt lacks things that the other names, and says nothing else.

    Of "a red car" "a car" does not: it lacks no thing.
    """
    removed = [hunk for hunk in script.hunks if hunk.focus_old]
    named = all({*hunk.focus_old} <= {*hunk.old} and not hunk.focus_new for hunk in script.hunks)
    return script.kind is EditKind.DELETE and bool(removed) and named


def adds_words(script: EditScript) -> bool:
    """Return whether a prompt has words that the other lacks, but for those that join the things of a list."""
    return any(word.text not in JOINING for hunk in script.hunks for word in hunk.new)


def background_prompt(script: EditScript, tokenizer: Tokenizer) -> str:
    """Return what a script's new prompt says of the whole picture; see `whole_picture.background_text`."""
    return background_text(TaggedPrompt.from_words(words(script.prompt, tokenizer)))


def _truncated_words(prompt: str, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    return [(w.text, w.weight) for w in words(prompt, tokenizer) if not w.tokens]


def _classify(old: TaggedPrompt, new: TaggedPrompt, hunks: list[Hunk], reasons: list[str]) -> tuple[EditKind, str]:
    if not hunks:
        return EditKind.IDENTICAL, ""
    localized = [hunk for hunk in hunks if hunk.focus_old or hunk.focus_new]
    reason = next(filter(None, reasons), "") or _script_global_reason(old, new, localized)
    if reason:
        return EditKind.GLOBAL, reason
    kinds = {hunk.kind for hunk in localized}
    return (kinds.pop() if len(kinds) == 1 else EditKind.MIXED), ""


def _script_global_reason(old: TaggedPrompt, new: TaggedPrompt, localized: list[Hunk]) -> str:
    if not localized:
        return "the change points at no thing"
    if not old.words or not new.words:
        return "one of the prompts is empty"
    old_text, new_text = ([w.text for w in s.with_class(*_NOT_PUNCTUATION)] for s in (old, new))
    reweighted = old_text == new_text
    if not reweighted and sorted(old_text) == sorted(new_text):
        return "the same words in another order"
    old_content, new_content = (
        {(w.text, w.weight if reweighted else 1) for w in s.with_class(WordClass.CONTENT)} for s in (old, new)
    )
    num_focus_words = max(len(focus) for hunk in localized for focus in (hunk.focus_old, hunk.focus_new))
    return (
        "no word of the source prompt is left as it was"
        if not old_content & new_content and num_focus_words > 2
        else ""
    )


@dataclass(frozen=True)
class _Change:
    """One change: word indices in the source prompt and in the new one; whether the words are the same, reweighted."""

    old: range
    new: range
    reweighted: bool = False


def _align(old: Sequence[Word], new: Sequence[Word]) -> list[tuple[int, int]]:
    """Index pairs of the heaviest common subsequence; of equals, the one that keeps most weights, and of those the one
    whose matches lie last."""
    weights = [importance(word.text) for word in old]
    more = len(old) + len(new) + 1  # than there are words that can be kept
    last = more**2  # more than all indices of what is kept add up to

    def gain(i: int, j: int) -> int:
        a, b = old[i], new[j]
        if a.text != b.text:
            return 0
        return (weights[i] * more + (a.weight == b.weight)) * last + i + j

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
        first = merged.pop() if merged and _can_merge(merged[-1], span, old) else span
        ranges = range(first.old.start, span.old.stop), range(first.new.start, span.new.stop)
        merged.append(_Change(*ranges, first.reweighted and span.reweighted))
    return merged


def _can_merge(a: _Change, b: _Change, old: TaggedPrompt) -> bool:
    if old.has_content(range(a.old.stop, b.old.start)):
        return False
    # what becomes of stop words' weights beside a changed word is part of its change
    return a.reweighted == b.reweighted or not old.has_content(a.old if a.reweighted else b.old)


def _hunk(old: TaggedPrompt, new: TaggedPrompt, pairs: dict[int, int], span: _Change, is_global: bool) -> Hunk:
    old_focus = focus(old, span.old, new.has_content(span.new))
    new_focus = focus(new, span.new, old.has_content(span.old))
    # a noun outside the change ("a [red] car") stands in both prompts
    old_of_new = {j: i for i, j in pairs.items()}
    old_focus, new_focus = (
        old_focus | {old_of_new[j] for j in new_focus if j in old_of_new},
        new_focus | {pairs[i] for i in old_focus if i in pairs},
    )
    kind = EditKind.GLOBAL if is_global else EditKind.REWEIGHT if span.reweighted else _kind(old, new, span)
    return Hunk(kind, old.words_at(span.old), new.words_at(span.new), old.words_at(old_focus), new.words_at(new_focus))


def _joins(hunk: Hunk) -> bool:
    """Return whether a change is of words alone that join a list, as where one of its things was taken away."""
    return all(word.text in JOINING for word in (*hunk.old, *hunk.new))


def _kind(old: TaggedPrompt, new: TaggedPrompt, span: _Change) -> EditKind:
    removed, added = old.has_content(span.old), new.has_content(span.new)
    if not removed and not added:  # small words or punctuation alone
        removed, added = bool(span.old), bool(span.new)
    return EditKind.REPLACE if removed and added else EditKind.INSERT if added else EditKind.DELETE
