"""A line of people who wait for something that all share: who asks first is served first. Knows threads alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

from app.validation import Busy

_MOMENT = 0.1
"""Seconds between two looks whether who waits was stopped."""


class Line:
    """Who waits, in order; `changed` guards what they wait for."""

    def __init__(self) -> None:
        self.changed = Condition()
        self._waiting = deque[object]()

    @contextmanager
    def turn(self, ready: Callable[[], bool], check: Callable[[], None], patience: float, why: str) -> Iterator[None]:
        """Waits until nobody is ahead and all is ready; the block runs while nobody else looks.

        Args:
            check: called while waiting; may raise. patience: seconds to wait. why: what who loses it is told.

        Raises:
            Busy: patience is over.
        """
        ticket = object()
        with self.changed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or not ready():
                    check()
                    if patience <= 0:
                        raise Busy(why)
                    self.changed.wait(_MOMENT)
                    patience -= _MOMENT
                yield
            finally:
                self._waiting.remove(ticket)
                self.changed.notify_all()

    @contextmanager
    def told(self) -> Iterator[None]:
        """The block runs while nobody else looks, and then all look."""
        with self.changed:
            yield
            self.changed.notify_all()
