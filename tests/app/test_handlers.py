"""The app without a browser: what its handlers do, what they refuse, and that sessions do not meet."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app import export, handlers, html
from app.validation import MAX_BYTES, MAX_PROMPT_CHARACTERS, Busy, RegionSettings, SourceSettings
from fisedit import Cancelled, Editor
from fisedit.editor import Preview
from fisedit.errors import FisEditError, InputError, PromptError, SessionError
from fisedit.sparse_kernels import tuning
from fisedit.values import MaskSource
from tests.support.app.requests import CAT, DOG, FOX, QUICK, idle, last, made, png
from tests.support.edits import same

ROOT = Path(__file__).resolve().parents[2]


def test_generating_and_editing_are_the_editors(state, session):
    editor = Editor(state.pool.first.loaded.editor.pipe)
    source = editor.generate(CAT, seed=7, num_inference_steps=4, guidance_scale=4.0)
    steps = list(handlers.generate(state, session, CAT, QUICK))
    assert [news.step for news in steps[:-1]] == [0, 1, 2, 3] and {news.steps for news in steps[:-1]} == {4}
    assert steps[0].seconds_left is None and all(news.seconds_left >= 0 for news in steps[1:])
    assert all(news.picture.size == (16, 16) for news in steps[:-1])
    assert same(steps[-1].result, source)
    assert same(last(handlers.edit(state, session, DOG)), editor.edit(DOG))


def test_a_preview_says_what_the_edit_does_and_keeps_nothing(state, session):
    made(state, session)
    seen = handlers.preview(state, session, DOG)
    assert len(session.history) == 1 and session.idle
    result = last(handlers.edit(state, session, DOG))
    assert np.array_equal(seen.preview.mask.grid, result.mask.grid) and seen.seconds > 0 and seen.dense_seconds > 0
    assert handlers.preview(state, session, DOG).seconds == 0


def test_paint_joins_what_the_words_find_or_stands_alone(state, session):
    made(state, session)
    found = handlers.preview(state, session, DOG).preview.mask.grid
    corner = np.zeros((128, 128), np.uint8)
    corner[-16:, -16:] = 255
    painted = Image.fromarray(corner)
    cells = corner[::8, ::8] > 0
    joined = handlers.preview(state, session, DOG, RegionSettings(add=painted)).preview.mask
    alone = handlers.preview(state, session, DOG, RegionSettings(add=painted, only=True)).preview.mask
    barred = handlers.preview(state, session, DOG, RegionSettings(protect=painted)).preview.mask
    assert np.array_equal(joined.grid, found | cells) and joined.source is MaskSource.ATTENTION
    assert np.array_equal(alone.grid, cells)
    assert np.array_equal(barred.grid, found & ~cells)


def test_stop_ends_a_run_before_its_next_step(state, session):
    source = made(state, session)
    running = handlers.generate(state, session, DOG, SourceSettings(steps=150))
    assert next(running).step == 0
    session.stop()
    with pytest.raises(Cancelled):
        list(running)
    assert session.current is source and session.idle


def test_who_stops_listening_stops_the_work(state, session):
    running = handlers.generate(state, session, CAT, SourceSettings(steps=150))
    next(running)
    running.close()
    idle(session)
    assert len(session.history) == 0


def test_a_run_that_is_over_stops_nobody_elses_work(state, session):
    run = handlers.generate(state, session, CAT, QUICK)
    while next(run).result is None:
        pass
    session.begin_work()
    run.close()
    session.raise_if_stopped()
    session.end_work()


def test_a_region_is_predicted_between_the_steps_of_a_run(state, session):
    made(state, session)
    alone = handlers.preview(state, session, DOG).preview
    other = state.session("other")
    running = handlers.generate(state, other, CAT, SourceSettings(steps=150))
    next(running)
    between = handlers.preview(state, session, DOG).preview
    assert not other.idle and np.array_equal(between.mask.grid, alone.mask.grid)
    running.close()
    idle(other)


def test_a_run_waits_for_the_one_before_it(state, session):
    other = state.session("other")
    running = handlers.generate(state, other, CAT, SourceSettings(steps=150))
    next(running)
    waiting = handlers.generate(state, session, CAT, QUICK)
    first = next(waiting)
    assert (first.step, first.steps, first.ahead, first.seconds_left) == (0, 4, 1, None)
    running.close()
    assert last(waiting) is session.current


def test_a_session_does_one_thing_at_a_time(state, session):
    made(state, session)
    running = handlers.generate(state, session, DOG, SourceSettings(steps=50))
    next(running)
    for ask in (
        lambda: handlers.undo(session),
        lambda: handlers.preview(state, session, DOG),
        lambda: next(handlers.edit(state, session, DOG)),
        lambda: export.export_session(session),
    ):
        with pytest.raises(Busy, match="at work"):
            ask()
    running.close()
    idle(session)


def test_a_run_waits_for_brief_work(state, session):
    made(state, session)
    results = []
    with session.work():
        thread = threading.Thread(target=lambda: results.append(last(handlers.edit(state, session, DOG))))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not results
    thread.join()
    assert results == [session.current]


def test_history_is_a_tree(state, session):
    source = made(state, session)
    dog = last(handlers.edit(state, session, DOG))
    castle = last(handlers.edit(state, session, DOG.replace("cake", "castle")))
    handlers.checkout(session, source.id)
    fox = last(handlers.edit(state, session, FOX))
    assert html.layout(session.history) == {"0": (0, 0), "1": (1, 0), "2": (2, 0), "3": (1, 1)}
    assert handlers.undo(session) is source and handlers.redo(session) is fox
    assert handlers.compare(session, dog.id) == (dog, fox)
    handlers.checkout(session, dog.id)
    assert handlers.count_descendants(session) == 1
    assert handlers.delete_current(session) == (dog.id, castle.id)
    assert [result.id for result in session.history] == ["0", "3"] and session.current is source
    assert last(handlers.edit(state, session, DOG)).id == "4"
    with pytest.raises(SessionError, match="no result '1'"):
        handlers.checkout(session, dog.id)


def test_deleting_the_last_picture_leaves_an_empty_session(state, session):
    made(state, session)
    assert handlers.delete_current(session) == ("0",)
    assert not session.folder.exists()
    with pytest.raises(SessionError, match="no source"):
        next(handlers.edit(state, session, DOG))


def test_a_picture_is_opened_and_edited(state, session):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 140, 3), np.uint8))
    source = last(handlers.open_picture(state, session, png(photo), CAT, QUICK))
    assert source.image.size == (140, 90) and source.config.opened
    corner = Image.new("L", photo.size)
    corner.paste(255, (0, 0, 40, 40))
    edited = last(handlers.edit(state, session, DOG, RegionSettings(add=corner, only=True)))
    assert html.outside_as_text(source, edited) == "outside the mask: identical"


def test_a_dense_run_is_measured_and_kept_out_of_the_history(state, session):
    made(state, session)
    dog = last(handlers.edit(state, session, DOG))
    end = list(handlers.measure_dense(state, session, dog.id))[-1]
    assert end.result is None and end.seconds == session.measured[dog.id] > 0
    assert len(session.history) == 2


def test_a_dense_run_is_the_dense_picture(state, session, monkeypatch):
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: False)  # where products are widened they differ by rounding
    source = made(state, session)
    assert np.array_equal(
        np.asarray(session.editor(state.pool.first.loaded).dense(source.id)[0]), np.asarray(source.image)
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (SourceSettings(steps=0), "steps"),
        (SourceSettings(steps=151), "steps"),
        (SourceSettings(steps=2.5), "steps"),
        (SourceSettings(steps=True), "steps"),
        (SourceSettings(guidance=float("nan")), "guidance"),
        (SourceSettings(guidance=1e9), "guidance"),
        (SourceSettings(seed=-1), "seed"),
        (SourceSettings(seed=2**70), "seed"),
        (SourceSettings(width=4096), "width"),
        (SourceSettings(height=100), "divisible by 8"),
        (SourceSettings(scheduler="../../etc/passwd"), "scheduler"),
        (SourceSettings(negative_prompt="x" * (MAX_PROMPT_CHARACTERS + 1)), "negative prompt"),
    ],
)
def test_settings_out_of_range_are_refused_before_any_work(state, session, settings, why):
    with pytest.raises(InputError, match=why) as refused:
        handlers.generate(state, session, CAT, settings)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("prompt", ["", " \n\t", "x" * 100_000, "\x1b\x00", None, 5])
def test_prompts_that_cannot_be_used(state, session, prompt):
    with pytest.raises(PromptError):
        handlers.generate(state, session, prompt, QUICK)


def test_control_characters_become_spaces(state, session):
    assert made(state, session, "a cat\x1b[31m\r\non a beach").prompt == "a cat [31m  on a beach"


@pytest.mark.parametrize(
    ("region", "why"),
    [
        (RegionSettings(words=("cat",) * 17), "words"),
        (RegionSettings(grow=17), "grow"),
        (RegionSettings(grow=1.5), "grow"),
        (RegionSettings(instance=-1), "instance"),
        (RegionSettings(instance=5), "instance"),
    ],
)
def test_regions_out_of_range(state, session, region, why):
    made(state, session)
    with pytest.raises(FisEditError, match=why):
        handlers.preview(state, session, DOG, region)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "something else"),
        (b"\0" * (MAX_BYTES + 1), "32 MiB"),
        (png(Image.new("L", (12_001, 8))), "12000"),
        (png(Image.new("L", (8, 8)))[:40], "picture must be"),
    ],
    ids=["nothing", "svg", "bytes", "sides", "cut"],
)
def test_pictures_that_are_refused(state, session, data, why):
    with pytest.raises(InputError, match=why):
        handlers.open_picture(state, session, data)
    with pytest.raises(InputError, match=why):
        export.restore_settings(state, data)


def test_handlers_load_neither_gradio_nor_torch():
    heavy = {"gradio", "torch", "diffusers"}
    told = f"import app.handlers, app.export, app.html, app.views, sys; print({heavy} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_pictures_of_two_sizes_are_not_compared(state, session):
    first = made(state, session, CAT, SourceSettings(steps=2, seed=7, width=64, height=64))
    made(state, session, CAT, SourceSettings(steps=2, seed=7, width=72, height=64))
    with pytest.raises(SessionError, match="of one size to be compared, got 64x64 and 72x64"):
        handlers.compare(session, first.id)


def test_an_estimate_is_the_cost_tables_where_there_is_one():
    preview = Preview(None, None, 1, 2, seconds=2.0, seconds_dense=3.0)
    assert vars(handlers._estimate(preview, None)) == vars(handlers.EditEstimate(preview, 2.0, 3.0))
