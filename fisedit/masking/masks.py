"""Boolean grids of latent cells where an edit may paint: read from masks of any form, thresholded, cleaned, selected.

Pure functions on numpy arrays. The module knows neither prompts nor attention, and does not decide what an empty, full
or low-confidence mask means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fisedit.errors import MaskError, as_text
from fisedit.sparse_kernels.dilation import dilate
from fisedit.storage.mask_images import mask_levels, scaled
from fisedit.values import LATENT_FACTOR, EditMask, over_pixels

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from fisedit.values import BoolGrid, Box

    Heatmap = NDArray[np.float32]

_SEPARATIONS = (0.0, 0.5, 0.65, 0.7, 0.75, 0.79, 0.81, 0.83, 0.86, 0.88, 0.95, 1.0)
_CORRECT_RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.82, 0.88, 0.96, 1.0, 1.0)
"""The values of Otsu's criterion of a heatmap, and the share of regions that are right at each.

A region is right if its IoU with the true cells is at least a half. The shares are fitted to 216 edits of drawn scenes,
by isotonic regression with rounded knots. Half of them are the shipped model's, half those of one without supervised
attention (256 px, development seeds 9100 and 9200). `python -m benchmarks.masks` says how it holds."""

LOW_CONFIDENCE = 0.1
"""Confidence below which attention did not tell inside from outside, and an edit runs dense: that of .5 by Otsu's
criterion. It catches maps with a few stray peaks, not every map without a shape: pure Gaussian noise has .64."""

SURE = 0.6
"""Confidence from which words are believed to point at their thing, by default."""

MIN_COMPONENT_AREA = 0.01
"""Share of the frame below which a component of an automatic mask is dropped."""


class PlacedMask(NamedTuple):
    """A given mask on the canvas of a picture.

    Args:
        levels: how much every cell may change, as much as the pixel of it that may change most: uint8 [h, w].
        least: The level of the pixel of each cell that may change least: uint8 [h, w].
        pixels: how much every pixel may change, uint8 [H, W] of the part of the picture that is on the canvas; None
            where all pixels of a cell are alike.
        note: for the user, or "".
    """

    levels: NDArray[np.uint8]
    least: NDArray[np.uint8]
    pixels: NDArray[np.uint8] | None = None
    note: str = ""


def place_mask(
    mask: object,
    height: int,
    width: int,
    size: tuple[int, int] | None = None,
    crop: Box | None = None,
    *,
    soft: bool = False,
    strict: bool = True,
) -> PlacedMask:
    """Place a given mask on the canvas of a picture.

    Args:
        mask: A PIL image, a numpy array or an `EditMask`. An image is read as `storage.mask_images` says and scaled to
            the picture's size. An array has that size, [height, width]. It has booleans, floats 0 to 1, or integers (0
            and 1, or 0 to 255). A boolean array may also be a grid [height / 8, width / 8] of latent cells.
        height: The height of the canvas in pixels, divisible by 8.
        width: The width of the canvas in pixels, divisible by 8.
        size: width and height of the picture in pixels, if they are not the canvas's.
        crop: the part of the picture that the canvas shows; None for all of it.
        soft: whether grey says how much a cell may change; else a cell with a pixel that is at least half inside is
            inside.
        strict: a mask that lies beside that part is refused; else it is empty there.

    Raises:
        MaskError: a mask of another type, size or range of values.
    """
    cells, picture = (height // LATENT_FACTOR, width // LATENT_FACTOR), size or (width, height)
    left, top, right, bottom = crop or (0, 0, *picture)
    part = right - left, bottom - top
    if isinstance(mask, EditMask) and mask.grid.shape == cells:
        return _placed_again(mask, part, soft=soft)
    array, note = _sized_array(mask, cells, (width, height), picture)
    if (array.dtype == np.bool_ and array.shape == cells) or array.shape not in ((height, width), picture[::-1]):
        levels = _shares(_grid_alone(array, cells, picture))
        return PlacedMask(levels, levels)
    shares, inside = _shares(array), _binarized(array)  # of all of it, as its range decides what values mean
    if crop and array.shape == picture[::-1]:
        shares, inside = (_cropped(each, crop, strict=strict) for each in (shares, inside))
    marked = shares if soft else inside.astype(np.uint8) * 255
    levels, least = (cells_of_pixels(marked, cells, extreme) for extreme in (np.maximum, np.minimum))
    pixels = over_pixels(shares, part)
    has_pixels = not np.array_equal(pixels, over_pixels(levels, part))
    return PlacedMask(levels, least, pixels if has_pixels else None, note)


def grid_of_mask(
    mask: object, height: int, width: int, size: tuple[int, int] | None = None, crop: Box | None = None
) -> BoolGrid:
    """The latent cells that a mask marks, booleans [height / 8, width / 8]; arguments and errors as in `place_mask`."""
    return place_mask(mask, height, width, size, crop).levels > 0


def levels_of_mask(
    mask: object, height: int, width: int, size: tuple[int, int] | None = None, crop: Box | None = None
) -> NDArray[np.uint8]:
    """Return how much every latent cell may change by a soft mask, uint8; arguments and errors as in `place_mask`."""
    return place_mask(mask, height, width, size, crop, soft=True).levels


def _placed_again(mask: EditMask, part: tuple[int, int], *, soft: bool) -> PlacedMask:
    """The mask of an edit on a canvas of as many cells; its pixels too, where the part of the picture is as large."""
    whole = mask.grid.astype(np.uint8) * 255
    levels = whole if mask.levels is None or not soft else mask.levels.copy()
    if mask.pixels is None or mask.pixels.shape != part[::-1]:
        return PlacedMask(levels, levels)
    pixels = np.rint(mask.pixels / 255 * over_pixels(levels, part)).astype(np.uint8)
    return PlacedMask(levels, cells_of_pixels(pixels, levels.shape, np.minimum), pixels)


def _sized_array(
    mask: object, cells: tuple[int, int], canvas: tuple[int, int], picture: tuple[int, int]
) -> tuple[NDArray[Any], str]:
    """The values of a mask, a picture's scaled where it has another size; and a note that it was, or ""."""
    from PIL.Image import Image as PILImage

    if isinstance(mask, EditMask):
        return mask.grid, ""
    if isinstance(mask, PILImage):
        if mask.mode == "1" and mask.size == cells[::-1]:
            return np.asarray(mask), ""
        levels = mask_levels(mask)
        if levels.size in (canvas, picture):
            return np.asarray(levels, np.float32) / 255, ""
        before, after = ("{}x{}".format(*pixels) for pixels in (levels.size, picture))
        note = f"the mask of {before} pixels was scaled to the picture's {after}"
        return np.asarray(scaled(levels, picture), np.float32) / 255, note
    if isinstance(mask, np.ma.MaskedArray):
        mask = mask.filled(0)
    if isinstance(mask, np.ndarray):
        return (mask[..., 0] if mask.ndim == 3 and mask.shape[-1] == 1 else mask), ""
    raise MaskError(f"mask must be a PIL image, a numpy array or an EditMask, got {type(mask).__name__}; convert it")


def _grid_alone(array: NDArray[Any], cells: tuple[int, int], picture: tuple[int, int]) -> BoolGrid:
    """A boolean grid of latent cells. Raises MaskError for another array, which has the size of nothing."""
    if array.dtype == np.bool_ and array.shape == cells:
        return array
    raise MaskError(
        f"mask must have the picture's {picture[0]}x{picture[1]} pixels, or be a boolean grid of "
        f"{cells[1]}x{cells[0]} latent cells, got {_size_text(array)}; resize it"
    )


def _cropped(array: NDArray[Any], crop: Box, *, strict: bool) -> NDArray[Any]:
    """The part of a mask that is on the canvas. Raises MaskError, if strict, where all that it marks is elsewhere."""
    left, top, right, bottom = crop
    part = array[top:bottom, left:right]
    if strict and not part.any() and array.any():
        raise MaskError(f"mask must lie on the opened part {crop} of the picture, got one beside it; open that part")
    return part


def cells_of_pixels(pixels: NDArray[Any], cells: tuple[int, ...], extreme: np.ufunc = np.maximum) -> NDArray[Any]:
    """The greatest value in every cell, or another extreme; a cell smaller than a pixel takes the one at its middle.

    Args:
        pixels: values [H, W].
        cells: (h, w).
        extreme: numpy's maximum or minimum.
    """
    for axis, (n, m) in enumerate(zip(cells, pixels.shape, strict=True)):
        if m <= n:
            pixels = pixels.take(((np.arange(n) + 0.5) * m / n).astype(int), axis)
        else:
            cell_of_pixel = ((np.arange(m) + 0.5) * n / m).astype(int)
            pixels = extreme.reduceat(pixels, np.searchsorted(cell_of_pixel, np.arange(n)), axis)
    return pixels


def _shares(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Values as shares of their range, 0 to 255."""
    is_inside = _binarized(array)  # which refuses what is no mask
    if array.dtype == np.bool_:
        return is_inside.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.uint8) * (1 if array.max() > 1 else 255)
    rounded: NDArray[np.uint8] = np.rint(array * 255).astype(np.uint8)
    return rounded


def _binarized(array: NDArray[Any]) -> BoolGrid:
    """Values that are at least half of their range."""
    if array.dtype == np.bool_:
        return array
    integer = np.issubdtype(array.dtype, np.integer)
    if not integer and not np.issubdtype(array.dtype, np.floating):
        raise MaskError(f"mask must hold booleans, integers or floats, got {array.dtype}; convert it")
    low, high, top = array.min(), array.max(), 255 if integer else 1
    if not (low >= 0 and high <= top):  # so written, NaN is refused as well
        raise MaskError(f"mask of {array.dtype} must hold values from 0 to {top}, got {low} to {high}; rescale it")
    return np.asarray(array >= (128 if integer and high > 1 else 0.5))


def _size_text(array: NDArray[Any]) -> str:
    if array.ndim == 2:
        return f"{array.shape[1]}x{array.shape[0]}"
    return f"an array of shape {'x'.join(map(str, array.shape)) or 'nothing'}"


def clean_mask(grid: BoolGrid, min_component_area: float = MIN_COMPONENT_AREA, dilation: int = 1) -> BoolGrid:
    """A grid of a few whole components: opened, small components dropped, holes filled, then dilated.

    Every small component costs a halo and every ragged boundary costs rows, so this is a matter of speed as well. Where
    nothing would stay, the largest component does: cleaning never empties a mask.

    Args:
        grid: booleans [h, w].
        min_component_area: components smaller than this share of the frame are dropped, 0 to 1.
        dilation: latent cells to dilate by at the end, 0 or more.

    Returns:
        Booleans [h, w]; empty only if `grid` is.
    """
    from scipy.ndimage import binary_fill_holes, binary_opening

    opened = np.asarray(binary_opening(grid, np.ones((2, 2), bool)))  # cuts what is one cell thin, keeps 2x2 objects
    kept = _large_components(opened if opened.any() else grid, min_component_area * grid.size)
    return dilate(np.asarray(binary_fill_holes(kept)), dilation)


def _large_components(grid: BoolGrid, cells: float) -> BoolGrid:
    """Connected components of at least so many cells, or the largest one where all are smaller."""
    from scipy.ndimage import label

    labels, _ = label(grid, np.ones((3, 3), int))
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    kept = np.arange(len(sizes)) == sizes.argmax() if sizes.max() < cells else sizes >= cells
    return np.asarray(kept[labels] & grid)


def select_instance(grid: BoolGrid, index: int) -> BoolGrid:
    """One connected component of a grid, diagonals connecting.

    Args:
        grid: booleans [h, w].
        index: The component's index, counted from the left and from 0.

    Returns:
        Booleans [h, w].

    Raises:
        MaskError: there are not so many.
    """
    from scipy.ndimage import find_objects, label

    labels, count = label(grid, np.ones((3, 3), int))
    if index >= count:
        raise MaskError(f"instance must be below {count}, the pieces that the mask has, got {as_text(index)}")
    slices = find_objects(labels)
    order = sorted(range(count), key=lambda i: slices[i][1].start + slices[i][1].stop)
    return np.asarray(labels == order[index] + 1)


def count_components(grid: BoolGrid) -> int:
    """Number of connected components of a grid [h, w], diagonals connecting."""
    from scipy.ndimage import label

    return int(label(grid, np.ones((3, 3), int))[1])


def heaviest_component(grid: BoolGrid, heatmap: Heatmap) -> BoolGrid:
    """The connected component of a grid [h, w] with most heat [h, w], diagonals connecting; none of an empty grid."""
    from scipy.ndimage import label

    labels, count = label(grid, np.ones((3, 3), int))
    heat = np.bincount(labels.ravel(), weights=heatmap.ravel(), minlength=2)[1:]
    return np.asarray(labels == 1 + heat.argmax()) & (count > 0)


def bounding_boxes(grid: BoolGrid) -> BoolGrid:
    """The grid [h, w] with every connected component filled to its bounding box, diagonals connecting."""
    from scipy.ndimage import find_objects, label

    boxes = np.zeros_like(grid)
    for slices in find_objects(label(grid, np.ones((3, 3), int))[0]):
        boxes[slices] = True
    return boxes


def confidence(separation: float) -> float:
    """The share of regions that are right where heatmaps separate so well, 0 to 1, on the demo model's edits.

    Args:
        separation: Otsu's criterion, 0 to 1; of several heatmaps the least.
    """
    return float(np.interp(separation, _SEPARATIONS, _CORRECT_RATIOS))


def otsu(heatmap: Heatmap) -> tuple[BoolGrid, float]:
    """Split a heatmap in two by Otsu's method.

    Args:
        heatmap: floats [h, w].

    Returns:
        The cells above the threshold [h, w], and Otsu's criterion. The criterion is the share of the heatmap's variance
        that lies between the two classes. It is 0 (also for a constant map, whose grid is empty) to 1 (two values
        only).
    """
    from skimage.filters import threshold_otsu

    variance = float(heatmap.var())
    if variance == 0.0:
        return np.zeros(heatmap.shape, bool), 0.0
    inside: BoolGrid = heatmap > threshold_otsu(heatmap)
    share = float(inside.mean())
    mean_difference = float(heatmap[inside].mean() - heatmap[~inside].mean())
    return inside, min(1.0, share * (1 - share) * mean_difference**2 / variance)
