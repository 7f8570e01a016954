"""Recorded features of a source's steps, and what edits lay over them.

Edits lay copy-on-write overlays of their rows over a step, and shifts of everything else.

Knows sites, rows and positions; knows nothing about prompts or samplers. Maps are [B, H * W, C]; see
`fisedit.values` for the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fisedit.features.codec import EncodedMap, FeatureEncoding, RecordedMap, encode, tensors_of
from fisedit.features.sites import LayerSite, Role
from fisedit.machine.device import to_pinned_memory
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.reference_group_norm import total_statistics
from fisedit.sparse_kernels.row_plan import SparsePlan


class PagedMaps(MutableMapping[str, RecordedMap]):
    """Maps of a step that lie in a page on disk: reading or writing one brings all into memory.

    Args:
        load: brings a step's maps into memory.
        step: The step whose maps they are.
        names: The names of the maps.
        nbytes: The bytes that they take in memory.
    """

    def __init__(self, load: Callable[[Any], dict[str, Any]], step: object, names: Iterable[str], nbytes: int) -> None:
        self._load, self._step, self._names, self.nbytes = load, ref(step), dict.fromkeys(names), nbytes

    def __getitem__(self, name: str) -> RecordedMap:
        """A map."""
        found: RecordedMap = self._loaded()[name]
        return found

    def __setitem__(self, name: str, found: RecordedMap) -> None:
        """Exchange a map."""
        self._loaded()[name] = found

    def __delitem__(self, name: str) -> None:
        """Remove a map."""
        del self._loaded()[name]

    def __contains__(self, name: object) -> bool:
        """Return whether there is a map; nothing is read."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        """Names of the maps; nothing is read."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of maps."""
        return len(self._names)

    def _loaded(self) -> dict[str, Any]:
        step = self._step()
        assert step is not None, "a step's maps were kept without it"
        return self._load(step)


@dataclass(eq=False)
class StepFeatures:
    """Everything one dense step recorded.

    Args:
        maps: site name -> [B, H * W, C], as it was or encoded.
        statistics: norm's name -> [B, groups, 2], float64 sums and sums of squares over the whole map.
        joined: site name -> the site whose map lies beside its own, which is the first part of what it reads.
        offloaded_from: the device that maps in host memory are copied to when they are read; None for maps that are not
            offloaded.
    """

    maps: MutableMapping[str, RecordedMap] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)
    offloaded_from: torch.device | None = None

    def rows(self, key: str, level: int, positions: Tensor) -> Tensor:
        """Recorded rows.

        Args:
            key: site name.
            level: The level of the map; overlays need it.
            positions: int64 [P], flat.

        Returns:
            [B, P, C], a fresh tensor.
        """
        own = _decoded(self._on_device(key, positions.device), positions)
        beside = self.joined.get(key)
        return own if beside is None else torch.cat([own, self.rows(beside, level, positions)], -1)

    def whole(self, key: str, level: int) -> Tensor:
        """The whole recorded map [B, H * W, C], a fresh tensor that the caller may write to."""
        integers, scales = self.scaled(key, level)
        own = integers if scales is None else integers.mul_(scales)
        beside = self.joined.get(key)
        return own if beside is None else torch.cat([own, self.whole(beside, level)], -1)

    def scaled(self, key: str, level: int) -> tuple[Tensor, Tensor | None]:
        """The whole recorded map in units of a scale for each channel, where it is encoded.

        Args:
            key: name of a site whose map is not joined.
            level: The level of the map; overlays need it.

        Returns:
            [B, H * W, C], a fresh tensor that the caller may write to; the scales [C], or None for 1.
        """
        found = self._on_device(key, self.offloaded_from)
        if isinstance(found, EncodedMap):
            return found.integers().to(found.scales.dtype), found.scales
        return found.clone() if found is self.maps[key] else found, None

    def own_map(self, key: str) -> Tensor:
        """A map without what lies beside it, where it waits; the record's own tensor if it is not encoded."""
        return _decoded(self.maps[key])

    def channels(self, key: str) -> int:
        """C of a map."""
        found, beside = self.maps[key], self.joined.get(key)
        own = int((found.scales if isinstance(found, EncodedMap) else found).shape[-1])
        return own if beside is None else own + self.channels(beside)

    def encode(self, encoding: FeatureEncoding) -> None:
        """Encode the maps."""
        _encode(self.maps, encoding)

    def move_to_host(self) -> None:
        """Move the maps to pinned memory, so that copies back need no wait; statistics are few and stay."""
        device = self.offloaded_from = next(iter(self.statistics.values())).device
        self.maps = {
            name: _each_tensor(each, partial(to_pinned_memory, device=device)) for name, each in self.maps.items()
        }

    def _on_device(self, key: str, device: torch.device | None) -> RecordedMap:
        """A map where it is read."""
        if self.offloaded_from is None or device is None:
            return self.maps[key]
        return _each_tensor(self.maps[key], lambda tensor: tensor.to(device, non_blocking=True))

    def __contains__(self, key: str) -> bool:
        """Return whether a map of that name was recorded."""
        return key in self.maps

    @property
    def own_bytes(self) -> int:
        """Bytes held here."""
        return map_bytes(self.maps) + held_bytes(self.statistics.values())


def map_bytes(maps: Mapping[str, RecordedMap]) -> int:
    """Bytes that maps take in memory, or would take if they were not on disk."""
    if isinstance(maps, PagedMaps):
        return maps.nbytes
    return held_bytes(tensor for found in maps.values() for tensor in tensors_of(found))


def _encode(
    maps: MutableMapping[str, RecordedMap], encoding: FeatureEncoding, under: Mapping[str, RecordedMap] | None = None
) -> None:
    """Encode maps in place, the small ones aside; of rows those too that lie over an encoded map."""
    for name, rows in maps.items() if encoding.bits < 16 else ():
        over_encoded = under is not None and isinstance(under.get(name), EncodedMap)
        if isinstance(rows, Tensor) and rows.numel() and (over_encoded or rows.numel() >= encoding.min_numel):
            maps[name] = encode(rows, encoding.bits)


def _decoded(found: RecordedMap, index: Tensor | None = None) -> Tensor:
    """Rows of a map at an index, a fresh tensor; or all of them, the map's own tensor if it is not encoded."""
    if isinstance(found, EncodedMap):
        return found.whole() if index is None else found.rows(index)
    return found if index is None else found.index_select(1, index)


def _decoded_beside(
    maps: Mapping[str, RecordedMap], joined: Mapping[str, str], key: str, index: Tensor | None
) -> Tensor:
    """The same of a map and of those that lie beside it."""
    own, beside = _decoded(maps[key], index), joined.get(key)
    return own if beside is None else torch.cat([own, _decoded_beside(maps, joined, beside, index)], -1)


def _each_tensor(found: RecordedMap, change: Callable[[Tensor], Tensor]) -> RecordedMap:
    """A map with its tensors moved elsewhere."""
    return found.map_tensors(change) if isinstance(found, EncodedMap) else change(found)


@dataclass(eq=False)
class FeatureOverlay:
    """The copy-on-write overlay of an edit over its parent's step.

    It holds rows at the plan's active positions, as they were or encoded, and group statistics of the large mixed maps.
    Rows of a map in `joined` are the first part of what is read, as in `StepFeatures`. `share` edits are in the same
    memory. A `shallow` step's holds those of the last layer alone.
    """

    parent: ReadFeatures
    plan: SparsePlan
    maps: MutableMapping[str, RecordedMap] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    share: int = 1
    shallow: bool = False
    joined: dict[str, str] = field(default_factory=dict)

    def rows(self, key: str, level: int, positions: Tensor) -> Tensor:
        """The mixed rows: this overlay's where it has them, else the parent's; see `StepFeatures.rows`."""
        rows = self.parent.rows(key, level, positions)
        row_of_position = self.plan.levels[level].row_of_position[positions]
        hit = (row_of_position >= 0).nonzero().squeeze(1)
        return rows.index_copy_(1, hit, self.own_rows(key, row_of_position[hit])) if len(hit) else rows

    def whole(self, key: str, level: int) -> Tensor:
        """The whole mixed map [B, H * W, C], a fresh tensor that the caller may write to."""
        return self.parent.whole(key, level).index_copy_(1, self.plan.levels[level].active, self.own_rows(key))

    def scaled(self, key: str, level: int) -> tuple[Tensor, Tensor | None]:
        """The whole mixed map in units of a scale for each channel; see `StepFeatures.scaled`."""
        (integers, scales), rows = self.parent.scaled(key, level), self.own_rows(key)
        return integers.index_copy_(1, self.plan.levels[level].active, in_units(rows, scales)), scales

    def own_rows(self, key: str, index: Tensor | None = None) -> Tensor:
        """The rows [B, R, C] that are held here, decoded.

        Args:
            key: site name.
            index: int64 [P] of the rows that are wanted; None for all.
        """
        return _decoded_beside(self.maps, self.joined, key, index)

    def all_rows(self) -> dict[str, Tensor]:
        """The rows of every map by its name, as `own_rows`."""
        return {name: self.own_rows(name) for name in self.maps}

    def encode(self, encoding: FeatureEncoding) -> None:
        """Encode the rows; what is left as it was leaves the memory that it shared."""
        if encoding.bits == 16:
            return
        _encode(self.maps, encoding, _root(self).maps)
        self.maps = {name: _alone(rows) if isinstance(rows, Tensor) else rows for name, rows in self.maps.items()}
        self.statistics = {name: _alone(sums) for name, sums in self.statistics.items()}
        self.share = 1

    def __contains__(self, key: str) -> bool:
        """Return whether a map of that name was recorded."""
        return key in self.maps

    @property
    def own_bytes(self) -> int:
        """Bytes held here, the parent's not counted."""
        return (map_bytes(self.maps) + held_bytes(self.statistics.values())) // self.share


@dataclass(frozen=True, eq=False)
class FeatureDelta:
    """The changes that a dense step of an edit found, all over the picture, against its source's step.

    Args:
        maps: site name -> [B, H * W, C], as it was or encoded.
        joined: site name -> the site whose changes lie beside its own, as in `StepFeatures`.
    """

    maps: dict[str, RecordedMap]
    joined: dict[str, str] = field(default_factory=dict)

    @classmethod
    def between(cls, source: CachedFeatures, now: StepFeatures, sites: Mapping[str, LayerSite]) -> FeatureDelta:
        """The change from a source's step to an edit's.

        Args:
            source: the source's step.
            now: the edit's dense step, not yet encoded.
            sites: those whose maps later steps read, by name.
        """
        found = [site for name, site in sites.items() if name in source and name in now]
        names = {site.name for site in found}
        joined = {name: beside for name, beside in now.joined.items() if {name, beside} <= names}
        maps: dict[str, RecordedMap] = {}
        for site in found:
            rows = now.own_map(site.name) if site.name in joined else now.whole(site.name, site.level)
            maps[site.name] = rows - source.whole(site.name, site.level)[..., : rows.shape[-1]]
        return cls(maps, joined)

    def rows(self, key: str, positions: Tensor) -> Tensor | None:
        """The changes at positions int64 [P], flat; None of a map that has not changed."""
        return _decoded_beside(self.maps, self.joined, key, positions) if key in self.maps else None

    def whole(self, key: str) -> Tensor | None:
        """The change of a whole map; None of one that has not changed."""
        return _decoded_beside(self.maps, self.joined, key, None) if key in self.maps else None

    def encode(self, encoding: FeatureEncoding) -> None:
        """Encode the changes."""
        _encode(self.maps, encoding)

    @property
    def own_bytes(self) -> int:
        """Bytes held here."""
        return map_bytes(self.maps)


@dataclass(frozen=True, eq=False)
class ShiftedFeatures:
    """A source's step as an edit would have left it outside its mask.

    The changes that the edit's last dense step found there are added. They vary little from one step to the next. The
    dense step itself is kept so, too: with its own changes, and what it alone recorded.

    Args:
        parent: the source's step.
        shift: The changes.
        own: Queries and statistics of a dense step; None where another step's changes are added.
    """

    parent: CachedFeatures
    shift: FeatureDelta
    own: StepFeatures | None = None

    @classmethod
    def dense(cls, source: CachedFeatures, now: StepFeatures, sites: Mapping[str, LayerSite]) -> ShiftedFeatures:
        """A dense step of an edit over its source's; arguments as in `FeatureDelta.between`."""
        delta = FeatureDelta.between(source, now, sites)
        rest: dict[str, RecordedMap] = {name: now.whole(name, 0) for name in now.maps if name not in delta.maps}
        return cls(source, delta, StepFeatures(rest, now.statistics))

    def rows(self, key: str, level: int, positions: Tensor) -> Tensor:
        """The shifted rows; see `StepFeatures.rows`."""
        if self.own is not None and key in self.own:
            return self.own.rows(key, level, positions)
        rows, moved = self.parent.rows(key, level, positions), self.shift.rows(key, positions)
        return rows if moved is None else rows.add_(moved)

    def whole(self, key: str, level: int) -> Tensor:
        """The whole shifted map [B, H * W, C], a fresh tensor that the caller may write to."""
        if self.own is not None and key in self.own:
            return self.own.whole(key, level)
        whole, moved = self.parent.whole(key, level), self.shift.whole(key)
        return whole if moved is None else whole.add_(moved)

    def scaled(self, key: str, level: int) -> tuple[Tensor, Tensor | None]:
        """The whole shifted map in units of a scale for each channel; see `StepFeatures.scaled`."""
        if self.own is not None and key in self.own:
            return self.own.scaled(key, level)
        (integers, scales), moved = self.parent.scaled(key, level), self.shift.whole(key)
        return (integers if moved is None else integers.add_(in_units(moved, scales))), scales

    def __contains__(self, key: str) -> bool:
        """Return whether a map of that name was recorded."""
        return key in self.parent if self.own is None else key in self.own or key in self.shift.maps

    @property
    def statistics(self) -> dict[str, Tensor]:
        """A dense step's own group statistics."""
        return {} if self.own is None else self.own.statistics

    @property
    def own_bytes(self) -> int:
        """Bytes held here: the shift is its trajectory's, which has one for many steps."""
        return 0 if self.own is None else self.own.own_bytes


@dataclass(frozen=True, eq=False)
class RepeatedFeatures:
    """A source's step for some edits that are computed together, branch by branch: all of them read the same."""

    parent: CachedFeatures
    count: int

    def rows(self, key: str, level: int, positions: Tensor) -> Tensor:
        """The rows; see `StepFeatures.rows`."""
        return self._repeated(self.parent.rows(key, level, positions))

    def whole(self, key: str, level: int) -> Tensor:
        """The whole map [B, H * W, C], a fresh tensor that the caller may write to."""
        return self._repeated(self.parent.whole(key, level))

    def scaled(self, key: str, level: int) -> tuple[Tensor, Tensor | None]:
        """The whole map in units of a scale for each channel; see `StepFeatures.scaled`."""
        integers, scales = self.parent.scaled(key, level)
        return self._repeated(integers), scales

    def statistics(self, site: LayerSite) -> Tensor:
        """A norm's group statistics; see `recorded_statistics`."""
        return self._repeated(recorded_statistics(self.parent, site))

    def __contains__(self, key: str) -> bool:
        """Return whether a map of that name was recorded."""
        return key in self.parent

    own_bytes = 0

    def _repeated(self, found: Tensor) -> Tensor:
        return found.repeat_interleave(self.count, 0)


CachedFeatures = StepFeatures | FeatureOverlay | ShiftedFeatures
"""The features that a trajectory keeps of a step."""

ReadFeatures = CachedFeatures | RepeatedFeatures
"""The features that an evaluation reads of a step."""


def recorded_statistics(step: ReadFeatures, site: LayerSite) -> Tensor:
    """A norm's group statistics, kept with the step or computed now.

    Args:
        step: The step whose map it is.
        site: The site of the norm.

    Returns:
        float64 [B, groups, 2], sums and sums of squares over the whole map.
    """
    if isinstance(step, RepeatedFeatures):
        return step.statistics(site)
    if site.name in step.statistics:
        return step.statistics[site.name]
    whole = step.whole(site.name, site.level)
    return total_statistics(whole) if site.role is Role.NORM else ops.group_statistics(whole, site.module.num_groups)


@dataclass(frozen=True, eq=False)
class CachedMap:
    """A norm's input map of a cached step, a `operands.RecordedInput`.

    Args:
        step: The step whose map it is.
        site: The site of the norm.
    """

    step: ReadFeatures
    site: LayerSite

    def whole(self) -> Tensor:
        """See `operands.RecordedInput`."""
        return self.step.whole(self.site.name, self.site.level)

    def rows(self, positions: Tensor) -> Tensor:
        """See `operands.RecordedInput`."""
        return self.step.rows(self.site.name, self.site.level, positions)

    def statistics(self) -> Tensor | None:
        """See `operands.RecordedInput`; a shifted step keeps none, but for a dense one."""
        step = self.step
        return None if isinstance(step, ShiftedFeatures) and step.own is None else recorded_statistics(step, self.site)


def with_last_branch(step: CachedFeatures, last: StepFeatures, sites: Mapping[str, LayerSite]) -> StepFeatures:
    """Features of the last branch alone, completed by the other branches' of another step.

    Args:
        step: with all branches.
        last: what the last branch recorded.
        sites: those that record all branches, by name.
    """
    maps, sums = dict(last.maps), dict(last.statistics)
    for name in maps.keys() & sites.keys():
        now = last.own_map(name)
        maps[name] = torch.cat([step.whole(name, sites[name].level)[:-1, :, : now.shape[-1]], now])
    for name, own in sums.items():
        sums[name] = torch.cat([recorded_statistics(step, sites[name])[:-1], own])
    return StepFeatures(maps, sums, dict(last.joined))


def shifted(step: ReadFeatures) -> bool:
    """Return whether a step, or one that it lies over, is shifted."""
    while isinstance(step, FeatureOverlay | RepeatedFeatures):
        step = step.parent
    return isinstance(step, ShiftedFeatures)


def is_shallow(step: ReadFeatures) -> bool:
    """Return whether a step, or one that it lies over, holds the last layer's rows alone."""
    while not isinstance(step, StepFeatures):
        if isinstance(step, FeatureOverlay) and step.shallow:
            return True
        step = step.parent
    return False


def _root(step: ReadFeatures) -> StepFeatures:
    """The recorded step that a step lies over."""
    while not isinstance(step, StepFeatures):
        step = step.parent
    return step


def in_units(rows: Tensor, scales: Tensor | None) -> Tensor:
    """Rows [B, R, C] in units of a scale for each channel."""
    return rows if scales is None else rows / scales


def _alone(tensor: Tensor) -> Tensor:
    """A tensor in memory of its own: a copy where that is larger than it."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, shared memory counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
