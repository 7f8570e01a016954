"""Wall-clock times of calls that take turns, so that a machine whose speed drifts affects all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch


def median_seconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call, taking turns, after one warm-up.

    Args:
        calls: by name.
        repeats: number of turns.
    """
    return {name: median(seconds) for name, seconds in seconds_by_turn(calls, repeats).items()}


def seconds_by_turn(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call in every turn, after one warm-up.

    Args:
        calls: by name.
        repeats: number of turns.
    """
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(measure_seconds(call))
    return times


def measure_seconds(call: Callable[[], object]) -> float:
    """Seconds of one call, with the GPU's work that it starts."""
    _synchronise()
    start = perf_counter()
    call()
    _synchronise()
    return perf_counter() - start


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
