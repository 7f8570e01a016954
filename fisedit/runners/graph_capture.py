"""Functions over static buffers, captured once and replayed: a CUDA graph, or on a CPU an eager call with its contract.

A captured function reads buffers that stay where they are and returns tensors that stay where they are. The caller
writes the buffers before a replay, and reads the tensors after it. Knows nothing about what is captured.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fisedit.features.sites import loras
from fisedit.machine.device import write_count
from fisedit.sparse_kernels import tuning

T = TypeVar("T")
Outputs = dict[str, Tensor]
WARM_UP = 3
"""Runs before a capture: kernels are compiled and libraries allocate their workspaces."""

TOLERANCES = {torch.float32: 0.01, torch.float16: 0.15, torch.bfloat16: 0.15, torch.float64: 0.15}
"""The largest distance of a graph's first replay from an eager run, in units of that one's largest number.

Sums of a 16-bit model's maps, in float32 or float64, may be as far as the maps."""

QUANTISED_TOLERANCE = 0.3
"""The same where recorded keys and values are quantised."""

STREAMS = ((0, 32), (-1, 32))
"""(Priority, streams that torch has of it on a device)."""

_capturing = Lock()
"""CUDA captures one graph at a time in a process; replays and everything else go on."""


class Captured(Protocol):
    """A captured function; `outputs` hold what the last replay gave, until the next one."""

    outputs: Outputs

    def replay(self) -> None:
        """Run it over what its buffers hold now. On CUDA the host does not wait."""


class EagerGraph:
    """A captured function without a graph: runs it again, and copies its results into the first ones' memory."""

    def __init__(self, function: Callable[[], Outputs]) -> None:
        self._function = function
        self.outputs = {name: result.clone() for name, result in function().items()}

    def replay(self) -> None:
        """See `Captured`."""
        for name, result in self._function().items():
            self.outputs[name].copy_(result)


class GraphPool:
    """Memory of CUDA graphs that are replayed in turn and freed together, and the stream that they are captured on.

    No other graph is captured on that stream as long as they live. When a graph is freed, torch from 2.11 on frees the
    memory that cuBLAS works in on its stream. It does so also where another graph still has its address
    (pytorch/pytorch, issue 193402).

    Raises:
        RuntimeError: all streams are taken.
    """

    def __init__(self) -> None:
        self.memory = torch.cuda.graph_pool_handle()
        with _capturing:
            self.stream: torch.cuda.Stream = _unused_stream({pool.stream.cuda_stream for pool in _pools})
            _pools.add(self)


_pools: WeakSet[GraphPool] = WeakSet()


def _unused_stream(taken: Container[int]) -> torch.cuda.Stream:
    """A stream of the current device that is not taken; torch gives them out in turn."""
    for priority, count in STREAMS:
        for _ in range(count):
            stream = torch.cuda.Stream(priority=priority)
            if stream.cuda_stream not in taken:
                return stream
    raise RuntimeError(f"more than {sum(count for _, count in STREAMS)} graphs or pools of graphs")


class Graph:
    """A CUDA graph of the function, in a pool of its own or a given one."""

    def __init__(self, function: Callable[[], Outputs], pool: GraphPool | None = None) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                function()
        torch.cuda.current_stream().wait_stream(side)
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool or GraphPool()
        capturing = torch.cuda.graph(
            self._graph, self._pool.memory, self._pool.stream, capture_error_mode="thread_local"
        )  # other threads may go on
        with _capturing, capturing:
            self.outputs = function()

    def replay(self) -> None:
        """See `Captured`."""
        self._graph.replay()


def capture(function: Callable[[], Outputs], device: torch.device, pool: GraphPool | None = None) -> Captured:
    """Capture a function that reads static buffers on a device. It runs a few times on the way.

    Args:
        function: reads buffers that stay where they are.
        device: The device of the buffers.
        pool: then whatever is captured in it too may overwrite the outputs; None for one of its own.
    """
    return Graph(function, pool) if device.type == "cuda" else EagerGraph(function)


class ReplayMismatchError(RuntimeError):
    """A graph's first replay that differs from an eager run over the same inputs."""


def check_replay(replayed: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> None:
    """Compare a graph's first replay with an eager run.

    Args:
        replayed: the replay's tensors by name; others than those of `eager` are not compared.
        eager: the eager run's, of the same shapes.

    Raises:
        ReplayMismatchError: one is missing or differs by more than its dtype's tolerance, or is NaN.
    """
    dtypes = {expected.dtype for expected in eager.values()} - {torch.float64}
    loosest = max((TOLERANCES[dtype] for dtype in dtypes), default=0.0)
    for name, expected in eager.items():
        if name not in replayed:
            raise ReplayMismatchError(f"its first replay lacks {name}")
        tolerance = QUANTISED_TOLERANCE if tuning.quantisation_setting() else max(loosest, TOLERANCES[expected.dtype])
        limit = tolerance * float(expected.abs().max()) if expected.numel() else 0.0
        difference = float((replayed[name] - expected).abs().max()) if expected.numel() else 0.0
        if not difference <= limit:  # so that a NaN is refused
            raise ReplayMismatchError(
                f"its first replay differs from the eager run by {difference:.3g} in {name}, more than {limit:.3g}"
            )


def capture_errors() -> tuple[type[Exception], ...]:
    """Errors of a capture or replay after which everything runs eagerly: torch's, a device's lack of a dtype, and
    Triton's where it was imported."""
    triton: Any = sys.modules.get("triton.runtime.errors")
    return (RuntimeError, TypeError, AssertionError, *(() if triton is None else (triton.TritonError,)))


def warn_eager(error: Exception) -> str:
    """Warn that a captured graph is not used any more, and return the reason in one line."""
    what = next(iter(str(error).splitlines()), type(error).__name__)[:200]
    why = what if isinstance(error, ReplayMismatchError) else f"it failed ({what})"
    reason = f"a captured graph was given up, as {why}; it runs eagerly"
    warnings.warn(reason, RuntimeWarning, stacklevel=3)
    return reason


def shared_pool(device: torch.device) -> GraphPool | None:
    """A pool for graphs of which one is replayed at a time, and what it gave is copied before the next one is."""
    return GraphPool() if device.type == "cuda" else None


class LRUCache(Generic[T]):
    """Values that are made on the first call for a key and kept for later ones.

    Args:
        limit: how many are kept; the least recently used goes first.

    Attributes:
        misses: how many were made.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._kept: dict[Hashable, T] = {}
        self._limit, self.misses = limit, 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made now if it is not kept."""
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)  # most recently used last
            return self._kept[key]
        while self._limit is not None and len(self._kept) >= self._limit:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = value = make()
        self.misses += 1
        return value

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()

    def __len__(self) -> int:
        """Return the number of values that are kept."""
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a key's value is kept."""
        return key in self._kept


@dataclass(frozen=True)
class PackedView:
    """The place of a tensor within a packed one, as `Tensor.as_strided` takes it."""

    flat: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def unpack(self, flats: Outputs) -> Tensor:
        """The tensor."""
        return flats[self.flat].as_strided(self.shape, self.stride, self.start)

    def strided_slice(self, first: int, step: int, rows: int) -> PackedView:
        """A part of a tensor [B, R, ...].

        Args:
            first: index of the first item.
            step: from one item to the next.
            rows: The number of rows of each item, its first ones.
        """
        count = len(range(first, self.shape[0], step))
        stride = self.stride[0] * step, *self.stride[1:]
        return PackedView(self.flat, (count, rows, *self.shape[2:]), stride, self.start + first * self.stride[0])


class TensorPacker:
    """Tensors that stay where they are, to be copied side by side: one tensor for each type. Few kernels move it all,
    and tensors that share memory go on sharing it.

    Attributes:
        views: where each tensor is in the copies, by name.
    """

    def __init__(self, tensors: Outputs) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        starts: dict[int, tuple[str, int]] = {}
        for key, whole in {_memory(tensor): _storage_of(tensor) for tensor in tensors.values()}.items():
            group = self._parts.setdefault(str(whole.dtype), [])
            starts[key] = str(whole.dtype), sum(part.numel() for part in group)
            group.append(whole)
        self.views: dict[str, PackedView] = {}
        for name, tensor in tensors.items():
            flat, start = starts[_memory(tensor)]
            start += int(tensor.storage_offset())
            self.views[name] = PackedView(flat, tuple(tensor.shape), tensor.stride(), start)

    def copies(self) -> Outputs:
        """Return what the tensors hold now, packed, by type."""
        return {flat: torch.cat(group) for flat, group in self._parts.items()}


def snapshot(tensors: Outputs) -> Outputs:
    """Copies under their own names, packed."""
    packer = TensorPacker(tensors)
    flats = packer.copies()
    return {name: view.unpack(flats) for name, view in packer.views.items()}


def state_of(module: nn.Module) -> object:
    """Return a state that changes when a capture of a module is out of date.

    It has addresses and versions of its weights, what is injected into its layers, and its LoRAs' scales.
    """
    weights = tuple((p.data_ptr(), write_count(p)) for p in module.parameters())
    layers = (m for m in module.modules() if m is not module)
    return weights, loras(module), tuple((id(m), id(vars(m)["forward"])) for m in layers if "forward" in vars(m))


def _memory(tensor: Tensor) -> int:
    """An identifier of the memory of a tensor, on any device."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 (addresses are 0 on the meta device)


def _storage_of(tensor: Tensor) -> Tensor:
    """All the memory that a tensor is a view of, as numbers of its type."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
