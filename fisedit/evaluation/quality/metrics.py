"""What is measured of a mask and of a picture. Pure functions on arrays and pictures; knows no model.

Masks are boolean: grids [h, w] of latent cells, or pixels [H, W]. Pictures are RGB, [H, W] pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fisedit.masking import masks
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from fisedit.values import BoolGrid

IDENTICAL = 1e-10
"""Least mean square error, so that equal pictures have a finite 148 dB."""


@dataclass(frozen=True)
class MaskOverlap:
    """How a mask fits the truth, each 0 to 1; a mask of nothing has precision 0."""

    iou: float
    precision: float
    recall: float


def overlap(found: BoolGrid, true: BoolGrid) -> MaskOverlap:
    """Compare two masks of one size; `true` is not empty."""
    both, either = (float(np.sum(mask)) for mask in (found & true, found | true))
    return MaskOverlap(both / either, both / max(1.0, float(found.sum())), both / float(true.sum()))


@dataclass(frozen=True)
class MaskFit:
    """How a mask of latent cells fits true pixels.

    Args:
        cells: by latent cells, of which one is true if any of its pixels is. pixels: by pixels.
        coverage: pixels in the mask's 8x8 blocks over true pixels; 1 would be painting no pixel too many.
    """

    cells: MaskOverlap
    pixels: MaskOverlap
    coverage: float


def fit(grid: BoolGrid, true: BoolGrid) -> MaskFit:
    """Compare a mask [h, w] with true pixels [8h, 8w], of which there are some."""
    blocks = pixels(grid)
    return MaskFit(overlap(grid, cells(true)), overlap(blocks, true), float(blocks.sum() / true.sum()))


def cells(pixels: BoolGrid) -> BoolGrid:
    """The latent cells [h, w] in which any pixel [8h, 8w] is true."""
    return masks.grid_of_mask(pixels, *pixels.shape)


def pixels(grid: BoolGrid) -> BoolGrid:
    """The pixels [8h, 8w] of latent cells [h, w]."""
    return np.kron(grid, np.ones((LATENT_FACTOR, LATENT_FACTOR), bool))


def psnr(got: Image, expected: Image, inside: BoolGrid) -> float:
    """Peak signal to noise ratio in dB over the pixels [H, W] where `inside`; 148 for equal ones."""
    a, b = (_levels(picture)[inside] for picture in (got, expected))
    return float(10 * np.log10(255**2 / max(float(np.mean((a - b) ** 2)), IDENTICAL)))


def equal_outside(got: Image, expected: Image, grid: BoolGrid) -> bool:
    """Whether two pictures have the same bytes in all pixels outside a mask [h, w]."""
    outside = ~pixels(grid)
    return bool((_levels(got)[outside] == _levels(expected)[outside]).all())


def seam(got: Image, reference: Image, grid: BoolGrid) -> float | None:
    """How much more a mask's rim shows than in a reference: 1 for as much.

    The step from every pixel inside the mask [h, w] to its neighbours outside, in the mean over rim and colours,
    over the same of the reference. None where the mask has no rim, or the reference no step at all.
    """
    here, there = (_rim_step(picture, pixels(grid)) for picture in (got, reference))
    return here / there if here is not None and there else None


def _rim_step(picture: Image, inside: BoolGrid) -> float | None:
    levels = _levels(picture)
    steps = []
    for axis in (0, 1):
        across = np.diff(inside, axis=axis)  # of booleans: where neighbours differ
        steps.append(np.abs(np.diff(levels, axis=axis)).mean(-1)[across])
    rim = np.concatenate(steps)
    return float(rim.mean()) if len(rim) else None


def f1_score(said: Sequence[bool], true: Sequence[bool]) -> float | None:
    """Harmonic mean of precision and recall; None where nothing is true and nothing was said."""
    pairs = list(zip(said, true, strict=True))
    hits, errors = pairs.count((True, True)), pairs.count((True, False)) + pairs.count((False, True))
    return 2 * hits / (2 * hits + errors) if hits + errors else None


def median_and_tail(values: Sequence[float], *, high_is_good: bool) -> tuple[float, float]:
    """The median, and what one value in ten is worse than: the 10th percentile, or the 90th where low is good."""
    return float(np.median(values)), float(np.percentile(values, 10 if high_is_good else 90))


def _levels(picture: Image) -> NDArray[Any]:
    return np.asarray(picture.convert("RGB"), np.float64)
