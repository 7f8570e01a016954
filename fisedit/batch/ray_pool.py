"""Runs items on a Ray cluster: the one of RAY_ADDRESS, or one on this machine that ends with the run.

Every worker is an actor that loads the model once. Items name files, so all machines need them at the same paths. The
item of a lost worker goes to another. Knows Ray and no model.
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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from fisedit.batch.pool import Results, WorkerPool, WorkerSlot, load_worker
from fisedit.batch.values import BatchItem, BatchSettings, ItemFailure, ItemOutput
from fisedit.errors import FisEditError, InputError, ModelError

MAX_LOSSES = 2
"""Number of workers that may be lost with an item before the item fails."""

_ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "error"}
_STORE_BYTES = 256 << 20
"""Bytes of the object store of a cluster that this run starts; results beyond it go through the disk."""


def require_ray() -> None:
    """Raise InputError if Ray is not installed."""
    if find_spec("ray") is None:
        raise InputError("--executor ray needs Ray, which is not installed; run: pip install 'fisedit[ray]'")


@contextmanager
def open_pool(workers: int, settings: BatchSettings) -> Iterator[WorkerPool]:
    """A pool of actors, as far as the cluster has room for them; none outlives the block.

    Args:
        workers: Number of actors, 1 or more.
        settings: The model, and the options of every edit.

    Raises:
        InputError: Ray is not installed, or its cluster cannot be reached or has no CPU.
    """
    require_ray()
    for name, value in _ENVIRONMENT.items():  # before the import of Ray, which reads them
        os.environ.setdefault(name, value)
    import ray

    with redirect_stdout(sys.stderr):  # where Ray reports lost workers
        try:
            pool = _ActorPool(ray, workers, settings, _connect(ray, workers))
            try:
                yield pool
            finally:
                pool.close()
        finally:
            ray.shutdown()


def _connect(ray: Any, workers: int) -> int | None:
    """Join the cluster, or start one; returns the number of compute threads per worker, None for Ray's choice."""
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    address, threads = os.environ.get("RAY_ADDRESS", "local"), None
    what = f"RAY_ADDRESS must lead to a Ray cluster with our token, got {address}"
    if address == "local":
        what = "Ray must start on this machine, and did not"
        options |= {"include_dashboard": False, "num_cpus": workers, "object_store_memory": _STORE_BYTES}
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # else Ray writes one into the user's home folder
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        if "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, (os.cpu_count() or 1) // workers)
    try:
        _check_listening(address)
        with _native_stderr_closed():
            ray.init(address, **options)
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(f"{what} ({first_line})") from error
    return threads


def _check_listening(address: str) -> None:
    """Raise OSError if nothing listens at an address, which Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


@contextmanager
def _native_stderr_closed() -> Iterator[None]:
    """Discard what Ray's native code writes to stderr before it reads the logging level."""
    sys.stderr.flush()
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as null_device:
        os.dup2(null_device.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class RemoteWorker:
    """A worker anywhere in the cluster.

    Args:
        settings: The model, and the options of every edit.
        folder: Working folder, in which relative paths begin.
        threads: Number of compute threads; None for Ray's choice.
    """

    def __init__(self, settings: BatchSettings, folder: str, threads: int | None) -> None:
        self._settings = settings
        with suppress(OSError):  # a machine without this folder can use absolute paths only
            os.chdir(folder)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch

    def location(self) -> tuple[str, int]:
        """The worker's node id and process id."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def load(self) -> FisEditError | None:
        """Load the model; returns the error if that fails."""
        try:
            self._worker = load_worker(self._settings)
        except FisEditError as error:
            return error
        return None

    def process(self, item: BatchItem) -> ItemOutput | ItemFailure:
        """Process an item as `BatchWorker.process` does."""
        return self._worker.process(item)


@dataclass(eq=False, kw_only=True)
class _ActorSlot(WorkerSlot):
    """An actor, the reference of its location, and that of the call it executes."""

    actor: Any
    location: Any
    call: Any


class _ActorPool:
    """Actors, each started with its slot's first item, wherever the cluster has or gets room."""

    def __init__(self, ray: Any, count: int, settings: BatchSettings, threads: int | None) -> None:
        self._ray, self._settings, self._threads = ray, settings, threads
        resources = ray.cluster_resources()
        if resources.get("CPU", 0) < 1:
            raise InputError("the Ray cluster must have a CPU for a worker, got none; start a node with one")
        gpu = settings.device != "cpu" and resources.get("GPU", 0) >= 1
        self._actor_class = ray.remote(num_cpus=1, num_gpus=int(gpu))(RemoteWorker)
        self._slots: list[_ActorSlot | None] = [None] * count
        self._losses = Counter[BatchItem]()
        self._loading_failures = 0

    def idle_slots(self) -> list[int]:
        started = [n for n, slot in enumerate(self._slots) if slot and not slot.item]
        return started + [n for n, slot in enumerate(self._slots) if not slot]

    def submit(self, slot: int, item: BatchItem) -> None:
        state = self._slots[slot]
        if state is None:
            actor = self._actor_class.remote(self._settings, str(Path.cwd()), self._threads)
            location, call = actor.location.remote(), actor.load.remote()
            self._slots[slot] = _ActorSlot(item, actor=actor, location=location, call=call)
        else:
            state.call, state.item, state.since = state.actor.process.remote(item), item, monotonic()

    def results(self) -> Results:
        self._move_waiting_items()
        calls = {slot.call: (n, slot) for n, slot in enumerate(self._slots) if slot and slot.item}
        finished = self._ray.wait(list(calls), timeout=self._wait_seconds())[0]
        for call, (n, slot) in calls.items():
            if call in finished:
                yield from self._receive(n, slot)
            elif slot.seconds_left(self._settings.timeout) <= 0:
                self._kill_process(self._stop(n))
                yield n, _item_of(slot), slot.overdue(self._settings.timeout)

    def close(self) -> None:
        """Kill every actor."""
        for n, slot in enumerate(self._slots):
            if slot:
                self._stop(n)

    def _move_waiting_items(self) -> None:
        """Give items of actors that still wait for a machine or the model to idle actors: they may wait in vain."""
        loading = [n for n, slot in enumerate(self._slots) if slot and not slot.ready]
        idle = [n for n, slot in enumerate(self._slots) if slot and not slot.item]
        for n, other in zip(idle, loading, strict=False):
            self.submit(n, _item_of(self._stop(other)))

    def _receive(self, n: int, slot: _ActorSlot) -> Results:
        """Handle the result of an actor's call, or the loss of the actor."""
        item = _item_of(slot)
        try:
            result = self._ray.get(slot.call)
        except self._ray.exceptions.RayError as error:
            yield from self._handle_loss(n, item, error)
            return
        if not slot.ready:
            if result is not None:
                raise result
            slot.ready, self._loading_failures = True, 0
            self.submit(n, item)
            return
        slot.item = None
        if isinstance(result, ItemFailure) and result.broken:
            self._stop(n)
        yield n, item, result

    def _handle_loss(self, n: int, item: BatchItem, error: Exception) -> Results:
        """Give the item of a lost actor to another one, until `MAX_LOSSES` were lost with it."""
        slot = self._stop(n)
        if not slot.ready:
            self._loading_failures += 1
            if self._loading_failures > MAX_LOSSES:
                last_line = str(error).strip().rpartition("\n")[2]
                raise ModelError(
                    f"workers must live to load the model, got {self._loading_failures} that died ({last_line})"
                )
        self._losses[item] += slot.ready
        if self._losses[item] < MAX_LOSSES:
            self.submit(n, item)
            return
        memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
        reason = f"{MAX_LOSSES} workers were lost over it" + (", as memory ran out" if memory else "")
        yield n, item, ItemFailure(reason, monotonic() - slot.since, memory=memory)

    def _stop(self, n: int) -> _ActorSlot:
        slot, self._slots[n] = self._slots[n], None
        assert slot is not None
        self._ray.kill(slot.actor)
        return slot

    def _kill_process(self, slot: _ActorSlot) -> None:
        """Kill a process that ignores Ray, and would hold its CPU for ever, by a task on its node."""
        node, pid = self._ray.get(slot.location)
        same_node = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        task = self._ray.remote(num_cpus=0, max_retries=0)(_kill)
        task.options(scheduling_strategy=same_node).remote(pid)

    def _wait_seconds(self) -> float:
        """Seconds to wait for a result; short, as Ray lets no interrupt through meanwhile."""
        return max(0.0, min([0.2, *(slot.seconds_left(self._settings.timeout) for slot in self._slots if slot)]))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _item_of(slot: _ActorSlot) -> BatchItem:
    assert slot.item is not None
    return slot.item
