"""What a `Region` is bound to, asks for and comes to, and its points and widths, checked.

Knows grids of latent cells; not how regions are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fisedit.errors import InputError, as_text
from fisedit.values import LATENT_FACTOR, EditMask, MaskSource, are_numbers, soft_levels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.masking.mask_options import MaskOptions
    from fisedit.values import BoolGrid, Box

    Levels = NDArray[np.uint8]
    Points = tuple[tuple[float, float], ...]

WHOLE = 255
"""Level of a cell that may change from the first step on."""

MAX_POINTS = 64
"""Points of a region inside, and as many outside."""


@dataclass(frozen=True)
class RegionCanvas:
    """What regions are bound to.

    Args:
        height: of the canvas in pixels, divisible by 8.
        width: of the canvas in pixels, divisible by 8.
        size: width and height of the picture in pixels.
        crop: the part of the picture that is on the canvas; None for all of it.
        strict: what marks nothing on that part is refused; else it is empty there.
        steps: of the edit, as many as words may be localized by; None where none is run.
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


class RegionScope(Protocol):
    """What a region asks of the picture that is edited."""

    @property
    def cells(self) -> tuple[int, int]:
        """(height, width) of the grid of latent cells."""

    def by_words(self, options: MaskOptions) -> tuple[EditMask, str]:
        """The mask of words, and why it is the whole picture, or ""."""

    def by_points(self, inside: Points, outside: Points) -> BoolGrid:
        """The cells of the things under some points of the canvas, without those under others: booleans [h, w]."""


@dataclass(frozen=True, eq=False)
class RegionMask:
    """What a region is on a picture.

    Args:
        mask: its cells.
        reason: why they are the whole picture where the region did not ask for all of it, or "".
    """

    mask: EditMask
    reason: str = ""

    @property
    def levels(self) -> Levels:
        """How much every cell may change, uint8 [h, w]."""
        return levels_of(self.mask)


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


def cell_span(low: float, high: float, scale: float, count: int) -> slice:
    """The cells that an interval of pixels reaches into."""
    return slice(max(0, int(np.floor(low * scale))), min(count, int(np.ceil(high * scale))))


def levels_of(mask: EditMask) -> Levels:
    """How much every cell of a mask may change, uint8 [h, w]."""
    return mask.grid.astype(np.uint8) * WHOLE if mask.levels is None else mask.levels


def mask_of(levels: Levels, source: MaskSource) -> EditMask:
    """The mask of some levels, uint8 [h, w]."""
    return EditMask(levels > 0, source, levels=soft_levels(levels))


def with_levels(found: RegionMask, levels: Levels) -> RegionMask:
    """A mask with other levels, uint8 [h, w]."""
    return replace(found, mask=replace(found.mask, grid=levels > 0, levels=soft_levels(levels)))


def joined_mask(found: Sequence[RegionMask], levels: Levels) -> RegionMask:
    """A mask of several: as sure as the least sure of them."""
    by_words = [one.mask for one in found if one.mask.source is MaskSource.ATTENTION]
    least = min(by_words, key=lambda mask: mask.confidence, default=found[0].mask)
    mask = replace(least, grid=levels > 0, levels=soft_levels(levels))
    return RegionMask(mask, next((one.reason for one in found if one.reason), ""))


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
