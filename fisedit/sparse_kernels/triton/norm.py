"""Incremental GroupNorm statistics in Triton.

Sums of a block are float32, sums of blocks and the statistics float64, always added in the same order. Needs triton;
see `reference` for what it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.sparse_kernels.operands import LayerNormParams, Rows
from fisedit.sparse_kernels.triton.epilogue import last_to_arrive, wait_for_prior_kernel
from fisedit.sparse_kernels.triton.launch import counters, pair, pdl_options, power_of_two, sums_tile


def group_norm_affine(
    rows: Rows,
    recorded: Tensor,
    statistics: Tensor,
    num_rows: Tensor,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `reference.group_norm_affine`."""
    first, second = pair(rows, 1, Tensor.contiguous)
    affine, mixed, _ = _affine((first, second), recorded, statistics, num_rows, count, (weight, bias, eps))
    return affine, mixed


def summed_group_norm_affine(
    rows: Tensor,
    recorded: Tensor,
    statistics: Tensor,
    num_rows: Tensor,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.summed_group_norm_affine`; statistics of padding rows are not written."""
    rows, fresh = rows.contiguous(), torch.empty_like(recorded)
    return _affine((rows, rows), recorded, statistics, num_rows, count, (weight, bias, eps), fresh)


def _affine(
    rows: tuple[Tensor, Tensor],
    recorded: Tensor,
    statistics: Tensor,
    num_rows: Tensor,
    count: int,
    norm: LayerNormParams,
    fresh: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Both forms: `recorded` has rows, or their statistics where those of the fresh ones are written to `fresh`."""
    (first, second), (items, padded, _), (weight, bias, eps) = rows, recorded.shape, norm
    channels, (branches, groups, _) = len(weight), statistics.shape
    out = torch.empty(items, 2, channels, device=recorded.device)
    mixed = torch.empty(items, groups, 2, dtype=torch.float64, device=recorded.device)
    tile = sums_tile(padded)
    programs = max(1, triton.cdiv(padded, tile.chunk))
    parts = torch.empty(items * groups, programs, 2, dtype=torch.float64, device=out.device) if programs > 1 else mixed
    width, written = channels // groups, mixed if fresh is None else fresh
    _sums[items * groups, programs](
        first,
        second,
        recorded.contiguous(),
        written,
        num_rows,
        parts,
        counters(items * groups if programs > 1 else 0, out.device),
        statistics.contiguous(),
        weight,
        bias,
        out,
        mixed,
        count,
        eps,
        groups,
        items // branches,
        padded,
        first.shape[2],
        PARTS=programs > 1,
        PAIR=first is not second,
        SUMMED=fresh is not None,
        BR=tile.block,
        W=width,
        BW=power_of_two(width),
        num_warps=tile.warps,
        **pdl_options(out.device),
    )
    return out, mixed, written


@triton.jit
def _write(
    total, square, statistics, weight, bias, out, mixed, count, eps, groups, each, W: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """One group's statistics, and the scale and shift of its channels."""
    index = tl.program_id(0).to(tl.int64)
    recorded = statistics + (index // groups // each * groups + index % groups) * 2
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
    pointers = out + index // groups * 2 * groups * W + c
    tl.store(pointers, scale, mask=inside)
    tl.store(pointers + groups * W, shift, mask=inside)


@triton.jit
def _sums(
    first, second, recorded, fresh, num_rows, parts, counters, statistics, weight, bias, out, mixed, count, eps, groups,
    each, R, A, PARTS: tl.constexpr, PAIR: tl.constexpr, SUMMED: tl.constexpr, W: tl.constexpr, BR: tl.constexpr,
    BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum and sum of squares of one group of one item, fresh less recorded, or of some of its rows."""
    wait_for_prior_kernel(PDL)
    index = tl.program_id(0)
    item = (index // groups).to(tl.int64)
    live = tl.load(num_rows + item)
    lane = tl.arange(0, BW)
    channels = groups * W
    c = index % groups * W + lane
    old = recorded + item * R * channels + c
    new = first + item * R * A + c
    second_base = second + item * R * (channels - A) + c - A
    share = tl.cdiv(tl.cdiv(R, BR), tl.num_programs(1)) * BR
    begin = tl.program_id(1) * share
    total = tl.zeros((), tl.float64)
    square = tl.zeros((), tl.float64)
    for start in range(begin, tl.minimum(begin + share, live), BR):
        r = start + tl.arange(0, BR)
        inside = (r < live)[:, None] & (lane < W)[None, :]
        if PAIR:  # two loads: a choice of pointers would be read two bytes at a time
            x = tl.load(new[None, :] + r[:, None] * A, mask=inside & (c < A)[None, :], other=0.0).to(tl.float32)
            pointers = second_base[None, :] + r[:, None] * (channels - A)
            x += tl.load(pointers, mask=inside & (c >= A)[None, :], other=0.0).to(tl.float32)
        else:
            x = tl.load(new[None, :] + r[:, None] * A, mask=inside, other=0.0).to(tl.float32)
        row_total, row_square = tl.sum(x, 1), tl.sum(x * x, 1)
        if SUMMED:
            at = (item * R + r) * 2 * groups + index % groups
            old_total = tl.load(recorded + at, mask=r < live, other=0.0)
            old_square = tl.load(recorded + at + groups, mask=r < live, other=0.0)
            tl.store(fresh + at, row_total, mask=r < live)
            tl.store(fresh + at + groups, row_square, mask=r < live)
        else:
            y = tl.load(old[None, :] + r[:, None] * channels, mask=inside, other=0.0).to(tl.float32)
            old_total, old_square = tl.sum(y, 1), tl.sum(y * y, 1)
        total += tl.sum(row_total, 0).to(tl.float64) - tl.sum(old_total, 0).to(tl.float64)
        square += tl.sum(row_square, 0).to(tl.float64) - tl.sum(old_square, 0).to(tl.float64)
    last = True
    if PARTS:
        programs = tl.num_programs(1)
        pointers = parts + index * programs * 2
        tl.store(pointers + tl.program_id(1) * 2, total)
        tl.store(pointers + tl.program_id(1) * 2 + 1, square)
        last = last_to_arrive(counters + index, programs)
        if last:
            total = tl.zeros((), tl.float64)
            square = tl.zeros((), tl.float64)
            for part in range(programs):
                total += tl.load(pointers + part * 2, cache_modifier=".cg")
                square += tl.load(pointers + part * 2 + 1, cache_modifier=".cg")
    if last:
        _write(total, square, statistics, weight, bias, out, mixed, count, eps, groups, each, W, BW)
