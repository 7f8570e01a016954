"""Looking for change where none should be: a check of an edit under way, by a few rows outside its mask.

An edit's prediction is compared with its source's on the cells around the mask, and on a sparse lattice of others. If
much of the difference lies outside, the mask is too small; but things that stay may change a little as their neighbours
do, and are left alone. Pure arithmetic on grids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fisedit.sparse_kernels.dilation import dilate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.values import BoolGrid, EditMask

    Heat = NDArray[np.float32]

AT = 0.2
"""Share of the steps after which an edit is checked, once."""

SPACING = 6
"""Cells between two samples outside the mask."""

REACH = 2
"""Cells around a mask in which a change belongs to it."""

LEAK = 0.6
"""How much of the change that a mask holds may lie around it, in cells that change as much as the mask does on average,
and as far from things that stay. Of 74 swaps and removals in drawn scenes three have more with the true mask, two with
our own, and 54 with half of the true one; were things that stay not left alone, 6, 9 and 56."""

EVERYWHERE = 0.6
"""Difference to the source far from the mask, in the median over samples and in units of the mean inside it, from which
the whole picture changes. In those 74 edits it is .57 at most, with the true mask and with our own; in 45 of 50 changes
of the background, run as if a square were all that changes, it is more. (The mean would take a thing that stays and
moves a little for the whole picture.)"""


class Leak(Exception):
    """Raised out of a run whose mask is too small: `grid` [h, w] would do, or no mask if `everywhere`."""

    def __init__(self, grid: BoolGrid, step: int, *, everywhere: bool) -> None:
        super().__init__(f"the edit leaked from its mask at step {step}")
        self.grid, self.step, self.everywhere = grid, step, everywhere


@dataclass(frozen=True, eq=False)
class Check:
    """What to compute besides the mask, and when: at `step`, `cells` [h, w]; `mask` is the one to check, and it may not
    grow into those `taken`.

    One that was `passed` before finds nothing, but moves roundings as it did then.
    """

    mask: BoolGrid
    cells: BoolGrid
    step: int
    taken: BoolGrid
    passed: bool = False

    def look(self, difference: Heat) -> None:
        """Compare.

        Args:
            difference: between the edit's prediction and the source's, floats [h, w], known in the mask and `cells`.

        Raises:
            Leak: the mask is too small.
        """
        if self.passed:
            return
        inside, reach = difference[self.mask], dilate(self.mask, REACH)
        around, samples = reach & ~self.mask & ~self.taken, self.cells & ~reach
        changed = around & (difference >= inside.mean())
        everywhere = bool(samples.any()) and float(np.median(difference[samples])) > EVERYWHERE * float(inside.mean())
        if everywhere or float(difference[changed].sum()) > LEAK * float(inside.sum()):
            raise Leak(self.mask | (dilate(changed, 1) & (self.mask | around)), self.step, everywhere=everywhere)


def check(mask: EditMask, steps: int, start: int = 0, *, passed: bool = False) -> Check:
    """The check of an edit of so many steps, the first of them `start`, over a mask."""
    cells = dilate(mask.grid, REACH)
    cells[SPACING // 2 :: SPACING, SPACING // 2 :: SPACING] = True
    taken = np.zeros_like(cells) if mask.others is None else dilate(mask.others, REACH)
    return Check(mask.grid, cells & ~mask.grid, start + step(steps), taken, passed)


def step(steps: int) -> int:
    """Which of so many steps an edit is checked at."""
    return max(1, round(AT * steps))
