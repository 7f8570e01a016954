"""Bytes of recorded features by arithmetic, before anything is recorded.

Counts what `recording` and `cached_rows` keep of every site. Knows sites and sizes; runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from fisedit.sparse.feature_codec import FeatureEncoding
from fisedit.sparse.modules import LayerSite, Role, base_layer, channels

_STATISTIC_BYTES, _ROW_STATISTIC_BYTES = 8, 4


def step_bytes(
    sites: Sequence[LayerSite], sizes: Sequence[int], batch: int, itemsize: int, encoding: FeatureEncoding
) -> int:
    """Bytes that a source's step records, queries for masks aside.

    Args:
        sites: of the UNet.
        sizes: positions of every level, finest first.
        batch: B, the branches.
        itemsize: bytes of a number of the model.
        encoding: of the maps.
    """
    by_name = {site.name: site for site in sites}
    total = _statistics(sites, batch)
    for site in sites:
        width = _width(site) - (channels(by_name[site.skip]) if site.skip else 0)
        own = _ROW_STATISTIC_BYTES if site.role is Role.NORM else itemsize
        total += _map_bytes(width, sizes[site.level], batch, own, encoding)
    return total


def overlay_bytes(sites: Sequence[LayerSite], rows: Sequence[int], batch: int, itemsize: int) -> int:
    """Bytes that an edit's sparse step keeps for edits over it, queries for masks aside.

    Args:
        sites: of the UNet.
        rows: active ones of every level, finest first.
        batch: B, the branches.
        itemsize: bytes of a number of the model.
    """
    total = _statistics(sites, batch)
    for site in sites:
        own = _ROW_STATISTIC_BYTES if site.role is Role.NORM else itemsize
        total += batch * rows[site.level] * _width(site) * own
    return total


def _width(site: LayerSite) -> int:
    """Numbers recorded of a position."""
    if site.role is Role.NORM:
        return 2 * int(site.module.num_groups)
    if site.role in (Role.NORM_HALO, Role.DOWN, Role.UP):
        return channels(site)
    return int(base_layer(site.module).out_features) if site.role is Role.TOKENS else 0


def _map_bytes(width: int, size: int, batch: int, itemsize: int, encoding: FeatureEncoding) -> int:
    numel = batch * size * width
    if not numel or encoding.bits == 16 or numel < encoding.min_numel:
        return numel * itemsize
    packed = -(-size // 2) * width
    last = size * width if encoding.bits == 8 else packed
    return last + (batch - 1) * (packed + width) + width * itemsize


def _statistics(sites: Sequence[LayerSite], batch: int) -> int:
    norms = [site for site in sites if site.role in (Role.NORM, Role.NORM_HALO)]
    return batch * sum(2 * int(site.module.num_groups) * _STATISTIC_BYTES for site in norms)
