"""What every step of an edit reads: resident on the device within a budget, else in host memory and fetched ahead.

Tensors that do not fit lie in pinned host memory; those of the step that comes next travel on a stream of their own
while the step before runs. Knows tensors and streams; knows nothing about what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle

import torch
from torch import Tensor


class Feed:
    """Tensors by step: the first ones are copied into fixed targets, of the others it is said where they lie.

    Args:
        steps: step -> tensors; the same shapes and dtypes for every step.
        targets: where a step's tensors go, on the device.
        budget: bytes that may stay on the device; all or nothing. None is no limit.
        addresses: int64 on the device, one for each tensor that has no target; None if there is none.
    """

    def __init__(
        self,
        steps: Mapping[int, Sequence[Tensor]],
        targets: Sequence[Tensor],
        budget: int | None,
        addresses: Tensor | None = None,
    ) -> None:
        self._count, self._device, self._addresses = len(targets), targets[0].device, addresses
        self._targets = _words([*targets, *([] if addresses is None else [addresses])])
        self.bytes = sum(t.nbytes for tensors in steps.values() for t in tensors)
        self.resident = budget is None or self.bytes <= budget
        self._steps = {i: [self._kept(t) for t in tensors] for i, tensors in steps.items()}
        self._staged: int | None = None
        if self.resident:
            self._sources = dict(zip(self._steps, self._copied(list(self._steps.values())), strict=True))
        else:
            stages = [self._stage() for _ in range(1 if addresses is None else 2)]  # one is read while one is filled
            self._stages = cycle(zip(stages, self._copied(stages), strict=True))
            self._lane = _Lane(self._device)

    def load(self, i: int, following: int | None = None) -> None:
        """Put a step's tensors where they are read; the host does not wait.

        Args:
            following: the step that will be asked for next, fetched from now on; None if there is none.
        """
        if self.resident:
            torch._foreach_copy_(self._targets, self._sources[i])
            return
        if self._staged != i:
            self._fetch(i)
        self._lane.arrived()
        torch._foreach_copy_(self._targets, self._filled[1])
        self._staged = None
        if following is not None:
            self._fetch(following)

    def _fetch(self, i: int) -> None:
        self._filled = next(self._stages)
        with self._lane.ahead():
            for there, here in zip(self._filled[0], self._steps[i], strict=True):
                there.copy_(here, non_blocking=True)
        self._staged = i

    def _stage(self) -> list[Tensor]:
        """Room for a step on the device."""
        return [torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in next(iter(self._steps.values()))]

    def _copied(self, sets: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """What of each set goes into the targets: its first tensors, and where the others lie."""
        if self._addresses is None:
            return [_words(tensors) for tensors in sets]
        where = [[t.data_ptr() for t in tensors[self._count :]] for tensors in sets]
        assert not any(address % 16 for addresses in where for address in addresses), "sixteen bytes are read at a time"
        lying = torch.tensor(where, device=self._device).unbind()
        return [_words([*tensors[: self._count], there]) for tensors, there in zip(sets, lying, strict=True)]

    def _kept(self, tensor: Tensor) -> Tensor:
        if self.resident:
            return tensor.to(self._device).contiguous()
        host = tensor.to("cpu").contiguous()
        return host.pin_memory() if self._device.type == "cuda" else host


def _words(tensors: list[Tensor]) -> list[Tensor]:
    """The same memory in numbers of one type, so that one kernel copies all: eight bytes each, or one if need be."""
    kind = torch.uint8 if any(t.nbytes % 8 for t in tensors) else torch.int64
    return [t.view(-1).view(kind) for t in tensors]


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
