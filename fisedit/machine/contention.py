"""Notices that other programs take the cores that a run computes on, and chooses the number of threads by it.

Linux alone tells; elsewhere no machine is busy. Knows threads; no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fisedit.errors import MeasurementError

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Linux's account of the calling thread: nanoseconds on a core, and those that it could run and had none."""

BUSY, CALM = 0.5, 0.2
"""Share of a run's time without a core from which the machine counts as busy, and up to which it no longer does."""


MAX_SPREAD = 1.6
"""Ratio of the third quartile of the seconds of alike runs to the first above which they tell nothing."""


def waited_seconds() -> float:
    """Seconds in which the calling thread could run and had no core; 0 where the system does not tell."""
    try:
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def busy_note(waited: float) -> str:
    """Return a note that the machine is busy, or "".

    Args:
        waited: share of a run's time without a core, 0 to 1.
    """
    return f"this machine is busy: the run waited for a core for {waited:.0%} of its time" if waited >= BUSY else ""


def check_repeats(seconds: Sequence[float], waited: float) -> None:
    """Raise MeasurementError where other programs ran beside runs that are alike.

    Args:
        seconds: What each of them took.
        waited: share of all their time without a core, 0 to 1.
    """
    low, high = np.quantile(seconds, (0.25, 0.75))
    why = busy_note(waited)
    if high > MAX_SPREAD * low:
        why = f"runs that are alike took {min(seconds):.2g} to {max(seconds):.2g} s"
    if why:
        raise MeasurementError(f"measuring needs a machine that does nothing else, got: {why}; stop it and try again")


@dataclass
class ThreadChoice:
    """The number of threads to compute with: a single one while other programs take the cores.

    Threads wait for the last one at the end of each layer, and the more there are the later that gets its core.
    On two cores beside about seven other programs, two threads took 1.4 times the seconds of one for a source of the
    demo model. For an edit they took 1.8 times.

    Args:
        available: number of threads where the machine is not busy.
    """

    available: int
    busy: bool = False

    def observe(self, waited: float) -> None:
        """Learn from a run.

        Args:
            waited: share of its time without a core, 0 to 1.
        """
        self.busy = waited > CALM if self.busy else waited >= BUSY

    @property
    def threads(self) -> int:
        """The number for the next run."""
        return 1 if self.busy else self.available
