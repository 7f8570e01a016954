"""Maps [B, C, H, W] as rows [B, R, C], and back."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """[B, C, H, W] or [B, C, R] -> [B, rows, C]; free where the map is channels_last."""
    return x.flatten(2).transpose(1, 2).contiguous()


def map_of(rows: Tensor) -> Tensor:
    """[B, R, C] -> [B, C, R, 1], a view."""
    return rows.transpose(1, 2).unsqueeze(-1)


def scatter(base: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """A copy of a map with rows written into it.

    Args:
        base: [B, C, H, W].
        positions: int64 [R], flat.
        rows: [B, R, C].
    """
    mixed = base.flatten(2).clone()
    mixed.index_copy_(2, positions, rows.transpose(1, 2).to(mixed.dtype))
    return mixed.view(base.shape)


def gather(full: Tensor, positions: Tensor) -> Tensor:
    """Rows [B, len(positions), C] of a map [B, C, H, W]."""
    return torch.index_select(full.flatten(2), 2, positions).transpose(1, 2)
