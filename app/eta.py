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
        self._dense = _Learnt()  # seconds per multiply-accumulate
        self._fixed = _Learnt()  # which share of the seconds that the table saves is not saved here: small models' are

    def saw(self, stats: EditStats, *, trial: bool = False) -> None:
        """Learn from a run. A trial, which no page shows while it runs, counts until there is one that a page does."""
        if not stats.macs:
            return
        seconds = stats.seconds["total"]
        if not stats.unet_evaluations_sparse:
            self._dense.add(seconds / stats.macs, trial=trial)
        elif (whole := self.dense(stats.macs_dense)) is not None:
            table = _share(stats.macs, stats.macs_dense)
            self._fixed.add((seconds / whole - table) / (1 - table), trial=trial)

    def dense(self, macs: int) -> float | None:
        """Seconds of a dense run of so many multiply-accumulates; None before any was seen."""
        return None if self._dense.value is None else self._dense.value * macs

    def sparse(self, macs: int, macs_dense: int) -> float | None:
        """Seconds of a sparse run that spends `macs` where a dense one would spend `macs_dense`."""
        whole, table = self.dense(macs_dense), _share(macs, macs_dense)
        return None if whole is None else whole * max(table + (self._fixed.value or 0.0) * (1 - table), _SHARES[1][0])


class _Learnt:
    """The median of the last runs; of trials until there is a run of another kind."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_REMEMBERED)
        self._trials = True

    @property
    def value(self) -> float | None:
        return median(self._values) if self._values else None

    def add(self, value: float, *, trial: bool) -> None:
        if trial and not self._trials:
            return
        if self._trials and not trial:
            self._values.clear()
            self._trials = False
        self._values.append(value)


def _share(macs: int, macs_dense: int) -> float:
    """Of a dense run's seconds, by the table; below 1."""
    return min(float(np.interp(macs / macs_dense, *_SHARES)), 0.99)
