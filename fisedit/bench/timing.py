"""Wall-clock times of calls that take turns, so that a machine whose speed drifts affects all of them alike.

And what memory they took.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import torch

Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Interval:
    """A figure of several rounds.

    Args:
        median: The median of the rounds.
        low: the smallest.
        high: the largest.
    """

    median: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Ready for JSON."""
        return asdict(self)


def interval(values: Sequence[float]) -> Interval:
    """Median and range.

    Args:
        values: one a round.
    """
    return Interval(median(values), min(values), max(values))


def ratio(over: Sequence[float], of: Sequence[float]) -> Interval:
    """Return how many times longer one call takes than another in the same round.

    Args:
        over: seconds of the longer one.
        of: seconds of the other.
    """
    return interval([a / b for a, b in zip(over, of, strict=True)])


def interval_text(figure: dict[str, float], unit: str = "x") -> str:
    """Median and range of rounds, such as "9.0x (8.7 to 9.4)".

    Args:
        figure: {"median", "low", "high"}.
        unit: after the median.
    """
    digits = 2 if figure["low"] < 10 else 1
    return f"{figure['median']:.{digits}f}{unit} ({figure['low']:.{digits}f} to {figure['high']:.{digits}f})"


def median_seconds(calls: Calls, repeats: int) -> dict[str, float]:
    """Median seconds of each call, taking turns, after one warm-up.

    Args:
        calls: by name.
        repeats: number of rounds.
    """
    return {name: median(seconds) for name, seconds in seconds_by_round(calls, repeats).items()}


def seconds_by_round(
    calls: Calls,
    repeats: int,
    warm_up: Mapping[str, Callable[[], object]] | None = None,
    before_round: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each call in every round, after one warm-up.

    Args:
        calls: by name.
        repeats: number of rounds.
        warm_up: name -> what warms a call up, where it is not the call itself.
        before_round: called before the warm-up and before every round, not timed.
    """
    before_round()
    for name, call in calls.items():
        (warm_up or {}).get(name, call)()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        before_round()
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


def peak_memory(device: torch.device) -> int:
    """The most bytes that were used so far, of a GPU's memory, or of the process's.

    Args:
        device: where the model is.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
