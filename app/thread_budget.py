"""The processor's cores, shared by those who paint at once.

OpenMP keeps a team of helpers for every thread that ever computed. Where all teams together are larger than the
machine, they sleep instead of waiting awake, and a small model runs at half its speed. So nothing here computes in a
thread that stays, and who begins while others are at work takes a smaller team. A team also waits for its slowest:
where steps are short, and the page draws many of them, it leaves a core to the server and the browser. Knows threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Lock, Thread
from typing import TypeVar

T = TypeVar("T")


def apart(job: Callable[[], T]) -> T:
    """What a job returns or raises; it runs in a thread that ends with it, and the thread's team with that."""
    done = Future[T]()

    def work() -> None:
        try:
            done.set_result(job())
        except BaseException as error:  # noqa: BLE001 (raised by `result`; else who waits there would for ever)
            done.set_exception(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        return done.result()
    finally:
        if done.done():  # else who waits was interrupted
            thread.join()


class Cores:
    """As many as torch takes; all of them for somebody alone."""

    def __init__(self) -> None:
        from torch import get_num_threads  # here, because the page's functions load without torch

        self._all, self._users, self._lock = get_num_threads(), 0, Lock()

    @contextmanager
    def shared(self, *, quick: bool) -> Iterator[int]:
        """The calling thread's team for as long as the block runs, which is given its size; see `apart`.

        Args:
            quick: whether steps are short.
        """
        from torch import set_num_threads

        with self._lock:
            self._users += 1
            team = max(1, (self._all - quick) // self._users)
        set_num_threads(team)
        try:
            yield team
        finally:
            with self._lock:
                self._users -= 1
