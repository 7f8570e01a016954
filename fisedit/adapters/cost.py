"""Multiply-accumulates of adapters (arXiv 2410.22901): of reading a reference, and of a step, dense or on a closure.

Counted as in `profiling`. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fisedit.adapters.insertion_points import places
from fisedit.adapters.receptive_field import Keys, closure_of
from fisedit.adapters.row_column import Staged
from fisedit.sparse_kernels.row_plan import TAPS
from fisedit.sparse_kernels.winograd import serves

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel
    from torch import Tensor

    from fisedit.adapters.receptive_field import Closure, Lines
    from fisedit.adapters.row_column import Knit, RowColumnAdapter
    from fisedit.sparse_kernels.row_plan import Level, SparsePlan
    from fisedit.sparse_kernels.winograd import Tiles

Grids = Sequence[tuple[int, int]]
"""(height, width) of every level, finest first."""


def reading_macs(adapter: RowColumnAdapter, unet: UNet2DConditionModel, grids: Grids) -> int:
    """Of `RowColumnAdapter.read`, for one of the batch."""
    total = 0
    for name, block in adapter.blocks.items():
        height, width = grids[places(unet)[name].level]
        total += height * width * block.knit.channels**2 * (13 if isinstance(block, Staged) else 4)
        if isinstance(block, Staged):
            total += _knit_macs(block.attn_ref, height, width, width, height)
    return total


def dense_macs(adapter: RowColumnAdapter, unet: UNet2DConditionModel, grids: Grids) -> int:
    """Of a dense step's blocks, for one of the batch."""
    total = 0
    for name, block in adapter.blocks.items():
        height, width = grids[places(unet)[name].level]
        total += _knit_macs(block.knit, height, width, *block.knit.looks(height, width))
    return total


def sparse_macs(adapter: RowColumnAdapter, unet: UNet2DConditionModel, plan: SparsePlan, *, recorded: bool) -> int:
    """Of a sparse step's blocks, for one of the batch.

    Args:
        recorded: the source had the adapter, so that whole rows and columns are looked at.
    """
    total, tiled = 0, serves(next(adapter.parameters()).device)
    for name, block in adapter.blocks.items():
        level, conv = plan.levels[places(unet)[name].level], block.knit.conv_in is not None
        cells = closure_of(level, conv=conv, recorded=recorded)
        total += _closure_macs(block.knit.channels, level, cells, tiled=tiled)
    return total


def _knit_macs(knit: Knit, height: int, width: int, row_keys: int, column_keys: int) -> int:
    """A dense block on height x width positions, each looking at so many keys."""
    cells, channels = height * width, knit.channels
    linear = 8 + 9 + (9 if knit.conv_in is not None else 0)
    return cells * (linear * channels**2 + 2 * (row_keys + column_keys) * channels)


def _closure_macs(channels: int, level: Level, cells: Closure, *, tiled: bool) -> int:
    """A block on a closure: projections where they are fresh, lines as long as they are filled up, the folded end."""
    linear = 3 * len(cells.fresh) + 3 * len(cells.found) + len(cells.asking)
    total = _conv_macs(channels, level.rows, cells.tiles if tiled else None)
    if cells.entering is not None:
        total += _conv_macs(channels, len(cells.fresh), cells.entering_tiles if tiled else None)
    looks = len(cells.row_asks.at) * (_own(cells.row_keys, cells.rows) + level.width)
    looks += len(cells.column_asks.at) * (_own(cells.column_keys, cells.columns) + level.height)
    return total + linear * channels**2 + 2 * looks * channels


def _conv_macs(channels: int, rows: int, tiles: Tiles | None) -> int:
    """A 3x3 conv for so many outputs."""
    return TAPS * rows * channels**2 if tiles is None else tiles.macs(channels)


def _own(keys: Keys | Lines, lines: Tensor) -> int:
    """Keys of the map's own that a line looks at."""
    listed = keys.whole if isinstance(keys, Keys) else keys.at
    return len(listed) // len(lines)
