"""Several users' sessions over one model: apart from one another, in memory and on disk."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from app import handlers, history, runs, sessions, worker
from app.model_pool import MIN_FEATURE_BYTES
from app.session import Session
from app.sessions import AppState
from app.validation import Busy, SourceSettings
from fisedit import Cancelled
from fisedit.errors import MeasurementError, ModelError, SessionError
from tests.support.app.requests import CAT, DOG, idle, last, made
from tests.support.documents import ROOT
from tests.support.edits import same
from tests.support.processes import until


def test_people_do_not_see_each_other(state):
    a, b = state.session("a"), state.session("b")
    made(state, a)
    assert len(b.history) == 0 and a.folder != b.folder and a.key != b.key
    assert state.session("a") is a and state.adopt("c", b.key) is b


@pytest.mark.parametrize("key", ["", "0" * 32, "../a", "/etc", "a/../b", "A" * 32, "..", "é" * 32])
def test_a_key_that_nobody_has_opens_a_new_session(state, session, key):
    made(state, session)
    opened = state.adopt("stranger", key)
    assert opened is not session and len(opened.history) == 0
    assert opened.folder.parent == state.folder


def test_work_at_once_gives_what_work_alone_gives(state):
    alone = [made(state, state.session(f"alone {seed}"), CAT, SourceSettings(4, seed=seed)) for seed in range(3)]
    together = {}

    def work(seed):
        together[seed] = made(state, state.session(str(seed)), CAT, SourceSettings(4, seed=seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(alone[seed], together[seed]) for seed in range(3))


def test_features_of_the_longest_idle_go_first_and_come_back(state):
    a, b = state.session("a"), state.session("b")
    made(state, a)
    expected = last(handlers.edit(state, a, DOG))
    history.undo(a)
    state.feature_bytes = a.recorded_bytes
    state.session("a")
    made(state, b)
    assert a.recorded_bytes == 0 < b.recorded_bytes <= state.feature_bytes
    assert len(a.history) == 2
    again = last(handlers.edit(state, a, DOG))
    assert same(again, expected) and "rebuilt" in " ".join(again.stats.notes)
    assert b.recorded_bytes == 0


def test_who_is_put_aside_finds_everything_again(state):
    state.capacity = 2
    a = state.session("a")
    source = made(state, a)
    state.session("b"), state.session("c")
    assert len(state) == 2
    back = state.session("a")
    assert back is not a and back.key == a.key and same(back.current, source)
    assert last(handlers.edit(state, back, DOG)).parent == source.id


@pytest.mark.parametrize("room", [True, False])
def test_what_was_recorded_is_put_aside_too(state, tmp_path, monkeypatch, room):
    """Where the disk has room for it, which FISEDIT_PAGES=0 denies."""
    monkeypatch.setenv("FISEDIT_PAGES", str(tmp_path / "pages") if room else "0")
    state.capacity = 2
    a = state.session("a")
    made(state, a)
    expected = last(handlers.edit(state, a, DOG))
    history.undo(a)
    state.session("b"), state.session("c")
    state._parker.submit(lambda: None).result()
    assert bool(list(a.folder.glob("*.safetensors"))) == room
    back = state.session("a")
    again = last(handlers.edit(state, back, DOG))
    assert back is not a and same(again, expected)
    assert any("rebuilt" in note for note in again.stats.notes) != room


@pytest.fixture
def slow_read(state, monkeypatch):
    """The session of caller "a", on disk, whose reads are listed and wait for an event; and one in memory."""
    state.capacity = 2
    saved = state.session("a")
    made(state, saved)
    state.session("b"), state.session("c")
    state.capacity = 8
    read = SimpleNamespace(key=saved.key, begun=threading.Event(), may_end=threading.Event(), keys=[])
    resume = Session.resume

    def waiting(session):
        if session.key == read.key:
            read.keys.append(session.key)
            read.begun.set()
            assert read.may_end.wait(30)
        resume(session)

    monkeypatch.setattr(Session, "resume", waiting)
    yield read
    read.may_end.set()


def test_callers_of_other_keys_do_not_wait_for_a_read(state, slow_read):
    with ThreadPoolExecutor(3) as pool:
        a = pool.submit(state.session, "a")
        assert slow_read.begun.wait(30)
        assert pool.submit(state.session, "b").result(20) and pool.submit(state.session, "new").result(20)
        assert not a.done()
        slow_read.may_end.set()
        assert len(a.result().history) == 1


def test_callers_of_one_key_share_one_read(state, slow_read):
    with ThreadPoolExecutor(3) as pool:
        opened = [pool.submit(state.session, "a"), pool.submit(state.adopt, "d", slow_read.key)]
        assert slow_read.begun.wait(30)
        opened.append(pool.submit(state.session, "a"))
        slow_read.may_end.set()
        assert len({session.result() for session in opened}) == 1
    assert slow_read.keys == [slow_read.key]


def test_a_read_that_fails_is_tried_again_by_the_next_caller(state, slow_read, monkeypatch):
    slow_read.may_end.set()
    with monkeypatch.context() as patched:
        patched.setattr(Session, "resume", lambda _: (_ for _ in ()).throw(OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            state.session("a")
    assert len(state.session("a").history) == 1


def test_nobody_at_work_is_put_aside(state):
    state.capacity = 1
    running = handlers.generate(state, state.session("a"), CAT, SourceSettings(steps=50))
    next(running)
    with pytest.raises(Busy, match="try again"):
        state.session("b")
    running.close()
    idle(state.session("a"))
    assert state.session("b").idle


def test_a_temporary_studio_leaves_nothing(shared):
    state = AppState(shared.pool, shared.worker, folder=None)
    made(state, state.session("a"))
    folder = state.folder
    assert list(folder.iterdir())
    state.close()
    assert not folder.exists()


def test_what_is_damaged_is_put_aside(state, session):
    made(state, session)
    (session.folder / "session.json").write_text("{")
    state.capacity = 1
    state.session("other")
    back = state.session("me")
    assert back.key == session.key and back.was_damaged and len(back.history) == 0
    (aside,) = state.folder.glob(f"{session.key}.*")
    assert list(aside.glob("0-*.png"))
    assert made(state, back).id == "0"


def test_a_run_of_a_page_that_is_left_ends_and_is_there(state):
    """A reload, or a connection that is lost, throws no run away."""
    session = state.adopt("page", "")
    running = handlers.generate(state, session, CAT, SourceSettings(steps=12))
    next(running)
    running.close()
    state.leave("page")
    idle(session)
    assert state.adopt("page again", session.key) is session
    assert [result.prompt for result in session.history] == [CAT] and session.notice == "" and session.progress is None
    assert list(session.folder.glob("0-*.png")), "it is saved"


def test_a_run_of_a_page_that_is_left_can_be_stopped_and_says_why_it_ended(state):
    session = state.adopt("page", "")
    running = handlers.generate(state, session, CAT, SourceSettings(steps=150))
    next(running)
    running.close()
    state.leave("page")
    assert session.running and not session.stopping
    session.stop()
    idle(session)
    assert session.notice == "The run ended: stopped; nothing was changed" and not len(session.history)


def test_a_programs_work_ends_when_no_caller_is_left(state):
    session = state.session("first")
    state._remember_caller("second", session.key)
    running = handlers.generate(state, session, CAT, SourceSettings(steps=12))
    next(running)
    state.leave("first")
    session.raise_if_stopped()
    state.leave("second")
    with pytest.raises(Cancelled):
        list(running)


def test_a_connection_that_comes_again_finds_its_session(state):
    session = state.session("first")
    made(state, session)
    state.leave("first")
    assert state.session("first") is session
    running = handlers.generate(state, session, CAT, SourceSettings(steps=12))
    next(running)
    state.leave("first")
    with pytest.raises(Cancelled):
        list(running)


def test_pictures_in_memory_are_bounded(state, monkeypatch):
    """Idle sessions wait on disk beyond the bound, and one session alone is told that it is full."""
    one, two = state.session("one"), state.session("two")
    first = made(state, one)
    made(state, two)
    assert one.picture_bytes == first.image.width * first.image.height * 3
    monkeypatch.setattr(sessions, "MAX_PICTURE_BYTES", one.picture_bytes)
    state.limit_memory()
    assert len(state) == 1 and state.session("two") is two
    back = state.session("one")
    assert back is not one and same(back.current, first)
    monkeypatch.setattr(runs, "MAX_PICTURE_BYTES", one.picture_bytes)
    with pytest.raises(SessionError, match="MiB of pictures; delete some"):
        made(state, back)
    assert len(back.history) == 1


def test_pictures_of_a_session_at_work_stay_in_memory(state, monkeypatch):
    one, two = state.session("one"), state.session("two")
    made(state, one)
    made(state, two)
    monkeypatch.setattr(sessions, "MAX_PICTURE_BYTES", 1)
    running = handlers.edit(state, one, DOG)
    next(running)
    state.session("two")
    state.limit_memory()
    assert state.session("one") is one and state.session("two") is two, "one works, and the other was asked for last"
    running.close()
    idle(one)


def test_who_was_not_here_for_long_is_somebody_new(state, monkeypatch):
    monkeypatch.setattr(sessions, "_CALLERS", 2)
    state.capacity = 1
    key = state.session("a").key
    state.session("b")
    assert state.session("a").key == key
    state.session("b"), state.session("c")
    assert state.session("a").key != key


def test_a_state_that_cannot_be_opened_leaves_no_thread():
    before = set(threading.enumerate())
    with pytest.raises(ModelError, match="nowhere"):
        AppState.open("./nowhere")
    assert set(threading.enumerate()) <= before  # those of states before may end meanwhile


class TestMeasuringWhenIdle:
    """The cost table of a model that has none is measured on the worker's thread while no run waits."""

    @pytest.fixture
    def calls(self, shared, monkeypatch):
        """What is done instead of measuring for seconds: the given functions, one a call, and how many were called."""
        model, calls = shared.pool.first, []
        monkeypatch.setattr(model, "measured", False)
        monkeypatch.setattr(worker, "IDLE", 0.02)

        def calibrate(_, *, on_step):
            calls.append(threading.current_thread())
            self.does[len(calls) - 1](on_step)

        monkeypatch.setattr(type(model.loaded.editor), "calibrate", calibrate)
        return calls

    @pytest.fixture
    def own(self, shared, calls, tmp_path):  # `calls` first: the thread waits as it says
        """A state with a worker of its own, over the shared models."""
        working = worker.InferenceWorker()
        yield AppState(shared.pool, working, folder=tmp_path)
        working.close()

    def load(self, own):
        """As a run does."""
        return own.worker.call(lambda: own.load(own.select(SourceSettings())))

    def test_it_is_measured_once(self, own, calls):
        self.does = [lambda on_step: on_step(0, 1, None)]
        loaded = self.load(own)
        until(lambda: own.pool.first.measured)
        assert loaded is own.pool.first.loaded and calls == [own.worker._thread]
        self.load(own)
        assert not own.worker._idle

    def test_it_stops_for_a_run_and_begins_again(self, own, calls):
        begun, asked = threading.Event(), []

        def interrupted(on_step):
            begun.set()
            while True:
                on_step(0, 1, None)

        self.does = [interrupted, lambda on_step: on_step(0, 1, None)]
        self.load(own)
        assert begun.wait(30)
        asked.append(own.worker.call(lambda: own.pool.first.measured))
        until(lambda: own.pool.first.measured)
        assert asked == [False] and len(calls) == 2

    def test_a_table_that_cannot_be_kept_is_not_measured_again(self, own, calls, caplog):
        def full(_):
            raise OSError(28, "No space left on device")

        self.does = [full]
        self.load(own)
        until(lambda: own.pool.first.measured)
        assert "no cost table is kept: " in caplog.text and len(calls) == 1

    def test_a_busy_machine_is_measured_a_few_times(self, own, calls, caplog):
        def busy(_):
            raise MeasurementError("other programs ran beside it")

        self.does = [busy] * 4
        for times in (1, 2, 3):
            assert not own.pool.first.measured
            self.load(own)
            until(lambda times=times: len(calls) == times and not own.worker._idle)
            own.worker.call(lambda: None)
        assert own.pool.first.measured and "no cost table is kept: other programs ran" in caplog.text
        assert "ran beside it" in own.measure_again(own.session("me")).result(60), "one who asks is answered"

    def test_it_is_measured_again_for_one_who_asks(self, own, calls, monkeypatch):
        monkeypatch.setattr(own.pool.first, "measured", True)
        self.does = [lambda on_step: on_step(0, 1, None)]
        assert own.measure_again(own.session("me")).result(60) == "" and len(calls) == 1
        with monkeypatch.context() as patched:
            patched.setattr(own.pool.first, "loaded", None)
            assert "is not loaded" in own.measure_again(own.session("me")).result(60)

    def test_a_layer_of_a_long_step_gives_way(self, own, calls):
        """A step of a large model takes seconds."""
        unet = own.pool.first.loaded.editor.pipe.unet
        layer = unet.time_embedding.linear_1
        begun, served = threading.Event(), []

        def step(_):
            begun.set()
            while True:
                layer(torch.zeros(1, layer.in_features, dtype=unet.dtype))

        self.does = [step, lambda _: None]
        self.load(own)
        assert begun.wait(30)
        own.worker.call(lambda: served.append(True))
        until(lambda: own.pool.first.measured)
        assert served and not any(module._forward_pre_hooks for module in unet.modules())

    def test_a_model_that_was_put_aside_is_left_alone(self, own, calls, monkeypatch):
        model = own.pool.first
        with monkeypatch.context() as patched:
            patched.setattr(model, "loaded", None)
            own._measure_when_idle(model)
            until(lambda: not own.worker._idle)
            own.worker.call(lambda: None)
        assert not calls and not model.measured


def test_recorded_features_are_bounded_by_the_model_not_the_machine(state):
    assert state.feature_bytes == state.pool.first.loaded.editor.max_recorded_bytes == MIN_FEATURE_BYTES


@pytest.mark.slow
def test_what_the_process_holds_is_bounded():
    """As many pictures as would record several times the bound on features."""
    command = [sys.executable, "-m", "tests.support.app.memory", "--pictures", "60", "--steps", "50"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told = json.loads(run.stdout)
    first, *later = told["samples"]
    assert max(sample["features_mib"] for sample in later) <= told["feature_bound_mib"]
    assert max(sample["rss_mib"] for sample in later) <= first["rss_mib"] + 2 * told["feature_bound_mib"]
