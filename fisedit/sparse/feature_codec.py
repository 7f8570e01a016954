"""Recorded maps in fewer bits: integers with a scale for each channel, and the other branches as differences from the
last one, which they resemble.

All integers lie on one lattice of 8 bits, whatever a map is stored in, so that a map is decoded by integer operations
and one conversion. A scale for each channel, as KIVI (arXiv 2402.02750) has for keys, can be moved from keys and values
to queries and outputs. Knows tensors; nothing about what they are recorded for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fisedit.errors import InputError
from fisedit.sparse_kernels.tuning import SMALL_MAP

LIMIT = 103
"""Largest integer of an encoded map: with half a unit of a last branch in 4 bits, 7, and half a step of a difference,
16, still in 8 bits."""

NIBBLE = 7
"""Largest integer in 4 bits."""

COARSE = 14
"""Unit of a last branch in 4 bits, in those of 8 bits: the largest integers are 7 of them."""

MAX_STEP = 32
"""Largest unit of a difference: 7 of them are twice the largest integer."""


class FeatureEncoding(NamedTuple):
    """How recorded maps are encoded.

    Args:
        bits: of a number of the last branch, 8 or 4; 16 for maps as they were.
        min_numel: numbers of a map from which it is encoded: small ones cost calls, and few bytes.
    """

    bits: int
    min_numel: int = 0


AS_RECORDED = FeatureEncoding(16)

MIN_NUMEL = SMALL_MAP + 1
"""Of maps that are encoded by default: those whose statistics are not computed anew."""

CACHE_DTYPES = {"int8": FeatureEncoding(8), "int4": FeatureEncoding(4), "model": AS_RECORDED}
"""Name of what recorded features are kept in -> the encoding. Differences of the other branches have 4 bits."""


def choose_encoding(name: str, device: torch.device) -> FeatureEncoding:
    """The encoding of a name; by "auto" int8 for large maps, and maps as they were on a GPU, whose graphs read those.

    Args:
        name: of `CACHE_DTYPES`, or "auto".
        device: of the model.

    Raises:
        InputError: another name.
    """
    if name == "auto":
        return FeatureEncoding(8, MIN_NUMEL) if device.type == "cpu" else AS_RECORDED
    if name not in CACHE_DTYPES:
        raise InputError(f"cache_dtype must be one of {', '.join(('auto', *CACHE_DTYPES))}, got {name!r}; use auto")
    return CACHE_DTYPES[name]


@dataclass(frozen=True, eq=False)
class EncodedMap:
    """A recorded map [B, N, C]: the last branch, and what has to be added to it for each of the others.

    Args:
        last: int8 [N, C], or [ceil(N / 2), C] with two positions a byte (see `pack_nibbles`).
        differences: int8 [B - 1, ceil(N / 2), C], two positions a byte.
        steps: int8 [B - 1, 1, C], multiplies the differences.
        scales: [C] in the dtype of the map.
        size: N.
    """

    last: Tensor
    differences: Tensor
    steps: Tensor
    scales: Tensor
    size: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return self.last, self.differences, self.steps, self.scales

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> EncodedMap:
        """The same with its tensors moved elsewhere."""
        last, differences, steps, scales = map(change, self.tensors)
        return replace(self, last=last, differences=differences, steps=steps, scales=scales)

    def integers(self) -> Tensor:
        """The whole map in units of its scales, int8 [B, N, C]."""
        out = self.last.new_empty(len(self.differences) + 1, self.size, self.last.shape[1])
        if len(self.last) == self.size:
            out[-1] = self.last
        else:
            unpack_nibbles(self.last, out[-1]).mul_(COARSE)
        for difference, step, branch in zip(self.differences, self.steps, out, strict=False):
            unpack_nibbles(difference, branch).mul_(step).add_(out[-1])
        return out

    def rows(self, positions: Tensor) -> Tensor:
        """Rows of the map.

        Args:
            positions: int64 [P], flat.

        Returns:
            [B, P, C], a fresh tensor.
        """
        packed, upper = self._packed_positions(positions)
        if len(self.last) == self.size:
            last = self.last.index_select(0, positions)
        else:
            last = _chosen(self.last.index_select(0, packed), upper).mul_(COARSE)
        others = _chosen(self.differences.index_select(1, packed), upper).mul_(self.steps).add_(last)
        return torch.cat([others, last[None]]).to(self.scales.dtype).mul_(self.scales)

    def whole(self) -> Tensor:
        """The map [B, N, C], a fresh tensor."""
        return self.integers().to(self.scales.dtype).mul_(self.scales)

    def _packed_positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of packed maps that positions lie in, and whether they are the upper four bits, bool [P, 1]."""
        half = self.differences.shape[1]
        upper = positions >= half
        return torch.where(upper, positions - half, positions), upper[:, None]


RecordedMap = Tensor | EncodedMap
"""A recorded map, as it was or encoded."""

_PARTS = ("last", "differences", "steps", "scales", "size")


def tensors_of(found: RecordedMap) -> tuple[Tensor, ...]:
    """The tensors that a recorded map is in."""
    return found.tensors if isinstance(found, EncodedMap) else (found,)


def to_tensors(maps: Mapping[str, RecordedMap]) -> dict[str, Tensor]:
    """Recorded maps as named tensors alone, so that a file can hold them; inverted by `from_tensors`."""
    out: dict[str, Tensor] = {}
    for name, found in maps.items():
        if isinstance(found, EncodedMap):
            parts = (*found.tensors, torch.tensor([found.size]))
            out |= {f"{name}/{part}": tensor for part, tensor in zip(_PARTS, parts, strict=True)}
        else:
            out[name] = found
    return out


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, RecordedMap]:
    """Invert `to_tensors`."""
    maps: dict[str, RecordedMap] = {name: tensor for name, tensor in tensors.items() if "/" not in name}
    for name in {name.partition("/")[0] for name in tensors if "/" in name}:
        last, differences, steps, scales, size = (tensors[f"{name}/{part}"] for part in _PARTS)
        maps[name] = EncodedMap(last, differences, steps, scales, int(size))
    return maps


def encode(rows: Tensor, bits: int) -> EncodedMap:
    """Encode a recorded map.

    Differences are those of the branches, not of the last one as it is decoded: so both have its error, and guidance,
    which goes from one to the other, does not multiply it.

    Args:
        rows: [B, N, C].
        bits: of a number of the last branch, 8 or 4; the differences of the others have 4.
    """
    scales = (rows.abs().amax((0, 1)) / LIMIT).clamp(min=torch.finfo(rows.dtype).tiny)
    units = rows / scales
    changes = units[:-1].sub_(units[-1])
    steps = _steps(changes)
    differences = pack_nibbles(changes.div_(steps).round_().clamp_(-NIBBLE, NIBBLE).to(torch.int8))
    if bits == 8:
        last = units[-1].round_().to(torch.int8)
    else:
        last = pack_nibbles(units[-1].div_(COARSE).round_().to(torch.int8))
    return EncodedMap(last, differences, steps.to(torch.int8), scales, rows.shape[1])


def _steps(changes: Tensor) -> Tensor:
    """Powers of two [B, 1, C] by which differences [B, N, C] fit in 4 bits."""
    largest = changes.abs().amax(1, keepdim=True).float()
    return torch.exp2(torch.log2(largest / NIBBLE).ceil_()).clamp_(1, MAX_STEP).to(changes.dtype)


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Two positions a byte: the lower four bits have the first half of the positions, the upper four the second.

    Args:
        numbers: int8 [..., N, C], -8 to 7.

    Returns:
        int8 [..., ceil(N / 2), C].
    """
    size = numbers.shape[-2]
    half = -(-size // 2)
    packed = numbers[..., :half, :] & 15
    packed[..., : size - half, :] |= numbers[..., half:, :] << 4
    return packed


def unpack_nibbles(packed: Tensor, out: Tensor) -> Tensor:
    """Invert `pack_nibbles`.

    Args:
        packed: int8 [..., ceil(N / 2), C].
        out: int8 [..., N, C], written.
    """
    half = packed.shape[-2]
    torch.bitwise_left_shift(packed, 4, out=out[..., :half, :])
    out[..., :half, :] >>= 4
    torch.bitwise_right_shift(packed[..., : out.shape[-2] - half, :], 4, out=out[..., half:, :])
    return out


def _chosen(packed: Tensor, upper: Tensor) -> Tensor:
    """The upper or the lower four bits of every row, sign extended."""
    return torch.where(upper, packed, packed << 4) >> 4
