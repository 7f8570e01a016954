"""Who does the work: this process, or processes that load the model once and are replaced when they die.

Knows processes and no model: what edits is imported where it runs.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from fisedit.batch.values import Failed, Item, Made, Settings
from fisedit.errors import FisEditError, ModelError, NumericsError

if TYPE_CHECKING:
    from fisedit.batch.worker import Hand

GRACE = 10.0
"""Seconds after its time that an item which does not stop by itself is stopped with its process."""

_READY = "ready"


class Pool(Protocol):
    """Hands that work; each is told by a number."""

    def idle(self) -> list[int]:
        """Hands that wait for an item."""

    def give(self, hand: int, item: Item) -> None:
        """Let an idle hand do an item."""

    def results(self) -> Iterator[tuple[int, Item, Made | Failed]]:
        """What came out since the last call; waits a moment for something to.

        Raises:
            FisEditError: the model cannot be loaded.
        """


@contextmanager
def open_pool(workers: int, settings: Settings) -> Iterator[Pool]:
    """So many worker processes, or this process for 0; none outlives the block."""
    if workers == 0:
        yield _Here(settings)
        return
    pool = _Workers(workers, settings)
    try:
        yield pool
    finally:
        pool.close()


class _Here:
    """One hand in this process. It cannot be stopped in the middle of a step, nor replaced."""

    def __init__(self, settings: Settings) -> None:
        self._hand = load(settings)
        self._item: Item | None = None

    def idle(self) -> list[int]:
        return [] if self._item else [0]

    def give(self, hand: int, item: Item) -> None:
        self._item = item

    def results(self) -> Iterator[tuple[int, Item, Made | Failed]]:
        item, self._item = self._item, None
        if item is not None:
            yield 0, item, self._hand.attempt(item)


@dataclass(eq=False)
class _Worker:
    """A process, the pipe to it, and what it has in hand since when."""

    process: BaseProcess
    pipe: Connection
    item: Item | None = None
    since: float = field(default_factory=monotonic)
    ready: bool = False


class _Workers:
    """Worker processes, started when there is something to do."""

    def __init__(self, count: int, settings: Settings) -> None:
        self._settings = settings
        self._threads = max(1, (os.cpu_count() or 1) // count)
        self._stillborn = 0
        self._workers: list[_Worker | None] = [None] * count

    def idle(self) -> list[int]:
        return [n for n, worker in enumerate(self._workers) if worker is None or worker.item is None]

    def give(self, hand: int, item: Item) -> None:
        worker = self._workers[hand] or self._start(hand)
        worker.item, worker.since = item, monotonic()
        with suppress(OSError):  # dead already: its end of the pipe tells so
            worker.pipe.send(item)

    def results(self) -> Iterator[tuple[int, Item, Made | Failed]]:
        pipes = {worker.pipe: (n, worker) for n, worker in enumerate(self._workers) if worker}
        told = wait(list(pipes), self._patience())
        for pipe, (n, worker) in pipes.items():
            if pipe in told:
                yield from self._hear(n, worker)
            elif self._left(worker) <= 0:
                yield from self._lost(n, f"took longer than {self._settings.timeout:g} seconds and did not stop")

    def close(self) -> None:
        """Stop every worker at once."""
        for n, worker in enumerate(self._workers):
            if worker:
                self._stop(n)

    def _start(self, n: int) -> _Worker:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._settings, self._threads), daemon=True)
        process.start()
        theirs.close()  # so that its death ends the pipe
        self._workers[n] = worker = _Worker(process, ours)
        return worker

    def _hear(self, n: int, worker: _Worker) -> Iterator[tuple[int, Item, Made | Failed]]:
        """What a worker says, or that it died."""
        try:
            said = worker.pipe.recv()
        except (EOFError, OSError):
            yield from self._lost(n, "")
            return
        if said == _READY:
            worker.ready, worker.since, self._stillborn = True, monotonic(), 0
        elif isinstance(said, FisEditError):
            raise said
        else:
            assert worker.item is not None
            item, worker.item = worker.item, None
            if isinstance(said, Failed) and said.broken:
                self._stop(n)
            yield n, item, said

    def _lost(self, n: int, why: str) -> Iterator[tuple[int, Item, Made | Failed]]:
        """A worker that is dead or will not stop: its item fails, the next finds a new one."""
        worker = self._workers[n]
        assert worker is not None
        worker.process.join(0.2)  # its pipe ends a little before it does
        code = self._stop(n)
        if worker.item is None:
            return
        if worker.ready:
            killed = not why and code == -signal.SIGKILL  # as the system does when memory runs out
            reason, seconds = why or f"its worker ended with {_ending(code)}", monotonic() - worker.since
            yield n, worker.item, Failed(reason, seconds, memory=killed)
            return
        self._stillborn += 1
        if self._stillborn > 1:
            raise ModelError(f"workers must live to load the model, got {_ending(code)} twice; use fewer --workers")
        self.give(n, worker.item)

    def _stop(self, n: int) -> int | None:
        """Kill a worker; returns how it ended."""
        worker, self._workers[n] = self._workers[n], None
        assert worker is not None
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        code = worker.process.exitcode
        worker.process.close()
        return code

    def _left(self, worker: _Worker) -> float:
        """Seconds until a worker's item must be out; loading the model takes what it takes."""
        if worker.item is None or not worker.ready:
            return float("inf")
        return worker.since + self._settings.timeout + GRACE - monotonic()

    def _patience(self) -> float:
        return max(0.0, min([1.0, *(self._left(worker) for worker in self._workers if worker)]))


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return f"status {code}"


def _serve(pipe: Connection, settings: Settings, threads: int) -> None:
    """A worker's life: load the model, then answer every item until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt reaches all; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # before torch; workers share the machine's cores
    try:
        hand = load(settings)
    except FisEditError as error:
        pipe.send(error)
        return
    pipe.send(_READY)
    with suppress(EOFError, OSError):
        while True:
            pipe.send(hand.attempt(pipe.recv()))


def load(settings: Settings) -> Hand:
    """The model, and what edits with it.

    Raises:
        FisEditError: whatever it is that keeps the run from starting; weights that are NaN are the model's fault.
    """
    from fisedit.batch.worker import Hand

    try:
        return Hand(settings)
    except NumericsError as error:
        raise ModelError(str(error)) from error
    except FisEditError:
        raise
    except Exception as error:  # the border of a process: whatever it is, one line says it
        raise ModelError(f"the model cannot be loaded ({type(error).__name__}: {error}); try --device cpu") from error


def _die_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
