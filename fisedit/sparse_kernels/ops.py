"""The face of the kernels: shape checks, and the only switch between reference and fast paths.

`use("reference")` (or FISEDIT_KERNELS=reference) runs the specification; anything else is an optimisation of it. "fast"
is torch's kernels, and on CUDA Triton's where the table in `tuning` says so; "triton" is Triton's everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from fisedit.buckets import Place
from fisedit.errors import InputError
from fisedit.plan import Reads
from fisedit.sparse_kernels import cpu, reference, tuning
from fisedit.sparse_kernels.reference import LayerNorm

BACKENDS: dict[str, ModuleType] = {"reference": reference, "fast": cpu}
TRITON = "triton"


_DEFAULT = os.environ.get("FISEDIT_KERNELS", "fast")
_backend: ContextVar[str] = ContextVar("kernels", default=_DEFAULT)


def _kernels(kernel: str, rows: Tensor) -> ModuleType:
    """The module that computes a kernel for rows [B, R, C] or a map."""
    name = _backend.get()
    if name == "fast" and rows.is_cuda and tuning.prefers_triton(kernel, rows[..., 0].numel()):
        name = TRITON
    return _module(name)


def _module(name: str) -> ModuleType:
    if name == TRITON:
        return _triton()
    if name not in BACKENDS:
        names = ", ".join((*BACKENDS, TRITON))
        raise InputError(f"kernels must be one of {names}, got {name!r}; unset FISEDIT_KERNELS or fix it")
    return BACKENDS[name]


def _triton() -> ModuleType:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not interpreted:
        raise InputError("kernels triton need CUDA, and torch found none; use fast, or set TRITON_INTERPRET=1 to test")
    try:
        return import_module("fisedit.sparse_kernels.gpu")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise InputError("kernels triton need the package triton; pip install 'fisedit[gpu]', or use fast") from error


@contextmanager
def use(name: str) -> Iterator[None]:
    """Run the enclosed calls with the named backend: "reference", "fast" or "triton".

    Raises:
        InputError: another name, or Triton where it cannot run.
    """
    token = _backend.set(name)
    try:
        _module(name)
        yield
    finally:
        _backend.reset(token)


def conv3x3(rows: Tensor, reads: Reads, weight: Tensor, bias: Tensor | None) -> Tensor:
    """3x3 convolution at the output rows of `reads`; see `reference.conv3x3`."""
    assert rows.ndim == 3 and weight.shape[1:] == (rows.shape[2], 3, 3), (rows.shape, weight.shape)
    result: Tensor = _kernels("conv3x3", rows).conv3x3(rows, reads, weight, bias)
    return result


def group_sums(rows: Tensor, groups: int) -> Tensor:
    """Sum and sum of squares by group; see `reference.group_sums`."""
    assert rows.ndim == 3 and rows.shape[2] % groups == 0, (rows.shape, groups)
    result: Tensor = _kernels("group_sums", rows).group_sums(rows, groups)
    return result


def map_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """GroupNorm of a whole map, and its totals; see `reference.map_norm`."""
    assert x.ndim >= 3 and x.shape[1] % groups == 0, (x.shape, groups)
    result: tuple[Tensor, Tensor] = _kernels("map_norm", x).map_norm(x, groups, weight, bias, eps)
    return result


def group_norm(rows: Tensor, totals: Tensor, count: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """GroupNorm under given totals; see `reference.group_norm`."""
    assert totals.shape[0] == rows.shape[0] and rows.shape[2] % totals.shape[1] == 0, (rows.shape, totals.shape)
    result: Tensor = _kernels("group_norm", rows).group_norm(rows, totals, count, weight, bias, eps)
    return result


def affine(
    rows: Tensor,
    recorded: Tensor,
    totals: Tensor,
    valid: Tensor,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Incremental GroupNorm statistics; see `reference.affine`."""
    assert rows.shape == recorded.shape and not len(rows) % len(totals), (rows.shape, recorded.shape, totals.shape)
    kernels = _kernels("affine", rows)
    result: tuple[Tensor, Tensor] = kernels.affine(rows, recorded, totals, valid, count, weight, bias, eps)
    return result


def norm_conv3x3(
    rows: Tensor,
    halo: Tensor,
    taps: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None = None,
    time: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Norm, SiLU, 3x3 convolution and what is added to it; see `reference.norm_conv3x3`."""
    assert rows.shape[::2] == halo.shape[::2] and weight.shape[1:] == (rows.shape[2], 3, 3), (rows.shape, halo.shape)
    kernels = _kernels("norm_conv3x3", rows)
    result: Tensor = kernels.norm_conv3x3(rows, halo, taps, weight, bias, norm, time, residual)
    return result


def norm_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None = None,
    layer: LayerNorm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A norm, a linear layer and what is added to it; see `reference.norm_linear`."""
    assert rows.ndim == 3 and weight.shape[1] == rows.shape[2], (rows.shape, weight.shape)
    kernels = _kernels("linear" if norm is None and layer is None else "norm_linear", rows)
    result: Tensor = kernels.norm_linear(rows, weight, bias, norm, layer, residual)
    return result


def norm_geglu(rows: Tensor, weight: Tensor, bias: Tensor, layer: LayerNorm) -> Tensor:
    """LayerNorm and a gated linear layer; see `reference.norm_geglu`."""
    assert rows.ndim == 3 and weight.shape[1] == rows.shape[2] and not len(weight) % 2, (rows.shape, weight.shape)
    result: Tensor = _kernels("norm_geglu", rows).norm_geglu(rows, weight, bias, layer)
    return result


def attention(
    query: Tensor, key: Tensor, value: Tensor, recorded_key: Tensor, recorded_value: Tensor, place: Place, heads: int
) -> Tensor:
    """Active queries over recorded and fresh keys and values; see `reference.attention`."""
    assert query.shape == key.shape == value.shape and query.shape[2] % heads == 0, (query.shape, key.shape, heads)
    assert recorded_key.shape == recorded_value.shape and not len(query) % len(recorded_key), recorded_key.shape
    kernels = _kernels("attention", query)
    result: Tensor = kernels.attention(query, key, value, recorded_key, recorded_value, place, heads)
    return result


def scatter_rows(full: Tensor, rows: Tensor, place: Place) -> Tensor:
    """Rows into maps, in place; see `reference.scatter_rows`."""
    assert full.shape[::2] == rows.shape[::2] and full.is_contiguous(), (full.shape, rows.shape)
    result: Tensor = _kernels("scatter_rows", rows).scatter_rows(full, rows, place)
    return result


def composite(base: Tensor, rows: Tensor, place: Place, guidance: float | None) -> Tensor:
    """Guided rows over the source's prediction; see `reference.composite`."""
    assert base.ndim == 4 and base.shape[1] == rows.shape[2], (base.shape, rows.shape)
    result: Tensor = _kernels("composite", rows).composite(base, rows, place, guidance)
    return result
