"""Multiply-accumulates of reference adapters (arXiv 2410.22901): reading a reference, a dense and a sparse step.

Counted as in `costs.macs`. Runs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fisedit.adapters.insertion_points import insertion_points
from fisedit.adapters.row_column.attention import TwoStageBlock
from fisedit.adapters.row_column.receptive_field import RecordedLines, find_receptive_field
from fisedit.sparse_kernels.row_plan import TAPS
from fisedit.sparse_kernels.winograd import is_faster

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel
    from torch import Tensor

    from fisedit.adapters.base import Grids
    from fisedit.adapters.row_column.attention import RowColumnAdapter, RowColumnBlock
    from fisedit.adapters.row_column.receptive_field import PaddedLines, ReceptiveField
    from fisedit.sparse_kernels.row_plan import Level, SparsePlan
    from fisedit.sparse_kernels.winograd import Tiles


def reference_macs(adapter: RowColumnAdapter, unet: UNet2DConditionModel, grids: Grids) -> int:
    """Count `RowColumnAdapter.read`, for one item.

    Args:
        adapter: The adapter that reads.
        unet: The UNet that the adapter is for.
        grids: The size of the feature map at every level.
    """
    total = 0
    for name, block in adapter.blocks.items():
        height, width = grids[insertion_points(unet)[name].level]
        total += height * width * block.row_column.channels**2 * (13 if isinstance(block, TwoStageBlock) else 4)
        if isinstance(block, TwoStageBlock):
            total += _block_macs(block.attn_ref, height, width, width, height)
    return total


def dense_macs(adapter: RowColumnAdapter, unet: UNet2DConditionModel, grids: Grids) -> int:
    """Count a dense step's blocks, for one item.

    Args:
        adapter: The adapter whose blocks run.
        unet: The UNet that the adapter is for.
        grids: The size of the feature map at every level.
    """
    total = 0
    for name, block in adapter.blocks.items():
        height, width = grids[insertion_points(unet)[name].level]
        total += _block_macs(block.row_column, height, width, *block.row_column.num_keys(height, width))
    return total


def sparse_macs(adapter: RowColumnAdapter, unet: UNet2DConditionModel, plan: SparsePlan, *, recorded: bool) -> int:
    """Count a sparse step's blocks, for one item.

    Args:
        adapter: The adapter whose blocks run.
        unet: The UNet that the adapter is for.
        plan: The plan of the step.
        recorded: the source had the adapter, so that whole rows and columns are read.
    """
    total, tiled = 0, is_faster(next(adapter.parameters()).device)
    for name, block in adapter.blocks.items():
        level, conv = plan.levels[insertion_points(unet)[name].level], block.row_column.conv_in is not None
        cells = find_receptive_field(level, conv=conv, recorded=recorded)
        total += _receptive_field_macs(block.row_column.channels, level, cells, tiled=tiled)
    return total


def _block_macs(row_column: RowColumnBlock, height: int, width: int, row_keys: int, column_keys: int) -> int:
    """A dense block on height x width positions, each looking at so many keys."""
    cells, channels = height * width, row_column.channels
    linear = 8 + 9 + (9 if row_column.conv_in is not None else 0)
    return cells * (linear * channels**2 + 2 * (row_keys + column_keys) * channels)


def _receptive_field_macs(channels: int, level: Level, cells: ReceptiveField, *, tiled: bool) -> int:
    """A sparse block: projections of its receptive field, attention over padded lines, the folded output conv."""
    linear = 3 * len(cells.fresh) + 3 * len(cells.changed) + len(cells.querying_in_changed)
    total = _conv_macs(channels, level.rows, cells.tiles if tiled else None)
    if cells.entering is not None:
        total += _conv_macs(channels, len(cells.fresh), cells.entering_tiles if tiled else None)
    num_keys = len(cells.row_queries.at) * (_own(cells.row_keys, cells.rows) + level.width)
    num_keys += len(cells.column_queries.at) * (_own(cells.column_keys, cells.columns) + level.height)
    return total + linear * channels**2 + 2 * num_keys * channels


def _conv_macs(channels: int, rows: int, tiles: Tiles | None) -> int:
    """A 3x3 conv with `rows` outputs."""
    return TAPS * rows * channels**2 if tiles is None else tiles.macs(channels)


def _own(keys: RecordedLines | PaddedLines, lines: Tensor) -> int:
    """Keys of the map itself in one line."""
    listed = keys.whole if isinstance(keys, RecordedLines) else keys.at
    return len(listed) // len(lines)
