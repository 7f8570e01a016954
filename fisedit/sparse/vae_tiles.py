"""Rectangles of latent cells: what a decoder computes for a mask at its fine resolutions, and what all of it costs.

The coarse resolutions are computed row by row over recorded maps, as the UNet is. Fine maps are too large to record:
there cells lie in rectangles with a halo, and a box is cut again at the finer resolution. Pure geometry.
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

LEVELS = 4
"""Resolutions of a decoder: 1, 2, 4 and 8 cells per latent cell and side."""

ROWS = 2
"""How many of them, from the coarsest on, are computed row by row."""

GROWTH = 1
"""Latent cells around the mask that the rows cover. Over 14 edits of the demo model decodes were 43.1 dB from dense
(median, inside the mask), with two cells 45.3, with none 29.3."""

HALO = 2
"""Cells around a box, at its own resolution: one cell was 39.6 dB, three were 43.5."""

SHARES = (0.1, 0.2, 0.35, 0.35)
"""Of a dense decode's multiply-accumulates at each resolution, about, for SD 1.5's autoencoder."""

CALL = 4.0
"""What one more box costs besides, at one resolution, in latent cells of a dense decode."""

Areas = tuple[tuple[int, int], ...]
"""For every level, coarsest first: cells that the upsampler before it gives (at the coarsest: cells that are read), and
cells that its own layers compute."""

WHOLE_FROM = 0.5
"""Share of a dense decode from which a sparse one is not worth its error."""

SMALL = 512
"""Latent cells of a frame up to which it is decoded whole: there a dense decode is little beside the steps."""


@dataclass(frozen=True)
class Box:
    """A rectangle of cells: rows top..bottom, columns left..right, ends exclusive."""

    top: int
    left: int
    bottom: int
    right: int

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

    def halved(self) -> Box:
        """The smallest rectangle around this one on a grid twice as coarse."""
        return Box(self.top // 2, self.left // 2, -(-self.bottom // 2), -(-self.right // 2))

    def grown(self, cells: int, height: int, width: int) -> Box:
        """Larger by `cells` on every side, clipped to the grid."""
        top, left = max(0, self.top - cells), max(0, self.left - cells)
        return Box(top, left, min(height, self.bottom + cells), min(width, self.right + cells))

    def within(self, outer: Box) -> Box:
        """This rectangle in the coordinates of `outer`."""
        return Box(self.top - outer.top, self.left - outer.left, self.bottom - outer.top, self.right - outer.left)


def with_halo(box: Box, level: int, shape: tuple[int, int]) -> Box:
    """What is computed for a box at a level, in its cells; `shape` is the frame's (h, w) in latent cells."""
    factor = 2**level
    return box.scaled(factor).grown(HALO, factor * shape[0], factor * shape[1])


def before_upsampling(box: Box, level: int, shape: tuple[int, int]) -> Box:
    """What an upsampler before a level must see to compute the box and its halo there, in the cells of the level above
    it: the convolution behind the upsampling looks one cell farther."""
    factor = 2**level
    return with_halo(box, level, shape).grown(1, factor * shape[0], factor * shape[1]).halved()


def boxes(grid: BoolGrid) -> list[Box]:
    """Rectangles of cells that cover the mask at the first fine level. Where the frame is `SMALL`, or the decode they
    belong to costs more than `WHOLE_FROM` of a dense one, it is the whole frame, decoded exactly.

    Args:
        grid: booleans [h, w]. No cell of the mask is in two boxes; an empty mask has none.
    """
    frame = Box(0, 0, *grid.shape)
    found = cut(grid, frame, ROWS) if grid.any() else []
    cost = sum(SHARES[:ROWS]) * rows(grid).sum()
    cost += sum(_cost(box, level, grid.shape) for level, at in _levels(grid, found) for box in at)
    small = frame.area <= SMALL and grid.any()
    return [frame] if small or cost > WHOLE_FROM * frame.area else found


def rows(grid: BoolGrid) -> BoolGrid:
    """The latent cells [h, w] that the coarse levels compute."""
    return dilate(grid, GROWTH)


def cut(grid: BoolGrid, box: Box, level: int) -> list[Box]:
    """The tight box around a box's cells, cut where pieces cost less at this level; finer ones are cut again later."""
    box = _tight(grid, box)
    cost = partial(_cost, level=level, shape=grid.shape)
    halves = min(_halves(grid, box), key=lambda pair: sum(map(cost, pair)), default=())
    if not halves or sum(map(cost, halves)) >= cost(box):
        return [box]
    return [piece for half in halves for piece in cut(grid, half, level)]


def _cost(box: Box, level: int, shape: tuple[int, int]) -> float:
    """Of a box at one level, in latent cells of a dense decode."""
    return SHARES[level] * with_halo(box, level, shape).area / 4**level + CALL if box.area else 0.0


def _halves(grid: BoolGrid, box: Box) -> Iterator[tuple[Box, Box]]:
    """Every way to cut a box in two along a row or a column, each half drawn tight around its cells."""
    for row in range(box.top + 1, box.bottom):
        above, below = replace(box, bottom=row), replace(box, top=row)
        yield _tight(grid, above), _tight(grid, below)
    for column in range(box.left + 1, box.right):
        left, right = replace(box, right=column), replace(box, left=column)
        yield _tight(grid, left), _tight(grid, right)


def _tight(grid: BoolGrid, box: Box) -> Box:
    """The smallest box around the cells within `box`; of no area where there are none."""
    rows, columns = (np.flatnonzero(grid[box.slices].any(axis)) for axis in (1, 0))
    if not len(rows):
        return replace(box, bottom=box.top, right=box.left)
    top, left = box.top + int(rows[0]), box.left + int(columns[0])
    return Box(top, left, box.top + int(rows[-1]) + 1, box.left + int(columns[-1]) + 1)


def _levels(grid: BoolGrid, found: list[Box]) -> Iterator[tuple[int, list[Box]]]:
    """Every fine level and its boxes, in latent cells."""
    yield ROWS, found
    for level in range(ROWS + 1, LEVELS):
        found = [piece for box in found for piece in cut(grid, box, level)]
        yield level, found


def frame_areas(cells: int) -> Areas:
    """What a dense decode of so many latent cells computes."""
    return tuple((4**level * cells, 4**level * cells) for level in range(LEVELS))


def box_areas(grid: BoolGrid) -> Areas:
    """What a sparse decode of the mask computes."""
    found = boxes(grid)
    if found == [Box(0, 0, *grid.shape)]:
        return frame_areas(grid.size)
    cells = rows(grid)
    areas = list(frame_areas(int(cells.sum()))[:ROWS])
    areas[0] = int(dilate(cells, 1).sum()), areas[0][1]
    for level, at in _levels(grid, found):
        read = sum(before_upsampling(box, level, grid.shape).area for box in at)
        areas.append((4 * read, sum(with_halo(box, level, grid.shape).area for box in at)))
    return tuple(areas)
