"""The interface of the kernels: shape checks, and the only switch between backends.

FISEDIT_KERNELS, or `use`, chooses the backend. "reference" is the specification; all others are optimisations of it.
"fast", the default, is torch's kernels on every device. On CUDA a kernel of Triton's replaces one of them where
`tuning.TRITON_ROWS` says that it is faster. "triton" and "xformers" (torch's kernels with attention by xFormers) run
where they are chosen by name, and raise where they cannot. Knows no model; kernels see rows and index tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.errors import InputError
from fisedit.machine.stopwatch import layer
from fisedit.sparse_kernels import prepacked, reference, torch_backend, tuning
from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.operands import NO_EPILOGUE, ConvEpilogue, LayerNormParams, RecordedInput, RecordedMap, Rows
from fisedit.sparse_kernels.row_plan import TAPS, KernelMap, Level

BACKENDS: dict[str, ModuleType] = {"reference": reference, "fast": torch_backend}
TRITON, XFORMERS = "triton", "xformers"

_DEFAULT = os.environ.get("FISEDIT_KERNELS", "fast")
_backend: ContextVar[str] = ContextVar("kernels", default=_DEFAULT)


def _kernels(kernel: str, rows: Rows) -> ModuleType:
    """The backend module that computes a kernel for rows [B, R, C] or a map."""
    rows = rows if isinstance(rows, Tensor) else rows[0]
    name = _backend.get()
    if name == "fast" and tuning.prefers_triton(kernel, rows[..., 0].numel(), rows.shape[-1], rows.device):
        name = TRITON if _has_triton() else name
    return _module(name)


def _exact(kernel: str, rows: Rows) -> ModuleType:
    """The backend module for rows without padding; Triton's kernels are for padded ones."""
    kernels = _kernels(kernel, rows)
    return kernels if kernels is reference else torch_backend


def _shape(rows: Rows) -> tuple[int, ...]:
    """[B, R, C] of rows, whether they are in one tensor or two."""
    if isinstance(rows, Tensor):
        return tuple(rows.shape)
    assert rows[0].shape[:-1] == rows[1].shape[:-1], (rows[0].shape, rows[1].shape)
    return *rows[0].shape[:-1], sum(part.shape[-1] for part in rows)


def _module(name: str) -> ModuleType:
    if name == TRITON:
        return _triton()
    if name == XFORMERS:
        return _optional("xformers", XFORMERS, "xformers")
    if name not in BACKENDS:
        names = ", ".join((*BACKENDS, TRITON, XFORMERS))
        raise InputError(f"kernels must be one of {names}, got {name!r}; unset FISEDIT_KERNELS or fix it")
    return BACKENDS[name]


@cache
def _has_triton() -> bool:
    return find_spec(TRITON) is not None and torch.cuda.is_available()


def _triton() -> ModuleType:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not interpreted:
        raise InputError("kernels triton need CUDA, and torch found none; use fast, or set TRITON_INTERPRET=1 to test")
    return _optional("triton.backend", TRITON, "gpu")


def _optional(module: str, package: str, extra: str) -> ModuleType:
    """Import a backend that needs a package which may be missing."""
    try:
        return import_module(f"fisedit.sparse_kernels.{module}")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != package:
            raise
        line = f"kernels {package} need the package {package}; pip install 'fisedit[{extra}]', or use fast"
        raise InputError(line) from error


@contextmanager
def use(name: str) -> Iterator[None]:
    """Run the enclosed calls with one backend.

    Args:
        name: "reference", "fast", "triton" or "xformers".

    Raises:
        InputError: another name, or Triton or xFormers where they cannot run.
    """
    token = _backend.set(name)
    try:
        _module(name)
        yield
    finally:
        _backend.reset(token)


def reads_in_place() -> bool:
    """Return whether attention reads recorded keys and values through a `operands.DevicePointer`."""
    return _backend.get() == TRITON


def conv3x3(rows: Tensor, kernel_map: KernelMap, weight: Tensor, bias: Tensor | None) -> Tensor:
    """3x3 convolution at the output rows of `kernel_map`; see `reference.conv3x3`."""
    assert rows.ndim == 3 and weight.shape[1:] == (rows.shape[2], 3, 3), (rows.shape, weight.shape)
    result: Tensor = _kernels("conv3x3", rows).conv3x3(rows, kernel_map, weight, bias)
    return result


def group_statistics(rows: Tensor, groups: int) -> Tensor:
    """Sum and sum of squares by group; see `reference.group_statistics`."""
    assert rows.ndim == 3 and rows.shape[2] % groups == 0, (rows.shape, groups)
    result: Tensor = _kernels("group_statistics", rows).group_statistics(rows, groups)
    return result


def dense_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """GroupNorm of a whole map, and its statistics; see `reference.dense_group_norm`."""
    assert x.ndim >= 3 and x.shape[1] % groups == 0, (x.shape, groups)
    result: tuple[Tensor, Tensor] = _kernels("dense_group_norm", x).dense_group_norm(x, groups, weight, bias, eps)
    return result


def group_norm(rows: Tensor, statistics: Tensor, count: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """GroupNorm under given statistics; see `reference.group_norm`."""
    assert statistics.shape[0] == rows.shape[0] and rows.shape[2] % statistics.shape[1] == 0, (
        rows.shape,
        statistics.shape,
    )
    result: Tensor = _kernels("group_norm", rows).group_norm(rows, statistics, count, weight, bias, eps)
    return result


def refresh() -> None:
    """Drop packed copies of weights that were replaced or written to; see `prepacked.refresh`."""
    prepacked.refresh()


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer over a whole map; see `reference.dense_linear`."""
    assert x.shape[-1] == weight.shape[1], (x.shape, weight.shape)
    result: Tensor = _kernels("dense_linear", x).dense_linear(x, weight, bias)
    return result


def dense_conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0) -> Tensor:
    """A convolution of a whole map; see `reference.dense_conv`."""
    assert x.ndim == 4 and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    result: Tensor = _kernels("dense_conv", x).dense_conv(x, weight, bias, stride, padding)
    return result


@layer("group norm")
def dense_group_norm_affine(
    rows: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """GroupNorm's scale and shift of a whole map; see `reference.dense_group_norm_affine`."""
    assert rows.ndim == 3 and rows.shape[2] % groups == 0, (rows.shape, groups)
    kernels = _kernels("dense_group_norm_affine", rows)
    result: tuple[Tensor, Tensor] = kernels.dense_group_norm_affine(rows, groups, weight, bias, eps)
    return result


@layer("group norm")
def group_norm_affine(
    rows: Rows,
    recorded: Tensor,
    statistics: Tensor,
    num_rows: Tensor | None,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Incremental GroupNorm statistics; see `reference.group_norm_affine`."""
    assert _shape(rows) == recorded.shape and not len(recorded) % len(statistics), (recorded.shape, statistics.shape)
    kernels = _exact("group_norm_affine", rows) if num_rows is None else _kernels("group_norm_affine", rows)
    result: tuple[Tensor, Tensor] = kernels.group_norm_affine(
        rows, recorded, statistics, num_rows, count, weight, bias, eps
    )
    return result


@layer("group norm")
def mixed_group_norm_affine(
    rows: Tensor,
    recorded: RecordedInput,
    level: Level,
    halo: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """GroupNorm's scale and shift of a recorded map with fresh rows; see `reference.mixed_group_norm_affine`."""
    assert rows.shape[1] == level.rows and not rows.shape[2] % groups, (rows.shape, level.rows, groups)
    kernels = _exact("group_norm_affine", rows)
    result: tuple[Tensor, Tensor, Tensor | None] = kernels.mixed_group_norm_affine(
        rows, recorded, level, halo, groups, weight, bias, eps
    )
    return result


@layer("conv")
def norm_conv3x3(
    rows: Rows,
    halo: Tensor,
    kernel_map: KernelMap | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    epilogue: ConvEpilogue = NO_EPILOGUE,
) -> Tensor:
    """Norm, SiLU, 3x3 convolution and what is added to it; see `reference.norm_conv3x3`."""
    shape = _shape(rows)
    assert shape[::2] == halo.shape[::2] and weight.shape[1:] == (shape[2], 3, 3), (shape, halo.shape, weight.shape)
    kernels = _exact("norm_conv3x3", rows) if isinstance(kernel_map, KernelMap) else _kernels("norm_conv3x3", rows)
    if kernels is reference and isinstance(kernel_map, KernelMap):
        kernel_map = kernel_map.table.view(1, -1, TAPS).expand(len(halo), -1, -1)
    if kernels is not torch_backend and epilogue.shortcut is not None:
        entering, projection, shift = epilogue.shortcut
        epilogue = epilogue._replace(shortcut=(entering, projection.flatten(1), shift))
    result: Tensor = kernels.norm_conv3x3(rows, halo, kernel_map, weight, bias, affine, epilogue)
    return result


@layer("linear")
def norm_linear(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    layer_norm: LayerNormParams | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A norm, a linear layer and what is added to it; see `reference.norm_linear`."""
    shape = _shape(rows)
    assert len(shape) == 3 and weight.shape[1] == shape[2], (shape, weight.shape)
    kernels = _kernels("linear" if affine is None and layer_norm is None else "norm_linear", rows)
    weight = weight if kernels is torch_backend else weight.flatten(1)
    result: Tensor = kernels.norm_linear(rows, weight, bias, affine, layer_norm, residual)
    return result


@layer("linear")
def norm_qkv(rows: Tensor, weights: tuple[Tensor, ...], layer_norm: LayerNormParams) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm and the projections to queries, keys and values.

    Args:
        rows: [B, R, C_in].
        weights: three [C, C_in], or one [3 * C, C_in] with all of them.
        layer_norm: weight [C_in], bias [C_in] and eps.

    Returns:
        Three times [B, R, C].
    """
    if len(weights) == 1:
        query, key, value = norm_linear(rows, weights[0], None, layer_norm=layer_norm).chunk(3, -1)
    else:
        normed = F.layer_norm(rows, rows.shape[-1:], *layer_norm)
        query, key, value = (norm_linear(normed, weight, None) for weight in weights)
    return query, key, value


@layer("feed-forward")
def norm_geglu(rows: Tensor, weight: Tensor, bias: Tensor, layer_norm: LayerNormParams) -> Tensor:
    """LayerNorm and a gated linear layer; see `reference.norm_geglu`."""
    assert rows.ndim == 3 and weight.shape[1] == rows.shape[2] and not len(weight) % 2, (rows.shape, weight.shape)
    result: Tensor = _kernels("norm_geglu", rows).norm_geglu(rows, weight, bias, layer_norm)
    return result


@layer("attention")
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
    """Active queries over recorded and fresh keys and values; see `reference.attention`."""
    assert query.shape == key.shape == value.shape and query.shape[2] % heads == 0, (query.shape, key.shape, heads)
    assert recorded_key.shape == recorded_value.shape and not len(query) % recorded_key.shape[0], recorded_key.shape
    kernels = _kernels("attention", query)
    result: Tensor = kernels.attention(query, key, value, recorded_key, recorded_value, placement, heads, scales)
    return result


@layer("attention")
def dense_attention(query: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Attention over whole maps; see `reference.dense_attention`."""
    assert keys.shape == values.shape and len(query) == len(keys) and not query.shape[2] % heads, (query.shape, heads)
    result: Tensor = _kernels("dense_attention", query).dense_attention(query, keys, values, heads)
    return result


@layer("group norm")
def row_statistics(rows: Tensor, groups: int) -> Tensor:
    """Return the part that every row has in its groups' statistics; see `reference.row_statistics`."""
    assert rows.ndim == 3 and not rows.shape[2] % groups, (rows.shape, groups)
    result: Tensor = _kernels("row_statistics", rows).row_statistics(rows, groups)
    return result


@layer("group norm")
def summed_group_norm_affine(
    rows: Tensor,
    recorded: Tensor,
    statistics: Tensor,
    num_rows: Tensor | None,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Incremental GroupNorm statistics by rows' statistics; see `reference.summed_group_norm_affine`."""
    assert rows.shape[:2] == recorded.shape[:2] and not len(rows) % len(statistics), (rows.shape, recorded.shape)
    assert recorded.shape[2] == 2 * statistics.shape[1], (recorded.shape, statistics.shape)
    kernels = _exact("group_norm_affine", rows) if num_rows is None else _kernels("group_norm_affine", rows)
    result: tuple[Tensor, Tensor, Tensor] = kernels.summed_group_norm_affine(
        rows, recorded, statistics, num_rows, count, weight, bias, eps
    )
    return result


def row_column_attention(
    query: Tensor, own: tuple[Tensor, Tensor], reference_lines: tuple[Tensor, Tensor], valid: Tensor | None = None
) -> Tensor:
    """Attention along lines and those of a reference; see `reference.row_column_attention`."""
    assert own[0].shape == own[1].shape and reference_lines[0].shape == reference_lines[1].shape, (
        own[0].shape,
        reference_lines[0].shape,
    )
    assert len(query) == len(own[0]) == len(reference_lines[0]), (query.shape, own[0].shape, reference_lines[0].shape)
    result: Tensor = _kernels("row_column_attention", query).row_column_attention(query, own, reference_lines, valid)
    return result


@layer("cross-attention")
def cross_attention(
    rows: Tensor,
    layer_norm: LayerNormParams,
    weight: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    recorded_query: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """LayerNorm, queries and their attention over the text; see `reference.cross_attention`."""
    assert key.shape == value.shape and len(key) == len(rows), (rows.shape, key.shape, value.shape)
    assert weight.shape == (key.shape[2], rows.shape[2]) and not len(weight) % heads, (weight.shape, heads)
    kernels = _kernels("cross_attention", rows)
    result: tuple[Tensor, Tensor] = kernels.cross_attention(rows, layer_norm, weight, key, value, heads, recorded_query)
    return result


def time_projections(timestep: Tensor, frequencies: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return what every ResNet block adds for a time; see `reference.time_projections`."""
    assert timestep.shape == (1,) and layers[0][0].shape[1] == 2 * len(frequencies), (timestep.shape, len(frequencies))
    result: Tensor = _kernels("time_projections", layers[0][0]).time_projections(timestep, frequencies, layers)
    return result


def scatter_rows(full: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """Rows into maps, in place; see `reference.scatter_rows`."""
    assert full.shape[::2] == rows.shape[::2] and full.is_contiguous(), (full.shape, rows.shape)
    result: Tensor = _kernels("scatter_rows", rows).scatter_rows(full, rows, placement)
    return result


def composite(base: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """Rows over the source's prediction; see `reference.composite`."""
    assert base.ndim == 4 and base.shape[1] == rows.shape[2], (base.shape, rows.shape)
    result: Tensor = _kernels("composite", rows).composite(base, rows, placement)
    return result
