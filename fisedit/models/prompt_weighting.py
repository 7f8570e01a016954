r"""Weights inside a prompt, as Automatic1111's web UI writes them, and the embeddings that they make.

`(cat:1.4)` counts 1.4 times, `(cat)` 1.1 times, `[cat]` 1/1.1 times; nested ones multiply. So "a cat (smiling)" weighs
its last word. `\(`, `\)`, `\[`, `\]` and `\\` are the characters themselves, and a bracket without its partner is
itself too: every string can be read. Knows text and, for embeddings, a pipeline's text encoder; compel weighs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor

STRONGER = 1.1
"""What a pair of round brackets multiplies by; square ones divide by it."""

LIMIT = 10.0
"""The greatest weight; the least is 0, and what lies beyond is brought back."""

_CLOSING = {"(": ")", "[": "]"}
_NUMBER = r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)"
_MARK = re.compile(rf"\\[\\()\[\]]|:\s*({_NUMBER})\s*\)|[()\[\]]")
_START = "<|startoftext|>"
_NOTHING = 1e-9  # has a logarithm, and is rounded to 0


@dataclass(frozen=True)
class Weighted:
    """A prompt without its syntax.

    Args:
        text: what the text encoder reads, with spaces for the brackets and numbers.
        typed: for every character of `text`, its index in the prompt as it was typed.
        weights: for every character of `text`, how much it counts, 0 to `LIMIT`.
    """

    text: str
    typed: tuple[int, ...]
    weights: tuple[float, ...]

    def fragments(self, tokenizer: Any) -> list[tuple[str, float]]:
        """The text in pieces of equal weight, each of one token or more; what a CLIPTokenizer truncates is no reason to
        begin another."""
        encoded = tokenizer(self.text, truncation=True, return_offsets_mapping=True, verbose=False)
        starts = (start for start, _ in encoded["offset_mapping"][1:-1])
        runs = [(next(run), weight) for weight, run in groupby(starts, self.weights.__getitem__)]
        ends = [*(start for start, _ in runs), len(self.text)][1:]
        return [(self.text[start:end], weight) for (start, weight), end in zip(runs, ends, strict=False)]


def parse(prompt: str) -> Weighted:
    """Read a prompt's weights. Lone surrogates, which are no text to a tokenizer, become U+FFFD."""
    chars, steps = list(re.sub("[\ud800-\udfff]", "\ufffd", prompt)), [0.0] * (len(prompt) + 1)
    opened: dict[str, list[int]] = {closing: [] for closing in _CLOSING.values()}
    for mark in _MARK.finditer(prompt):
        start, end, closing = mark.start(), mark.end(), mark[0][-1]
        if mark[0].startswith("\\"):
            chars[start] = ""
        elif closing in _CLOSING:
            opened[_CLOSING[closing]].append(start)
        elif opened[closing]:
            begin = opened[closing].pop()
            chars[begin], chars[start:end] = " ", " " * (end - start)
            factor = float(mark[1]) if mark[1] else STRONGER if closing == ")" else 1 / STRONGER
            step = math.log(min(max(factor, _NOTHING), LIMIT))
            steps[begin] += step
            steps[start] -= step
    weights = [round(math.exp(min(total, math.log(LIMIT))), 4) for total in accumulate(steps)]  # 1.1 / 1.1 is 1
    typed = tuple(i for i, char in enumerate(chars) if char)
    text = "".join(chars)
    if any(weight != 1 for weight in weights):  # compel looks for the first fragment from its own start token on
        text = text.replace(_START, " " * len(_START))
    return Weighted(text, typed, tuple(weights[i] for i in typed))


def embeddings(prompt: Weighted, pipe: StableDiffusionPipeline) -> Tensor | None:
    """What compel makes of the weights: [1, T, D], like the pipeline's own; None where every token that is read has
    weight 1, for then the pipeline's own are right.

    Above 1, a token's embedding is moved away from the empty prompt's; below 1, the whole prompt's also towards that of
    the prompt with the token masked.
    """
    fragments = prompt.fragments(pipe.tokenizer)
    if all(weight == 1 for _, weight in fragments):
        return None
    from compel import EmbeddingsProvider

    texts, weights = (list(column) for column in zip(*fragments, strict=True))
    provider, device = EmbeddingsProvider(pipe.tokenizer, pipe.text_encoder), pipe.text_encoder.device
    made: Tensor = provider.get_embeddings_for_weighted_prompt_fragments([texts], [weights], device=device)
    return made
