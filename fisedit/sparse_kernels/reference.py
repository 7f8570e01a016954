"""The specification: every kernel in the plainest torch, slow and obvious. All backends are checked against it.

Rows are [B, R, C]; see `fisedit.values` for the legend. Knows tensors and index tables only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.operands import (
    NO_EPILOGUE,
    ConvEpilogue,
    LayerNormParams,
    RecordedMap,
    Rows,
    join_rows,
    read_recorded,
)
from fisedit.sparse_kernels.reference_group_norm import (
    dense_group_norm,
    dense_group_norm_affine,
    group_norm,
    group_norm_affine,
    group_statistics,
    mixed_group_norm_affine,
    row_statistics,
    summed_group_norm_affine,
)
from fisedit.sparse_kernels.row_plan import TAPS, KernelMap

__all__ = [
    "attention",
    "composite",
    "conv3x3",
    "cross_attention",
    "dense_attention",
    "dense_conv",
    "dense_group_norm",
    "dense_group_norm_affine",
    "dense_linear",
    "group_norm",
    "group_norm_affine",
    "group_statistics",
    "mixed_group_norm_affine",
    "norm_conv3x3",
    "norm_geglu",
    "norm_linear",
    "row_column_attention",
    "row_statistics",
    "scatter_rows",
    "summed_group_norm_affine",
    "time_projections",
]


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


def dense_conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0) -> Tensor:
    """A convolution of a whole map.

    Args:
        x: [B, C_in, H, W].
        weight: [C_out, C_in, k, k].
        bias: [C_out] or None.
        stride: in positions.
        padding: in positions.

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
