"""Masks that break sparse code: one cell, corners, borders, checkerboards, several blobs, noise, everything."""

from __future__ import annotations

import numpy as np


def grids(height: int, width: int) -> dict[str, np.ndarray]:
    """Boolean grids [height, width] by name; each has at least one cell."""
    names = "one_cell corner border row checkerboard blobs square noise all_but_one everything".split()
    shapes = {name: np.zeros((height, width), bool) for name in names}
    shapes["one_cell"][height // 2, width // 3] = True
    shapes["corner"][:2, -2:] = True
    shapes["border"][[0, -1], :] = True
    shapes["row"][height // 2] = True
    shapes["checkerboard"][::2, ::2] = shapes["checkerboard"][1::2, 1::2] = True
    shapes["blobs"][1:4, 1:4] = shapes["blobs"][-4:-1, -5:-1] = shapes["blobs"][height // 2, 0] = True
    shapes["square"][height // 4 : height // 2, width // 4 : width // 2] = True
    shapes["noise"] = np.random.default_rng(0).random((height, width)) < 0.2
    shapes["all_but_one"][:] = True
    shapes["all_but_one"][3, 4] = False
    shapes["everything"][:] = True
    return shapes


def square(h: int, w: int, top: int, left: int, side: int) -> np.ndarray:
    grid = np.zeros((h, w), bool)
    grid[top : top + side, left : left + side] = True
    return grid
