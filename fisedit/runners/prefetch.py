"""The tensors that every step of an edit reads: on the device within a budget, else in host memory and fetched ahead.

Tensors that do not fit lie in pinned host memory. Those of the step that comes next travel on a stream of their own
while the step before runs. Knows tensors and streams; knows nothing about what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import cycle
from weakref import finalize

import torch
from torch import Tensor

from fisedit.machine.device import to_pinned_memory


class Prefetcher:
    """Tensors by step: the first ones are copied into fixed targets, of the others the addresses are.

    Its buffers are freed after the last copy from and to them is done.

    Args:
        steps: indices of the steps, at least one.
        tensors_of: Returns a step's tensors, of the same shapes and dtypes for all. It is called for one step at a
            time, so that what does not fit is never on the device together.
        targets: where a step's tensors go, on the device.
        budget: bytes that may stay on the device; all or nothing. None is no limit.
        addresses: int64 on the device, one for each tensor that has no target; None if there is none.
    """

    def __init__(
        self,
        steps: Collection[int],
        tensors_of: Callable[[int], Sequence[Tensor]],
        targets: Sequence[Tensor],
        budget: int | None,
        addresses: Tensor | None = None,
    ) -> None:
        self._count, self._device, self._addresses = len(targets), targets[0].device, addresses
        self._targets = _as_words([*targets, *([] if addresses is None else [addresses])])
        self.bytes = len(steps) * sum(t.nbytes for t in tensors_of(next(iter(steps))))
        self.resident = budget is None or self.bytes <= budget
        self._steps = {i: [self._kept(t) for t in tensors_of(i)] for i in steps}
        self._staged: int | None = None
        if self.resident:
            self._sources = dict(zip(self._steps, self._copied(list(self._steps.values())), strict=True))
        else:
            stages = [self._stage() for _ in range(1 if addresses is None else 2)]  # one is read while one is filled
            self._stages = cycle(zip(stages, self._copied(stages), strict=True))
            self._copy_stream = CopyStream(self._device)
            finalize(self, _release, self._copy_stream, (stages, self._steps)).atexit = False

    def load(self, i: int, following: int | None = None) -> None:
        """Put a step's tensors where they are read; the host does not wait.

        Args:
            i: the step.
            following: the step that will be loaded next, fetched from now on; None if there is none.
        """
        if self.resident:
            torch._foreach_copy_(self._targets, self._sources[i])
            return
        if self._staged != i:
            self._fetch(i)
        self._copy_stream.wait()
        torch._foreach_copy_(self._targets, self._filled[1])
        self._staged = None
        if following is not None:
            self._fetch(following)

    def _fetch(self, i: int) -> None:
        self._filled = next(self._stages)
        self._copy_stream.copy(self._filled[0], self._steps[i])
        self._staged = i

    def _stage(self) -> list[Tensor]:
        """Room for a step on the device."""
        return [torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in next(iter(self._steps.values()))]

    def _copied(self, sets: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Return what of each set goes into the targets: its first tensors, and where the others lie."""
        if self._addresses is None:
            return [_as_words(tensors) for tensors in sets]
        where = [[t.data_ptr() for t in tensors[self._count :]] for tensors in sets]
        assert not any(address % 16 for addresses in where for address in addresses), "sixteen bytes are read at a time"
        pointers = torch.tensor(where, device=self._device).unbind()
        return [_as_words([*tensors[: self._count], pointer]) for tensors, pointer in zip(sets, pointers, strict=True)]

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device).contiguous() if self.resident else to_pinned_memory(tensor, self._device)


def _as_words(tensors: list[Tensor]) -> list[Tensor]:
    """The same memory in numbers of one type, so that one kernel copies all: eight bytes each, or one if need be."""
    kind = torch.uint8 if any(t.nbytes % 8 for t in tensors) else torch.int64
    return [t.view(-1).view(kind) for t in tensors]


def _release(copy_stream: CopyStream, _: object) -> None:
    """Wait for the copies of a stream whose buffers are no longer used; they are held until then."""
    copy_stream.synchronize()


class CopyStream:
    """A copy stream beside the current one, with an event each way; on a CPU everything is in order anyway."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last = None if self._stream is None else torch.cuda.Event()

    def copy(self, dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
        """Begin to copy, once the current stream has read what was staged before; the host does not wait."""
        if self._stream is None or self._last is None:
            _copied(dst, src)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copied(dst, src)
            self._last.record()

    def wait(self) -> None:
        """The current stream waits for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def synchronize(self) -> None:
        """The host waits for the copies."""
        if self._last is not None:
            self._last.synchronize()


def _copied(dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
    for target, source in zip(dst, src, strict=True):
        target.copy_(source, non_blocking=True)
