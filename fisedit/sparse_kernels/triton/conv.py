"""The 3x3 convolution of rows in Triton: an implicit GEMM over nine gathered_conv neighbours.

GroupNorm's affine and the SiLU run in its prologue; bias, time embedding and residual in its epilogue; a ResNet block's
1x1 shortcut is more of K. Where there are few rows and K is long (the 16x16 and 8x8 levels: tens of rows, K = 11,520),
programs share K (see `epilogue`). Needs triton; see `reference` for what it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.sparse_kernels.reference import NO_EPILOGUE, ConvEpilogue, Rows
from fisedit.sparse_kernels.row_plan import TAPS
from fisedit.sparse_kernels.triton.epilogue import finish
from fisedit.sparse_kernels.triton.launch import aligned, counters, dense, dummy, pair, split_k, tile_for


def norm_conv3x3(
    rows: Rows,
    halo: Tensor,
    kernel_map: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    epilogue: ConvEpilogue = NO_EPILOGUE,
) -> Tensor:
    """See `reference.norm_conv3x3`; a weight in channels_last is read in place, row by row."""
    items, halo_rows, channels = halo.shape
    time, residual, shortcut = epilogue
    rows_out, width = kernel_map.shape[1], len(weight)
    out = torch.empty(items, rows_out, width, dtype=halo.dtype, device=halo.device)
    if not out.numel():
        return out
    tile = tile_for(items * rows_out, width, channels, halo.dtype)
    first, second = pair(rows, tile.depth, dense)
    halo = dense(halo)
    short, short_second, short_weight, short_channels = first, second, out[0], 0
    if shortcut is not None:
        short, short_second = pair(shortcut[0], tile.depth, Tensor.contiguous)
        short_weight, short_channels = shortcut[1], shortcut[1].shape[1]
        if shortcut[2] is not None:
            bias = shortcut[2] if bias is None else bias + shortcut[2]
    merged = rows_out < tile.rows  # then a tile holds rows of several items
    tiles = triton.cdiv(items * rows_out, tile.rows) if merged else items * triton.cdiv(rows_out, tile.rows)
    columns = triton.cdiv(width, tile.columns)
    blocks = TAPS * triton.cdiv(channels, tile.depth) + triton.cdiv(short_channels, tile.depth)
    programs, each = split_k(tiles * columns, blocks)
    parts = torch.empty(programs, items * rows_out, width, device=out.device) if programs > 1 else out
    _conv[tiles, columns, programs](
        first,
        second,
        halo,
        kernel_map,
        weight,
        dummy(affine, out),
        dummy(bias, out),
        dummy(time, out),
        0 if time is None or len(time) == 1 else time.stride(0),
        dummy(residual if residual is None else residual.contiguous(), out),
        short,
        short_second,
        short_weight,
        out,
        parts,
        counters(tiles * columns if programs > 1 else 0, out.device),
        first.shape[1],
        halo_rows,
        rows_out,
        first.shape[2],
        channels,
        short.shape[2],
        short_channels,
        width,
        items,
        each,
        first.stride(0),
        second.stride(0),
        halo.stride(0),
        0 if len(kernel_map) == 1 else kernel_map.stride(0),
        weight.stride(0),
        weight.stride(1),
        weight.stride(3),
        short_weight.stride(0),
        NORM=affine is not None,
        MERGED=merged,
        PARTS=programs > 1,
        PAIR=first is not second,
        SHORT=shortcut is not None,
        ALIGNED=aligned(first, second, halo, short, short_second),
        BIAS=bias is not None,
        TIME=time is not None,
        RESIDUAL=residual is not None,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _normed(x, norm, item, one, c, C, present, MERGED: tl.constexpr):
    """GroupNorm's affine and the SiLU of rows; what is not present stays zero. If not merged, rows are of `one`."""
    if MERGED:
        pointers = norm + item[:, None] * 2 * C + c[None, :]
        scale = tl.load(pointers, mask=present, other=0.0)
        shift = tl.load(pointers + C, mask=present, other=0.0)
    else:
        pointers = norm + one * 2 * C + c
        scale = tl.load(pointers, mask=c < C, other=0.0)[None, :]
        shift = tl.load(pointers + C, mask=c < C, other=0.0)[None, :]
    z = x.to(tl.float32) * scale + shift
    return tl.where(present, z / (1.0 + tl.exp(-z)), 0.0).to(x.dtype)


@triton.jit
def _shortcut(
    acc, first, second, weight, row, live, n, begin, each, A, C, N, weight_n, ALIGNED: tl.constexpr, BK: tl.constexpr
):
    """Rows through a 1x1 conv, from the block `begin` of K on."""
    for k in range(tl.maximum(begin, 0), tl.minimum(begin + each, tl.cdiv(C, BK))):
        c = k * BK + tl.arange(0, BK)
        pointers = tl.where(k * BK < A, first + row * A, second + row * (C - A) - A)
        if ALIGNED:
            pointers = tl.multiple_of(pointers, 16)
        x = tl.load(pointers[:, None] + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0)
        inside = (c < C)[:, None] & (n < N)[None, :]
        w = tl.load(weight + n[None, :] * weight_n + c[:, None], mask=inside, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _conv(
    first, second, halo, kernel_map, weight, norm, bias, time, time_stride, residual, short, short_second, short_weight,
    out, parts, counters, R, G, R_OUT, A, C, SHORT_A, SHORT_C, N, items, each, first_item, second_item, halo_item,
    map_stride, weight_n, weight_c, weight_tap, short_n,
    NORM: tl.constexpr, MERGED: tl.constexpr, PARTS: tl.constexpr, PAIR: tl.constexpr, SHORT: tl.constexpr,
    ALIGNED: tl.constexpr, BIAS: tl.constexpr, TIME: tl.constexpr, RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of outputs, or of one part of K: [BM] output rows, [BN] channels."""
    lane = tl.arange(0, BM)
    one = 0
    if MERGED:
        row = tl.program_id(0) * BM + lane
        live = row < items * R_OUT
        item = row // R_OUT
        r = row % R_OUT
    else:
        tiles = tl.cdiv(R_OUT, BM)
        r = tl.program_id(0) % tiles * BM + lane
        live = r < R_OUT
        one = tl.program_id(0) // tiles
        item = one + lane * 0
        row = item * R_OUT + r
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    blocks = tl.cdiv(C, BK)
    begin = tl.program_id(2) * each
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(begin, tl.minimum(begin + each, 9 * blocks)):
        tap = k // blocks
        start = k % blocks * BK
        c = start + tl.arange(0, BK)
        at = tl.load(kernel_map + item * map_stride + r * 9 + tap, mask=live, other=R + G).to(tl.int32)
        present = (at < R + G)[:, None] & (c < C)[None, :]
        fresh = first + item * first_item + at * A
        if PAIR:
            fresh = tl.where(start < A, fresh, second + item * second_item + at * (C - A) - A)
        pointers = tl.where(at < R, fresh, halo + item * halo_item + (at - R) * C)
        if ALIGNED:  # which the compiler does not see through the choice of tensors
            pointers = tl.multiple_of(pointers, 16)
        x = tl.load(pointers[:, None] + c[None, :], mask=present, other=0.0)
        if NORM:
            x = _normed(x, norm, item, one, c, C, present, MERGED)
        inside = (c < C)[:, None] & (n < N)[None, :]
        w = tl.load(weight + n[None, :] * weight_n + c[:, None] * weight_c + tap * weight_tap, mask=inside, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if SHORT:
        begin -= 9 * blocks
        acc = _shortcut(
            acc, short, short_second, short_weight, row, live, n, begin, each, SHORT_A, SHORT_C, N, short_n, ALIGNED, BK
        )
    stored = live[:, None] & (n < N)[None, :]
    offsets = row[:, None] * N + n[None, :]
    time += item[:, None] * time_stride + n[None, :]
    step = items * R_OUT * N
    finish(
        acc, out, offsets, stored, parts, counters, step, bias, n, N, time, residual, PARTS, BIAS, TIME, RESIDUAL,
    )  # fmt: skip
