"""Every kernel that edits use on this device, beside the reference in float64, on small random rows.

Knows kernels and tensors; no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.row_plan import make_row_plan

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""Precision -> largest error, in spreads of what is expected; outputs of several spreads are rounded to 8 bits, and
`norm_geglu` multiplies two of them."""

_CHANNELS, _GROUPS, _HEADS, _EPS = 32, 4, 4, 1e-5


@dataclass(frozen=True)
class KernelCheck:
    """A kernel beside its reference.

    Args:
        kernel: its name in `ops`.
        dtype: The dtype of its rows.
        error: the largest, in spreads of what is expected; nan where the kernel failed.
        failure: what it raised, or "".
    """

    kernel: str
    dtype: str
    error: float
    failure: str = ""

    @property
    def right(self) -> bool:
        """Return whether the error is within what the precision allows."""
        return not self.failure and self.error <= ALLOWED[getattr(torch, self.dtype)]


class _Inputs:
    """Random rows of one dtype over an edit's corner of a map; the same numbers for every dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        grid = np.zeros((16, 16), bool)
        grid[3:9, 2:7] = True
        self._device, self._dtype, self._random = device, dtype, torch.Generator().manual_seed(0)
        self.kernel_map = make_row_plan(grid, 1, device).levels[0].same
        active, halo = self.kernel_map.rows_out, len(self.kernel_map.halo)
        self.rows, self.halo = self.draw(2, active, _CHANNELS), self.draw(2, halo, _CHANNELS)
        self.recorded, self.whole = self.draw(2, active, _CHANNELS), self.draw(2, 256, _CHANNELS)
        self.square, self.conv = self.weight(_CHANNELS, _CHANNELS), self.weight(_CHANNELS, _CHANNELS, 3, 3)
        self.wide, self.bias = self.weight(2 * _CHANNELS, _CHANNELS), self.draw(_CHANNELS)
        self.norm = self.draw(_CHANNELS) * 0.1 + 1, self.draw(_CHANNELS), _EPS

    def draw(self, *shape: int) -> Tensor:
        """Normal numbers, rounded to bfloat16 so that every precision computes with the same."""
        numbers = torch.randn(shape, generator=self._random).bfloat16()
        return numbers.to(self._device, self._dtype)

    def weight(self, *shape: int) -> Tensor:
        """A weight that keeps the spread of what it multiplies, rounded likewise."""
        numbers: Tensor = torch.randn(shape, generator=self._random).mul_(float(_CHANNELS) ** -0.5).bfloat16()
        return numbers.to(self._device, self._dtype)

    def affine(self) -> Tensor:
        """GroupNorm's scale and shift, as `norm_conv3x3` takes them."""
        weight, bias, eps = self.norm
        return ops.dense_group_norm_affine(self.whole, _GROUPS, weight, bias, eps)[0]


def _group_norm(x: _Inputs) -> Tensor:
    statistics = ops.group_statistics(x.whole, _GROUPS)
    weight, bias, eps = x.norm
    count = 256 * _CHANNELS // _GROUPS
    return ops.group_norm_affine(x.rows, x.recorded, statistics, None, count, weight, bias, eps)[0]


def _summed_group_norm(x: _Inputs) -> Tensor:
    statistics, parts = ops.group_statistics(x.whole, _GROUPS), ops.row_statistics(x.recorded, _GROUPS)
    weight, bias, eps = x.norm
    count = 256 * _CHANNELS // _GROUPS
    return ops.summed_group_norm_affine(x.rows, parts, statistics, None, count, weight, bias, eps)[0]


KERNELS: dict[str, Callable[[_Inputs], Tensor]] = {
    "group_statistics": lambda x: ops.group_statistics(x.whole, _GROUPS),
    "group_norm_affine": _group_norm,
    "summed_group_norm_affine": _summed_group_norm,
    "dense_group_norm_affine": _Inputs.affine,
    "norm_conv3x3": lambda x: ops.norm_conv3x3(x.rows, x.halo, x.kernel_map, x.conv, x.bias, x.affine()),
    "norm_linear": lambda x: ops.norm_linear(x.rows, x.square, x.bias, layer_norm=x.norm, residual=x.recorded),
    "norm_qkv": lambda x: torch.cat(ops.norm_qkv(x.rows, (x.square,) * 3, x.norm), -1),
    "norm_geglu": lambda x: ops.norm_geglu(x.rows, x.wide, x.bias.repeat(2), x.norm),
    "dense_attention": lambda x: ops.dense_attention(x.rows, x.whole, x.whole.flip(1), _HEADS),
    "cross_attention": lambda x: ops.cross_attention(x.rows, x.norm, x.square, x.recorded, x.recorded, _HEADS)[0],
}
"""Name -> what it makes of the inputs."""


@torch.inference_mode()
def check_kernels(device: torch.device, dtype: torch.dtype) -> list[KernelCheck]:
    """Run every kernel on a device, and the reference in float64 on the CPU.

    Args:
        device: The device that computes.
        dtype: The dtype of the rows.
    """
    exact, rounded = _Inputs(torch.device("cpu"), torch.float64), _Inputs(device, dtype)
    return [_check(name, kernel, exact, rounded, str(dtype).removeprefix("torch.")) for name, kernel in KERNELS.items()]


def _check(name: str, kernel: Callable[[_Inputs], Tensor], exact: _Inputs, rounded: _Inputs, dtype: str) -> KernelCheck:
    with ops.use("reference"):
        expected = kernel(exact).double()
    try:
        got = kernel(rounded).double().cpu()
    except (RuntimeError, AssertionError) as error:  # a build of torch without it: what a report must tell
        return KernelCheck(name, dtype, float("nan"), f"{type(error).__name__}: {error}".splitlines()[0])
    return KernelCheck(name, dtype, float((got - expected).abs().max() / expected.std().clamp(min=0.1)))
