"""One thread that does all inference, and the queue of jobs that wait for it.

Runs are done in the order in which they came. A brief job, such as a preview, goes before waiting runs, and also
between two steps of a run that uses the same weights. As one thread alone computes, nothing that it uses needs a lock,
and OpenMP keeps one team of threads. Knows threads; neither models nor sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

from app.validation import Busy

T = TypeVar("T")

IDLE = 5.0
"""Seconds without jobs after which the worker is idle."""

_CLOSING = 10.0
"""Seconds that closing waits for the running job."""


@dataclass(frozen=True, eq=False)
class InferenceJob(Generic[T]):
    """A function that waits for the worker.

    Args:
        function: called on the worker's thread.
        weights: equal for jobs that use the same model with the same LoRAs; None for one that uses none.
        brief: whether it may run between two steps of another job of the same weights, or of any without its own.
        idle: whether it is idle work, which ends as soon as another job waits.
        outcome: what the function returned or raised; cancelling it withdraws a job that has not begun.
    """

    function: Callable[[], T]
    weights: Hashable = None
    brief: bool = False
    idle: bool = False
    outcome: Future[T] = field(default_factory=Future)

    def run(self) -> None:
        """Call the function, unless the job was withdrawn."""
        if not self.outcome.set_running_or_notify_cancel():
            return
        try:
            self.outcome.set_result(self.function())
        except BaseException as error:  # noqa: BLE001 (raised where the outcome is read)
            self.outcome.set_exception(error)


class InferenceWorker:
    """A thread that runs jobs one at a time."""

    def __init__(self) -> None:
        self._waiting = deque[InferenceJob[Any]]()
        self._running: InferenceJob[Any] | None = None
        self._idle: dict[Hashable, Callable[[Callable[[], bool]], bool]] = {}
        self._changed, self._closed = Condition(), False
        self._thread = Thread(target=self._serve, name="inference", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T], weights: Hashable = None, *, brief: bool = False) -> InferenceJob[T]:
        """Queue a job.

        Args:
            function: called on the worker's thread.
            weights: equal for jobs that use the same model with the same LoRAs.
            brief: whether it may run between two steps of another job of the same weights.
        """
        job = InferenceJob(function, weights, brief)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
        return job

    def when_idle(self, name: Hashable, function: Callable[[Callable[[], bool]], bool]) -> None:
        """Call a function on the worker's thread once no job came for a while.

        Args:
            name: identifies the function; one that is already queued under this name is kept.
            function: gets a function that returns whether jobs are waiting, on which it must return within 0.2 seconds.
                It returns whether it is done, else it is called again once the worker is idle.
        """
        with self._changed:
            self._idle.setdefault(name, function)

    def call(self, function: Callable[[], T], *, brief: bool = False) -> T:
        """Run a function, which uses no model's weights, on the worker's thread, and return or raise what it does.

        `brief` as in `submit`.
        """
        return self.submit(function, brief=brief).outcome.result()

    def jobs_ahead(self, job: InferenceJob[Any]) -> int:
        """Return the number of runs before a waiting one, the running one included; 0 once it has begun.

        Idle work counts for none.
        """
        with self._changed:
            waiting = [other for other in self._waiting if not other.outcome.cancelled()]
            is_running = self._running is not None and not self._running.idle
            return waiting.index(job) + is_running if job in waiting else 0

    def brief_result(self, job: InferenceJob[T], timeout: float) -> T:
        """Return or raise the outcome of a brief job.

        Args:
            job: a brief one that was submitted.
            timeout: seconds to wait for a running job of other weights; idle work gives way, and is waited for.

        Raises:
            Busy: the time is over; the job is withdrawn.
        """
        while True:
            try:
                return job.outcome.result(timeout)
            except TimeoutError:
                if job.outcome.done():
                    return job.outcome.result()
                if self._uses_other_weights(job) and job.outcome.cancel():
                    raise Busy("the app is at work with another model or other LoRAs; try again in a moment") from None

    def run_brief_jobs(self) -> None:
        """Run waiting brief jobs of the running job's weights; called by the running job between two of its steps."""
        while job := self._pop_waiting(lambda job: job.brief and not self._uses_other_weights(job)):
            job.run()

    def close(self) -> None:
        """Withdraw all waiting jobs, and end the thread after the running one."""
        with self._changed:
            self._closed = True
            for job in self._waiting:
                job.outcome.cancel()
            self._changed.notify()
        self._thread.join(_CLOSING)

    def _serve(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a job and run it; returns whether there was one. No reference to a finished job is kept."""
        job = self._wait_for_job()
        if job:
            job.run()
        self._running = None
        return job is not None

    def _wait_for_job(self) -> InferenceJob[Any] | None:
        """The next job, brief ones first, which is the running one from now on; None once the worker is closed."""
        with self._changed:
            while not self._changed.wait_for(self._has_work, IDLE):
                if self._idle:
                    name, function = self._idle.popitem()
                    self._running = InferenceJob(partial(self._run_idle, name, function), idle=True)
                    return self._running
            if self._closed:
                return None
            self._running = self._pop_waiting(lambda job: job.brief) or self._pop_waiting(lambda _: True)
            return self._running

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._closed

    def _run_idle(self, name: Hashable, function: Callable[[Callable[[], bool]], bool]) -> None:
        if not function(self._has_work):
            self.when_idle(name, function)

    def _pop_waiting(self, fits: Callable[[InferenceJob[Any]], bool]) -> InferenceJob[Any] | None:
        """Remove the first waiting job that fits from the queue, and return it; None if there is none."""
        with self._changed:
            job = next(filter(fits, self._waiting), None)
            if job:
                self._waiting.remove(job)
            return job

    def _uses_other_weights(self, job: InferenceJob[Any]) -> bool:
        running = self._running
        if running is None or running.idle or job.weights is None:
            return False
        return running.weights != job.weights
