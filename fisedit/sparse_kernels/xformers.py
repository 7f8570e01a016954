"""The fast path with attention by xFormers (arXiv 2112.05682): the same signatures, everything else as in `cpu`.

Needs xformers, whose kernels need CUDA; `ops` imports this when it is wanted.
"""

from __future__ import annotations

from torch import Tensor
from xformers.ops import memory_efficient_attention

from fisedit.sparse_kernels.buckets import Place
from fisedit.sparse_kernels.reference import LayerNorm, Recorded, known
from fisedit.sparse_kernels.torch_backend import (
    affine,
    attend_lines,
    composite,
    conv3x3,
    group_norm,
    group_sums,
    map_norm,
    mixed_tokens,
    norm_conv3x3,
    norm_geglu,
    norm_linear,
    scatter_rows,
    time_rows,
)

__all__ = [
    "affine",
    "attend",
    "attend_lines",
    "attention",
    "composite",
    "conv3x3",
    "cross_attention",
    "group_norm",
    "group_sums",
    "map_norm",
    "norm_conv3x3",
    "norm_geglu",
    "norm_linear",
    "scatter_rows",
    "time_rows",
]


def attend(query: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """See `reference.attend`; xFormers takes [B, M, H, K] and gives the same back."""
    split = (t.unflatten(-1, (heads, -1)) for t in (query, keys, values))
    out: Tensor = memory_efficient_attention(*split).flatten(2)
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recorded_key: Recorded,
    recorded_value: Recorded,
    place: Place,
    heads: int,
    scales: tuple[Recorded, Recorded] | None = None,
) -> Tensor:
    """See `reference.attention`; over one map of keys, into which the fresh ones are copied."""
    key_scales, value_scales = scales or (None, None)
    keys = mixed_tokens(known(recorded_key, key_scales), key, place)
    values = mixed_tokens(known(recorded_value, value_scales), value, place)
    return attend(query, keys, values, heads)


def cross_attention(
    rows: Tensor, layer: LayerNorm, weight: Tensor, key: Tensor, value: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """See `reference.cross_attention`."""
    query = norm_linear(rows, weight, None, layer=layer)
    return attend(query, key, value, heads), query
