"""Bytes of recorded features by arithmetic, before anything is recorded.

Counts what `recording` and `cached_rows` keep of every site. Knows sites and sizes; runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fisedit.features.codec import BLOCK, FeatureEncoding
from fisedit.features.sites import LayerSite, Role, base_layer, channels

_STATISTIC_BYTES, _ROW_STATISTIC_BYTES = 8, 4


@dataclass(frozen=True)
class RecordSize:
    """The size of what a model's steps record.

    Args:
        sites: The sites of the UNet.
        sizes: positions of every level, finest first.
        batch: B, the branches.
        itemsize: bytes of a number of the model.
        encoding: The encoding of maps.
    """

    sites: tuple[LayerSite, ...]
    sizes: tuple[int, ...]
    batch: int
    itemsize: int
    encoding: FeatureEncoding

    @property
    def step(self) -> int:
        """Bytes of a source's step, queries aside."""
        return self.overlay(self.sizes)

    def queries(self, names: Collection[str]) -> int:
        """Bytes of the queries that a step records beside.

        Args:
            names: The names of their sites.
        """
        found = [site for site in self.sites if site.name in names]
        widths = [int(base_layer(site.module).out_features) for site in found]
        return sum(
            self._map_bytes(width, self.sizes[site.level], 1, self.itemsize)
            for width, site in zip(widths, found, strict=True)
        )

    def overlay(self, rows: Sequence[int], runs: Callable[[str], bool] = lambda _: True) -> int:
        """Bytes that an edit's sparse step keeps for edits over it.

        Args:
            rows: active ones of every level, finest first.
            runs: tells of a layer's name whether the step computes it.
        """
        kept = {site.name: site for site in self.sites if runs(site.name)}
        total = self._statistics
        for site in kept.values():
            width = _width(site) - (channels(kept[site.skip]) if site.skip in kept else 0)
            whole = self.batch * self.sizes[site.level] * width
            total += self._map_bytes(width, rows[site.level], self.batch, self._itemsize_of(site), whole)
        return total

    def _itemsize_of(self, site: LayerSite) -> int:
        return _ROW_STATISTIC_BYTES if site.role is Role.NORM else self.itemsize

    def _map_bytes(self, width: int, size: int, batch: int, itemsize: int, whole: int = 0) -> int:
        """Bytes of a map; of rows `whole` are the numbers of the map that they are of."""
        numel, encoding = batch * size * width, self.encoding
        if not numel or encoding.bits == 16 or max(numel, whole) < encoding.min_numel:
            return numel * itemsize
        packed = -(-size // 2) * width
        if encoding.bits == 8:
            return size * width + (batch - 1) * (packed + width) + width * itemsize
        units = -(-size // (2 * BLOCK)) * width
        return batch * (packed + units) + width * itemsize

    @property
    def _statistics(self) -> int:
        norms = [site for site in self.sites if site.role in (Role.NORM, Role.NORM_HALO)]
        return self.batch * sum(2 * int(site.module.num_groups) * _STATISTIC_BYTES for site in norms)


def _width(site: LayerSite) -> int:
    """Numbers recorded of a position."""
    if site.role is Role.NORM:
        return 2 * int(site.module.num_groups)
    if site.role in (Role.NORM_HALO, Role.DOWN, Role.UP):
        return channels(site)
    return int(base_layer(site.module).out_features) if site.role is Role.TOKENS else 0
