"""What a process left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """What a process left behind."""

    status: int
    out: str
    err: str

    def refused(self, code: str, *words: str, status: int = 2) -> None:
        """Check that it said one line on stderr and nothing on stdout."""
        assert (self.status, self.out) == (status, "")
        assert self.err.startswith(f"error[{code}]: ") and self.err.count("\n") == 1, self.err
        assert all(word in self.err for word in words), self.err


def until(true: Callable[[], bool], seconds: float = 300) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
