"""The inference worker: order of jobs, brief jobs between steps, withdrawal, errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from app.validation import Busy
from app.worker import InferenceWorker
from fisedit.errors import Cancelled


@pytest.fixture
def worker() -> Iterator[InferenceWorker]:
    worker = InferenceWorker()
    yield worker
    worker.close()
    assert not worker._thread.is_alive()


@pytest.fixture
def gate(worker) -> Iterator[threading.Event]:
    """Opened, it ends the job that runs; a test that fails opens it as well."""
    gate = threading.Event()
    worker.submit(gate.wait, "weights")
    yield gate
    gate.set()


def test_one_thread_runs_all_jobs(worker):
    threads = {worker.call(threading.current_thread) for _ in range(3)}
    assert len(threads) == 1 and threading.current_thread() not in threads


def test_what_a_job_raises_is_raised_where_its_outcome_is_read(worker):
    def fail() -> None:
        raise Cancelled("stopped")

    with pytest.raises(Cancelled, match="stopped"):
        worker.call(fail)
    assert worker.call(lambda: 1) == 1


def test_runs_keep_their_order_and_brief_jobs_go_first(worker, gate):
    done: list[str] = []
    runs = [worker.submit(lambda name=name: done.append(name)) for name in ("first", "second")]
    brief = worker.submit(lambda: done.append("brief"), "others", brief=True)
    assert [worker.jobs_ahead(job) for job in runs] == [1, 2]
    gate.set()
    for job in (*runs, brief):
        job.outcome.result(60)
    assert done == ["brief", "first", "second"] and worker.jobs_ahead(runs[1]) == 0


def test_brief_jobs_run_between_steps_of_the_same_weights(worker):
    done, began, go = [], threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        go.wait(60)
        worker.run_brief_jobs()
        done.append("step")

    job = worker.submit(run, "weights")
    assert began.wait(60)
    same = worker.submit(lambda: done.append("same"), "weights", brief=True)
    other = worker.submit(lambda: done.append("other"), "other weights", brief=True)
    long = worker.submit(lambda: done.append("run"), "weights")
    with pytest.raises(Busy, match="another model or other LoRAs"):
        worker.brief_result(other, 0.01)
    go.set()
    worker.brief_result(same, 60)
    for one in (job, long):
        one.outcome.result(60)
    assert done == ["same", "step", "run"]


def test_a_brief_job_waits_for_a_long_step_of_the_same_weights(worker, gate):
    brief = worker.submit(lambda: 7, "weights", brief=True)
    threading.Timer(0.1, gate.set).start()
    assert worker.brief_result(brief, 0.01) == 7


def test_a_timeout_that_a_job_raises_is_its_own(worker):
    def fail() -> None:
        raise TimeoutError("of the job")

    with pytest.raises(TimeoutError, match="of the job"):
        worker.brief_result(worker.submit(fail, brief=True), 60)


def test_a_waiting_job_is_withdrawn(worker, gate):
    done: list[int] = []
    first, second = (worker.submit(lambda n=n: done.append(n)) for n in range(2))
    assert first.outcome.cancel() and worker.jobs_ahead(second) == 1
    gate.set()
    second.outcome.result(60)
    assert done == [1]


def test_closing_withdraws_what_waits(worker, gate):
    waiting = worker.submit(lambda: 1)
    threading.Timer(0.1, gate.set).start()
    worker.close()
    with pytest.raises(CancelledError):
        waiting.outcome.result(60)


def test_what_waits_for_idleness_makes_way_for_jobs_and_comes_again(worker, monkeypatch):
    monkeypatch.setattr("app.worker.IDLE", 0.01)
    began, calls, done = threading.Event(), list[bool](), threading.Event()

    def measure(interrupted) -> bool:
        calls.append(interrupted())
        began.set()
        if len(calls) == 1:
            while not interrupted():
                threading.Event().wait(0.01)
            return False
        done.set()
        return True

    worker.when_idle("model", measure)
    worker.call(lambda: None)  # the worker looks how long idleness is once a job came
    assert began.wait(60) and worker.call(lambda: "run") == "run", "a job need not wait for it"
    assert done.wait(60) and calls == [False, False]


def test_a_preview_waits_for_idle_work_which_is_asked_to_end(worker, monkeypatch):
    """Idle work has no model that one could wait for: nobody is refused for it, and it begins again later."""
    monkeypatch.setattr("app.worker.IDLE", 0.01)
    began, asked, done = threading.Event(), list[bool](), threading.Event()

    def measure(interrupted) -> bool:
        if asked:
            done.set()
            return True
        began.set()
        while not interrupted():  # between its steps
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)  # longer than a preview waits for a run with another model
        asked.append(True)
        return False

    worker.when_idle("model", measure)
    worker.call(lambda: None)
    assert began.wait(60)
    preview = worker.submit(lambda: len(asked), "weights", brief=True)
    assert worker.jobs_ahead(preview) == 0 and worker.brief_result(preview, 0.01) == 1, "it was asked to end first"
    assert done.wait(60)
