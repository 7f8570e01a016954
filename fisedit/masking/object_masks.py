"""The default mask method ("things"): where a changed object is, and where an inserted one would be.

An object that is deleted or changed is where its word attended in the source, with a boundary at a lower threshold. An
object that replaces it may have another outline, and gets the bounding box. An inserted object is where its word
attends in the first step of a dense run on the new prompt. The run is needed as the source's queries do not know the
object. Objects that stay keep the cells that are theirs.

Pure functions on numpy arrays; knows neither the UNet nor how attention was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fisedit.masking.heatmaps import localized_hunks, refine, rescale, word_maps
from fisedit.masking.masks import bounding_boxes, clean_mask, confidence, heaviest_component, otsu
from fisedit.prompts.word_classes import ENLARGING, ONE_THING, REDUCING, WEARING
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import EditMask, MaskSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fisedit.values import BoolGrid, EditScript, Hunk, Word

    Heatmap = NDArray[np.float32]

BOUNDARY_RATIO, BOUNDARY_WIDTH = 0.5, 0.25
"""The share of Li's threshold above which a cell belongs to an object that goes, and the width of its boundary.

The width is in shorter sides of the grid. Such cells are looked for in the boundary, as what is left of the object
would be seen. Handles, necks and smoke are long and attend weakly. In 36 swaps and removals in drawn scenes (256 px,
development seeds 9100 and 9200), a part is left in 1. At .6 it is left in 1, too, and recall is .02 less. At .4 it is
left in none, with a mean IoU that is .03 less for a model whose attention was not supervised."""

INSERT_BOUNDARY_RATIO, INSERT_BOUNDARY_WIDTH = 0.85, 0.0625
"""The same of an inserted object.

On 18 inserts of these scenes median recall is .84, and .82 at the whole threshold; IoU is equal. Without
`SHARPNESS` half the width found .03 less on 59 inserts. Twice the width and .6 of the threshold lost .04 of IoU."""

MIN_OBJECT_CONFIDENCE = 0.82
LOW_CONFIDENCE_BOUNDARY_RATIO, LOW_CONFIDENCE_BOUNDARY_WIDTH = 0.4, 0.125
"""The confidence below which objects are not parted, and the share and the width of a boundary there.

Such a heatmap cannot part an object that goes from those that stay. Their cells are then not kept from the region. The
boundary has a lower threshold but half the width, as cells of a map of noise are connected. In 160 swaps and removals
in crowded scenes (128 px, development seed 9400), a part is left in 5 instead of 25. The mean area is 18 % instead of
16 %. Elsewhere (9100 and 9200) areas grow by 1 %."""

ENLARGEMENT = 1.5
"""The scale of the sides of an object's bounding box where a word asks for a larger one; squared from small to big.

In 21 changes of size in drawn scenes (256 px, development seed 9100), IoU is .78 at a recall of .91. Without it they
are .54 and .57, with 1.3 .71 and .76, with 1.6 .74 and .94."""

ROUNDS = 1
"""Rounds of refinement by self-attention. On 88 edits of drawn scenes (256 px, development seed 9400) mean IoU is .72
without, .74 with one and .73 with two."""


SHARPNESS = 1.25
"""The power of attention probabilities that are read.

Unsupervised attention is spread around its thing, and less so at a power. The mean IoU of 48 edits
(256 px, development seed 9100) rises from .64 to .70 for a model without supervised attention. For the
shipped one it is .77 with and without. On 60 more (seed 9200) it is .72 for .73."""


def sharpened(maps: Heatmap) -> Heatmap:
    """Attention probabilities [T, h, w] as masks of things read them, to the power of `SHARPNESS`."""
    return np.asarray(maps**SHARPNESS, np.float32)


@dataclass(frozen=True, eq=False)
class SourceAttention:
    """Attention that was recorded with a source.

    Args:
        maps: attention probabilities of its prompt's tokens [T, h, w], sharpened.
        affinity: self-attention between cells [n, n], as in `heatmaps.refine`.
        grid: (gh, gw) of those cells.
        objects: words of the prompt that name objects.
    """

    maps: Heatmap
    affinity: Heatmap
    grid: tuple[int, int]
    objects: tuple[Word, ...] = ()

    def heatmap(self, words: Sequence[Word]) -> Heatmap:
        """Heatmap of any of the words, refined: floats [h, w], 0 to 1."""
        return rescale(refine(np.max(word_maps(words, self.maps), axis=0), self.affinity, self.grid, ROUNDS))

    def cells_of(self, words: Sequence[Word], other_probability: Heatmap) -> BoolGrid:
        """Cells [h, w] of objects whose attention is above the changed word's.

        Args:
            words: The words that name the objects.
            other_probability: attention probability of the changed word [h, w].
        """
        grid = np.zeros(other_probability.shape, bool)
        for word in words:
            grid |= above_otsu(self.heatmap([word])) & (_probability([word], self.maps) > other_probability)
        return grid


def predict(script: EditScript, source: SourceAttention, inserted: Heatmap | None = None) -> EditMask:
    """The mask of an edit; every change is localized by itself, and the confidence is the lowest of them.

    Args:
        script: neither identical nor global.
        source: the source's attention.
        inserted: attention probabilities of the new prompt's tokens [T, h, w], sharpened, for inserted objects.

    Returns:
        The mask, with `masks.confidence`.

    Raises:
        NumericsError: NaN or infinity in the maps.
    """
    changed = {word for hunk in script.hunks for word in (*hunk.old, *hunk.focus_old)}
    unchanged_words = [word for word in source.objects if word not in changed]
    localized = [
        _localize(hunk, source, inserted, unchanged_words, in_one_place=bool(script.source_prompt) and _adds_one(hunk))
        for hunk in localized_hunks(script)
    ]
    grids, heatmaps, other_objects = zip(*localized, strict=True)
    mask_confidence, grid = confidence(min(otsu(heatmap)[1] for heatmap in heatmaps)), np.any(grids, axis=0)
    return EditMask(
        grid, MaskSource.ATTENTION, mask_confidence, np.max(heatmaps, axis=0), np.any(other_objects, axis=0) & ~grid
    )


def _localize(
    hunk: Hunk,
    source: SourceAttention,
    inserted: Heatmap | None,
    unchanged_words: Sequence[Word],
    *,
    in_one_place: bool,
) -> tuple[BoolGrid, Heatmap, BoolGrid]:
    """Cells [h, w] of one change, the heatmap behind them, and cells of objects that stay."""
    if hunk.focus_old:
        heatmap, probability = source.heatmap(hunk.focus_old), _probability(hunk.focus_old, source.maps)
    else:
        assert inserted is not None, "an inserted object needs the new prompt's maps"
        heatmap, probability = (
            np.max(word_maps(hunk.focus_new, inserted), axis=0),
            _probability(hunk.focus_new, inserted),
        )
    other_objects, (inside, separation) = source.cells_of(unchanged_words, probability), otsu(heatmap)
    boundary_ratio, width = INSERT_BOUNDARY_RATIO, INSERT_BOUNDARY_WIDTH
    if hunk.focus_old:
        boundary_ratio, width = BOUNDARY_RATIO, BOUNDARY_WIDTH
    if hunk.focus_old and confidence(separation) < MIN_OBJECT_CONFIDENCE:
        other_objects[:] = False
        boundary_ratio, width = LOW_CONFIDENCE_BOUNDARY_RATIO, LOW_CONFIDENCE_BOUNDARY_WIDTH
    elif not hunk.focus_old and (inside & other_objects).sum() > inside.sum() / 2:
        if WEARING & {word.text for word in hunk.new}:  # it is on an object that stays, as a hat is
            other_objects[:] = False
        else:  # it takes the place beside them where it is looked for most
            heatmap = np.where(other_objects, heatmap.min(), heatmap)
            inside = above_otsu(heatmap)
    inside = clean_mask(inside & ~other_objects, dilation=0)
    if in_one_place:
        inside = heaviest_component(inside, heatmap)
    boundary = above_li(heatmap, boundary_ratio)
    for _ in range(round(width * min(heatmap.shape))):
        inside |= dilate(inside, 1) & boundary & ~other_objects
    if (scale := _scale(hunk)) > 1:
        inside = _enlarged(inside, scale) & ~other_objects
    elif {word.text for word in hunk.focus_new} - {word.text for word in hunk.focus_old}:
        inside = bounding_boxes(inside) & ~other_objects
    return inside, heatmap, other_objects


def _adds_one(hunk: Hunk) -> bool:
    """Return whether a change inserts one thing, as its determiner says."""
    return not hunk.focus_old and sum(word.text in ONE_THING for word in hunk.new) == 1


def _scale(hunk: Hunk) -> float:
    """Return the factor by which a changed object's box grows, 1 or more; an inserted one has no size yet."""
    if not hunk.focus_old:
        return 1.0
    old, new = ({word.text.casefold() for word in words} for words in (hunk.old, hunk.new))
    steps = bool(new & ENLARGING) - bool(old & ENLARGING) + bool(old & REDUCING) - bool(new & REDUCING)
    return float(ENLARGEMENT ** max(0, steps))


def _enlarged(grid: BoolGrid, scale: float) -> BoolGrid:
    """The bounding box [h, w] of what is inside, larger to both sides and up, as things stand on what is below them."""
    boxes = np.zeros_like(grid)
    if grid.any():
        (top, left), (bottom, right) = np.argwhere(grid).min(0), np.argwhere(grid).max(0) + 1
        up, beside = round((bottom - top) * (scale - 1)), round((right - left) * (scale - 1) / 2)
        boxes[max(0, top - up) : bottom, max(0, left - beside) : right + beside] = True
    return boxes


def _probability(words: Sequence[Word], maps: Heatmap) -> Heatmap:
    return np.asarray(np.max([maps[list(word.tokens)].mean(axis=0) for word in words], axis=0))


def above_otsu(heatmap: Heatmap) -> BoolGrid:
    """Cells of a heatmap [h, w] above Otsu's threshold, which leaves out an object's boundary."""
    return otsu(heatmap)[0]


def above_li(heatmap: Heatmap, share: float = 1.0) -> BoolGrid:
    """Cells of a heatmap [h, w] above a share of the threshold of minimum cross-entropy (Li, 1993)."""
    from skimage.filters import threshold_li

    return np.asarray(heatmap > share * threshold_li(heatmap))
