"""How long a run will take: a measured table, and what runs took on this machine. Knows stats; runs nothing."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fisedit.values import EditStats

_SHARES = (0.0, 0.062, 0.2, 0.333, 1.0), (0.035, 0.11, 0.233, 0.417, 1.0)
"""Share of a dense run's multiply-accumulates -> share of its seconds: whole edits of 5, 15 and 25 % of a picture by
`fisedit bench edit` (Stable Diffusion 1.5, 512x512, 20 steps, two CPU cores; see benchmarks/README.md)."""

_REMEMBERED = 5


class Pace:
    """Seconds to come, learnt from runs that are over."""

    def __init__(self) -> None:
        self._dense: deque[float] = deque(maxlen=_REMEMBERED)  # seconds per multiply-accumulate
        self._sparse: deque[float] = deque(maxlen=_REMEMBERED)  # seconds taken / seconds of the table

    def saw(self, stats: EditStats) -> None:
        """Learn from a run."""
        if not stats.macs:
            return
        seconds = stats.seconds["total"]
        if not stats.unet_evaluations_sparse:
            self._dense.append(seconds / stats.macs)
        elif (table := self._table(stats.macs, stats.macs_dense)) is not None:
            self._sparse.append(seconds / table)

    def dense(self, macs: int) -> float | None:
        """Seconds of a dense run of so many multiply-accumulates; None before any was seen."""
        return median(self._dense) * macs if self._dense else None

    def sparse(self, macs: int, macs_dense: int) -> float | None:
        """Seconds of a sparse run that spends `macs` where a dense one would spend `macs_dense`."""
        table = self._table(macs, macs_dense)
        return None if table is None else table * (median(self._sparse) if self._sparse else 1.0)

    def _table(self, macs: int, macs_dense: int) -> float | None:
        whole = self.dense(macs_dense)
        return None if whole is None else whole * float(np.interp(macs / macs_dense, *_SHARES))
