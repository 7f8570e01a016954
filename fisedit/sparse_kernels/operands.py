"""The operands of kernels beside plain tensors: rows in two tensors, recorded maps and where they lie, and epilogues.

Rows are [B, R, C]; see `fisedit.values` for the legend.
"""

from __future__ import annotations

from ctypes import c_byte
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LayerNormParams = tuple[Tensor, Tensor, float]
"""Weight [C], bias [C] and eps."""


Rows = Tensor | tuple[Tensor, Tensor]
"""Rows [B, R, C]; or two [B, R, C1] and [B, R, C2] that stand for both side by side, C = C1 + C2."""


class DevicePointer(NamedTuple):
    """A contiguous tensor of a known shape at an address that is read from device memory, so that it is not copied.

    Args:
        address: int64 [1], on the device.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
    """

    address: Tensor
    """int64 [1]."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def to_tensor(self) -> Tensor:
        """The tensor, for addresses in a CPU's memory only."""
        assert self.address.device.type == "cpu", self.address.device
        size = prod(self.shape) * self.dtype.itemsize
        memory = (c_byte * size).from_address(int(self.address))
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype).view(self.shape)


class RecordedInput(Protocol):
    """A norm's recorded input map; each kernel reads what it needs of it."""

    def whole(self) -> Tensor:
        """The map [B, H * W, C], a fresh tensor."""

    def rows(self, positions: Tensor) -> Tensor:
        """Rows [B, P, C] at positions int64 [P], a fresh tensor."""

    def statistics(self) -> Tensor | None:
        """Its `group_statistics`, float64 [B, groups, 2]; None where only the whole map gives them."""


class ConvEpilogue(NamedTuple):
    """The addends of a convolution's outputs.

    Args:
        time: [B, C_out], added to every row; or None.
        residual: [B, R_out, C_out], or None.
        shortcut: rows [B, R_out, C], and weight [C_out, C] and bias [C_out] or None of the linear layer they go
            through; or None.
    """

    time: Tensor | None = None
    residual: Tensor | None = None
    shortcut: tuple[Rows, Tensor, Tensor | None] | None = None


NO_EPILOGUE = ConvEpilogue()


RecordedMap = Tensor | DevicePointer
"""A recorded map [S, P, C], or where it lies."""


def join_rows(rows: Rows) -> Tensor:
    """Concatenate rows that are in two tensors."""
    return rows if isinstance(rows, Tensor) else torch.cat(rows, -1)


QUANTISED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The types that a number may be kept in: whole steps, as fine everywhere, or floats, finer near zero."""


def quantise(rows: Tensor, heads: int, kind: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Quantise rows to one byte a number, with one scale for each row and head.

    Args:
        rows: [B, R, C].
        heads: attention heads; C is heads * width.
        kind: one of `QUANTISED_DTYPES`; a head's largest number becomes the largest of this type.

    Returns:
        [B, R, C] of `kind`; the scales [B, R, heads] in the dtype of `rows`.
    """
    whole = not kind.is_floating_point
    max_value = torch.iinfo(kind).max if whole else torch.finfo(kind).max
    grouped = rows.float().unflatten(-1, (heads, -1))
    scales = (grouped.abs().amax(-1) / max_value).to(rows.dtype)
    units = grouped / scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return (units.round() if whole else units).clamp(-max_value, max_value).to(kind).flatten(2), scales


def read_recorded(recorded: RecordedMap, scales: RecordedMap | None) -> Tensor:
    """Read a recorded map.

    Args:
        recorded: [S, P, C], or the pointer to it.
        scales: [S, P, heads] of a quantised map, or the pointer to them; None for one that is not quantised.
    """
    numbers = recorded.to_tensor() if isinstance(recorded, DevicePointer) else recorded
    if scales is None:
        return numbers
    return dequantise(numbers, scales.to_tensor() if isinstance(scales, DevicePointer) else scales)


def dequantise(numbers: Tensor, scales: Tensor) -> Tensor:
    """Invert `quantise`, up to half a unit (int8), or a sixteenth of a number (fp8).

    Args:
        numbers: [B, R, C] of one byte a number.
        scales: [B, R, heads].

    Returns:
        [B, R, C] in the dtype of `scales`.
    """
    rows: Tensor = numbers.to(scales.dtype).unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
    return rows.flatten(2)
