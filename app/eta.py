"""The estimate of a run's seconds from earlier runs on this machine, where there is no cost table of it yet.

Knows stats; runs nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fisedit.values import EditStats

_SECONDS_BY_MACS = (0.0, 0.062, 0.2, 0.333, 1.0), (0.09, 0.149, 0.278, 0.424, 1.0)
"""Share of a dense run's multiply-accumulates -> share of its seconds.

Measured on whole balanced edits of 5, 15 and 25 % of `fisedit bench edit`. That ran Stable Diffusion 1.5 at 512x512 for
20 steps on two CPU cores; the value of 0 is extrapolated.
"""

_WINDOW = 5
"""Number of the last runs whose median counts."""


class RuntimeEstimator:
    """Predicts the seconds of a run from runs that are over."""

    def __init__(self) -> None:
        self._dense = _RecentMedian()  # seconds per multiply-accumulate
        self._unsaved = _RecentMedian()  # of the seconds that the table saves, the share that this model does not save

    def observe(self, stats: EditStats, *, trial: bool = False) -> None:
        """Learn from a run.

        Args:
            stats: stats of the run.
            trial: whether no page showed the run. Trials count until there is a run that a page shows.
        """
        if not stats.macs:
            return
        seconds = stats.seconds["total"]
        if not stats.unet_evaluations_sparse:
            self._dense.add(seconds / stats.macs, trial=trial)
        elif (whole := self.dense_seconds(stats.macs_dense)) is not None:
            table = _share(stats.macs, stats.macs_dense)
            self._unsaved.add((seconds / whole - table) / (1 - table), trial=trial)

    def dense_seconds(self, macs: int) -> float | None:
        """Seconds of a dense run of so many multiply-accumulates; None before any was observed."""
        return None if self._dense.value is None else self._dense.value * macs

    def sparse_seconds(self, macs: int, macs_dense: int) -> float | None:
        """Seconds of a sparse run; None before any dense run was observed.

        Args:
            macs: multiply-accumulates of the run.
            macs_dense: multiply-accumulates of a dense run of the same config.
        """
        whole, table = self.dense_seconds(macs_dense), _share(macs, macs_dense)
        share = max(table + (self._unsaved.value or 0.0) * (1 - table), _SECONDS_BY_MACS[1][0])
        return None if whole is None else whole * share


class _RecentMedian:
    """The median of the last runs; of trials until there is a run of another kind."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)
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
    """Return the share of a dense run's seconds by the table; below 1."""
    return min(float(np.interp(macs / macs_dense, *_SECONDS_BY_MACS)), 0.99)
