"""The 3x3 convolution of rows: one kernel gathers nine neighbours of every output row, and cuBLAS multiplies them.

The gathering kernel applies GroupNorm's affine and the SiLU. It writes what is added to the product (bias, time
embedding, residual) where the product is then accumulated. The alternative is one implicit GEMM, whose
prologue normed each neighbour anew for every tile of output channels. On an H100 that made steps 1.3 to 3.4 times as
long (benchmarks/LOG.md). Needs triton; see `reference` for what it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.sparse_kernels.operands import NO_EPILOGUE, ConvEpilogue, Rows
from fisedit.sparse_kernels.row_plan import TAPS
from fisedit.sparse_kernels.triton.epilogue import wait_for_prior_kernel
from fisedit.sparse_kernels.triton.launch import aligned, dense, dummy, pair, pdl_options, power_of_two
from fisedit.sparse_kernels.triton.linear import norm_linear

ROWS, COLUMNS = 64, 64
"""Output rows and channels of one program."""

MAX_PATCH_NUMEL = 1 << 27
"""Gathered numbers at a time, 256 MiB in 16 bit; the items of a larger batch take turns."""


def norm_conv3x3(
    rows: Rows,
    halo: Tensor,
    kernel_map: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    epilogue: ConvEpilogue = NO_EPILOGUE,
) -> Tensor:
    """See `reference.norm_conv3x3`; a weight in channels_last is read in place."""
    items, halo_rows, channels = halo.shape
    time, residual, shortcut = epilogue
    rows_out, width = kernel_map.shape[1], len(weight)
    out = torch.empty(items, rows_out, width, dtype=halo.dtype, device=halo.device)
    if not out.numel():
        return out
    if shortcut is not None:
        residual = norm_linear(*shortcut, residual=residual)
    columns = min(COLUMNS, power_of_two(channels))
    first, second = pair(rows, columns, dense)
    halo, matrix = dense(halo), weight.permute(0, 2, 3, 1).reshape(width, TAPS * channels)
    blocks, added = triton.cdiv(channels, columns), triton.cdiv(width, columns)
    each = max(1, MAX_PATCH_NUMEL // (rows_out * TAPS * channels))
    for start in range(0, items, each):
        count = min(each, items - start)
        patches = torch.empty(count * rows_out, TAPS * channels, dtype=out.dtype, device=out.device)
        _gather[triton.cdiv(count * rows_out, ROWS), TAPS * blocks + added](
            first,
            second,
            halo,
            kernel_map,
            dummy(affine, out),
            dummy(bias, out),
            dummy(time, out),
            0 if time is None or len(time) == 1 else time.stride(0),
            dummy(residual if residual is None else residual.contiguous(), out),
            patches,
            out,
            start,
            count,
            first.shape[1],
            halo_rows,
            rows_out,
            first.shape[2],
            channels,
            width,
            first.stride(0),
            second.stride(0),
            halo.stride(0),
            0 if len(kernel_map) == 1 else kernel_map.stride(0),
            NORM=affine is not None,
            PAIR=first is not second,
            ALIGNED=aligned(first, second, halo),
            BIAS=bias is not None,
            TIME=time is not None,
            RESIDUAL=residual is not None,
            BM=ROWS,
            BC=columns,
            **pdl_options(out.device),
        )
        out[start : start + count].view(-1, width).addmm_(patches, matrix.t())
    return out


@triton.jit
def _gather(
    first, second, halo, kernel_map, norm, bias, time, time_stride, residual, patches, out, start, count,
    R, G, R_OUT, A, C, N, first_item, second_item, halo_item, map_stride,
    NORM: tl.constexpr, PAIR: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, TIME: tl.constexpr,
    RESIDUAL: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[BM, BC] of one tap's neighbours of output rows; the programs behind the last tap write what is added to them.

    `start` is the first item, of `count`; `patches` begin at it.
    """
    wait_for_prior_kernel(PDL)
    local = tl.program_id(0) * BM + tl.arange(0, BM)
    live = local < count * R_OUT
    item = start + local // R_OUT
    r = local % R_OUT
    blocks = tl.cdiv(C, BC)
    if tl.program_id(1) < 9 * blocks:
        tap = tl.program_id(1) // blocks
        begin = tl.program_id(1) % blocks * BC
        c = begin + tl.arange(0, BC)
        at = tl.load(kernel_map + item * map_stride + r * 9 + tap, mask=live, other=R + G).to(tl.int32)
        present = (at < R + G)[:, None] & (c < C)[None, :]
        fresh = first + item * first_item + at * A
        if PAIR:
            fresh = tl.where(begin < A, fresh, second + item * second_item + at * (C - A) - A)
        pointers = tl.where(at < R, fresh, halo + item * halo_item + (at - R) * C)
        if ALIGNED:  # which the compiler does not see through the choice of tensors
            pointers = tl.multiple_of(pointers, 16)
        x = tl.load(pointers[:, None] + c[None, :], mask=present, other=0.0)
        if NORM:
            affine = norm + item[:, None] * 2 * C + c[None, :]
            scale = tl.load(affine, mask=present, other=0.0)
            shift = tl.load(affine + C, mask=present, other=0.0)
            z = x.to(tl.float32) * scale + shift
            x = tl.where(present, z / (1.0 + tl.exp(-z)), 0.0).to(x.dtype)
        target = patches + local.to(tl.int64) * 9 * C + tap * C
        tl.store(target[:, None] + c[None, :], x, mask=live[:, None] & (c < C)[None, :])
    else:
        n = (tl.program_id(1) - 9 * blocks) * BC + tl.arange(0, BC)
        stored = live[:, None] & (n < N)[None, :]
        offsets = (item * R_OUT + r)[:, None] * N + n[None, :]
        total = tl.zeros((BM, BC), tl.float32)
        if BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if TIME:
            times = time + item[:, None] * time_stride + n[None, :]
            total += tl.load(times, mask=stored, other=0.0).to(tl.float32)
        if RESIDUAL:
            total += tl.load(residual + offsets, mask=stored, other=0.0).to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=stored)
