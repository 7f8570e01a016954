"""The specification: every kernel in the plainest torch, slow and obvious. Fast paths are checked against this.

Rows are [B, R, C]; see `fisedit.values` for the legend.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_byte
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.row_plan import TAPS, KernelMap

LayerNormParams = tuple[Tensor, Tensor, float]
"""Weight [C], bias [C] and eps."""

Rows = Tensor | tuple[Tensor, Tensor]
"""Rows [B, R, C]; or two [B, R, C1] and [B, R, C2] that stand for both side by side, C = C1 + C2."""


class DevicePointer(NamedTuple):
    """A tensor of a known shape, contiguous, that lies where a number on its device says: read, not copied."""

    address: Tensor
    """int64 [1]."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def to_tensor(self) -> Tensor:
        """The tensor; of a CPU's memory alone, as a device's may be asked by kernels only."""
        assert self.address.device.type == "cpu", self.address.device
        size = prod(self.shape) * self.dtype.itemsize
        memory = (c_byte * size).from_address(int(self.address))
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype).view(self.shape)


class ConvEpilogue(NamedTuple):
    """What is added to the outputs of a convolution.

    Args:
        time: [B, C_out], added to every row; or None.
        residual: [B, R_out, C_out], or None.
        shortcut: rows [B, R_out, C] and the weight [C_out, C] of the linear layer they go through; or None.
    """

    time: Tensor | None = None
    residual: Tensor | None = None
    shortcut: tuple[Rows, Tensor] | None = None


NO_EPILOGUE = ConvEpilogue()

RecordedMap = Tensor | DevicePointer
"""A recorded map [S, P, C], or where it lies."""


def join_rows(rows: Rows) -> Tensor:
    """Rows as one tensor."""
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
    most = torch.iinfo(kind).max if whole else torch.finfo(kind).max
    grouped = rows.float().unflatten(-1, (heads, -1))
    scales = (grouped.abs().amax(-1) / most).to(rows.dtype)
    units = grouped / scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return (units.round() if whole else units).clamp(-most, most).to(kind).flatten(2), scales


def read_recorded(recorded: RecordedMap, scales: RecordedMap | None) -> Tensor:
    """A recorded map, wherever it lies, dequantised if it has scales."""
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


def conv3x3(rows: Tensor, reads: KernelMap, weight: Tensor, bias: Tensor | None) -> Tensor:
    """3x3 convolution at the output rows of `reads`.

    Args:
        rows: [B, R + G, C_in], active rows followed by halo rows.
        reads: neighbour table over [rows | one zero row].
        weight: [C_out, C_in, 3, 3]. bias: [C_out] or None.

    Returns:
        [B, R_out, C_out].
    """
    padded = F.pad(rows, (0, 0, 0, 1))
    gathered_conv = padded[:, reads.table.view(-1, TAPS)]  # [B, R_out, 9, C_in]
    out = torch.einsum("brtc,oct->bro", gathered_conv, weight.flatten(2))
    return out if bias is None else out + bias


def group_statistics(rows: Tensor, groups: int) -> Tensor:
    """Sum and sum of squares of every group, float64 [B, groups, 2], of rows [B, R, C]."""
    grouped = rows.double().unflatten(-1, (groups, -1))
    return torch.stack([grouped.sum((1, 3)), grouped.square().sum((1, 3))], -1)


def dense_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """GroupNorm of a whole map [B, C, ...], and the totals it stands on: float64 [B, groups, 2]."""
    totals = group_statistics(x.flatten(2).transpose(1, 2), groups)
    return F.group_norm(x, groups, weight, bias, eps), totals


def group_norm(rows: Tensor, totals: Tensor, count: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """GroupNorm of rows [B, R, C] under the statistics of a whole map.

    Args:
        totals: [B, groups, 2], sum and sum of squares over the map (see `group_statistics`).
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


def group_norm_affine(
    rows: Rows,
    recorded: Tensor,
    totals: Tensor,
    num_rows: Tensor,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Incremental GroupNorm statistics: the scale and shift of every channel, and the mixed map's totals.

    Args:
        rows, recorded: [B, R, C], the fresh rows, and what was recorded in their places.
        totals: float64 [S, groups, 2], of the recorded maps (see `group_statistics`); item b has those of b // (B / S).
        num_rows: int32 [B], how many rows are not padding.
        count: elements of a group in the map, H * W * C / groups.
        weight, bias: [C]. eps: added to the variance.

    Returns:
        float32 [B, 2, C], scale and shift; float64 [B, groups, 2], the totals less `recorded`, plus `rows`.
    """
    rows, groups = join_rows(rows), totals.shape[1]
    real = (torch.arange(rows.shape[1], device=rows.device) < num_rows[:, None])[..., None]
    fresh, old = (group_statistics(torch.where(real, x, 0), groups) for x in (rows, recorded))
    mixed = totals.repeat_interleave(len(rows) // len(totals), 0) - old + fresh
    mean, square = (mixed / count).unbind(-1)
    rstd = (square - mean.square()).clamp(min=0).add(eps).rsqrt()
    width = rows.shape[-1] // groups
    scale = rstd.repeat_interleave(width, 1) * weight
    shift = bias - mean.repeat_interleave(width, 1) * scale
    return torch.stack([scale, shift], 1).float(), mixed


def norm_conv3x3(
    rows: Rows,
    halo: Tensor,
    taps: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    epilogue: ConvEpilogue = NO_EPILOGUE,
) -> Tensor:
    """GroupNorm's affine and SiLU, a 3x3 convolution of rows, and what is added to it: a ResNet block's half in one.

    Args:
        rows: [B, R, C_in], fresh. halo: [B, G, C_in], recorded.
        taps: int [B, R_out, 9] into [rows | halo | one zero row]; what is zero is the conv's padding, after the norm.
        weight: [C_out, C_in, 3, 3]. bias: [C_out] or None.
        norm: float32 [B, 2, C_in] of `group_norm_affine`; None leaves rows as they are, without the SiLU.
        time: [B, C_out], added to every row. residual: [B, R_out, C_out], added.
        shortcut: rows [B, R_out, C] and the weight [C_out, C] that they go through, added.

    Returns:
        [B, R_out, C_out].
    """
    x = torch.cat([join_rows(rows), halo], 1)
    if affine is not None:
        x = F.silu(x * affine[:, :1] + affine[:, 1:]).to(halo.dtype)
    item = torch.arange(len(x), device=x.device)[:, None, None]
    gathered_conv = F.pad(x, (0, 0, 0, 1))[item, taps]  # [B, R_out, 9, C_in]
    out = torch.einsum("brtc,oct->bro", gathered_conv, weight.flatten(2))
    time, residual, shortcut = epilogue
    projected = None if shortcut is None else F.linear(join_rows(shortcut[0]), shortcut[1])
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
    """A linear layer, behind a GroupNorm's affine or a LayerNorm: proj_in, or queries, keys and values in one.

    Args:
        rows: [B, R, C_in]. weight: [C_out, C_in], a 1x1 conv's as it is. bias: [C_out] or None.
        norm: float32 [B, 2, C_in] of `group_norm_affine`, or None. layer: weight [C_in], bias [C_in] and eps, or None.
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
    """LayerNorm and the gated half of a feed-forward: linear, then one half times GELU of the other (GEGLU).

    Args:
        rows: [B, R, C]. weight: [2 * D, C]. bias: [2 * D]. layer: weight [C], bias [C] and eps.

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
    """Active queries over every position: fresh keys and values where there are some, recorded ones elsewhere.

    Args:
        query, key, value: [B, R, C], padded rows. placement: where they stand.
        recorded_key, recorded_value: [S, H * W, C], S dividing B: item b reads the record b // (B / S).
        heads: C is heads * width.
        scales: of recorded keys and of recorded values, where these are `quantise`; None where they are not.

    Returns:
        [B, R, C]; rows of padding hold something finite.
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
        query: [B, R, C]. keys, values: [B, N, C]. heads: C is heads * width.

    Returns:
        [B, R, C].
    """
    q, k, v = (t.view(*t.shape[:2], heads, -1).transpose(1, 2) for t in (query, keys, values))
    out: Tensor = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return out


def row_column_attention(
    query: Tensor, own: tuple[Tensor, Tensor], beside: tuple[Tensor, Tensor], seen: Tensor | None = None
) -> Tensor:
    """Attention along short lines of tokens, to which a line of others is known.

    Args:
        query: [N, R, C]. own: the lines' keys and values, [N, M, C]. beside: those of the others, head by head,
            [N, H, K, C / H]. seen: bool [N, M], which of the lines' own are there; None for all.

    Returns:
        [N, R, C].
    """
    _, heads, count, _ = beside[0].shape
    q, *lines = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (query, *own))
    k, v = (torch.cat(pair, 2) for pair in zip(lines, beside, strict=True))
    mask = None if seen is None else F.pad(seen, (0, count), value=True)[:, None, None]
    out: Tensor = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    return out


def cross_attention(
    rows: Tensor, layer_norm: LayerNormParams, weight: Tensor, key: Tensor, value: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """LayerNorm, the queries' projection, and their attention over the text.

    Args:
        rows: [B, R, C_in]. layer: weight [C_in], bias [C_in] and eps. weight: [C, C_in].
        key, value: [B, T, C]. heads: C is heads * width.

    Returns:
        [B, R, C], what is attended to; [B, R, C], the queries.
    """
    query = norm_linear(rows, weight, None, layer_norm=layer_norm)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), query


def time_projections(timestep: Tensor, frequencies: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """What every ResNet block adds for a time: its cosines and sines through linear layers, SiLU between them.

    Args:
        timestep: float32 [1]. frequencies: float32 [F]. layers: weights [C_out, C_in] and biases, the first C_in 2 * F.

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


def scatter_rows(full: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """Put rows [B, R, C] into the maps [B, H * W, C], in place; padding goes nowhere. Returns `full`."""
    item, row = placement.positions.lt(full.shape[1]).nonzero(as_tuple=True)
    full[item, placement.positions[item, row]] = rows[item, row]
    return full


def composite(base: Tensor, rows: Tensor, placement: RowPlacement, guidance: float | None) -> Tensor:
    """Classifier-free guidance of the fresh rows, set into copies of the source's prediction.

    Args:
        base: [1 or E, 4, h, w], the source's guided prediction. placement: of at least E items.
        rows: [2 * E, R, 4], first all without the prompt, then all with it; [E, R, 4] where `guidance` is None.
        guidance: the scale of classifier-free guidance, or None.

    Returns:
        [E, 4, h, w].
    """
    if guidance is not None:
        without, with_text = rows.chunk(2)
        rows = without + guidance * (with_text - without)
    full = base.expand(len(rows), -1, -1, -1).flatten(2).transpose(1, 2).clone()  # [E, h * w, 4]
    here = RowPlacement(*(t[: len(rows)] for t in (placement.positions, placement.active_mask, placement.num_rows)))
    mixed: Tensor = scatter_rows(full, rows, here).transpose(1, 2).unflatten(2, base.shape[2:])
    return mixed
