"""What every step of an edit reads: resident on the device within a budget, else in host memory and fetched ahead.

Tensors that do not fit lie in pinned host memory; those of the step that comes next travel on a stream of their own
while the step before runs. Knows tensors and streams; knows nothing about what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Feed:
    """Tensors by step, copied into fixed targets.

    Args:
        steps: step -> tensors; the same shapes and dtypes for every step.
        targets: where a step's tensors go, on the device.
        budget: bytes that may stay on the device; all or nothing. None is no limit.
    """

    def __init__(self, steps: Mapping[int, Sequence[Tensor]], targets: Sequence[Tensor], budget: int | None) -> None:
        self._targets, self._device = list(targets), targets[0].device
        self.bytes = sum(t.nbytes for tensors in steps.values() for t in tensors)
        self.resident = budget is None or self.bytes <= budget
        self._steps = {i: [self._kept(t) for t in tensors] for i, tensors in steps.items()}
        self._staged: int | None = None
        if not self.resident:
            self._stage = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in self._targets]
            self._lane = _Lane(self._device)

    def load(self, i: int, following: int | None = None) -> None:
        """Copy a step's tensors into the targets; the host does not wait.

        Args:
            following: the step that will be asked for next, fetched from now on; None if there is none.
        """
        if self.resident:
            self._copy(self._steps[i])
            return
        if self._staged != i:
            self._fetch(i)
        self._lane.arrived()
        self._copy(self._stage)
        self._staged = None
        if following is not None:
            self._fetch(following)

    def _copy(self, sources: list[Tensor]) -> None:
        """One precision at a time: then many tensors take few kernels."""
        for dtype in {t.dtype for t in sources}:
            alike = [i for i, t in enumerate(sources) if t.dtype is dtype]
            torch._foreach_copy_([self._targets[i] for i in alike], [sources[i] for i in alike])

    def _fetch(self, i: int) -> None:
        with self._lane.ahead():
            for there, here in zip(self._stage, self._steps[i], strict=True):
                there.copy_(here, non_blocking=True)
        self._staged = i

    def _kept(self, tensor: Tensor) -> Tensor:
        if self.resident:
            return tensor.to(self._device)
        host = tensor.to("cpu")
        return host.pin_memory() if self._device.type == "cuda" else host


class _Lane:
    """A copy stream beside the current one, with an event each way; on a CPU everything is in order anyway."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ahead(self) -> AbstractContextManager[object]:
        """What is enclosed runs on the copy stream, once the current stream has read what was staged before."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def arrived(self) -> None:
        """The current stream waits for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
