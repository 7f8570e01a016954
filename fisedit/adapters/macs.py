"""Multiply-accumulates of adapters (arXiv 2410.22901): of reading a reference, and of a step, dense or on a closure.

Counted as in `profiling`. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fisedit.adapters.places import places
from fisedit.adapters.row_column import Staged

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.adapters.row_column import Knit, RowColumnAdapter
    from fisedit.plan import SparsePlan

Grids = Sequence[tuple[int, int]]
"""(height, width) of every level, finest first."""


def reading_macs(adapter: RowColumnAdapter, unet: UNet2DConditionModel, grids: Grids) -> int:
    """Of `RowColumnAdapter.read`, for one of the batch."""
    total = 0
    for name, block in adapter.blocks.items():
        height, width = grids[places(unet)[name].level]
        total += height * width * block.knit.channels**2 * (13 if isinstance(block, Staged) else 4)
        if isinstance(block, Staged):
            total += _knit_macs(block.attn_ref, height, width, height * width, width, height)
    return total


def dense_macs(adapter: RowColumnAdapter, unet: UNet2DConditionModel, grids: Grids) -> int:
    """Of a dense step's blocks, for one of the batch."""
    total = 0
    for name, block in adapter.blocks.items():
        height, width = grids[places(unet)[name].level]
        total += _knit_macs(block.knit, height, width, height * width, 2 * width, 2 * height)
    return total


def sparse_macs(adapter: RowColumnAdapter, unet: UNet2DConditionModel, plan: SparsePlan, *, recorded: bool) -> int:
    """Of a sparse step's blocks, for one of the batch.

    Args:
        recorded: the source had the adapter, so that whole rows and columns are looked at.
    """
    total = 0
    for name, block in adapter.blocks.items():
        level = plan.levels[places(unet)[name].level]
        height, width = len(level.closure.rows), len(level.closure.columns)
        own = (level.width, level.height) if recorded else (width, height)
        total += _knit_macs(block.knit, height, width, level.rows, own[0] + level.width, own[1] + level.height)
    return total


def _knit_macs(knit: Knit, height: int, width: int, outputs: int, row_keys: int, column_keys: int) -> int:
    """A block on height x width positions, each looking at so many keys, its last conv at so many outputs."""
    cells, channels = height * width, knit.channels
    linear = 8 * cells + 9 * outputs + (9 * cells if knit.conv_in is not None else 0)
    return linear * channels**2 + 2 * cells * (row_keys + column_keys) * channels
