"""Several users' sessions over one model: apart from one another, in memory and on disk."""

from __future__ import annotations

import threading

import pytest

from app import handlers
from app.sessions import AppState
from app.validation import Busy, SourceSettings
from fisedit import Cancelled
from tests.support.app.requests import CAT, DOG, idle, last, made, same


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
    handlers.undo(a)
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
    assert back.key == session.key and back.lost and len(back.history) == 0
    (aside,) = state.folder.glob(f"{session.key}.*")
    assert (aside / "0.png").exists()
    assert made(state, back).id == "0"


def test_a_page_that_is_left_stops_the_work_unless_another_has_the_session(state):
    session = state.session("first")
    assert state.adopt("second", session.key) is session
    running = handlers.generate(state, session, CAT, SourceSettings(steps=12))
    next(running)
    state.leave("first")
    session.check()
    state.leave("second")
    with pytest.raises(Cancelled):
        list(running)
