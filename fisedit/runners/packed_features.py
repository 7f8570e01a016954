"""A step's recorded maps side by side, so that one gather finds every row that an edit reads.

Where the rows lie depends on the mask alone: the index is made once for an edit and serves all its steps. Knows sites,
plans and positions; knows nothing about what the rows are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.features.cache import CachedFeatures, FeatureOverlay, ReadFeatures, StepFeatures, recorded_statistics
from fisedit.features.sites import LayerSite, Role, channels
from fisedit.machine.device import to_pinned_memory
from fisedit.runners.static_rows import SCALES, Buffers
from fisedit.sparse_kernels.operands import quantise
from fisedit.sparse_kernels.row_plan import SparsePlan

HALOS = {Role.NORM_HALO: "same", Role.DOWN: "down", Role.UP: "up"}
"""Role -> the reads whose halo is recorded."""

Positions = tuple[str, int, list[Tensor]]
"""Name and level of a site, and positions int64 [R] of every edit, padded."""

Quantised = tuple[Tensor, Tensor]
"""Keys or values in a byte a number, and their scales."""


@dataclass(frozen=True)
class ReadSites:
    """The sites that a graph reads of a step, in the order of its buffers.

    Args:
        maps: names of those of which rows are read.
        norms: names of those whose group statistics are read.
        tokens: names of keys and values.
    """

    maps: tuple[str, ...]
    norms: tuple[str, ...]
    tokens: tuple[str, ...]

    @classmethod
    def of(cls, buffers: Buffers) -> ReadSites:
        """The sites that some buffers are for."""
        maps = dict.fromkeys(name.partition(" ")[2] for name in buffers.rows.shapes)
        tokens = (name for name in buffers.tokens if not name.endswith(SCALES))
        return cls(tuple(maps), tuple(buffers.statistics.shapes), tuple(tokens))


class FeaturePacker:
    """Packs the maps of steps on first use; a pack lives as long as its step.

    Of an overlay only its own rows are packed, for every edit over it: the pack of the recorded step stays valid.

    Args:
        sites: The sites of the model. All maps are cut into pieces of `piece` channels, which divides every map's.
        heads: The heads of the keys and values that are quantised, by site (see `quantise`).
        kind: dtype of quantised numbers, None for int8.
    """

    def __init__(
        self, sites: Sequence[LayerSite], heads: Mapping[str, int] | None = None, kind: torch.dtype | None = None
    ) -> None:
        self._sites = {site.name: site for site in sites if site.role in HALOS}
        self._all = {site.name: site for site in sites}
        self.piece = gcd(*map(channels, self._sites.values()))
        self._heads, self._kind = heads or {}, kind or torch.int8
        self._packed: WeakKeyDictionary[StepFeatures, tuple[Tensor, dict[str, Quantised]]] = WeakKeyDictionary()

    def gather_index(
        self, buffers: Buffers, plans: Sequence[SparsePlan], branches: int, step: CachedFeatures
    ) -> GatherIndex:
        """Find what some edits of one size read of every step.

        Args:
            buffers: what is read is copied to, in the order of `Buffers.copied`.
            plans: The plans of every edit.
            branches: S.
            step: one of the steps; all were recorded alike.
        """
        found: dict[tuple[int, str], Tensor] = {}
        parts, layout = [], _Layout(self, plans[0], branches, _overlay_chain(step)[0])
        read = ReadSites.of(buffers)
        for name, shape in buffers.rows.shapes.items():
            kind, _, site_name = name.partition(" ")
            site = self._sites[site_name]
            key = site.level, HALOS[site.role] if kind == "halo" else kind
            if key not in found:
                found[key] = _positions(plans, branches, *key, shape[1])
            parts.append(layout.pieces(site.name, found[key]))
        return GatherIndex(
            self,
            torch.cat(parts),
            layout,
            read,
            [self._padded(*each, plans) for each in buffers.row_statistics.shapes.items()],
            [self._padded(*each, plans) for each in buffers.injected.shapes.items()],
        )

    def _padded(self, name: str, shape: tuple[int, ...], plans: Sequence[SparsePlan]) -> Positions:
        """Return where every edit reads the active rows of a site."""
        level = self._all[name].level
        active = [plan.levels[level].active for plan in plans]
        return name, level, [F.pad(positions, (0, shape[1] - len(positions))) for positions in active]

    def flat_rows(self, step: StepFeatures) -> Tensor:
        """The rows of a recorded step side by side [pieces, piece]."""
        return self._pack(step)[0]

    def changed_rows(self, overlay: FeatureOverlay, names: Sequence[str]) -> Tensor:
        """The rows that an overlay changed of some maps side by side [pieces, piece]."""
        return torch.cat([overlay.own_rows(name).reshape(-1, self.piece) for name in names])

    def statistics(self, step: CachedFeatures, names: Sequence[str]) -> Tensor:
        """Group statistics of some norms in one tensor, float64."""
        return torch.cat([recorded_statistics(step, self._all[name]).flatten() for name in names])

    def tokens(self, step: CachedFeatures, names: Sequence[str]) -> list[Tensor]:
        """Some maps of keys and values; where these are quantised, their scales are after every one."""
        sites = [self._all[name] for name in names]
        if not self._heads:
            return [_whole(step, site) for site in sites]
        root, overlays = _overlay_chain(step)
        known = self._pack(root)[1]
        known |= {site.name: self._quantise(root, site) for site in sites if site.name not in known}
        quantised_maps = [tensor for name in names for tensor in known[name]]
        if not overlays:
            return quantised_maps
        mixed = [tensor.to(overlays[0].plan.levels[0].active.device, copy=True) for tensor in quantised_maps]
        for overlay in overlays:
            for i, site in enumerate(sites):
                active = overlay.plan.levels[site.level].active
                for target, rows in zip(mixed[2 * i : 2 * i + 2], self._quantise(overlay, site), strict=True):
                    same = torch.int8 if rows.dtype.itemsize == 1 else rows.dtype  # few operations know fp8
                    target.view(same).index_copy_(1, active, rows.view(same))
        return mixed

    def _pack(self, step: StepFeatures) -> tuple[Tensor, dict[str, Quantised]]:
        """Pack what was recorded side by side, and keep it: maps that are not encoded are views of it from then on.

        Beside it are the keys and values that were quantised so far.
        """
        if step in self._packed:
            return self._packed[step]
        maps = {name: step.own_map(name) for name in self._sites}
        flat = torch.cat([own.view(-1, self.piece) for own in maps.values()])
        if step.offloaded_from is not None:
            flat = to_pinned_memory(flat, step.offloaded_from)
        self._packed[step] = flat, {}
        parts = flat.split([own.numel() // self.piece for own in maps.values()])
        for (name, own), part in zip(maps.items(), parts, strict=True):
            if step.maps[name] is own:
                step.maps[name] = part.view(own.shape)
        return self._packed[step]

    def _quantise(self, step: StepFeatures | FeatureOverlay, site: LayerSite) -> Quantised:
        rows = step.own_map(site.name) if isinstance(step, StepFeatures) else step.own_rows(site.name)
        return quantise(rows, self._heads[site.name], self._kind)

    @property
    def sites(self) -> Mapping[str, LayerSite]:
        """Those whose maps are packed, in their order."""
        return self._sites


class _Layout:
    """The layout of a step's maps in its pack.

    Args:
        packer: The packer of the step.
        plan: The plan of an edit, for the sizes of its levels.
        branches: S.
        step: A step recorded as all steps of its source.
    """

    def __init__(self, packer: FeaturePacker, plan: SparsePlan, branches: int, step: StepFeatures) -> None:
        self._packer, self._branches, self._joined = packer, branches, step.joined
        self._starts: dict[str, int] = {}
        self._pieces: dict[str, int] = {}
        start = 0
        for name, site in packer.sites.items():
            beside = self._joined.get(name)
            own = channels(site) - (channels(packer.sites[beside]) if beside else 0)
            self._starts[name], self._pieces[name] = start, own // packer.piece
            start += branches * plan.levels[site.level].size * own // packer.piece

    def pieces(self, name: str, positions: Tensor) -> Tensor:
        """Return where rows at positions [S, R] of a map's record lie, int64 [pieces]."""
        return self._of_rows(name, positions).flatten()

    def changed(self, plan: SparsePlan, names: Sequence[str]) -> Tensor:
        """Return where an overlay's rows lie in the pack under it: int64 [pieces], in the order of `changed_rows`."""
        found = []
        for name in names:
            level = self._packer.sites[name].level
            count = plan.levels[level].rows
            found.append(self.pieces(name, _positions([plan], self._branches, level, "active", count)))
        return torch.cat(found)

    def _of_rows(self, name: str, positions: Tensor) -> Tensor:
        """Return the pieces of every row [S, R, n], those of the map beside it last."""
        within = torch.arange(self._pieces[name], device=positions.device)
        own = self._starts[name] + positions[..., None] * self._pieces[name] + within
        beside = self._joined.get(name)
        return own if beside is None else torch.cat([own, self._of_rows(beside, positions)], -1)


class GatherIndex:
    """The index of what some edits read of every step, found when their masks are known.

    Args:
        packer: The packer of the steps that are read.
        index: where their rows lie in a pack: int64 [pieces]. Padding points anywhere.
        layout: The layout of the packs.
        read: The sites that are read.
        row_statistics: where statistics of rows are read.
        injected: where queries and keys are read that the last branch attends with.
    """

    def __init__(
        self,
        packer: FeaturePacker,
        index: Tensor,
        layout: _Layout,
        read: ReadSites,
        row_statistics: Sequence[Positions],
        injected: Sequence[Positions],
    ) -> None:
        self._packer, self._index, self._layout, self._read = packer, index, layout, read
        self._row_statistics, self._injected = row_statistics, injected
        self._found: dict[SparsePlan, Tensor] = {}

    def gather(self, step: CachedFeatures) -> list[Tensor]:
        """Gather what is read of a step.

        Args:
            step: recorded, or an overlay.

        Returns:
            In one tensor each: the group statistics of norms, and the rows of maps. Statistics of rows, and injected
            queries and keys, follow in one each if there are some. Then comes every map of keys and values.
        """
        packer, (root, overlays) = self._packer, _overlay_chain(step)
        pack = packer.flat_rows(root).to(self._index.device)
        rows = pack.index_select(0, self._index)
        for overlay in overlays:
            row_of_position = self._row_of_position(overlay.plan, len(pack))
            changed = packer.changed_rows(overlay, self._read.maps).index_select(0, row_of_position.clamp(min=0))
            rows = torch.where((row_of_position >= 0)[:, None], changed, rows)
        sums = [
            torch.stack([step.rows(name, level, at) for at in each], 1).flatten()
            for name, level, each in self._row_statistics
        ]
        kept = [step.rows(name, level, at)[-1:].flatten() for name, level, each in self._injected for at in each]
        return [
            packer.statistics(step, self._read.norms),
            rows.flatten(),
            *(torch.cat(parts) for parts in (sums, kept) if parts),
            *packer.tokens(step, self._read.tokens),
        ]

    def _row_of_position(self, plan: SparsePlan, size: int) -> Tensor:
        """Return where the rows that are read lie among the own ones of a plan's overlays, -1 where they do not."""
        if plan not in self._found:
            changed = self._layout.changed(plan, self._read.maps)
            row_of_position = torch.full((size,), -1, device=changed.device)
            row_of_position[changed] = torch.arange(len(changed), device=changed.device)
            self._found[plan] = row_of_position[self._index]
        return self._found[plan]


def _overlay_chain(step: ReadFeatures) -> tuple[StepFeatures, list[FeatureOverlay]]:
    """Return what was recorded under a step, and the overlays over it, the lowest first."""
    overlays: list[FeatureOverlay] = []
    while isinstance(step, FeatureOverlay):
        overlays.insert(0, step)
        step = step.parent
    assert isinstance(step, StepFeatures), "a shifted step has no pack"
    return step, overlays


def _positions(plans: Sequence[SparsePlan], branches: int, level: int, kind: str, count: int) -> Tensor:
    """Positions in a record [S * H * W] of the rows of all items, padded: int64 [S * E, count]."""
    each = [plan.levels[level] for plan in plans]
    position_tables = [at.active if kind == "active" else getattr(at, kind).halo for at in each]
    rows = torch.stack([F.pad(positions, (0, count - len(positions))) for positions in position_tables])
    branch = torch.arange(branches, device=rows.device)[:, None, None] * each[0].size
    return (branch + rows).flatten(0, 1)


def _whole(step: CachedFeatures, site: LayerSite) -> Tensor:
    """A recorded map; the record's own tensor where there is one, which may wait in host memory."""
    return step.own_map(site.name) if isinstance(step, StepFeatures) else step.whole(site.name, site.level)
