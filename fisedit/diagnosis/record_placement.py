"""The place of each step's record under a limit of memory, so that an edit takes the fewest seconds. Pure values.

A knapsack in which every step takes one of several placements, solved exactly. Galvatron and OSDP plan layers for
training so. After every step only the sums are kept that no other one beats in both bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RecordPlacement:
    """A way to keep a step's record.

    Args:
        name: Its name, such as "memory".
        bytes: The bytes of memory that it takes.
        seconds: The seconds that the step of an edit takes then.
    """

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _Sum:
    """Placements of the first steps: their bytes and seconds, the last one, and the sum before it."""

    bytes: int
    seconds: float
    last: RecordPlacement | None = None
    before: _Sum | None = None


def place_records(steps: Sequence[Sequence[RecordPlacement]], limit: int) -> tuple[RecordPlacement, ...] | None:
    """The placement of every step that takes the fewest seconds, and of those the fewest bytes.

    Args:
        steps: what each step may take.
        limit: bytes of memory of all steps together.

    Returns:
        One placement a step; None where nothing fits.
    """
    sums = [_Sum(0, 0.0)]
    for choices in steps:
        longer = [
            _Sum(found.bytes + one.bytes, found.seconds + one.seconds, one, found)
            for found in sums
            for one in choices
            if found.bytes + one.bytes <= limit
        ]
        sums = _unbeaten(longer)
    return _placements(sums[-1]) if sums else None  # the most bytes are the fewest seconds


def _unbeaten(sums: list[_Sum]) -> list[_Sum]:
    """Those that take fewer seconds than every one of fewer bytes, by bytes."""
    kept: list[_Sum] = []
    for found in sorted(sums, key=lambda one: (one.bytes, one.seconds)):
        if not kept or found.seconds < kept[-1].seconds:
            kept.append(found)
    return kept


def _placements(found: _Sum) -> tuple[RecordPlacement, ...]:
    chosen: list[RecordPlacement] = []
    one: _Sum | None = found
    while one is not None and one.last is not None:
        chosen.append(one.last)
        one = one.before
    return tuple(reversed(chosen))
