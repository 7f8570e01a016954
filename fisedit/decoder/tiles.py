"""Rectangles of latent cells: what a decoder computes for a mask at its fine levels, and what all of it costs.

The coarse levels are computed on active rows over cached maps, as the UNet is. Fine maps are too large to cache: there
cells lie in boxes with a halo, and a box is cut again at the next level. Pure geometry; knows nothing about tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fisedit.sparse_kernels.dilation import dilate

if TYPE_CHECKING:
    from fisedit.values import BoolGrid

NUM_LEVELS = 4
"""Resolutions of a decoder, coarsest first: level l has 2 ** l cells per latent cell and side."""

COARSE_LEVELS = 2
"""The number of levels, from the coarsest on, that are computed on active rows."""

DILATION = 1
"""Latent cells by which the coarse levels dilate the mask. Over 14 edits of the demo model decodes were 43.1 dB from
dense ones (median, inside the mask), with two cells 45.3, with none 29.3."""

HALO = 4
"""Cells around a box, of its own level.

Pixels beside a box, by which its boundary is blended, were compared with a dense decode's. They were 44.7 dB from it
with four (median of 12 edits of the demo model), 37.5 with two and 44.9 with six. Those inside were 47.5."""

MACS_SHARES = (0.1, 0.2, 0.35, 0.35)
"""Each level's share of a dense decode's multiply-accumulates, about, for SD 1.5's autoencoder."""

BOX_OVERHEAD = 4.0
"""Cost of one more box at one level beside its cells, in latent cells of a dense decode."""

DENSE_SHARE = 0.5
"""Share of a dense decode's cost from which the frame is decoded densely."""

DENSE_CELLS = 512
"""Latent cells of a frame up to which it is decoded densely: there a decode is little beside the steps."""

MIN_SIDE = 2
"""Latent cells of a padded box's shortest side, of which all others are multiples."""

Areas = tuple[tuple[int, int], ...]
"""Two counts of cells for every level, coarsest first.

The first is those that the upsampler before it gives, or at the coarsest those that are read. The second is those that
its own layers compute."""


@dataclass(frozen=True)
class Box:
    """A rectangle of cells: rows top..bottom, columns left..right, ends exclusive."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) in cells."""
        return self.bottom - self.top, self.right - self.left

    @property
    def area(self) -> int:
        """Number of cells."""
        return (self.bottom - self.top) * (self.right - self.left)

    @property
    def slices(self) -> tuple[slice, slice]:
        """To index the last two dimensions with."""
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def scaled(self, factor: int) -> Box:
        """The same rectangle on a grid `factor` times finer."""
        return Box(self.top * factor, self.left * factor, self.bottom * factor, self.right * factor)

    def coarsened(self, factor: int) -> Box:
        """The smallest rectangle around this one on a grid `factor` times coarser."""
        return Box(self.top // factor, self.left // factor, -(-self.bottom // factor), -(-self.right // factor))

    def dilated(self, cells: int) -> Box:
        """Larger by `cells` on every side."""
        return Box(self.top - cells, self.left - cells, self.bottom + cells, self.right + cells)

    def clipped(self, outer: Box) -> Box:
        """The part inside `outer`."""
        top, left = max(self.top, outer.top), max(self.left, outer.left)
        return Box(top, left, min(self.bottom, outer.bottom), min(self.right, outer.right))

    def within(self, outer: Box) -> Box:
        """This rectangle in the coordinates of `outer`."""
        return Box(self.top - outer.top, self.left - outer.left, self.bottom - outer.top, self.right - outer.left)


def with_halo(box: Box, level: int, shape: tuple[int, int]) -> Box:
    """Return the box that is computed for a box at a level, in that level's cells.

    Args:
        box: in latent cells.
        level: a fine one.
        shape: (h, w) of the frame in latent cells.
    """
    factor = 2**level
    return box.scaled(factor).dilated(HALO).clipped(Box(0, 0, *shape).scaled(factor))


def with_padding(box: Box, level: int, limits: Box) -> Box:
    """A box with at least the halo of `with_halo`, whose sides are of few lengths; all in latent cells.

    Args:
        box: within the limits.
        level: a fine one.
        limits: what the result lies in.
    """
    dilated = box.dilated(-(-HALO // 2**level)).clipped(limits)
    top, bottom = _padded_side(dilated.top, dilated.bottom, limits.top, limits.bottom)
    left, right = _padded_side(dilated.left, dilated.right, limits.left, limits.right)
    return Box(top, left, bottom, right)


def _padded_side(low: int, high: int, first: int, last: int) -> tuple[int, int]:
    """Ends of a side from `low` to `high` that is lengthened to a multiple of an eighth of the next power of two.

    At the finest level a square of 25 % of SD 1.5's latents becomes 1.5 times its cells, one of 5 % 1.3 times.
    """
    length = high - low
    step = max(MIN_SIDE, (1 << (length - 1).bit_length()) // 8)
    padded = min(-(-length // step) * step, last - first)
    start = min(max(first, low - (padded - length) // 2), last - padded)
    return start, start + padded


def upsampler_input(outer: Box) -> Box:
    """Return what an upsampler reads so that its conv gives the cells of `outer`, in cells of the coarser level.

    It goes beyond the frame too: the conv behind the interpolation reads one cell farther.
    """
    return outer.dilated(1).coarsened(2)


def boxes(grid: BoolGrid) -> list[Box]:
    """Boxes that cover a mask at the first fine level; the whole frame where a dense decode is preferred.

    Args:
        grid: booleans [h, w], the mask.

    Returns:
        Boxes in latent cells, none for an empty mask; no cell of the mask is in two. The frame alone if it has at most
        `DENSE_CELLS`, or if a sparse decode costs more than `DENSE_SHARE` of a dense one.
    """
    frame = Box(0, 0, *grid.shape)
    found = cut(grid, frame, COARSE_LEVELS) if grid.any() else []
    cost = sum(MACS_SHARES[:COARSE_LEVELS]) * coarse_cells(grid).sum()
    cost += sum(_cost(box, level, grid.shape) for level, at in _levels(grid, found) for box in at)
    small = frame.area <= DENSE_CELLS and grid.any()
    return [frame] if small or cost > DENSE_SHARE * frame.area else found


def coarse_cells(grid: BoolGrid) -> BoolGrid:
    """The latent cells [h, w] that the coarse levels compute for a mask [h, w]."""
    return dilate(grid, DILATION)


def cut(grid: BoolGrid, box: Box, level: int) -> list[Box]:
    """Cut a box into pieces where these cost less at a level.

    Args:
        grid: booleans [h, w], the mask.
        box: in latent cells.
        level: a fine one.

    Returns:
        Boxes in latent cells, each tight around its cells of the mask.
    """
    box = _bounding_box(grid, box)
    cost = partial(_cost, level=level, shape=grid.shape)
    halves = min(_halves(grid, box), key=lambda pair: sum(map(cost, pair)), default=())
    if not halves or sum(map(cost, halves)) >= cost(box):
        return [box]
    return [piece for half in halves for piece in cut(grid, half, level)]


def _cost(box: Box, level: int, shape: tuple[int, int]) -> float:
    """Return the cost of a box at one level, in latent cells of a dense decode."""
    return MACS_SHARES[level] * with_halo(box, level, shape).area / 4**level + BOX_OVERHEAD if box.area else 0.0


def _input_box(box: Box, level: int, shape: tuple[int, int]) -> Box:
    """Return what the upsampler before a level reads for a box, in cells of the coarser level."""
    return upsampler_input(with_halo(box, level, shape)).clipped(Box(0, 0, *shape).scaled(2 ** (level - 1)))


def _halves(grid: BoolGrid, box: Box) -> Iterator[tuple[Box, Box]]:
    """Every way to cut a box in two along a row or a column, each half drawn tight around its cells."""
    for row in range(box.top + 1, box.bottom):
        above, below = replace(box, bottom=row), replace(box, top=row)
        yield _bounding_box(grid, above), _bounding_box(grid, below)
    for column in range(box.left + 1, box.right):
        left, right = replace(box, right=column), replace(box, left=column)
        yield _bounding_box(grid, left), _bounding_box(grid, right)


def _bounding_box(grid: BoolGrid, box: Box) -> Box:
    """The smallest box around the cells within `box`; of no area where there are none."""
    rows, columns = (np.flatnonzero(grid[box.slices].any(axis)) for axis in (1, 0))
    if not len(rows):
        return replace(box, bottom=box.top, right=box.left)
    top, left = box.top + int(rows[0]), box.left + int(columns[0])
    return Box(top, left, box.top + int(rows[-1]) + 1, box.left + int(columns[-1]) + 1)


def _levels(grid: BoolGrid, found: list[Box]) -> Iterator[tuple[int, list[Box]]]:
    """Every fine level and its boxes, in latent cells."""
    yield COARSE_LEVELS, found
    for level in range(COARSE_LEVELS + 1, NUM_LEVELS):
        found = [piece for box in found for piece in cut(grid, box, level)]
        yield level, found


def frame_areas(cells: int) -> Areas:
    """Return the areas that a dense decode computes.

    Args:
        cells: latent cells of the frame.
    """
    return tuple((4**level * cells, 4**level * cells) for level in range(NUM_LEVELS))


def box_areas(grid: BoolGrid) -> Areas:
    """Return the areas that a sparse decode computes for a mask, booleans [h, w]."""
    found = boxes(grid)
    if found == [Box(0, 0, *grid.shape)]:
        return frame_areas(grid.size)
    cells = coarse_cells(grid)
    areas = list(frame_areas(int(cells.sum()))[:COARSE_LEVELS])
    areas[0] = int(dilate(cells, 1).sum()), areas[0][1]
    for level, at in _levels(grid, found):
        read = sum(_input_box(box, level, grid.shape).area for box in at)
        areas.append((4 * read, sum(with_halo(box, level, grid.shape).area for box in at)))
    return tuple(areas)
