"""The specification: every kernel in the plainest torch, slow and obvious. Fast paths are checked against this.

Rows are [B, R, C]; see `fisedit.values` for the legend.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.plan import TAPS, Reads


def conv3x3(rows: Tensor, reads: Reads, weight: Tensor, bias: Tensor | None) -> Tensor:
    """3x3 convolution at the output rows of `reads`.

    Args:
        rows: [B, R + G, C_in], active rows followed by halo rows.
        reads: neighbour table over [rows | one zero row].
        weight: [C_out, C_in, 3, 3]. bias: [C_out] or None.

    Returns:
        [B, R_out, C_out].
    """
    padded = F.pad(rows, (0, 0, 0, 1))
    gathered = padded[:, reads.table.view(-1, TAPS)]  # [B, R_out, 9, C_in]
    out = torch.einsum("brtc,oct->bro", gathered, weight.flatten(2))
    return out if bias is None else out + bias


def group_sums(rows: Tensor, groups: int) -> Tensor:
    """Sum and sum of squares of every group, float64 [B, groups, 2], of rows [B, R, C]."""
    grouped = rows.double().unflatten(-1, (groups, -1))
    return torch.stack([grouped.sum((1, 3)), grouped.square().sum((1, 3))], -1)


def map_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """GroupNorm of a whole map [B, C, ...], and the totals it stands on: float64 [B, groups, 2]."""
    totals = group_sums(x.flatten(2).transpose(1, 2), groups)
    return F.group_norm(x, groups, weight, bias, eps), totals


def group_norm(rows: Tensor, totals: Tensor, count: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """GroupNorm of rows [B, R, C] under the statistics of a whole map.

    Args:
        totals: [B, groups, 2], sum and sum of squares over the map (see `group_sums`).
        count: elements of a group in the map, H * W * C / groups.
        weight, bias: [C]. eps: added to the variance.

    Returns:
        [B, R, C] in the dtype of `rows`.
    """
    mean, square = (totals / count).unbind(-1)
    scale = (square - mean.square()).clamp(min=0).add(eps).rsqrt()
    grouped = rows.double().unflatten(-1, (totals.shape[1], -1))
    normed = (grouped - mean[:, None, :, None]) * scale[:, None, :, None]
    out: Tensor = (normed.flatten(2) * weight + bias).to(rows.dtype)
    return out
