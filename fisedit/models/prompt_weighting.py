r"""Parses weights inside a prompt in the syntax of Automatic1111's web UI, and computes weighted embeddings.

`(cat:1.4)` has weight 1.4, `(cat)` 1.1, `[cat]` 1/1.1; nested weights multiply. So "a cat (smiling)" weights its last
word. `\(`, `\)`, `\[`, `\]` and `\\` are the characters themselves, and so is an unpaired bracket: every
string is valid. Knows text and, for embeddings, a pipeline's text encoder; compel applies the weights.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

from fisedit.errors import InputError

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor

BRACKET_WEIGHT = 1.1
"""Factor of a pair of round brackets; square ones divide by it."""

MAX_WEIGHT = 10.0
"""Greatest weight; the least is 0, and weights outside are clamped."""

_CLOSING = {"(": ")", "[": "]"}
_NUMBER = r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)"
_MARK = re.compile(rf"\\[\\()\[\]]|:\s*({_NUMBER})\s*\)|[()\[\]]")
_START = "<|startoftext|>"
_MIN_WEIGHT = 1e-9  # has a logarithm, and is rounded to 0


@dataclass(frozen=True)
class WeightedPrompt:
    """A prompt without its syntax.

    Args:
        text: Input of the text encoder, with spaces in place of brackets and numbers.
        prompt_positions: Index of every character of `text` in the prompt as given.
        weights: Weight of every character of `text`, 0 to `MAX_WEIGHT`.
    """

    text: str
    prompt_positions: tuple[int, ...]
    weights: tuple[float, ...]

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


class ShortenedEncoder:
    """A text encoder without its last layers, as compel and diffusers call it; the final norm stays.

    Args:
        encoder: A CLIPTextModel.
        skipped: Number of layers that are left out, 1 or more.

    Raises:
        InputError: It has too few layers.
    """

    def __init__(self, encoder: Any, skipped: int) -> None:
        layers = int(encoder.config.num_hidden_layers)
        if skipped >= layers:
            raise InputError(f"clip_skip must leave a layer of the text encoder's {layers}, got {skipped}")
        self._encoder, self._skipped, self.device, self.dtype = encoder, skipped, encoder.device, encoder.dtype

    def __call__(self, token_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        """An output with `last_hidden_state` [B, T, D] alone."""
        from transformers.modeling_outputs import BaseModelOutput

        states = self._encoder(token_ids, attention_mask, output_hidden_states=True, return_dict=True).hidden_states
        text_model = getattr(self._encoder, "text_model", self._encoder)
        return BaseModelOutput(last_hidden_state=text_model.final_layer_norm(states[-1 - self._skipped]))

    def encode(self, text: str, tokenizer: Any) -> Tensor:
        """Embeddings [1, T, D] of a text, padded or truncated as diffusers' pipeline does."""
        length = tokenizer.model_max_length
        ids = tokenizer(text, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        found: Tensor = self(ids.to(self.device)).last_hidden_state
        return found


def parse(prompt: str) -> WeightedPrompt:
    """Parse a prompt's weights. Lone surrogates, which a tokenizer refuses, become U+FFFD."""
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
            factor = float(mark[1]) if mark[1] else BRACKET_WEIGHT if closing == ")" else 1 / BRACKET_WEIGHT
            step = math.log(min(max(factor, _MIN_WEIGHT), MAX_WEIGHT))
            steps[begin] += step
            steps[start] -= step
    weights = [round(math.exp(min(total, math.log(MAX_WEIGHT))), 4) for total in accumulate(steps)]  # 1.1 / 1.1 is 1
    prompt_positions = tuple(i for i, char in enumerate(chars) if char)
    text = "".join(chars)
    if any(weight != 1 for weight in weights):  # compel looks for the first fragment from its own start token on
        text = text.replace(_START, " " * len(_START))
    return WeightedPrompt(text, prompt_positions, tuple(weights[i] for i in prompt_positions))


def embeddings(prompt: WeightedPrompt, pipe: StableDiffusionPipeline, clip_skip: int = 0) -> Tensor | None:
    """Weighted prompt embeddings by compel.

    Above 1, a token's embedding is moved away from the empty prompt's; below 1, the whole prompt's also towards that of
    the prompt with the token masked.

    Args:
        prompt: The parsed prompt.
        pipe: The pipeline, whose tokenizer and text encoder are used.
        clip_skip: Layers of the text encoder that are left out at its end.

    Returns:
        [1, T, D] as the pipeline's own embeddings; None if all weights are 1 and no layer is left out, when the
        pipeline's own are exact.

    Raises:
        InputError: The text encoder has too few layers.
    """
    fragments, encoder = prompt.fragments(pipe.tokenizer), pipe.text_encoder
    if clip_skip:
        encoder = ShortenedEncoder(encoder, clip_skip)
    if all(weight == 1 for _, weight in fragments):
        return encoder.encode(prompt.text, pipe.tokenizer) if clip_skip else None
    from compel import EmbeddingsProvider

    texts, weights = (list(column) for column in zip(*fragments, strict=True))
    provider, device = EmbeddingsProvider(pipe.tokenizer, encoder), encoder.device
    weighted_embeddings: Tensor = provider.get_embeddings_for_weighted_prompt_fragments(
        [texts], [weights], device=device
    )
    return weighted_embeddings
