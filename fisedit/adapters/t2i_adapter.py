"""T2I-Adapters (arXiv 2302.08453): a small network's maps of a control picture, added at the end of down blocks.

The network is diffusers' own, run once for all steps. Knows tensors and modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fisedit.adapters.base import UNetAdapter
from fisedit.adapters.picture_adapter import PictureAdapter, counted, identity_of
from fisedit.errors import AdapterError, InputError
from fisedit.models.families.conditioning import reads_text_alone
from fisedit.storage.canvas import to_canvas
from fisedit.values import CONTROL

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.adapters.picture_adapter import AdapterInputs
    from fisedit.values import AdapterUse


_XL, _XL_LEVELS = "full_adapter_xl", (1, 1, 2)
"""diffusers' kind for Stable Diffusion XL, and the levels of its maps for down blocks, of which the first is halved."""


@dataclass(frozen=True, eq=False)
class T2IAdapterCondition(UNetAdapter):
    """A T2I-Adapter at work on one picture; a step costs additions only.

    Args:
        maps: [1, C, h, w] of every down block, and of the middle where the adapter has one; () where only costs are
            needed.
        scale: The scale of the maps.
        levels: The levels of the down blocks' maps.
    """

    maps: Sequence[Tensor]
    scale: float
    levels: Sequence[int]

    def intrablock_residuals(self) -> list[tuple[int, Tensor]]:
        """See `UNetAdapter.intrablock_residuals`."""
        return [(level, self.scale * each) for level, each in zip(self.levels, self.maps, strict=False)]

    def controls(self, batch: int) -> dict[str, Tensor]:
        """See `UNetAdapter.controls`."""
        middle = self.maps[len(self.levels) :]
        return {"mid": self.scale * middle[0].expand(batch, -1, -1, -1)} if middle else {}


class T2IAdapterReader(PictureAdapter):
    """A loaded T2I-Adapter.

    Args:
        network: diffusers' `T2IAdapter`.
    """

    argument: ClassVar[str] = CONTROL

    def __init__(self, network: Any) -> None:
        super().__init__(identity_of("t2i-adapter", network.state_dict().values()))
        self.network = network

    def check_fit(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.check_fit`."""
        channels, own = tuple(unet.config.block_out_channels), tuple(self.network.config.channels)
        kind, reads_more = self.network.config.adapter_type, not reads_text_alone(unet)
        if kind == "light_adapter":  # whose last block has the channels of the one before
            own = (*own, own[-1])
        if reads_more:  # of which the middle block gets a map too
            channels = (*channels, channels[-1])
        if own != channels or reads_more != (kind == _XL):
            raise AdapterError(
                f"the T2I-Adapter must have channels {channels}, got {own} ({kind}); load one for this model"
            )

    def match(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.match`."""
        self.network.to(unet.device, unet.dtype)

    def read(self, inputs: AdapterInputs) -> tuple[list[Tensor], int]:
        """See `PictureAdapter.read`; pictures are resized to the canvas."""
        config, network = inputs.config, self.network
        factor = network.config.downscale_factor
        if config.width % factor or config.height % factor:
            raise InputError(
                f"this T2I-Adapter takes sides divisible by {factor}, got {config.width}x{config.height}; choose others"
            )
        picture = to_canvas(inputs.picture, (config.width, config.height))
        if network.config.in_channels == 1:
            picture = picture.convert("L")
        levels = torch.from_numpy(np.asarray(picture, np.float32) / 255).reshape(config.height, config.width, -1)
        pixels = levels.permute(2, 0, 1)[None].to(network.device, network.dtype)
        return counted(lambda: network(pixels))

    def condition(self, read: Sequence[Tensor] | None, use: AdapterUse, branches: int) -> T2IAdapterCondition:
        """See `PictureAdapter.condition`."""
        blocks = len(self.network.config.channels)
        levels = range(blocks + (self.network.config.adapter_type == "light_adapter"))
        return T2IAdapterCondition(read or (), use.scale, _XL_LEVELS if self._is_xl else levels)

    @property
    def _is_xl(self) -> bool:
        return bool(self.network.config.adapter_type == _XL)
