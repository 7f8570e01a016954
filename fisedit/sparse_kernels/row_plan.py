"""EditMask grid -> SparsePlan: which rows of every level are computed, which are read, and how 3x3 convs find them.

Knows index arithmetic only: no features, no model, no mask making. Features of active positions are kept as compact
matrices of rows, so every linear, norm and activation is plain; only a 3x3 conv needs the neighbour table built here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from fisedit.values import BoolGrid

TAPS = 9


@dataclass(frozen=True, eq=False)
class Crop:
    """The bounding box of a conv's outputs, for one dense conv over a crop.

    Args:
        table: int64 [(sH + 3 - s) * (sW + 3 - s)], rows of [active | halo | zero] that fill the crop, row-major.
        height, width: size of the crop the conv reads.
        pick: int64 [R_out], the wanted outputs among the conv's H * W.
    """

    table: Tensor
    height: int
    width: int
    output_index: Tensor


@dataclass(frozen=True, eq=False)
class KernelMap:
    """What a 3x3 conv reads: `table` int64 [R_out * 9] indexes [active rows | halo rows | one zero row].

    Args:
        table: neighbour rows of every output row, in the weight's (ky, kx) order.
        halo: int64 [G], positions of the input level that are read but not active.
        stride: 1 or 2.
        window: the crop that covers the same outputs.
    """

    table: Tensor
    halo: Tensor
    stride: int
    crop: Crop
    _batched_tables: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def batched_table(self, batch: int, count: int) -> Tensor:
        """`table` of several items that lie one after another, `count` rows each: int64 [B * R_out * 9]."""
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
        """Outputs the dense conv over the crop computes per output wanted, at least 1."""
        height, width = ((n - 3) // self.stride + 1 for n in (self.crop.height, self.crop.width))
        return height * width / max(1, self.rows_out)


@dataclass(frozen=True, eq=False)
class Level:
    """One resolution of the UNet.

    Args:
        height, width: the map's grid.
        active: int64 [R], flat positions computed by an edit, ascending.
        same, down, up: reads of a 3x3 conv at this level, of the downsampler that leaves it and of the upsampler that
            leaves it (None where there is none).
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
        """Whether an edit computes every position."""
        return self.rows == self.size

    @cached_property
    def row_of_position(self) -> Tensor:
        """int64 [H * W]: the active row that holds a position, -1 for inactive ones."""
        return _row_of_position(self.size, self.active)

    @cached_property
    def read_positions(self) -> Tensor:
        """int64 [R + G]: positions of the active rows, then of the halo rows of `same`."""
        return torch.cat([self.active, self.same.halo])


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """Active rows and reads for every level, finest first."""

    levels: tuple[Level, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Active rows of each level."""
        return tuple(level.rows for level in self.levels)


def make_plan(grid: BoolGrid, depth: int, device: torch.device | str = "cpu") -> SparsePlan:
    """The plan that computes exactly the cells of `grid`.

    Args:
        grid: booleans [h, w], the latent cells to compute, at least one of them.
        depth: number of resolutions of the UNet, at least 1.
        device: where the index tables live.

    Returns:
        A plan whose level l + 1 is active wherever one of its 2x2 cells of level l is.
    """
    active = _active(grid, depth)
    return SparsePlan(tuple(_level(active, i, torch.device(device)) for i in range(depth)))


def count_active_rows(grid: BoolGrid, depth: int) -> tuple[int, ...]:
    """Active rows of each level of `make_plan`'s plan, which need not be made for them."""
    return tuple(int(level.sum()) for level in _active(grid, depth))


def _active(grid: BoolGrid, depth: int) -> list[Tensor]:
    """The active cells of every level, finest first: bool [H, W]."""
    active = [torch.from_numpy(grid.copy())]
    for _ in range(depth - 1):
        active.append(_any_pool(active[-1]))
    return active


def kernel_map_to(active: Tensor, outputs: Tensor) -> KernelMap:
    """KernelMap of a 3x3 conv from active cells, with a halo of its own, to other cells: bool [H, W], on the CPU."""
    return _reads(active, outputs, _strided(outputs.shape, 1), 1)


def _level(active: list[Tensor], i: int, device: torch.device) -> Level:
    here = active[i]
    down = _reads(here, active[i + 1], _strided(here.shape, 2), 2) if i + 1 < len(active) else None
    up = _reads(here, active[i - 1], _nearest(here.shape, active[i - 1].shape), 1) if i else None
    same = _reads(here, here, _strided(here.shape, 1), 1)
    height, width = here.shape
    level = Level(height, width, _positions(here), same, down, up)
    return _to(level, device)


def _any_pool(grid: Tensor) -> Tensor:
    return F.max_pool2d(grid[None, None].float(), 2, ceil_mode=True)[0, 0] > 0


def _positions(grid: Tensor) -> Tensor:
    return grid.flatten().nonzero().squeeze(1)


def _row_of_position(size: int, positions: Tensor) -> Tensor:
    row_of_position = torch.full((size,), -1, device=positions.device)
    row_of_position[positions] = torch.arange(positions.numel(), device=positions.device)
    return row_of_position


def _strided(shape: torch.Size, stride: int) -> Tensor:
    """The grid that a conv slides over, as flat input positions [H, W] (the input itself)."""
    height, width = shape
    return torch.arange(height * width).view(height, width)


def _nearest(coarse: torch.Size, fine: torch.Size) -> Tensor:
    """The grid an upsampler's conv slides over: coarse positions [H_fine, W_fine], as torch's nearest puts them."""
    height, width = coarse
    positions = torch.arange(height * width, dtype=torch.float64).view(1, 1, height, width)
    return F.interpolate(positions, size=tuple(fine), mode="nearest")[0, 0].long()


def _reads(inputs: Tensor, outputs: Tensor, slid: Tensor, stride: int) -> KernelMap:
    """The reads of a padded 3x3 conv that slides over `slid` and computes the active cells of `outputs`."""
    padded = F.pad(slid, (1, stride + 1, 1, stride + 1), value=-1)
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
    down, up = (_reads_to(reads, device) if reads else None for reads in (level.down, level.up))
    return Level(level.height, level.width, level.active.to(device), _reads_to(level.same, device), down, up)


def _reads_to(reads: KernelMap, device: torch.device) -> KernelMap:
    table = reads.crop.table.to(device)
    crop_index = Crop(table, reads.crop.height, reads.crop.width, reads.crop.output_index.to(device))
    return KernelMap(reads.table.to(device), reads.halo.to(device), reads.stride, crop_index)
