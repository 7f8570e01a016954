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
from fisedit.errors import AdapterError
from fisedit.storage.canvas import to_canvas
from fisedit.values import CONTROL

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.adapters.picture_adapter import AdapterInputs
    from fisedit.values import AdapterUse


@dataclass(frozen=True, eq=False)
class T2IAdapterCondition(UNetAdapter):
    """A T2I-Adapter at work on one picture; a step costs additions only.

    Args:
        maps: [1, C, h, w] of every down block; () where only costs are needed.
        scale: The scale of the maps.
    """

    maps: Sequence[Tensor]
    scale: float

    def intrablock_residuals(self) -> list[Tensor]:
        """See `UNetAdapter.intrablock_residuals`."""
        return [self.scale * each for each in self.maps]


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
        if self.network.config.adapter_type == "light_adapter":  # whose last block has the channels of the one before
            own = (*own, own[-1])
        if own != channels or self.network.config.adapter_type == "full_adapter_xl":
            raise AdapterError(
                f"the T2I-Adapter must have channels {channels}, got {own} ({self.network.config.adapter_type}); "
                "load one for this model"
            )

    def match(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.match`."""
        self.network.to(unet.device, unet.dtype)

    def read(self, inputs: AdapterInputs) -> tuple[list[Tensor], int]:
        """See `PictureAdapter.read`; pictures are resized to the canvas."""
        config, network = inputs.config, self.network
        picture = to_canvas(inputs.picture, (config.width, config.height))
        if network.config.in_channels == 1:
            picture = picture.convert("L")
        levels = torch.from_numpy(np.asarray(picture, np.float32) / 255).reshape(config.height, config.width, -1)
        pixels = levels.permute(2, 0, 1)[None].to(network.device, network.dtype)
        return counted(lambda: network(pixels))

    def condition(self, read: Sequence[Tensor] | None, use: AdapterUse, branches: int) -> T2IAdapterCondition:
        """See `PictureAdapter.condition`."""
        return T2IAdapterCondition(read or (), use.scale)
