"""Dense prompt-to-prompt (Hertz et al., arXiv 2208.01626): the edit with attention maps of its source.

Source and edit run in one batch. For the first share of the steps the edit's cross-attention to every unchanged word is
the source's. For a smaller share so is its self-attention, on maps of at most 32x32. As in direct inversion (arXiv
2310.01506) the source's branch is reset to its recorded latents after every step. Knows one `EditCase`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_processor import Attention

from fisedit.models.injection import Replacement, injected
from fisedit.prompts.chunks import CONTEXT_LENGTH
from fisedit.prompts.text_diff import words

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from fisedit.bench.edit_case import EditCase
    from fisedit.prompts.text_diff import Tokenizer

CROSS_STEPS, SELF_STEPS = 0.8, 0.4
"""Shares of the steps during which cross-attention and self-attention are the source's, as published."""

FINEST = 32 * 32
"""Positions of the largest map whose self-attention is replaced."""


@dataclass
class AttentionControl:
    """Replaces the edit's attention maps by the source's.

    Args:
        tokens: source position and new position of every unchanged token.
        cross_attention: steps during which cross-attention is replaced.
        self_attention: steps during which self-attention is replaced.
        step: the current one.
    """

    tokens: Sequence[tuple[int, int]]
    cross_attention: float
    self_attention: float
    step: int = 0

    def attend(self, layer: Attention, hidden: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any) -> Tensor:
        """An attention layer's forward; the last two of the batch are the conditional branches of source and edit.

        Args:
            layer: diffusers' attention layer.
            hidden: [B, n, C].
            encoder_hidden_states: text embeddings [B, 77, D]; None for self-attention.
            **_: what diffusers passes besides.
        """
        context = hidden if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = layer.to_q(hidden), layer.to_k(context), layer.to_v(context)
        query, key, value = (layer.head_to_batch_dim(t) for t in (query, key, value))
        maps = layer.get_attention_scores(query, key)  # [B * heads, n, m]
        source, edit = maps.unflatten(0, (len(hidden), -1))[-2:]
        if encoder_hidden_states is not None and self.step < self.cross_attention:
            old, new = map(list, zip(*self.tokens, strict=True))
            edit[..., new] = source[..., old]
        elif encoder_hidden_states is None and self.step < self.self_attention and source.shape[-1] <= FINEST:
            edit.copy_(source)
        out: Tensor = layer.to_out[1](layer.to_out[0](layer.batch_to_head_dim(torch.bmm(maps, value))))
        return out


def unchanged_tokens(old: str, new: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Pairs of token positions that both prompts share: start, unchanged words, padding.

    Args:
        old: the source's prompt.
        new: the edit's.
        tokenizer: the model's.

    Returns:
        (position in the old row of 77 tokens, position in the new one).
    """
    before, after = (words(text, tokenizer) for text in (old, new))
    matcher = SequenceMatcher(None, [w.text for w in before], [w.text for w in after], autojunk=False)
    blocks = matcher.get_matching_blocks()
    matched_words = [(before[b.a + k], after[b.b + k]) for b in blocks for k in range(b.size)]
    pairs = [(0, 0), *(pair for a, b in matched_words for pair in zip(a.tokens, b.tokens, strict=False))]
    start, stop = (1 + max((t for word in row for t in word.tokens), default=0) for row in (before, after))
    last = CONTEXT_LENGTH - 1
    return pairs + [(min(start + k, last), stop + k) for k in range(CONTEXT_LENGTH - stop)]


def prompt_to_prompt(case: EditCase, cross_attention: float = CROSS_STEPS, self_attention: float = SELF_STEPS) -> Image:
    """The edit's picture.

    Args:
        case: the edit and its source.
        cross_attention: share of the steps with the source's cross-attention, 0 to 1.
        self_attention: share of the steps with the source's self-attention, 0 to 1.
    """
    tokens = unchanged_tokens(case.source.prompt, case.edit.prompt, case.editor.pipe.tokenizer)
    control = AttentionControl(tokens, cross_attention * case.steps, self_attention * case.steps)
    layers = [m for m in case.editor.pipe.unet.modules() if isinstance(m, Attention)]
    replacements: list[Replacement] = [(layer, partial(control.attend, layer)) for layer in layers]

    def on_step_end(i: int, latents: Tensor) -> Tensor:
        control.step = i + 1
        return torch.cat([case.trajectory.latents[i + 1], latents[1:]])

    with injected(case.editor.pipe.unet, replacements):
        return case.dense([case.source.prompt, case.edit.prompt], on_step_end)
