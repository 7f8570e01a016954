"""Recorded features: what a step of a source left behind, and what edits lay over it: copy-on-write overlays of their
rows, and shifts of everything else.

Knows keys, rows and positions; knows nothing about layers, prompts or samplers. Maps are [B, H * W, C]; see
`fisedit.values` for the legend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fisedit.models.device import to_pinned_memory
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.row_plan import SparsePlan


@dataclass(eq=False)
class StepFeatures:
    """Everything one dense step recorded.

    Args:
        maps: site name -> [B, H * W, C].
        statistics: norm's name -> [B, groups, 2], float64 sums and sums of squares over the whole map.
        offloaded_from: the device that maps in host memory are copied to when they are read; None for maps that are not
            offloaded.
    """

    maps: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    offloaded_from: torch.device | None = None

    def rows(self, key: str, level: int, positions: Tensor) -> Tensor:
        """Recorded rows.

        Args:
            key: site name.
            level: of the map; overlays need it.
            positions: int64 [P], flat.

        Returns:
            [B, P, C], a fresh tensor.
        """
        return self.maps[key].to(positions.device, non_blocking=True).index_select(1, positions)

    def whole(self, key: str, level: int) -> Tensor:
        """The whole recorded map [B, H * W, C], a fresh tensor that the caller may write to."""
        recorded = self.maps[key]
        return (
            recorded.clone()
            if self.offloaded_from is None
            else recorded.to(self.offloaded_from, non_blocking=True, copy=True)
        )

    def move_to_host(self) -> None:
        """Move the maps to pinned memory, so that copies back need no wait; statistics are few and stay."""
        self.offloaded_from = next(iter(self.maps.values())).device
        self.maps = {name: to_pinned_memory(tensor, self.offloaded_from) for name, tensor in self.maps.items()}

    def __contains__(self, key: str) -> bool:
        """Whether a map of that name was recorded."""
        return key in self.maps

    @property
    def own_bytes(self) -> int:
        """Bytes held here."""
        return held_bytes((*self.maps.values(), *self.statistics.values()))


@dataclass(eq=False)
class FeatureOverlay:
    """What an edit changed of its parent's step: rows at the plan's active positions, and group statistics of the large
    mixed maps; `share` edits are in the same memory."""

    parent: CachedFeatures
    plan: SparsePlan
    maps: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    share: int = 1

    def rows(self, key: str, level: int, positions: Tensor) -> Tensor:
        """The mixed rows: this overlay's where it has them, else the parent's; see `StepFeatures.rows`."""
        rows = self.parent.rows(key, level, positions)
        row_of_position = self.plan.levels[level].row_of_position[positions]
        hit = (row_of_position >= 0).nonzero().squeeze(1)
        return rows.index_copy_(1, hit, self.maps[key].index_select(1, row_of_position[hit])) if len(hit) else rows

    def whole(self, key: str, level: int) -> Tensor:
        """The whole mixed map [B, H * W, C], a fresh tensor that the caller may write to."""
        return self.parent.whole(key, level).index_copy_(1, self.plan.levels[level].active, self.maps[key])

    def __contains__(self, key: str) -> bool:
        """Whether a map of that name was recorded."""
        return key in self.maps

    @property
    def own_bytes(self) -> int:
        """Bytes held here, the parent's not counted."""
        return held_bytes((*self.maps.values(), *self.statistics.values())) // self.share


@dataclass(frozen=True, eq=False)
class FeatureDelta:
    """What a dense step of an edit found changed, all over the picture, against its source's step.

    Args:
        maps: site name -> [B, H * W, C].
    """

    maps: dict[str, Tensor]

    @classmethod
    def between(cls, source: CachedFeatures, now: StepFeatures, levels: Mapping[str, int]) -> FeatureDelta:
        """The change from a source's step to an edit's.

        Args:
            source: the source's step.
            now: the edit's dense step.
            levels: of the sites whose maps later steps read, by name.
        """
        names = [name for name in levels if name in source and name in now]
        return cls({name: source.whole(name, levels[name]).neg_().add_(now.maps[name]) for name in names})

    @property
    def own_bytes(self) -> int:
        """Bytes held here."""
        return held_bytes(self.maps.values())


@dataclass(frozen=True, eq=False)
class ShiftedFeatures:
    """A source's step as an edit would have left it outside its mask: what the edit's last dense step found changed
    there is added, as from one step to the next it changes little."""

    parent: CachedFeatures
    shift: FeatureDelta

    def rows(self, key: str, level: int, positions: Tensor) -> Tensor:
        """The shifted rows; see `StepFeatures.rows`."""
        rows, moved = self.parent.rows(key, level, positions), self.shift.maps.get(key)
        return rows if moved is None else rows.add_(moved.index_select(1, positions))

    def whole(self, key: str, level: int) -> Tensor:
        """The whole shifted map [B, H * W, C], a fresh tensor that the caller may write to."""
        moved, step = self.shift.maps.get(key), self.parent
        if moved is not None and isinstance(step, StepFeatures) and step.offloaded_from is None:
            return step.maps[key] + moved
        whole = step.whole(key, level)
        return whole if moved is None else whole.add_(moved)

    def __contains__(self, key: str) -> bool:
        """Whether a map of that name was recorded."""
        return key in self.parent

    own_bytes = 0  # the shift is its trajectory's, which has one for many steps


CachedFeatures = StepFeatures | FeatureOverlay | ShiftedFeatures


def recorded_statistics(step: CachedFeatures, key: str, level: int, groups: int) -> Tensor:
    """A norm's group statistics, kept with the step or computed now.

    Args:
        step: whose map it is.
        key: the norm's name.
        level: of the map.
        groups: of the norm.

    Returns:
        float64 [B, groups, 2], sums and sums of squares over the whole map.
    """
    kept = {} if isinstance(step, ShiftedFeatures) else step.statistics
    return kept[key] if key in kept else ops.group_statistics(step.whole(key, level), groups)


@dataclass(frozen=True, eq=False)
class CachedMap:
    """A norm's input map of a cached step, a `reference.RecordedInput`.

    Args:
        step: whose map it is.
        key: the norm's name.
        level: of the map.
    """

    step: CachedFeatures
    key: str
    level: int

    def whole(self) -> Tensor:
        """See `reference.RecordedInput`."""
        return self.step.whole(self.key, self.level)

    def rows(self, positions: Tensor) -> Tensor:
        """See `reference.RecordedInput`."""
        return self.step.rows(self.key, self.level, positions)

    def statistics(self, groups: int) -> Tensor | None:
        """See `reference.RecordedInput`; a shifted step keeps none."""
        if isinstance(self.step, ShiftedFeatures):
            return None
        return recorded_statistics(self.step, self.key, self.level, groups)


def with_last_branch(step: CachedFeatures, last: StepFeatures, levels: Mapping[str, int]) -> StepFeatures:
    """Features of the last branch alone, completed by the other branches' of another step.

    Args:
        step: with all branches.
        last: what the last branch recorded.
        levels: of the sites that record all branches, by name.
    """
    maps, sums = dict(last.maps), dict(last.statistics)
    for name in maps.keys() & levels.keys():
        maps[name] = step.whole(name, levels[name])
        maps[name][-1:] = last.maps[name]
    for name, own in sums.items():
        sums[name] = torch.cat([recorded_statistics(step, name, levels[name], own.shape[1])[:-1], own])
    return StepFeatures(maps, sums)


def shifted(step: CachedFeatures) -> bool:
    """Whether a step, or one that it lies over, is shifted."""
    while isinstance(step, FeatureOverlay):
        step = step.parent
    return isinstance(step, ShiftedFeatures)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, shared memory counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def rows_of(x: Tensor) -> Tensor:
    """[B, C, H, W] or [B, C, R] -> [B, rows, C]; free where the map is channels_last."""
    return x.flatten(2).transpose(1, 2).contiguous()


def map_of(rows: Tensor) -> Tensor:
    """[B, R, C] -> [B, C, R, 1], a view."""
    return rows.transpose(1, 2).unsqueeze(-1)


def scatter(base: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """A copy of a map with rows written into it.

    Args:
        base: [B, C, H, W].
        positions: int64 [R], flat.
        rows: [B, R, C].
    """
    mixed = base.flatten(2).clone()
    mixed.index_copy_(2, positions, rows.transpose(1, 2).to(mixed.dtype))
    return mixed.view(base.shape)


def gather(full: Tensor, positions: Tensor) -> Tensor:
    """Rows [B, len(positions), C] of a map [B, C, H, W]."""
    return torch.index_select(full.flatten(2), 2, positions).transpose(1, 2)
