"""Runs: inference that a session waits for, step by step. Knows sessions and the worker; neither gradio nor torch.

The function runs on the worker's thread, and what it reports goes through a queue to whatever iterates. Closing the
iterator, or stopping the session, ends the run before its next step, or takes it out of the worker's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

from app.validation import MAX_PICTURE_BYTES, MAX_RESULTS
from fisedit.errors import Cancelled, SessionError

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.session import Session
    from app.sessions import AppState, ModelChoice
    from app.worker import InferenceJob
    from fisedit import Editor, EditResult
    from fisedit.values import OnStep

_MOMENT = 0.2
"""Seconds between two looks whether a waiting run was stopped."""

_REMINDER = 5
"""Moments between two reports of a waiting run. Each lets gradio notice that a client has left."""


@dataclass(frozen=True, eq=False)
class RunProgress:
    """Where a run stands.

    Args:
        step: steps done.
        steps: all steps.
        left: seconds to come; None where that is not known yet.
        picture: a small preview of one pixel per latent cell, or None.
        result: at the end, what was made.
        seconds: at the end of a dense run to compare, what it took.
        ahead: while the run waits, how many runs come before it.
    """

    step: int
    steps: int
    left: float | None = None
    picture: Image | None = None
    result: EditResult | None = None
    seconds: float | None = None
    ahead: int = 0


@dataclass(frozen=True, eq=False)
class RunRequest:
    """What the worker is to do.

    Args:
        job: called with the session's editor and what to call before every step; returns a result, or seconds.
        steps: how many steps are likely.
        choice: what to make it with; None for what made the current picture.
    """

    job: Callable[[Editor, OnStep], EditResult | float]
    steps: int
    choice: ModelChoice | None = None


def stream_run(state: AppState, session: Session, run: RunRequest) -> Iterator[RunProgress]:
    """Let the worker do a run, and yield its progress; the last one has the result or the seconds.

    Args:
        state: whose worker runs it.
        session: that is at work meanwhile.
        run: what is done.

    Raises:
        SessionError: the session is full, or what made the current picture is not offered.
        Busy: the session is at work.
        Cancelled: the session was stopped.
    """
    if len(session.history) >= MAX_RESULTS:
        raise SessionError(f"a session holds {MAX_RESULTS} pictures; delete some, or save it and begin another")
    if session.picture_bytes >= MAX_PICTURE_BYTES:
        most = f"{MAX_PICTURE_BYTES >> 20} MiB"
        raise SessionError(f"a session holds {most} of pictures; delete some, or save it and begin another")
    session.take()
    news = SimpleQueue[RunProgress | None]()  # None at the end
    try:
        choice = run.choice or state.select_recorded(session, session.current)
    except BaseException:
        session.release()
        raise
    work = _work(state, session, run.job, choice, news.put)
    job = state.worker.submit(work, choice.weights)

    def end(_: object) -> None:
        session.release()
        news.put(None)

    job.outcome.add_done_callback(end)
    try:
        yield from _follow(state, session, job, news, run.steps)
        yield job.outcome.result()
    except CancelledError:  # the worker was closed
        raise _stopped() from None
    finally:
        if not job.outcome.done():  # else the session may be at its next work by now
            session.stop()
            job.outcome.cancel()


def _work(
    state: AppState,
    session: Session,
    job: Callable[[Editor, OnStep], EditResult | float],
    choice: ModelChoice,
    tell: Callable[[RunProgress], Any],
) -> Callable[[], RunProgress]:
    """What the worker's thread does for a run; returns its last progress."""

    def work() -> RunProgress:
        session.check()
        state.make_room()
        editor, began = session.editor(state.load(choice)), perf_counter()

        def on_step(i: int, n: int, picture: Image | None) -> None:
            left = (perf_counter() - began) / i * (n - i) if i else None
            tell(RunProgress(i, n, left, picture))
            state.worker.run_brief_jobs()
            session.check()

        session.models[session.history.next_id()] = choice.model.name  # before the history has the result
        made = job(editor, on_step)
        if isinstance(made, float):
            return RunProgress(1, 1, 0.0, seconds=made)
        choice.model.estimator.observe(made.stats)
        session.save()
        state.make_room()
        return RunProgress(1, 1, 0.0, result=made)

    return work


def _follow(
    state: AppState,
    session: Session,
    job: InferenceJob[RunProgress],
    news: SimpleQueue[RunProgress | None],
    steps: int,
) -> Iterator[RunProgress]:
    """What a job tells until it is over; while it waits, how many runs come before it. Raises Cancelled."""
    moments = 0
    while True:
        try:
            progress = news.get(timeout=_MOMENT if moments else 0)
        except Empty:
            ahead = state.worker.jobs_ahead(job)
            if ahead and session.stopping and job.outcome.cancel():
                raise _stopped() from None
            if ahead and moments % _REMINDER == 0:
                yield RunProgress(0, steps, ahead=ahead)
            moments += 1
            continue
        if progress is None:
            return
        yield progress


def _stopped() -> Cancelled:
    return Cancelled("stopped; nothing was changed")
