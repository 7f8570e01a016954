"""Runs items on workers: in this process, or in processes that load the model once and are replaced when they die.

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

from fisedit.batch.values import BatchItem, BatchSettings, ItemFailure, ItemOutput
from fisedit.errors import FisEditError, ModelError, NumericsError

if TYPE_CHECKING:
    from fisedit.batch.worker import BatchWorker

GRACE_SECONDS = 10.0
"""Seconds beyond its time limit after which an item that does not stop is stopped with its process."""

_READY = "ready"

Results = Iterator[tuple[int, BatchItem, ItemOutput | ItemFailure]]
"""(slot, item, result) of items that are finished."""


class WorkerPool(Protocol):
    """A fixed number of slots, each with one worker that takes one item at a time."""

    def idle_slots(self) -> list[int]:
        """Slots that have no item."""

    def submit(self, slot: int, item: BatchItem) -> None:
        """Start an item in an idle slot."""

    def results(self) -> Results:
        """The results since the last call; waits for a short time if there are none.

        Raises:
            FisEditError: The model cannot be loaded.
        """


@contextmanager
def open_pool(workers: int, settings: BatchSettings) -> Iterator[WorkerPool]:
    """A pool on this machine; no worker outlives the block.

    Args:
        workers: Number of processes, 0 for this process.
        settings: The model, and the options of every edit.
    """
    if workers == 0:
        yield _InProcessPool(settings)
        return
    pool = _ProcessPool(workers, settings)
    try:
        yield pool
    finally:
        pool.close()


class _InProcessPool:
    """One worker in this process. It cannot be stopped in the middle of a step, nor replaced."""

    def __init__(self, settings: BatchSettings) -> None:
        self._worker = load_worker(settings)
        self._item: BatchItem | None = None

    def idle_slots(self) -> list[int]:
        return [] if self._item else [0]

    def submit(self, slot: int, item: BatchItem) -> None:
        self._item = item

    def results(self) -> Results:
        item, self._item = self._item, None
        if item is not None:
            yield 0, item, self._worker.process(item)


@dataclass(eq=False)
class WorkerSlot:
    """The state of one worker.

    Args:
        item: The item that it has, if any.
        since: Start of that item by the monotonic clock, in seconds.
        ready: Whether the model is loaded.
    """

    item: BatchItem | None = None
    since: float = field(default_factory=monotonic)
    ready: bool = False

    def seconds_left(self, timeout: float) -> float:
        """Seconds until the item must be finished; infinite without an item or while the model is loaded."""
        return self.since + timeout + GRACE_SECONDS - monotonic() if self.item and self.ready else float("inf")

    def overdue(self, timeout: float) -> ItemFailure:
        """The failure of an item that exceeded its time limit."""
        return ItemFailure(f"took longer than {timeout:g} seconds and did not stop", monotonic() - self.since)


@dataclass(eq=False, kw_only=True)
class _ProcessSlot(WorkerSlot):
    """A worker process and the pipe to it."""

    process: BaseProcess
    pipe: Connection


class _ProcessPool:
    """Worker processes, each started with its slot's first item."""

    def __init__(self, count: int, settings: BatchSettings) -> None:
        self._settings = settings
        self._threads = max(1, (os.cpu_count() or 1) // count)
        self._loading_failures = 0
        self._slots: list[_ProcessSlot | None] = [None] * count

    def idle_slots(self) -> list[int]:
        return [n for n, slot in enumerate(self._slots) if slot is None or slot.item is None]

    def submit(self, slot: int, item: BatchItem) -> None:
        state = self._slots[slot] or self._start(slot)
        state.item, state.since = item, monotonic()
        with suppress(OSError):  # dead already: `results` sees the end of the pipe
            state.pipe.send(item)

    def results(self) -> Results:
        pipes = {slot.pipe: (n, slot) for n, slot in enumerate(self._slots) if slot}
        readable = wait(list(pipes), self._wait_seconds())
        for pipe, (n, slot) in pipes.items():
            if pipe in readable:
                yield from self._receive(n, slot)
            elif slot.item and slot.seconds_left(self._settings.timeout) <= 0:
                self._stop(n)
                yield n, slot.item, slot.overdue(self._settings.timeout)

    def close(self) -> None:
        """Kill every worker."""
        for n, slot in enumerate(self._slots):
            if slot:
                self._stop(n)

    def _start(self, n: int) -> _ProcessSlot:
        context = mp.get_context("spawn")
        parent_pipe, worker_pipe = context.Pipe()
        process = context.Process(target=_serve, args=(worker_pipe, self._settings, self._threads), daemon=True)
        process.start()
        worker_pipe.close()  # so that the pipe ends with the process
        self._slots[n] = slot = _ProcessSlot(process=process, pipe=parent_pipe)
        return slot

    def _receive(self, n: int, slot: _ProcessSlot) -> Results:
        """Handle a worker's message, or its death."""
        try:
            message = slot.pipe.recv()
        except (EOFError, OSError):
            yield from self._handle_exit(n, slot)
            return
        if message == _READY:
            slot.ready, slot.since, self._loading_failures = True, monotonic(), 0
        elif isinstance(message, FisEditError):
            raise message
        else:
            assert slot.item is not None
            item, slot.item = slot.item, None
            if isinstance(message, ItemFailure) and message.broken:
                self._stop(n)
            yield n, item, message

    def _handle_exit(self, n: int, slot: _ProcessSlot) -> Results:
        """Fail the item of a dead worker; an item whose worker died while it loaded the model is tried once more."""
        slot.process.join(0.2)  # the pipe ends a little before the process
        code = self._stop(n)
        if slot.item is None:
            return
        if slot.ready:
            killed = code == -signal.SIGKILL  # as the system does when memory runs out
            reason = f"its worker ended with {_describe_exit(code)}"
            yield n, slot.item, ItemFailure(reason, monotonic() - slot.since, memory=killed)
            return
        self._loading_failures += 1
        if self._loading_failures > 1:
            exit_text = _describe_exit(code)
            raise ModelError(f"workers must live to load the model, got {exit_text} twice; use fewer --workers")
        self.submit(n, slot.item)

    def _stop(self, n: int) -> int | None:
        """Kill a worker; returns its exit code, negative for a signal."""
        slot, self._slots[n] = self._slots[n], None
        assert slot is not None
        slot.process.kill()
        slot.process.join()
        slot.pipe.close()
        code = slot.process.exitcode
        slot.process.close()
        return code

    def _wait_seconds(self) -> float:
        return max(0.0, min([1.0, *(slot.seconds_left(self._settings.timeout) for slot in self._slots if slot)]))


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return f"status {code}"


def _serve(pipe: Connection, settings: BatchSettings, threads: int) -> None:
    """The main function of a worker process: load the model, then process every item until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt reaches all processes; the parent decides
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # before torch; workers share the machine's cores
    try:
        worker = load_worker(settings)
    except FisEditError as error:
        pipe.send(error)
        return
    pipe.send(_READY)
    with suppress(EOFError, OSError):
        while True:
            pipe.send(worker.process(pipe.recv()))


def load_worker(settings: BatchSettings) -> BatchWorker:
    """Load the model.

    Args:
        settings: The model, and the options of every edit.

    Raises:
        FisEditError: The run cannot start; weights that are NaN are a ModelError.
    """
    from fisedit.batch.worker import BatchWorker

    try:
        return BatchWorker(settings)
    except NumericsError as error:
        raise ModelError(str(error)) from error
    except FisEditError:
        raise
    except Exception as error:  # the border of a process: any error becomes one line
        raise ModelError(f"the model cannot be loaded ({type(error).__name__}: {error}); try --device cpu") from error


def _exit_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
