"""What a block of attention along rows and columns computes of a map of which the active cells alone are wanted.

HelloMeme's block (arXiv 2410.22901) is exact there if it runs on the active set grown by one, for the 3x3 conv at its
end, and closed under rows x columns. Not every projection is needed everywhere. Where the source had the block, its
queries, keys and values are known but at the active cells, and in rows without one the rows' outcome, and all that is
made of it, is what was recorded. No smaller set is exact: every cell of a row with an active one reads changed keys,
and every column reads that cell.

Where the source did not have it, the block takes the boxes around the blobs for the whole map: its end reads zeros
beyond them, as beyond the frame. Knows index arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fisedit.sparse_kernels.row_plan import TAPS, Crop, KernelMap, Level, kernel_map_to
from fisedit.sparse_kernels.winograd import Tiles, tiles_of


@dataclass(frozen=True, eq=False)
class Lines:
    """Cells by line, every line filled up to n cells with its first one.

    Args:
        at: int64 [lines * n], which cells. back: int64 [cells], where each of them stands in `at`.
        real: bool [lines, n], False where filled up; None where no line is.
    """

    at: Tensor
    back: Tensor
    real: Tensor | None


@dataclass(frozen=True, eq=False)
class Keys:
    """Whole recorded lines, in which fresh cells are put.

    Args:
        whole: int64 [lines * n], positions, line by line. fresh: int64, where the fresh cells stand in it.
    """

    whole: Tensor
    fresh: Tensor


@dataclass(frozen=True, eq=False)
class Closure:
    """Cells that every stage computes: lists are int64, and ascend by position.

    Args:
        rows, columns: [r], [c], the y and x of the lines that ask: of fresh cells; of those that the last conv reads.
        fresh: [F], positions whose tokens are made anew. active: [R], where the active ones stand among them.
        entering: reads of a 3x3 conv from the active set to `fresh`, where there is one before the rows.
        entering_tiles, tiles: of that conv, and of the last one; None where they would not pay.
        found: [M], positions where rows find something new. found_fresh: [F], where `fresh` stand among them.
        row_keys, row_asks: what rows look at (fresh cells alone where nothing was recorded), and `found` by row.
        read: positions that the last conv reads, the active ones first. reads: where they stand among its [R + G].
        asking: [Q], where those of `read` that were found stand among `found`; read_asking: [Q], where among `read`.
        column_keys, column_asks: what columns look at, and `read` by column.
        rim: [E], which active rows lie beside the frame or their box's. outside: bool [E, 9, 1], their taps beyond it.
    """

    rows: Tensor
    columns: Tensor
    fresh: Tensor
    active: Tensor
    entering: KernelMap | None
    entering_tiles: Tiles | None
    found: Tensor
    found_fresh: Tensor
    row_keys: Keys | Lines
    row_asks: Lines
    read: Tensor
    reads: Tensor
    asking: Tensor
    read_asking: Tensor
    column_keys: Keys | Lines
    column_asks: Lines
    tiles: Tiles | None
    rim: Tensor
    outside: Tensor


_KNOWN: WeakKeyDictionary[Level, dict[tuple[bool, bool], Closure]] = WeakKeyDictionary()


def closure_of(level: Level, *, conv: bool, recorded: bool) -> Closure:
    """What a block computes at a level; made once.

    Args:
        conv: a 3x3 conv comes before the rows. recorded: the source had the block.
    """
    known = _KNOWN.setdefault(level, {})
    if (conv, recorded) not in known:
        known[conv, recorded] = _made(level, conv, recorded)
    return known[conv, recorded]


def boxes(grid: Tensor) -> Tensor:
    """Bool [H, W]: the boxes around the connected parts of another such grid, together."""
    from scipy import ndimage

    around = torch.zeros_like(grid)
    for box in ndimage.find_objects(ndimage.label(grid.numpy(), structure=[[1] * 3] * 3)[0]):
        around[box] = True
    return around


def _made(level: Level, conv: bool, recorded: bool) -> Closure:
    height, width, same = level.height, level.width, level.same
    active = _grid(level.active.cpu(), level)
    grown = _grid(level.read_positions.cpu(), level)
    if recorded:
        anew = grown if conv else active
        crossed = anew.any(1)[:, None] & grown.any(0)
    else:
        anew = crossed = boxes(active)
        grown &= crossed
    fresh, found = _cells(anew), _cells(crossed)
    reads = grown.flatten()[level.read_positions.cpu()].nonzero()[:, 0]
    read = level.read_positions.cpu()[reads]
    asking = crossed.flatten()[read]
    rows, columns = anew.any(1).nonzero()[:, 0], grown.any(0).nonzero()[:, 0]
    by_row = _Direction(rows, _among(rows, height), width, recorded)
    by_column = _Direction(columns, _among(columns, width), height, recorded)
    there = torch.zeros(
        len(level.read_positions) + 1, dtype=torch.bool
    )  # its table reads the row of zeros beyond the frame
    there[reads] = True
    beyond = ~there[same.table.cpu()].view(-1, TAPS)
    rim = beyond.any(1).nonzero()[:, 0]
    stands = _among(found, level.size)
    entering = kernel_map_to(active, anew) if conv else None
    made = Closure(
        rows,
        columns,
        fresh,
        _among(fresh, level.size)[level.active.cpu()],
        entering,
        tiles_of(entering.table, fresh, width, level.rows + len(entering.halo)) if entering else None,
        found,
        stands[fresh],
        by_row.keys(rows[:, None] * width + torch.arange(width), fresh // width, fresh % width),
        by_row.lines(found // width),
        read,
        reads,
        stands[read[asking]],
        asking.nonzero()[:, 0],
        by_column.keys(columns[:, None] + torch.arange(height) * width, found % width, found // width),
        by_column.lines(read % width),
        tiles_of(same.table.cpu(), level.active.cpu(), width, len(level.read_positions)),
        rim,
        beyond[rim, :, None],
    )
    moved: Closure = _to(made, level.active.device)
    return moved


@dataclass(frozen=True, eq=False)
class _Direction:
    """The lines of one direction: their coordinates, which line has a coordinate, their length."""

    coordinates: Tensor
    line: Tensor
    length: int
    recorded: bool

    def keys(self, whole: Tensor, line: Tensor, along: Tensor) -> Keys | Lines:
        """What is looked at: positions [lines, length], or fresh cells on lines at these coordinates alone."""
        if self.recorded:
            return Keys(whole.flatten(), self.line[line] * self.length + along)
        return self.lines(line)

    def lines(self, coordinates: Tensor) -> Lines:
        """Cells on lines at these coordinates, line by line; every line has one."""
        line, count = self.line[coordinates], len(self.coordinates)
        order, counts = line.argsort(stable=True), line.bincount(minlength=count)
        longest, starts = int(counts.max()), counts.cumsum(0) - counts
        slots = line[order] * longest + torch.arange(len(line)) - starts[line[order]]
        at = order[starts].repeat_interleave(longest)
        at[slots], back = order, torch.empty_like(order)
        back[order] = slots
        real = torch.zeros(count * longest, dtype=torch.bool)
        real[slots] = True
        return Lines(at, back, None if real.all() else real.view(count, longest))


def _grid(positions: Tensor, level: Level) -> Tensor:
    """Bool [H, W]."""
    grid = torch.zeros(level.size, dtype=torch.bool)
    grid[positions] = True
    return grid.view(level.height, level.width)


def _cells(grid: Tensor) -> Tensor:
    return grid.flatten().nonzero()[:, 0]


def _among(listed: Tensor, size: int) -> Tensor:
    """Where each of `size` numbers stands in a list; -1 for others."""
    slots = torch.full((size,), -1)
    slots[listed] = torch.arange(len(listed))
    return slots


def _to(value: Any, device: torch.device) -> Any:
    """A value with all tensors in it on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not isinstance(value, Closure | Keys | Lines | KernelMap | Tiles | Crop):
        return value
    return replace(value, **{field.name: _to(getattr(value, field.name), device) for field in fields(value)})
