"""The torch backend with attention by xFormers (arXiv 2112.05682).

Same signatures as `reference`. Needs xformers, whose kernels need CUDA; `ops` imports this when it is chosen.
"""

from __future__ import annotations

from torch import Tensor
from xformers.ops import memory_efficient_attention

from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.operands import LayerNormParams, RecordedMap, read_recorded
from fisedit.sparse_kernels.torch_backend import (
    composite,
    conv3x3,
    dense_conv,
    dense_group_norm,
    dense_group_norm_affine,
    dense_linear,
    group_norm,
    group_norm_affine,
    group_statistics,
    mixed_group_norm_affine,
    mixed_tokens,
    norm_conv3x3,
    norm_geglu,
    norm_linear,
    row_column_attention,
    row_statistics,
    scatter_rows,
    summed_group_norm_affine,
    time_projections,
)

__all__ = [
    "attention",
    "composite",
    "conv3x3",
    "cross_attention",
    "dense_attention",
    "dense_conv",
    "dense_group_norm",
    "dense_group_norm_affine",
    "dense_linear",
    "group_norm",
    "group_norm_affine",
    "group_statistics",
    "mixed_group_norm_affine",
    "norm_conv3x3",
    "norm_geglu",
    "norm_linear",
    "row_column_attention",
    "row_statistics",
    "scatter_rows",
    "summed_group_norm_affine",
    "time_projections",
]


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """See `reference.dense_attention`; xFormers takes [B, M, H, K] and gives the same back."""
    split = (t.unflatten(-1, (heads, -1)) for t in (query, keys, values))
    out: Tensor = memory_efficient_attention(*split).flatten(2)
    return out


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
    """See `reference.attention`; over one map of keys, into which the fresh ones are copied."""
    key_scales, value_scales = scales or (None, None)
    keys = mixed_tokens(read_recorded(recorded_key, key_scales), key, placement)
    values = mixed_tokens(read_recorded(recorded_value, value_scales), value, placement)
    return dense_attention(query, keys, values, heads)


def cross_attention(
    rows: Tensor,
    layer_norm: LayerNormParams,
    weight: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    recorded_query: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.cross_attention`."""
    query = norm_linear(rows, weight, None, layer_norm=layer_norm)
    if recorded_query is not None:
        query[len(query) - len(recorded_query) :] = recorded_query
    return dense_attention(query, key, value, heads), query
