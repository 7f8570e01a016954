"""The canvas that a `Region` is bound to, its scope and its mask, and its points and widths, checked.

Knows grids of latent cells; not how regions are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fisedit.errors import InputError, as_text
from fisedit.masking.masks import cells_of_pixels
from fisedit.values import LATENT_FACTOR, EditMask, MaskSource, are_numbers, over_pixels, soft_levels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.masking.mask_options import MaskOptions
    from fisedit.values import BoolGrid, Box

    Levels = NDArray[np.uint8]
    Combine = Callable[..., Levels]
    """Levels of one mask or more, all of one shape -> levels of that shape."""

    Points = tuple[tuple[float, float], ...]

WHOLE = 255
"""Level of a cell that may change from the first step on."""

MAX_POINTS = 64
"""Points of a region inside, and as many outside."""


@dataclass(frozen=True)
class RegionCanvas:
    """The canvas that regions are bound to.

    Args:
        height: The height of the canvas in pixels, divisible by 8.
        width: The width of the canvas in pixels, divisible by 8.
        size: width and height of the picture in pixels.
        crop: the part of the picture that is on the canvas; None for all of it.
        strict: what marks nothing on that part is refused; else it is empty there.
        steps: The number of steps of the edit, as many as words may be localized by; None where none is run.
    """

    height: int
    width: int
    size: tuple[int, int]
    crop: Box | None = None
    strict: bool = True
    steps: int | None = None

    @property
    def cells(self) -> tuple[int, int]:
        """(height, width) of the grid of latent cells."""
        return self.height // LATENT_FACTOR, self.width // LATENT_FACTOR

    @property
    def part(self) -> Box:
        """The part of the picture that is on the canvas."""
        return self.crop or (0, 0, *self.size)


class RegionScope(Protocol):
    """The scope of a region: the facts that it asks of the picture that is edited."""

    @property
    def cells(self) -> tuple[int, int]:
        """(height, width) of the grid of latent cells."""

    def by_words(self, options: MaskOptions) -> tuple[EditMask, str]:
        """The mask of words, and why it is the whole picture, or ""."""

    def by_points(self, inside: Points, outside: Points) -> BoolGrid:
        """The cells of the things under some points of the canvas, without those under others: booleans [h, w]."""


@dataclass(frozen=True, eq=False)
class RegionMask:
    """The mask of a region on a picture.

    Args:
        mask: its cells.
        reason: why they are the whole picture where the region did not ask for all of it, or "".
        pixels: how much every pixel may change, uint8 [H, W] of the part of the picture that is on the canvas; None
            where cells alone say.
        least: how much the pixel of every cell may change that may change least, uint8 [h, w]; None where all pixels of
            a cell are alike.
    """

    mask: EditMask
    reason: str = ""
    pixels: Levels | None = None
    least: Levels | None = None

    @property
    def levels(self) -> Levels:
        """Return how much every cell may change, uint8 [h, w]."""
        return levels_of(self.mask)

    @property
    def least_levels(self) -> Levels:
        """`least`, or `levels` where the pixels of every cell are alike."""
        return self.levels if self.least is None else self.least

    def levels_over(self, shape: tuple[int, ...]) -> Levels:
        """Return how much every pixel may change, uint8 [H, W], of a part of the picture of this shape."""
        return over_pixels(self.levels, (shape[1], shape[0])) if self.pixels is None else self.pixels

    def kept_to_pixels(self) -> EditMask:
        """The mask with the share of every pixel that is taken from what its cell paints, and the cells that have any.

        A cell changes as much as the pixel of it that may change most; the others take less of that.
        """
        if self.pixels is None:
            return self.mask
        size, levels = (self.pixels.shape[1], self.pixels.shape[0]), self.levels.copy()
        levels[cells_of_pixels(self.pixels, levels.shape) == 0] = 0
        painted = over_pixels(levels, size)
        shares = np.divide(self.pixels, painted, out=np.zeros(painted.shape, np.float32), where=painted > 0)
        pixels = np.rint(np.minimum(shares, 1) * WHOLE).astype(np.uint8)
        is_whole = np.array_equal(pixels > 0, painted > 0) and (pixels[painted > 0] == WHOLE).all()
        mask = replace(self.mask, grid=levels > 0, levels=soft_levels(levels))
        return mask if is_whole else replace(mask, pixels=pixels)


def check_points(points: Iterable[tuple[float, float]]) -> Points:
    """Pairs of numbers, at most 64. Raises InputError for something else."""
    found = tuple(points) if isinstance(points, Iterable) else points
    if not isinstance(found, tuple) or not all(are_numbers(at, 2) for at in found):
        raise InputError(f"points must be pairs (x, y) of pixels, got {as_text(points)}")
    if len(found) > MAX_POINTS:
        raise InputError(f"a region must have at most {MAX_POINTS} points, got {len(found)}; draw a mask")
    return tuple((float(x), float(y)) for x, y in found)


def axes_of(box: Sequence[float], part: Box) -> list[tuple[float, float, int, int]]:
    """A box's two ends and a part's, across and down."""
    return [(box[i], box[i + 2], part[i], part[i + 2]) for i in (0, 1)]


def covered(low: float, high: float, least: int, most: int) -> NDArray[np.float64]:
    """The share of every pixel from `least` to `most` that an interval covers: floats [most - least]."""
    pixels = np.arange(least, most)
    shares: NDArray[np.float64] = np.clip(np.minimum(pixels + 1, high) - np.maximum(pixels, low), 0, 1)
    return shares


def levels_of(mask: EditMask) -> Levels:
    """Return how much every cell of a mask may change, uint8 [h, w]."""
    return mask.grid.astype(np.uint8) * WHOLE if mask.levels is None else mask.levels


def mask_of(levels: Levels, source: MaskSource) -> EditMask:
    """The mask of some levels, uint8 [h, w]."""
    return EditMask(levels > 0, source, levels=soft_levels(levels))


def with_levels(found: RegionMask, combine: Combine, *others: RegionMask) -> RegionMask:
    """A mask with other levels.

    Args:
        found: the mask.
        combine: makes its new levels of its own and those of others, of cells and of pixels alike.
        others: further masks.
    """
    every = (found, *others)
    levels, pixels = combine(*(one.levels for one in every)), None
    if shape := next((one.pixels.shape for one in every if one.pixels is not None), None):
        pixels = combine(*(one.levels_over(shape) for one in every))
    least = combine(*(one.least_levels for one in every)) if any(one.least is not None for one in every) else None
    mask = replace(found.mask, grid=levels > 0, levels=soft_levels(levels))
    return replace(found, mask=mask, pixels=pixels, least=least)


def joined_mask(one: RegionMask, other: RegionMask, combine: Combine) -> RegionMask:
    """A mask of two: as sure as the less sure of them.

    Args:
        one: the first.
        other: the second.
        combine: makes levels of both's.
    """
    by_words = [each.mask for each in (one, other) if each.mask.source is MaskSource.ATTENTION]
    least_sure = min(by_words, key=lambda mask: mask.confidence, default=one.mask)
    mask = replace(least_sure, grid=one.mask.grid, levels=one.mask.levels)
    return with_levels(replace(one, mask=mask, reason=one.reason or other.reason), combine, other)


def check_border(widths: object) -> Box:
    """Widths in pixels of a border at the left, top, right and bottom. Raises InputError for another value.

    Args:
        widths: four whole numbers from 0, not all 0, or one for all sides.
    """
    sides: Any = (widths,) * 4 if type(widths) is int else widths
    if not (are_numbers(sides, 4) and all(type(side) is int and side >= 0 for side in sides) and any(sides)):
        raise InputError(
            f"a border must be pixels at the left, top, right and bottom, not all 0, got {as_text(widths)}"
        )
    left, top, right, bottom = sides
    return left, top, right, bottom
