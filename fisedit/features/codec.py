"""Recorded maps in fewer bits: integers with a scale for each channel, and the other branches as differences from the
last one, which they resemble.

All integers lie on one lattice of 8 bits, whatever a map is stored in. So a map is decoded by integer operations and
one conversion. A scale for each channel, as KIVI (arXiv 2402.02750) has for keys, can be moved from keys and values to
queries and outputs. In 4 bits positions beside one another have a unit of their own, a whole number of that scale. So
what is small there is not lost in what is large elsewhere. Knows tensors; nothing about what they are recorded for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fisedit.errors import InputError
from fisedit.sparse_kernels.tuning import SMALL_MAP

LIMIT = 103
"""Largest integer of an encoded map.

Half a unit of a last branch in 4 bits is 8, and half a step of a difference is 16. With both a number is still in
8 bits."""

NIBBLE = 7
"""Largest integer in 4 bits."""

BLOCK = 32
"""Positions that share a unit in 4 bits."""

_LOWEST = -8
"""The lowest number of 4 bits; the smallest unit is kept as this."""

_FACTORS = {"units": 1, "steps": 2}
"""Units of a last branch are 1, 2, ... 16 of a scale; those of differences, up to twice as large, 1, 3, ... 31."""

MAX_STEP = 32
"""Largest unit of a difference: 7 of them are twice the largest integer."""


class FeatureEncoding(NamedTuple):
    """The encoding of recorded maps.

    Args:
        bits: The bits of a number of the last branch, 8 or 4; 16 for maps as they were.
        min_numel: numbers of a map from which it is encoded: small ones cost calls, and few bytes.
    """

    bits: int
    min_numel: int = 0


AS_RECORDED = FeatureEncoding(16)

MIN_NUMEL = SMALL_MAP + 1
"""The smallest size of maps that are encoded by default: those whose statistics are not computed anew."""

CACHE_DTYPES = {"int8": FeatureEncoding(8), "int4": FeatureEncoding(4), "model": AS_RECORDED}
"""Name of what recorded features are kept in -> the encoding. Differences of the other branches have 4 bits."""


def choose_encoding(name: str, device: torch.device) -> FeatureEncoding:
    """The encoding of a name; by "auto" int8 for large maps, and maps as they were on a GPU, whose graphs read those.

    Args:
        name: A name in `CACHE_DTYPES`, or "auto".
        device: The device of the model.

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
        steps: int8 [B - 1, 1, C], multiplies the differences; where there are units, as these, [B - 1, ceil(K / 2), C].
        scales: [C] in the dtype of the map.
        size: N.
        units: int8 [ceil(K / 2), C], of K blocks of `BLOCK` positions, two blocks a byte: multiplies a last branch of
            two positions a byte; None for others.
    """

    last: Tensor
    differences: Tensor
    steps: Tensor
    scales: Tensor
    size: int
    units: Tensor | None = None

    @property
    def parts(self) -> dict[str, Tensor]:
        """All that it holds, by name."""
        return {name: part for name in _PARTS if isinstance(part := getattr(self, name), Tensor)}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return tuple(self.parts.values())

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> EncodedMap:
        """The same with its tensors moved elsewhere."""
        last, differences, steps, scales, *units = map(change, self.tensors)
        return EncodedMap(last, differences, steps, scales, self.size, *units)

    def integers(self) -> Tensor:
        """The whole map in units of its scales, int8 [B, N, C]."""
        out = self.last.new_empty(len(self.differences) + 1, self.size, self.last.shape[1])
        units, steps = self._unpacked_units()
        if units is None:
            out[-1] = self.last
        else:
            _multiply(unpack_nibbles(self.last, out[-1]), units)
        for difference, step, branch in zip(self.differences, steps, out, strict=False):
            _multiply(unpack_nibbles(difference, branch), step).add_(out[-1])
        return out

    def rows(self, positions: Tensor) -> Tensor:
        """Rows of the map.

        Args:
            positions: int64 [P], flat.

        Returns:
            [B, P, C], a fresh tensor.
        """
        packed, upper = self._packed_positions(positions)
        units, steps = self._unpacked_units()
        if units is None:
            last = self.last.index_select(0, positions)
        else:
            last = _chosen(self.last.index_select(0, packed), upper).mul_(_of_blocks(units, positions))
        others = _chosen(self.differences.index_select(1, packed), upper).mul_(_of_blocks(steps, positions)).add_(last)
        return torch.cat([others, last[None]]).to(self.scales.dtype).mul_(self.scales)

    def whole(self) -> Tensor:
        """The map [B, N, C], a fresh tensor."""
        return self.integers().to(self.scales.dtype).mul_(self.scales)

    def _unpacked_units(self) -> tuple[Tensor | None, Tensor]:
        """Units [K, C], or None, and steps [B - 1, K or 1, C]."""
        if self.units is None:
            return None, self.steps
        return _unpack_units(self.units, self.size, "units"), _unpack_units(self.steps, self.size, "steps")

    def _packed_positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of packed maps that positions lie in, and whether they are the upper four bits, bool [P, 1]."""
        half = self.differences.shape[1]
        upper = positions >= half
        return torch.where(upper, positions - half, positions), upper[:, None]


RecordedMap = Tensor | EncodedMap
"""A recorded map, as it was or encoded."""

_PARTS = ("last", "differences", "steps", "scales", "units")


def tensors_of(found: RecordedMap) -> tuple[Tensor, ...]:
    """The tensors that a recorded map is in."""
    return found.tensors if isinstance(found, EncodedMap) else (found,)


def to_tensors(maps: Mapping[str, RecordedMap]) -> dict[str, Tensor]:
    """Recorded maps as named tensors alone, so that a file can hold them; inverted by `from_tensors`."""
    out: dict[str, Tensor] = {}
    for name, found in maps.items():
        if isinstance(found, EncodedMap):
            parts = {**found.parts, "size": torch.tensor([found.size])}
            out |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
        else:
            out[name] = found
    return out


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, RecordedMap]:
    """Invert `to_tensors`.

    Raises:
        LookupError: something is missing; of maps in 4 bits that were written before they had units, these.
    """
    maps: dict[str, RecordedMap] = {name: tensor for name, tensor in tensors.items() if "/" not in name}
    for name in {name.partition("/")[0] for name in tensors if "/" in name}:
        last, differences, steps, scales, size = (tensors[f"{name}/{part}"] for part in (*_PARTS[:4], "size"))
        units = tensors[f"{name}/units"] if len(last) < int(size) else tensors.get(f"{name}/units")
        maps[name] = EncodedMap(last, differences, steps, scales, int(size), units)
    return maps


def encode(rows: Tensor, bits: int) -> EncodedMap:
    """Encode a recorded map.

    Differences are those of the branches, not of the last one as it is decoded. So both have its error. Guidance, which
    goes from one to the other, does not multiply it.

    Args:
        rows: [B, N, C].
        bits: The bits of a number of the last branch, 8 or 4; the differences of the others have 4.
    """
    scales = (rows.abs().amax((0, 1)) / LIMIT).clamp(min=torch.finfo(rows.dtype).tiny)
    numbers = rows / scales
    changes, last = numbers[:-1].sub_(numbers[-1]), numbers[-1]
    if bits == 8:
        steps = _steps(changes)
        differences = _to_nibbles(changes, steps)
        return EncodedMap(last.round_().to(torch.int8), differences, steps.to(torch.int8), scales, len(last))
    differences, steps = _in_blocks(changes, "steps")
    packed, units = _in_blocks(last, "units")
    return EncodedMap(packed, differences, steps, scales, rows.shape[1], units)


def _in_blocks(numbers: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Numbers [..., N, C] in 4 bits, and the units of their blocks, both packed; they are overwritten."""
    units = _block_units(numbers, name)
    kept = _unpack_units(units, numbers.shape[-2], name).to(numbers.dtype)
    return _to_nibbles(numbers, kept), units


def _to_nibbles(numbers: Tensor, units: Tensor) -> Tensor:
    """Numbers [..., N, C] in units [..., K, C], packed; they are overwritten."""
    return pack_nibbles(_multiply(numbers, 1 / units).round_().clamp_(-NIBBLE, NIBBLE).to(torch.int8))


def _steps(changes: Tensor) -> Tensor:
    """Powers of two [B, 1, C] by which differences [B, N, C] fit in 4 bits."""
    largest = changes.abs().amax(1, keepdim=True).float()
    return torch.exp2(torch.log2(largest / NIBBLE).ceil_()).clamp_(1, MAX_STEP).to(changes.dtype)


def _block_units(numbers: Tensor, name: str) -> Tensor:
    """The units in which every block of numbers [..., N, C] fits in 4 bits, packed as `_unpack_units` reads them."""
    largest = torch.cat([block.abs().amax(-2) for block in _blocks(numbers)], -2)
    above_one = largest.div_(NIBBLE).ceil_().sub_(1).div_(_FACTORS[name]).ceil_()
    return pack_nibbles(above_one.add_(_LOWEST).clamp_(_LOWEST, NIBBLE).to(torch.int8))


def _unpack_units(packed: Tensor, size: int, name: str) -> Tensor:
    """The units of every block, int8 [..., K, C].

    Args:
        packed: int8 [..., ceil(K / 2), C], two blocks a byte.
        size: N, positions of the map.
        name: A name in `_FACTORS`.
    """
    blocks = -(-size // BLOCK)
    kept = unpack_nibbles(packed, packed.new_empty(*packed.shape[:-2], blocks, packed.shape[-1]))
    return kept.sub_(_LOWEST).mul_(_FACTORS[name]).add_(1)


def _blocks(numbers: Tensor) -> list[Tensor]:
    """Views [..., K, P, C] of numbers [..., N, C]: blocks of `BLOCK` positions, and what is left of them."""
    whole, rest = divmod(numbers.shape[-2], BLOCK)
    found = [numbers[..., : whole * BLOCK, :].unflatten(-2, (whole, BLOCK))] if whole else []
    return [*found, numbers[..., whole * BLOCK :, :].unsqueeze(-3)] if rest else found


def _multiply(numbers: Tensor, factors: Tensor) -> Tensor:
    """Multiply numbers [..., N, C] in place by their blocks' factors [..., K, C], or by one [..., 1, C] for all."""
    if factors.shape[-2] == 1:
        return numbers.mul_(factors)
    blocks = _blocks(numbers)
    for block, factor in zip(blocks, factors.split([block.shape[-3] for block in blocks], -2), strict=True):
        block.mul_(factor.unsqueeze(-2))
    return numbers


def _of_blocks(factors: Tensor, positions: Tensor) -> Tensor:
    """Factors [..., P, C] at positions [P], of blocks [..., K, C]; where there is one for all, that one."""
    return factors if factors.shape[-2] == 1 else factors.index_select(-2, positions // BLOCK)


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
