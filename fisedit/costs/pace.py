"""Real seconds of runs over predicted ones: what a prediction is corrected by. Pure values; knows no table."""

from __future__ import annotations

from dataclasses import dataclass, replace

WINDOW = 3
"""Number of the last runs of a kind of which the quickest counts: other programs make a run longer, never shorter."""

ALIKE = 1.25
"""Ratios within this factor of 1 correct no choice between dense and sparse, as runs differ by as much.

Without it an edit near the border would be dense one time and sparse the next."""

SURE = 2
"""Number of slow sparse runs that count; a single one may have been interrupted, or the first of its process."""

MOST_DENSE = 8
"""Number of dense edits after which sparse ones are no longer known to be slower, and are tried again."""


@dataclass(frozen=True)
class Pace:
    """Real over predicted seconds of the last runs. Where work is predicted, seconds of a multiply-accumulate instead.

    Args:
        dense: Ratios of the last dense runs, at most `WINDOW`.
        sparse: Ratios of the last sparse runs, at most `WINDOW`.
        dense_edits: number of edits that ran dense since the last sparse run.
    """

    dense: tuple[float, ...] = ()
    sparse: tuple[float, ...] = ()
    dense_edits: int = 0

    def after(self, ratio: float, *, sparse: bool, edit: bool) -> Pace:
        """The pace after one more run.

        Args:
            ratio: The run's real over its predicted seconds.
            sparse: whether it was sparse.
            edit: whether it was an edit; else a source.
        """
        if sparse:
            return replace(self, sparse=(*self.sparse, ratio)[-WINDOW:], dense_edits=0)
        return replace(self, dense=(*self.dense, ratio)[-WINDOW:], dense_edits=self.dense_edits + edit)

    def of(self, *, sparse: bool) -> float | None:
        """The ratio that the next run will have: of its own kind, or of the other before the first; None before any."""
        own, other = (self.sparse, self.dense) if sparse else (self.dense, self.sparse)
        return min(own or other, default=None)

    @property
    def correction(self) -> float:
        """Factor by which sparse runs take longer, compared with dense ones, than a table says."""
        dense = min(self.dense, default=1.0)
        found = min(self.sparse, default=dense) / dense
        return found if found < 1 / ALIKE or (found > ALIKE and len(self.sparse) >= SURE) else 1.0

    @property
    def is_sure(self) -> bool:
        """Return whether sparse runs were made of late, so that a table that says they are slow was put to the test."""
        return len(self.sparse) >= SURE and self.dense_edits < MOST_DENSE


NO_RUNS = Pace()
