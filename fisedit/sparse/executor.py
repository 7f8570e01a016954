"""Runs one UNet evaluation: densely while recording, or sparsely over what was recorded.

Both run diffusers' own `UNet2DConditionModel.forward`; `layers` says what the injected layers do. All state of a run
lives in its `Recording` or `Replay`. Knows nothing about samplers, masks or images.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from fisedit.models.injection import Forward, Replacement, injected
from fisedit.sparse import layers
from fisedit.sparse.feature_cache import CachedFeatures, FeatureOverlay, StepFeatures, gather
from fisedit.sparse.layers import Recording, Replay
from fisedit.sparse.modules import LayerSite, Role, depth, loras, unet_sites
from fisedit.sparse.whole_blocks import wholes
from fisedit.sparse_kernels import prepacked
from fisedit.sparse_kernels.row_plan import SparsePlan


@dataclass(frozen=True, eq=False)
class ExtraSite(LayerSite):
    """A layer that something adds to the UNet, and what it computes in a dense and in a sparse evaluation."""

    def run_dense(self, run: Recording, *args: Any) -> Any:
        """Compute the layer on whole maps and record what a sparse evaluation reads of it."""
        raise NotImplementedError

    def run_sparse(self, run: Replay, *args: Any) -> Any:
        """Compute the layer at the active rows over what was recorded."""
        raise NotImplementedError


class ExtraLayers(Protocol):
    """Layers added to a UNet for an evaluation, such as reference adapters."""

    def sites(self, unet: UNet2DConditionModel) -> Sequence[ExtraSite]:
        """The added layers that see positions."""

    def injection(self, unet: UNet2DConditionModel, batch: int) -> AbstractContextManager[object]:
        """A context in which a UNet's forward calls them, for a batch of B items."""


class Executor:
    """A UNet that can be recorded and replayed; several editors may share one.

    Raises:
        UnsupportedModuleError: the UNet has a layer without an exact sparse counterpart.
    """

    def __init__(self, unet: UNet2DConditionModel) -> None:
        self.unet = unet
        self.sites = unet_sites(unet)
        self.depth = depth(self.sites)
        self.loras = loras(unet)
        self._wholes = wholes(unet, self.sites)

    @property
    def device(self) -> torch.device:
        """Where the UNet is; diffusers' own answer looks at all its modules first."""
        first: Tensor = next(self.unet.parameters())
        return first.device

    def refresh(self) -> bool:
        """Look at the UNet again, as LoRAs may have come, gone or got another scale; whether they did."""
        prepacked.refresh()
        if self.loras == (now := loras(self.unet)):
            return False
        self.sites, self.loras = unet_sites(self.unet), now
        self._wholes = wholes(self.unet, self.sites)
        return True

    def record(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Tensor,
        text_cache: dict[str, Tensor],
        queries: frozenset[str] = frozenset(),
        timestep_cond: Tensor | None = None,
        extra: ExtraLayers | None = None,
    ) -> tuple[Tensor, StepFeatures]:
        """One dense evaluation that remembers what a later sparse one may read.

        Args:
            latents: [B, 4, h, w], scaled for the model. timestep: scalar. text: [B, T, D].
            text_cache: the text's keys and values, filled at the first step of a prompt.
            queries: names of the query projections to remember.
            timestep_cond: [B, E] for distilled models, or None.
            extra: layers added to the UNet, or None.

        Returns:
            The prediction [B, 4, h, w] and the step's maps.
        """
        run = Recording(StepFeatures(), text_cache, queries)
        return self._run(layers.RECORD, run, latents, timestep, text, timestep_cond, extra), run.maps

    def replay(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Tensor,
        text_cache: dict[str, Tensor],
        source: CachedFeatures,
        plan: SparsePlan,
        timestep_cond: Tensor | None = None,
        *,
        structured: bool = False,
        extra: ExtraLayers | None = None,
    ) -> tuple[Tensor, FeatureOverlay]:
        """One sparse evaluation at the plan's active rows over the recorded step.

        Args:
            latents: [B, 4, h, w], the whole map; only active and halo rows are read.
            structured: attend as the source did where its queries were remembered, as in prompt-to-prompt.
            extra: layers added to the UNet, whether the source had them or not; or None.

        Returns:
            The prediction at the active rows [B, R, 4] and the step's overlay.
        """
        run = Replay(plan, source, FeatureOverlay(source, plan), text_cache, structured)
        rows = layers.map_of(gather(latents, plan.levels[0].read_positions))
        out = self._run(layers.REPLAY, run, rows, timestep, text, timestep_cond, extra)
        return layers.rows_of(out), run.overlay

    def _run(
        self,
        table: dict[Role, Forward],
        run: Recording | Replay,
        sample: Tensor,
        timestep: Tensor,
        text: Tensor,
        timestep_cond: Tensor | None,
        extra: ExtraLayers | None,
    ) -> Tensor:
        whole, sites = self._wholes if isinstance(run, Replay) else ((), self.sites)
        with ExitStack() as stack:
            replacements: list[Replacement] = [
                (s.module, partial(table[s.role], run, s)) for s in sites if s.role in table
            ]
            if extra is not None:
                stack.enter_context(extra.injection(self.unet, len(sample)))
                replacements += [(s.module, _extra_forward(s, run)) for s in extra.sites(self.unet)]
            replacements += [(block.module, partial(block.forward, run, block)) for block in whole]
            stack.enter_context(injected(self.unet, replacements))
            (out,) = self.unet(sample, timestep, text, timestep_cond=timestep_cond, return_dict=False)
        result: Tensor = out
        return result


def _extra_forward(site: ExtraSite, run: Recording | Replay) -> Forward:
    return partial(site.run_dense, run) if isinstance(run, Recording) else partial(site.run_sparse, run)


def mask_queries(sites: tuple[LayerSite, ...], sizes: tuple[int, ...], limit: int = 1100) -> frozenset[str]:
    """Query projections worth remembering for masks: those of maps with at most `limit` positions but more than 1 / 16
    of the finest such map.

    Args:
        sizes: positions of each level, finest first.
    """
    usable = [size for size in sizes if size <= limit] or [min(sizes)]
    wanted = {i for i, size in enumerate(sizes) if max(usable) // 4 <= size <= max(usable)}
    return frozenset(s.name for s in sites if s.role is Role.QUERY and s.level in wanted)
