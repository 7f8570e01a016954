"""Rows into maps in Triton: the scatter, and rows composited over the source's prediction.

Needs triton; see `reference` for what it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.triton.launch import power_of_two

ROWS = 32


def scatter_rows(full: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """See `reference.scatter_rows`."""
    _put(full, rows.contiguous(), rows.shape, placement, full.stride())
    return full


def composite(base: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """See `reference.composite`."""
    edits, count, channels = rows.shape
    out = base.expand(edits, -1, -1, -1).contiguous(memory_format=torch.contiguous_format).clone()
    strides = (out.stride(0), 1, out.stride(1))
    _put(out, rows.contiguous(), (edits, count, channels), placement, strides)
    return out


def _put(
    full: Tensor,
    rows: Tensor,
    shape: tuple[int, ...],
    placement: RowPlacement,
    strides: tuple[int, ...],
) -> None:
    items, count, channels = shape
    lanes = min(128, power_of_two(channels))
    _scatter[items * triton.cdiv(count, ROWS), triton.cdiv(channels, lanes)](
        full,
        rows,
        placement.positions,
        placement.active_mask.shape[1],
        count,
        channels,
        *strides,
        BR=ROWS,
        BC=lanes,
    )


@triton.jit
def _scatter(
    full, rows, positions, size, R, C, item_stride, position_stride, channel_stride,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """[BR] rows of one item, [BC] channels."""
    tiles = tl.cdiv(R, BR)
    item = (tl.program_id(0) // tiles).to(tl.int64)
    r = tl.program_id(0) % tiles * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    at = tl.load(positions + item * R + r, mask=r < R, other=size)
    inside = (at < size)[:, None] & (c < C)[None, :]
    source = rows + (item * R + r[:, None]) * C + c[None, :]
    x = tl.load(source, mask=inside, other=0.0)
    target = full + item * item_stride + at[:, None] * position_stride + c[None, :] * channel_stride
    tl.store(target, x.to(full.dtype.element_ty), mask=inside)
