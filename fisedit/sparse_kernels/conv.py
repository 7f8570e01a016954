"""The 3x3 convolution of rows in Triton: an implicit GEMM over nine gathered neighbours.

GroupNorm's affine and the SiLU run in its prologue; bias, time embedding and residual in its epilogue. Where there are
few rows and K is long (the 16x16 and 8x8 levels: tens of rows, K = 11,520), programs share K and a second kernel adds
their parts. Needs triton; see `reference` for what it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.plan import TAPS
from fisedit.sparse_kernels.launch import Tile, dummy, split_tile


def norm_conv3x3(
    rows: Tensor,
    halo: Tensor,
    taps: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None = None,
    time: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `reference.norm_conv3x3`; a weight in channels_last is read in place, row by row."""
    rows, halo = rows.contiguous(), halo.contiguous()
    items, count, channels = rows.shape
    halo_rows, rows_out, width = halo.shape[1], taps.shape[1], len(weight)
    out = torch.empty(items, rows_out, width, dtype=rows.dtype, device=rows.device)
    if not out.numel():
        return out
    tile, split = split_tile(items * rows_out, width, channels, TAPS, rows.dtype)
    merged = rows_out < tile.rows  # then a tile holds rows of several items
    tiles = triton.cdiv(items * rows_out, tile.rows) if merged else items * triton.cdiv(rows_out, tile.rows)
    blocks = TAPS * triton.cdiv(channels, tile.depth)
    each = triton.cdiv(blocks, split)
    split = triton.cdiv(blocks, each)
    target = out if split == 1 else torch.empty(split, items * rows_out, width, device=rows.device)
    added = (dummy(bias, out), dummy(time, out), 0 if time is None or len(time) == 1 else time.stride(0))
    flags = {"BIAS": bias is not None, "TIME": time is not None, "RESIDUAL": residual is not None}
    residual = dummy(residual if residual is None else residual.contiguous(), out)
    _conv[tiles, triton.cdiv(width, tile.columns), split](
        rows,
        halo,
        taps,
        weight,
        dummy(norm, out),
        *added,
        residual,
        target,
        count,
        halo_rows,
        rows_out,
        channels,
        width,
        items,
        each,
        0 if len(taps) == 1 else taps.stride(0),
        weight.stride(0),
        weight.stride(1),
        weight.stride(3),
        NORM=norm is not None,
        MERGED=merged,
        PARTS=split > 1,
        ALIGNED=channels % 16 == 0 and not (rows.data_ptr() | halo.data_ptr()) % 16,
        **flags,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if split > 1:
        _join(target, added, residual, out, flags)
    return out


def _join(
    parts: Tensor, added: tuple[Tensor, Tensor, int], residual: Tensor, out: Tensor, flags: dict[str, bool]
) -> None:
    split, total, width = parts.shape
    tile = Tile(16, 64, 0, 4, 1)
    _add_parts[triton.cdiv(total, tile.rows), triton.cdiv(width, tile.columns)](
        parts, *added, residual, out, split, out.shape[1], width, total, **flags, BM=tile.rows, BN=tile.columns
    )


@triton.jit
def _epilogue(
    acc, bias, time, time_stride, residual, item, row, n, live, N, BIAS: tl.constexpr, TIME: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add what is added to every row; `row` counts through all items."""
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if TIME:
        acc += tl.load(time + item[:, None] * time_stride + n[None, :], mask=live, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + row[:, None] * N + n[None, :], mask=live, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _conv(
    rows, halo, taps, weight, norm, bias, time, time_stride, residual, out,
    R, G, R_OUT, C, N, items, each, taps_stride, weight_n, weight_c, weight_tap,
    NORM: tl.constexpr, MERGED: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr,
    TIME: tl.constexpr, RESIDUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of outputs, or of one part of K: [BM] output rows, [BN] channels."""
    lane = tl.arange(0, BM)
    if MERGED:
        row = tl.program_id(0) * BM + lane
        live = row < items * R_OUT
        item = row // R_OUT
        r = row % R_OUT
    else:
        tiles = tl.cdiv(R_OUT, BM)
        r = tl.program_id(0) % tiles * BM + lane
        live = r < R_OUT
        item = tl.program_id(0) // tiles + lane * 0
        row = item * R_OUT + r
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    blocks = tl.cdiv(C, BK)
    first = tl.program_id(2) * each
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(first, tl.minimum(first + each, 9 * blocks)):
        tap = k // blocks
        c = k % blocks * BK + tl.arange(0, BK)
        at = tl.load(taps + item * taps_stride + r * 9 + tap, mask=live, other=R + G).to(tl.int32)
        known = (at < R + G)[:, None] & (c < C)[None, :]
        start = tl.where(at < R, rows + (item * R + at) * C, halo + (item * G + at - R) * C)
        if ALIGNED:  # which the compiler does not see through the choice of two tensors
            start = tl.multiple_of(start, 16)
        x = tl.load(start[:, None] + c[None, :], mask=known, other=0.0)
        if NORM:
            if MERGED:
                scale = tl.load(norm + item[:, None] * 2 * C + c[None, :], mask=known, other=0.0)
                shift = tl.load(norm + (item[:, None] * 2 + 1) * C + c[None, :], mask=known, other=0.0)
            else:
                here = norm + tl.program_id(0) // tiles * 2 * C + c
                scale = tl.load(here, mask=c < C, other=0.0)[None, :]
                shift = tl.load(here + C, mask=c < C, other=0.0)[None, :]
            z = x.to(tl.float32) * scale + shift
            z = z / (1.0 + tl.exp(-z))
            x = tl.where(known, z, 0.0).to(rows.dtype.element_ty)
        inside = (c < C)[:, None] & (n < N)[None, :]
        w = tl.load(weight + n[None, :] * weight_n + c[:, None] * weight_c + tap * weight_tap, mask=inside, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    stored = live[:, None] & (n < N)[None, :]
    if PARTS:
        there = out + (tl.program_id(2) * items * R_OUT + row[:, None]) * N + n[None, :]
        tl.store(there, acc, mask=stored)
    else:
        acc = _epilogue(acc, bias, time, time_stride, residual, item, row, n, stored, N, BIAS, TIME, RESIDUAL)
        tl.store(out + row[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _add_parts(
    parts, bias, time, time_stride, residual, out, split, R_OUT, N, total,
    BIAS: tl.constexpr, TIME: tl.constexpr, RESIDUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum the parts of one tile in order, so that every run gives the same bits."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    stored = (row < total)[:, None] & (n < N)[None, :]
    here = parts + row[:, None] * N + n[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for part in range(split):
        acc += tl.load(here + part * total * N, mask=stored, other=0.0)
    acc = _epilogue(acc, bias, time, time_stride, residual, row // R_OUT, row, n, stored, N, BIAS, TIME, RESIDUAL)
    tl.store(out + row[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=stored)
