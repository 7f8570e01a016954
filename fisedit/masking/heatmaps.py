"""Recorded attention as heatmaps of words, refined by self-attention; and the mask methods kept for comparison.

Pure functions on numpy arrays; knows neither the UNet, nor how attention was recorded, nor how a prompt was split. The
default method is in `object_masks`.

The maps follow DAAM (arXiv 2210.04885) and prompt-to-prompt (arXiv 2208.01626); the new words' keys against the
source's queries find words that the source never had. Sharpening by self-attention follows DiffSegmenter (arXiv
2309.02773). FISEdit (arXiv 2305.17423) thresholds a difference of latents instead, after dense steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fisedit.errors import NumericsError
from fisedit.masking.masks import clean_mask, confidence, otsu
from fisedit.values import EditKind, EditMask, EditScript, Hunk, MaskSource, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Heatmap = NDArray[np.float32]


@dataclass(frozen=True)
class HeatmapMethod:
    """One way to read recorded attention.

    Args:
        union: unite a replaced word's old map with the new word's; otherwise the old one counts where there is one.
        rounds: The rounds of refinement by self-attention, 0 or more.
        two_way: read maps of two-way attention.
    """

    union: bool
    rounds: int = 2
    two_way: bool = False


METHODS = {
    "cross": HeatmapMethod(union=False, rounds=0),
    "cross-self": HeatmapMethod(union=False),
    "new-words": HeatmapMethod(union=True),
    "two-way": HeatmapMethod(union=True, two_way=True),
}
"""Cross-attention alone; refined; with the new words' keys on the recorded queries; and all that with parameter-free
two-way attention as in CALIP (arXiv 2209.14169)."""


def change_heatmap(script: EditScript, old_maps: Heatmap, new_maps: Heatmap) -> Heatmap:
    """Heatmap of the changed words: the union of all hunks' maps.

    A hunk's map is the union of its focus words' maps, the old ones' as recorded and the new ones' as they would have
    attended: for a replaced word both, for an inserted one the new, for a deleted one the old. Each map is first
    scaled to 0 to 1, so that a word with a flat map cannot cover the frame.

    Args:
        script: The script whose hunks name the words.
        old_maps: attention probabilities of the source prompt's tokens [T, h, w].
        new_maps: those of the new prompt's keys against the source's recorded queries [T, h, w].

    Returns:
        Floats [h, w], 0 to 1; all zeros if no hunk points at a word.
    """
    maps = [_hunk_map(hunk, old_maps, new_maps) for hunk in localized_hunks(script)]
    return np.max(maps, axis=0) if maps else np.zeros(old_maps.shape[1:], np.float32)


def localized_hunks(script: EditScript) -> list[Hunk]:
    """The hunks with words whose attention shows where."""
    return [hunk for hunk in script.hunks if hunk.focus_old or hunk.focus_new]


def _hunk_map(hunk: Hunk, old_maps: Heatmap, new_maps: Heatmap, *, union: bool = True) -> Heatmap:
    old, new = word_maps(hunk.focus_old, old_maps), word_maps(hunk.focus_new, new_maps)
    return np.asarray(np.max(old + new if union else old or new, axis=0))


def word_maps(words: Sequence[Word], maps: Heatmap) -> list[Heatmap]:
    """Each word's map [h, w], scaled to 0 to 1.

    Args:
        words: words with token positions.
        maps: attention probabilities of every token [T, h, w].
    """
    return [rescale(maps[list(word.tokens)].mean(axis=0)) for word in words]


def rescale(heatmap: Heatmap) -> Heatmap:
    """The map shifted and scaled to 0 to 1; zeros for a constant one.

    Raises:
        NumericsError: NaN or infinity in it.
    """
    low, high = float(heatmap.min()), float(heatmap.max())
    if not np.isfinite(low + high):
        raise NumericsError("recorded attention must be finite, got NaN or infinity; check the model's weights")
    return ((heatmap - low) / ((high - low) or 1.0)).astype(np.float32)


def refine(heatmap: Heatmap, affinity: Heatmap, affinity_grid: tuple[int, int], rounds: int = 2) -> Heatmap:
    """The map after diffusing along self-attention: M <- 0.5 M + 0.5 A M, as often as asked.

    Args:
        heatmap: floats [h, w].
        affinity: A, self-attention between cells [n, n] with n = gh * gw; each row sums to 1.
        affinity_grid: (gh, gw), the grid of those cells in row-major order.
        rounds: 0 or more; 0 gives the map at the affinity's resolution.

    Returns:
        Floats [h, w] within the range of `heatmap`.
    """
    assert affinity.shape == (affinity_grid[0] * affinity_grid[1],) * 2, "one row of affinity per cell of its grid"
    flat = _resize(heatmap, affinity_grid).ravel()
    for _ in range(rounds):
        flat = 0.5 * flat + 0.5 * (affinity @ flat)
    return _resize(flat.reshape(affinity_grid), (heatmap.shape[0], heatmap.shape[1]))


def _resize(heatmap: Heatmap, size: tuple[int, int]) -> Heatmap:
    """Bilinear, with cells (not corners) aligned."""
    from scipy.ndimage import zoom

    factors = (size[0] / heatmap.shape[0], size[1] / heatmap.shape[1])
    return np.asarray(zoom(heatmap, factors, order=1, mode="nearest", grid_mode=True), np.float32)


def predict(
    script: EditScript,
    old_maps: Heatmap,
    new_maps: Heatmap,
    affinity: Heatmap,
    affinity_grid: tuple[int, int],
    *,
    dilation: int = 1,
    method: str = "new-words",
) -> EditMask:
    """The mask of an edit from what was recorded with its source; no UNet call is spent.

    Each hunk is localized, refined and thresholded by itself, so that a large change does not hide a small one. The
    confidence is that of the worst hunk. Below `LOW_CONFIDENCE` the mask should not be trusted.

    Args:
        script: the edit.
        old_maps: The source prompt's maps, as in `change_heatmap` [T, h, w]; h and w are the latent grid's.
        new_maps: The new prompt's maps, as in `change_heatmap` [T, h, w].
        affinity: The self-attention, as in `refine` [n, n].
        affinity_grid: The grid of the self-attention, as in `refine` (gh, gw).
        dilation: latent cells by which the cleaned mask is dilated, 0 or more.
        method: a key of `METHODS`.

    Returns:
        The mask: nowhere for identical prompts, everywhere for a global edit.

    Raises:
        NumericsError: NaN or infinity in the maps.
    """
    if script.kind is EditKind.IDENTICAL:
        return EditMask(np.zeros(old_maps.shape[1:], bool), MaskSource.NOWHERE)
    if script.kind is EditKind.GLOBAL:
        return EditMask(np.ones(old_maps.shape[1:], bool), MaskSource.EVERYWHERE)
    options = METHODS[method]
    raw_maps = [_hunk_map(hunk, old_maps, new_maps, union=options.union) for hunk in localized_hunks(script)]
    heatmaps = [
        rescale(refine(raw_map, affinity, affinity_grid, options.rounds)) if options.rounds else raw_map
        for raw_map in raw_maps
    ]
    return _mask_of(heatmaps, dilation)


def mask_from_heatmap(heatmap: Heatmap, dilation: int = 1) -> EditMask:
    """The mask of any heatmap of change, thresholded and cleaned as an attention map is.

    Args:
        heatmap: floats [h, w].
        dilation: latent cells, 0 or more.
    """
    return _mask_of([rescale(heatmap)], dilation)


def _mask_of(heatmaps: Sequence[Heatmap], dilation: int) -> EditMask:
    grids, separations = zip(*map(otsu, heatmaps), strict=True)
    grid = clean_mask(np.any(grids, axis=0), dilation=dilation)
    return EditMask(grid, MaskSource.ATTENTION, confidence(min(separations)), np.max(heatmaps, axis=0))
