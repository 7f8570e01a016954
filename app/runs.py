"""Runs: inference for a session, reported step by step. Knows sessions and the worker; neither gradio nor torch.

The function runs on the worker's thread, and what it reports goes through a queue to whatever iterates. Stopping the
session ends the run before its next step, or takes it out of the worker's queue. So does closing the iterator, but for
a run of a page, which may be loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

from app.session import WorkKind
from app.validation import MAX_PICTURE_BYTES, MAX_RESULTS
from fisedit.errors import Cancelled, FisEditError, SessionError
from fisedit.machine.contention import waited_seconds

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.session import Session
    from app.sessions import AppState, ModelChoice
    from app.worker import InferenceJob
    from fisedit import Editor, EditResult
    from fisedit.history import History
    from fisedit.values import OnStep

RunJob = Callable[["Editor", "OnStep"], "EditResult | Sequence[EditResult] | float"]
"""Makes a result, or several to choose from, or measures seconds; it tells of its steps."""

_POLL_SECONDS = 0.2
"""Seconds between two checks whether a waiting run was stopped."""

_POLLS_PER_REPORT = 5
"""Checks between two reports of a waiting run. Each lets gradio notice that a client has left."""


@dataclass(frozen=True, eq=False)
class RunProgress:
    """The progress of a run.

    Args:
        step: number of finished steps, 0 to `steps`.
        steps: number of all steps.
        seconds_left: predicted seconds until the end, 0 or more; None where that is not known yet.
        picture: a small preview of one pixel per latent cell, or None.
        result: at the end, what was made.
        seconds: at the end of a dense run for comparison, its duration.
        ahead: while the run waits, the number of runs before it.
    """

    step: int
    steps: int
    seconds_left: float | None = None
    picture: Image | None = None
    result: EditResult | None = None
    seconds: float | None = None
    ahead: int = 0


@dataclass(frozen=True, eq=False)
class RunRequest:
    """The work of a run.

    Args:
        job: called with the session's editor and its `on_step`; returns a result, several candidates, or seconds.
        steps: expected number of steps.
        choice: the model and LoRAs; None for those of the current picture.
        results: number of results that it adds to the history at most.
        kind: RUN or LIVE.
    """

    job: RunJob
    steps: int
    choice: ModelChoice | None = None
    results: int = 1
    kind: WorkKind = WorkKind.RUN


def stream_run(state: AppState, session: Session, run: RunRequest) -> Iterator[RunProgress]:
    """Queue a run, and yield its progress; the last one has the result or the seconds.

    Args:
        state: the app's state, whose worker runs it.
        session: the session, which no other work can use meanwhile.
        run: the work.

    Raises:
        SessionError: the session is full, or what made the current picture is not offered.
        Busy: the session is at work.
        Cancelled: the session was stopped.
    """
    check_room(session.history, run.results)
    if session.picture_bytes >= MAX_PICTURE_BYTES:
        most = f"{MAX_PICTURE_BYTES >> 20} MiB"
        raise SessionError(f"a session holds {most} of pictures; delete some, or save it and begin another")
    session.begin_work(run.kind)
    updates = SimpleQueue[RunProgress | None]()  # None at the end
    try:
        choice = run.choice or state.select_recorded(session, session.current)
    except BaseException:
        session.end_work()
        raise
    work = _work(state, session, run, choice, updates.put)
    job = state.worker.submit(work, choice.weights)

    left = list[bool]()  # True once the progress is no longer read

    def end(outcome: Future[RunProgress]) -> None:
        error = None if outcome.cancelled() else outcome.exception()
        if left and error is not None:
            own = isinstance(error, FisEditError)
            session.notice = f"The run ended: {error}" if own else "The run failed: see the server's log."
        session.end_work()
        updates.put(None)

    job.outcome.add_done_callback(end)
    try:
        yield from _follow(state, session, job, updates, run.steps)
        yield job.outcome.result()
    except CancelledError:  # the worker was closed
        raise _stopped() from None
    finally:
        left.append(True)
        stays = session.has_page and run.kind is WorkKind.RUN
        if not (stays or job.outcome.done()):  # else the session may be at its next work by now
            session.stop_work()
            job.outcome.cancel()


def _work(
    state: AppState,
    session: Session,
    run: RunRequest,
    choice: ModelChoice,
    report: Callable[[RunProgress], Any],
) -> Callable[[], RunProgress]:
    """The function that the worker's thread calls for a run; it returns the last progress."""

    def work() -> RunProgress:
        session.raise_if_stopped()
        state.limit_memory()
        editor = session.editor(state.load(choice))
        began, waited = perf_counter(), waited_seconds()

        def on_step(i: int, n: int, picture: Image | None) -> None:
            seconds_left = (perf_counter() - began) / i * (n - i) if i else None
            if run.kind is WorkKind.RUN:
                session.progress = i, n, seconds_left
            report(RunProgress(i, n, seconds_left, picture))
            state.worker.run_brief_jobs()
            session.raise_if_stopped()

        if run.kind is not WorkKind.LIVE:  # which drops the one before it unless a newer one was asked for
            session.drop_live()
        first = int(session.history.next_id())
        session.models |= {str(first + i): choice.model.name for i in range(run.results)}  # before the history has them
        made = run.job(editor, on_step)
        state.pool.thread_choice.observe((waited_seconds() - waited) / (perf_counter() - began))
        if isinstance(made, float):
            return RunProgress(1, 1, 0.0, seconds=made)
        candidates = made if isinstance(made, Sequence) else ()
        result = candidates[0] if isinstance(made, Sequence) else made
        choice.model.estimator.observe(result.stats)
        if run.kind is not WorkKind.LIVE:  # which is not kept unless it is run
            session.set_candidates(*candidates, kept=result)
            session.save_or_say()
        state.limit_memory()
        return RunProgress(1, 1, 0.0, result=result)

    return work


def _follow(
    state: AppState,
    session: Session,
    job: InferenceJob[RunProgress],
    updates: SimpleQueue[RunProgress | None],
    steps: int,
) -> Iterator[RunProgress]:
    """A job's progress until its end; while it waits, the number of runs before it. Raises Cancelled."""
    polls = 0
    while True:
        try:
            progress = updates.get(timeout=_POLL_SECONDS if polls else 0)
        except Empty:
            ahead = state.worker.jobs_ahead(job)
            if ahead and session.stopping and job.outcome.cancel():
                raise _stopped() from None
            if ahead and polls % _POLLS_PER_REPORT == 0:
                yield RunProgress(0, steps, ahead=ahead)
            polls += 1
            continue
        if progress is None:
            return
        yield progress


def check_room(history: History, results: int) -> None:
    """Raise SessionError if a history has no room for so many more results."""
    if len(history) + results > MAX_RESULTS:
        raise SessionError(f"a session holds {MAX_RESULTS} pictures; delete some, or save it and begin another")


def part_of(on_step: OnStep, index: int, count: int) -> OnStep:
    """Return an `OnStep` that tells one of several runs of alike lengths as a part of all of them."""
    return lambda i, n, picture: on_step(index * n + i, count * n, picture)


def several(
    make: Callable[[Editor, int, OnStep], EditResult], count: int, parent: Callable[[Editor], str] | None = None
) -> Callable[[Editor, OnStep], tuple[EditResult, ...]]:
    """A job that makes candidates, and shows the first. Stopped, it has those that are finished.

    Args:
        make: makes one; called with an editor, its index and an `on_step`.
        count: number of candidates.
        parent: returns the id of the result that all begin with; None for new pictures.
    """

    def job(editor: Editor, on_step: OnStep) -> tuple[EditResult, ...]:
        made: list[EditResult] = []
        begin = None if parent is None else parent(editor)
        with editor.transaction():
            try:
                for i in range(count):
                    if begin is not None:
                        editor.checkout(begin)
                    made.append(make(editor, i, part_of(on_step, i, count)))
            except Cancelled:
                if not made:
                    raise
            editor.checkout(made[0].id)
        return tuple(made)

    return job


def _stopped() -> Cancelled:
    return Cancelled("stopped; nothing was changed")
