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

from fisedit.cache import StepFeatures, StepMaps
from fisedit.fused import NORMS, Packed, channels
from fisedit.graph import Role, Site
from fisedit.plan import SparsePlan
from fisedit.sparse_kernels.reference import coded

HALOS = {Role.NORM_HALO: "same", Role.DOWN: "down", Role.UP: "up"}
"""Role -> the reads whose halo is recorded."""


class Records:
    """Steps, packed on first use; recorded ones are kept so as long as the step itself is.

    Args:
        sites: the UNet's. All maps are cut into pieces of `piece` channels, which divides every map's.
        heads: of the keys and values, by site, that are kept in a byte a number (see `reference.coded`).
    """

    def __init__(self, sites: Sequence[Site], heads: Mapping[str, int] | None = None) -> None:
        self._sites = [site for site in sites if site.role in HALOS or site.role in NORMS]
        self._tokens = [site for site in sites if site.role is Role.TOKENS]
        self.piece = gcd(*map(channels, self._sites))
        self._heads = heads or {}
        self._packed: WeakKeyDictionary[StepFeatures, tuple[Tensor, Tensor, list[Tensor]]] = WeakKeyDictionary()

    def gather(self, step: StepFeatures, index: Tensor) -> list[Tensor]:
        """Totals of all norms side by side, the rows that `index` finds, and every map of keys and values.

        Where these are coded, their scales are after every one.
        """
        totals, flat, numbers = self._packed.get(step) or self._pack(step)
        tokens = numbers or [_whole(step, site) for site in self._tokens]
        return [totals, flat.index_select(0, index).flatten(), *tokens]

    def _pack(self, step: StepFeatures) -> tuple[Tensor, Tensor, list[Tensor]]:
        """A step side by side. What was recorded is kept so, and its maps are views of it from then on; an edit's step
        is packed anew for every edit over it, as it would hold all that its source holds."""
        totals = torch.cat([step.totals[site.name].flatten() for site in self._sites if site.role in NORMS])
        flat = torch.cat([_whole(step, site).view(-1, self.piece) for site in self._sites])
        numbers = [part for site in self._tokens if self._heads for part in self._code(step, site)]
        if isinstance(step, StepMaps):
            self._packed[step], maps = (totals, flat, numbers), [step.maps[site.name] for site in self._sites]
            parts = flat.split([old.numel() // self.piece for old in maps])
            step.maps |= {s.name: part.view(old.shape) for s, part, old in zip(self._sites, parts, maps, strict=True)}
        return totals, flat, numbers

    def _code(self, step: StepFeatures, site: Site) -> tuple[Tensor, Tensor]:
        return coded(_whole(step, site), self._heads[site.name])

    def index(self, rows: Packed, plans: Sequence[SparsePlan], branches: int) -> Tensor:
        """Where the rows of some edits lie: int64 [pieces], in the order of `rows`. Padding points anywhere."""
        starts, start = {}, 0
        for site in self._sites:
            starts[site.name] = start
            start += branches * plans[0].levels[site.level].size * channels(site) // self.piece
        found: dict[tuple[int, str], Tensor] = {}
        parts = []
        for name, shape in rows.shapes.items():
            kind, _, site_name = name.partition(" ")
            site = next(site for site in self._sites if site.name == site_name)
            key = site.level, HALOS[site.role] if kind == "halo" else kind
            if key not in found:
                found[key] = _positions(plans, branches, *key, shape[1])
            pieces = channels(site) // self.piece
            within = torch.arange(pieces, device=found[key].device)
            parts.append((starts[site_name] + found[key][..., None] * pieces + within).flatten())
        return torch.cat(parts)


def _positions(plans: Sequence[SparsePlan], branches: int, level: int, kind: str, count: int) -> Tensor:
    """Positions in a record [S * H * W] of the rows of all items, padded: int64 [S * E, count]."""
    each = [plan.levels[level] for plan in plans]
    wanted = [at.active if kind == "active" else getattr(at, kind).halo for at in each]
    rows = torch.stack([F.pad(positions, (0, count - len(positions))) for positions in wanted])
    branch = torch.arange(branches, device=rows.device)[:, None, None] * each[0].size
    return (branch + rows).flatten(0, 1)


def _whole(step: StepFeatures, site: Site) -> Tensor:
    """A recorded map; the record's own tensor where there is one."""
    return step.maps[site.name] if isinstance(step, StepMaps) else step.whole(site.name, site.level)
