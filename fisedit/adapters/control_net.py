"""ControlNets (arXiv 2302.05543): a second encoder reads a control picture and adds to the UNet's skips and middle.

The network is diffusers' own. It is recorded with a source and computed at an edit's active rows, as the UNet is. What
its control picture becomes is computed once for all steps. Knows tensors and modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from fisedit.adapters.base import UNetAdapter
from fisedit.adapters.picture_adapter import PictureAdapter, counted, identity_of
from fisedit.costs.macs import unet_macs
from fisedit.errors import AdapterError, UnsupportedModuleError
from fisedit.features.sites import encoder_sites, loras
from fisedit.sparse.blocks import EncoderBlocks
from fisedit.sparse.executor import UNetInputs, is_recorded
from fisedit.storage.canvas import to_canvas
from fisedit.values import CONTROL

if TYPE_CHECKING:
    from diffusers import ControlNetModel, UNet2DConditionModel

    from fisedit.adapters.base import Grids
    from fisedit.adapters.picture_adapter import AdapterInputs
    from fisedit.features.cache import CachedFeatures
    from fisedit.features.sites import LayerSite
    from fisedit.models.families.conditioning import Conditioning
    from fisedit.models.injection import Replacement
    from fisedit.sparse.executor import SideNetwork, TakeMap
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import AdapterUse

_TOKENS = 77


@dataclass(frozen=True, eq=False)
class ControlNetwork:
    """A ControlNet at work on one picture (see `sparse.executor.SideNetwork`).

    Args:
        model: diffusers' `ControlNetModel`.
        sites: its layers, with names of their own.
        blocks: its blocks on rows.
        levels: The levels of the maps that it gives, the middle's last.
        condition: the control picture's map [1, C, h, w]; None where only costs are needed.
        use: how it takes part. In guess mode it is evaluated for the last guidance branch alone.
        branches: guidance branches, 1 or 2.
    """

    model: ControlNetModel
    sites: Sequence[LayerSite]
    blocks: EncoderBlocks
    levels: Sequence[int]
    condition: Tensor | None
    use: AdapterUse
    branches: int

    def inputs(self, take: TakeMap) -> list[Replacement]:
        """See `SideNetwork.inputs`."""
        assert self.condition is not None, "a picture is read before the network is at work"
        condition, model = take(self.condition, 0), cast(Any, self.model)
        return [(model.controlnet_cond_embedding, lambda _: condition)]

    def text(self, text: Conditioning) -> Conditioning:
        """See `SideNetwork.text`."""
        return text[len(text) // 2 :] if self.use.guess_mode and self.branches == 2 else text

    def run(self, inputs: UNetInputs) -> tuple[Sequence[Tensor], Tensor]:
        """See `SideNetwork.run`."""
        latents = inputs.latents[:, : self.model.config.in_channels]  # of an inpainting UNet's inputs
        left_out = len(latents) // 2 if self.use.guess_mode and self.branches == 2 else 0
        skips, middle = self.model(
            latents[left_out:],
            inputs.timestep,
            controlnet_cond=latents[left_out:],  # in place of the picture, which was read before
            conditioning_scale=self.use.scale,
            timestep_cond=None if inputs.timestep_cond is None else inputs.timestep_cond[left_out:],
            guess_mode=self.use.guess_mode,
            return_dict=False,
            **self.text(inputs.text).unet_inputs,
        )
        if left_out:
            skips, middle = [_after_zeros(each) for each in skips], _after_zeros(middle)
        return skips, middle


def _after_zeros(maps: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(maps), maps])


@dataclass(frozen=True, eq=False)
class ControlNetCondition(UNetAdapter):
    """A ControlNet at work on one picture.

    Args:
        own: the network.
    """

    own: ControlNetwork

    @property
    def network(self) -> SideNetwork:
        """See `UNetAdapter.network`."""
        return self.own

    def macs(self, unet: UNet2DConditionModel, grids: Grids, plan: SparsePlan | None, *, recorded: bool) -> int:
        """See `UNetAdapter.macs`; the projections of the text are spread over no steps, as the UNet's are."""
        sizes = [height * width for height, width in grids]
        rows = sizes if plan is None or not recorded else [level.rows for level in plan.levels]
        network, model = self.own, cast(Any, self.own.model)
        given = [*model.controlnet_down_blocks, model.controlnet_mid_block]
        zero_convs: int = sum(
            rows[level] * conv.weight.numel() for level, conv in zip(network.levels, given, strict=True)
        )
        macs = unet_macs(network.sites, rows, sizes, 1, _TOKENS) + zero_convs
        return macs // network.branches if network.use.guess_mode else macs


class ControlNetReader(PictureAdapter):
    """A loaded ControlNet.

    Args:
        model: diffusers' `ControlNetModel`.

    Raises:
        AdapterError: it has a layer without a sparse form.
    """

    argument: ClassVar[str] = CONTROL

    def __init__(self, model: ControlNetModel) -> None:
        super().__init__(identity_of("control-net", model.state_dict().values()))
        self.model: Any = model
        starts = {False: f"{self.identity}.", True: f"{self.identity}.guess."}  # of whose records batches differ
        try:
            self._sites = {guesses: encoder_sites(model, start) for guesses, start in starts.items()}
        except UnsupportedModuleError as error:
            raise AdapterError(str(error)) from error
        self._blocks = {guesses: EncoderBlocks(model, start) for guesses, start in starts.items()}

    @cached_property
    def _levels(self) -> list[int]:
        found, level = [0], 0
        for block in self.model.down_blocks:
            found += [level] * len(block.resnets)
            level += bool(block.downsamplers)
            found += [level] * bool(block.downsamplers)
        return [*found, level]

    def check_fit(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.check_fit`."""
        for name in ("block_out_channels", "cross_attention_dim", "layers_per_block", "addition_embed_type"):
            own, wanted = (tuple(v) if isinstance(v, list) else v for v in (self.model.config[name], unet.config[name]))
            if own != wanted:
                raise AdapterError(f"the ControlNet's {name} must be {wanted}, got {own}; load one for this model")
        if (channels := self.model.config.conditioning_channels) != 3:
            raise AdapterError(f"a ControlNet must read pictures of 3 channels, got {channels}; load another")
        if self.model.config.global_pool_conditions:
            raise AdapterError("a ControlNet that pools its maps, as shuffle's does, has no sparse form; load another")
        if loras(self.model):
            raise AdapterError("a ControlNet must have no LoRAs of its own; load it without")

    def match(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.match`."""
        self.model.to(unet.device, unet.dtype).to(memory_format=torch.channels_last)

    def check_use(self, use: AdapterUse) -> None:
        """See `PictureAdapter.check_use`; a ControlNet has every use."""

    def read(self, inputs: AdapterInputs) -> tuple[Tensor, int]:
        """See `PictureAdapter.read`; pictures are resized to the canvas."""
        config, model = inputs.config, self.model
        picture = to_canvas(inputs.picture, (config.width, config.height))
        pixels = torch.from_numpy(np.asarray(picture, np.float32) / 255).permute(2, 0, 1)[None]
        if model.config.controlnet_conditioning_channel_order == "bgr":
            pixels = pixels.flip(1)
        pixels = pixels.to(model.device, model.dtype)
        return counted(lambda: model.controlnet_cond_embedding(pixels))

    def condition(self, read: Tensor | None, use: AdapterUse, branches: int) -> ControlNetCondition:
        """See `PictureAdapter.condition`."""
        parts = self.model, self._sites[use.guess_mode], self._blocks[use.guess_mode], self._levels
        return ControlNetCondition(ControlNetwork(*parts, read, use, branches))

    def is_recorded(self, features: CachedFeatures, use: AdapterUse) -> bool:
        """See `PictureAdapter.is_recorded`."""
        return is_recorded(self._sites[use.guess_mode], features)
