"""Divides a long prompt into chunks that fit into a text encoder's context, as web UIs do.

A chunk has at most 75 tokens, and its embeddings follow those of the one before. The word BREAK begins a new chunk; a
full one ends behind its last comma if that is near, and never inside a word. Knows weighted prompts and a tokenizer's
call; no models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, pairwise, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fisedit.models.prompt_weighting import WeightedPrompt

CONTEXT_LENGTH = 77
"""Tokens that a CLIP text encoder reads, start and end token included."""

MAX_CHUNKS = 8
"""Chunks of a prompt that are read; what follows them is not."""

BREAK = "BREAK"
"""The word that begins a new chunk."""

_COMMA_REACH = 20  # a full chunk ends behind its last comma if that is one of so many last tokens
_VECTOR = re.compile(r"_[0-9]+$")
_BREAK = re.compile(rf"(?<!\S){BREAK}(?!\S)")


def context_length(tokenizer: Any) -> int:
    """Tokens of a chunk, start and end token included.

    Args:
        tokenizer: a CLIPTokenizer.
    """
    return int(min(tokenizer.model_max_length, CONTEXT_LENGTH))


def split_chunks(prompt: WeightedPrompt, tokenizer: Any) -> tuple[WeightedPrompt, ...]:
    """The parts of a prompt, one or more; the prompt itself where it fits. Those beyond `MAX_CHUNKS` are not read.

    Args:
        prompt: without the syntax of weights.
        tokenizer: a CLIPTokenizer.
    """
    room, chunks, prompt = context_length(tokenizer) - 2, [], _expand(prompt, added_tokens(tokenizer))
    for start, stop in _between_breaks(prompt.text):
        cuts = [start, *(start + cut for cut in _cuts(prompt.text[start:stop], tokenizer, room)), stop]
        chunks += [prompt.part(*span) for span in pairwise(cuts)]
    return tuple(chunks)


def added_tokens(tokenizer: Any) -> dict[str, tuple[str, ...]]:
    """Words that textual inversion added to a tokenizer -> the tokens of their vectors, the word itself first.

    Args:
        tokenizer: a CLIPTokenizer.
    """
    names = set(tokenizer.added_tokens_encoder) - set(tokenizer.all_special_tokens)
    words = {name for name in names if not ((end := _VECTOR.search(name)) and name[: end.start()] in names)}
    return {word: (word, *takewhile(names.__contains__, (f"{word}_{i}" for i in count(1)))) for word in words}


def _expand(prompt: WeightedPrompt, added: Mapping[str, tuple[str, ...]]) -> WeightedPrompt:
    """A prompt in which a word of several vectors is followed by the tokens of the others."""
    several = sorted((word for word, tokens in added.items() if len(tokens) > 1), key=len, reverse=True)
    if not several:
        return prompt
    text, sources, at = "", list[int](), 0  # of every character its index in the prompt as it was
    for found in re.finditer("|".join(map(re.escape, several)), prompt.text, re.IGNORECASE):
        more, end = "".join(f" {token}" for token in added[found[0].lower()][1:]), found.end()
        text += prompt.text[at:end] + more
        sources += [*range(at, end), *[end - 1] * len(more)]
        at = end
    text, sources = text + prompt.text[at:], [*sources, *range(at, len(prompt.text))]
    positions, weights = tuple(prompt.prompt_positions[i] for i in sources), tuple(prompt.weights[i] for i in sources)
    return replace(prompt, text=text, prompt_positions=positions, weights=weights)


def _between_breaks(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for found in _BREAK.finditer(text):
        yield start, found.start()
        start = found.end()
    yield start, len(text)


def _cuts(text: str, tokenizer: Any, room: int) -> list[int]:
    """Where all chunks but the first begin."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    words: dict[int, list[int]] = {}  # index -> first character, number of tokens
    for word, (start, _) in zip(encoded.word_ids(), encoded["offset_mapping"], strict=True):
        words.setdefault(word, [start, 0])[1] += 1
    spans, cuts, first, comma = list(words.values()), list[int](), 0, -1
    for i, (start, _) in enumerate(spans):
        is_comma = text[start] == ","
        if i > first and _tokens(spans[first : i + 1]) > room:
            behind_comma = first <= comma and not is_comma and _tokens(spans[comma:i]) <= _COMMA_REACH
            first = comma + 1 if behind_comma else i
            cuts.append(spans[first][0])
        if is_comma:
            comma = i
    return cuts


def _tokens(spans: list[list[int]]) -> int:
    return sum(size for _, size in spans)
