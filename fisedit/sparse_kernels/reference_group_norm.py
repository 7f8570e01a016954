"""The specification of GroupNorm's kernels: of whole maps, of rows with given statistics, and of recorded maps of which
some rows are new. See `reference`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.sparse_kernels.operands import (
    RecordedInput,
    Rows,
    join_rows,
)
from fisedit.sparse_kernels.row_plan import Level


def group_statistics(rows: Tensor, groups: int) -> Tensor:
    """Sum and sum of squares of every group.

    Args:
        rows: [B, R, C].
        groups: divides C.

    Returns:
        float64 [B, groups, 2].
    """
    grouped = rows.double().unflatten(-1, (groups, -1))
    return torch.stack([grouped.sum((1, 3)), grouped.square().sum((1, 3))], -1)


def dense_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """GroupNorm of a whole map, and the group statistics that it uses.

    Args:
        x: [B, C, ...].
        groups: divides C.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        The normalised map, as `x`; float64 [B, groups, 2], see `group_statistics`.
    """
    statistics = group_statistics(x.flatten(2).transpose(1, 2), groups)
    return F.group_norm(x, groups, weight, bias, eps), statistics


def group_norm(rows: Tensor, statistics: Tensor, count: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """GroupNorm of rows under the statistics of a whole map.

    Args:
        rows: [B, R, C].
        statistics: [B, groups, 2], the map's `group_statistics`.
        count: elements of a group in the map, H * W * C / groups.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        [B, R, C] in the dtype of `rows`.
    """
    mean, square = (statistics / count).unbind(-1)
    scale = (square - mean.square()).clamp(min=0).add(eps).rsqrt()
    grouped = rows.double().unflatten(-1, (statistics.shape[1], -1))
    normed = (grouped - mean[:, None, :, None]) * scale[:, None, :, None]
    out: Tensor = (normed.flatten(2) * weight + bias).to(rows.dtype)
    return out


def group_norm_affine(
    rows: Rows,
    recorded: Tensor,
    statistics: Tensor,
    num_rows: Tensor | None,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Update a recorded map's group statistics by the fresh rows; give GroupNorm's scale and shift of every channel.

    Args:
        rows: [B, R, C], fresh.
        recorded: [B, R, C], the recorded rows of the same positions.
        statistics: float64 [S, groups, 2], `group_statistics` of the recorded maps; item b has those of b // (B / S).
        num_rows: int32 [B], rows that are not padding; None where no row is.
        count: elements of a group in the map, H * W * C / groups.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        float32 [B, 2, C], scale and shift; float64 [B, groups, 2], `statistics` minus those of `recorded` plus those of
        `rows`.
    """
    rows, groups = join_rows(rows), statistics.shape[1]
    real = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    if num_rows is not None:
        real = torch.arange(rows.shape[1], device=rows.device) < num_rows[:, None]
    fresh, old = (group_statistics(torch.where(real[..., None], x, 0), groups) for x in (rows, recorded))
    mixed = statistics.repeat_interleave(len(rows) // len(statistics), 0) - old + fresh
    return _affine_of(mixed, count, weight, bias, eps), mixed


def dense_group_norm_affine(
    rows: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`group_norm_affine` of a whole map.

    Args:
        rows: [B, H * W, C].
        groups: divides C.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        float32 [B, 2, C], scale and shift; float64 [B, groups, 2], the map's `group_statistics`.
    """
    statistics = group_statistics(rows, groups)
    return _affine_of(statistics, rows.shape[1] * (rows.shape[2] // groups), weight, bias, eps), statistics


def mixed_group_norm_affine(
    rows: Tensor,
    recorded: RecordedInput,
    level: Level,
    halo: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`group_norm_affine` of a recorded map with fresh rows in it.

    Args:
        rows: [B, R, C], fresh, without padding.
        recorded: the map.
        level: The level of the map; its R active positions are those of the rows.
        halo: int64 [G], positions whose rows are wanted: `level.same.halo`, or none.
        groups: divides C.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        Scale and shift, float32 [B, 2, C], and the recorded rows [B, G, C] of the halo. Then the mixed map's
        `group_statistics`, float64 [B, groups, 2], or None where they are not worth keeping.
    """
    mixed = rows if level.whole else recorded.whole().index_copy_(1, level.active, rows)
    affine, statistics = dense_group_norm_affine(mixed, groups, weight, bias, eps)
    return affine, mixed.index_select(1, halo), statistics


def row_statistics(rows: Tensor, groups: int) -> Tensor:
    """Return the part that every row has in its groups' statistics.

    Args:
        rows: [B, R, C].
        groups: divides C.

    Returns:
        float32 [B, R, 2 * groups]: the sums of every group, then the sums of squares.
    """
    grouped = rows.float().unflatten(-1, (groups, -1))
    return torch.cat([grouped.sum(-1), grouped.square().sum(-1)], -1)


def total_statistics(row_statistics: Tensor, num_rows: Tensor | None = None) -> Tensor:
    """Add up rows' statistics.

    Args:
        row_statistics: [B, R, 2 * groups], of `row_statistics`.
        num_rows: int32 [B], rows that are not padding; None where no row is.

    Returns:
        float64 [B, groups, 2], see `group_statistics`.
    """
    if num_rows is not None:
        real = torch.arange(row_statistics.shape[1], device=num_rows.device) < num_rows[:, None]
        row_statistics = torch.where(real[..., None], row_statistics, 0)
    total: Tensor = row_statistics.double().sum(1).unflatten(-1, (2, -1)).transpose(1, 2)
    return total


def summed_group_norm_affine(
    rows: Tensor,
    recorded: Tensor,
    statistics: Tensor,
    num_rows: Tensor | None,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`group_norm_affine` where of recorded rows their statistics alone are known.

    Args:
        rows: [B, R, C], fresh.
        recorded: float32 [B, R, 2 * groups], `row_statistics` of the recorded rows of the same positions.
        statistics: The `group_statistics` of the recorded maps, see `group_norm_affine`.
        num_rows: The number of rows that are not padding, see `group_norm_affine`.
        count: The number of elements of a group in the map, see `group_norm_affine`.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        What `group_norm_affine` does, and the fresh rows' `row_statistics`.
    """
    fresh = row_statistics(rows, statistics.shape[1])
    changed = total_statistics(fresh, num_rows) - total_statistics(recorded, num_rows)
    mixed = statistics.repeat_interleave(len(rows) // len(statistics), 0) + changed
    return _affine_of(mixed, count, weight, bias, eps), mixed, fresh


def _affine_of(statistics: Tensor, count: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    mean, square = (statistics / count).unbind(-1)
    rstd = (square - mean.square()).clamp(min=0).add(eps).rsqrt()
    width = len(weight) // statistics.shape[1]
    scale = rstd.repeat_interleave(width, 1) * weight
    shift = bias - mean.repeat_interleave(width, 1) * scale
    return torch.stack([scale, shift], 1).float()
