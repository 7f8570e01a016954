"""HelloMeme's reference adapters (arXiv 2410.22901) as adapters that read pictures.

The same UNet reads the picture's clean latents at t = 0, and zeros for the branch without a prompt. It reads no words,
so that a prompt may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisedit.adapters.base import UNetAdapter
from fisedit.adapters.insertion_points import record_maps
from fisedit.adapters.picture_adapter import PictureAdapter
from fisedit.adapters.row_column.block_convs import output_conv
from fisedit.adapters.row_column.checkpoints import check_fit, identity
from fisedit.adapters.row_column.cost import dense_macs, reference_macs, sparse_macs
from fisedit.adapters.row_column.sparse import is_recorded, sites
from fisedit.costs.macs import text_macs, unet_macs
from fisedit.models.injection import exclusive
from fisedit.models.vae import encode
from fisedit.storage.canvas import to_canvas
from fisedit.values import level_grids

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.adapters.base import Gain, Grids
    from fisedit.adapters.picture_adapter import AdapterInputs
    from fisedit.adapters.row_column.attention import ReferenceKeys, RowColumnAdapter, RowColumnBlock
    from fisedit.features.cache import CachedFeatures
    from fisedit.sparse.executor import ExtraSite
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import AdapterUse


@dataclass(frozen=True, eq=False)
class ReferenceCondition(UNetAdapter):
    """A reference adapter at work on one reference (see `base.UNetAdapter`).

    Args:
        adapter: its blocks.
        reference: the reference's keys and values by insertion point, from `RowColumnAdapter.read`; empty where only
            layers or costs are needed.
        scale: factor of the adapter's gains.
        identity: tells the adapter from all others.
    """

    adapter: RowColumnAdapter
    reference: Mapping[str, ReferenceKeys]
    scale: float = 1.0
    identity: str = ""

    def gains(self, batch: int | None) -> dict[str, Gain]:
        """See `base.UNetAdapter.gains`."""
        return {name: self._gain(block.row_column, name, batch) for name, block in self.adapter.blocks.items()}

    def sites(self, unet: UNet2DConditionModel) -> tuple[ExtraSite, ...]:
        """See `base.UNetAdapter.sites`."""
        return sites(unet, self.identity, self.adapter)

    def macs(self, unet: UNet2DConditionModel, grids: Grids, plan: SparsePlan | None, *, recorded: bool) -> int:
        """See `base.UNetAdapter.macs`."""
        if plan is None:
            return dense_macs(self.adapter, unet, grids)
        return sparse_macs(self.adapter, unet, plan, recorded=recorded)

    def _gain(self, block: RowColumnBlock, name: str, batch: int | None) -> Gain:
        reference = self.reference[name] if batch is None else self.reference[name].last(batch)

        def gain(x: Tensor) -> Tensor:
            scaled: Tensor = self.scale * block(x, reference)
            return scaled

        return gain


class RowColumnReader(PictureAdapter):
    """A loaded reference adapter.

    Args:
        adapter: its blocks.
    """

    def __init__(self, adapter: RowColumnAdapter) -> None:
        super().__init__(identity(adapter))
        self.adapter = adapter

    def check_fit(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.check_fit`."""
        check_fit(self.adapter, unet)

    def match(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.match`."""
        match_unet(self.adapter, unet)
        for block in self.adapter.blocks.values():
            output_conv(block.row_column)  # known before the first edit

    def read(self, inputs: AdapterInputs) -> tuple[Mapping[str, ReferenceKeys], int]:
        """See `PictureAdapter.read`."""
        unet = inputs.pipe.unet
        with torch.inference_mode():
            latents, text = reading_inputs(inputs)
        with torch.inference_mode(), exclusive(unet):
            maps = record_maps(unet, latents, text, tuple(self.adapter.channels))
            return self.adapter.read(maps), self._reading_macs(inputs)

    def condition(self, read: Mapping[str, ReferenceKeys] | None, use: AdapterUse, branches: int) -> ReferenceCondition:
        """See `PictureAdapter.condition`."""
        return ReferenceCondition(self.adapter, read or {}, use.scale, self.identity)

    def is_recorded(self, features: CachedFeatures, use: AdapterUse) -> bool:
        """See `PictureAdapter.is_recorded`."""
        return is_recorded(self.identity, features)

    def _reading_macs(self, inputs: AdapterInputs) -> int:
        """The multiply-accumulates of the pass up to the last up block, and of reading its maps."""
        unet, executor, branches = inputs.pipe.unet, inputs.executor, inputs.branches
        last = (f"up_blocks.{len(unet.up_blocks) - 1}.", "conv_norm_out", "conv_out")
        passed = [site for site in executor.sites if not site.name.startswith(last)]
        grids = level_grids(inputs.config, executor.num_levels)
        sizes, tokens = [height * width for height, width in grids], int(inputs.pipe.tokenizer.model_max_length)
        unet_pass = unet_macs(passed, sizes, sizes, branches, tokens) + text_macs(passed, branches, tokens)
        return unet_pass + branches * reference_macs(self.adapter, unet, grids)


def reading_inputs(inputs: AdapterInputs) -> tuple[Tensor, Tensor]:
    """Latents [B, 4, h, w] and the text of no words [B, T, D]."""
    pipe, config = inputs.pipe, inputs.config
    latents = encode(pipe.vae, to_canvas(inputs.picture, (config.width, config.height))).to(pipe.unet.dtype)
    with exclusive(pipe.text_encoder, pipe.tokenizer):
        text = pipe.encode_prompt("", pipe.unet.device, 1, do_classifier_free_guidance=False)[0]
    if inputs.branches == 2:
        latents = torch.cat([torch.zeros_like(latents), latents])
    return latents, text.expand(inputs.branches, -1, -1)


def match_unet(adapter: RowColumnAdapter, unet: UNet2DConditionModel) -> RowColumnAdapter:
    """Move an adapter to a UNet's device and dtype, its convolutions to channels_last."""
    adapter.to(unet.device, unet.dtype)
    adapter.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    return adapter
