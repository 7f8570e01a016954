"""Workers in processes of their own."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from fisedit.batch import pool
from fisedit.batch.manifest import plan_batch
from fisedit.batch.values import BatchItem, BatchJob, BatchSettings, ItemFailure
from fisedit.batch.worker import BatchWorker
from fisedit.errors import ModelError
from tests.support.batches import AFTER, BEFORE
from tests.support.folders import pictures


@pytest.mark.slow
def test_a_killed_worker_fails_its_item_only(model, tmp_path):
    """Also: the pixels are those of this process."""
    pictures(tmp_path / "in", 2)
    items = plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", AFTER, BEFORE)).items
    settings = BatchSettings(str(model), num_inference_steps=2)
    with pool.open_pool(1, settings) as workers:
        workers.submit(0, items[0])
        while not workers._slots[0].ready:
            assert not list(workers.results())
        os.kill(workers._slots[0].process.pid, signal.SIGKILL)
        [(_, item, failed)] = waited(workers)
        assert item is items[0] and failed.reason == "its worker ended with signal 9 (Killed)"
        workers.submit(workers.idle_slots()[0], items[1])
        [(_, item, made)] = waited(workers)
    assert item is items[1] and made.data == BatchWorker(settings).process(items[1]).data


def waited(workers: pool.WorkerPool) -> list:
    while not (out := list(workers.results())):
        pass
    return out


ITEM = BatchItem(Path("in.png"), "in.png", BEFORE, AFTER, None, "out.png", Path("out.png"))


@pytest.fixture
def serving(monkeypatch, tmp_path):
    """Opens a pool of one worker that does what a function of its pipe and of its turn does, the first being turn 1."""

    def start(work: Callable[..., None], timeout: float = 60.0):
        def serve(pipe, settings, threads):
            with (tmp_path / "starts").open("a") as file:
                file.write("x")
            work(pipe, len((tmp_path / "starts").read_text()))

        context = mp.get_context("fork")  # no model: nothing is imported anew
        monkeypatch.setattr(pool, "_serve", serve)
        monkeypatch.setattr(pool.mp, "get_context", lambda _: context)
        return pool.open_pool(1, BatchSettings(timeout=timeout))

    return start


class TestWorkersThatFail:
    def test_one_that_does_not_stop_is_stopped_and_replaced(self, serving, monkeypatch):
        def work(pipe, turn):
            pipe.send("ready")
            pipe.recv()
            if turn == 1:
                time.sleep(600)
            pipe.send(ItemFailure("made", 0.0))

        monkeypatch.setattr(pool, "GRACE_SECONDS", 0.0)
        with serving(work, timeout=1.0) as workers:
            workers.submit(0, ITEM)
            assert workers.idle_slots() == []
            [(slot, item, failed)] = waited(workers)
            assert (slot, item) == (0, ITEM) and failed.reason == "took longer than 1 seconds and did not stop"
            assert failed.seconds >= 1 and workers.idle_slots() == [0]
            workers.submit(0, ITEM)
            assert waited(workers)[0][2].reason == "made"

    def test_one_that_dies_while_it_loads_has_another_chance(self, serving):
        def work(pipe, turn):
            if turn == 1:
                os._exit(3)
            pipe.send("ready")
            pipe.recv()
            pipe.send(ItemFailure("made", 0.0))

        with serving(work) as workers:
            workers.submit(0, ITEM)
            assert waited(workers) == [(0, ITEM, ItemFailure("made", 0.0))]

    def test_two_that_die_while_they_load_end_the_run(self, serving):
        with serving(lambda *_: os._exit(3)) as workers:
            workers.submit(0, ITEM)
            with pytest.raises(ModelError, match="got status 3 twice; use fewer --workers"):
                waited(workers)

    def test_a_model_that_cannot_be_loaded_ends_the_run(self, serving):
        with serving(lambda pipe, _: pipe.send(ModelError("no model"))) as workers:
            workers.submit(0, ITEM)
            with pytest.raises(ModelError, match="no model"):
                waited(workers)

    def test_one_that_says_it_is_broken_is_replaced(self, serving):
        def work(pipe, turn):
            pipe.send("ready")
            pipe.recv()
            pipe.send(ItemFailure(f"turn {turn}", 0.0, broken=turn == 1))
            pipe.poll(600)

        with serving(work) as workers:
            for turn in (1, 2):
                workers.submit(0, ITEM)
                assert waited(workers)[0][2].reason == f"turn {turn}"
                assert (workers._slots[0] is None) == (turn == 1)

    def test_one_that_dies_at_rest_is_replaced_when_there_is_work(self, serving):
        def work(pipe, turn):
            pipe.send("ready")
            pipe.recv()
            pipe.send(ItemFailure(f"turn {turn}", 0.0))

        with serving(work) as workers:
            workers.submit(0, ITEM)
            assert waited(workers)[0][2].reason == "turn 1"
            while workers._slots[0]:
                assert not list(workers.results())
            workers.submit(0, ITEM)
            assert waited(workers)[0][2].reason == "turn 2"


@pytest.fixture
def _own_process(monkeypatch):
    """Let this process pass for a worker's: nobody ends it, and its signals are as before at the end."""
    monkeypatch.setattr(pool, "_exit_with_parent", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_own_process")
class TestServing:
    def test_items_are_processed_until_the_pipe_ends(self, model, tmp_path):
        pictures(tmp_path / "in", 1)
        (item,) = plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", AFTER, BEFORE)).items
        settings = BatchSettings(str(model), device="cpu", num_inference_steps=1)
        ours, theirs = mp.Pipe()
        ours.send(item)
        answers = []

        class Ending:
            """The worker's end of the pipe, which ends after the first answer."""

            def __getattr__(self, name):
                return getattr(theirs, name)

            def send(self, answer):
                theirs.send(answer)
                answers.append(ours.recv())
                if len(answers) == 2:
                    ours.close()

        pool._serve(Ending(), settings, 2)
        assert answers[0] == "ready" and Image.open(BytesIO(answers[1].data)).format == "PNG"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and os.environ["OMP_NUM_THREADS"] == "1"

    def test_a_model_that_is_not_there_is_told(self):
        ours, theirs = mp.Pipe()
        pool._serve(theirs, BatchSettings("./nowhere", device="cpu"), 1)
        assert isinstance(error := ours.recv(), ModelError) and "./nowhere" in str(error)


def test_any_error_of_loading_is_one_of_the_model(monkeypatch):
    def fail(_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("fisedit.batch.worker.BatchWorker", fail)
    with pytest.raises(ModelError, match=r"cannot be loaded \(RuntimeError: no kernel image\); try --device cpu"):
        pool.load_worker(BatchSettings())


def test_a_worker_ends_with_its_parent(monkeypatch):
    ours, theirs = mp.Pipe()
    monkeypatch.setattr(pool.mp, "parent_process", lambda: SimpleNamespace(sentinel=ours))
    ended = []
    monkeypatch.setattr(pool.os, "_exit", ended.append)
    theirs.close()
    pool._exit_with_parent()
    assert ended == [1]
