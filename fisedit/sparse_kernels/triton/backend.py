"""The fast path on a GPU: Triton's kernels, and torch's own where nothing is gained.

Same signatures as `reference`. Needs triton, and CUDA or its interpreter; `ops` imports this when it is wanted.
"""

from __future__ import annotations

from torch import Tensor

from fisedit.sparse_kernels.row_plan import TAPS, Reads
from fisedit.sparse_kernels.torch_backend import attend, attend_lines, group_norm, group_sums, map_norm
from fisedit.sparse_kernels.triton.attention import attention, cross_attention
from fisedit.sparse_kernels.triton.conv import norm_conv3x3
from fisedit.sparse_kernels.triton.feedforward import norm_geglu
from fisedit.sparse_kernels.triton.linear import norm_linear, time_rows
from fisedit.sparse_kernels.triton.norm import affine
from fisedit.sparse_kernels.triton.scatter import composite, scatter_rows

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


def conv3x3(rows: Tensor, reads: Reads, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.conv3x3`."""
    return norm_conv3x3(rows, rows[:, :0], reads.table.view(1, -1, TAPS), weight, bias)
