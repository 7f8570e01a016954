"""A step's recorded maps side by side, so that one gather finds every row that an edit reads.

Where the rows lie depends on the mask alone: the index is made once for an edit and serves all its steps. Knows sites,
plans and positions; knows nothing about what the rows are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.models.device import to_pinned_memory
from fisedit.sparse.feature_cache import CachedFeatures, FeatureOverlay, StepFeatures, recorded_statistics
from fisedit.sparse.modules import LayerSite, Role
from fisedit.sparse.static_rows import NORMS, Packed, channels
from fisedit.sparse_kernels.reference import quantise
from fisedit.sparse_kernels.row_plan import SparsePlan

HALOS = {Role.NORM_HALO: "same", Role.DOWN: "down", Role.UP: "up"}
"""Role -> the reads whose halo is recorded."""


class FeaturePacker:
    """Packs the maps of steps on first use; a pack lives as long as its step.

    Of an overlay only its own rows are packed, for every edit over it: the pack of the recorded step stays valid.

    Args:
        sites: of the model. All maps are cut into pieces of `piece` channels, which divides every map's.
        heads: of the keys and values, by site, that are quantised (see `quantise`).
        kind: dtype of quantised numbers, None for int8.
    """

    def __init__(
        self, sites: Sequence[LayerSite], heads: Mapping[str, int] | None = None, kind: torch.dtype | None = None
    ) -> None:
        self._sites = [site for site in sites if site.role in HALOS or site.role in NORMS]
        self._tokens = [site for site in sites if site.role is Role.TOKENS]
        self._levels = {site.name: site.level for site in sites}
        self.piece = gcd(*map(channels, self._sites))
        self._heads, self._kind = heads or {}, kind or torch.int8
        self._packed: WeakKeyDictionary[StepFeatures, tuple[Tensor, list[Tensor]]] = WeakKeyDictionary()

    def gather_index(
        self, rows: Packed, plans: Sequence[SparsePlan], branches: int, injected: Packed | None = None
    ) -> GatherIndex:
        """Find what some edits of one size read of every step.

        Args:
            rows: names and shapes of the rows that are read, in their order.
            plans: of every edit.
            branches: S.
            injected: names and shapes of the queries and keys that the last branch attends with; None for none.
        """
        found: dict[tuple[int, str], Tensor] = {}
        parts, starts = [], self._starts(plans[0], branches)
        for name, shape in rows.shapes.items():
            kind, _, site_name = name.partition(" ")
            site = next(site for site in self._sites if site.name == site_name)
            key = site.level, HALOS[site.role] if kind == "halo" else kind
            if key not in found:
                found[key] = _positions(plans, branches, *key, shape[1])
            parts.append(self._pieces(site, starts[site_name], found[key]))
        kept = [] if injected is None else [self._injected(*each, plans) for each in injected.shapes.items()]
        return GatherIndex(self, torch.cat(parts), branches, kept)

    def _injected(
        self, name: str, shape: tuple[int, ...], plans: Sequence[SparsePlan]
    ) -> tuple[str, int, list[Tensor]]:
        """Where the queries or keys of a site are read: its name, level and every plan's positions, padded."""
        level = self._levels[name]
        active = [plan.levels[level].active for plan in plans]
        return name, level, [F.pad(positions, (0, shape[1] - len(positions))) for positions in active]

    def changed(self, plan: SparsePlan, branches: int) -> Tensor:
        """Where an overlay's rows lie in the pack under it: int64 [pieces], in the order of `flat_rows`."""
        starts = self._starts(plan, branches)
        return torch.cat(
            [
                self._pieces(site, starts[site.name], _positions([plan], branches, site.level, "active", level.rows))
                for site in self._sites
                for level in [plan.levels[site.level]]
            ]
        )

    def flat_rows(self, step: CachedFeatures) -> Tensor:
        """A step's own rows side by side [pieces, piece]: of a recorded one all, of an edit's what it changed."""
        if isinstance(step, StepFeatures):
            return self._pack(step)[0]
        assert isinstance(step, FeatureOverlay), "a shifted step has no pack"
        return torch.cat([step.maps[site.name].reshape(-1, self.piece) for site in self._sites])

    def statistics(self, step: CachedFeatures) -> Tensor:
        """Group statistics of all norms in one tensor, float64."""
        norms = ((site, site.module.num_groups) for site in self._sites if site.role in NORMS)
        return torch.cat([recorded_statistics(step, site.name, site.level, groups).flatten() for site, groups in norms])

    def tokens(self, step: CachedFeatures) -> list[Tensor]:
        """Every map of keys and values; where these are quantised, their scales are after every one."""
        if not self._heads:
            return [_whole(step, site) for site in self._tokens]
        root, overlays = _overlay_chain(step)
        quantised_maps = self._pack(root)[1]
        if not overlays:
            return quantised_maps
        mixed = [tensor.to(overlays[0].plan.levels[0].active.device, copy=True) for tensor in quantised_maps]
        for overlay in overlays:
            for i, site in enumerate(self._tokens):
                active = overlay.plan.levels[site.level].active
                for target, rows in zip(mixed[2 * i : 2 * i + 2], self._quantise(overlay, site), strict=True):
                    same = torch.int8 if rows.dtype.itemsize == 1 else rows.dtype  # few operations know fp8
                    target.view(same).index_copy_(1, active, rows.view(same))
        return mixed

    def _pack(self, step: StepFeatures) -> tuple[Tensor, list[Tensor]]:
        """What was recorded side by side, kept so: its maps are views of it from then on."""
        if step in self._packed:
            return self._packed[step]
        flat = torch.cat([step.maps[site.name].view(-1, self.piece) for site in self._sites])
        if step.offloaded_from is not None:
            flat = to_pinned_memory(flat, step.offloaded_from)
        numbers = [part for site in self._tokens if self._heads for part in self._quantise(step, site)]
        self._packed[step], maps = (flat, numbers), [step.maps[site.name] for site in self._sites]
        parts = flat.split([old.numel() // self.piece for old in maps])
        step.maps |= {s.name: part.view(old.shape) for s, part, old in zip(self._sites, parts, maps, strict=True)}
        return flat, numbers

    def _quantise(self, step: StepFeatures | FeatureOverlay, site: LayerSite) -> tuple[Tensor, Tensor]:
        return quantise(step.maps[site.name], self._heads[site.name], self._kind)

    def _starts(self, plan: SparsePlan, branches: int) -> dict[str, int]:
        """The first piece of every map in a pack."""
        starts, start = {}, 0
        for site in self._sites:
            starts[site.name] = start
            start += branches * plan.levels[site.level].size * channels(site) // self.piece
        return starts

    def _pieces(self, site: LayerSite, start: int, positions: Tensor) -> Tensor:
        """Where rows at positions [S, R] of a map's record lie in a pack that has it at `start`."""
        pieces = channels(site) // self.piece
        within = torch.arange(pieces, device=positions.device)
        return (start + positions[..., None] * pieces + within).flatten()


class GatherIndex:
    """What some edits read of every step, found when their masks are known.

    Args:
        packer: of the steps that are read.
        index: where their rows lie in a pack: int64 [pieces]. Padding points anywhere.
        branches: S.
        injected: name, level and positions of queries and keys that the last branch attends with.
    """

    def __init__(
        self,
        packer: FeaturePacker,
        index: Tensor,
        branches: int,
        injected: Sequence[tuple[str, int, list[Tensor]]] = (),
    ) -> None:
        self._packer, self._index, self._branches, self._injected = packer, index, branches, injected
        self._found: dict[SparsePlan, Tensor] = {}

    def gather(self, step: CachedFeatures) -> list[Tensor]:
        """Gather what is read of a step.

        Args:
            step: recorded, or an overlay.

        Returns:
            In one tensor each: the group statistics of all norms, the rows of all maps, and injected queries and keys
            if there are some; then every map of keys and values.
        """
        packer, (root, overlays) = self._packer, _overlay_chain(step)
        pack = packer.flat_rows(root).to(self._index.device)
        rows = pack.index_select(0, self._index)
        for overlay in overlays:
            row_of_position = self._row_of_position(overlay.plan, len(pack))
            changed = packer.flat_rows(overlay).index_select(0, row_of_position.clamp(min=0))
            rows = torch.where((row_of_position >= 0)[:, None], changed, rows)
        kept = [
            step.rows(name, level, positions)[-1:].flatten()
            for name, level, each in self._injected
            for positions in each
        ]
        return [packer.statistics(step), rows.flatten(), *([torch.cat(kept)] if kept else []), *packer.tokens(step)]

    def _row_of_position(self, plan: SparsePlan, size: int) -> Tensor:
        """Where the rows that are read are among the own ones of a plan's overlays, -1 for those that are not."""
        if plan not in self._found:
            changed = self._packer.changed(plan, self._branches)
            row_of_position = torch.full((size,), -1, device=changed.device)
            row_of_position[changed] = torch.arange(len(changed), device=changed.device)
            self._found[plan] = row_of_position[self._index]
        return self._found[plan]


def _overlay_chain(step: CachedFeatures) -> tuple[StepFeatures, list[FeatureOverlay]]:
    """What was recorded under a step, and the overlays over it, the lowest first."""
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
    return step.maps[site.name] if isinstance(step, StepFeatures) else step.whole(site.name, site.level)
