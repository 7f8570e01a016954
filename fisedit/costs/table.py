"""A table of measured seconds: layers by kind, level and run, over the work that a call does. Pure values.

A run is what layers are called in. "dense" and "sparse" are steps, and "shifted" ones read features shifted by a dense
step. "decode dense" and "decode sparse" are decodes, and "edit" is what an edit does beside them. Work is rows of all
items for a layer, and rows times keys for self-attention.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from statistics import median
from typing import Any

VERSION = 2
"""The version of the table's JSON; another one is measured anew."""

SAME_WORK_RATIO = 1.1
"""Works that differ by less than this factor are one point."""

MAX_NUMBER = 1e15
"""The upper bound on seconds, work and bytes in a table's file."""

Key = tuple[str, str, int]
"""(run, kind of layer, level)."""


@dataclass(frozen=True)
class Curve:
    """Seconds over work, by straight lines between measured points.

    Args:
        works: ascending.
        seconds: at each of them.
    """

    works: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, work: float) -> float:
        """Seconds of so much work, at least 0.

        Below the first point and beyond the last one the line through the nearest two goes on, never falling. A single
        point is taken for proportional beyond it, and for constant below.

        Args:
            work: rows, or rows times keys.
        """
        x, y = self.works, self.seconds
        if len(x) == 1:
            return y[0] * max(1.0, work / x[0]) if x[0] else y[0]
        i = min(max(bisect_left(x, work), 1), len(x) - 1)
        slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
        if work < x[0]:
            return max(0.0, y[0] - max(0.0, slope) * (x[0] - work))
        if work > x[-1]:
            overall = y[-1] / x[-1]
            return y[-1] + min(max(slope, 0.5 * overall), 1.2 * overall) * (work - x[-1])
        return y[i - 1] + slope * (work - x[i - 1])


def fit(points: Iterable[tuple[float, float]]) -> Curve:
    """The curve through measured points, the median of those whose work is the same.

    Args:
        points: (work, seconds) in any order.
    """
    groups: list[list[tuple[float, float]]] = []
    for work, seconds in sorted(points):
        if groups and work <= SAME_WORK_RATIO * groups[-1][0][0]:
            groups[-1].append((work, seconds))
        else:
            groups.append([(work, seconds)])
    return Curve(
        tuple(sum(w for w, _ in group) / len(group) for group in groups),
        tuple(median(s for _, s in group) for group in groups),
    )


@dataclass(frozen=True, eq=False)
class CostTable:
    """The time that one machine takes for the layers of one architecture.

    Args:
        curves: (run, kind, level) -> seconds over work, of all such layers of a run together.
        about: the machine, torch's version, architecture, dtype and date, ready for JSON.
        rates: bytes a second of "memory", "disk write" and "disk read".
        layers: name of a layer of the UNet -> the fewest seconds that a dense evaluation took it, for `fisedit doctor`.
    """

    curves: Mapping[Key, Curve]
    about: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, float] = field(default_factory=dict)

    def keys_of(self, run: str) -> list[Key]:
        """The entries of a run.

        Args:
            run: its name.
        """
        return [key for key in self.curves if key[0] == run]

    def step(self, run: str, rows: Sequence[int], sizes: Sequence[int], batch: int) -> float:
        """Seconds of an evaluation of the UNet.

        Args:
            run: "dense", "sparse" or "shifted"; one that was not measured is taken for sparse.
            rows: computed at each level, finest first.
            sizes: positions of each level.
            batch: items.
        """
        keys = self.keys_of(run) or self.keys_of("sparse")
        return sum(self.curves[key].at(step_work(key[1], key[2], rows, sizes, batch)) for key in keys)

    def sum(self, run: str, works: Mapping[str, float]) -> float:
        """Seconds of a run that is no step, by the work of every kind; kinds without a curve take nothing.

        Args:
            run: its name.
            works: kind -> work.
        """
        found = ((self.curves.get((run, kind, NO_MAP)), work) for kind, work in works.items())
        return sum(curve.at(work) for curve, work in found if curve is not None)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [
            {"run": run, "kind": kind, "level": level, "works": curve.works, "seconds": curve.seconds}
            for (run, kind, level), curve in self.curves.items()
        ]
        header = {"version": VERSION, "about": dict(self.about), "rates": dict(self.rates)}
        return header | {"curves": rows, "layers": dict(self.layers)}


NO_MAP = -1
"""Level of what belongs to no feature map; as `fisedit.machine.stopwatch.NO_LEVEL`."""


def from_dict(value: Mapping[str, Any]) -> CostTable:
    """A table from its JSON.

    Args:
        value: from `CostTable.as_dict`.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it is damaged, or of another version.
    """
    if value["version"] != VERSION:
        raise ValueError(f"version must be {VERSION}, got {value['version']!r}")
    curves = {}
    for row in value["curves"]:
        curve = Curve(_numbers(row["works"]), _numbers(row["seconds"]))
        if len(curve.works) != len(curve.seconds) or not curve.works or list(curve.works) != sorted(set(curve.works)):
            raise ValueError(f"works must ascend, one for each of seconds, got {row}")
        curves[str(row["run"]), str(row["kind"]), index(row["level"])] = curve
    if not {"dense", "sparse"} <= {run for (run, _, _), curve in curves.items() if any(curve.seconds)}:
        raise ValueError("dense and sparse steps must have curves, and take seconds")
    about, (rates, layers) = dict(value["about"]), (value[name].items() for name in ("rates", "layers"))
    _numbers((about["record_bytes"], *(rate for _, rate in rates)), minimum=1)
    if about["pixels"] not in range(64, 2049, 8):
        raise ValueError(f"pixels must be 64 to 2048, divisible by 8, got {about['pixels']!r}")
    _numbers(seconds for _, seconds in layers)
    return CostTable(curves, about, dict(rates), dict(layers))


def _numbers(values: Iterable[Any], minimum: float = 0) -> tuple[float, ...]:
    """Numbers of which sums, products and slopes are finite: 0, or not near it, and bounded. Raises ValueError."""
    found = tuple(values)
    for value in found:
        if type(value) not in (int, float) or not (minimum <= value <= MAX_NUMBER and (value == 0 or value > 1e-12)):
            raise ValueError(f"numbers must be {minimum} to {MAX_NUMBER:g}, got {value!r}")
    return tuple(map(float, found))


def step_work(kind: str, level: int, rows: Sequence[int], sizes: Sequence[int], batch: int) -> float:
    """The work of a step's layers of one kind and level.

    Args:
        kind: The kind of layer.
        level: The level of their map, `NO_MAP` for the finest.
        rows: computed at each level, finest first.
        sizes: positions of each level.
        batch: items.
    """
    level_index = max(level, 0)
    return float(batch * rows[level_index] * (sizes[level_index] if kind == "attention" else 1))


class Measurements:
    """Measured seconds that a table is fitted to."""

    def __init__(self) -> None:
        self._points: dict[Key, list[tuple[float, float]]] = defaultdict(list)

    def add(self, key: Key, work: float, seconds: float) -> None:
        """Add one measurement.

        Args:
            key: (run, kind, level).
            work: The work that was done, in rows, or rows times keys.
            seconds: The time that it took, in seconds.
        """
        self._points[key].append((work, seconds))

    def __iter__(self) -> Iterator[tuple[Key, float, float]]:
        """All measurements: key, work and seconds."""
        return ((key, work, seconds) for key, points in self._points.items() for work, seconds in points)

    def table(
        self, about: Mapping[str, Any], rates: Mapping[str, float], layers: Mapping[str, float] | None = None
    ) -> CostTable:
        """The table of the measurements.

        Args:
            about: see `CostTable`.
            rates: see `CostTable`.
            layers: see `CostTable`; None for none.
        """
        return CostTable({key: fit(points) for key, points in self._points.items()}, about, rates, layers or {})
