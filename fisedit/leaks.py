"""Looking for change where none should be: a check of an edit under way, by a few rows outside its mask.

An edit's prediction is compared with its source's on the cells computed beyond the mask, which cost nothing, and on a
sparse lattice of others. Where they differ as inside the mask, the mask is too small. Pure arithmetic on grids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fisedit.masks import grow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.values import BoolGrid

    Heat = NDArray[np.float32]

AT = 0.2
"""Share of the steps after which an edit is checked, once."""

SPACING = 6
"""Cells between two samples outside the mask."""

LEAK = 0.5
"""Difference to the source, in units of the mean difference inside the mask, that counts as a change. On the demo model
the mean of the cells around a mask is .29 of that (.44 at the 90th percentile); once the mask is shrunk by a cell it is
.66 (.45 at the 10th), by two 1.4; cells far from any mask have .04."""


class Leak(Exception):
    """Raised out of a run whose mask is too small: `grid` [h, w] would do, or no mask if `everywhere`."""

    def __init__(self, grid: BoolGrid, step: int, *, everywhere: bool) -> None:
        super().__init__(f"the edit leaked from its mask at step {step}")
        self.grid, self.step, self.everywhere = grid, step, everywhere


@dataclass(frozen=True, eq=False)
class Check:
    """What to compute besides the mask, and when: at `step`, `cells` [h, w]; `mask` is the one to check."""

    mask: BoolGrid
    cells: BoolGrid
    step: int

    def look(self, difference: Heat, computed: BoolGrid) -> None:
        """Compare.

        Args:
            difference: between the edit's prediction and the source's, floats [h, w]. computed: where that is known.

        Raises:
            Leak: the mask is too small.
        """
        inside = float(difference[self.mask].mean())
        changed = computed & ~self.mask & (difference > LEAK * inside)
        samples = self.cells & ~grow(self.mask, 2)
        rim = grow(self.mask, 1) & ~self.mask & computed
        everywhere = bool(samples.any()) and float(difference[samples].mean()) > LEAK * inside
        if everywhere or (rim.any() and float(difference[rim].mean()) > LEAK * inside):
            raise Leak(self.mask | grow(changed & grow(self.mask, 2), 1), self.step, everywhere=everywhere)


def check(mask: BoolGrid, steps: int, start: int = 0) -> Check:
    """The check of an edit of so many steps, the first of them `start`, over a mask [h, w]."""
    lattice = np.zeros(mask.shape, bool)
    lattice[SPACING // 2 :: SPACING, SPACING // 2 :: SPACING] = True
    return Check(mask, lattice & ~mask, start + max(1, round(AT * steps)))
