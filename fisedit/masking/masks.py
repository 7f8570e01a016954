"""Boolean grids of latent cells where an edit may paint: read from masks of any form, thresholded, cleaned, selected.

Pure functions on numpy arrays. The module knows neither prompts nor attention, and does not decide what an empty, full
or low-confidence mask means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fisedit.errors import MaskError, as_text
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import LATENT_FACTOR, EditMask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from numpy.typing import NDArray
    from PIL.Image import Image

    from fisedit.values import BoolGrid, Box

    Heatmap = NDArray[np.float32]

_SEPARATIONS = (0.0, 0.5, 0.72, 0.79, 0.81, 0.83, 0.84, 0.86, 0.88, 0.95, 1.0)
_CORRECT_RATIOS = (0.0, 0.1, 0.13, 0.2, 0.5, 0.7, 0.8, 0.95, 0.98, 1.0, 1.0)
"""Otsu's criterion of a heatmap, and the share of regions that are right at it: whose IoU with the true cells is at
least a half. Fitted to 540 swaps, removals and inserts of drawn scenes (demo model of 128 px, development seeds 9100,
9200 and 9400), by isotonic regression with rounded knots; none has less than .72. `fisedit bench masks` says how it
holds."""

LOW_CONFIDENCE = 0.1
"""Confidence below which attention did not tell inside from outside, and an edit runs dense: that of .5 by Otsu's
criterion. It catches maps with a few stray peaks, not every map without a shape: pure Gaussian noise has .64."""

MIN_COMPONENT_AREA = 0.01
"""Share of the frame below which a component of an automatic mask is dropped."""


def grid_of_mask(
    mask: object,
    height: int,
    width: int,
    size: tuple[int, int] | None = None,
    crop: Box | None = None,
    *,
    strict: bool = True,
) -> BoolGrid:
    """The latent cells that a mask marks: those in which any pixel is at least half inside.

    Args:
        mask: of the picture's size, a PIL image (white inside; transparent is outside) or a numpy array [height, width]
            of booleans, floats 0 to 1, or integers (0 and 1, or 0 to 255); or a boolean grid [height / 8, width / 8] of
            latent cells; or an `EditMask`.
        height: of the canvas in pixels, divisible by 8.
        width: of the canvas in pixels, divisible by 8.
        size: width and height of the picture in pixels, if they are not the canvas's.
        crop: the part of the picture that the canvas shows; None for all of it.
        strict: a mask that lies beside that part is refused; else it is empty there.

    Returns:
        Booleans [height / 8, width / 8]; possibly all false or all true.

    Raises:
        MaskError: a mask of another type, size or range of values.
    """
    inside = _pixels_or_cells(mask, _binarized, height, width, size, crop, strict=strict)
    return _cells_of_pixels(inside, (height // LATENT_FACTOR, width // LATENT_FACTOR))


def levels_of_mask(
    mask: object,
    height: int,
    width: int,
    size: tuple[int, int] | None = None,
    crop: Box | None = None,
    *,
    strict: bool = True,
) -> NDArray[np.uint8]:
    """How much every latent cell may change by a soft mask: as much as the pixel of it that may change most.

    Args:
        mask: of the forms that `grid_of_mask` reads, or levels of an `EditMask`.
        height: of the canvas in pixels, divisible by 8.
        width: of the canvas in pixels, divisible by 8.
        size: width and height of the picture in pixels, if they are not the canvas's.
        crop: as in `grid_of_mask`.
        strict: as in `grid_of_mask`.

    Returns:
        uint8 [height / 8, width / 8]; 255 where all may change.

    Raises:
        MaskError: a mask of another type, size or range of values.
    """
    cells = height // LATENT_FACTOR, width // LATENT_FACTOR
    if isinstance(mask, EditMask) and mask.levels is not None and mask.levels.shape == cells:
        return mask.levels.copy()
    return _cells_of_pixels(_pixels_or_cells(mask, _shares, height, width, size, crop, strict=strict), cells)


def _pixels_or_cells(
    mask: object,
    convert: Callable[[NDArray[Any]], NDArray[Any]],
    height: int,
    width: int,
    size: tuple[int, int] | None,
    crop: Box | None,
    *,
    strict: bool,
) -> NDArray[Any]:
    """A mask's converted values, of the canvas's pixels, of the picture's that it shows, or of the latent cells. They
    are converted as a whole, as their range decides what they mean."""
    cells, picture = (height // LATENT_FACTOR, width // LATENT_FACTOR), size or (width, height)
    _check_size(mask, (cells[::-1], (width, height), picture))
    array = _as_array(mask)
    if crop and array.shape == picture[::-1]:
        return _cropped(convert(array), crop, strict=strict)
    if (array.dtype == np.bool_ and array.shape == cells) or array.shape in ((height, width), picture[::-1]):
        return convert(array)
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


def _cells_of_pixels(pixels: NDArray[Any], cells: tuple[int, int]) -> NDArray[Any]:
    """The greatest value in every cell; a cell smaller than a pixel takes the one at its middle."""
    for axis, (n, m) in enumerate(zip(cells, pixels.shape, strict=True)):
        if m <= n:
            pixels = pixels.take(((np.arange(n) + 0.5) * m / n).astype(int), axis)
        else:
            cell_of_pixel = ((np.arange(m) + 0.5) * n / m).astype(int)
            pixels = np.maximum.reduceat(pixels, np.searchsorted(cell_of_pixel, np.arange(n)), axis)
    return pixels


def _check_size(mask: object, sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse an image of another size than one of these before anything of it is decoded."""
    from PIL.Image import Image as PILImage

    if isinstance(mask, PILImage) and mask.size not in sizes:
        expected, actual = ("{}x{}".format(*pixels) for pixels in (sizes[-1], mask.size))
        raise MaskError(f"mask must have the picture's {expected} pixels, got {actual}; resize it")


def _as_array(mask: object) -> NDArray[Any]:
    from PIL.Image import Image as PILImage

    if isinstance(mask, EditMask):
        return mask.grid
    if isinstance(mask, PILImage):
        return _luminance(mask)
    if isinstance(mask, np.ma.MaskedArray):
        mask = mask.filled(0)
    if isinstance(mask, np.ndarray):
        return mask[..., 0] if mask.ndim == 3 and mask.shape[-1] == 1 else mask
    raise MaskError(f"mask must be a PIL image, a numpy array or an EditMask, got {type(mask).__name__}; convert it")


def _luminance(image: Image) -> NDArray[Any]:
    if image.mode in ("1", "I", "I;16", "F"):  # depths that a conversion to 8 bits would clip
        return np.asarray(image)
    colour = image.convert("RGBA")
    luminance, alpha = (np.asarray(c, dtype=np.float32) / 255 for c in (colour.convert("L"), colour.getchannel("A")))
    return luminance * alpha


def _shares(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Values as shares of their range, 0 to 255."""
    _binarized(array)  # which refuses what is no mask
    if np.issubdtype(array.dtype, np.integer) and array.max() > 1:
        return array.astype(np.uint8)
    return np.rint(array.astype(np.float64) * 255).astype(np.uint8)


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
        index: which one, counted from the left and from 0.

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
    """Splits a heatmap in two by Otsu's method.

    Args:
        heatmap: floats [h, w].

    Returns:
        The cells above the threshold [h, w], and Otsu's criterion: the share of the heatmap's variance that lies
        between the two classes, 0 (also for a constant map, whose grid is empty) to 1 (two values only).
    """
    from skimage.filters import threshold_otsu

    variance = float(heatmap.var())
    if variance == 0.0:
        return np.zeros(heatmap.shape, bool), 0.0
    inside: BoolGrid = heatmap > threshold_otsu(heatmap)
    share = float(inside.mean())
    mean_difference = float(heatmap[inside].mean() - heatmap[~inside].mean())
    return inside, min(1.0, share * (1 - share) * mean_difference**2 / variance)
