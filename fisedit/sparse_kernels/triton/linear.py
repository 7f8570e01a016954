"""Linear layers of rows in Triton: behind a GroupNorm or LayerNorm, with what is added to them; and the time's.

Where there are few rows, programs share K (see `epilogue`). Needs triton; see `reference` for what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.sparse_kernels.operands import LayerNormParams, Rows, join_rows
from fisedit.sparse_kernels.triton.epilogue import finish, wait_for_prior_kernel
from fisedit.sparse_kernels.triton.launch import (
    NARROWEST,
    aligned,
    counters,
    dummy,
    gemm_tile,
    next_power_of_two,
    pair,
    pdl_options,
)

LANES = 16
"""Outputs of one program of a single row's linear layer."""


def norm_linear(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    layer_norm: LayerNormParams | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `reference.norm_linear`."""
    if affine is not None or layer_norm is not None:
        rows = join_rows(rows)
    width, channels = weight.shape
    first, second = pair(rows, NARROWEST, Tensor.contiguous)
    items, count, _ = first.shape
    out = torch.empty(items, count, width, dtype=first.dtype, device=first.device)
    if affine is None:  # then items do not matter
        items, count = 1, items * count
    beside = first.shape[2] if first is not second else 0
    tile, shared = gemm_tile(
        items, count, width, channels, first.dtype, beside=beside, layer_norm=layer_norm is not None
    )
    tiles, columns, programs = items * triton.cdiv(count, tile.rows), triton.cdiv(width, tile.columns), shared.programs
    gamma, beta, eps = layer_norm if layer_norm is not None else (out, out, 0.0)
    _linear[tiles, columns, programs](
        first,
        second,
        weight,
        dummy(bias, out),
        dummy(affine, out),
        gamma,
        beta,
        eps,
        dummy(residual if residual is None else residual.contiguous(), out),
        out,
        torch.empty(programs, items * count, width, device=out.device) if programs > 1 else out,
        counters(tiles * columns if programs > 1 else 0, out.device),
        count,
        first.shape[2],
        channels,
        width,
        shared.blocks,
        items * count,
        weight.stride(0),
        weight.stride(1),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        NORM=affine is not None,
        LAYER=layer_norm is not None,
        PAIR=first is not second,
        PARTS=next_power_of_two(programs) if programs > 1 else 0,
        ALIGNED=aligned(first, second),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(out.device),
    )
    return out


def time_projections(timestep: Tensor, frequencies: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """See `reference.time_projections`; one kernel for each layer."""
    x = timestep
    for i, (weight, bias) in enumerate(layers):
        width, channels = weight.shape
        out = torch.empty(1, width, dtype=weight.dtype, device=weight.device)
        _row[triton.cdiv(width, LANES),](
            x, frequencies, weight, bias, out, channels, width, weight.stride(0), ANGLES=not i, BN=LANES, BK=256,
            **pdl_options(out.device),
        )  # fmt: skip
        x = out
    return x


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
def apply_layer_norm(x, gamma, beta, mean, rstd, c, C):
    """LayerNorm of a block of rows, under each row's statistics."""
    scale = tl.load(gamma + c, mask=c < C, other=0.0).to(tl.float32)
    shift = tl.load(beta + c, mask=c < C, other=0.0).to(tl.float32)
    z = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
    return (z * scale[None, :] + shift[None, :]).to(x.dtype)


@triton.jit
def _linear(
    first, second, weight, bias, norm, gamma, beta, eps, residual, out, parts, counters,
    R, A, C, N, each, total, weight_n, weight_c,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr,
    PAIR: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of one item's outputs, or of one part of K."""
    wait_for_prior_kernel(PDL)
    tiles = tl.cdiv(R, BM)
    item = tl.program_id(0) // tiles
    r = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    live = r < R
    row = item * R + r
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    if LAYER:
        mean, rstd = layer_stats(first, row, live, C, eps, BM, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    begin = tl.program_id(2) * each * BK
    for start in range(begin, tl.minimum(begin + each * BK, C), BK):
        c = start + tl.arange(0, BK)
        pointers = first + row * A
        if PAIR:
            pointers = tl.where(start < A, pointers, second + row * (C - A) - A)
            if ALIGNED:  # which the compiler does not see through the choice of tensors
                pointers = tl.multiple_of(pointers, 16)
        x = tl.load(pointers[:, None] + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0)
        if NORM:
            scale = tl.load(norm + item * 2 * C + c, mask=c < C, other=0.0)
            shift = tl.load(norm + item * 2 * C + C + c, mask=c < C, other=0.0)
            x = (x.to(tl.float32) * scale[None, :] + shift[None, :]).to(out.dtype.element_ty)
        if LAYER:
            x = apply_layer_norm(x, gamma, beta, mean, rstd, c, C)
        inside = (c < C)[:, None] & (n < N)[None, :]
        w = tl.load(weight + n[None, :] * weight_n + c[:, None] * weight_c, mask=inside, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    stored = live[:, None] & (n < N)[None, :]
    offsets = row[:, None] * N + n[None, :]
    finish(
        acc, out, offsets, stored, parts, counters, total * N, bias, n, N, residual,
        PARTS, BIAS, RESIDUAL,
    )  # fmt: skip


@triton.jit
def _row(
    x, frequencies, weight, bias, out, C, N, weight_n,
    ANGLES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[BN] outputs of a single row; its input is a time's cosines and sines, or goes through the SiLU."""
    wait_for_prior_kernel(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        if ANGLES:
            half = C // 2
            angle = tl.load(x) * tl.load(frequencies + c % half, mask=c < C, other=0.0)
            z = tl.where(c < half, tl.cos(angle), tl.sin(angle))
        else:
            z = tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)
            z = z / (1.0 + tl.exp(-z))
        z = z.to(out.dtype.element_ty).to(tl.float32)
        inside = (n < N)[:, None] & (c < C)[None, :]
        w = tl.load(weight + n[:, None] * weight_n + c[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += tl.sum(w * z[None, :], 1)
    acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, acc.to(out.dtype.element_ty), mask=n < N)
