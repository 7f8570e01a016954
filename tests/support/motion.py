"""Motion modules with weights made by a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusers import MotionAdapter

from fisedit.adapters.hellomeme.motion_adapter import MotionReader
from fisedit.adapters.hellomeme.motion_modules import FrameTransformer, MotionBlock, PaddedTransformer
from fisedit.adapters.insertion_points import insertion_points
from tests.support.adapters import filled

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel


def reader_of(unet: UNet2DConditionModel, family: str) -> tuple[MotionReader, MotionAdapter | None]:
    """Modules that change a lot, of "v3", "v5" or "animatediff"; and of the last, diffusers' own adapter of them."""
    width = unet.time_embedding.linear_2.out_features
    groups = unet.config.norm_num_groups
    if family == "animatediff":
        adapter = filled(
            MotionAdapter(
                block_out_channels=unet.config.block_out_channels,
                motion_layers_per_block=unet.config.layers_per_block,
                motion_num_attention_heads=4,
                motion_norm_num_groups=groups,
            )
        )
        blocks = {f"down_{i}": block for i, block in enumerate(adapter.down_blocks)} | {"mid": adapter.mid_block}
        blocks |= {f"up_{i}": block for i, block in enumerate(adapter.up_blocks)}
        named = {f"{name}.{j}": m for name, block in blocks.items() for j, m in enumerate(block.motion_modules)}
        return MotionReader({name: FrameTransformer(module) for name, module in named.items()}), adapter
    points = {name: point for name, point in insertion_points(unet).items() if name != "mid"}
    make = {"v3": lambda c: MotionBlock(c, width, 4), "v5": lambda c: PaddedTransformer(c, 4, groups)}[family]
    return MotionReader({name: filled(make(point.channels), name) for name, point in points.items()}), None
