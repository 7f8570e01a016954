"""Attention of active queries in Triton: recorded keys and values where nothing is fresh, then the fresh ones.

Softmax does not care about order, so nothing is scattered or copied, and edits of one source share its record. One
pass with a running maximum, as FlashAttention (arXiv 2205.14135). Needs triton; see `reference` for what it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.buckets import Place
from fisedit.sparse_kernels.launch import power_of_two

LOG2E = 1.4426950408889634


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recorded_key: Tensor,
    recorded_value: Tensor,
    place: Place,
    heads: int,
) -> Tensor:
    """See `reference.attention`; query, key and value may be slices of one packed tensor."""
    items, count, channels = query.shape
    assert query.stride() == key.stride() == value.stride() and query.stride(2) == 1, "slices of one packed tensor"
    assert recorded_key.stride() == recorded_value.stride() and recorded_key.stride(2) == 1, "records of one layout"
    width = channels // heads
    out = torch.empty(items, count, channels, dtype=query.dtype, device=query.device)
    wide = power_of_two(width) > 128 or query.dtype.itemsize > 2
    block, keys = (32 if wide else 64), (32 if wide else 64)
    _attend[triton.cdiv(count, block), items * heads](
        query,
        key,
        value,
        recorded_key,
        recorded_value,
        place.taken,
        place.valid,
        out,
        count,
        recorded_key.shape[1],
        channels,
        heads,
        items // len(recorded_key),
        query.stride(0),
        query.stride(1),
        recorded_key.stride(0),
        recorded_key.stride(1),
        width**-0.5 * LOG2E,
        WIDTH=width,
        BM=block,
        BN=keys,
        BD=power_of_two(width),
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit
def _take(acc, total, peak, q, key, value, stride, j, d, wanted, scale, WIDTH: tl.constexpr):
    """One block of keys and values into the running softmax."""
    inside = wanted[:, None] & (d < WIDTH)[None, :]
    k = tl.load(key + j[:, None] * stride + d[None, :], mask=inside, other=0.0)
    v = tl.load(value + j[:, None] * stride + d[None, :], mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(wanted[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet
    weights = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(peak - safe)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, total * fade + tl.sum(weights, 1), higher


@triton.jit
def _attend(
    query, key, value, recorded_key, recorded_value, taken, valid, out,
    R, size, C, heads, each, item_stride, row_stride, record_stride, position_stride, scale,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """[BM] queries of one head of one item."""
    item = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads * WIDTH
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = (r < R)[:, None] & (d < WIDTH)[None, :]
    q = tl.load(query + item * item_stride + r[:, None] * row_stride + head + d[None, :], mask=inside, other=0.0)
    acc = tl.zeros((BM, BD), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    record = item // each * record_stride + head
    for start in range(0, size, BN):
        j = start + tl.arange(0, BN)
        there = tl.load(taken + item * size + j, mask=j < size, other=1).to(tl.int32)
        wanted = there == 0
        acc, total, peak = _take(
            acc, total, peak, q, recorded_key + record, recorded_value + record, position_stride, j, d, wanted, scale,
            WIDTH,
        )  # fmt: skip
    fresh = item * item_stride + head
    live = tl.load(valid + item)
    for start in range(0, live, BN):
        j = start + tl.arange(0, BN)
        acc, total, peak = _take(
            acc, total, peak, q, key + fresh, value + fresh, row_stride, j, d, j < live, scale, WIDTH
        )
    there = out + (item * R + r[:, None]) * C + head + d[None, :]
    tl.store(there, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
