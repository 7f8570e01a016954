"""A `Region`, where an edit may paint, built from words, masks, boxes, points and regions by union and the like.

`bind` checks a region against a picture before anything runs; `resolve` then gives its mask. Knows grids of latent
cells; where words attend and what lies under points, a `RegionScope` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import numpy as np

from fisedit.errors import InputError, MaskError, as_text
from fisedit.masking import masks
from fisedit.masking.mask_options import DEFAULT_METHOD, MaskOptions
from fisedit.masking.region_values import (
    WHOLE,
    RegionCanvas,
    RegionMask,
    axes_of,
    check_border,
    check_points,
    covered,
    joined_mask,
    mask_of,
    with_levels,
)
from fisedit.values import MAX_DILATION, EditMask, MaskSource, are_numbers, over_pixels

if TYPE_CHECKING:
    from fisedit.masking.region_values import Levels, Points, RegionScope
    from fisedit.values import BoolGrid, Box


class Region(ABC):
    """The part of a picture where an edit may paint.

    `Region.words()` is where the changed words attend, the default of every edit; `a | b`, `a & b` and `a - b` are the
    cells of either, of both, and of the first alone.
    """

    @staticmethod
    def words(
        *words: str, instance: int | None = None, method: str = DEFAULT_METHOD, probe_steps: int | None = None
    ) -> Region:
        """Return the region where words attend.

        Args:
            words: The words of either prompt; none for the changed ones.
            instance: The index of a component, counted from the left and from 0; None for all.
            method: one of `masking.mask_options.METHODS`.
            probe_steps: dense steps on the new prompt to spend; None for one where an object is inserted.

        Raises:
            InputError: an argument out of range.
        """
        return _Words(MaskOptions(words, instance, method, probe_steps))

    @staticmethod
    def mask(mask: object, *, soft: bool = False) -> Region:
        """A given mask.

        Args:
            mask: A PIL image, which is scaled to the picture's size, or a numpy array of that size. A boolean grid of
                latent cells and an `EditMask` are masks too. Black pixels keep their bytes, and grey ones are mixed.
            soft: True if grey says how much may change (Differential Diffusion, arXiv 2306.00950). A cell then joins at
                the step at which an edit of that strength would begin. Else what is at least half white is inside.
        """
        return _Given(mask, soft)

    @staticmethod
    def box(left: float, top: float, right: float, bottom: float) -> Region:
        """A box, in pixels of the picture.

        Args:
            left: its first column.
            top: its first row.
            right: behind its last column.
            bottom: behind its last row.

        Raises:
            InputError: no numbers, or nothing between them.
        """
        return _Box((left, top, right, bottom))

    @staticmethod
    def points(*inside: tuple[float, float], outside: Iterable[tuple[float, float]] = ()) -> Region:
        """The things under some points, by the source's self-attention and its colours (see `masking.segments`).

        Args:
            inside: (x, y) in pixels of the picture, one or more, of what the edit may paint.
            outside: (x, y) of what it may not.

        Raises:
            InputError: no point, more than 64, or no numbers.
        """
        return _Points(check_points(inside), check_points(outside))

    @staticmethod
    def border(left: int = 0, top: int = 0, right: int = 0, bottom: int = 0) -> Region:
        """The pixels within so many of a side, as a larger canvas adds them.

        Args:
            left: width in pixels, 0 or more.
            top: height in pixels, 0 or more.
            right: width in pixels, 0 or more.
            bottom: height in pixels, 0 or more.

        Raises:
            InputError: another number, or no border.
        """
        return _Border(check_border((left, top, right, bottom)))

    @staticmethod
    def everywhere() -> Region:
        """The whole picture."""
        return _Everywhere()

    @staticmethod
    def union(regions: Iterable[Region]) -> Region:
        """Return the region where any of some regions is. Raises InputError where there is none."""
        found = tuple(regions) if isinstance(regions, Iterable) else ()
        if not found or not all(isinstance(region, Region) for region in found):
            raise InputError(f"a union must be of one or more Regions, got {as_text(regions)}")
        return reduce(or_, found)

    def grow(self, cells: int) -> Region:
        """This region and all within so many latent cells of it; without those where negative.

        Args:
            cells: -64 to 64.

        Raises:
            InputError: another number.
        """
        if type(cells) is not int or not -MAX_DILATION <= cells <= MAX_DILATION:
            raise InputError(f"grow must be latent cells in [-{MAX_DILATION}, {MAX_DILATION}], got {as_text(cells)}")
        return _Grown(self, cells) if cells else self

    def feather(self, cells: int) -> Region:
        """This region with a soft border: within so many cells of the outside less may change.

        Args:
            cells: width of the border in latent cells, 0 to 64.

        Raises:
            InputError: another number.
        """
        if type(cells) is not int or not 0 <= cells <= MAX_DILATION:
            raise InputError(f"feather must be latent cells in [0, {MAX_DILATION}], got {as_text(cells)}")
        return _Feathered(self, cells) if cells else self

    def unless_unsure(self, least: float = masks.SURE) -> Region:
        """This region where words point at it with some confidence; else it finds nothing, as words that say the same.

        Joined to a mask by `|` it leaves the mask alone then.

        Args:
            least: The confidence, 0 to 1.
        """
        return _Sure(self, least)

    def with_changed(self, changed: Region, *, alone: bool) -> Region:
        """This region and what changed elsewhere, but for what this one protects.

        Args:
            changed: cells that are edited too.
            alone: they are edited alone, where words find nothing as they say the same.
        """
        return _WithChanged(self, changed, alone)

    def __or__(self, other: Region) -> Region:
        """The cells of either."""
        return _Union(self, other) if isinstance(other, Region) else NotImplemented

    def __and__(self, other: Region) -> Region:
        """The cells of both."""
        return _Intersection(self, other) if isinstance(other, Region) else NotImplemented

    def __sub__(self, other: Region) -> Region:
        """The cells of this one that the other does not have."""
        return _Difference(self, other) if isinstance(other, Region) else NotImplemented

    @abstractmethod
    def bind(self, canvas: RegionCanvas) -> Region:
        """This region for a picture, checked. Raises MaskError for what does not fit it."""

    @abstractmethod
    def resolve(self, scope: RegionScope) -> RegionMask:
        """The cells of a bound region."""

    @property
    def is_default(self) -> bool:
        """Return whether the region is where the changed words attend, and nothing else is said."""
        return False

    @property
    def is_empty(self) -> bool:
        """Return whether a bound region is a given mask without a cell."""
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on the masks of a bound region."""
        return ()

    @property
    def named_words(self) -> tuple[str, ...]:
        """The words that are named in it."""
        return ()

    @property
    def reads_words(self) -> bool:
        """Return whether words have a part in the region."""
        return False

    @property
    def reads_attention(self) -> bool:
        """Return whether words or points have a part in it, so that it has no place before its picture is opened."""
        return self.reads_words

    def protected(self, scope: RegionScope) -> BoolGrid:
        """Cells [h, w] of a bound region that were taken out of it, whatever it may grow to."""
        return np.zeros(scope.cells, bool)


@dataclass(frozen=True, eq=False)
class _Words(Region):
    options: MaskOptions

    def bind(self, canvas: RegionCanvas) -> Region:
        probes = self.options.probe_steps or 0
        if canvas.steps is not None and probes > canvas.steps:
            raise InputError(
                f"probe_steps must be at most the picture's {canvas.steps} steps, got {as_text(probes)}; use fewer"
            )
        return self

    def resolve(self, scope: RegionScope) -> RegionMask:
        return RegionMask(*scope.by_words(self.options))

    @property
    def is_default(self) -> bool:
        return not self.options.words

    @property
    def named_words(self) -> tuple[str, ...]:
        return tuple(self.options.words)

    @property
    def reads_words(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class _Cells(Region):
    """Bound: the levels of a given mask; the other values as in `RegionMask`."""

    levels: Levels
    pixels: Levels | None = None
    least: Levels | None = None
    note: str = ""

    def bind(self, canvas: RegionCanvas) -> Region:
        if self.levels.shape != canvas.cells:
            raise MaskError(f"a region for {self.levels.shape} cells cannot be used on {canvas.cells}")
        return self

    def resolve(self, scope: RegionScope) -> RegionMask:
        return RegionMask(mask_of(self.levels, MaskSource.GIVEN), "", self.pixels, self.least)

    @property
    def is_empty(self) -> bool:
        return not self.levels.any()

    @property
    def notes(self) -> tuple[str, ...]:
        return (self.note,) if self.note else ()


@dataclass(frozen=True, eq=False)
class _Given(Region):
    given: object = field(repr=False)
    soft: bool

    def bind(self, canvas: RegionCanvas) -> Region:
        place = canvas.height, canvas.width, canvas.size, canvas.crop
        found = masks.place_mask(self.given, *place, soft=self.soft, strict=canvas.strict)
        return _Cells(found.levels, found.pixels, None if found.pixels is None else found.least, found.note)

    def resolve(self, scope: RegionScope) -> RegionMask:
        raise AssertionError("a mask is bound before it is resolved")


def _cells_of(pixels: Levels, canvas: RegionCanvas) -> Region:
    """A bound region of pixels, uint8 [H, W] of the part of the picture that is on a canvas: cells with any of them."""
    most, least = (masks.cells_of_pixels(pixels, canvas.cells, extreme) for extreme in (np.maximum, np.minimum))
    levels = (most > 0).astype(np.uint8) * WHOLE
    if np.array_equal(pixels, over_pixels(levels, (pixels.shape[1], pixels.shape[0]))):
        return _Cells(levels)
    return _Cells(levels, pixels, (least == WHOLE).astype(np.uint8) * WHOLE)


@dataclass(frozen=True)
class _Box(Region):
    sides: tuple[float, float, float, float]

    def __post_init__(self) -> None:
        if not are_numbers(self.sides, 4):
            raise InputError(f"a box must be four numbers left, top, right, bottom, got {as_text(self.sides)}")
        left, top, right, bottom = self.sides
        if left >= right or top >= bottom:
            raise InputError(f"a box must have left < right and top < bottom, got {self.sides}")

    def bind(self, canvas: RegionCanvas) -> Region:
        part = canvas.part
        if any(high <= least or low >= most for low, high, least, most in axes_of(self.sides, part)):
            if canvas.crop and not canvas.strict:
                return _Cells(np.zeros(canvas.cells, np.uint8))
            where = f"the opened part {part} of the picture" if canvas.crop else "the picture's {}x{} pixels"
            raise MaskError(f"a box must lie on {where.format(*canvas.size)}, got {self.sides}")
        across, down = (covered(*axis) for axis in axes_of(self.sides, part))
        return _cells_of(np.rint(np.multiply.outer(down, across) * WHOLE).astype(np.uint8), canvas)

    def resolve(self, scope: RegionScope) -> RegionMask:
        raise AssertionError("a box is bound before it is resolved")


@dataclass(frozen=True)
class _Points(Region):
    """Args: as of `Region.points`; on the canvas once it is bound."""

    inside: Points
    outside: Points

    def __post_init__(self) -> None:
        if not self.inside:
            raise InputError("a region of points must have one (x, y) inside, got none")

    def bind(self, canvas: RegionCanvas) -> Region:
        """Points beside an opened part of the picture mark nothing there."""
        left, top, right, bottom = canvas.crop or (0, 0, *canvas.size)
        width, height = canvas.size
        inside, outside = (
            tuple((x - left, y - top) for x, y in points if left <= x < right and top <= y < bottom)
            for points in (self.inside, self.outside)
        )
        if strange := next((at for at in self.inside if not (0 <= at[0] < width and 0 <= at[1] < height)), None):
            raise MaskError(f"a point must lie on the picture's {width}x{height} pixels, got {strange}")
        if not inside:
            if canvas.strict:
                raise MaskError(f"a point must lie on the opened part {canvas.crop} of the picture, got {self.inside}")
            return _Cells(np.zeros(canvas.cells, np.uint8))
        scale = canvas.width / (right - left), canvas.height / (bottom - top)
        return _PickedCells(*(tuple((x * scale[0], y * scale[1]) for x, y in each) for each in (inside, outside)))

    def resolve(self, scope: RegionScope) -> RegionMask:
        raise AssertionError("points are bound before they are resolved")

    @property
    def reads_attention(self) -> bool:
        return True


class _PickedCells(_Points):
    """Bound: points in pixels of the canvas."""

    def bind(self, canvas: RegionCanvas) -> Region:
        return self

    def resolve(self, scope: RegionScope) -> RegionMask:
        return RegionMask(EditMask(scope.by_points(self.inside, self.outside), MaskSource.GIVEN))


@dataclass(frozen=True)
class _Border(Region):
    widths: Box

    def bind(self, canvas: RegionCanvas) -> Region:
        (width, height), (left, top, right, bottom) = canvas.size, self.widths
        if left + right >= width or top + bottom >= height:
            raise MaskError(f"a border must leave some of the picture's {width}x{height} pixels, got {self.widths}")
        pixels = np.full((height, width), WHOLE, np.uint8)
        pixels[top : height - bottom, left : width - right] = 0
        left, top, right, bottom = canvas.part
        return _cells_of(pixels[top:bottom, left:right], canvas)

    def resolve(self, scope: RegionScope) -> RegionMask:
        raise AssertionError("a border is bound before it is resolved")


class _Everywhere(Region):
    def bind(self, canvas: RegionCanvas) -> Region:
        return _Cells(np.full(canvas.cells, WHOLE, np.uint8))

    def resolve(self, scope: RegionScope) -> RegionMask:
        raise AssertionError("a region is bound before it is resolved")


@dataclass(frozen=True, eq=False)
class _Changed(Region):
    """Another region, changed."""

    region: Region

    def bind(self, canvas: RegionCanvas) -> Region:
        return replace(self, region=self.region.bind(canvas))

    @property
    def notes(self) -> tuple[str, ...]:
        return self.region.notes

    @property
    def named_words(self) -> tuple[str, ...]:
        return self.region.named_words

    @property
    def reads_words(self) -> bool:
        return self.region.reads_words

    @property
    def reads_attention(self) -> bool:
        return self.region.reads_attention

    @property
    def is_default(self) -> bool:
        return self.region.is_default

    @property
    def is_empty(self) -> bool:
        return self.region.is_empty

    def protected(self, scope: RegionScope) -> BoolGrid:
        return self.region.protected(scope) & ~self.resolve(scope).mask.grid


@dataclass(frozen=True, eq=False)
class _Sure(_Changed):
    least: float

    def resolve(self, scope: RegionScope) -> RegionMask:
        found = self.region.resolve(scope)
        if found.mask.source is not MaskSource.ATTENTION or found.mask.confidence >= self.least:
            return found
        return replace(found, reason=f"the words point there with a confidence of {found.mask.confidence:.2f} alone")


@dataclass(frozen=True, eq=False)
class _Grown(_Changed):
    cells: int

    def resolve(self, scope: RegionScope) -> RegionMask:
        from scipy.ndimage import maximum_filter, minimum_filter

        found, grows = self.region.resolve(scope), self.cells > 0
        extreme, beyond = (maximum_filter, 0) if grows else (minimum_filter, WHOLE)

        def grown(levels: Levels) -> Levels:
            """Grow the levels of pixels, by as many as the cells have."""
            reach = [round(abs(self.cells) * n / m) for n, m in zip(levels.shape, found.levels.shape, strict=True)]
            filtered: Levels = extreme(levels, size=[2 * n + 1 for n in reach], mode="constant", cval=beyond)
            return filtered

        return with_levels(found, grown)


@dataclass(frozen=True, eq=False)
class _Feathered(_Changed):
    cells: int

    def resolve(self, scope: RegionScope) -> RegionMask:
        from scipy.ndimage import distance_transform_cdt

        found = self.region.resolve(scope)
        depth = distance_transform_cdt(np.pad(found.levels > 0, 1, constant_values=True), "chessboard")[1:-1, 1:-1]
        share = np.minimum(1, depth / (self.cells + 1))
        if not (found.levels == 0).any():
            return found

        def feathered(levels: Levels) -> Levels:
            softer: Levels = np.rint(levels * over_pixels(share, (levels.shape[1], levels.shape[0]))).astype(np.uint8)
            return softer

        return with_levels(found, feathered)

    @property
    def is_default(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class _Combined(Region):
    left: Region
    right: Region

    def bind(self, canvas: RegionCanvas) -> Region:
        """Parts of it may lie beside an opened part of the picture, but not all of it."""
        left, right = (side.bind(replace(canvas, strict=False)) for side in (self.left, self.right))
        if canvas.strict and left.is_empty and right.is_empty:
            left = self.left.bind(canvas)
        return replace(self, left=left, right=right)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.left.notes, *self.right.notes)))

    @property
    def named_words(self) -> tuple[str, ...]:
        return (*self.left.named_words, *self.right.named_words)

    @property
    def reads_words(self) -> bool:
        return self.left.reads_words or self.right.reads_words

    @property
    def reads_attention(self) -> bool:
        return self.left.reads_attention or self.right.reads_attention


class _Union(_Combined):
    @property
    def is_empty(self) -> bool:
        return self.left.is_empty and self.right.is_empty

    def resolve(self, scope: RegionScope) -> RegionMask:
        """Return the union; what words do not find is left to the other side."""
        found = self.left.resolve(scope), self.right.resolve(scope)
        for one, other in (found, found[::-1]):
            if one.reason and not other.reason:
                return other
        return joined_mask(*found, np.maximum)

    def protected(self, scope: RegionScope) -> BoolGrid:
        return self.left.protected(scope) & self.right.protected(scope)


@dataclass(frozen=True, eq=False)
class _WithChanged(_Combined):
    alone: bool

    def resolve(self, scope: RegionScope) -> RegionMask:
        found = self.right.resolve(scope) if self.alone else _Union(self.left, self.right).resolve(scope)
        kept = self.left.protected(scope)
        return with_levels(found, lambda levels: levels * ~over_pixels(kept, (levels.shape[1], levels.shape[0])))

    def protected(self, scope: RegionScope) -> BoolGrid:
        return self.left.protected(scope)


class _Intersection(_Combined):
    @property
    def is_empty(self) -> bool:
        return self.left.is_empty or self.right.is_empty

    def resolve(self, scope: RegionScope) -> RegionMask:
        found = self.left.resolve(scope), self.right.resolve(scope)
        joined = joined_mask(*found, np.minimum)
        return joined if all(one.reason for one in found) else replace(joined, reason="")

    def protected(self, scope: RegionScope) -> BoolGrid:
        """Return the protected cells: those of either side, and those with a pixel outside of a side without words.

        The latter stay protected, however far the other side grows.
        """
        found = self.left.protected(scope) | self.right.protected(scope)
        for side in (self.left, self.right):
            if not side.reads_words:
                found = found | (side.resolve(scope).least_levels == 0)
        return found


class _Difference(_Combined):
    def bind(self, canvas: RegionCanvas) -> Region:
        """Bind both sides. What is taken away may lie beside an opened part of the picture."""
        return replace(self, left=self.left.bind(canvas), right=self.right.bind(replace(canvas, strict=False)))

    def resolve(self, scope: RegionScope) -> RegionMask:
        """Take the right region away; of a soft one, what is left of each cell stays.

        A cell goes where all its pixels go.
        """
        found, out = self.left.resolve(scope), self.right.resolve(scope)
        if out.reason:
            return found

        def rest(levels: Levels, taken: Levels) -> Levels:
            left: Levels = np.minimum(levels, WHOLE - taken)
            return left

        swapped = replace(out, mask=mask_of(out.least_levels, MaskSource.GIVEN), least=out.levels)
        return with_levels(found, rest, swapped if out.pixels is not None else out)

    @property
    def is_default(self) -> bool:
        return self.left.is_default

    @property
    def is_empty(self) -> bool:
        return self.left.is_empty

    def protected(self, scope: RegionScope) -> BoolGrid:
        out = self.right.resolve(scope)
        own = np.zeros(scope.cells, bool) if out.reason else out.mask.grid
        return self.left.protected(scope) | own
