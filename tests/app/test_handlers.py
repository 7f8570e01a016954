"""The app without a browser: what its handlers do, what they refuse, and that sessions do not meet."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import numpy as np
import pytest
from PIL import Image

from app import export, handlers, history, html, live, variations
from app.components import PageComponents
from app.session_events import SessionEvents
from app.validation import (
    MAX_BYTES,
    MAX_PROMPT_CHARACTERS,
    Busy,
    PartNotOpened,
    RegionSettings,
    SourceSettings,
    check_extension,
)
from fisedit import Cancelled, Editor, Region
from fisedit.editor import Preview
from fisedit.errors import FisEditError, InputError, PromptError, SessionError
from fisedit.sessions.store import SessionStore
from fisedit.sparse_kernels import tuning
from fisedit.values import MaskSource
from tests.support.app.requests import CAT, DOG, FOX, QUICK, idle, last, made, png
from tests.support.edits import same

ROOT = Path(__file__).resolve().parents[2]


def test_generating_and_editing_are_the_editors(state, session):
    editor = Editor(state.pool.first.loaded.editor.pipe)
    source = editor.generate(CAT, seed=7, num_inference_steps=4, guidance_scale=4.0, width=128, height=128)
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
    assert np.array_equal(seen.preview.mask.grid, result.latent_cells) and seen.seconds > 0 and seen.dense_seconds > 0
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
        lambda: history.undo(session),
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


def test_a_run_that_is_stopped_while_it_waits_does_not_begin(state, session):
    made(state, session)
    outcome = []

    def run():
        try:
            outcome.append(last(handlers.edit(state, session, DOG)))
        except Cancelled as error:
            outcome.append(str(error))

    with session.work():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(0.2)
        session.stop()
    thread.join()
    assert outcome == ["stopped; nothing was changed"] and len(session.history) == 1 and session.idle


def test_a_result_that_cannot_be_saved_is_there_and_said(state, session, monkeypatch):
    made(state, session)
    with gr.Blocks():
        events = SessionEvents(state, page := PageComponents(state.pool))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "/home/me/sessions/1")

    with monkeypatch.context() as patched:
        patched.setattr(SessionStore, "save", full)
        edit = last(handlers.edit(state, session, DOG))
        assert session.current is edit
        said = events.updates.after_run(session)[page.status]
        assert "not saved: No space left on device." in said and "/home" not in said
    history.undo(session)
    assert events.updates.session(session, view="edit")[page.status] == ""


def test_history_is_a_tree(state, session):
    source = made(state, session)
    dog = last(handlers.edit(state, session, DOG))
    castle = last(handlers.edit(state, session, DOG.replace("cake", "castle")))
    history.checkout(session, source.id)
    fox = last(handlers.edit(state, session, FOX))
    assert html.layout(session.history) == {"0": (0, 0), "1": (1, 0), "2": (2, 0), "3": (1, 1)}
    assert history.undo(session) is source and history.redo(session) is fox
    assert history.compare(session, dog.id) == (dog, fox)
    history.checkout(session, dog.id)
    assert history.count_descendants(session) == 1
    assert history.delete_current(session) == (dog.id, castle.id)
    assert [result.id for result in session.history] == ["0", "3"] and session.current is source
    assert last(handlers.edit(state, session, DOG)).id == "4"
    with pytest.raises(SessionError, match="no result '1'"):
        history.checkout(session, dog.id)


def test_deleting_the_last_picture_leaves_an_empty_session(state, session):
    made(state, session)
    assert history.delete_current(session) == ("0",)
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
        (SourceSettings(sizes={"original_size": (512,)}), "original_size must be height and width"),
        (SourceSettings(sizes={"../../etc/passwd": (8, 8)}), "sizes must be of"),
        (SourceSettings(sizes=8), "sizes must map names"),
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
        history.compare(session, first.id)


def test_an_estimate_is_the_cost_tables_where_there_is_one():
    preview = Preview(None, None, 1, 2, seconds=2.0, seconds_dense=3.0)
    shown = SimpleNamespace(size=(64, 48), config=SimpleNamespace(crop=(0, 0, 8, 8)))
    expected = handlers.EditEstimate(preview, 2.0, 3.0, (64, 48), (0, 0, 8, 8))
    assert vars(handlers._estimate(preview, None, shown)) == vars(expected)


PHOTO = Image.fromarray(np.random.default_rng(1).integers(0, 256, (75, 100, 3), np.uint8)).resize((600, 450))
FEW = SourceSettings(steps=3, guidance=4.0)


def painted(*boxes, size=PHOTO.size):
    mask = Image.new("L", size)
    for box in boxes:
        mask.paste(255, box)
    return mask


LEFT, RIGHT = (40, 40, 80, 80), (500, 300, 560, 360)


@pytest.fixture
def photo(state, session):
    return last(handlers.open_picture(state, session, png(PHOTO), CAT, FEW))


def sources(session):
    return [result.config.crop for result in session.history if result.parent is None]


def test_paint_on_a_large_picture_opens_its_part_once(state, session, photo):
    region = RegionSettings(add=painted(LEFT), only=True)
    with pytest.raises(PartNotOpened, match="Run first opens this part of the picture") as told:
        handlers.preview(state, session, DOG, region)
    edit = last(handlers.edit(state, session, DOG, region))
    (whole, crop) = sources(session)
    assert told.value.part == crop
    assert whole is None and crop is not None and crop[2] - crop[0] < 400
    before, after = np.asarray(photo.image), np.asarray(edit.image)
    changed = (before != after).any(2)
    assert changed[40:80, 40:80].any() and not changed[120:].any() and not changed[:, 120:].any()
    assert handlers.preview(state, session, FOX, region).crop == crop
    last(handlers.edit(state, session, FOX, region))
    assert len(sources(session)) == 2
    last(handlers.edit(state, session, FOX, RegionSettings(region=Region.box(*RIGHT))))
    assert len(sources(session)) == 3 and sources(session)[2][0] > 200


def test_what_covers_most_of_a_large_picture_opens_nothing(state, session, photo):
    region = RegionSettings(add=painted((10, 10, 590, 440)), only=True)
    last(handlers.edit(state, session, DOG, region))
    assert sources(session) == [None]


def test_what_is_protected_may_lie_beside_the_opened_part(state, session, photo):
    region = RegionSettings(add=painted(LEFT), protect=painted(RIGHT), only=True)
    last(handlers.edit(state, session, DOG, region))
    assert len(sources(session)) == 2
    both = RegionSettings(region=Region.box(*LEFT) | Region.box(*RIGHT))
    last(handlers.edit(state, session, FOX, both))
    assert len(sources(session)) == 3


def stop_once_opened(session, run):
    """Stops a run as soon as the part, or the larger picture, is open."""
    for _ in run:
        if len(session.history) > 1:
            session.stop()


@pytest.mark.parametrize("work", ["edit", "erase", "vary", "extend"])
def test_work_of_several_runs_leaves_nothing_when_it_is_stopped(state, session, photo, work):
    region = RegionSettings(add=painted(LEFT), only=True)
    run = {
        "edit": lambda: handlers.edit(state, session, DOG, region),
        "erase": lambda: handlers.erase(state, session, region),
        "vary": lambda: variations.vary(state, session, DOG, region),
        "extend": lambda: handlers.extend(state, session, (0, 0, 32, 0), DOG),
    }[work]()
    with pytest.raises(Cancelled):
        stop_once_opened(session, run)
    idle(session)
    assert session.current is photo and list(session.history) == [photo]


def test_a_live_edit_opens_nothing(state, session, photo):
    with pytest.raises(PartNotOpened):
        last(live.edit_live(state, session, DOG, RegionSettings(add=painted(LEFT), only=True)))
    assert list(session.history) == [photo] and session.current is photo


def test_pictures_are_extended_to_the_servers_limits_and_no_further(state, session):
    made(state, session)
    for widths in ((12_000, 0, 0, 0), (0, 0, 1025, 0), (0, 0, 0, 0), (-8, 0, 0, 0)):
        with pytest.raises(InputError):
            handlers.extend(state, session, widths, CAT)
    with pytest.raises(InputError, match="12000 pixels at a side"):
        check_extension((1024, 0, 0, 0), (11_500, 100))
    with pytest.raises(InputError, match="32 million"):
        check_extension((1024, 0, 0, 0), (6_000, 5_000))


def test_variations_of_what_was_erased_erase(state, session):
    made(state, session)
    region = RegionSettings(region=Region.box(0, 0, 32, 32))
    first = last(handlers.erase(state, session, region))
    last(variations.vary(state, session, session.current.prompt))
    others = [result for result in session.history if result.parent == first.parent and result is not first]
    assert len(others) == 4 and all(result.run.erases for result in others)
    assert len({result.image.tobytes() for result in [first, *others]}) == 5


def test_regions_with_prompts_of_their_own(state, session):
    made(state, session)
    region = RegionSettings(regions=((Region.box(0, 0, 32, 32), "a dog"), (Region.box(64, 0, 96, 32), "a fox")))
    first = last(handlers.edit(state, session, "", region))
    assert first.prompt == CAT and [each.prompt for each in first.run.regional] == ["a dog", "a fox"]
    last(variations.vary(state, session, CAT))
    assert [each.prompt for each in session.current.run.regional] == ["a dog", "a fox"]
    for wrong in (replace(region, grow=1), replace(region, region=Region.words()), replace(region, words=("cat",))):
        with pytest.raises(InputError):
            handlers.edit(state, session, "", wrong)
    with pytest.raises(PromptError):
        handlers.edit(state, session, "", RegionSettings(region=Region.box(0, 0, 8, 8)))
