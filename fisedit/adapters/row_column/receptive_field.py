"""The receptive field of active cells through a block of row-column attention: what each of its stages computes.

HelloMeme's block (arXiv 2410.22901) is exact at the active cells if it runs on a larger set. That is the active set
dilated by one cell, for the 3x3 conv at its end, and closed under rows x columns. Not every projection is needed
everywhere. If the source had the block, its queries, keys and values are recorded at all other cells. Rows without an
active cell then give what was recorded. No smaller set is exact: every cell of a row with an active one reads changed
keys, and every column reads that cell.

If the source did not have the block, the boxes around the active blobs stand for the whole map. The conv at the end
then reads zeros beyond them, as beyond the frame. Knows index arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fisedit.sparse_kernels.row_plan import TAPS, Crop, KernelMap, Level, kernel_map_to
from fisedit.sparse_kernels.winograd import Tiles, make_tiles


@dataclass(frozen=True, eq=False)
class PaddedLines:
    """Cells by line; every line is padded to n cells with its first one.

    Args:
        at: int64 [lines * n], indices of the cells.
        back: int64 [cells], index of every cell in `at`.
        real: bool [lines, n], False for padding; None where no line is padded.
    """

    at: Tensor
    back: Tensor
    real: Tensor | None


@dataclass(frozen=True, eq=False)
class RecordedLines:
    """Whole recorded lines, in which fresh cells are replaced.

    Args:
        whole: int64 [lines * n], positions, line by line.
        fresh: int64, indices of the fresh cells in `whole`.
    """

    whole: Tensor
    fresh: Tensor


@dataclass(frozen=True, eq=False)
class ReceptiveField:
    """Cells that every stage of a block computes. Lists are int64 and ascend by position.

    Args:
        rows: [r], y of the rows that have queries: those of fresh cells.
        columns: [c], x of the columns that have queries: those of cells that the last conv reads.
        fresh: [F], positions whose tokens are computed.
        active: [R], indices of the active cells in `fresh`.
        entering: kernel map from the active set to `fresh` of the 3x3 conv before the rows, or None without one.
        entering_tiles: The tiles of that conv; None where they do not pay.
        changed: [M], positions where the attention along rows gives something new.
        fresh_in_changed: [F], indices of `fresh` in `changed`.
        row_keys: keys of the rows; fresh cells only where nothing was recorded.
        row_queries: `changed` by row.
        conv_inputs: [N], positions that the last conv reads, the active ones first.
        conv_input_rows: [N], indices of `conv_inputs` among the rows [R + G] of the level's kernel map.
        querying_in_changed: [Q], indices in `changed` of those `conv_inputs` that are in it.
        querying_in_conv_inputs: [Q], indices of the same in `conv_inputs`.
        column_keys: keys of the columns; fresh cells only where nothing was recorded.
        column_queries: `conv_inputs` by column.
        tiles: The tiles of the last conv; None where they do not pay.
        boundary: [E], active rows beside the frame, or beside their box's border.
        outside_taps: bool [E, 9, 1], taps of the last conv that are beyond it.
    """

    rows: Tensor
    columns: Tensor
    fresh: Tensor
    active: Tensor
    entering: KernelMap | None
    entering_tiles: Tiles | None
    changed: Tensor
    fresh_in_changed: Tensor
    row_keys: RecordedLines | PaddedLines
    row_queries: PaddedLines
    conv_inputs: Tensor
    conv_input_rows: Tensor
    querying_in_changed: Tensor
    querying_in_conv_inputs: Tensor
    column_keys: RecordedLines | PaddedLines
    column_queries: PaddedLines
    tiles: Tiles | None
    boundary: Tensor
    outside_taps: Tensor


_CACHE: WeakKeyDictionary[Level, dict[tuple[bool, bool], ReceptiveField]] = WeakKeyDictionary()


def find_receptive_field(level: Level, *, conv: bool, recorded: bool) -> ReceptiveField:
    """Find what a block computes at a level; cached by level.

    Args:
        level: A level of a sparse plan.
        conv: a 3x3 conv comes before the rows.
        recorded: the source had the block.
    """
    cached = _CACHE.setdefault(level, {})
    if (conv, recorded) not in cached:
        cached[conv, recorded] = _compute(level, conv, recorded)
    return cached[conv, recorded]


def boxes(grid: Tensor) -> Tensor:
    """The union of the bounding boxes of a grid's connected parts.

    Args:
        grid: bool [H, W].
    """
    from scipy import ndimage

    mask = torch.zeros_like(grid)
    for box in ndimage.find_objects(ndimage.label(grid.numpy(), structure=[[1] * 3] * 3)[0]):
        mask[box] = True
    return mask


def _compute(level: Level, conv: bool, recorded: bool) -> ReceptiveField:
    height, width, same = level.height, level.width, level.same
    active = _grid(level.active.cpu(), level)
    dilated = _grid(level.read_positions.cpu(), level)
    if recorded:
        computed = dilated if conv else active
        crossed = computed.any(1)[:, None] & dilated.any(0)
    else:
        computed = crossed = boxes(active)
        dilated &= crossed
    fresh, changed = _cells(computed), _cells(crossed)
    conv_input_rows = dilated.flatten()[level.read_positions.cpu()].nonzero()[:, 0]
    conv_inputs = level.read_positions.cpu()[conv_input_rows]
    querying_in_changed = crossed.flatten()[conv_inputs]
    rows, columns = computed.any(1).nonzero()[:, 0], dilated.any(0).nonzero()[:, 0]
    by_row = _Direction(rows, _index_of(rows, height), width, recorded)
    by_column = _Direction(columns, _index_of(columns, width), height, recorded)
    is_read = torch.zeros(len(level.read_positions) + 1, dtype=torch.bool)  # the last is the zero row beyond the frame
    is_read[conv_input_rows] = True
    outside = ~is_read[same.table.cpu()].view(-1, TAPS)
    boundary = outside.any(1).nonzero()[:, 0]
    index_in_changed = _index_of(changed, level.size)
    entering = kernel_map_to(active, computed) if conv else None
    receptive_field = ReceptiveField(
        rows=rows,
        columns=columns,
        fresh=fresh,
        active=_index_of(fresh, level.size)[level.active.cpu()],
        entering=entering,
        entering_tiles=make_tiles(entering.table, fresh, width, level.rows + len(entering.halo)) if entering else None,
        changed=changed,
        fresh_in_changed=index_in_changed[fresh],
        row_keys=by_row.keys(rows[:, None] * width + torch.arange(width), fresh // width, fresh % width),
        row_queries=by_row.lines(changed // width),
        conv_inputs=conv_inputs,
        conv_input_rows=conv_input_rows,
        querying_in_changed=index_in_changed[conv_inputs[querying_in_changed]],
        querying_in_conv_inputs=querying_in_changed.nonzero()[:, 0],
        column_keys=by_column.keys(columns[:, None] + torch.arange(height) * width, changed % width, changed // width),
        column_queries=by_column.lines(conv_inputs % width),
        tiles=make_tiles(same.table.cpu(), level.active.cpu(), width, len(level.read_positions)),
        boundary=boundary,
        outside_taps=outside[boundary, :, None],
    )
    on_device: ReceptiveField = _to(receptive_field, level.active.device)
    return on_device


@dataclass(frozen=True, eq=False)
class _Direction:
    """The lines of one direction.

    Args:
        coordinates: The coordinates of the lines, ascending.
        line: index of the line at every coordinate, -1 for none.
        length: cells of a line.
        recorded: the source had the block.
    """

    coordinates: Tensor
    line: Tensor
    length: int
    recorded: bool

    def keys(self, whole: Tensor, line: Tensor, along: Tensor) -> RecordedLines | PaddedLines:
        """Keys of the lines: positions [lines, length], or, where nothing was recorded, only fresh cells by line."""
        if self.recorded:
            return RecordedLines(whole.flatten(), self.line[line] * self.length + along)
        return self.lines(line)

    def lines(self, coordinates: Tensor) -> PaddedLines:
        """Cells at these line coordinates, by line; every line has one."""
        line, count = self.line[coordinates], len(self.coordinates)
        order, counts = line.argsort(stable=True), line.bincount(minlength=count)
        longest, starts = int(counts.max()), counts.cumsum(0) - counts
        indices = line[order] * longest + torch.arange(len(line)) - starts[line[order]]
        at = order[starts].repeat_interleave(longest)
        at[indices], back = order, torch.empty_like(order)
        back[order] = indices
        real = torch.zeros(count * longest, dtype=torch.bool)
        real[indices] = True
        return PaddedLines(at, back, None if real.all() else real.view(count, longest))


def _grid(positions: Tensor, level: Level) -> Tensor:
    """Bool [H, W]."""
    grid = torch.zeros(level.size, dtype=torch.bool)
    grid[positions] = True
    return grid.view(level.height, level.width)


def _cells(grid: Tensor) -> Tensor:
    return grid.flatten().nonzero()[:, 0]


def _index_of(listed: Tensor, size: int) -> Tensor:
    """Index in a list of each of `size` numbers; -1 for others."""
    indices = torch.full((size,), -1)
    indices[listed] = torch.arange(len(listed))
    return indices


def _to(value: Any, device: torch.device) -> Any:
    """A value with all tensors in it moved to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not isinstance(value, ReceptiveField | RecordedLines | PaddedLines | KernelMap | Tiles | Crop):
        return value
    return replace(value, **{field.name: _to(getattr(value, field.name), device) for field in fields(value)})
