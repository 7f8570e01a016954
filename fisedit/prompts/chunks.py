"""Divides a long prompt into chunks that fit into a text encoder's context, as web UIs do.

A chunk has at most 75 tokens, and its embeddings follow those of the one before. The word BREAK begins a new chunk; a
full one ends behind its last comma if that is near, and never inside a word. Knows weighted prompts and a tokenizer's
call; no models.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, pairwise, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fisedit.prompts.weighting import WeightedPrompt

CONTEXT_LENGTH = 77
"""Tokens that a CLIP text encoder reads, start and end token included."""

MAX_CHUNKS = 8
"""Chunks of a prompt that are read; what follows them is not."""

BREAK = "BREAK"
"""The word that begins a new chunk."""

_COMMA_REACH = 20  # a full chunk ends behind its last comma if that is one of so many last tokens
_UNSEEN = ("Zs", "Zl", "Zp", "Cc", "Cf")  # Unicode's categories of spaces, controls and formats
_VECTOR = re.compile(r"_[0-9]+$")
_BREAK = re.compile(rf"\b{BREAK}\b")


@dataclass(frozen=True)
class WordSpan:
    """A word of a chunk.

    Args:
        start: its first character in the text.
        stop: behind its last one, as the tokenizer says.
        limit: where the next word begins, or its further vectors do.
        tokens: how many the tokenizer makes of it; of a textual inversion one for each vector.
    """

    start: int
    stop: int
    limit: int
    tokens: int


def context_length(tokenizer: Any) -> int:
    """Tokens of a chunk, start and end token included.

    Args:
        tokenizer: a CLIPTokenizer.
    """
    return int(min(tokenizer.model_max_length, CONTEXT_LENGTH))


def split_chunks(prompt: WeightedPrompt, tokenizer: Any) -> tuple[WeightedPrompt, ...]:
    """The parts of a prompt, one or more; the prompt itself where it fits.

    Args:
        prompt: without the syntax of weights.
        tokenizer: a CLIPTokenizer.

    Returns:
        At most `MAX_CHUNKS`, and behind them one with all that is not read.
    """
    room, prompt = context_length(tokenizer) - 2, _expand(prompt, added_tokens(tokenizer))
    chunks: list[WeightedPrompt] = []
    for start, stop in _between_breaks(prompt.text):
        segment = prompt.part(start, stop)
        cuts = [0, *_cuts(segment, tokenizer, room), stop - start]
        for begin, end in pairwise(cuts):
            if len(chunks) == MAX_CHUNKS:
                return (*chunks, prompt.part(start + begin, len(prompt.text)))
            chunks.append(segment.part(begin, end))
    return tuple(chunks)


def says_nothing(prompt: WeightedPrompt) -> bool:
    """Return whether nothing is left of a prompt but BREAK, spaces and invisible letters.

    Args:
        prompt: without the syntax of weights.
    """
    return all(unicodedata.category(sign) in _UNSEEN for sign in _BREAK.sub("", prompt.text))


def is_cut_off(chunk: WeightedPrompt, tokenizer: Any) -> bool:
    """Return whether a chunk of `split_chunks` holds a word of more tokens than a chunk has, whose end is not read.

    Args:
        chunk: A chunk of a prompt.
        tokenizer: a CLIPTokenizer.
    """
    return _tokens(word_spans(chunk, tokenizer)) > context_length(tokenizer) - 2


def word_spans(chunk: WeightedPrompt, tokenizer: Any) -> list[WordSpan]:
    """The words of a chunk of `split_chunks`, in order.

    Args:
        chunk: A chunk of a prompt.
        tokenizer: a CLIPTokenizer.
    """
    encoded = tokenizer(chunk.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    found: dict[int, list[int]] = {}  # index -> start, stop, tokens
    for word, (start, stop) in zip(encoded.word_ids(), encoded["offset_mapping"], strict=True):
        span = found.setdefault(word, [start, stop, 0])
        span[1:] = stop, span[2] + 1
    merged: list[WordSpan] = []
    positions, limits = chunk.prompt_positions, [*(start for start, *_ in found.values()), len(chunk.text)][1:]
    for (start, stop, tokens), limit in zip(found.values(), limits, strict=True):
        if merged and positions[start] <= positions[merged[-1].stop - 1]:  # a further vector of the word before
            merged[-1] = replace(merged[-1], tokens=merged[-1].tokens + tokens)
        else:
            merged.append(WordSpan(start, stop, limit, tokens))
    return merged


def added_tokens(tokenizer: Any) -> dict[str, tuple[str, ...]]:
    """Words that textual inversion added to a tokenizer -> the tokens of their vectors, the word itself first.

    Args:
        tokenizer: a CLIPTokenizer.
    """
    names = set(tokenizer.added_tokens_encoder) - set(tokenizer.all_special_tokens)
    words = {name for name in names if not ((end := _VECTOR.search(name)) and name[: end.start()] in names)}
    return {word: (word, *takewhile(names.__contains__, (f"{word}_{i}" for i in count(1)))) for word in words}


def _expand(prompt: WeightedPrompt, added: Mapping[str, tuple[str, ...]]) -> WeightedPrompt:
    """Return a prompt in which a word of several vectors is followed by the tokens of the others.

    The word is also found inside another word, since the tokenizer finds it there too.
    """
    tokens = {word.lower(): tokens for word, tokens in added.items()}
    if all(len(each) == 1 for each in tokens.values()):
        return prompt
    text, sources, at = "", list[int](), 0  # of every character its index in the prompt as it was
    longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
    for found in re.finditer("|".join(longest_first), prompt.text, re.IGNORECASE):
        more, end = "".join(f" {token}" for token in tokens.get(found[0].lower(), ())[1:]), found.end()
        text += prompt.text[at:end] + more
        sources += [*range(at, end), *[end - 1] * len(more)]
        at = end
    text, sources = text + prompt.text[at:], [*sources, *range(at, len(prompt.text))]
    positions, weights = tuple(prompt.prompt_positions[i] for i in sources), tuple(prompt.weights[i] for i in sources)
    return replace(prompt, text=text, prompt_positions=positions, weights=weights)


def _between_breaks(text: str) -> Iterator[tuple[int, int]]:
    """[start, stop) of what stands between BREAKs; behind the last one only if there is something."""
    start = 0
    for found in _BREAK.finditer(text):
        yield start, found.start()
        start = found.end()
    if not start or text[start:].strip():
        yield start, len(text)


def _cuts(segment: WeightedPrompt, tokenizer: Any, room: int) -> list[int]:
    """Return the index at which every chunk but the first begins."""
    spans, cuts, first, comma, used = word_spans(segment, tokenizer), list[int](), 0, -1, 0
    for i, span in enumerate(spans):
        is_comma = segment.text[span.start] == ","
        if i > first and used + span.tokens > room:
            behind_comma = first <= comma and not is_comma and _tokens(spans[comma:i]) <= _COMMA_REACH
            first = comma + 1 if behind_comma else i
            used = _tokens(spans[first:i])
            cuts.append(spans[first].start)
        used += span.tokens
        if is_comma:
            comma = i
    return cuts


def _tokens(spans: list[WordSpan]) -> int:
    return sum(span.tokens for span in spans)
