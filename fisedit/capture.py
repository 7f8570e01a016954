"""Functions over static buffers, captured once and replayed: a CUDA graph, or on a CPU a stand-in with its contract.

A captured function reads buffers that stay where they are and returns tensors that stay where they are: before a replay
the caller writes the one, after it reads the other. Knows nothing about what is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Outputs = dict[str, Tensor]

WARM_UP = 3
"""Runs before a capture: kernels are compiled and libraries make their workspaces."""


class Captured(Protocol):
    """A captured function; `outputs` hold what the last replay gave, until the next one."""

    outputs: Outputs

    def replay(self) -> None:
        """Run it over what its buffers hold now. On CUDA the host does not wait."""


class Rerun:
    """The stand-in: runs the function again, and moves its results to where the first ones lay."""

    def __init__(self, function: Callable[[], Outputs]) -> None:
        self._function = function
        self.outputs = {name: result.clone() for name, result in function().items()}

    def replay(self) -> None:
        """See `Captured`."""
        for name, result in self._function().items():
            self.outputs[name].copy_(result)


class Graph:
    """A CUDA graph of the function, in a memory pool of its own."""

    def __init__(self, function: Callable[[], Outputs]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                function()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.outputs = function()

    def replay(self) -> None:
        """See `Captured`."""
        self._graph.replay()


def capture(function: Callable[[], Outputs], device: torch.device) -> Captured:
    """Capture a function that reads static buffers on a device. It runs a few times on the way."""
    return Graph(function) if device.type == "cuda" else Rerun(function)


class Once(Generic[T]):
    """What is made on the first call for a key and kept for every later one; `made` counts."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for a key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @property
    def made(self) -> int:
        """How many keys were seen."""
        return len(self._kept)
