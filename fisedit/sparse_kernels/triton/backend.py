"""Triton's kernels under the names of `reference`, and torch's own where Triton gains nothing.

Same signatures as `reference`. Needs triton, and CUDA or its interpreter; `ops` imports this when it is chosen.
"""

from __future__ import annotations

from fisedit.sparse_kernels.torch_backend import (
    composite,
    conv3x3,
    dense_attention,
    dense_conv,
    dense_group_norm,
    dense_group_norm_affine,
    dense_linear,
    group_norm,
    group_statistics,
    mixed_group_norm_affine,
    row_column_attention,
    row_statistics,
    scatter_rows,
)
from fisedit.sparse_kernels.triton.attention import attention, cross_attention
from fisedit.sparse_kernels.triton.conv import norm_conv3x3
from fisedit.sparse_kernels.triton.feedforward import norm_geglu
from fisedit.sparse_kernels.triton.linear import norm_linear, time_projections
from fisedit.sparse_kernels.triton.norm import group_norm_affine, summed_group_norm_affine

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
