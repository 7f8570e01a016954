"""What each role's layer does while a source is recorded and while an edit is replayed.

In a replayed forward a feature map is [B, C, R, 1]: the active rows stand where pixels stood, so diffusers' own blocks
(residuals, skips, activations, time embeddings, transformers) run on them unchanged; only the layers below differ. A
NORM_HALO layer hands [B, C, R + G, 1] to the activation and the conv behind it, which returns [B, C, R, 1].

GroupNorm is exact: totals of the recorded map, less the recorded active rows, plus the new ones, are the statistics of
the mixed map in O(active). Knows nothing about samplers or prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisedit.models.injection import Forward, injected
from fisedit.sparse.feature_cache import CachedFeatures, FeatureOverlay, ShiftedFeatures, StepFeatures, totals
from fisedit.sparse.modules import LayerSite, Role, is_3x3, is_plain, weight_of
from fisedit.sparse_kernels import ops, prepacked
from fisedit.sparse_kernels.row_plan import KernelMap, Level, SparsePlan

FEW = 1 << 17
"""Numbers in a map up to which all of it is normed on a CPU: less work at the active rows is not worth its calls."""

SHORT = 100
"""Positions of such a map up to which torch's own norm takes less time than sums."""


@dataclass(eq=False)
class Recording:
    """The state of one dense forward that records: where maps go, and the text's keys and values."""

    maps: StepFeatures
    text: dict[str, Tensor]
    queries: frozenset[str] = frozenset()


@dataclass(eq=False)
class Replay:
    """The state of one sparse forward: the recorded step it reads, the overlay it writes, the text's projections.

    `structured` lets the conditional branch attend as the source did wherever the source's queries were remembered.
    """

    plan: SparsePlan
    source: CachedFeatures
    overlay: FeatureOverlay
    text: dict[str, Tensor] = field(default_factory=dict)
    structured: bool = False
    _warm: tuple[Tensor, Tensor] | None = None

    def warm(self, temb: Tensor) -> Tensor:
        """SiLU of the time's embedding [B, E], which is every block's: [B, 1, E]."""
        if self._warm is None or self._warm[0] is not temb:
            self._warm = temb, F.silu(temb)[:, None]
        return self._warm[1]

    def level(self, site: LayerSite) -> Level:
        """The level a site works at."""
        return self.plan.levels[site.level]


def rows_of(x: Tensor) -> Tensor:
    """[B, C, H, W] or [B, C, R] -> [B, rows, C]; free where the map is channels_last."""
    return x.flatten(2).transpose(1, 2).contiguous()


def map_of(rows: Tensor) -> Tensor:
    """[B, R, C] -> [B, C, R, 1], a view."""
    return rows.transpose(1, 2).unsqueeze(-1)


def dense(site: LayerSite, x: Tensor) -> Tensor:
    """What the layer's own class makes of its input."""
    out: Tensor = type(site.module).forward(site.module, x)
    return out


def projected(site: LayerSite, rows: Tensor) -> Tensor:
    """What a linear layer makes of rows."""
    module = site.module
    return ops.norm_linear(rows, module.weight, module.bias) if type(module) is nn.Linear else dense(site, rows)


def whole(layer: nn.Module, x: Tensor) -> Tensor:
    """What a linear layer or a conv makes of all there is, as torch does but for products that are widened."""
    if type(layer) is nn.Linear and prepacked.widens(x):
        return prepacked.linear(x, layer.weight, layer.bias)
    if type(layer) is nn.Conv2d and is_3x3(layer, 1):
        return prepacked.conv3x3(x, layer.weight, layer.bias)
    return convolved(layer, x)


def convolved(layer: nn.Module, x: Tensor) -> Tensor:
    """What a conv makes of a map, by its weight as it lies; any other layer its own way."""
    if type(layer) is nn.Conv2d and (layer.kernel_size == (1, 1) or is_3x3(layer, layer.stride[0])):
        return prepacked.conv(x, layer.weight, layer.bias, layer.stride[0], int(layer.padding[0]))
    out: Tensor = type(layer).forward(layer, x)
    return out


def record_whole(run: Recording, site: LayerSite, x: Tensor) -> Tensor:
    """A layer of the whole map; nothing is remembered."""
    return whole(site.module, x)


def record_input(run: Recording, site: LayerSite, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Remember a map before the conv of a sampler."""
    run.maps.maps[site.name] = rows_of(x)
    with injected(site.module, [(site.module.conv, partial(convolved, site.module.conv))]):
        out: Tensor = type(site.module).forward(site.module, x, *args, **kwargs)
    return out


def record_norm(run: Recording, site: LayerSite, x: Tensor) -> Tensor:
    """Remember a norm's input and its totals."""
    norm = site.module
    run.maps.maps[site.name] = rows_of(x)
    out, run.maps.totals[site.name] = ops.dense_group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    return out


def record_output(run: Recording, site: LayerSite, x: Tensor) -> Tensor:
    """Remember what a projection of the tokens gave."""
    out = run.maps.maps[site.name] = whole(site.module, x)
    return out


def record_query(run: Recording, site: LayerSite, x: Tensor) -> Tensor:
    """Remember the conditional branch's queries where masks will want them."""
    out = whole(site.module, x)
    if site.name in run.queries:
        run.maps.maps[site.name] = out[-1:].clone()
    return out


def text_once(run: Recording | Replay, site: LayerSite, text: Tensor) -> Tensor:
    """Project the text at the first step only."""
    if site.name not in run.text:
        run.text[site.name] = dense(site, text)
    return run.text[site.name]


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
    small = not rows.is_cuda and len(rows) * level.size * norm.num_channels <= FEW
    if small or level.whole or isinstance(run.source, ShiftedFeatures):
        mixed = rows
        if not level.whole:
            mixed = run.source.whole(site.name, site.level).index_copy_(1, level.active, rows)
        if small and level.size <= SHORT:
            normed = rows_of(dense(site, map_of(mixed)))
            return normed if level.whole else normed.index_select(1, positions)
        sums = ops.group_statistics(mixed, norm.num_groups)
        wanted = rows if level.whole else mixed.index_select(1, positions)
    else:
        recorded = run.source.rows(site.name, site.level, positions)
        sums = totals(run.source, site.name, site.level, norm.num_groups)
        sums = sums - ops.group_statistics(recorded[:, :there], norm.num_groups)
        sums += ops.group_statistics(rows, norm.num_groups)
        wanted = rows if len(positions) == there else torch.cat([rows, recorded[:, there:]], 1)
    if not small:
        run.overlay.totals[site.name] = sums
    count = level.size * (norm.num_channels // norm.num_groups)
    return ops.group_norm(wanted, sums, count, norm.weight, norm.bias, norm.eps)


def replay_conv(run: Replay, site: LayerSite, x: Tensor) -> Tensor:
    """3x3 conv of active and halo rows."""
    return map_of(ops.conv3x3(rows_of(x), run.level(site).same, weight_of(site.module), site.module.bias))


def replay_pointwise(run: Replay, site: LayerSite, x: Tensor) -> Tensor:
    """A 1x1 conv is a linear layer on rows."""
    if x.ndim == 3:
        return dense(site, x)
    return map_of(F.linear(rows_of(x), weight_of(site.module).flatten(1), site.module.bias))


def replay_down(run: Replay, site: LayerSite, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The downsampler's conv at the coarser level's active rows."""
    return _resample(run, site, x, run.level(site).down)


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
    """Keys or values of every position: fresh where active, recorded elsewhere; a structured run keeps all keys."""
    rows = projected(site, x)
    if run.structured and site.name.endswith(".to_k") and f"{site.name.removesuffix('k')}q" in run.source:
        rows[-1:] = run.source.rows(site.name, site.level, run.level(site).active)[-1:]
    run.overlay.maps[site.name] = rows
    if run.level(site).whole:
        return rows
    return run.source.whole(site.name, site.level).index_copy_(1, run.level(site).active, rows)


def replay_query(run: Replay, site: LayerSite, x: Tensor) -> Tensor:
    """Queries of the active rows, remembered where the source remembers them; a structured run has the source's."""
    out = projected(site, x)
    if site.name in run.source:
        if run.structured:
            out[-1:] = run.source.rows(site.name, site.level, run.level(site).active)
        run.overlay.maps[site.name] = out[-1:].clone()
    return out


def attend(run: Recording | Replay, site: LayerSite, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Queries of the rows at hand over every position's keys and values; the module's own way where it got another."""
    attention = site.module
    if not is_plain(attention):
        own: Tensor = type(attention).forward(attention, x, *args, **kwargs)
        return own
    mixed = ops.dense_attention(attention.to_q(x), attention.to_k(x), attention.to_v(x), attention.heads)
    out: Tensor = attention.to_out[0](mixed)
    return out


RECORD: dict[Role, Forward] = {
    Role.CONV: record_whole,
    Role.POINTWISE: record_whole,
    Role.NORM_HALO: record_norm,
    Role.NORM: record_norm,
    Role.DOWN: record_input,
    Role.UP: record_input,
    Role.TOKENS: record_output,
    Role.QUERY: record_query,
    Role.ATTENTION: attend,
    Role.TEXT: text_once,
}

REPLAY: dict[Role, Forward] = {
    Role.CONV: replay_conv,
    Role.NORM_HALO: replay_norm_halo,
    Role.NORM: replay_norm,
    Role.DOWN: replay_down,
    Role.UP: replay_up,
    Role.TOKENS: replay_tokens,
    Role.QUERY: replay_query,
    Role.ATTENTION: attend,
    Role.TEXT: text_once,
    Role.POINTWISE: replay_pointwise,
}
