"""The page's events without a browser: what each answers to a request, which errors it shows, and which it raises."""

from __future__ import annotations

from concurrent.futures import Future
from io import BytesIO
from types import SimpleNamespace

import gradio as gr
import numpy as np
import pytest
from PIL import Image

from app import handlers, inputs, views
from app.components import PageComponents
from app.run_events import RunEvents
from app.runs import RunProgress
from app.session_events import SessionEvents
from app.validation import NO_CONDITIONS, Busy, RegionSettings, SourceSettings
from fisedit import Cancelled, Region
from fisedit.errors import InputError, SessionError
from fisedit.integrations.mask_providers import Detection
from tests.support.app.requests import CAT, DOG, ME, NOTHING_READ, QUICK, REGION, as_url, last, made, png

SETTINGS = (False, 2, 4.0, 7, 64, 64, "DDIM", 0, "", "", [], *[0] * 6)
"""Values of the settings of a new picture."""


@pytest.fixture
def page(state):
    """The page's components, with no server."""
    with gr.Blocks():
        return PageComponents(state.pool)


@pytest.fixture
def events(state, page):
    """The events of that page that show a session."""
    return SessionEvents(state, page)


@pytest.fixture
def runs(state, page):
    """The events of that page that run edits."""
    return RunEvents(state, page)


def error(answer, page):
    """The words that a page shows where something went wrong, beside the class that says so."""
    assert "error" in answer[page.status]
    return answer[page.status]


def test_a_page_that_comes_while_everybody_is_at_work_is_told(events, page, state, monkeypatch):
    def busy(*_):
        raise Busy("everybody is at work; try again")

    monkeypatch.setattr(type(state), "adopt", busy)
    answer = events.on_arrive(ME, "")
    assert "everybody is at work" in error(answer, page) and answer[page.make]["interactive"] is True


def test_a_caller_without_a_name_is_refused(runs):
    with pytest.raises(SessionError, match="send session_hash"):
        runs.on_stop(SimpleNamespace(session_hash=""))


def test_a_picture_is_opened_in_its_own_size(runs, page, session):
    data = png(Image.fromarray(np.full((64, 72, 3), 90, np.uint8)))
    *told, end, opened = runs.on_open(ME, data, "a cat", *SETTINGS)
    assert "Starting" in told[0][page.status] and session.history.current.size == (72, 64)
    assert page.prompt not in end and end[page.status] == "", "more may have been typed meanwhile"
    assert opened[page.file] is None and opened[page.found] == ""
    *_, end = runs.on_open(ME, None, "a cat", *SETTINGS)
    assert "error" in end[page.status] and len(session.history) == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_a_page_that_is_loaded_again_follows_its_run(events, runs, page, state, monkeypatch, stopped):
    monkeypatch.setattr("app.run_events.PREVIEW_INTERVAL", 0.01)
    session = state.adopt("me", "")
    running = handlers.generate(state, session, CAT, SourceSettings(steps=12))
    next(running)
    running.close()
    again = SimpleNamespace(session_hash="again")
    shown = events.on_arrive(again, session.key)
    assert shown[page.stop]["visible"] and not shown[page.make]["visible"]
    if stopped:
        runs.on_stop(again)
    *told, end = runs.on_follow(again)
    assert told and end[page.make]["visible"] and not end[page.stop]["visible"]
    if stopped:
        assert "stopped; nothing was changed" in end[page.status]
    else:
        assert end[page.stage]["picture"]["alt"] == CAT and page.prompt not in end, "more may have been typed"
    assert list(runs.on_follow(again)) == []  # nothing runs


def test_a_photograph_stands_upright_before_it_is_opened(events, page):
    exif, file = Image.Exif(), BytesIO()
    exif[0x0112] = 6
    Image.fromarray(np.full((600, 2400, 3), 90, np.uint8)).save(file, "JPEG", exif=exif)
    answer = events.on_file(ME, file.getvalue(), "")
    _, _, photo = answer[page.stage]["photo"].partition(",")
    with Image.open(BytesIO(views.decode_base64(photo, "photo"))) as shown:
        assert shown.height > 3 * shown.width
    assert "It has 600x2400 pixels" in answer[page.found]


def test_a_region_that_cannot_be_predicted_is_told_and_cleared(events, page, state, session):
    made(state, session)
    for piece in (None, "first", "-1"):
        answer = events.on_preview(ME, DOG, *NOTHING_READ, "", [], piece, 0, False, 0, 1, "fast")
        assert "piece must be a number or" in answer[page.facts] and answer[page.stage]["region"] == ""


def test_words_that_the_model_does_not_know_are_named_before_a_run(events, page, state, session):
    answer = events.on_words(ME, "a spaceship on a beach", [], "")
    assert "it does not know &#x27;spaceship&#x27;" in answer[page.words_line]
    assert events.on_words(ME, "a cat on a beach", [], "")[page.words_line] == ""
    made(state, session)
    assert "spaceship" in events.on_preview(ME, "a spaceship and a cake on a beach", *NOTHING_READ, *REGION)[page.facts]


@pytest.mark.parametrize("typed", ["a cat\non a beach", "a dog "])
def test_words_are_compared_as_a_run_takes_them(events, runs, page, state, session, monkeypatch, typed):
    source, painted = made(state, session, typed), as_url(Image.new("RGBA", (128, 128), (255, 48, 48, 255)))
    assert inputs.region(session, typed, NO_CONDITIONS, painted, *REGION[1:]).seed is not None
    assert list(runs.on_live(ME, typed, *NOTHING_READ, *REGION)) == [], "nothing is to be drawn"
    assert events.on_preview(ME, typed, *NOTHING_READ, *REGION)[page.facts] == ""
    stopped = []
    monkeypatch.setattr(session, "stop_live", lambda *, except_prompt: stopped.append(except_prompt))
    events.on_words(ME, typed, [], "")
    assert stopped == [source.prompt]


def test_a_thing_that_is_chosen_is_shown_while_the_words_are_unchanged(events, page, state, session):
    source = made(state, session)
    session.detections = source.id, (Detection((0, 0, 64, 64), "cat", 0.9),)
    shown = events.on_preview(ME, CAT, *NOTHING_READ, *REGION, ["0"])
    assert shown[page.stage]["region"] and "of the picture" in shown[page.facts]
    assert events.on_preview(ME, CAT, *NOTHING_READ, *REGION, [])[page.stage]["region"] == ""


@pytest.mark.parametrize("typed", ["a dog\nand a cake on a beach", f"{DOG} "])
def test_a_run_is_shown_inside_the_mask_of_its_preview(runs, page, state, session, typed):
    made(state, session)
    handlers.preview(state, session, typed)
    answers = [answer[page.stage].get("live") for answer in runs.on_edit(ME, "1", typed, *NOTHING_READ, *REGION)]
    preview = next(filter(None, answers))
    assert views.decode_base64(preview.partition(",")[2], "preview")[25] == 6, "a PNG with alpha"


def test_a_preview_that_is_refused_for_the_moment_is_asked_for_again(events, page, state, session, monkeypatch):
    made(state, session)

    def busy(*_):
        raise Busy("the app is at work with another model")

    monkeypatch.setattr(handlers, "preview", busy)
    assert 'class="said again"' in events.on_preview(ME, DOG, *NOTHING_READ, *REGION)[page.facts]


@pytest.mark.parametrize(("why", "said"), [("", "Measured again."), ("others ran", "Not measured: others ran.")])
def test_a_measurement_is_waited_for(events, page, state, monkeypatch, why, said):
    told = Future()
    monkeypatch.setattr("app.session_events._MEASURE_POLL", 0.01)
    monkeypatch.setattr(type(state), "measure_again", lambda *_: told)
    answers = events.on_calibrate(ME)
    assert "once nothing runs" in next(answers)[page.status]
    next(answers)
    told.set_result(why)
    *_, end = answers
    assert said in end[page.status] and ("error" in end[page.status]) is bool(why)


def test_the_cost_of_a_run_is_told_with_its_result(runs, page, state, session):
    made(state, session)
    first, *_, end = runs.on_edit(ME, "1", DOG, *NOTHING_READ, *REGION)
    assert first[page.cost_line] == "" and "outside the mask: identical" in end[page.cost_line]

    def stop(_):
        raise Cancelled("stopped")

    first, stopped = runs._run(ME, stop)
    assert first[page.cost_line] == "" and stopped[page.cost_line] == end[page.cost_line]


def test_two_pictures_are_compared_and_others_are_refused(events, page, state, session):
    first, second = made(state, session), last(handlers.edit(state, session, DOG))
    answer = events.on_compare(ME, first.id)
    assert answer[page.stage]["picture"]["view"] == "compare" and session.history.current is second
    assert "nobody" in error(events.on_compare(ME, "nobody"), page)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Cancelled("stopped"), "Nothing was changed"),
        (InputError("no such thing"), "no such thing"),
        (KeyError("a bug"), "That should not have happened"),
    ],
)
def test_a_run_that_fails_changes_nothing_and_says_why(runs, page, session, failure, words):
    def start(_):
        yield RunProgress(0, 2, ahead=3)
        raise failure

    run = runs._run(ME, start)
    assert "Starting" in next(run)[page.status] and "3 before you" in next(run)[page.status]
    assert words in next(run)[page.status]
    with pytest.raises(KeyError if isinstance(failure, KeyError) else StopIteration):  # a bug is the server's to log
        next(run)
    assert not len(session.history) and session.idle


def test_of_a_picture_without_a_description_what_is_marked_is_edited_alone(state, session):
    whole = Image.fromarray(np.full((*made(state, session).size[::-1], 4), (255, 64, 96, 255), np.uint8))
    sent = (as_url(whole), *REGION[1:])
    assert not inputs.region(session, "a dog", NO_CONDITIONS, *sent).only
    last(handlers.open_picture(state, session, png(session.current.image), "", QUICK))
    assert inputs.region(session, "a dog", NO_CONDITIONS, *sent).only
    last(handlers.edit(state, session, "a dog", RegionSettings(region=Region.box(0, 0, 64, 64))))
    assert inputs.region(session, "a fox", NO_CONDITIONS, *sent).only
