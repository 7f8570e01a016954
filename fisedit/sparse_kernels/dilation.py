"""Dilation and erosion of grids of latent cells. Knows numpy alone; scipy is imported at the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fisedit.errors import InputError

if TYPE_CHECKING:
    from fisedit.values import BoolGrid


def dilate(grid: BoolGrid, cells: int) -> BoolGrid:
    """The grid with every cell within `cells` steps, diagonals included; clipped at the border.

    Args:
        grid: booleans [h, w].
        cells: the radius, 0 or more latent cells.

    Returns:
        Booleans [h, w], a superset of `grid`.

    Raises:
        InputError: negative `cells`.
    """
    from scipy.ndimage import maximum_filter

    return np.asarray(maximum_filter(grid, size=_window(cells), mode="constant", cval=False), bool)


def erode(grid: BoolGrid, cells: int) -> BoolGrid:
    """The grid without the cells within `cells` steps of the outside; the frame's border does not count as outside.

    Args:
        grid: booleans [h, w].
        cells: the radius, 0 or more latent cells.

    Returns:
        Booleans [h, w], a subset of `grid`; possibly empty.

    Raises:
        InputError: negative `cells`.
    """
    from scipy.ndimage import minimum_filter

    return np.asarray(minimum_filter(grid, size=_window(cells), mode="constant", cval=True), bool)


def _window(cells: int) -> int:
    if cells < 0:
        raise InputError(f"cells must be 0 or more, got {cells}; use erode to make a mask smaller, dilate for larger")
    return 2 * cells + 1
