"""One UNet evaluation: dense and recorded, or sparse over what was recorded.

Both run diffusers' own `UNet2DConditionModel.forward`; `recording` and `blocks` say what is injected. All state of an
evaluation lives in its `DenseContext` or `CachedRows`. Knows nothing about samplers, masks or images.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from fisedit.errors import AdapterError, InputError
from fisedit.features.cache import FeatureOverlay, ReadFeatures, StepFeatures
from fisedit.features.sites import (
    CrossKeys,
    LayerSite,
    Role,
    is_plain,
    loras,
    num_levels,
    project_text,
    unet_sites,
)
from fisedit.models.families.conditioning import Conditioning
from fisedit.models.injection import Replacement, injected
from fisedit.models.layer_changes import check_layers
from fisedit.sparse.blocks import EncoderBlocks, ShallowBlocks, UNetBlocks
from fisedit.sparse.cached_rows import CachedRows
from fisedit.sparse.packed_weights import MergedWeights
from fisedit.sparse.recording import DenseContext, attend_beside, recording_replacements
from fisedit.sparse.row_layout import rows_of
from fisedit.sparse_kernels import ops


@dataclass(frozen=True, eq=False)
class ExtraSite(LayerSite, ABC):
    """A layer that something adds to the UNet, and what it computes in a dense and in a sparse evaluation."""

    @abstractmethod
    def run_dense(self, run: DenseContext, *args: Any) -> Any:
        """Compute the layer on whole maps and record what a sparse evaluation reads of it."""

    @abstractmethod
    def run_sparse(self, run: CachedRows, *args: Any) -> Any:
        """Compute the layer at the active rows over what was recorded."""


@dataclass(frozen=True, eq=False)
class UNetInputs:
    """The inputs of a UNet evaluation.

    Args:
        latents: [B, 4, h, w], scaled for the model.
        timestep: scalar.
        text: The conditions of prompts.
        timestep_cond: [B, C] for distilled models, or None.
    """

    latents: Tensor
    timestep: Tensor
    text: Conditioning
    timestep_cond: Tensor | None = None


class SideNetwork(Protocol):
    """A network that has the form of the UNet's first half and is evaluated before it.

    Its outputs are added to the UNet's maps, as those of diffusers' ControlNets are.
    """

    @property
    def model(self) -> nn.Module:
        """Its layers."""

    @property
    def sites(self) -> Sequence[LayerSite]:
        """The layers that see positions, with names of their own among the UNet's."""

    @property
    def blocks(self) -> EncoderBlocks:
        """Its blocks on rows."""

    @property
    def levels(self) -> Sequence[int]:
        """The levels of the maps that it gives, the middle's last."""

    def inputs(self, take: TakeMap) -> list[Replacement]:
        """Modules that give what was computed before the first step; argument as in `ExtraLayers.residuals`."""

    def text(self, text: Conditioning) -> Conditioning:
        """The items of the UNet's conditions that it reads."""

    def run(self, inputs: UNetInputs) -> tuple[Sequence[Tensor], Tensor]:
        """Call diffusers' own forward: maps for the UNet's skips, and for its middle."""


class ExtraLayers(Protocol):
    """The layers that are added to a UNet for an evaluation, such as reference adapters and control networks."""

    @property
    def inside_blocks(self) -> bool:
        """Return whether some are called between the layers of the UNet's blocks."""

    def sites(self, unet: UNet2DConditionModel) -> Sequence[ExtraSite]:
        """The added layers that see positions."""

    def injection(self, unet: UNet2DConditionModel, batch: int, take: TakeMap) -> AbstractContextManager[object]:
        """A context in which a UNet's forward calls them, for a batch of B items; `take` as in `residuals`."""

    def cross_keys(self, batch: int) -> Mapping[str, Sequence[CrossKeys]]:
        """Return what cross-attentions read beside the text, by name, for a batch of B items."""

    def networks(self) -> Sequence[SideNetwork]:
        """Networks beside the UNet."""

    def residuals(self, take: TakeMap) -> Mapping[str, Any]:
        """Constant maps that diffusers' `UNet2DConditionModel.forward` adds to its own, by its names of them.

        Args:
            take: Takes from a map [B, C, H, W] and its level what the evaluation sees: all of it, or the active rows.
        """


TakeMap = Callable[[Tensor, int], Tensor]
"""A map [B, C, H, W] and its level -> the same, or its active rows [B, C, R, 1]."""


class Executor:
    """A UNet's dense and sparse evaluations; several editors may share one.

    Raises:
        UnsupportedModuleError: the UNet has a layer without an exact sparse counterpart.
    """

    rows: type[CachedRows] = CachedRows
    """The row source of sparse evaluations."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        check_layers(unet, "UNet")
        self.unet = unet
        self.sites = unet_sites(unet)
        self.num_levels = num_levels(self.sites)
        self.loras, self.weights = loras(unet), MergedWeights()
        self._by_name, self._blocks = {site.name: site for site in self.sites}, UNetBlocks(unet)
        self.shallow = ShallowBlocks(self._blocks, unet)

    @property
    def device(self) -> torch.device:
        """The UNet's device; diffusers' own property iterates over all modules first."""
        first: Tensor = next(self.unet.parameters())
        return first.device

    def refresh(self) -> bool:
        """Update sites and weights if LoRAs or layers of the UNet were added, removed or scaled; returns whether they
        were.

        Raises:
            UnsupportedModuleError: a layer has no exact sparse counterpart any more.
        """
        ops.refresh()
        check_layers(self.unet, "UNet")
        now, sites = loras(self.unet), unet_sites(self.unet)
        if self.loras == now and [site.module for site in self.sites] == [site.module for site in sites]:
            return False
        self.sites, self.loras = sites, now
        self._by_name, self._blocks = {site.name: site for site in self.sites}, UNetBlocks(self.unet)
        self.shallow = ShallowBlocks(self._blocks, self.unet)
        return True

    def run_dense(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Conditioning,
        text_keys: dict[str, Tensor],
        queries: frozenset[str] = frozenset(),
        timestep_cond: Tensor | None = None,
        extra_layers: ExtraLayers | None = None,
    ) -> tuple[Tensor, StepFeatures]:
        """One dense evaluation that records what a later sparse one may read.

        Args:
            latents: [B, 4, h, w], scaled for the model.
            timestep: scalar.
            text: The conditions of prompts.
            text_keys: the text's keys and values by site name, filled at the first step of a prompt.
            queries: names of the query projections to record.
            timestep_cond: [B, C] for distilled models, or None.
            extra_layers: layers added to the UNet, or None.

        Returns:
            The prediction [B, 4, h, w] and the step's maps.
        """
        context = DenseContext(StepFeatures(), text_keys, queries, shares_skips=extra_layers is None)
        replacements = recording_replacements(context, self.sites)
        if extra_layers is not None:
            replacements += [(site.module, partial(site.run_dense, context)) for site in extra_layers.sites(self.unet)]
        inputs = UNetInputs(latents, timestep, text, timestep_cond)

        def run_network(network: SideNetwork) -> list[Tensor]:
            own = recording_replacements(context, network.sites)
            return _run_network(network, [*own, *network.inputs(_whole)], inputs)

        return self._run(replacements, inputs, extra_layers, run_network), context.maps

    def run_unrecorded(self, inputs: UNetInputs, extra_layers: ExtraLayers | None = None) -> Tensor:
        """One dense evaluation that records nothing.

        Args:
            inputs: The inputs of the UNet.
            extra_layers: what is added to it, or None.

        Returns:
            The prediction [B, 4, h, w].
        """

        def run_network(network: SideNetwork) -> list[Tensor]:
            return _run_network(network, network.inputs(_whole), inputs)

        return self._run((), inputs, extra_layers, run_network)

    def run_sparse(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Conditioning,
        text_keys: dict[str, Tensor],
        overlay: FeatureOverlay,
        timestep_cond: Tensor | None = None,
        *,
        inject_attention: bool = False,
        extra_layers: ExtraLayers | None = None,
    ) -> tuple[Tensor, FeatureOverlay]:
        """One sparse evaluation at the plan's active rows over the recorded step.

        Args:
            latents: [B, 4, h, w], scaled for the model; only active and halo rows are read.
            timestep: scalar.
            text: The conditions of prompts.
            text_keys: the text's keys and values by site name, filled at the first step of a prompt.
            overlay: an empty one over the cached step that is read, with the plan whose active rows are computed; it is
                filled. A shallow one holds the rows of the map that enters the last layer, which alone is computed.
            timestep_cond: [B, C] for distilled models, or None.
            inject_attention: the last branch attends as the source did where its queries were recorded, as in
                prompt-to-prompt.
            extra_layers: layers added to the UNet, whether the source had them or not; or None.

        Returns:
                The prediction at the active rows [B, R, 4], and the overlay.
        """
        project_text(self.sites, text.text, text_keys)
        cross_keys = extra_layers.cross_keys(len(latents)) if extra_layers else {}
        networks = extra_layers.networks() if extra_layers else ()
        sites = self._by_name | {site.name: site for network in networks for site in network.sites}
        rows = self.rows(
            sites,
            overlay,
            text_keys,
            self.weights,
            inject_attention=inject_attention,
            cross_keys=cross_keys,
            shares_skips=extra_layers is None,
        )
        by_layer = extra_layers is not None and extra_layers.inside_blocks
        replacements = (
            self._blocks.replacements(rows, by_layer=by_layer)
            if not overlay.shallow
            else self.shallow.replacements(rows, overlay.own_rows(self.shallow.entry))
        )
        for name in self._custom_attentions():
            if name in cross_keys:
                raise AdapterError(f"an image adapter needs plain attention, got a processor of its own at {name}")
            if overlay.plan.hidden or overlay.plan.text_parts:
                raise InputError(f"regions need plain attention, got a processor of its own at {name}; reset it")
            replacements += rows.projections(name)
        if extra_layers is not None:
            replacements += [(site.module, partial(site.run_sparse, rows)) for site in extra_layers.sites(self.unet)]
        inputs = UNetInputs(latents, timestep, text, timestep_cond)

        def run_network(network: SideNetwork) -> list[Tensor]:
            """At the active rows over its own record; on whole maps where the source had no such network."""
            if not is_recorded(network.sites, overlay.parent):
                maps = _run_network(network, network.inputs(_whole), inputs)
                return [rows.take(each, level) for each, level in zip(maps, network.levels, strict=True)]
            project_text(network.sites, network.text(text).text, text_keys)
            return _run_network(network, [*network.blocks.replacements(rows), *network.inputs(rows.take)], inputs)

        return rows_of(self._run(replacements, inputs, extra_layers, run_network, rows)), rows.overlay

    def _custom_attentions(self) -> Iterator[str]:
        """Names of attentions that have a processor of their own."""
        for site in self.sites:
            if site.role is Role.QUERY:
                name = site.name.removesuffix(".to_q")
                if not is_plain(self.unet.get_submodule(name)):
                    yield name

    def _run(
        self,
        replacements: Sequence[Replacement],
        inputs: UNetInputs,
        extra_layers: ExtraLayers | None,
        run_network: Callable[[SideNetwork], list[Tensor]],
        rows: CachedRows | None = None,
    ) -> Tensor:
        """Diffusers' own forward with these layers; those that are added lie over them."""
        residuals: dict[str, Any] = {}
        if extra_layers is not None and (networks := extra_layers.networks()):
            *skips, middle = (sum(maps[1:], maps[0]) for maps in zip(*map(run_network, networks), strict=True))
            residuals |= {"down_block_additional_residuals": skips, "mid_block_additional_residual": middle}
        with ExitStack() as stack:
            stack.enter_context(injected(self.unet, replacements))
            if extra_layers is not None:
                if rows is None:
                    beside = extra_layers.cross_keys(len(inputs.latents))
                    stack.enter_context(injected(self.unet, self._beside_the_text(beside)))
                take = _whole if rows is None else rows.take
                residuals |= extra_layers.residuals(take)
                stack.enter_context(extra_layers.injection(self.unet, len(inputs.latents), take))
            (out,) = self.unet(
                inputs.latents,
                inputs.timestep,
                timestep_cond=inputs.timestep_cond,
                return_dict=False,
                **inputs.text.unet_inputs,
                **residuals,
            )
        result: Tensor = out
        return result

    def _beside_the_text(self, cross_keys: Mapping[str, Sequence[CrossKeys]]) -> Iterator[Replacement]:
        """Cross-attentions that read more than the text, on whole maps."""
        for name, extra in cross_keys.items():
            attention = self.unet.get_submodule(name)
            if not is_plain(attention):
                raise AdapterError(f"an image adapter needs plain attention, got a processor of its own at {name}")
            yield attention, partial(attend_beside, attention, extra)


def _run_network(network: SideNetwork, replacements: Sequence[Replacement], inputs: UNetInputs) -> list[Tensor]:
    """A network's maps, the middle's last, with these forwards in it."""
    with injected(network.model, replacements):
        skips, middle = network.run(inputs)
    return [*skips, middle]


def is_recorded(sites: Sequence[LayerSite], step: ReadFeatures) -> bool:
    """Return whether a step's features hold those of a network's sites."""
    return any(site.name in step for site in sites if site.role is Role.NORM_HALO)


def _whole(feature_map: Tensor, _level: int) -> Tensor:
    return feature_map


def apply_guidance(prediction: Tensor, scale: float | None) -> Tensor:
    """Classifier-free guidance (arXiv 2207.12598).

    Args:
        prediction: [2 * E, ...], all items without the prompt, then all with it; [E, ...] without a scale.
        scale: The guidance scale, or None for a prediction of one branch.

    Returns:
        [E, ...].
    """
    if scale is None:
        return prediction
    unconditional, conditional = prediction.chunk(2)
    return unconditional + scale * (conditional - unconditional)


def mask_queries(sites: tuple[LayerSite, ...], sizes: tuple[int, ...], limit: int = 1100) -> frozenset[str]:
    """Query projections that masks are made from: those of maps with at most `limit` positions, but at least a quarter
    of the finest such map.

    Args:
        sites: the UNet's.
        sizes: positions of each level, finest first.
        limit: The largest number of positions.
    """
    allowed = [size for size in sizes if size <= limit] or [min(sizes)]
    levels = {i for i, size in enumerate(sizes) if max(allowed) // 4 <= size <= max(allowed)}
    return frozenset(s.name for s in sites if s.role is Role.QUERY and s.level in levels)
