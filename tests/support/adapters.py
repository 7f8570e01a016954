"""Adapters with weights made by a recipe, and what their blocks compute, written out without keys kept for later."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fisedit.adapters.row_column.attention import RowColumnAdapter, RowColumnBlock, TwoStageBlock
from fisedit.adapters.row_column.checkpoints import fresh_adapter

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

M = TypeVar("M", bound=nn.Module)

SD15_GRIDS = [(64 // 2**level,) * 2 for level in range(4)]
SD15_SIZES = [height * width for height, width in SD15_GRIDS]
"""Of the maps of Stable Diffusion 1.5 at 512x512 pixels, finest first."""


def filled(module: M, salt: str = "") -> M:
    """The module with weights that its parameters' names alone decide."""
    for name, weights in module.named_parameters():
        seed = int.from_bytes(hashlib.sha256((salt + name).encode()).digest()[:8], "little")
        drawn = np.random.Generator(np.random.PCG64(seed)).standard_normal(tuple(weights.shape)).astype(np.float32)
        values = torch.from_numpy(drawn)
        if values.ndim > 1:
            values = values / float(np.prod(values.shape[1:])) ** 0.5
        else:
            values = 1 + 0.1 * values if name.endswith("weight") else 0.1 * values
        weights.data.copy_(values)
    return module.eval().requires_grad_(False)


def lively(unet: UNet2DConditionModel, family: str, salt: str = "", heads: int = 4) -> RowColumnAdapter:
    """An adapter for a UNet that changes a lot."""
    return filled(fresh_adapter(unet, family, heads), salt)


def naive(block: RowColumnBlock | TwoStageBlock, x: Tensor, reference: Tensor, seen: Tensor | None = None) -> Tensor:
    """What a map [B, C, H, W] gains beside a reference: side by side, positions, norm, softmax, the first half kept.

    Args:
        seen: bool [H, W], the part that is taken for the whole map, and outside which nothing is right; None for all.
    """
    inner, (height, width) = block.row_column, x.shape[-2:]
    seen = torch.ones(height, width, dtype=torch.bool) if seen is None else seen
    if isinstance(block, TwoStageBlock):
        reference = _first_stage(block.attn_ref, reference)
    own, known = (m if inner.conv_in is None else inner.conv_in(m) for m in (x, reference))
    own, known = (m.permute(0, 2, 3, 1) for m in (own, known))
    found = _attend(inner, inner.row_attention, own, known, seen).transpose(1, 2)
    found = _attend(inner, inner.column_attention, found, known.transpose(1, 2), seen.T).transpose(1, 2)
    return inner.proj((found * seen[..., None]).permute(0, 3, 1, 2))


def _first_stage(inner: RowColumnBlock, reference: Tensor) -> Tensor:
    """A reference through its own block, family v5b."""
    lines = inner.conv_in(reference).permute(0, 2, 3, 1)
    for heads in (inner.row_attention, inner.column_attention):
        none = lines[:, :, :0]
        lines = _attend(inner, heads, lines, none, torch.ones(lines.shape[1:3], dtype=torch.bool)).transpose(1, 2)
    return inner.proj(lines.permute(0, 3, 1, 2))


def _attend(inner: RowColumnBlock, heads: nn.Module, own: Tensor, known: Tensor, seen: Tensor) -> Tensor:
    """Attention of lines [B, lines, n, C] over what is seen of them, bool [lines, n], and over known ones."""
    count = own.shape[2]
    tokens = inner.norm(torch.cat([own, known], 2) + positions(inner, count + known.shape[2]))
    q, k, v = (p(tokens).unflatten(-1, (heads.heads, -1)).transpose(2, 3) for p in (heads.to_q, heads.to_k, heads.to_v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores[..., :count].masked_fill_(~seen[:, None, None], -math.inf)
    found = scores.softmax(-1) @ v
    return heads.to_out[0](found.transpose(2, 3).flatten(3))[:, :, :count]


def positions(inner: RowColumnBlock, length: int) -> Tensor:
    """[length, C], from the formula."""
    half = inner.channels // 2
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(half) / half)
    sines, cosines = np.sin(angles), np.cos(angles)
    by_turns = np.stack([sines, cosines], 2).reshape(length, -1)
    return torch.from_numpy(by_turns if inner.pos_embed else np.concatenate([sines, cosines], 1)).float()
