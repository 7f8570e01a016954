"""Weights as oneDNN wants them, made once: a product with few rows costs less than putting its weight in order.

Only weights on a CPU in bf16 are packed, and only parameters are looked after: one that was written to gets a
new copy, one that is gone takes its copy with it. It costs a second copy of every weight that sparse steps multiply by,
of SD 1.5 1.7 GB, and takes 8 % off a step of 5 % of the picture, 4 % off one of 15 %.
"""

from __future__ import annotations

from functools import cache
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

_kept: dict[int, tuple[ref[Tensor], int, int, Tensor]] = {}


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, bit for bit; a conv's weight [C_out, C_in, 3, 3] is for patches [..., 9 * C_in], or 1x1 for rows."""
    packed = _packed(weight)
    return F.linear(rows, matrix(weight), bias) if packed is None else _product(rows, packed, bias)


class Matrix:
    """A weight [C_out, C_in] of which nothing else is kept."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = _packs(weight)
        self._weight = _ordered(weight) if self._packed else weight

    def of(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` of rows [..., C_in], with a bias [C_out] or without."""
        return (_product if self._packed else F.linear)(rows, self._weight, bias)


def matrix(weight: Tensor) -> Tensor:
    """A weight as a matrix: [C_out, 9 * C_in] of a 3x3 conv, in place where it is channels_last."""
    return weight if weight.ndim == 2 else weight.permute(0, 2, 3, 1).reshape(len(weight), -1)


def _packs(weight: Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and _available()


def _ordered(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001 (torch has no public name)
    return packed


def _product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")  # noqa: SLF001
    return out


def _packed(weight: Tensor) -> Tensor | None:
    """A weight's copy as it is now, None for one that is not packed."""
    key, found = id(weight), _kept.get(id(weight))
    if found is not None and found[0]() is weight and found[1:3] == _state(weight):
        return found[3]
    if not (isinstance(weight, torch.nn.Parameter) and _packs(weight)) or weight.is_inference():
        return None
    packed = _ordered(matrix(weight.detach()))
    _kept[key] = ref(weight, lambda gone: _forget(key, gone)), *_state(weight), packed
    return packed


def _state(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies, and how often it was written to."""
    return weight.data_ptr(), weight._version  # noqa: SLF001 (it has no public name)


def _forget(key: int, gone: ref[Tensor]) -> None:
    """Another parameter may have the number of one that is gone."""
    if key in _kept and _kept[key][0] is gone:
        del _kept[key]


@cache
def _available() -> bool:
    """Whether this torch has oneDNN's products in bf16 for this CPU."""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return there and torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 (torch has no public name)
