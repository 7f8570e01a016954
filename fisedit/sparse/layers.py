"""What the layers of the decoder's coarse levels compute at active rows.

In a replayed forward a feature map is [B, C, R, 1]: the active rows stand where pixels stood, so diffusers' own blocks
(residuals, skips, activations, time embeddings, transformers) run on them unchanged; only the layers below differ. A
NORM_HALO layer hands [B, C, R + G, 1] to the activation and the conv behind it, which returns [B, C, R, 1].

GroupNorm is exact: totals of the recorded map, less the recorded active rows, plus the new ones, are the statistics of
the mixed map in O(active). Knows nothing about samplers or prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.models.injection import Forward
from fisedit.sparse.feature_cache import CachedFeatures, FeatureOverlay, map_of, rows_of, totals
from fisedit.sparse.modules import LayerSite, Role, weight_of
from fisedit.sparse.recording import own_forward
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.row_plan import KernelMap, Level, SparsePlan


@dataclass(eq=False)
class Replay:
    """The state of one sparse forward: the recorded step it reads, the overlay it writes."""

    plan: SparsePlan
    source: CachedFeatures
    overlay: FeatureOverlay

    def level(self, site: LayerSite) -> Level:
        """The level a site works at."""
        return self.plan.levels[site.level]


def replay_norm(run: Replay, site: LayerSite, x: Tensor) -> Tensor:
    """Exact GroupNorm of the active rows."""
    out = norm_rows(run, site, rows_of(x), run.level(site).active)
    return map_of(out) if x.ndim == 4 else out.transpose(1, 2)


def replay_norm_halo(run: Replay, site: LayerSite, x: Tensor) -> Tensor:
    """Exact GroupNorm of the active rows and of the recorded halo rows."""
    return map_of(norm_rows(run, site, rows_of(x), run.level(site).read_positions))


def norm_rows(run: Replay, site: LayerSite, rows: Tensor, positions: Tensor) -> Tensor:
    """Exact GroupNorm at positions [R + G], of which the first R are the active ones: [B, R + G, C]."""
    norm, level, there = site.module, run.level(site), rows.shape[1]
    run.overlay.maps[site.name] = rows
    groups, count = norm.num_groups, level.size * (norm.num_channels // norm.num_groups)
    if level.whole or ops.prefers_dense_norm(rows, level.size):
        mixed = rows if level.whole else run.source.whole(site.name, site.level).index_copy_(1, level.active, rows)
        sums = ops.dense_group_norm_affine(mixed, groups, norm.weight, norm.bias, norm.eps)[1]
        wanted = rows if level.whole else mixed.index_select(1, positions)
    else:
        recorded = run.source.rows(site.name, site.level, positions)
        sums = totals(run.source, site.name, site.level, groups) - ops.group_statistics(recorded[:, :there], groups)
        sums += ops.group_statistics(rows, groups)
        run.overlay.totals[site.name] = sums
        wanted = rows if len(positions) == there else torch.cat([rows, recorded[:, there:]], 1)
    return ops.group_norm(wanted, sums, count, norm.weight, norm.bias, norm.eps)


def replay_conv(run: Replay, site: LayerSite, x: Tensor) -> Tensor:
    """3x3 conv of active and halo rows."""
    return map_of(ops.conv3x3(rows_of(x), run.level(site).same, weight_of(site.module), site.module.bias))


def replay_pointwise(run: Replay, site: LayerSite, x: Tensor) -> Tensor:
    """A 1x1 conv is a linear layer on rows."""
    if x.ndim == 3:
        return own_forward(site, x)
    return map_of(F.linear(rows_of(x), weight_of(site.module).flatten(1), site.module.bias))


def replay_up(run: Replay, site: LayerSite, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Interpolation and conv in one table, at the finer level's active rows."""
    return _resample(run, site, x, run.level(site).up)


def _resample(run: Replay, site: LayerSite, x: Tensor, reads: KernelMap | None) -> Tensor:
    assert reads is not None
    rows = run.overlay.maps[site.name] = rows_of(x)
    halo = run.source.rows(site.name, site.level, reads.halo)
    conv = site.module.conv
    return map_of(ops.conv3x3(torch.cat([rows, halo], 1), reads, weight_of(conv), conv.bias))


def replay_tokens(run: Replay, site: LayerSite, x: Tensor) -> Tensor:
    """Keys or values of every position: fresh where active, recorded elsewhere."""
    rows = ops.norm_linear(x, site.module.weight, site.module.bias)
    run.overlay.maps[site.name] = rows
    if run.level(site).whole:
        return rows
    return run.source.whole(site.name, site.level).index_copy_(1, run.level(site).active, rows)


REPLAY: dict[Role, Forward] = {
    Role.CONV: replay_conv,
    Role.NORM_HALO: replay_norm_halo,
    Role.NORM: replay_norm,
    Role.UP: replay_up,
    Role.TOKENS: replay_tokens,
    Role.POINTWISE: replay_pointwise,
}
