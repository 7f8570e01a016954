"""The specification: every kernel in the plainest torch, slow and obvious. All backends are checked against it.

Rows are [B, R, C]; see `fisedit.values` for the legend. Knows tensors and index tables only.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_byte
from math import prod
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.row_plan import TAPS, KernelMap, Level

LayerNormParams = tuple[Tensor, Tensor, float]
"""Weight [C], bias [C] and eps."""

Rows = Tensor | tuple[Tensor, Tensor]
"""Rows [B, R, C]; or two [B, R, C1] and [B, R, C2] that stand for both side by side, C = C1 + C2."""


class DevicePointer(NamedTuple):
    """A contiguous tensor of a known shape at an address that is read from device memory, so that it is not copied.

    Args:
        address: int64 [1], on the device.
        shape: of the tensor.
        dtype: of the tensor.
    """

    address: Tensor
    """int64 [1]."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def to_tensor(self) -> Tensor:
        """The tensor, for addresses in a CPU's memory only."""
        assert self.address.device.type == "cpu", self.address.device
        size = prod(self.shape) * self.dtype.itemsize
        memory = (c_byte * size).from_address(int(self.address))
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype).view(self.shape)


class RecordedInput(Protocol):
    """A norm's recorded input map; each kernel reads what it needs of it."""

    def whole(self) -> Tensor:
        """The map [B, H * W, C], a fresh tensor."""

    def rows(self, positions: Tensor) -> Tensor:
        """Rows [B, P, C] at positions int64 [P], a fresh tensor."""

    def statistics(self) -> Tensor | None:
        """Its `group_statistics`, float64 [B, groups, 2]; None where only the whole map gives them."""


class ConvEpilogue(NamedTuple):
    """What is added to the outputs of a convolution.

    Args:
        time: [B, C_out], added to every row; or None.
        residual: [B, R_out, C_out], or None.
        shortcut: rows [B, R_out, C], and weight [C_out, C] and bias [C_out] or None of the linear layer they go
            through; or None.
    """

    time: Tensor | None = None
    residual: Tensor | None = None
    shortcut: tuple[Rows, Tensor, Tensor | None] | None = None


NO_EPILOGUE = ConvEpilogue()

RecordedMap = Tensor | DevicePointer
"""A recorded map [S, P, C], or where it lies."""


def join_rows(rows: Rows) -> Tensor:
    """Concatenate rows that are in two tensors."""
    return rows if isinstance(rows, Tensor) else torch.cat(rows, -1)


QUANTISED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What a number may be kept in: whole steps, as fine everywhere, or floats, finer near zero."""


def quantise(rows: Tensor, heads: int, kind: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Quantise rows to one byte a number, with one scale for each row and head.

    Args:
        rows: [B, R, C].
        heads: attention heads; C is heads * width.
        kind: one of `QUANTISED_DTYPES`; a head's largest number becomes the largest of this type.

    Returns:
        [B, R, C] of `kind`; the scales [B, R, heads] in the dtype of `rows`.
    """
    whole = not kind.is_floating_point
    max_value = torch.iinfo(kind).max if whole else torch.finfo(kind).max
    grouped = rows.float().unflatten(-1, (heads, -1))
    scales = (grouped.abs().amax(-1) / max_value).to(rows.dtype)
    units = grouped / scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return (units.round() if whole else units).clamp(-max_value, max_value).to(kind).flatten(2), scales


def read_recorded(recorded: RecordedMap, scales: RecordedMap | None) -> Tensor:
    """Read a recorded map.

    Args:
        recorded: [S, P, C], or the pointer to it.
        scales: [S, P, heads] of a quantised map, or the pointer to them; None for one that is not quantised.
    """
    numbers = recorded.to_tensor() if isinstance(recorded, DevicePointer) else recorded
    if scales is None:
        return numbers
    return dequantise(numbers, scales.to_tensor() if isinstance(scales, DevicePointer) else scales)


def dequantise(numbers: Tensor, scales: Tensor) -> Tensor:
    """Invert `quantise`, up to half a unit (int8), or a sixteenth of a number (fp8).

    Args:
        numbers: [B, R, C] of one byte a number.
        scales: [B, R, heads].

    Returns:
        [B, R, C] in the dtype of `scales`.
    """
    rows: Tensor = numbers.to(scales.dtype).unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
    return rows.flatten(2)


def conv3x3(rows: Tensor, kernel_map: KernelMap, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a 3x3 convolution at the output rows of a kernel map.

    Args:
        rows: [B, R + G, C_in], active rows followed by halo rows.
        kernel_map: indices into [rows | one zero row].
        weight: [C_out, C_in, 3, 3].
        bias: [C_out] or None.

    Returns:
        [B, R_out, C_out].
    """
    padded = F.pad(rows, (0, 0, 0, 1))
    gathered = padded[:, kernel_map.table.view(-1, TAPS)]  # [B, R_out, 9, C_in]
    out = torch.einsum("brtc,oct->bro", gathered, weight.flatten(2))
    return out if bias is None else out + bias


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
        level: of the map; its R active positions are those of the rows.
        halo: int64 [G], positions whose rows are wanted: `level.same.halo`, or none.
        groups: divides C.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        float32 [B, 2, C], scale and shift; the recorded rows [B, G, C] of the halo; the mixed map's `group_statistics`,
        float64 [B, groups, 2], or None where they are not worth keeping.
    """
    mixed = rows if level.whole else recorded.whole().index_copy_(1, level.active, rows)
    affine, statistics = dense_group_norm_affine(mixed, groups, weight, bias, eps)
    return affine, mixed.index_select(1, halo), statistics


def row_statistics(rows: Tensor, groups: int) -> Tensor:
    """What every row has part in its groups' statistics.

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
        statistics: as in `group_norm_affine`.
        num_rows: as in `group_norm_affine`.
        count: as in `group_norm_affine`.
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


def norm_conv3x3(
    rows: Rows,
    halo: Tensor,
    kernel_map: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    epilogue: ConvEpilogue = NO_EPILOGUE,
) -> Tensor:
    """GroupNorm's scale and shift with SiLU, a 3x3 convolution of rows, and an epilogue: half a ResNet block.

    Args:
        rows: [B, R, C_in], fresh.
        halo: [B, G, C_in], recorded.
        kernel_map: int [B, R_out, 9], indices into [rows | halo | one zero row]; the zero row is the convolution's
            padding, which is not normalised.
        weight: [C_out, C_in, 3, 3].
        bias: [C_out] or None.
        affine: float32 [B, 2, C_in] of `group_norm_affine`; None for neither a norm nor the SiLU.
        epilogue: what is added to the outputs.

    Returns:
        [B, R_out, C_out].
    """
    x = torch.cat([join_rows(rows), halo], 1)
    if affine is not None:
        x = F.silu(x * affine[:, :1] + affine[:, 1:]).to(halo.dtype)
    item = torch.arange(len(x), device=x.device)[:, None, None]
    gathered = F.pad(x, (0, 0, 0, 1))[item, kernel_map]  # [B, R_out, 9, C_in]
    out = torch.einsum("brtc,oct->bro", gathered, weight.flatten(2))
    time, residual, shortcut = epilogue
    projected = None if shortcut is None else F.linear(join_rows(shortcut[0]), *shortcut[1:])
    for added in (bias, None if time is None else time[:, None], residual, projected):
        out = out if added is None else out + added
    return out


def norm_linear(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    layer_norm: LayerNormParams | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A linear layer, after GroupNorm's scale and shift or after LayerNorm.

    Args:
        rows: [B, R, C_in].
        weight: [C_out, C_in], or [C_out, C_in, 1, 1] of a 1x1 convolution.
        bias: [C_out] or None.
        affine: float32 [B, 2, C_in] of `group_norm_affine`, or None.
        layer_norm: weight [C_in], bias [C_in] and eps, or None.
        residual: [B, R, C_out], added; or None.

    Returns:
        [B, R, C_out].
    """
    rows = join_rows(rows)
    if affine is not None:
        rows = (rows * affine[:, :1] + affine[:, 1:]).to(rows.dtype)
    if layer_norm is not None:
        rows = F.layer_norm(rows, rows.shape[-1:], *layer_norm)
    out = F.linear(rows, weight.flatten(1), bias)
    return out if residual is None else out + residual


def norm_geglu(rows: Tensor, weight: Tensor, bias: Tensor, layer_norm: LayerNormParams) -> Tensor:
    """LayerNorm and the gated half of a feed-forward: a linear layer, then one half times GELU of the other (GEGLU).

    Args:
        rows: [B, R, C].
        weight: [2 * D, C].
        bias: [2 * D].
        layer_norm: weight [C], bias [C] and eps.

    Returns:
        [B, R, D].
    """
    hidden, gate = norm_linear(rows, weight, bias, layer_norm=layer_norm).chunk(2, -1)
    return hidden * F.gelu(gate)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recorded_key: RecordedMap,
    recorded_value: RecordedMap,
    placement: RowPlacement,
    heads: int,
    scales: tuple[RecordedMap, RecordedMap] | None = None,
) -> Tensor:
    """Attention of active queries over every position: fresh keys and values at active ones, recorded ones elsewhere.

    Args:
        query: [B, R, C], with padding rows.
        key: [B, R, C].
        value: [B, R, C].
        recorded_key: [S, H * W, C], where S divides B; item b reads the record b // (B / S).
        recorded_value: [S, H * W, C].
        placement: positions of the rows.
        heads: C is heads * width.
        scales: those of the recorded keys and of the recorded values where these are quantised, else None.

    Returns:
        [B, R, C]; padding rows hold finite numbers.
    """
    each, (key_scales, value_scales) = len(query) // recorded_key.shape[0], scales or (None, None)
    keys, values = (
        scatter_rows(recorded.repeat_interleave(each, 0), rows, placement)
        for recorded, rows in (
            (read_recorded(recorded_key, key_scales), key),
            (read_recorded(recorded_value, value_scales), value),
        )
    )
    return dense_attention(query, keys, values, heads)


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Attention over whole maps.

    Args:
        query: [B, R, C].
        keys: [B, N, C].
        values: [B, N, C].
        heads: C is heads * width.

    Returns:
        [B, R, C].
    """
    q, k, v = (t.view(*t.shape[:2], heads, -1).transpose(1, 2) for t in (query, keys, values))
    out: Tensor = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return out


def row_column_attention(
    query: Tensor, own: tuple[Tensor, Tensor], reference_lines: tuple[Tensor, Tensor], valid: Tensor | None = None
) -> Tensor:
    """Attention of queries over the keys of their own line and those of a reference's line.

    Args:
        query: [N, R, C], for N lines.
        own: keys and values of the lines, [N, M, C] each.
        reference_lines: keys and values of the reference's lines by head, [N, H, K, C / H] each.
        valid: bool [N, M], which of the lines' own keys are not padding; None for all.

    Returns:
        [N, R, C].
    """
    _, heads, count, _ = reference_lines[0].shape
    q, *lines = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (query, *own))
    k, v = (torch.cat(pair, 2) for pair in zip(lines, reference_lines, strict=True))
    mask = None if valid is None else F.pad(valid, (0, count), value=True)[:, None, None]
    out: Tensor = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    return out


def cross_attention(
    rows: Tensor,
    layer_norm: LayerNormParams,
    weight: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    recorded_query: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """LayerNorm, the query projection, and attention over the text.

    Args:
        rows: [B, R, C_in].
        layer_norm: weight [C_in], bias [C_in] and eps.
        weight: [C, C_in], of the query projection.
        key: [B, T, C].
        value: [B, T, C].
        heads: C is heads * width.
        recorded_query: [E, R, C], in place of the queries of the last items; or None.

    Returns:
        The attention's output [B, R, C]; the queries [B, R, C].
    """
    query = norm_linear(rows, weight, None, layer_norm=layer_norm)
    if recorded_query is not None:
        query[len(query) - len(recorded_query) :] = recorded_query
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), query


def time_projections(timestep: Tensor, frequencies: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The time embedding as every ResNet block adds it: sinusoids through linear layers with SiLU between them.

    Args:
        timestep: float32 [1].
        frequencies: float32 [F].
        layers: weights [C_out, C_in] and biases [C_out]; C_in of the first is 2 * F.

    Returns:
        [1, C_out] of the last layer, in the weights' dtype.
    """
    angles = timestep[:, None] * frequencies
    x = torch.cat([angles.cos(), angles.sin()], 1).to(layers[0][0].dtype)
    first, *later = layers
    x = F.linear(x, *first)
    for layer in later:
        x = F.linear(F.silu(x), *layer)
    return x


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer over a whole map.

    Args:
        x: [..., C_in].
        weight: [C_out, C_in].
        bias: [C_out] or None.

    Returns:
        [..., C_out].
    """
    return F.linear(x, weight, bias)


def dense_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0, *, prepack: bool = False
) -> Tensor:
    """A convolution of a whole map.

    Args:
        x: [B, C_in, H, W].
        weight: [C_out, C_in, k, k].
        bias: [C_out] or None.
        stride: in positions.
        padding: in positions.
        prepack: a backend may keep a packed copy of the weight, which is that of a 3x3 conv of stride 1 and padding 1.

    Returns:
        [B, C_out, H_out, W_out].
    """
    return F.conv2d(x, weight, bias, stride, padding)


def scatter_rows(full: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """Write rows into maps, in place.

    Args:
        full: [B, H * W, C].
        rows: [B, R, C].
        placement: positions of the rows; padding rows are dropped.

    Returns:
        `full`.
    """
    item, row = placement.positions.lt(full.shape[1]).nonzero(as_tuple=True)
    full[item, placement.positions[item, row]] = rows[item, row]
    return full


def composite(base: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """Fresh rows written into copies of the source's prediction.

    Args:
        base: [1 or E, 4, h, w], the source's guided prediction.
        rows: [E, R, 4], guided.
        placement: positions of the rows, of at least E items.

    Returns:
        [E, 4, h, w].
    """
    full = base.expand(len(rows), -1, -1, -1).flatten(2).transpose(1, 2).clone()  # [E, h * w, 4]
    trimmed = RowPlacement(*(t[: len(rows)] for t in (placement.positions, placement.active_mask, placement.num_rows)))
    composited: Tensor = scatter_rows(full, rows, trimmed).transpose(1, 2).unflatten(2, base.shape[2:])
    return composited
