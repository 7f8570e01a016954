"""The gated half of a feed-forward in Triton: LayerNorm, both linears and the gate in one kernel.

Needs triton; see `reference` for what it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fisedit.sparse_kernels.operands import LayerNormParams
from fisedit.sparse_kernels.triton.epilogue import wait_for_prior_kernel
from fisedit.sparse_kernels.triton.launch import geglu_tile, pdl_options
from fisedit.sparse_kernels.triton.linear import apply_layer_norm, layer_stats


def norm_geglu(rows: Tensor, weight: Tensor, bias: Tensor, layer_norm: LayerNormParams) -> Tensor:
    """See `reference.norm_geglu`."""
    items, count, channels = rows.shape
    width = len(weight) // 2
    out = torch.empty(items, count, width, dtype=rows.dtype, device=rows.device)
    tile = geglu_tile(items * count, width, channels, rows.dtype)
    _geglu[triton.cdiv(items * count, tile.rows), triton.cdiv(width, tile.columns)](
        rows.contiguous(),
        weight,
        bias,
        *layer_norm,
        out,
        items * count,
        channels,
        width,
        weight.stride(0),
        weight.stride(1),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(out.device),
    )
    return out


@triton.jit
def _geglu(
    rows, weight, bias, gamma, beta, eps, out, R, C, N, weight_n, weight_c,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of outputs: two products with the same rows."""
    wait_for_prior_kernel(PDL)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < R
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mean, rstd = layer_stats(rows, row, live, C, eps, BM, BK)
    hidden = tl.zeros((BM, BN), tl.float32)
    gate = tl.zeros((BM, BN), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        x = tl.load(rows + row[:, None] * C + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0)
        x = apply_layer_norm(x, gamma, beta, mean, rstd, c, C)
        inside = (c < C)[:, None] & (n < N)[None, :]
        pointers = weight + n[None, :] * weight_n + c[:, None] * weight_c
        hidden = tl.dot(x, tl.load(pointers, mask=inside, other=0.0), hidden, input_precision="ieee")
        gate = tl.dot(x, tl.load(pointers + N * weight_n, mask=inside, other=0.0), gate, input_precision="ieee")
    hidden += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    gate += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    stored = live[:, None] & (n < N)[None, :]
    tl.store(out + row[:, None] * N + n[None, :], (hidden * gate).to(out.dtype.element_ty), mask=stored)
