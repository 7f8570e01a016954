"""Notices weights that changed, by torch's count of writes and by numbers spread over each weight.

torch counts neither a fused optimiser's step nor writes through `.data`, nor what another program writes to a file that
weights are mapped from. What it did not count is added to its count, on which caches of weights rely. Knows torch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from fisedit.errors import ModelError
from fisedit.machine.device import write_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

SMALL, SPREAD = 2048, 64
"""Numbers of a weight up to which all are compared, and how many of a larger one. Of an embedding one a row is."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAPS = Path("/proc/self/maps")
_lock = Lock()


class _Weight(NamedTuple):
    """A weight as it was seen last: itself, its count of writes and its sample's numbers."""

    tensor: ref[Tensor]
    writes: int
    sample: Tensor


@dataclass(eq=False)
class _Seen:
    """A module as it was seen last.

    Args:
        names: The names of its weights.
        tensors: its weights.
        writes: the count of writes of each.
        sizes: The sizes of their samples.
        numbers: all samples in one.
        files: mapped file -> its inode, size and time of change.
        gone: samples of LoRAs that were taken out.
        changes: number of times that weights were found changed.
    """

    names: tuple[str, ...]
    tensors: tuple[ref[Tensor], ...]
    writes: list[int]
    sizes: list[int]
    numbers: Tensor
    files: Mapping[str, tuple[int, ...]]
    gone: dict[str, _Weight] = field(default_factory=dict)
    changes: int = 0

    def by_name(self) -> dict[str, _Weight]:
        """Every weight."""
        samples = self.numbers.split(self.sizes)
        return dict(zip(self.names, map(_Weight, self.tensors, self.writes, samples), strict=True))


_seen: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()


def count_changes(module: nn.Module) -> int:
    """Count how often a module's weights were found changed by this function; a LoRA that is added is no change.

    Args:
        module: A model, whose weights lie on one device.

    Raises:
        ModelError: A file that its weights are mapped from was written to.
    """
    with _lock:
        check_files(module)
        before = _seen.get(module)
        found = dict(_weights(module))
        samples = [_sample(weight, by_row=by_row) for weight, by_row in found.values()]
        tensors = [weight for weight, _ in found.values()]
        now = _Seen(
            tuple(found),
            tuple(map(ref, tensors)),
            list(map(write_count, tensors)),
            [len(sample) for sample in samples],
            torch.cat(samples) if samples else torch.empty(0),
            {},
        )
        if before is None or not _same(before, now):
            _compare(before, now)
            now.files = _mapped_files(tensors)
            _seen[module] = now
        return _seen[module].changes


def _weights(module: nn.Module) -> Iterator[tuple[str, tuple[Tensor, bool]]]:
    """Every weight by its name without LoRAs, and whether its rows are words'."""
    for prefix, part in module.named_modules():
        base = prefix.replace(".base_layer", "")
        for name, weight in part.named_parameters(recurse=False):
            if not weight.is_meta:
                yield f"{base}.{name}", (weight, isinstance(part, nn.Embedding))


def _sample(weight: Tensor, *, by_row: bool) -> Tensor:
    """Bits of a weight's numbers, spread over its memory."""
    bits = weight.detach().view(_BITS[weight.element_size()])
    if not (bits.is_contiguous() or bits.is_contiguous(memory_format=torch.channels_last)):
        bits = bits.flatten()
    size = bits.numel()
    if size <= SMALL:
        return bits.as_strided((size,), (1,))
    count = len(bits) if by_row else SPREAD
    step = size // count
    return bits.as_strided((count,), (step if by_row else step - 1 + step % 2,))  # an odd step meets many columns


def _same(before: _Seen, now: _Seen) -> bool:
    tensors = (one() is other() for one, other in zip(before.tensors, now.tensors, strict=True))
    return (
        before.names == now.names
        and before.writes == now.writes
        and all(tensors)
        and before.numbers.dtype is now.numbers.dtype
        and torch.equal(before.numbers.to(now.numbers.device), now.numbers)
    )


def _compare(before: _Seen | None, now: _Seen) -> None:
    """Find what changed, and count for torch what it did not count."""
    if before is None:
        return
    old, new = before.gone | before.by_name(), now.by_name()
    written = [name for name, weight in new.items() if name in old and _is_other(name, old[name], weight)]
    for name in written:
        tensor = new[name].tensor()
        if tensor is not None and new[name].writes == old[name].writes and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    now.writes = [0 if tensor is None else write_count(tensor) for tensor in (one() for one in now.tensors)]
    now.gone = {name: weight for name, weight in old.items() if name not in new and "lora_" in name}
    added_or_gone = any("lora_" not in name for name in old.keys() ^ new.keys())
    now.changes = before.changes + bool(written or added_or_gone)


def _is_other(name: str, before: _Weight, now: _Weight) -> bool:
    """Return whether a weight is another one; a LoRA loaded again and an embedding with more or fewer rows are not."""
    lengths = len(before.sample), len(now.sample)
    one, other = before.sample[: min(lengths)], now.sample[: min(lengths)]
    if one.dtype is not other.dtype or not torch.equal(one.to(other.device), other):
        return True
    if before.tensor() is now.tensor():
        return before.writes != now.writes
    return "lora_" not in name and lengths[0] == lengths[1]


def check_files(module: nn.Module) -> None:
    """Check the files that a module's weights are mapped from; what takes a file's place leaves its mapping alone.

    Args:
        module: The one that `count_changes` saw.

    Raises:
        ModelError: One of them was written to in place.
    """
    for file, before in _seen[module].files.items() if module in _seen else ():
        now = _state_of(file)
        if now != before and now[:1] == before[:1] and file in _mapped_files(module.parameters()):
            raise ModelError(f"{file} was written to while its model is open; load the model again")


def _mapped_files(weights: Iterable[Tensor]) -> dict[str, tuple[int, ...]]:
    """Files that weights on the CPU are mapped from, on Linux."""
    maps = [line.split(maxsplit=5) for line in _MAPS.read_text().splitlines()] if _MAPS.exists() else []
    named = [(one[0].split("-"), one[5]) for one in maps if one[5:] and one[4] != "0"]  # inode 0: of no file
    ranges = [(int(start, 16), int(end, 16), file) for (start, end), file in named]
    starts = [start for start, _, _ in ranges]
    found: dict[str, tuple[int, ...]] = {}
    for address in (weight.data_ptr() for weight in weights if weight.device.type == "cpu"):
        _, end, file = ranges[bisect_right(starts, address) - 1] if ranges else (0, 0, "")
        if address < end and file not in found:
            found[file] = _state_of(file)
    return found


def _state_of(file: str) -> tuple[int, ...]:
    """A file's inode, size and time of change; () for one that is gone."""
    try:
        state = Path(file).stat()
    except OSError:
        return ()
    return state.st_ino, state.st_size, state.st_mtime_ns
