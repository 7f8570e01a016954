"""Metrics of masks and pictures: pure functions on arrays and pictures. Knows no model.

Masks are boolean: grids [h, w] of latent cells, or pixels [H, W]. Pictures are RGB, [H, W] pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

RESAMPLES = 2000
"""Samples of the bootstrap."""

SEAM_BAND = 4
"""Pixels either side of a mask's boundary in which a seam is looked for."""


@dataclass(frozen=True)
class MaskOverlap:
    """Overlap of a mask with the truth.

    Args:
        iou: intersection over union, 0 to 1.
        precision: true share of the mask, 0 to 1; 0 for an empty mask.
        recall: share of the truth in the mask, 0 to 1.
    """

    iou: float
    precision: float
    recall: float


def mask_overlap(found: BoolGrid, true: BoolGrid) -> MaskOverlap:
    """Compare two masks of one size.

    Args:
        found: booleans of any shape.
        true: booleans of that shape, not all False.
    """
    intersection, union = (float(np.sum(mask)) for mask in (found & true, found | true))
    return MaskOverlap(
        intersection / union, intersection / max(1.0, float(found.sum())), intersection / float(true.sum())
    )


@dataclass(frozen=True)
class MaskFit:
    """The fit of a mask of latent cells to true pixels.

    Args:
        cells: overlap by latent cells, of which one is true if any of its pixels is.
        pixels: overlap by pixels.
        coverage: pixels in the mask's 8x8 blocks over true pixels; 1 is a mask without an extra pixel.
    """

    cells: MaskOverlap
    pixels: MaskOverlap
    coverage: float


def mask_fit(grid: BoolGrid, true: BoolGrid) -> MaskFit:
    """Compare a mask of latent cells with true pixels.

    Args:
        grid: booleans [h, w].
        true: booleans [8h, 8w], not all False.
    """
    blocks = cells_to_pixels(grid)
    cells, pixels = mask_overlap(grid, pixels_to_cells(true)), mask_overlap(blocks, true)
    return MaskFit(cells, pixels, float(blocks.sum() / true.sum()))


def pixels_to_cells(pixels: BoolGrid) -> BoolGrid:
    """The latent cells [h, w] in which any pixel [8h, 8w] is true."""
    return masks.grid_of_mask(pixels, *pixels.shape)


def cells_to_pixels(grid: BoolGrid) -> BoolGrid:
    """The pixels [8h, 8w] of latent cells [h, w]."""
    return np.kron(grid, np.ones((LATENT_FACTOR, LATENT_FACTOR), bool))


def psnr(got: Image, expected: Image, inside: BoolGrid) -> float:
    """Peak signal to noise ratio in dB; 148 for equal pictures.

    Args:
        got: [H, W] pixels.
        expected: The expected picture, of the same size.
        inside: booleans [H, W]: the pixels that are compared.
    """
    a, b = (_levels(picture)[inside] for picture in (got, expected))
    return float(10 * np.log10(255**2 / max(float(np.mean((a - b) ** 2)), IDENTICAL)))


def ssim(got: Image, expected: Image, inside: BoolGrid) -> float:
    """Structural similarity (Wang et al., 2004) in windows of 7 pixels, its mean over some pixels; 1 for equal ones.

    Args:
        got: [H, W] pixels, 7 or more each way.
        expected: The expected picture, of the same size.
        inside: booleans [H, W], not all False.
    """
    from skimage.metrics import structural_similarity

    whole = structural_similarity(_levels(got), _levels(expected), channel_axis=-1, data_range=255, full=True)[1]
    return float(whole[inside].mean())


def change_covered(source: Image, edited: Image, inside: BoolGrid) -> float:
    """The share of an edit's change, by squared levels, that lies in a mask, 0 to 1; 1 where nothing changed.

    Args:
        source: [H, W] pixels.
        edited: The edited picture, of the same size.
        inside: booleans [H, W].
    """
    change = np.square(_levels(edited) - _levels(source)).sum(-1)
    return float(change[inside].sum() / change.sum()) if change.any() else 1.0


def equal_outside(got: Image, expected: Image, grid: BoolGrid) -> bool:
    """Return whether two pictures have the same bytes in all pixels outside a mask.

    Args:
        got: [8h, 8w] pixels.
        expected: The expected picture, of the same size.
        grid: booleans [h, w].
    """
    outside = ~cells_to_pixels(grid)
    return bool((_levels(got)[outside] == _levels(expected)[outside]).all())


def seam(got: Image, reference: Image, source: Image, grid: BoolGrid) -> float | None:
    """Return the visibility of a mask's boundary over that in a reference: 1 for as visible.

    At every pair of neighbouring pixels across the boundary, the largest difference of neighbours is taken within
    `SEAM_BAND` pixels either side, along the line through both: an edge that mending moved is found as well as one that
    it left. The measure is the mean over all pairs. Outside the mask the reference is the source itself, which an edit
    leaves as it is: an opened picture is sharper there than a decoder's, and that is no seam.

    Args:
        got: [8h, 8w] pixels.
        reference: The reference picture, of the same size.
        source: The source picture, of the same size.
        grid: booleans [h, w].

    Returns:
        The ratio; None where the mask has no boundary, or the reference no difference near it.
    """
    inside = cells_to_pixels(grid)
    step = _boundary_step(got, got, inside)
    reference_step = _boundary_step(reference, source, inside)
    return step / reference_step if step is not None and reference_step else None


def _boundary_step(picture: Image, outside: Image, inside: BoolGrid) -> float | None:
    windows, steps = np.lib.stride_tricks.sliding_window_view, []
    for axis in (0, 1):
        own, kept = (np.abs(np.diff(_levels(image), axis=axis)).mean(-1) for image in (picture, outside))
        touched = windows(inside, 2, axis).any(-1)  # pairs with a pixel in the mask
        window = [(0, 0), (0, 0)]
        window[axis] = (SEAM_BAND - 1, SEAM_BAND - 1)
        near = windows(np.pad(np.where(touched, own, kept), window), 2 * SEAM_BAND - 1, axis)
        steps.append(near.max(-1)[np.diff(inside, axis=axis)])  # of booleans: where neighbours differ
    boundary = np.concatenate(steps)
    return float(boundary.mean()) if len(boundary) else None


def share_outside(pixels: BoolGrid, grid: BoolGrid) -> float:
    """The share of pixels that lie outside a mask, 0 to 1; 0 where there are none.

    Args:
        pixels: booleans [8h, 8w].
        grid: booleans [h, w].
    """
    return float((pixels & ~cells_to_pixels(grid)).sum() / max(1, pixels.sum()))


def bootstrap_interval(values: Sequence[float], statistic: Callable[..., Any]) -> tuple[float, float]:
    """The 95 % percentile interval of a statistic by the bootstrap (Efron, 1979), the same for the same values.

    Args:
        values: at least one.
        statistic: The statistic of an array, along `axis`: `np.median` or `np.mean`.
    """
    array = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.percentile(statistic(array[drawn], axis=1), (2.5, 97.5))
    return float(low), float(high)


def f1_score(detected: Sequence[bool], true: Sequence[bool]) -> float | None:
    """Harmonic mean of precision and recall; None where nothing is true and nothing was detected.

    Args:
        detected: whether each was detected.
        true: whether each is true.
    """
    pairs = list(zip(detected, true, strict=True))
    hits, errors = pairs.count((True, True)), pairs.count((True, False)) + pairs.count((False, True))
    return 2 * hits / (2 * hits + errors) if hits + errors else None


def median_and_tail(values: Sequence[float], *, high_is_good: bool) -> tuple[float, float]:
    """The median, and the percentile that one value in ten is worse than.

    Args:
        values: at least one.
        high_is_good: whether that is the 10th percentile; else it is the 90th.
    """
    return float(np.median(values)), float(np.percentile(values, 10 if high_is_good else 90))


def _levels(picture: Image) -> NDArray[Any]:
    return np.asarray(picture.convert("RGB"), np.float64)
