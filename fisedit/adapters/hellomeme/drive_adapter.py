"""HelloMeme's control networks (arXiv 2410.22901) as an adapter that reads a drive.

The pose is drawn. A network makes maps of it and of the expression. These do not depend on the noisy latents: the
network is run once for all steps. Without a prompt the picture is empty and all numbers are 0. Knows tensors and
modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fisedit.adapters.base import UNetAdapter, items_of
from fisedit.adapters.hellomeme.drive_networks import DriveBase, DriveNetwork, DriveProjection
from fisedit.adapters.hellomeme.pose_picture import draw_pose
from fisedit.adapters.insertion_points import insertion_points
from fisedit.adapters.picture_adapter import PictureAdapter, counted, identity_of
from fisedit.errors import AdapterError, InputError
from fisedit.models.families.conditioning import check_reads_text_alone
from fisedit.values import DRIVE, LATENT_FACTOR
from fisedit.values.drive import EXPRESSIONS, FACE

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.adapters.picture_adapter import AdapterInputs
    from fisedit.values import AdapterUse
    from fisedit.values.drive import Drive


@dataclass(frozen=True, eq=False)
class DriveCondition(UNetAdapter):
    """A control network at work on one drive; a step costs additions only.

    Args:
        maps: The maps [S, C, h, w] of S guidance branches by insertion point; empty where only costs are needed. For a
            clip they are those of every frame, branch by branch.
        scale: The scale of the maps.
    """

    maps: Mapping[str, Tensor]
    scale: float

    def controls(self, batch: int) -> dict[str, Tensor]:
        """See `UNetAdapter.controls`."""
        return {point: self.scale * items_of(each, batch) for point, each in self.maps.items()}


class DriveReader(PictureAdapter):
    """A loaded control network.

    Args:
        network: A network of families v1 to v3, or the base of v4 and v5.
        projection: The projection of the base's maps; None for families v1 to v3.
    """

    argument: ClassVar[str] = DRIVE

    def __init__(self, network: DriveNetwork | DriveBase, projection: DriveProjection | None = None) -> None:
        self.network, self.projection = network, projection
        super().__init__(identity_of("drive", (t for module in self._modules for t in module.state_dict().values())))

    @property
    def _modules(self) -> list[torch.nn.Module]:
        return [self.network] if self.projection is None else [self.network, self.projection]

    @property
    def channels(self) -> Mapping[str, int]:
        """Channels of the maps by insertion point."""
        if self.projection is not None:
            return self.projection.channels
        assert isinstance(self.network, DriveNetwork), "a base has its projection"
        return self.network.channels

    def check_fit(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.check_fit`."""
        check_reads_text_alone(unet, "a control network of HelloMeme")
        points = insertion_points(unet)
        for point, channels in self.channels.items():
            if point not in points or points[point].channels != channels:
                own = f"{points[point].channels} channels at {point}" if point in points else f"no {point}"
                raise AdapterError(
                    f"the control network adds maps of {channels} channels at {point}, got a UNet with {own}; "
                    "load the model that it was trained for, or a derivative"
                )

    def match(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.match`."""
        for module in self._modules:
            module.to(unet.device, unet.dtype)

    def read(self, inputs: AdapterInputs) -> tuple[dict[str, Tensor], int]:
        """See `PictureAdapter.read`; the pose is drawn on the canvas."""
        config, drive = inputs.config, inputs.drive
        self._check_size(config.width, config.height)
        levels = torch.from_numpy(np.array(draw_pose(drive.pose, (config.width, config.height)), np.float32))
        picture = (levels / 127.5 - 1).permute(2, 0, 1)[None]
        numbers = self._numbers(drive)
        if inputs.branches == 2:
            picture = torch.cat([-torch.ones_like(picture), picture])
            numbers = {name: torch.cat([torch.zeros_like(each), each]) for name, each in numbers.items()}
        like = next(self.network.parameters())
        given = {name: each.to(like.device) for name, each in numbers.items()}  # in 32 bit: their phases are large
        return counted(lambda: self._maps(picture.to(like), given))

    def _maps(self, picture: Tensor, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: Any = self.network(picture, **numbers)
        projected: dict[str, Tensor] = found if self.projection is None else self.projection(found)
        return projected

    def joined(self, reads: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """See `PictureAdapter.joined`."""
        return {point: torch.stack([each[point] for each in reads], 1).flatten(0, 1) for point in reads[0]}

    def condition(self, read: Mapping[str, Tensor] | None, use: AdapterUse, branches: int) -> DriveCondition:
        """See `PictureAdapter.condition`."""
        return DriveCondition(read or {}, use.scale)

    def _numbers(self, drive: Drive) -> dict[str, Tensor]:
        """The network's inputs beside the picture; a face at rest where it reads expressions and none is given."""
        if drive.emotion and (not drive.expression or not self.network.reads_expressions):
            if not self.network.reads_emotions:
                raise InputError("the control network reads an expression, got an emotion; give expression in Drive")
            return {"emotion": torch.tensor([drive.emotion])}
        if not self.network.reads_expressions:
            raise InputError("the control network reads PD-FGC's vector, got none; give emotion in Drive")
        expression = torch.tensor([drive.expression]) if drive.expression else torch.zeros(1, len(EXPRESSIONS))
        face = torch.tensor([drive.face]) if drive.face else torch.zeros(1, FACE[0] * FACE[1])
        return {"expression": expression, "face": face.view(1, *FACE)}

    def _check_size(self, width: int, height: int) -> None:
        """Raise InputError for a canvas that the network cannot take."""
        multiple, most = self.network.multiple * LATENT_FACTOR, self.network.max_side
        if width % multiple or height % multiple:
            raise InputError(f"the control network takes sides that {multiple} divides, got {width}x{height} pixels")
        if most is not None and max(width, height) > most:
            raise InputError(f"the control network takes pictures up to {most} pixels a side, got {width}x{height}")
