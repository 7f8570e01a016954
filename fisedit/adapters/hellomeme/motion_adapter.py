"""Motion modules as an adapter that is at work in clips: their frames are denoised together and attend to one another.

The frames share the source and the region, so that an active cell has active cells in all frames. Outside, all frames
are the source, and the modules do nothing. HelloMeme's modules (arXiv 2410.22901) also read a picture before the clip
and one after it, by the same pass as reference adapters do. Knows rows and positions; neither samplers nor drives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from fisedit.adapters.base import UNetAdapter
from fisedit.adapters.hellomeme.motion_modules import ClipInputs, MotionBlock, OtherRows
from fisedit.adapters.insertion_points import insertion_points, layer_points, record_maps
from fisedit.adapters.picture_adapter import PictureAdapter, identity_of
from fisedit.adapters.row_column.reader import reading_inputs
from fisedit.errors import AdapterError
from fisedit.features.cache import RepeatedFeatures
from fisedit.features.sites import Role
from fisedit.models.families.conditioning import check_reads_text_alone
from fisedit.models.injection import exclusive
from fisedit.sparse.cached_rows import CachedRows
from fisedit.sparse.executor import ExtraSite
from fisedit.sparse.row_layout import gather, map_of, rows_of
from fisedit.sparse_kernels import ops
from fisedit.values import MOTION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffusers import UNet2DConditionModel

    from fisedit.adapters.base import Gain
    from fisedit.adapters.hellomeme.motion_modules import MotionModule
    from fisedit.adapters.insertion_points import InsertionPoint
    from fisedit.adapters.picture_adapter import AdapterInputs
    from fisedit.sparse.recording import DenseContext
    from fisedit.values import AdapterUse


@dataclass(frozen=True, eq=False)
class MotionSite(ExtraSite):
    """A motion module as a layer of an executor.

    Args:
        reader: name of the layer whose recorded input begins with the map that the module reads.
    """

    reader: str = ""

    def run_dense(self, run: DenseContext, *args: Any) -> Any:
        """Refuse: a clip's frames are edits, whose source has no motion."""
        raise AdapterError("motion modules are at work in sparse steps alone, got a dense one")

    def run_sparse(self, run: CachedRows, *args: Any) -> Tensor:
        """The gain of the active rows [B * F, C, R, 1]; arguments as of the module's forward."""
        x, inputs = cast("tuple[Tensor, ClipInputs]", args)
        module, level, rows = cast("MotionModule", self.module), run.level(self), rows_of(x)
        if isinstance(module, MotionBlock):
            assert inputs.pad is not None, "the module reads pictures at either side"
            halo = run.source.rows(self.reader, self.level, level.same.halo)[..., : module.channels].contiguous()
            found = [
                module.attend(each, _pad_rows(inputs.pad, positions), inputs)
                for each, positions in ((rows, level.active), (halo, level.same.halo))
            ]
            return map_of(ops.norm_conv3x3(found[0], found[1], level.same, module.proj.weight, module.proj.bias))
        return map_of(module.gain(rows, inputs, self._others(run, inputs)))

    def _others(self, run: CachedRows, inputs: ClipInputs) -> OtherRows:
        """The rows of the source, which all frames share, and of the pads."""
        level, source = run.level(self), run.source
        assert isinstance(source, RepeatedFeatures), "frames are computed together"

        def still(groups: int) -> Tensor:
            whole = source.parent.whole(self.reader, self.level)[..., : self.module.channels].contiguous()
            everywhere = ops.group_statistics(whole, groups)
            return everywhere - ops.group_statistics(whole.index_select(1, level.active), groups)

        if inputs.pad is None:
            return OtherRows(level.size, still)
        pad = inputs.pad

        def of_pads(groups: int) -> Tensor:
            found = ops.group_statistics(rows_of(pad.flatten(0, 1)), groups)
            both: Tensor = found.unflatten(0, pad.shape[:2]).sum(1)
            return both

        return OtherRows(level.size, still, _pad_rows(pad, level.active), of_pads)


def _pad_rows(pad: Tensor, positions: Tensor) -> Tensor:
    """Rows [B, 2, R, C] of maps [B, 2, C, H, W]."""
    rows: Tensor = gather(pad.flatten(0, 1), positions).unflatten(0, pad.shape[:2])
    return rows


@dataclass(eq=False)
class MotionCondition(UNetAdapter):
    """Motion modules at work on a clip.

    Args:
        modules: by insertion point.
        pads: maps [S, 2, C, H, W] of S guidance branches at either side of the clip, by insertion point; {} for none.
        scale: The scale of the gains.
        branches: S.
        identity: The identity of the adapter.
    """

    modules: Mapping[str, MotionModule]
    pads: Mapping[str, Tensor]
    scale: float
    branches: int
    identity: str
    _time: list[Tensor] = field(default_factory=list)

    reads_changed = True

    @property
    def inside_blocks(self) -> bool:
        """See `UNetAdapter.inside_blocks`."""
        return any("." in point for point in self.modules)

    def see_time(self, embedding: Tensor) -> None:
        """See `UNetAdapter.see_time`."""
        self._time[:] = [embedding]

    def gains(self, batch: int | None) -> dict[str, Gain]:
        """See `UNetAdapter.gains`."""
        assert batch is not None, "a clip has a number of frames"
        frames = batch // self.branches
        return {point: self._gain(point, module, frames) for point, module in self.modules.items()}

    def sites(self, unet: UNet2DConditionModel) -> tuple[MotionSite, ...]:
        """See `UNetAdapter.sites`."""
        points = points_of(unet)
        return tuple(
            MotionSite(f"{self.identity}.{name}", module, Role.EXTRA, points[name].level, points[name].reader)
            for name, module in self.modules.items()
        )

    def _gain(self, point: str, module: MotionModule, frames: int) -> Gain:
        def gain(x: Tensor) -> Tensor:
            scaled: Tensor = self.scale * module(x, ClipInputs(frames, self._time[0], self.pads.get(point)))
            return scaled

        return gain


def points_of(unet: UNet2DConditionModel) -> dict[str, InsertionPoint]:
    """All insertion points of a UNet, by name."""
    return insertion_points(unet) | layer_points(unet)


class MotionReader(PictureAdapter):
    """Loaded motion modules.

    Args:
        modules: by insertion point.
    """

    argument: ClassVar[str] = MOTION

    def __init__(self, modules: Mapping[str, MotionModule]) -> None:
        super().__init__(
            identity_of("motion", (t for module in modules.values() for t in module.state_dict().values()))
        )
        self.modules = modules

    @property
    def reads_pictures(self) -> bool:
        """Return whether the modules read a picture before the clip and one after it."""
        return next(iter(self.modules.values())).reads_pads

    def check_fit(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.check_fit`."""
        check_reads_text_alone(unet, "a motion adapter")
        points = points_of(unet)
        for name, module in self.modules.items():
            own = points[name].channels if name in points else None
            if own != module.channels:
                got = "no such place" if own is None else f"{own} channels"
                raise AdapterError(
                    f"the motion modules need {module.channels} channels at {name}, got a UNet with {got}; "
                    "load the model that they were trained for, or a derivative"
                )

    def match(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.match`."""
        for module in self.modules.values():
            module.to(unet.device, unet.dtype)

    def read(self, inputs: AdapterInputs) -> tuple[dict[str, Tensor], int]:
        """See `PictureAdapter.read`: maps [S, C, H, W] of a picture at one side, by insertion point."""
        unet = inputs.pipe.unet
        with torch.inference_mode():
            latents, text = reading_inputs(inputs)
        with torch.inference_mode(), exclusive(unet):
            return record_maps(unet, latents, text, tuple(self.modules)), 0

    def condition(self, read: Sequence[Mapping[str, Tensor]] | None, use: AdapterUse, branches: int) -> MotionCondition:
        """See `PictureAdapter.condition`; `read` is what was read at either side, or None."""
        pads = {} if not read else {point: torch.stack([side[point] for side in read], 1) for point in self.modules}
        return MotionCondition(self.modules, pads, use.scale, branches, self.identity)
