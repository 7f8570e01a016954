"""A job from beginning to end: what is left to do, longest first; hand it out, and let what comes back be written.

Knows ledger and pool, no picture and no model.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from fisedit.batch import ray_pool
from fisedit.batch.journal import Journal
from fisedit.batch.manifest import make_plan
from fisedit.batch.pool import Pool, open_pool
from fisedit.batch.result_store import Ledger, sweep
from fisedit.batch.values import Executor, Failed, Item, Job, Made, OnError, Outcome, Settings, Status
from fisedit.errors import InputError
from fisedit.models.paths import identity
from fisedit.storage import files
from fisedit.values import make_generation_config

if TYPE_CHECKING:
    from fisedit.values import OnStep

_POOLS = {Executor.LOCAL: open_pool, Executor.RAY: ray_pool.open_pool}


def look(job: Job, settings: Settings) -> Outcome:
    """What `run` would find; nothing is written, loaded or locked. What it would make is `Status.LEFT`.

    Raises:
        InputError, ModelError: as `run`.
    """
    _check(settings)
    plan, model = make_plan(job), _model(settings)
    return Ledger(job, settings, model, plan, Journal.read(job.output)).outcome()


def run(
    job: Job,
    settings: Settings,
    *,
    workers: int,
    on_error: OnError,
    on_step: OnStep,
    executor: Executor = Executor.LOCAL,
) -> Outcome:
    """Do what is left of a job. SIGINT once finishes what is in hand; twice stops at once.

    Args:
        workers: processes that edit, each with its own model; 0 for this one.
        on_step: called after each item with (items out, items to do, None).
        executor: processes of this machine, or actors of a Ray cluster.

    Raises:
        InputError: a job that contradicts itself, or an output folder that cannot be used or is in use.
        ModelError: the model cannot be loaded. KeyboardInterrupt: SIGINT twice.
    """
    least = int(executor is Executor.RAY)
    if workers < least:
        raise InputError(f"workers must be {least} or more, got {workers}")
    if executor is Executor.RAY:
        ray_pool.require()
    _check(settings)
    start, plan = monotonic(), make_plan(job)
    files.writable(job.output)
    model = _model(settings)
    with _interrupts() as interrupted, Journal.hold(job.output) as held:
        ledger = Ledger(job, settings, model, plan, held)
        left = ledger.left()
        sweep(left)

        def settle(item: Item, result: Made | Failed) -> bool:
            record = ledger.settle(item, result)
            on_step(ledger.settled, len(left), None)
            return not ledger.full and (on_error is OnError.SKIP or record.status is not Status.FAILED)

        queue = _Queue(left)
        while queue.groups:
            workers = min(workers, queue.groups)
            with _POOLS[executor](workers, settings) as pool:
                queue = _Queue(_work(pool, queue, settle, interrupted, crowded=workers > 1))
            workers = min(workers, 1)
        return replace(ledger.outcome(), interrupted=interrupted(), seconds=monotonic() - start)


def _model(settings: Settings) -> str:
    return identity(settings.model, local_files_only=settings.local_files_only)


def _check(settings: Settings) -> None:
    """Refuse now what every single item would be refused for."""
    if not settings.timeout > 0:
        raise InputError(f"timeout must be above 0 seconds, got {settings.timeout:g}")
    make_generation_config(
        "a picture",
        seed=0,
        negative_prompt=settings.negative_prompt,
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        width=512,
        height=512,
        scheduler="ddim",
    )


def _work(
    pool: Pool,
    queue: _Queue,
    settle: Callable[[Item, Made | Failed], bool],
    interrupted: Callable[[], bool],
    *,
    crowded: bool,
) -> list[Item]:
    """Hand items out until there are none, or no more are wanted, and wait for those in hand.

    Args:
        settle: takes what came out; whether more is wanted. crowded: whether hands share the machine's memory.

    Returns:
        Items that lacked memory in a crowd, to be tried again alone.
    """
    again: list[Item] = []
    while True:
        for hand in pool.idle():
            item = None if interrupted() else queue.take(hand)
            if item:
                pool.give(hand, item)
        if not queue.in_hand:
            return [] if queue.closed or interrupted() else again
        for _, item, result in pool.results():
            queue.out += 1
            if crowded and isinstance(result, Failed) and result.memory:
                again.append(item)
            elif not settle(item, result):
                queue.close()


class _Queue:
    """Items to hand out: those of one source to one hand in a row, most work first."""

    def __init__(self, items: Iterable[Item]) -> None:
        groups = defaultdict[object, deque[Item]](deque)
        for item in items:
            groups[item.source].append(item)
        self._waiting = deque(sorted(groups.values(), key=_work_of, reverse=True))
        self._held: dict[int, deque[Item]] = {}
        self.given = self.out = 0
        self.closed = False

    @property
    def groups(self) -> int:
        """Sources that wait."""
        return len(self._waiting)

    @property
    def in_hand(self) -> int:
        """Items that were given and did not come out."""
        return self.given - self.out

    def take(self, hand: int) -> Item | None:
        """The next item for a hand: of the source that it has open, else of the next."""
        if not self._held.get(hand) and self._waiting:
            self._held[hand] = self._waiting.popleft()
        if not self._held.get(hand):
            return None
        self.given += 1
        return self._held[hand].popleft()

    def close(self) -> None:
        """Give nothing more."""
        self.closed = True
        self._waiting.clear()
        self._held.clear()


def _work_of(items: deque[Item]) -> tuple[int, int]:
    """About how much work a source with its edits is: opening costs as an edit does, more for a larger picture."""
    try:
        size = items[0].picture.stat().st_size
    except OSError:
        size = 0
    return len(items), size


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Take SIGINT as a wish to finish, the second time as one to stop; yields whether there was one."""
    asked = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        print("finishing what is in hand; interrupt again to stop at once", file=sys.stderr)  # noqa: T201

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
