"""Hands on a Ray cluster: the one that RAY_ADDRESS names, or one of this machine that lives as long as the run.

Every hand is an actor that loads the model once. Items name files, so all machines must see them at the same paths. An
item whose worker is lost goes to another. Knows Ray and no model.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from fisedit.batch.pool import GRACE, Pool, load
from fisedit.batch.values import Failed, Item, Made, Settings
from fisedit.errors import FisEditError, InputError, ModelError

MOST_LOSSES = 2
"""Workers that may be lost over an item before it counts as the reason."""

_ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "error"}
_STORE = 256 << 20
"""Bytes of a cluster of our own for results on their way; what is more goes through the disk."""


def require() -> None:
    """Raises InputError where Ray is not installed."""
    if find_spec("ray") is None:
        raise InputError("--executor ray needs Ray, which is not installed; run: pip install 'fisedit[ray]'")


@contextmanager
def open_pool(workers: int, settings: Settings) -> Iterator[Pool]:
    """So many actors, as far as the cluster has room for them; none outlives the block.

    Raises:
        InputError: Ray is not installed, or its cluster cannot be reached or has no CPU.
    """
    require()
    for name, value in _ENVIRONMENT.items():  # before Ray is imported, which reads them then
        os.environ.setdefault(name, value)
    import ray

    with redirect_stdout(sys.stderr):  # where Ray tells of workers that it lost
        try:
            pool = _Actors(ray, workers, settings, _connect(ray, workers))
            try:
                yield pool
            finally:
                pool.close()
        finally:
            ray.shutdown()


def _connect(ray: Any, workers: int) -> int | None:
    """Join the cluster, or start one; returns the threads of a worker, None for what Ray says."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    there, threads = os.environ.get("RAY_ADDRESS", "local"), None
    what = f"RAY_ADDRESS must lead to a Ray cluster with our token, got {there}"
    if there == "local":
        what = "Ray must start on this machine, and did not"
        quiet |= {"include_dashboard": False, "num_cpus": workers, "object_store_memory": _STORE}
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # else Ray writes one into the user's home
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        if "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, (os.cpu_count() or 1) // workers)
    try:
        _reach(there)
        with _hushed():
            ray.init(there, **quiet)
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        said = str(error).strip().partition("\n")[0]
        raise InputError(f"{what} ({said})") from error
    return threads


def _reach(there: str) -> None:
    """Raises OSError where nobody listens at an address, which Ray would try for minutes."""
    host, _, port = there.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep what Ray's native code writes on stderr, before it heeds any level, off it."""
    sys.stderr.flush()
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Remote:
    """A hand somewhere in the cluster.

    Args:
        folder: where relative names begin. threads: that it may compute with; None for what Ray says.
    """

    def __init__(self, settings: Settings, folder: str, threads: int | None) -> None:
        self._settings = settings
        with suppress(OSError):  # a machine that has no such folder needs whole names alone
            os.chdir(folder)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch

    def place(self) -> tuple[str, int]:
        """The node and the process that it is."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def load(self) -> FisEditError | None:
        """Load the model; returns why it cannot be."""
        try:
            self._hand = load(self._settings)
        except FisEditError as error:
            return error
        return None

    def attempt(self, item: Item) -> Made | Failed:
        """As `Hand.attempt`."""
        return self._hand.attempt(item)


@dataclass(eq=False)
class _Seat:
    """An actor, where it says it is, the answer it owes, and what it has in hand since when; None when it waits for an
    item."""

    actor: Any
    place: Any
    answer: Any
    item: Item | None
    since: float = field(default_factory=monotonic)
    ready: bool = False


class _Actors:
    """Actors, started when there is something to do, wherever the cluster has or gets room."""

    def __init__(self, ray: Any, count: int, settings: Settings, threads: int | None) -> None:
        self._ray, self._settings, self._threads = ray, settings, threads
        has = ray.cluster_resources()
        if has.get("CPU", 0) < 1:
            raise InputError("the Ray cluster must have a CPU for a worker, got none; start a node with one")
        gpu = settings.device != "cpu" and has.get("GPU", 0) >= 1
        self._new = ray.remote(num_cpus=1, num_gpus=int(gpu))(Remote)
        self._seats: list[_Seat | None] = [None] * count
        self._losses = Counter[Item]()
        self._stillborn = 0

    def idle(self) -> list[int]:
        waiting = [n for n, seat in enumerate(self._seats) if seat and not seat.item]
        return waiting + [n for n, seat in enumerate(self._seats) if not seat]

    def give(self, hand: int, item: Item) -> None:
        seat = self._seats[hand]
        if seat is None:
            actor = self._new.remote(self._settings, str(Path.cwd()), self._threads)
            self._seats[hand] = _Seat(actor, actor.place.remote(), actor.load.remote(), item)
        else:
            seat.answer, seat.item, seat.since = seat.actor.attempt.remote(item), item, monotonic()

    def results(self) -> Iterator[tuple[int, Item, Made | Failed]]:
        self._help()
        asked = {seat.answer: (n, seat) for n, seat in enumerate(self._seats) if seat and seat.item}
        told = self._ray.wait(list(asked), timeout=self._patience())[0]
        for answer, (n, seat) in asked.items():
            if answer in told:
                yield from self._hear(n, seat)
            elif self._left(seat) <= 0:
                self._end(self._stop(n))
                why = f"took longer than {self._settings.timeout:g} seconds and did not stop"
                yield n, _item(seat), Failed(why, monotonic() - seat.since)

    def close(self) -> None:
        """Stop every actor at once."""
        for n, seat in enumerate(self._seats):
            if seat:
                self._stop(n)

    def _help(self) -> None:
        """Let who has nothing to do take the items of those who wait for a machine or the model, perhaps in vain."""
        late = [n for n, seat in enumerate(self._seats) if seat and not seat.ready]
        free = [n for n, seat in enumerate(self._seats) if seat and not seat.item]
        for n, other in zip(free, late, strict=False):
            self.give(n, _item(self._stop(other)))

    def _hear(self, n: int, seat: _Seat) -> Iterator[tuple[int, Item, Made | Failed]]:
        """What an actor says, or that it is lost."""
        item = _item(seat)
        try:
            said = self._ray.get(seat.answer)
        except self._ray.exceptions.RayError as error:
            yield from self._lost(n, item, error)
            return
        if not seat.ready:
            if said is not None:
                raise said
            seat.ready, self._stillborn = True, 0
            self.give(n, item)
            return
        seat.item = None
        if isinstance(said, Failed) and said.broken:
            self._stop(n)
        yield n, item, said

    def _lost(self, n: int, item: Item, error: Exception) -> Iterator[tuple[int, Item, Made | Failed]]:
        """A lost actor: its item goes to another, unless it seems to be what kills."""
        seat = self._stop(n)
        if not seat.ready:
            self._stillborn += 1
            if self._stillborn > MOST_LOSSES:
                why = str(error).strip().rpartition("\n")[2]
                raise ModelError(f"workers must live to load the model, got {self._stillborn} that died ({why})")
        self._losses[item] += seat.ready
        if self._losses[item] < MOST_LOSSES:
            self.give(n, item)
            return
        memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
        why = f"{MOST_LOSSES} workers were lost over it" + (", as memory ran out" if memory else "")
        yield n, item, Failed(why, monotonic() - seat.since, memory=memory)

    def _stop(self, n: int) -> _Seat:
        seat, self._seats[n] = self._seats[n], None
        assert seat is not None
        self._ray.kill(seat.actor)
        return seat

    def _end(self, seat: _Seat) -> None:
        """Kill a process that hears nothing, and would hold its CPU for ever, by a task beside it."""
        node, pid = self._ray.get(seat.place)
        beside = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        task = self._ray.remote(num_cpus=0, max_retries=0)(_kill)
        task.options(scheduling_strategy=beside).remote(pid)

    def _left(self, seat: _Seat) -> float:
        """Seconds until a seat's item must be out; loading the model takes what it takes."""
        if not (seat.item and seat.ready):
            return float("inf")
        return seat.since + self._settings.timeout + GRACE - monotonic()

    def _patience(self) -> float:
        """Seconds to wait for an answer, in which Ray lets no interrupt through."""
        return max(0.0, min([0.2, *(self._left(seat) for seat in self._seats if seat)]))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _item(seat: _Seat) -> Item:
    assert seat.item is not None
    return seat.item
