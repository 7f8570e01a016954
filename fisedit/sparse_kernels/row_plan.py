"""Sparse plans: which rows of every level an edit computes, which it reads, and the kernel maps of 3x3 convs.

Knows index arithmetic only: no features, no model, no mask making. Features of active positions are kept as compact
matrices of rows, so every linear, norm and activation is plain. Only a 3x3 conv needs the neighbour table built here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from fisedit.values import BoolGrid

TAPS = 9
"""Weights of a 3x3 conv for one pair of channels."""


@dataclass(frozen=True, eq=False)
class Crop:
    """The input region that a dense conv reads to compute the bounding box of a sparse conv's outputs.

    Args:
        table: int64 [height * width], row-major: indices into [active rows | halo rows | one zero row].
        height: The height of the region, in positions.
        width: The width of the region, in positions.
        output_index: int64 [R_out], the wanted outputs among those of the dense conv, flat.
    """

    table: Tensor
    height: int
    width: int
    output_index: Tensor


@dataclass(frozen=True, eq=False)
class KernelMap:
    """The input rows that a sparse 3x3 conv multiplies for every output row.

    Args:
        table: Indices of every output row, int64 [R_out * 9], in the weight's (ky, kx) order. They point into
            [active rows | halo rows | one zero row].
        halo: int64 [G], positions of the input level that are read but not active.
        stride: 1 or 2.
        crop: the input region of a dense conv that covers the same outputs.
    """

    table: Tensor
    halo: Tensor
    stride: int
    crop: Crop
    _batched_tables: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def batched_table(self, batch: int, count: int) -> Tensor:
        """`table` for several items whose rows follow one another in one matrix.

        Args:
            batch: items, B.
            count: rows of each item.

        Returns:
            int64 [B * R_out * 9].
        """
        key = batch, count
        if key not in self._batched_tables:
            starts = torch.arange(0, batch * count, count, device=self.table.device)[:, None]
            self._batched_tables[key] = (starts + self.table).flatten()
        return self._batched_tables[key]

    @property
    def rows_out(self) -> int:
        """Number of output rows."""
        return self.table.numel() // TAPS

    @cached_property
    def waste(self) -> float:
        """Outputs that the dense conv over the crop computes for one that is wanted, at least 1."""
        height, width = ((n - 3) // self.stride + 1 for n in (self.crop.height, self.crop.width))
        return height * width / max(1, self.rows_out)


@dataclass(frozen=True, eq=False)
class Level:
    """One resolution of the UNet.

    Args:
        height: The height of the map, in positions.
        width: The width of the map, in positions.
        active: int64 [R], flat positions computed by an edit, ascending.
        same: kernel map of a 3x3 conv at this level.
        down: kernel map of the downsampler's conv from this level, or None where there is none.
        up: kernel map of the upsampler's conv from this level, or None where there is none.
    """

    height: int
    width: int
    active: Tensor
    same: KernelMap
    down: KernelMap | None
    up: KernelMap | None

    @property
    def size(self) -> int:
        """Number of positions, H * W."""
        return self.height * self.width

    @property
    def rows(self) -> int:
        """Number of active rows, R."""
        return self.active.numel()

    @property
    def whole(self) -> bool:
        """Return whether an edit computes every position."""
        return self.rows == self.size

    @cached_property
    def row_of_position(self) -> Tensor:
        """int64 [H * W], the active row of every position, -1 for inactive ones."""
        return _row_of_position(self.size, self.active)

    @cached_property
    def read_positions(self) -> Tensor:
        """int64 [R + G]: positions of the active rows, then of the halo rows of `same`."""
        return torch.cat([self.active, self.same.halo])


@dataclass(frozen=True, eq=False)
class HiddenKeys:
    """Positions of a level whose keys the active rows among them do not attend to.

    Args:
        inside: int64, the active rows at hidden positions.
        outside: int64, the other active rows, which attend to every position.
        visible: int64, the positions that are not hidden, at least one.
    """

    inside: Tensor
    outside: Tensor
    visible: Tensor


@dataclass(frozen=True, eq=False)
class TextPart:
    """Active rows of a level that attend to a part of the text alone.

    Args:
        rows: int64, the active rows.
        tokens: The tokens of the text that they attend to.
    """

    rows: Tensor
    tokens: slice


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """Active rows and kernel maps of every level, finest first.

    Args:
        levels: The levels of the UNet.
        hidden: keys that self-attention leaves out, by level, None where it reads them all; () for all levels.
        text_parts: by level the parts of the text and the rows that attend to them, each row to one; () where every
            row attends to all of it.
    """

    levels: tuple[Level, ...]
    hidden: tuple[HiddenKeys | None, ...] = ()
    text_parts: tuple[tuple[TextPart, ...], ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Active rows of each level."""
        return tuple(level.rows for level in self.levels)


def make_row_plan(grid: BoolGrid, num_levels: int, device: torch.device | str = "cpu") -> SparsePlan:
    """Make the plan that computes exactly the cells of `grid`.

    Args:
        grid: booleans [h, w], the latent cells to compute, at least one of them.
        num_levels: resolutions of the UNet, at least 1.
        device: where the index tables live.

    Returns:
        A plan whose level l + 1 is active wherever one of its 2x2 cells of level l is.
    """
    active = _active(grid, num_levels)
    return SparsePlan(tuple(_level(active, i, torch.device(device)) for i in range(num_levels)))


def hide_keys(plan: SparsePlan, grid: BoolGrid) -> SparsePlan:
    """The same plan in which cells do not attend to one another, as an erased object does not to itself (Attentive
    Eraser, arXiv 2412.12974). A level that they cover as a whole reads all keys.

    Args:
        plan: The plan whose active rows hold the cells.
        grid: booleans [h, w], the cells.
    """
    cells = _active(grid, len(plan.levels))
    return replace(plan, hidden=tuple(map(_hidden, plan.levels, cells)))


def _hidden(level: Level, cells: Tensor) -> HiddenKeys | None:
    if cells.all():
        return None
    hidden = cells.flatten().to(level.active.device)
    is_inside = hidden[level.active]
    return HiddenKeys(_positions(is_inside), _positions(~is_inside), _positions(~hidden))


def divide_text(plan: SparsePlan, grids: Sequence[BoolGrid], lengths: Sequence[int]) -> SparsePlan:
    """The same plan in which cells attend to the text of their own region.

    A cell attends to the text of the first region that holds it. A cell of a coarser map attends to that of the first
    region that holds any of its cells. Cells in no region attend to the first text.

    Args:
        plan: The plan whose active rows hold the regions.
        grids: booleans [h, w] of the regions.
        lengths: tokens of the first text and of each region's, which follow one another.
    """
    regions = [_active(grid, len(plan.levels)) for grid in grids]
    ends = list(accumulate(lengths))
    tokens = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]

    def parts(i: int, level: Level) -> Iterator[TextPart]:
        number = torch.zeros(level.size, dtype=torch.long)
        for text in reversed(range(len(regions))):
            number[regions[text][i].flatten()] = text + 1
        of_row = number.to(level.active.device)[level.active]
        for text, span in enumerate(tokens):
            if len(rows := _positions(of_row == text)):
                yield TextPart(rows, span)

    return replace(plan, text_parts=tuple(tuple(parts(i, level)) for i, level in enumerate(plan.levels)))


def count_active_rows(grid: BoolGrid, num_levels: int) -> tuple[int, ...]:
    """Count the active rows of a plan without making it.

    Args:
        grid: booleans [h, w], the latent cells to compute.
        num_levels: resolutions of the UNet, at least 1.

    Returns:
        Rows of each level, finest first.
    """
    return tuple(int(level.sum()) for level in _active(grid, num_levels))


def _active(grid: BoolGrid, num_levels: int) -> list[Tensor]:
    """The active cells of every level, finest first: bool [H, W]."""
    active = [torch.from_numpy(grid.copy())]
    for _ in range(num_levels - 1):
        active.append(_any_pool(active[-1]))
    return active


def kernel_map_to(active: Tensor, outputs: Tensor) -> KernelMap:
    """Make the kernel map of a 3x3 conv between two sets of cells of one level, with a halo of its own.

    Args:
        active: bool [H, W], cells whose rows are there; on the CPU.
        outputs: bool [H, W], cells to compute; on the CPU.
    """
    return _kernel_map(active, outputs, _all_positions(outputs.shape), 1)


def _level(active: list[Tensor], i: int, device: torch.device) -> Level:
    cells = active[i]
    down = _kernel_map(cells, active[i + 1], _all_positions(cells.shape), 2) if i + 1 < len(active) else None
    up = _kernel_map(cells, active[i - 1], _upsampled_positions(cells.shape, active[i - 1].shape), 1) if i else None
    same = _kernel_map(cells, cells, _all_positions(cells.shape), 1)
    height, width = cells.shape
    level = Level(height, width, _positions(cells), same, down, up)
    return _to(level, device)


def _any_pool(grid: Tensor) -> Tensor:
    return F.max_pool2d(grid[None, None].float(), 2, ceil_mode=True)[0, 0] > 0


def _positions(grid: Tensor) -> Tensor:
    return grid.flatten().nonzero().squeeze(1)


def _row_of_position(size: int, positions: Tensor) -> Tensor:
    row_of_position = torch.full((size,), -1, device=positions.device)
    row_of_position[positions] = torch.arange(positions.numel(), device=positions.device)
    return row_of_position


def _all_positions(shape: torch.Size) -> Tensor:
    """Flat positions [H, W] of a map."""
    height, width = shape
    return torch.arange(height * width).view(height, width)


def _upsampled_positions(coarse: torch.Size, fine: torch.Size) -> Tensor:
    """Coarse positions [H_fine, W_fine] of an upsampled map, as torch's nearest interpolation repeats them."""
    height, width = coarse
    positions = torch.arange(height * width, dtype=torch.float64).view(1, 1, height, width)
    return F.interpolate(positions, size=tuple(fine), mode="nearest")[0, 0].long()


def _kernel_map(inputs: Tensor, outputs: Tensor, positions: Tensor, stride: int) -> KernelMap:
    """The kernel map of a padded 3x3 conv over `positions` [H, W] that computes the active cells of `outputs`."""
    padded = F.pad(positions, (1, stride + 1, 1, stride + 1), value=-1)
    out = outputs.nonzero() * stride
    taps = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    y, x = (out[:, None, :] + taps[None]).unbind(-1)
    neighbours = padded[y, x].flatten()
    active = _positions(inputs)
    row_of_position = _row_of_position(inputs.numel(), active)
    needed = neighbours[neighbours >= 0].unique()
    halo = needed[row_of_position[needed] < 0]
    row_of_position[halo] = active.numel() + torch.arange(halo.numel())
    zero = torch.tensor([active.numel() + halo.numel()])
    row_of_position = torch.cat(
        [torch.where(row_of_position < 0, zero, row_of_position), zero]
    )  # position -1, outside the frame, reads zeros
    return KernelMap(row_of_position[neighbours], halo, stride, _crop(outputs, padded, row_of_position, stride))


def _crop(outputs: Tensor, padded: Tensor, row_of_position: Tensor, stride: int) -> Crop:
    cells = outputs.nonzero()
    if not len(cells):
        cells = torch.zeros(1, 2, dtype=torch.long)
    (top, left), (bottom, right) = cells.amin(0).tolist(), cells.amax(0).tolist()
    crop = padded[top * stride : bottom * stride + 3, left * stride : right * stride + 3]
    output_index = _positions(outputs[top : bottom + 1, left : right + 1])
    height, width = crop.shape
    return Crop(row_of_position[crop.flatten()], height, width, output_index)


def _to(level: Level, device: torch.device) -> Level:
    down, up = (_map_to(each, device) if each else None for each in (level.down, level.up))
    return Level(level.height, level.width, level.active.to(device), _map_to(level.same, device), down, up)


def _map_to(kernel_map: KernelMap, device: torch.device) -> KernelMap:
    crop = kernel_map.crop
    crop = replace(crop, table=crop.table.to(device), output_index=crop.output_index.to(device))
    return KernelMap(kernel_map.table.to(device), kernel_map.halo.to(device), kernel_map.stride, crop)
