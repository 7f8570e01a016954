r"""Parses weights inside a prompt in the syntax of Automatic1111's web UI.

`(cat:1.4)` has weight 1.4, `(cat)` 1.1, `[cat]` 1/1.1; nested weights multiply. So "a cat (smiling)" weights its last
word. `\(`, `\)`, `\[`, `\]`, `\{`, `\}` and `\\` are the characters themselves, and so is an unpaired bracket: every
string is valid. Knows text and a tokenizer's call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from fisedit.prompts.syntax import blank_tags, shorten

BRACKET_WEIGHT = 1.1
"""Factor of a pair of round brackets; square ones divide by it."""

MAX_WEIGHT = 10.0
"""Greatest weight; the least is 0, and weights outside are clamped, which is told."""

_CLOSING = {"(": ")", "[": "]"}
_NUMBER = r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)"
_MARK = re.compile(rf"\\[\\()\[\]{{}}]|:\s*({_NUMBER})\s*\)|[()\[\]]")
_START = "<|startoftext|>"
_MIN_WEIGHT = 1e-9  # has a logarithm, and is rounded to 0
_MAX_LOG = math.log(MAX_WEIGHT)
_MAX_CLAMPED = 8


@dataclass(frozen=True)
class WeightedPrompt:
    """A prompt without its syntax.

    Args:
        text: Input of the text encoder, with spaces in place of brackets and numbers.
        prompt_positions: Index of every character of `text` in the prompt as given.
        weights: Weight of every character of `text`, 0 to `MAX_WEIGHT`.
        clamped: Parts of the prompt as given that ask for a weight outside, each once.
    """

    text: str
    prompt_positions: tuple[int, ...]
    weights: tuple[float, ...]
    clamped: tuple[str, ...] = ()

    def part(self, start: int, stop: int) -> WeightedPrompt:
        """Characters [start, stop) of `text` as a prompt of their own."""
        span = slice(start, stop)
        return WeightedPrompt(self.text[span], self.prompt_positions[span], self.weights[span])

    def fragments(self, tokenizer: Any) -> list[tuple[str, float]]:
        """The text in pieces of equal weight, each of one or more tokens that a CLIPTokenizer does not truncate."""
        encoded = tokenizer(self.text, truncation=True, return_offsets_mapping=True, verbose=False)
        starts = (start for start, _ in encoded["offset_mapping"][1:-1])
        runs = [(next(run), weight) for weight, run in groupby(starts, self.weights.__getitem__)]
        ends = [*(start for start, _ in runs), len(self.text)][1:]
        return [(self.text[start:end], weight) for (start, weight), end in zip(runs, ends, strict=False)]


def parse(prompt: str) -> WeightedPrompt:
    """Parse a prompt's weights. Lone surrogates, which a tokenizer refuses, become U+FFFD, and tags of LoRAs spaces."""
    prompt = blank_tags(prompt)
    chars, steps = list(re.sub("[\ud800-\udfff]", "\ufffd", prompt)), [0.0] * (len(prompt) + 1)
    opened: dict[str, list[int]] = {closing: [] for closing in _CLOSING.values()}
    clamped: list[str] = []
    for mark in _MARK.finditer(prompt):
        start, end, closing = mark.start(), mark.end(), mark[0][-1]
        if mark[0].startswith("\\"):
            chars[start] = ""
        elif closing in _CLOSING:
            opened[_CLOSING[closing]].append(start)
        elif opened[closing]:
            begin = opened[closing].pop()
            chars[begin], chars[start:end] = " ", " " * (end - start)
            factor = float(mark[1]) if mark[1] else BRACKET_WEIGHT if closing == ")" else 1 / BRACKET_WEIGHT
            if not 0 <= factor <= MAX_WEIGHT:
                clamped.append(prompt[begin:end])
            step = math.log(min(max(factor, _MIN_WEIGHT), MAX_WEIGHT))
            steps[begin] += step
            steps[start] -= step
    totals = list(accumulate(steps))
    weights = [round(math.exp(min(total, _MAX_LOG)), 4) for total in totals]  # 1.1 / 1.1 is 1
    nested = _runs(total > _MAX_LOG + _MIN_WEIGHT for total in totals)
    clamped += filter(None, ("".join(chars[start:end]).strip() for start, end in nested))
    prompt_positions = tuple(i for i, char in enumerate(chars) if char)
    text = "".join(chars)
    if any(weight != 1 for weight in weights):  # compel looks for the first fragment from its own start token on
        text = text.replace(_START, " " * len(_START))
    parts = tuple(dict.fromkeys(clamped[:_MAX_CLAMPED]))
    return WeightedPrompt(text, prompt_positions, tuple(weights[i] for i in prompt_positions), parts)


def clamped_notes(prompt: WeightedPrompt, name: str = "prompt") -> tuple[str, ...]:
    """Return notes on weights that are clamped.

    Args:
        prompt: The parsed prompt.
        name: For the notes.
    """
    why = f"whose weight is not in [0, {MAX_WEIGHT:g}], and is taken as the nearest number there"
    return tuple(f"the {name} has {shorten(part)}, {why}" for part in prompt.clamped)


def _runs(flags: Iterable[bool]) -> list[tuple[int, int]]:
    """Return the runs in which flags are set without a gap, each [start, end)."""
    runs = [[i for i, _ in run] for is_set, run in groupby(enumerate(flags), lambda each: each[1]) if is_set]
    return [(run[0], run[-1] + 1) for run in runs]
