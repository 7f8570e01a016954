"""Where an edit may paint: a user's mask or recorded attention becomes a boolean grid of latent cells.

Pure functions on numpy arrays. The module does not know the UNet, how attention was recorded, or how a prompt was
split; what an empty, full or doubtful mask means is the editor's to decide.

The maps follow DAAM (arXiv 2210.04885) and prompt-to-prompt (arXiv 2208.01626); the new words' keys against the
source's queries find words that the source never had. Sharpening by self-attention follows DiffSegmenter (arXiv
2309.02773). FISEdit (arXiv 2305.17423) thresholds a difference of latents instead, after dense steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fisedit.errors import InputError, MaskError, NumericsError
from fisedit.values import LATENT_FACTOR, EditKind, EditMask, EditScript, Hunk, MaskSource, Word

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray
    from PIL.Image import Image

    from fisedit.values import BoolGrid

    Heat = NDArray[np.float32]

LOW_CONFIDENCE = 0.5
"""Below this the attention did not tell inside from outside, and the editor should run dense. Published automatic masks
have .53 at their 5th percentile and .64 in the median. It catches maps with a few stray peaks, not every map without a
shape: pure Gaussian noise has .64 too."""


@dataclass(frozen=True)
class Method:
    """One way to read recorded attention.

    Args:
        union: whether a replaced word's old map and the new word's are united; otherwise old words count where there
            are some. rounds: of refinement by self-attention. two_way: whether maps are of two-way attention.
    """

    union: bool
    rounds: int = 2
    two_way: bool = False


METHODS = {
    "cross": Method(union=False, rounds=0),
    "cross-self": Method(union=False),
    "new-words": Method(union=True),
    "two-way": Method(union=True, two_way=True),
}
"""Cross-attention alone; refined; with the new words' keys on the recorded queries; and all that with parameter-free
two-way attention as in CALIP (arXiv 2209.14169)."""

DEFAULT = "new-words"

SPECK = 0.01
"""Share of the frame below which a separate piece of an automatic mask is dropped."""


def given(mask: object, height: int, width: int, size: tuple[int, int] | None = None) -> BoolGrid:
    """The latent cells that a user's mask marks: those in which any pixel is at least half inside.

    Args:
        mask: of the picture's size, a PIL image (white inside; transparent is outside) or a numpy array [height, width]
            of booleans, floats 0 to 1, or integers (0 and 1, or 0 to 255); or a boolean grid [height / 8, width / 8] of
            latent cells; or an `EditMask`.
        height, width: of the canvas in pixels, divisible by 8. size: width and height of the picture, if it has others.

    Returns:
        Booleans [height / 8, width / 8]; possibly all false or all true.

    Raises:
        MaskError: a mask of another type, size or range of values.
    """
    array = _array(mask)
    cells = (height // LATENT_FACTOR, width // LATENT_FACTOR)
    if array.dtype == np.bool_ and array.shape == cells:
        return array.copy()
    across, down = size or (width, height)
    if array.shape not in ((height, width), (down, across)):
        raise MaskError(
            f"mask must have the picture's {across}x{down} pixels, or be a boolean grid of {cells[1]}x{cells[0]} "
            f"latent cells, got {_size(array)}; resize it"
        )
    return _touched(_half(array), cells)


def _touched(pixels: BoolGrid, cells: tuple[int, int]) -> BoolGrid:
    """The cells of a grid in which any pixel lies; a cell smaller than a pixel takes the one at its middle."""
    down, across = (((np.arange(n) + 0.5) * m / n).astype(int) for n, m in zip(pixels.shape, cells, strict=True))
    back = (((np.arange(m) + 0.5) * n / m).astype(int) for n, m in zip(pixels.shape, cells, strict=True))
    grid = pixels[np.ix_(*back)]
    rows, columns = pixels.nonzero()
    grid[down[rows], across[columns]] = True
    return grid


def _array(mask: object) -> NDArray[Any]:
    from PIL.Image import Image as PILImage

    if isinstance(mask, EditMask):
        return mask.grid
    if isinstance(mask, PILImage):
        return _luminance(mask)
    if isinstance(mask, np.ndarray):
        return mask[..., 0] if mask.ndim == 3 and mask.shape[-1] == 1 else mask
    raise MaskError(f"mask must be a PIL image, a numpy array or an EditMask, got {type(mask).__name__}; convert it")


def _luminance(image: Image) -> NDArray[Any]:
    if image.mode in ("1", "I", "I;16", "F"):  # depths that a conversion to 8 bits would clip
        return np.asarray(image)
    colour = image.convert("RGBA")
    light, alpha = (np.asarray(c, dtype=np.float32) / 255 for c in (colour.convert("L"), colour.getchannel("A")))
    return light * alpha


def _half(array: NDArray[Any]) -> BoolGrid:
    """Which values are at least half of their range."""
    if array.dtype == np.bool_:
        return array
    integer = np.issubdtype(array.dtype, np.integer)
    if not integer and not np.issubdtype(array.dtype, np.floating):
        raise MaskError(f"mask must hold booleans, integers or floats, got {array.dtype}; convert it")
    low, high, top = array.min(), array.max(), 255 if integer else 1
    if not (low >= 0 and high <= top):  # so written, NaN is refused as well
        raise MaskError(f"mask of {array.dtype} must hold values from 0 to {top}, got {low} to {high}; rescale it")
    return np.asarray(array >= (128 if integer and high > 1 else 0.5))


def _size(array: NDArray[Any]) -> str:
    if array.ndim == 2:
        return f"{array.shape[1]}x{array.shape[0]}"
    return f"an array of shape {'x'.join(map(str, array.shape)) or 'nothing'}"


def grow(grid: BoolGrid, cells: int) -> BoolGrid:
    """The grid with every cell within `cells` steps, diagonals included; clipped at the border.

    Args:
        grid: booleans [h, w].
        cells: 0 or more.

    Returns:
        Booleans [h, w], a superset of `grid`.

    Raises:
        InputError: negative `cells`.
    """
    from scipy.ndimage import maximum_filter

    return np.asarray(maximum_filter(grid, size=_window(cells), mode="constant", cval=False), bool)


def shrink(grid: BoolGrid, cells: int) -> BoolGrid:
    """The grid without the cells within `cells` steps of the outside; the frame's border does not count as outside.

    Args, Raises: as in `grow`.

    Returns:
        Booleans [h, w], a subset of `grid`; possibly empty.
    """
    from scipy.ndimage import minimum_filter

    return np.asarray(minimum_filter(grid, size=_window(cells), mode="constant", cval=True), bool)


def _window(cells: int) -> int:
    if cells < 0:
        raise InputError(f"cells must be 0 or more, got {cells}; use shrink to make a mask smaller, grow for larger")
    return 2 * cells + 1


def clean(grid: BoolGrid, speck: float = SPECK, growth: int = 1) -> BoolGrid:
    """A grid of a few whole blobs: threads cut, specks dropped, holes filled, then grown.

    Every speck costs a halo and every ragged rim costs rows, so this is a matter of speed as well. Where all is thread
    and speck, the largest piece stays: cleaning never empties a mask.

    Args:
        grid: booleans [h, w].
        speck: pieces smaller than this share of the frame are dropped, 0 to 1.
        growth: latent cells to grow by at the end, 0 or more.

    Returns:
        Booleans [h, w]; empty only if `grid` is.
    """
    from scipy.ndimage import binary_fill_holes, binary_opening

    opened = np.asarray(binary_opening(grid, np.ones((2, 2), bool)))  # cuts what is one cell thin, keeps 2x2 objects
    kept = _pieces(opened if opened.any() else grid, speck * grid.size)
    return grow(np.asarray(binary_fill_holes(kept)), growth)


def _pieces(grid: BoolGrid, cells: float) -> BoolGrid:
    """Connected pieces of at least so many cells, or the largest one where all are smaller."""
    from scipy.ndimage import label

    labels, _ = label(grid, np.ones((3, 3), int))
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    kept = np.arange(len(sizes)) == sizes.argmax() if sizes.max() < cells else sizes >= cells
    return np.asarray(kept[labels] & grid)


def seed_map(script: EditScript, old_maps: Heat, new_maps: Heat) -> Heat:
    """Where the changed words attend: the union of all hunks' maps.

    A hunk's map is the union of its focus words' maps, the old ones' as recorded and the new ones' as they would have
    attended: for a replaced word both, for an inserted one the new, for a deleted one the old. Each map is first
    stretched to 0 to 1, so that a word with a flat map cannot cover the frame.

    Args:
        script: whose hunks name the words.
        old_maps: attention probabilities of the source prompt's tokens [T, h, w].
        new_maps: those of the new prompt's keys against the source's recorded queries [T, h, w].

    Returns:
        Floats [h, w], 0 to 1; all zeros if no hunk points at a word.
    """
    maps = [_hunk_map(hunk, old_maps, new_maps) for hunk in _pointed(script)]
    return np.max(maps, axis=0) if maps else np.zeros(old_maps.shape[1:], np.float32)


def _pointed(script: EditScript) -> list[Hunk]:
    return [hunk for hunk in script.hunks if hunk.focus_old or hunk.focus_new]


def _hunk_map(hunk: Hunk, old_maps: Heat, new_maps: Heat, *, union: bool = True) -> Heat:
    old, new = _word_maps(hunk.focus_old, old_maps), _word_maps(hunk.focus_new, new_maps)
    return np.asarray(np.max(old + new if union else old or new, axis=0))


def _word_maps(words: Sequence[Word], maps: Heat) -> list[Heat]:
    return [_stretch(maps[list(word.tokens)].mean(axis=0)) for word in words]


def _stretch(heat: Heat) -> Heat:
    """The map shifted and scaled to 0 to 1; zeros for a constant one."""
    low, high = float(heat.min()), float(heat.max())
    if not np.isfinite(low + high):
        raise NumericsError("recorded attention must be finite, got NaN or infinity; check the model's weights")
    return ((heat - low) / ((high - low) or 1.0)).astype(np.float32)


def refine(heat: Heat, affinity: Heat, affinity_grid: tuple[int, int], rounds: int = 2) -> Heat:
    """The map after diffusing along self-attention: M <- 0.5 M + 0.5 A M, as often as asked.

    Args:
        heat: floats [h, w].
        affinity: A, self-attention between cells [n, n] with n = gh * gw; each row sums to 1.
        affinity_grid: (gh, gw), the grid of those cells in row-major order.
        rounds: 0 or more; 0 gives the map at the affinity's resolution.

    Returns:
        Floats [h, w] within the range of `heat`.
    """
    assert affinity.shape == (affinity_grid[0] * affinity_grid[1],) * 2, "one row of affinity per cell of its grid"
    flat = _resize(heat, affinity_grid).ravel()
    for _ in range(rounds):
        flat = 0.5 * flat + 0.5 * (affinity @ flat)
    return _resize(flat.reshape(affinity_grid), (heat.shape[0], heat.shape[1]))


def _resize(heat: Heat, size: tuple[int, int]) -> Heat:
    """Bilinear, with cells (not corners) aligned."""
    from scipy.ndimage import zoom

    factors = (size[0] / heat.shape[0], size[1] / heat.shape[1])
    return np.asarray(zoom(heat, factors, order=1, mode="nearest", grid_mode=True), np.float32)


def threshold(heat: Heat) -> tuple[BoolGrid, float]:
    """Inside and outside by Otsu's method.

    Args:
        heat: floats [h, w].

    Returns:
        The cells above the threshold [h, w], and Otsu's criterion as confidence: the share of the heat's variance that
        lies between the two classes, 0 (also for a constant map, whose grid is empty) to 1 (two values only).
    """
    from skimage.filters import threshold_otsu

    variance = float(heat.var())
    if variance == 0.0:
        return np.zeros(heat.shape, bool), 0.0
    inside: BoolGrid = heat > threshold_otsu(heat)
    share = float(inside.mean())
    apart = float(heat[inside].mean() - heat[~inside].mean())
    return inside, min(1.0, share * (1 - share) * apart**2 / variance)


def predict(
    script: EditScript,
    old_maps: Heat,
    new_maps: Heat,
    affinity: Heat,
    affinity_grid: tuple[int, int],
    *,
    growth: int = 1,
    method: str = DEFAULT,
) -> EditMask:
    """The mask of an edit from what was recorded with its source; no UNet call is spent.

    Each hunk is sought, refined and thresholded by itself, so that a large change does not hide a small one; the
    confidence is that of the worst hunk. Below `LOW_CONFIDENCE` the mask should not be trusted.

    Args:
        script: the edit.
        old_maps, new_maps: as in `seed_map` [T, h, w]; h and w are the latent grid's.
        affinity, affinity_grid: as in `refine`; [n, n] and (gh, gw).
        growth: latent cells to grow the cleaned mask by. method: a key of `METHODS`.

    Returns:
        The mask: nowhere for identical prompts, everywhere for a global edit.

    Raises:
        NumericsError: NaN or infinity in the maps.
    """
    if script.kind is EditKind.IDENTICAL:
        return EditMask(np.zeros(old_maps.shape[1:], bool), MaskSource.NOWHERE)
    if script.kind is EditKind.GLOBAL:
        return EditMask(np.ones(old_maps.shape[1:], bool), MaskSource.EVERYWHERE)
    how = METHODS[method]
    seeds = [_hunk_map(hunk, old_maps, new_maps, union=how.union) for hunk in _pointed(script)]
    heats = [_stretch(refine(seed, affinity, affinity_grid, how.rounds)) if how.rounds else seed for seed in seeds]
    return _thresholded(heats, growth)


def from_heat(heat: Heat, growth: int = 1) -> EditMask:
    """The mask of any map of change [h, w], thresholded and cleaned as an attention map is."""
    return _thresholded([_stretch(heat)], growth)


def instance(grid: BoolGrid, index: int) -> BoolGrid:
    """One connected piece of a grid, counted from the left and from 0.

    Raises:
        MaskError: there are not so many.
    """
    from scipy.ndimage import find_objects, label

    labels, count = label(grid, np.ones((3, 3), int))
    if index >= count:
        raise MaskError(f"instance must be below {count}, the pieces that the mask has, got {index}")
    places = find_objects(labels)
    order = sorted(range(count), key=lambda i: places[i][1].start + places[i][1].stop)
    return np.asarray(labels == order[index] + 1)


def _thresholded(heats: Sequence[Heat], growth: int) -> EditMask:
    grids, confidences = zip(*map(threshold, heats), strict=True)
    grid = clean(np.any(grids, axis=0), growth=growth)
    return EditMask(grid, MaskSource.ATTENTION, min(confidences), np.max(heats, axis=0))
