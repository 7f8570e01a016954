"""`python -m benchmarks.row_diagram docs/rows.svg`: the rows that a sparse step computes at every level, drawn.

The grids are those of Stable Diffusion at 512x512 pixels, the rows those of the planner's own tables. Knows SVG.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fisedit.bench.workload import STEP_DILATION, square_mask
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.storage.files import write_text

AREA, SIDE, LEVELS = 0.05, 64, 4
_EDGE, _GAP, _TOP = 168, 26, 34  # of a drawn grid, in pixels


def draw() -> str:
    """The diagram as SVG, four grids side by side."""
    plan = make_row_plan(dilate(square_mask(AREA, SIDE), STEP_DILATION), LEVELS)
    grids = []
    for i, level in enumerate(plan.levels):
        side = SIDE >> i
        grid = np.zeros(side * side, bool)
        grid[level.active.numpy()] = True
        grids.append(_grid(grid.reshape(side, side), i * (_EDGE + _GAP)))
    width, height = LEVELS * (_EDGE + _GAP) - _GAP, _TOP + _EDGE + 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="12">', *grids, "</svg>"]) + "\n"


def _grid(active: np.ndarray, left: int) -> str:
    """One level's grid [h, w] with its rows, and how many those are."""
    side = len(active)
    cell = _EDGE / side
    cells = "".join(
        f'<rect x="{left + x * cell:g}" y="{_TOP + y * cell:g}" width="{cell:g}" height="{cell:g}"/>'
        for y, x in zip(*np.nonzero(active), strict=True)
    )
    rows = int(active.sum())
    told = f"{side}x{side}: {rows} of {side * side} rows, {rows / side**2:.0%}"
    frame = f'<rect x="{left}" y="{_TOP}" width="{_EDGE}" height="{_EDGE}" fill="#f1f0ee" stroke="#78716c"/>'
    text = f'<text x="{left}" y="{_TOP - 10}" fill="#78716c">{told}</text>'
    return f'{text}{frame}<g fill="#e11d48" stroke="#fff" stroke-width=".3">{cells}</g>'


if __name__ == "__main__":
    write_text(draw(), Path(sys.argv[1]))
