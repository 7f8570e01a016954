"""Prompt-to-prompt (Hertz et al., arXiv 2208.01626), densely: the edit attends as its source did.

Source and edit run in one batch. For the first share of the steps the edit's cross-attention to every unchanged word is
the source's, and for a smaller share so is its self-attention, on maps of at most 32x32. As in direct inversion (arXiv
2310.01506) the source's branch is put back on its recorded path after every step. Knows one `Case`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_processor import Attention

from fisedit.masking.text_diff import CONTEXT_LENGTH, words
from fisedit.models.injection import Replacement, injected

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from fisedit.evaluation.quality.edit_case import EditCase
    from fisedit.masking.text_diff import Tokenizer

CROSS, OWN = 0.8, 0.4
"""Shares of the steps during which cross-attention and self-attention are the source's, as published."""

FINEST = 32 * 32
"""Positions of the largest map whose self-attention is replaced."""


@dataclass
class AttentionControl:
    """What of the source's attention the edit takes over, and when.

    Args:
        tokens: source position and new position of every unchanged token.
        cross, own: steps during which cross- and self-attention are replaced. step: the present one.
    """

    tokens: Sequence[tuple[int, int]]
    cross: float
    own: float
    step: int = 0

    def attend(self, layer: Attention, hidden: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any) -> Tensor:
        """An attention layer's forward on [B, n, C]; the last two of the batch are source and edit, conditioned."""
        context = hidden if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = layer.to_q(hidden), layer.to_k(context), layer.to_v(context)
        query, key, value = (layer.head_to_batch_dim(t) for t in (query, key, value))
        maps = layer.get_attention_scores(query, key)  # [B * heads, n, m]
        source, edit = maps.unflatten(0, (len(hidden), -1))[-2:]
        if encoder_hidden_states is not None and self.step < self.cross:
            old, new = map(list, zip(*self.tokens, strict=True))
            edit[..., new] = source[..., old]
        elif encoder_hidden_states is None and self.step < self.own and source.shape[-1] <= FINEST:
            edit.copy_(source)
        out: Tensor = layer.to_out[1](layer.to_out[0](layer.batch_to_head_dim(torch.bmm(maps, value))))
        return out


def unchanged_tokens(old: str, new: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Positions in the old and the new row of 77 tokens of what both prompts say: start, unchanged words, padding."""
    before, after = (words(text, tokenizer) for text in (old, new))
    matcher = SequenceMatcher(None, [w.text for w in before], [w.text for w in after], autojunk=False)
    blocks = matcher.get_matching_blocks()
    kept = [(before[b.a + k], after[b.b + k]) for b in blocks for k in range(b.size)]
    pairs = [(0, 0), *(pair for a, b in kept for pair in zip(a.tokens, b.tokens, strict=False))]
    start, stop = (1 + max((t for word in row for t in word.tokens), default=0) for row in (before, after))
    last = CONTEXT_LENGTH - 1
    return pairs + [(min(start + k, last), stop + k) for k in range(CONTEXT_LENGTH - stop)]


def prompt_to_prompt(case: EditCase, cross: float = CROSS, own: float = OWN) -> Image:
    """The edit's picture; `cross` and `own` are shares of the steps, 0 to 1."""
    tokens = unchanged_tokens(case.source.prompt, case.edit.prompt, case.editor.pipe.tokenizer)
    control = AttentionControl(tokens, cross * case.steps, own * case.steps)
    layers = [m for m in case.editor.pipe.unet.modules() if isinstance(m, Attention)]
    replacements: list[Replacement] = [(layer, partial(control.attend, layer)) for layer in layers]

    def follow(i: int, latents: Tensor) -> Tensor:
        control.step = i + 1
        return torch.cat([case.trajectory.latents[i + 1], latents[1:]])

    with injected(case.editor.pipe.unet, replacements):
        return case.dense([case.source.prompt, case.edit.prompt], follow)
