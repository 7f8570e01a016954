"""Live edits: drawn beside the current picture while a prompt is typed, kept by a run, removed by anything else."""

from __future__ import annotations

from io import BytesIO
from threading import Event, Thread

import gradio as gr
import numpy as np
import pytest
from PIL import Image

from app import export, handlers, history, views
from app.components import PageComponents
from app.live import edit_live
from app.run_events import RunEvents
from app.session_events import SessionEvents
from app.validation import RegionSettings
from fisedit import Cancelled
from fisedit.sessions.store import SessionStore
from fisedit.values import EditMask, MaskSource
from tests.support.app.requests import CAT, DOG, FOX, ME, NOTHING_READ, REGION, idle, last, made


def ids(session):
    return [result.id for result in session.history]


def test_a_live_edit_is_not_kept_with_the_session(state, session):
    source = made(state, session)
    last(edit_live(state, session, DOG))
    session.park()
    assert ids(session) == [source.id] and session.live is None


def test_it_is_drawn_beside_the_current_picture_in_place_of_the_one_before(state, session):
    source = made(state, session)
    dog = last(edit_live(state, session, DOG))
    assert session.current is source and ids(session) == [source.id, dog.id]
    fox = last(edit_live(state, session, FOX))
    assert session.current is source and ids(session) == [source.id, fox.id]
    assert fox.prompt == FOX and fox.image.tobytes() != source.image.tobytes()


def test_a_run_of_the_same_keeps_it_without_computing(state, session, monkeypatch):
    made(state, session)
    live = last(edit_live(state, session, DOG))
    monkeypatch.setattr(type(state), "load", None)  # what any run needs
    assert last(handlers.edit(state, session, DOG)) is live is session.current
    monkeypatch.undo()
    assert list(edit_live(state, session, CAT)) and session.current is live, "of what was kept"
    assert live.id in ids(session)


@pytest.mark.parametrize("region", [None, RegionSettings(grow=1)], ids=["another prompt", "another region"])
def test_a_run_of_something_else_removes_it(state, session, region):
    source = made(state, session)
    live = last(edit_live(state, session, DOG))
    edit = last(handlers.edit(state, session, DOG if region else FOX, region))
    assert edit is session.current and ids(session) == [source.id, edit.id] and live.id != edit.id


def test_any_move_removes_it(state, session):
    source = made(state, session)
    last(edit_live(state, session, DOG))
    history.checkout(session, source.id)
    assert ids(session) == [source.id] and session.live is None


def test_a_run_and_a_move_stop_one_that_is_being_drawn(state, session):
    source = made(state, session)
    drawn = edit_live(state, session, DOG)
    next(drawn)
    edit = last(handlers.edit(state, session, FOX))
    with pytest.raises(Cancelled):
        list(drawn)
    assert ids(session) == [source.id, edit.id] and session.current is edit
    next(edit_live(state, session, DOG))
    assert history.undo(session) is source and ids(session) == [source.id, edit.id]


def test_it_is_not_saved_before_it_is_run(state, session):
    source = made(state, session)
    last(edit_live(state, session, DOG))
    assert [entry.id for entry in SessionStore(session.folder).read_index().results] == [source.id]
    zipped = export.export_session(session)
    assert ids(session) == [source.id] and zipped.is_file()


def test_a_page_that_arrives_does_not_show_it(state, session):
    with gr.Blocks():
        events = SessionEvents(state, PageComponents(state.pool))
    source = made(state, session)
    last(edit_live(state, session, DOG))
    events.on_arrive(ME, session.key)
    assert ids(session) == [source.id] and session.live is None


def test_a_newer_one_stops_it(state, session, monkeypatch):
    made(state, session)
    began, ended, seen = Event(), Event(), []

    def slow():
        try:
            for progress in edit_live(state, session, DOG):
                seen.append(progress)
                began.set()
                ended.wait(0.2)  # a step takes so long that it cannot end before the next one begins
        except Cancelled as error:
            seen.append(error)

    older = Thread(target=slow)
    older.start()
    assert began.wait(30)
    newer = last(edit_live(state, session, FOX))  # waits until the older one has stopped
    ended.set()
    older.join(30)
    assert newer.prompt == FOX and [result.prompt for result in session.history] == [CAT, FOX]
    assert isinstance(seen[-1], Cancelled) or seen[-1].result is not None  # it may have ended just before


def test_an_older_one_that_waited_leaves_the_newer_one(state, session, monkeypatch):
    made(state, session)
    begin_work, newer = session.begin_work, []

    def begin_after_the_newer_one(kind):
        monkeypatch.undo()
        newer.append(last(edit_live(state, session, FOX)))
        begin_work(kind)

    monkeypatch.setattr(session, "begin_work", begin_after_the_newer_one)
    with pytest.raises(Cancelled, match="newer"):
        list(edit_live(state, session, DOG))
    assert session.live.result_id == newer[0].id in ids(session)


def test_redo_goes_where_it_went_before_it(state, session):
    source, edit = made(state, session), last(handlers.edit(state, session, DOG))
    assert history.undo(session) is source
    last(edit_live(state, session, FOX))
    assert session.history.redo_id == edit.id and history.redo(session) is edit


def test_a_preview_waits_for_it(state, session):
    made(state, session)
    live, found = edit_live(state, session, DOG), []
    next(live)
    waiting = Thread(target=lambda: found.append(handlers.preview(state, session, DOG)))
    waiting.start()
    drawn = last(live)
    waiting.join(30)
    assert found[0].preview.mask.grid.any() and session.live.result_id == drawn.id


def test_the_next_letter_stops_a_live_edit_and_no_other_work(state, session):
    made(state, session)
    run = handlers.edit(state, session, DOG)
    next(run)
    session.stop_live()
    assert last(run) is session.current and session.current.prompt == DOG
    live = edit_live(state, session, FOX)
    next(live)
    session.stop_live(except_prompt=FOX)
    assert not session.stopping, "words that are told late stop no edit of their own"
    session.stop_live(except_prompt=DOG)
    with pytest.raises(Cancelled):
        last(live)
    idle(session)
    assert session.current.prompt == DOG and len(session.history) == 2


def test_the_page_shows_it_inside_its_mask(state, session):
    with gr.Blocks():
        page = PageComponents(state.pool)
    events = RunEvents(state, page)
    assert list(events.on_live(ME, DOG, *NOTHING_READ, *REGION)) == []
    mine = state.session(ME.session_hash)
    made(state, mine)
    *_, drawn = events.on_live(ME, DOG, *NOTHING_READ, *REGION)
    assert drawn[page.stage]["live"].startswith("data:image/png") and "Run keeps it" in drawn[page.status]
    assert mine.current.prompt == CAT
    (told,) = events.on_live(ME, DOG, *NOTHING_READ, *REGION[:3], 99, *REGION[4:])
    assert "grow" in told[page.status] and told[page.stage]["live"] == ""
    (cleared,) = events.on_live(ME, CAT, *NOTHING_READ, *REGION)
    assert cleared[page.status] == cleared[page.stage]["live"] == ""
    *_, kept = events.on_edit(ME, "1", DOG, *NOTHING_READ, *REGION)
    assert kept[page.status] == "" and mine.current.prompt == DOG and len(mine.history) == 2


def test_words_that_are_put_back_clear_one_that_is_being_drawn(state):
    with gr.Blocks():
        page = PageComponents(state.pool)
    events, mine = RunEvents(state, page), state.session(ME.session_hash)
    made(state, mine)
    drawn = events.on_live(ME, DOG, *NOTHING_READ, *REGION)
    assert next(drawn)[page.stage]["live"] and mine.live is None
    (cleared,) = events.on_live(ME, CAT, *NOTHING_READ, *REGION)
    assert cleared[page.stage]["live"] == "" and list(drawn) == []
    assert list(events.on_live(ME, CAT, *NOTHING_READ, *REGION)) == [], "there is nothing to clear any more"


def test_words_that_are_put_back_leave_what_a_run_shows(state):
    with gr.Blocks():
        page = PageComponents(state.pool)
    events, mine = RunEvents(state, page), state.session(ME.session_hash)
    made(state, mine)
    list(events.on_live(ME, DOG, *NOTHING_READ, *REGION))
    run = handlers.edit(state, mine, FOX)
    next(run)
    assert mine.live_request is not None and list(events.on_live(ME, CAT, *NOTHING_READ, *REGION)) == []
    assert last(run) is mine.current
    idle(mine)
    assert mine.live_request is None


def test_an_overlay_of_a_whole_picture_is_clear_outside_the_mask():
    mask = EditMask(np.eye(4, dtype=bool), MaskSource.GIVEN)
    url = views.preview_overlay(Image.new("RGB", (32, 32), "red"), mask)
    alpha = np.asarray(Image.open(BytesIO(views.decode_base64(url.partition(",")[2], "overlay"))))[..., 3]
    assert np.array_equal(alpha > 0, np.kron(mask.grid, np.ones((8, 8), bool)))
