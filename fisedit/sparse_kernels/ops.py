"""The face of the kernels: shape checks, and the only switch between reference and fast path.

`use("reference")` (or FISEDIT_KERNELS=reference) runs the specification; anything else is an optimisation of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

from torch import Tensor

from fisedit.errors import InputError
from fisedit.plan import Reads
from fisedit.sparse_kernels import cpu, reference

BACKENDS: dict[str, ModuleType] = {"reference": reference, "fast": cpu}


_DEFAULT = os.environ.get("FISEDIT_KERNELS", "fast")
_backend: ContextVar[str] = ContextVar("kernels", default=_DEFAULT)


def _kernels() -> ModuleType:
    name = _backend.get()
    if name not in BACKENDS:
        raise InputError(f"kernels must be one of {', '.join(BACKENDS)}, got {name!r}; unset FISEDIT_KERNELS or fix it")
    return BACKENDS[name]


@contextmanager
def use(name: str) -> Iterator[None]:
    """Run the enclosed calls with the named backend: "reference" or "fast". Raises InputError for another name."""
    token = _backend.set(name)
    try:
        _kernels()
        yield
    finally:
        _backend.reset(token)


def conv3x3(rows: Tensor, reads: Reads, weight: Tensor, bias: Tensor | None) -> Tensor:
    """3x3 convolution at the output rows of `reads`; see `reference.conv3x3`."""
    assert rows.ndim == 3 and weight.shape[1:] == (rows.shape[2], 3, 3), (rows.shape, weight.shape)
    result: Tensor = _kernels().conv3x3(rows, reads, weight, bias)
    return result


def group_sums(rows: Tensor, groups: int) -> Tensor:
    """Sum and sum of squares by group; see `reference.group_sums`."""
    assert rows.ndim == 3 and rows.shape[2] % groups == 0, (rows.shape, groups)
    result: Tensor = _kernels().group_sums(rows, groups)
    return result


def map_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """GroupNorm of a whole map, and its totals; see `reference.map_norm`."""
    assert x.ndim >= 3 and x.shape[1] % groups == 0, (x.shape, groups)
    result: tuple[Tensor, Tensor] = _kernels().map_norm(x, groups, weight, bias, eps)
    return result


def group_norm(rows: Tensor, totals: Tensor, count: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """GroupNorm under given totals; see `reference.group_norm`."""
    assert totals.shape[0] == rows.shape[0] and rows.shape[2] % totals.shape[1] == 0, (rows.shape, totals.shape)
    result: Tensor = _kernels().group_norm(rows, totals, count, weight, bias, eps)
    return result
