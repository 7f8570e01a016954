"""The config for masks that ships: where a changed thing is, and where one that comes would be.

A thing that goes or changes is where its word looked in the source. One that comes for it may have another outline, and
gets the box. One that comes for nothing is where its word looks in the first step of a dense run on the new prompt: the
source has no such thing, and its queries know nothing of it. Things that stay keep the cells that are theirs.

Pure functions on numpy arrays; knows neither the UNet nor how attention was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fisedit.masking.heatmaps import pointed, refine, stretch, word_maps
from fisedit.masking.masks import boxed, clean, threshold
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import EditMask, MaskSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fisedit.values import BoolGrid, EditScript, Hunk, Word

    Heat = NDArray[np.float32]

ROUNDS = 1
"""Of refinement by self-attention. On drawn scenes none finds as much; with two, places run into one another."""


@dataclass(frozen=True, eq=False)
class Scene:
    """What is known of a source.

    Args:
        maps: attention probabilities of its prompt's tokens [T, h, w].
        affinity, grid: self-attention between cells [n, n], and their grid (gh, gw), as in `heat.refine`.
        things: words of the prompt that name things.
    """

    maps: Heat
    affinity: Heat
    grid: tuple[int, int]
    things: tuple[Word, ...] = ()

    def heat(self, words: Sequence[Word]) -> Heat:
        """Where any of the words looked, refined: floats [h, w], 0 to 1."""
        return stretch(refine(np.max(word_maps(words, self.maps), axis=0), self.affinity, self.grid, ROUNDS))

    def owned(self, words: Sequence[Word], rival: Heat) -> BoolGrid:
        """Cells [h, w] of things that are looked at more than a rival's probability [h, w] in them."""
        grid = np.zeros(rival.shape, bool)
        for word in words:
            grid |= core(self.heat([word])) & (_probability([word], self.maps) > rival)
        return grid


def predict(script: EditScript, scene: Scene, coming: Heat | None = None) -> EditMask:
    """The mask of an edit; every change is sought by itself, and the confidence is that of the worst.

    Args:
        script: neither identical nor global. scene: its source.
        coming: attention probabilities of the new prompt's tokens [T, h, w], for things that come for nothing.

    Returns:
        The mask, with Otsu's criterion as confidence (see `masks.threshold`).

    Raises:
        NumericsError: NaN or infinity in the maps.
    """
    changed = {word for hunk in script.hunks for word in (*hunk.old, *hunk.focus_old)}
    kept = [word for word in scene.things if word not in changed]
    found = [_find(hunk, scene, coming, kept) for hunk in pointed(script)]
    grids, heats, others = zip(*found, strict=True)
    confidence, grid = min(threshold(heat)[1] for heat in heats), np.any(grids, axis=0)
    return EditMask(grid, MaskSource.ATTENTION, confidence, np.max(heats, axis=0), np.any(others, axis=0) & ~grid)


def _find(hunk: Hunk, scene: Scene, coming: Heat | None, kept: Sequence[Word]) -> tuple[BoolGrid, Heat, BoolGrid]:
    """Cells [h, w] of one change, the heat behind them, and cells of things that stay."""
    if hunk.focus_old:
        heat, probability = scene.heat(hunk.focus_old), _probability(hunk.focus_old, scene.maps)
    else:
        assert coming is not None, "a thing that comes for nothing needs the new prompt's maps"
        heat, probability = np.max(word_maps(hunk.focus_new, coming), axis=0), _probability(hunk.focus_new, coming)
    taken, inside = scene.owned(kept, probability), core(heat)
    if not hunk.focus_old and (inside & taken).sum() > inside.sum() / 2:  # it sits on what stays, as a hat does
        taken[:] = False
    inside = clean(inside & ~taken, growth=0)
    inside |= dilate(inside, 1) & rim(heat) & ~taken
    is_new = {word.text for word in hunk.focus_new} - {word.text for word in hunk.focus_old}
    return (boxed(inside) & ~taken if is_new else inside), heat, taken


def _probability(words: Sequence[Word], maps: Heat) -> Heat:
    return np.asarray(np.max([maps[list(word.tokens)].mean(axis=0) for word in words], axis=0))


def core(heat: Heat) -> BoolGrid:
    """Cells of a map [h, w] that are surely inside: above Otsu's threshold, which leaves out the flanks of a thing."""
    return threshold(heat)[0]


def rim(heat: Heat) -> BoolGrid:
    """Cells [h, w] that are inside if their neighbours are: above the threshold of least cross-entropy (Li, 1993)."""
    from skimage.filters import threshold_li

    return np.asarray(heat > threshold_li(heat))
