"""An edited picture into its source's: bytes of the source outside the mask, and no seam that shows at its boundary.

Knows pictures and masks; nothing about how either was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.values import BoolGrid

    Levels = NDArray[np.float64]

BLEND_WIDTH = 12
"""Pixels inside the mask over which the edit is led to the source's colours, 1 or more."""

MAX_CORRECTION = 60.0
"""Grey levels of 255 by which a pixel is corrected at most: a larger difference is a cut through an object."""


def composite(source: Image.Image, edited: Image.Image, grid: BoolGrid) -> Image.Image:
    """Take the edited picture inside a mask and the source's bytes outside, without a seam between them.

    What the edited picture lacks to the source just outside the mask is added to it inside, smoothly less over
    `BLEND_WIDTH` pixels: the harmonic function between the boundary and that depth, as in Poisson image editing (Perez
    et al., 2003). So the differences of neighbouring pixels across the boundary are those of the edited picture.

    Args:
        source: of the size 8h x 8w pixels.
        edited: of the same size, decoded a pixel beyond the mask at least.
        grid: booleans [h, w] of latent cells, the mask.
    """
    from scipy.ndimage import distance_transform_edt

    inside = np.kron(grid, np.ones((LATENT_FACTOR, LATENT_FACTOR), bool))
    if inside.all():
        return edited
    old, new = (np.array(picture.convert("RGB"), np.float64) for picture in (source, edited))
    band = inside & (distance_transform_edt(inside) <= BLEND_WIDTH)
    missing = np.clip(old - new, -MAX_CORRECTION, MAX_CORRECTION)
    new[band] += _harmonic(band, np.where(inside[..., None], 0, missing))
    return Image.fromarray(np.where(inside[..., None], new.round().clip(0, 255), old).astype(np.uint8))


def _harmonic(band: BoolGrid, fixed: Levels) -> Levels:
    """The function that equals the mean of its neighbours in a band, and given values around it.

    Args:
        band: booleans [H, W], not the whole picture.
        fixed: values [H, W, C] outside the band; beyond the picture there are no neighbours.

    Returns:
        Values [n, C] of the band's n pixels in row-major order.
    """
    from scipy.sparse import csc_array
    from scipy.sparse.linalg import splu

    count = int(band.sum())
    if not count:
        return np.zeros((0, fixed.shape[-1]))
    own = np.arange(count)
    index = np.pad(np.where(band, np.cumsum(band).reshape(band.shape) - 1, -1), 1, constant_values=-2)
    fixed_padded = np.pad(fixed, ((1, 1), (1, 1), (0, 0)))
    entries, degree, right = [], np.zeros(count), np.zeros((count, fixed.shape[-1]))
    for shift, axis in ((1, 0), (-1, 0), (1, 1), (-1, 1)):
        neighbour = np.roll(index, shift, axis)[1:-1, 1:-1][band]
        degree += neighbour > -2
        right += np.where((neighbour == -1)[:, None], np.roll(fixed_padded, shift, axis)[1:-1, 1:-1][band], 0)
        entries.append((own[neighbour >= 0], neighbour[neighbour >= 0]))
    rows, columns = (np.concatenate([own, *each]) for each in zip(*entries, strict=True))
    values = np.concatenate([degree, np.full(len(rows) - count, -1.0)])
    solved: Levels = splu(csc_array((values, (rows, columns)), shape=(count, count))).solve(right)
    return solved
