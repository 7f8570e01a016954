"""Attention of active queries in Triton: recorded keys and values where nothing is fresh, then the fresh ones.

Softmax does not care about order, so nothing is scattered or copied, and edits of one source share its record. One
pass with a running maximum is made, as in FlashAttention (arXiv 2205.14135). Where there are few queries, programs
share the keys, and the last one combines their partial sums (see `epilogue`). Needs triton; see `reference` for what
it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.sparse_kernels import torch_backend
from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.operands import DevicePointer, LayerNormParams, RecordedMap
from fisedit.sparse_kernels.triton.epilogue import last_to_arrive, wait_for_prior_kernel
from fisedit.sparse_kernels.triton.launch import (
    attention_tile,
    counters,
    cross_tile,
    next_power_of_two,
    pdl_options,
    power_of_two,
)
from fisedit.sparse_kernels.triton.linear import apply_layer_norm, layer_stats

LOG2E = 1.4426950408889634

WIDEST = 256
"""Channels of a head up to which keys and values of one block fit in shared memory in float32."""


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
    """See `reference.attention`; query, key and value may be slices of one packed tensor.

    Heads that are too wide for a program's shared memory, as an autoencoder's, are left to torch's kernels.
    """
    if query.shape[2] // heads > WIDEST:
        tensors = query, key, value, recorded_key, recorded_value
        return torch_backend.attention(*tensors, placement, heads, scales)
    items, count, channels = query.shape
    assert query.stride() == key.stride() == value.stride() and query.stride(2) == 1, "slices of one packed tensor"
    branches, size, _ = recorded_key.shape
    out = torch.empty(items, count, channels, dtype=query.dtype, device=query.device)
    recorded = [*map(_bytes, (recorded_key, recorded_value)), *map(_pointer, scales or (out, out))]
    width = channels // heads
    block, keys, programs, warps, stages = attention_tile(items * heads, count, size + count, width, query.dtype)
    tiles = triton.cdiv(count, block) * items * heads
    parts = sums = out
    if programs > 1:
        parts = torch.empty(programs, items, count, channels, device=out.device)
        sums = torch.empty(programs, items, heads, 2, count, device=out.device)
    _attend[triton.cdiv(count, block), items * heads, programs](
        query,
        key,
        value,
        *recorded,
        placement.active_mask,
        placement.num_rows,
        out,
        parts,
        sums,
        counters(tiles if programs > 1 else 0, out.device),
        count,
        size,
        channels,
        heads,
        items // branches,
        query.stride(0),
        query.stride(1),
        width**-0.5 * LOG2E,
        WIDTH=width,
        QUANTISED=scales is not None,
        FLOATS=scales is not None and recorded_key.dtype.is_floating_point,
        POINTERS=isinstance(recorded_key, DevicePointer),
        PARTS=next_power_of_two(programs) if programs > 1 else 0,
        BM=block,
        BN=keys,
        BD=power_of_two(width),
        num_warps=warps,
        num_stages=stages,
        **pdl_options(out.device),
    )
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
    """See `reference.cross_attention`; with recorded queries torch's kernels run, as this one projects its own."""
    if recorded_query is not None:
        return torch_backend.cross_attention(rows, layer_norm, weight, key, value, heads, recorded_query)
    items, count, channels = rows.shape
    _, tokens, inner = key.shape
    width = inner // heads
    out, query = (torch.empty(items, count, inner, dtype=rows.dtype, device=rows.device) for _ in range(2))
    block, most, _, warps, stages = cross_tile(count, width, rows.dtype)
    _cross[triton.cdiv(count, block), items * heads](
        rows.contiguous(),
        *layer_norm,
        weight,
        key.contiguous(),
        value.contiguous(),
        out,
        query,
        count,
        channels,
        tokens,
        heads,
        weight.stride(0),
        weight.stride(1),
        width**-0.5 * LOG2E,
        WIDTH=width,
        BM=block,
        BN=most,
        BK=min(64, power_of_two(channels)),
        BD=power_of_two(width),
        num_warps=warps,
        num_stages=stages,
        **pdl_options(out.device),
    )
    return out, query


def _pointer(recorded: RecordedMap) -> Tensor:
    """Return what a kernel is given: the map, or the number that says where it lies."""
    return recorded.address if isinstance(recorded, DevicePointer) else recorded.contiguous()


def _bytes(recorded: RecordedMap) -> Tensor:
    """The same of keys or values; what is in a byte a number is loaded as whole numbers."""
    pointer = _pointer(recorded)
    return pointer.view(torch.int8) if pointer.dtype.itemsize == 1 else pointer


@triton.jit
def _accumulate_block(
    acc, total, peak, q, key, value, key_scales, value_scales, stride, heads, j, d, key_mask, scale,
    WIDTH: tl.constexpr, QUANTISED: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """One block of keys and values into the running softmax; scales of quantised ones lie `heads` apart."""
    inside = key_mask[:, None] & (d < WIDTH)[None, :]
    k = tl.load(key + j[:, None] * stride + d[None, :], mask=inside, other=0)
    v = tl.load(value + j[:, None] * stride + d[None, :], mask=inside, other=0)
    if FLOATS:
        k = k.to(tl.float8e4nv, bitcast=True)
        v = v.to(tl.float8e4nv, bitcast=True)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    if QUANTISED:
        scores *= tl.load(key_scales + j * heads, mask=key_mask, other=0.0).to(tl.float32)[None, :]
        value_scale = tl.load(value_scales + j * heads, mask=key_mask, other=0.0).to(tl.float32)
        v = (v.to(tl.float32) * value_scale[:, None]).to(q.dtype)
    scores = tl.where(key_mask[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no key yet
    weights = tl.exp2(scores - safe[:, None])
    rescale = tl.exp2(peak - safe)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, total * rescale + tl.sum(weights, 1), new_peak


@triton.jit
def _load_pointer(address, kind: tl.constexpr):
    """The map that lies where a number says."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(kind)), 16)


@triton.jit
def _attend(
    query, key, value, recorded_key, recorded_value, key_scales, value_scales, active_mask, num_rows,
    out, parts, sums, counters,
    R, size, C, heads, each, item_stride, row_stride, scale,
    WIDTH: tl.constexpr, QUANTISED: tl.constexpr, FLOATS: tl.constexpr, POINTERS: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[BM] queries of one head of one item, over all keys or some."""
    wait_for_prior_kernel(PDL)
    item = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads * WIDTH
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = (r < R)[:, None] & (d < WIDTH)[None, :]
    q = tl.load(query + item * item_stride + r[:, None] * row_stride + head + d[None, :], mask=inside, other=0.0)
    acc = tl.zeros((BM, BD), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    if POINTERS:
        kind = tl.int8 if QUANTISED else out.dtype.element_ty
        recorded_key = _load_pointer(recorded_key, kind)
        recorded_value = _load_pointer(recorded_value, kind)
        if QUANTISED:
            key_scales = _load_pointer(key_scales, out.dtype.element_ty)
            value_scales = _load_pointer(value_scales, out.dtype.element_ty)
    recorded_start = item // each * size * C + head
    scale_start = item // each * size * heads + head // WIDTH
    programs = tl.num_programs(2)
    positions_per_program = tl.cdiv(tl.cdiv(size, BN), programs) * BN
    begin = tl.program_id(2) * positions_per_program
    for start in range(begin, tl.minimum(begin + positions_per_program, size), BN):
        j = start + tl.arange(0, BN)
        is_active = tl.load(active_mask + item * size + j, mask=j < size, other=1).to(tl.int32)
        is_recorded = is_active == 0
        acc, total, peak = _accumulate_block(
            acc, total, peak, q, recorded_key + recorded_start, recorded_value + recorded_start,
            key_scales + scale_start, value_scales + scale_start, C, heads, j, d, is_recorded, scale,
            WIDTH, QUANTISED, FLOATS,
        )  # fmt: skip
    row_start = item * item_stride + head
    live = tl.load(num_rows + item)
    rows_per_program = tl.cdiv(tl.cdiv(R, BN), programs) * BN
    begin = tl.program_id(2) * rows_per_program
    for start in range(begin, tl.minimum(begin + rows_per_program, live), BN):
        j = start + tl.arange(0, BN)
        acc, total, peak = _accumulate_block(
            acc, total, peak, q, key + row_start, value + row_start, key, value, row_stride, heads, j, d,
            j < live, scale, WIDTH, False, False,
        )  # fmt: skip
    offsets = (item * R + r[:, None]) * C + head + d[None, :]
    last = True
    if PARTS > 0:
        items_heads = tl.num_programs(1)
        row = tl.program_id(1) * 2 * R + r  # of peaks; totals are R further on
        tl.store(parts + tl.program_id(2) * (items_heads * R * WIDTH) + offsets, acc, mask=inside)
        tl.store(sums + tl.program_id(2) * (items_heads * 2 * R) + row, peak, mask=r < R)
        tl.store(sums + tl.program_id(2) * (items_heads * 2 * R) + row + R, total, mask=r < R)
        last = last_to_arrive(counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), programs)
        if last:
            acc, total = _merge_softmax(
                parts + offsets, items_heads * R * WIDTH, sums + row, items_heads * 2 * R, R, programs, inside, r < R,
                PARTS,
            )  # fmt: skip
    if last:
        tl.store(out + offsets, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge_softmax(parts, step, sums, sums_step, R, programs, inside, live, PARTS: tl.constexpr):
    """Combine the running softmax of all programs: peaks and totals at once, then every part by its weight."""
    part = tl.arange(0, PARTS)[:, None]
    present = (part < programs) & live[None, :]
    peaks = tl.load(sums[None, :] + part * sums_step, mask=present, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(sums[None, :] + part * sums_step + R, mask=present, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, 0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)  # no key
    total = tl.sum(totals * tl.exp2(peaks - safe[None, :]), 0)
    acc = tl.zeros(parts.shape, tl.float32)
    for i in tl.static_range(PARTS):  # so that no part waits for another
        present = programs > i + tl.zeros_like(peak).to(tl.int32)
        part_peak = tl.load(sums + i * sums_step, mask=live & present, other=float("-inf"), cache_modifier=".cg")
        part_acc = tl.load(parts + i * step, mask=inside & present[:, None], other=0.0, cache_modifier=".cg")
        acc += part_acc * tl.exp2(part_peak - safe)[:, None]
    return acc, total


@triton.jit
def _cross(
    rows, gamma, beta, eps, weight, key, value, out, query, R, C, T, heads, weight_n, weight_c, scale,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[BM] queries of one head of one item, from rows to what they find in the text."""
    wait_for_prior_kernel(PDL)
    item = tl.program_id(1) // heads
    head = tl.program_id(1) % heads * WIDTH
    inner = heads * WIDTH
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    live = r < R
    row = item * R + r
    d = tl.arange(0, BD)
    inside = live[:, None] & (d < WIDTH)[None, :]
    mean, rstd = layer_stats(rows, row, live, C, eps, BM, BK)
    q = tl.zeros((BM, BD), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        x = tl.load(rows + row[:, None] * C + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0)
        x = apply_layer_norm(x, gamma, beta, mean, rstd, c, C)
        present = (c < C)[:, None] & (d < WIDTH)[None, :]
        w = tl.load(weight + (head + d)[None, :] * weight_n + c[:, None] * weight_c, mask=present, other=0.0)
        q = tl.dot(x, w, q, input_precision="ieee")
    offsets = row[:, None] * inner + head + d[None, :]
    narrow = q.to(query.dtype.element_ty)
    tl.store(query + offsets, narrow, mask=inside)
    acc = tl.zeros((BM, BD), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    text_start = item * T * inner + head
    for start in range(0, T, BN):
        j = start + tl.arange(0, BN)
        acc, total, peak = _accumulate_block(
            acc, total, peak, narrow, key + text_start, value + text_start, key, value, inner, heads, j, d,
            j < T, scale, WIDTH, False, False,
        )  # fmt: skip
    tl.store(out + offsets, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
