"""Norms in Triton: incremental GroupNorm statistics, and linear layers behind a GroupNorm or LayerNorm.

Sums of a block are float32, sums of blocks and the statistics float64, always added in the same order. Needs triton;
see `reference` for what it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.sparse_kernels.launch import dummy, power_of_two, tile_for
from fisedit.sparse_kernels.reference import LayerNorm

BLOCK = 64
"""Rows summed at once."""

CHUNK = 512
"""Rows that one program sums; more are shared, and a second kernel adds the parts."""


def affine(
    rows: Tensor,
    recorded: Tensor,
    totals: Tensor,
    valid: Tensor,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `reference.affine`."""
    items, padded, channels = rows.shape
    branches, groups, _ = totals.shape
    out = torch.empty(items, 2, channels, device=rows.device)
    mixed = torch.empty(items, groups, 2, dtype=torch.float64, device=rows.device)
    split = max(1, triton.cdiv(padded, CHUNK))
    parts = torch.empty(items * groups, split, 2, dtype=torch.float64, device=rows.device) if split > 1 else mixed
    ends = (totals.contiguous(), weight, bias, out, mixed, count, eps, groups, items // branches)
    width = channels // groups
    cut = {"W": width, "BW": power_of_two(width)}
    _sums[items * groups, split](
        rows.contiguous(), recorded.contiguous(), valid, parts, *ends, padded, PARTS=split > 1, BR=BLOCK, **cut
    )
    if split > 1:
        _finish[items * groups,](parts, *ends, split, **cut)
    return out, mixed


def norm_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None = None,
    layer: LayerNorm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `reference.norm_linear`."""
    items, count, channels = rows.shape
    if norm is None:  # then items do not matter
        items, count = 1, items * count
    width = len(weight)
    out = torch.empty(*rows.shape[:2], width, dtype=rows.dtype, device=rows.device)
    tile = tile_for(count, width, channels, rows.dtype)
    gamma, beta, eps = layer if layer is not None else (out, out, 0.0)
    _linear[items * triton.cdiv(count, tile.rows), triton.cdiv(width, tile.columns)](
        rows.contiguous(),
        weight,
        dummy(bias, out),
        dummy(norm, out),
        gamma,
        beta,
        eps,
        dummy(residual if residual is None else residual.contiguous(), out),
        out,
        count,
        channels,
        width,
        weight.stride(0),
        weight.stride(1),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        NORM=norm is not None,
        LAYER=layer is not None,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _write(
    total, square, totals, weight, bias, out, mixed, count, eps, groups, each, W: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """One group's totals, and the scale and shift of its channels."""
    index = tl.program_id(0).to(tl.int64)
    recorded = totals + (index // groups // each * groups + index % groups) * 2
    total += tl.load(recorded)
    square += tl.load(recorded + 1)
    tl.store(mixed + index * 2, total)
    tl.store(mixed + index * 2 + 1, square)
    size = tl.cast(count, tl.float64)
    mean = total / size
    variance = square / size - mean * mean
    rstd = 1.0 / tl.sqrt(tl.maximum(variance, 0.0).to(tl.float32) + eps)
    lane = tl.arange(0, BW)
    c = index % groups * W + lane
    inside = lane < W
    scale = rstd * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32) - mean.to(tl.float32) * scale
    there = out + index // groups * 2 * groups * W + c
    tl.store(there, scale, mask=inside)
    tl.store(there + groups * W, shift, mask=inside)


@triton.jit
def _sums(
    rows, recorded, valid, parts, totals, weight, bias, out, mixed, count, eps, groups, each, R,
    PARTS: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Sum and sum of squares of one group of one item, fresh less recorded, or of some of its rows."""
    index = tl.program_id(0)
    live = tl.load(valid + index // groups)
    lane = tl.arange(0, BW)
    here = (index // groups * R).to(tl.int64) * groups * W + index % groups * W + lane[None, :]
    share = tl.cdiv(tl.cdiv(R, BR), tl.num_programs(1)) * BR
    first = tl.program_id(1) * share
    total = tl.zeros((), tl.float64)
    square = tl.zeros((), tl.float64)
    for start in range(first, tl.minimum(first + share, live), BR):
        r = start + tl.arange(0, BR)
        inside = (r < live)[:, None] & (lane < W)[None, :]
        x = tl.load(rows + here + r[:, None] * groups * W, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(recorded + here + r[:, None] * groups * W, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(x, 1), 0).to(tl.float64) - tl.sum(tl.sum(y, 1), 0).to(tl.float64)
        square += tl.sum(tl.sum(x * x, 1), 0).to(tl.float64) - tl.sum(tl.sum(y * y, 1), 0).to(tl.float64)
    if PARTS:
        there = parts + (index * tl.num_programs(1) + tl.program_id(1)) * 2
        tl.store(there, total)
        tl.store(there + 1, square)
    else:
        _write(total, square, totals, weight, bias, out, mixed, count, eps, groups, each, W, BW)


@triton.jit
def _finish(
    parts, totals, weight, bias, out, mixed, count, eps, groups, each, split, W: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Add one group's parts in order."""
    here = parts + tl.program_id(0) * split * 2
    total = tl.zeros((), tl.float64)
    square = tl.zeros((), tl.float64)
    for part in range(split):
        total += tl.load(here + part * 2)
        square += tl.load(here + part * 2 + 1)
    _write(total, square, totals, weight, bias, out, mixed, count, eps, groups, each, W, BW)


@triton.jit
def layer_stats(rows, row, live, C, eps, BM: tl.constexpr, BK: tl.constexpr):
    """Mean and reciprocal deviation of rows, in one pass over differences to each row's first channel."""
    first = tl.load(rows + row * C, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros((BM,), tl.float32)
    square = tl.zeros((BM,), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        inside = live[:, None] & (c < C)[None, :]
        x = tl.load(rows + row[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - first[:, None], 0.0)
        total += tl.sum(x, 1)
        square += tl.sum(x * x, 1)
    mean = total / C
    variance = tl.maximum(square / C - mean * mean, 0.0)
    return mean + first, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def _linear(
    rows, weight, bias, norm, gamma, beta, eps, residual, out, R, C, N, weight_n, weight_c,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of one item's outputs."""
    tiles = tl.cdiv(R, BM)
    item = tl.program_id(0) // tiles
    r = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    live = r < R
    row = item * R + r
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    if LAYER:
        mean, rstd = layer_stats(rows, row, live, C, eps, BM, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        x = tl.load(rows + row[:, None] * C + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0)
        if NORM:
            scale = tl.load(norm + item * 2 * C + c, mask=c < C, other=0.0)
            shift = tl.load(norm + item * 2 * C + C + c, mask=c < C, other=0.0)
            x = (x.to(tl.float32) * scale[None, :] + shift[None, :]).to(rows.dtype.element_ty)
        if LAYER:
            scale = tl.load(gamma + c, mask=c < C, other=0.0).to(tl.float32)
            shift = tl.load(beta + c, mask=c < C, other=0.0).to(tl.float32)
            z = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
            x = (z * scale[None, :] + shift[None, :]).to(rows.dtype.element_ty)
        inside = (c < C)[:, None] & (n < N)[None, :]
        w = tl.load(weight + n[None, :] * weight_n + c[:, None] * weight_c, mask=inside, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    stored = live[:, None] & (n < N)[None, :]
    if RESIDUAL:
        acc += tl.load(residual + row[:, None] * N + n[None, :], mask=stored, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=stored)
