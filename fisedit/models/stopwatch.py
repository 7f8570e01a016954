"""Seconds by station. Knows a clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Stopwatch:
    """Wall seconds by station."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = perf_counter()

    @contextmanager
    def station(self, name: str) -> Iterator[None]:
        """Add the enclosed time to a station."""
        before = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - before

    def done(self) -> dict[str, float]:
        """All stations and the total."""
        return self.seconds | {"total": perf_counter() - self._start}
