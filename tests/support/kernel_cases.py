"""Attention over rows and over a text by one backend, compared with its formula in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.operands import QUANTISED_DTYPES, DevicePointer, dequantise, quantise
from tests.support.padded_edits import DEVICE, TOLERANCE

EPS = 1e-5


def tokens(dtype, batch, rows, channels, mean=0.0):
    return (torch.randn(batch, rows, channels, device=DEVICE) + mean).to(dtype)


def near(got, expected):
    assert got.dtype != torch.float64
    assert ((got.double() - expected).abs() <= TOLERANCE[got.dtype] * (expected.std() + expected.abs())).all()


def dense_attention(edits, backend, heads, width, *, quantised="", pointers=False):
    (keys, mixed_keys), (values, mixed_values) = (edits.maps(0, heads * width) for _ in range(2))
    _, queries = edits.maps(0, heads * width)
    packed = torch.cat([edits.rows(full, 0) for full in (queries, mixed_keys, mixed_values)], -1)
    records, scales = [full.flatten(2).transpose(1, 2).contiguous() for full in (keys, values)], None
    placement = edits.tables.levels[0].placement
    if quantised:
        records, scales = zip(
            *(quantise(record, heads, QUANTISED_DTYPES[quantised]) for record in records),
            strict=True,
        )
        mixed_keys, mixed_values = (
            torch.where(
                placement.active_mask.view(edits.items, 1, *full.shape[2:]), full, known.transpose(1, 2).view_as(full)
            )
            for full, known in (
                (full, dequantise(*parts).repeat_interleave(edits.edits, 0))
                for full, *parts in zip((mixed_keys, mixed_values), records, scales, strict=True)
            )
        )
    there = [(t, torch.tensor([t.data_ptr()], device=DEVICE)) for t in (*records, *(scales or ()))]
    known = [DevicePointer(at, t.shape, t.dtype) if pointers else t for t, at in there]
    with ops.use(backend):
        got = ops.attention(*packed.chunk(3, -1), *known[:2], placement, heads, tuple(known[2:]) or None)
    tokens = (full.double().flatten(2).transpose(1, 2) for full in (queries, mixed_keys, mixed_values))
    q, k, v = (t.unflatten(-1, (heads, width)).transpose(1, 2) for t in tokens)
    weights = (q @ k.mT * width**-0.5).softmax(-1)
    expected = (weights @ v).transpose(1, 2).flatten(2).transpose(1, 2).unflatten(2, queries.shape[2:])
    edits.close(got, expected, 0, spread=mixed_values.double().std())


def cross(backend, dtype, rows, channels, text, heads, width):
    """Cross-attention by a backend beside float64; then with recorded queries in place of its last item's."""
    x, (weight,) = tokens(dtype, 2, rows, channels, mean=2), tokens(dtype, 1, heads * width, channels) * channels**-0.5
    layer = (*tokens(dtype, 2, 1, channels).squeeze(1), EPS)
    key, value = (tokens(dtype, 2, text, heads * width) for _ in range(2))
    normed = F.layer_norm(x.double(), (channels,), layer[0].double(), layer[1].double(), EPS)
    fresh = F.linear(normed, weight.double())
    for recorded in (None, tokens(dtype, 1, rows, heads * width)):
        with ops.use(backend):
            got, query = ops.cross_attention(x, layer, weight, key, value, heads, recorded)
        asked = fresh if recorded is None else torch.cat([fresh[:1], recorded.double()])
        near(query, asked)
        q, k, v = (t.double().unflatten(-1, (heads, width)).transpose(1, 2) for t in (asked, key, value))
        expected = ((q @ k.mT * width**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        limit = TOLERANCE[dtype] * (value.double().std() + expected.abs())
        assert ((got.double() - expected).abs() <= limit).all()
