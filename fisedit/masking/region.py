"""Where an edit may paint: a `Region`, built from words, masks, boxes, points and other regions by union and the like.

`bind` checks a region against a picture before anything runs; `resolve` then gives its mask. Knows grids of latent
cells; where words attend and what lies under points, a `RegionScope` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fisedit.errors import InputError, MaskError, as_text
from fisedit.masking import masks
from fisedit.masking.mask_options import DEFAULT_METHOD, MaskOptions
from fisedit.values import (
    LATENT_FACTOR,
    MAX_DILATION,
    MAX_REGIONS,
    EditMask,
    MaskSource,
    are_numbers,
    cell_pixels,
    soft_levels,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.values import BoolGrid, Box

    Levels = NDArray[np.uint8]
    Points = tuple[tuple[float, float], ...]

_WHOLE = 255

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
        reason: why they are the whole picture though nobody said so, or "".
    """

    mask: EditMask
    reason: str = ""

    @property
    def levels(self) -> Levels:
        """How much every cell may change, uint8 [h, w]."""
        return _levels(self.mask)


class Region(ABC):
    """Where an edit may paint.

    `Region.words()` is where the changed words attend, the default of every edit; `a | b`, `a & b` and `a - b` are the
    cells of either, of both, and of the first alone.
    """

    @staticmethod
    def words(
        *words: str, instance: int | None = None, method: str = DEFAULT_METHOD, probe_steps: int | None = None
    ) -> Region:
        """Where words attend.

        Args:
            words: of either prompt; none for the changed ones.
            instance: which component alone, counted from the left and from 0.
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
            mask: a PIL image or numpy array of the picture's size, a boolean grid of latent cells, or an `EditMask`.
            soft: whether grey says how much may change (Differential Diffusion, arXiv 2306.00950): a cell joins at the
                step at which an edit of that strength would begin. Else what is at least half white is inside.
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
        return _Points(_checked_points(inside), _checked_points(outside))

    @staticmethod
    def border(left: int = 0, top: int = 0, right: int = 0, bottom: int = 0) -> Region:
        """The cells of which every pixel lies within so many pixels of a side, as a larger canvas adds them.

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
        """Where any of some regions is. Raises InputError where there is none."""
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
        """Whether it is where the changed words attend, and nothing else is said."""
        return False

    @property
    def is_empty(self) -> bool:
        """Whether a bound region is a given mask without a cell."""
        return False

    @property
    def named_words(self) -> tuple[str, ...]:
        """The words that are named in it."""
        return ()

    @property
    def reads_words(self) -> bool:
        """Whether words have a part in it."""
        return False

    @property
    def reads_attention(self) -> bool:
        """Whether words or points have a part in it, so that it has no place before its picture is opened."""
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
    """Bound: the levels of a given mask."""

    levels: Levels

    def bind(self, canvas: RegionCanvas) -> Region:
        if self.levels.shape != canvas.cells:
            raise MaskError(f"a region for {self.levels.shape} cells cannot be used on {canvas.cells}")
        return self

    def resolve(self, scope: RegionScope) -> RegionMask:
        return RegionMask(_mask(self.levels, MaskSource.GIVEN))

    @property
    def is_empty(self) -> bool:
        return not self.levels.any()


@dataclass(frozen=True, eq=False)
class _Given(Region):
    given: object = field(repr=False)
    soft: bool

    def bind(self, canvas: RegionCanvas) -> Region:
        place = canvas.height, canvas.width, canvas.size, canvas.crop
        if self.soft:
            return _Cells(masks.levels_of_mask(self.given, *place, strict=canvas.strict))
        return _Cells(masks.grid_of_mask(self.given, *place, strict=canvas.strict).astype(np.uint8) * _WHOLE)

    def resolve(self, scope: RegionScope) -> RegionMask:
        raise AssertionError("a mask is bound before it is resolved")


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
        part = canvas.crop or (0, 0, *canvas.size)
        if any(high <= least or low >= most for low, high, least, most in _axes(self.sides, part)):
            if canvas.crop and not canvas.strict:
                return _Cells(np.zeros(canvas.cells, np.uint8))
            where = f"the opened part {part} of the picture" if canvas.crop else "the picture's {}x{} pixels"
            raise MaskError(f"a box must lie on {where.format(*canvas.size)}, got {self.sides}")
        levels = np.zeros(canvas.cells, np.uint8)
        horizontal, vertical = (
            _span(low - least, high - least, n / (most - least), n)
            for n, (low, high, least, most) in zip(canvas.cells[::-1], _axes(self.sides, part), strict=True)
        )
        levels[vertical, horizontal] = _WHOLE
        return _Cells(levels)

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
        inner = _Box((left, top, width - right, height - bottom)).bind(replace(canvas, strict=False))
        assert isinstance(inner, _Cells)
        if canvas.strict and inner.levels.all():
            cells = f"the canvas's {canvas.cells[1]}x{canvas.cells[0]} cells of {width}x{height} pixels"
            raise MaskError(f"a border must hold one of {cells}, got {self.widths}; make it wider")
        return _Cells(_WHOLE - inner.levels)

    def resolve(self, scope: RegionScope) -> RegionMask:
        raise AssertionError("a border is bound before it is resolved")


class _Everywhere(Region):
    def bind(self, canvas: RegionCanvas) -> Region:
        return _Cells(np.full(canvas.cells, _WHOLE, np.uint8))

    def resolve(self, scope: RegionScope) -> RegionMask:
        raise AssertionError("a region is bound before it is resolved")


@dataclass(frozen=True, eq=False)
class _Grown(Region):
    region: Region
    cells: int

    def bind(self, canvas: RegionCanvas) -> Region:
        return replace(self, region=self.region.bind(canvas))

    def resolve(self, scope: RegionScope) -> RegionMask:
        from scipy.ndimage import maximum_filter, minimum_filter

        found = self.region.resolve(scope)
        window = 2 * abs(self.cells) + 1
        if self.cells > 0:
            levels = maximum_filter(found.levels, size=window, mode="constant", cval=0)
        else:
            levels = minimum_filter(found.levels, size=window, mode="constant", cval=_WHOLE)
        return _with_levels(found, levels)

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
class _Feathered(_Grown):
    def resolve(self, scope: RegionScope) -> RegionMask:
        from scipy.ndimage import distance_transform_cdt

        found = self.region.resolve(scope)
        depth = distance_transform_cdt(np.pad(found.levels > 0, 1, constant_values=True), "chessboard")[1:-1, 1:-1]
        share = np.minimum(1, depth / (self.cells + 1)) if (found.levels == 0).any() else 1.0
        return _with_levels(found, np.rint(found.levels * share).astype(np.uint8))

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
        """What words do not find is left to the other side."""
        found = self.left.resolve(scope), self.right.resolve(scope)
        for one, other in (found, found[::-1]):
            if one.reason and not other.reason:
                return other
        return _joined(found, np.maximum(found[0].levels, found[1].levels))

    def protected(self, scope: RegionScope) -> BoolGrid:
        return self.left.protected(scope) & self.right.protected(scope)


@dataclass(frozen=True, eq=False)
class _WithChanged(_Combined):
    alone: bool

    def resolve(self, scope: RegionScope) -> RegionMask:
        found = self.right.resolve(scope) if self.alone else _Union(self.left, self.right).resolve(scope)
        levels = found.levels.copy()
        levels[self.left.protected(scope)] = 0
        return _with_levels(found, levels)

    def protected(self, scope: RegionScope) -> BoolGrid:
        return self.left.protected(scope)


class _Intersection(_Combined):
    @property
    def is_empty(self) -> bool:
        return self.left.is_empty or self.right.is_empty

    def resolve(self, scope: RegionScope) -> RegionMask:
        found = self.left.resolve(scope), self.right.resolve(scope)
        joined = _joined(found, np.minimum(found[0].levels, found[1].levels))
        return joined if all(one.reason for one in found) else replace(joined, reason="")

    def protected(self, scope: RegionScope) -> BoolGrid:
        """What lies outside of a side without words stays so however far the other side grows."""
        found = self.left.protected(scope) | self.right.protected(scope)
        for side in (self.left, self.right):
            if not side.reads_words:
                found = found | ~side.resolve(scope).mask.grid
        return found


class _Difference(_Combined):
    def bind(self, canvas: RegionCanvas) -> Region:
        """What is taken away may lie beside an opened part of the picture."""
        return replace(self, left=self.left.bind(canvas), right=self.right.bind(replace(canvas, strict=False)))

    def resolve(self, scope: RegionScope) -> RegionMask:
        """Of a soft region that is taken away, what is left of each cell."""
        found, out = self.left.resolve(scope), self.right.resolve(scope)
        taken = np.zeros_like(out.levels) if out.reason else out.levels
        return _with_levels(found, np.minimum(found.levels, _WHOLE - taken))

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


def _checked_points(points: Iterable[tuple[float, float]]) -> Points:
    """Pairs of numbers, at most 64. Raises InputError for something else."""
    found = tuple(points) if isinstance(points, Iterable) else points
    if not isinstance(found, tuple) or not all(are_numbers(at, 2) for at in found):
        raise InputError(f"points must be pairs (x, y) of pixels, got {as_text(points)}")
    if len(found) > MAX_POINTS:
        raise InputError(f"a region must have at most {MAX_POINTS} points, got {len(found)}; draw a mask")
    return tuple((float(x), float(y)) for x, y in found)


def _axes(box: Sequence[float], part: Box) -> list[tuple[float, float, int, int]]:
    """A box's two ends and a part's, across and down."""
    return [(box[i], box[i + 2], part[i], part[i + 2]) for i in (0, 1)]


def _span(low: float, high: float, scale: float, count: int) -> slice:
    """The cells that an interval of pixels reaches into."""
    return slice(max(0, int(np.floor(low * scale))), min(count, int(np.ceil(high * scale))))


def _levels(mask: EditMask) -> Levels:
    return mask.grid.astype(np.uint8) * _WHOLE if mask.levels is None else mask.levels


def _mask(levels: Levels, source: MaskSource) -> EditMask:
    return EditMask(levels > 0, source, levels=soft_levels(levels))


def _with_levels(found: RegionMask, levels: Levels) -> RegionMask:
    return replace(found, mask=replace(found.mask, grid=levels > 0, levels=soft_levels(levels)))


def _joined(found: Sequence[RegionMask], levels: Levels) -> RegionMask:
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
    sides: Any = (widths,) * 4 if isinstance(widths, int) else widths
    if not (are_numbers(sides, 4) and all(type(side) is int and side >= 0 for side in sides) and any(sides)):
        raise InputError(
            f"a border must be pixels at the left, top, right and bottom, not all 0, got {as_text(widths)}"
        )
    left, top, right, bottom = sides
    return left, top, right, bottom


class _UnopenedPicture:
    """The scope of a region on a picture that no model has seen."""

    def __init__(self, cells: tuple[int, int]) -> None:
        self.cells = cells

    def by_words(self, options: MaskOptions) -> tuple[EditMask, str]:
        raise InputError("words attend to a picture once it is opened; open it by a mask or a box, or as a whole")

    def by_points(self, inside: Points, outside: Points) -> BoolGrid:
        raise InputError("points pick things of a picture once it is opened; open it by a mask or a box, or as a whole")


def cells_on_picture(region: Region, size: tuple[int, int]) -> BoolGrid:
    """What a region marks on a picture before it is opened: booleans [height / 8, width / 8], rounded up.

    Args:
        region: without words.
        size: width and height of the picture in pixels.

    Raises:
        MaskError: it does not fit the picture. InputError: no region, or one by words.
    """
    if not isinstance(region, Region):
        raise InputError(f"region must be a Region, got {type(region).__name__}; use Region.mask or Region.box")
    width, height = (-(-side // LATENT_FACTOR) * LATENT_FACTOR for side in size)
    canvas = RegionCanvas(height, width, size)
    return region.bind(canvas).resolve(_UnopenedPicture(canvas.cells)).mask.grid


def covers(crop: Box, region: Region, size: tuple[int, int]) -> bool:
    """Whether all that a region without words marks lies on a part of a picture.

    Args:
        crop: the part.
        region: of masks and boxes.
        size: width and height of the picture in pixels.
    """
    marked = cell_pixels(cells_on_picture(region, size), size)
    left, top, right, bottom = crop
    marked[top:bottom, left:right] = False
    return not marked.any()


def joined(regions: Sequence[tuple[Region, str]], region: Region | None) -> Region:
    """All of several regions with prompts, checked.

    Args:
        regions: with their prompts.
        region: another one, which must be None.

    Raises:
        InputError: something else, or more than 16.
    """
    if region is not None:
        raise InputError("give region or regions, got both; regions have prompts of their own")
    is_pairs = isinstance(regions, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], Region) for pair in regions
    )
    if not is_pairs or len(regions) > MAX_REGIONS:
        raise InputError(f"regions must be 1 to {MAX_REGIONS} pairs of a Region and a prompt, got {as_text(regions)}")
    return Region.union(each for each, _ in regions)


def region_of(region: Region | None, mask: object, protect: object, grow: int, options: MaskOptions) -> Region:
    """The region that the arguments of an edit mean.

    Args:
        region: given as a whole, or None.
        mask: where to edit, or None for where words say.
        protect: where never to edit, or None.
        grow: latent cells by which it is dilated, -64 to 64.
        options: how words are localized.

    Raises:
        InputError: a region beside what it is built from.
    """
    if region is None:
        found = _Words(options) if mask is None else Region.mask(mask)
    elif not isinstance(region, Region):
        raise InputError(f"region must be a Region, got {type(region).__name__}; use Region.mask or Region.words")
    elif mask is not None or options != MaskOptions():
        raise InputError("give a region, or a mask and words, got both; join them as Region.mask(...) | Region.words()")
    else:
        found = region
    found = found.grow(grow)
    return found if protect is None else found - Region.mask(protect)
