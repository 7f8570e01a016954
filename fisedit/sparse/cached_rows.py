"""Rows of an eager sparse evaluation: recorded features at a plan's exact sizes, and the overlay that is written.

GroupNorm is exact. The group statistics of the recorded map, less the recorded active rows, plus the new ones, are
those of the mixed map. They cost O(active). Knows nothing about blocks, samplers or prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from fisedit.features.cache import CachedMap, FeatureOverlay, in_units, recorded_statistics
from fisedit.features.sites import CrossKeys, LayerSite, Role
from fisedit.machine.stopwatch import layer as layer_span
from fisedit.models.injection import Replacement
from fisedit.sparse.packed_weights import MergedWeights
from fisedit.sparse.row_layout import gather, map_of
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.operands import Rows, join_rows
from fisedit.sparse_kernels.row_plan import KernelMap, Level, TextPart


class CachedRows:
    """A `row_source.RowSource` over a cached step.

    Args:
        sites: the UNet's, by name.
        overlay: an empty one over the step that is read, with the plan whose active rows are computed; it is filled.
        text_keys: keys and values of every cross-attention, by site name.
        weights: The weights of layers that have LoRAs.
        inject_attention: the last branch attends as the source did, where the source's queries were recorded
            (prompt-to-prompt, arXiv 2208.01626).
        cross_keys: what cross-attentions read beside the text, by name; None for nothing.
        shares_skips: rows that skip to an up block are kept once, where the down path reads them.

    Attributes:
        overlay: what the evaluation changed of the step.
    """

    def __init__(
        self,
        sites: Mapping[str, LayerSite],
        overlay: FeatureOverlay,
        text_keys: dict[str, Tensor],
        weights: MergedWeights,
        *,
        inject_attention: bool = False,
        cross_keys: Mapping[str, Sequence[CrossKeys]] | None = None,
        shares_skips: bool = False,
    ) -> None:
        self._cross_keys, self._shares_skips = cross_keys or {}, shares_skips
        self.plan, self.source, self.overlay = overlay.plan, overlay.parent, overlay
        self.weight, self._sites, self._text_keys, self._injects = weights.weight, sites, text_keys, inject_attention
        self._halos: dict[str, Tensor] = {}
        self._activated: tuple[Tensor, Tensor] | None = None

    def level(self, site: LayerSite) -> Level:
        """The level that a site works at."""
        return self.plan.levels[site.level]

    def take(self, feature_map: Tensor, level: int) -> Tensor:
        """The active rows [B, C, R, 1] of a map [B, C, H, W] of a level."""
        return map_of(gather(feature_map, self.plan.levels[level].active))

    def latents(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowSource.latents`."""
        finest = self.plan.levels[0]
        rows = gather(latents, finest.read_positions)
        return rows[:, : finest.rows], rows[:, finest.rows :]

    @layer_span("group norm")
    def affine(self, name: str, norm: nn.GroupNorm, rows: Rows) -> Tensor:
        """See `RowSource.affine`."""
        rows, site = join_rows(rows), self._sites[name]
        level, recorded = self.level(site), CachedMap(self.source, site)
        if site.role is Role.NORM:
            return self._summed_affine(site, norm, rows)
        self._keep_entering(site, rows)
        affine, self._halos[name], statistics = ops.mixed_group_norm_affine(
            rows, recorded, level, level.same.halo, norm.num_groups, norm.weight, norm.bias, norm.eps
        )
        if statistics is not None:
            self.overlay.statistics[name] = statistics
        return affine

    def _keep_entering(self, site: LayerSite, rows: Tensor) -> None:
        """Keep what enters a norm, without what skips to it from rows that are kept already."""
        maps = self.overlay.maps
        if self._shares_skips and site.skip in maps:
            rows = rows[..., : rows.shape[2] - self.overlay.own_rows(site.skip).shape[2]].contiguous()
            self.overlay.joined[site.name] = site.skip
        maps[site.name] = rows

    def _summed_affine(self, site: LayerSite, norm: nn.GroupNorm, rows: Tensor) -> Tensor:
        """A norm's scale and shift where rows' statistics alone are recorded."""
        level, name = self.level(site), site.name
        affine, self.overlay.statistics[name], self.overlay.maps[name] = ops.summed_group_norm_affine(
            rows,
            self.source.rows(name, site.level, level.active),
            recorded_statistics(self.source, site),
            None,
            level.size * (rows.shape[2] // norm.num_groups),
            norm.weight,
            norm.bias,
            norm.eps,
        )
        return affine

    @layer_span("gather")
    def halo(self, name: str) -> Tensor:
        """See `RowSource.halo`."""
        if name in self._halos:
            return self._halos.pop(name)
        return self.source.rows(name, self._sites[name].level, self.kernel_map(name).halo)

    def kernel_map(self, name: str) -> KernelMap:
        """See `RowSource.kernel_map`."""
        site = self._sites[name]
        level = self.level(site)
        found = {Role.DOWN: level.down, Role.UP: level.up}.get(site.role, level.same)
        assert found is not None, name
        return found

    def time(self, name: str, block: ResnetBlock2D, embedding: Tensor) -> Tensor:
        """See `RowSource.time`; the activated embedding is that of every block."""
        if self._activated is None or self._activated[0] is not embedding:
            self._activated = embedding, F.silu(embedding)[:, None]
        layer: Any = block.time_emb_proj
        return ops.norm_linear(self._activated[1], self.weight(layer), layer.bias)[:, 0]

    def joined(self, rows: Tensor, skipped: Tensor) -> Tensor:
        """See `RowSource.joined`."""
        return torch.cat([rows, skipped], -1)

    def qkv(self, name: str, attention: Any) -> tuple[Tensor, ...]:
        """See `RowSource.qkv`."""
        return self.weight(attention.to_q), self.weight(attention.to_k), self.weight(attention.to_v)

    def second_biases(self, name: str, block: Any) -> tuple[Tensor, Tensor | None]:
        """See `RowSource.second_biases`."""
        return block.conv2.bias, None if block.conv_shortcut is None else block.conv_shortcut.bias

    def folded_end(self, name: str) -> None:
        """See `RowSource.folded_end`: two layers, whose weights are packed already."""

    def keep(self, name: str, rows: Tensor) -> None:
        """See `RowSource.keep`."""
        self.overlay.maps[name] = rows

    @layer_span("attention")
    def self_attention(self, name: str, heads: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `RowSource.self_attention`."""
        keys, key_scales = self._tokens(f"{name}.to_k", key)
        values, value_scales = self._tokens(f"{name}.to_v", value)
        query = self._query(f"{name}.to_q", query)
        if key_scales is not None:
            query = query * key_scales
        hidden = self.plan.hidden and self.plan.hidden[self._sites[f"{name}.to_q"].level]
        if hidden:
            attended = torch.empty_like(query)
            seen = keys[:, hidden.visible], values[:, hidden.visible]
            attended[:, hidden.inside] = ops.dense_attention(query[:, hidden.inside], *seen, heads)
            if len(hidden.outside):
                attended[:, hidden.outside] = ops.dense_attention(query[:, hidden.outside], keys, values, heads)
        else:
            attended = ops.dense_attention(query, keys, values, heads)
        return attended if value_scales is None else attended.mul_(value_scales)

    def text_keys(self, name: str) -> Tensor:
        """See `RowSource.text_keys`."""
        return self._text_keys[name]

    def text_parts(self, name: str) -> Sequence[TextPart]:
        """See `RowSource.text_parts`."""
        return self.plan.text_parts[self._sites[name].level] if self.plan.text_parts else ()

    def cross_keys(self, name: str) -> Sequence[CrossKeys]:
        """See `RowSource.cross_keys`."""
        return self._cross_keys.get(name, ())

    def recorded_query(self, name: str) -> Tensor | None:
        """See `RowSource.recorded_query`."""
        if not (self._injects and name in self.source):
            return None
        level = self._sites[name].level
        return self.source.rows(name, level, self.plan.levels[level].active)

    def keep_query(self, name: str, query: Tensor) -> None:
        """See `RowSource.keep_query`: of the last branch, where the source has them."""
        if name in self.source:
            self.overlay.maps[name] = query[-1:].clone()

    def projections(self, name: str) -> list[Replacement]:
        """Return the replacements for the projections of the attention `name`, which has a processor of its own."""
        found: list[Replacement] = []
        for site in (self._sites[f"{name}.{to}"] for to in ("to_q", "to_k", "to_v")):
            forward = {Role.QUERY: self._project_query, Role.TOKENS: self._project_tokens}.get(site.role)
            found.append((site.module, partial(forward or self._project_text, site)))
        return found

    def _project_query(self, site: LayerSite, x: Tensor) -> Tensor:
        return self._query(site.name, type(site.module).forward(site.module, x))

    def _project_tokens(self, site: LayerSite, x: Tensor) -> Tensor:
        tokens, scales = self._tokens(site.name, type(site.module).forward(site.module, x))
        return tokens if scales is None else tokens.mul_(scales)

    def _project_text(self, site: LayerSite, _: Tensor) -> Tensor:
        return self._text_keys[site.name]

    def _query(self, name: str, query: Tensor) -> Tensor:
        """Queries of the active rows; under attention injection the last branch's are the source's."""
        recorded = self.recorded_query(name)
        if recorded is not None:
            query[-1:] = recorded
        self.keep_query(name, query)
        return query

    def _tokens(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys or values of every position in units of scales: fresh where active, recorded elsewhere; injected
        attention has the last branch's keys all recorded."""
        level_index = self._sites[name].level
        level = self.plan.levels[level_index]
        if self._injects and name.endswith(".to_k") and f"{name.removesuffix('k')}q" in self.source:
            rows[-1:] = self.source.rows(name, level_index, level.active)[-1:]
        self.overlay.maps[name] = rows
        if level.whole:
            return rows, None
        recorded, scales = self.source.scaled(name, level_index)
        return recorded.index_copy_(1, level.active, in_units(rows, scales)), scales
