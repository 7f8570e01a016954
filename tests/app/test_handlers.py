"""The app without a browser: what its handlers do, what they refuse, and that sessions do not meet."""

from __future__ import annotations

import base64
import errno
import io
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from app import archive, export, handlers, views
from app.eta import Pace
from app.sessions import Studio
from app.validation import MOST_BYTES, MOST_LETTERS, Busy, Region, Settings
from fisedit import Cancelled, Editor
from fisedit.errors import FisEditError, InputError, MaskError, PromptError, SessionError
from fisedit.sparse_kernels import tuning
from fisedit.values import DENSE_STEP, EditMask, EditStats, MaskSource

CAT, DOG, FOX = "a cat and a cake on a beach", "a dog and a cake on a beach", "a fox and a cake on a beach"
ROOT = Path(__file__).resolve().parents[2]
QUICK = Settings(steps=4, seed=7)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Studio(folder=tmp_path_factory.mktemp("studio"))


@pytest.fixture
def studio(shared, tmp_path):
    """A studio of its own over the one loaded model."""
    return shared.another(tmp_path)


@pytest.fixture
def session(studio):
    return studio.session("me")


def last(steps):
    return list(steps)[-1].result


def made(studio, session, prompt=CAT, settings=QUICK):
    return last(handlers.generate(studio, session, prompt, settings))


def png(image, **options):
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def as_url(image):
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def same(a, b):
    return np.array_equal(np.asarray(a.image), np.asarray(b.image))


def test_generating_and_editing_are_the_editors(studio, session):
    editor = Editor(studio.shelf.first.editor.pipe)
    source = editor.generate(CAT, seed=7, num_inference_steps=4, guidance_scale=4.0)
    steps = list(handlers.generate(studio, session, CAT, QUICK))
    assert [news.step for news in steps[:-1]] == [0, 1, 2, 3] and {news.steps for news in steps[:-1]} == {4}
    assert steps[0].left is None and all(news.left >= 0 for news in steps[1:])
    assert all(news.picture.size == (16, 16) for news in steps[:-1])
    assert same(steps[-1].result, source)
    assert same(last(handlers.edit(studio, session, DOG)), editor.edit(DOG))


def test_a_preview_says_what_the_edit_does_and_keeps_nothing(studio, session):
    made(studio, session)
    seen = handlers.preview(studio, session, DOG)
    assert len(session.history) == 1 and session.idle
    result = last(handlers.edit(studio, session, DOG))
    assert np.array_equal(seen.preview.mask.grid, result.mask.grid) and seen.seconds > 0 and seen.dense_seconds > 0
    assert handlers.preview(studio, session, DOG).seconds == 0


def test_paint_joins_what_the_words_find_or_stands_alone(studio, session):
    made(studio, session)
    found = handlers.preview(studio, session, DOG).preview.mask.grid
    corner = np.zeros((128, 128), np.uint8)
    corner[-16:, -16:] = 255
    painted = Image.fromarray(corner)
    cells = corner[::8, ::8] > 0
    joined = handlers.preview(studio, session, DOG, Region(add=painted)).preview.mask
    alone = handlers.preview(studio, session, DOG, Region(add=painted, only=True)).preview.mask
    barred = handlers.preview(studio, session, DOG, Region(protect=painted)).preview.mask
    assert np.array_equal(joined.grid, found | cells) and joined.source is MaskSource.GIVEN
    assert np.array_equal(alone.grid, cells)
    assert np.array_equal(barred.grid, found & ~cells)


def test_stop_ends_a_run_before_its_next_step(studio, session):
    source = made(studio, session)
    running = handlers.generate(studio, session, DOG, Settings(steps=150))
    assert next(running).step == 0
    session.stop()
    with pytest.raises(Cancelled):
        list(running)
    assert session.current is source and session.idle


def test_who_stops_listening_stops_the_work(studio, session):
    running = handlers.generate(studio, session, CAT, Settings(steps=150))
    next(running)
    running.close()
    idle(session)
    assert len(session.history) == 0


def test_a_run_that_is_over_stops_nobody_elses_work(studio, session):
    run = handlers.generate(studio, session, CAT, QUICK)
    while next(run).result is None:
        pass
    session.take()
    run.close()
    session.check()
    session.release()


def idle(session):
    for _ in range(1000):
        if session.idle:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the work goes on")


def test_a_page_that_is_left_stops_the_work_unless_another_has_the_session(studio):
    session = studio.session("first")
    assert studio.adopt("second", session.key) is session
    running = handlers.generate(studio, session, CAT, Settings(steps=12))
    next(running)
    studio.leave("first")
    session.check()
    studio.leave("second")
    with pytest.raises(Cancelled):
        list(running)


def test_a_session_does_one_thing_at_a_time(studio, session):
    made(studio, session)
    running = handlers.generate(studio, session, DOG, Settings(steps=50))
    next(running)
    for ask in (
        lambda: handlers.undo(session),
        lambda: handlers.preview(studio, session, DOG),
        lambda: next(handlers.edit(studio, session, DOG)),
        lambda: export.archive(session),
    ):
        with pytest.raises(Busy, match="at work"):
            ask()
    running.close()
    idle(session)


def test_a_run_waits_for_brief_work(studio, session):
    made(studio, session)
    results = []
    with session.work():
        thread = threading.Thread(target=lambda: results.append(last(handlers.edit(studio, session, DOG))))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not results
    thread.join()
    assert results == [session.current]


def test_history_is_a_tree(studio, session):
    source = made(studio, session)
    dog = last(handlers.edit(studio, session, DOG))
    castle = last(handlers.edit(studio, session, DOG.replace("cake", "castle")))
    handlers.checkout(session, source.id)
    fox = last(handlers.edit(studio, session, FOX))
    assert views.layout(session.history) == {"0": (0, 0), "1": (1, 0), "2": (2, 0), "3": (1, 1)}
    assert handlers.undo(session) is source and handlers.redo(session) is fox
    assert handlers.compare(session, dog.id) == (dog, fox)
    handlers.checkout(session, dog.id)
    assert handlers.followers(session) == 1
    assert handlers.delete_current(session) == (dog.id, castle.id)
    assert [result.id for result in session.history] == ["0", "3"] and session.current is source
    assert last(handlers.edit(studio, session, DOG)).id == "4"
    with pytest.raises(SessionError, match="no result '1'"):
        handlers.checkout(session, dog.id)


def test_deleting_the_last_picture_leaves_an_empty_session(studio, session):
    made(studio, session)
    assert handlers.delete_current(session) == ("0",)
    assert not session.folder.exists()
    with pytest.raises(SessionError, match="no source"):
        next(handlers.edit(studio, session, DOG))


def test_a_picture_is_opened_and_edited(studio, session):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 140, 3), np.uint8))
    source = last(handlers.open_picture(studio, session, png(photo), CAT, QUICK))
    assert source.image.size == (140, 90) and source.config.opened
    corner = Image.new("L", photo.size)
    corner.paste(255, (0, 0, 40, 40))
    edited = last(handlers.edit(studio, session, DOG, Region(add=corner, only=True)))
    assert views.kept(source, edited) == "outside the mask: identical"


def test_a_picture_tells_its_settings(studio, session):
    made(studio, session)
    result = last(handlers.edit(studio, session, DOG))
    path = export.picture_file(session)
    assert path.is_relative_to(session.out)
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image), np.asarray(result.image))
    found = export.restore(studio, path.read_bytes())
    assert found.prompt == DOG
    assert found.settings == Settings(4, 4.0, 7, 128, 128, "ddim", "", "demo")
    bare = export.restore(studio, png(result.image))
    assert (bare.prompt, bare.settings) == ("", None)


def test_of_another_programs_picture_the_prompt_is_restored(studio):
    told = PngInfo()
    told.add_text(
        "parameters", "a cat on a beach\nNegative prompt: rain\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1"
    )
    found = export.restore(studio, png(Image.new("RGB", (64, 64)), pnginfo=told))
    assert (found.prompt, found.settings) == ("a cat on a beach", None)


def ran(seconds, macs, sparse):
    """What a run tells of itself; a dense one takes 1000 multiply-accumulates."""
    return EditStats(
        mask_area=0.1,
        mask_source=MaskSource.GIVEN,
        mask_confidence=1.0,
        active_rows=(),
        growth=(),
        unet_evaluations_dense=4 * (not sparse),
        unet_evaluations_sparse=4 * sparse,
        macs=macs,
        macs_dense=1000,
        seconds={"total": seconds},
        recorded_bytes=0,
    )


def test_seconds_to_come_follow_the_table_and_then_what_was_seen():
    pace = Pace()
    assert pace.dense(1000) is None is pace.sparse(200, 1000)
    pace.saw(ran(10.0, 1000, sparse=False))
    assert pace.dense(500) == 5 and pace.sparse(200, 1000) == pytest.approx(2.33)
    pace.saw(ran(4.66, 200, sparse=True))
    assert pace.sparse(200, 1000) == pytest.approx(4.66) and pace.dense(1000) == 10
    assert 4.66 < pace.sparse(333, 1000) < 10, "what no mask saves is added, so that large edits stay below a dense run"
    pace.saw(ran(0.0, 0, sparse=False))
    assert pace.dense(1000) == 10


def test_a_run_that_somebody_watches_tells_more_than_trials():
    """Trials run without previews and a browser beside them."""
    pace = Pace()
    pace.saw(ran(1.0, 1000, sparse=False), trial=True)
    pace.saw(ran(0.5, 200, sparse=True), trial=True)
    assert pace.dense(1000) == 1 and pace.sparse(200, 1000) == pytest.approx(0.5)
    pace.saw(ran(3.0, 1000, sparse=False))
    pace.saw(ran(1.0, 1000, sparse=False), trial=True)
    assert pace.dense(1000) == 3 and pace.sparse(200, 1000) == pytest.approx(1.5)
    pace.saw(ran(1.2, 200, sparse=True))
    assert pace.sparse(200, 1000) == pytest.approx(1.2)


def test_a_session_is_downloaded_and_taken_up_by_another(studio, session):
    made(studio, session)
    dog = last(handlers.edit(studio, session, DOG))
    packed = export.archive(session)
    assert packed.is_relative_to(session.out)
    other = studio.session("other")
    assert same(export.reopen(studio, other, packed.read_bytes()), dog)
    assert [result.prompt for result in other.history] == [CAT, DOG]
    assert same(last(handlers.edit(studio, other, FOX)), last(handlers.edit(studio, session, FOX)))


def test_an_archive_names_no_place_on_this_machine(studio, session, tmp_path):
    made(studio, session)
    session.models["0"] = str(tmp_path / "my-model")
    with zipfile.ZipFile(export.archive(session)) as packed:
        assert json.loads(packed.read("session.json"))["model"] == "./my-model"
        assert str(tmp_path) not in "".join(packed.read(name).decode("latin-1") for name in packed.namelist())


def test_an_archive_brings_no_adapter(studio, session, tmp_path, monkeypatch):
    made(studio, session)
    told = io.BytesIO()
    with zipfile.ZipFile(export.archive(session)) as packed, zipfile.ZipFile(told, "w") as changed:
        for name in packed.namelist():
            data = packed.read(name)
            if name == "session.json":
                adapters = [{"source": str(tmp_path / "adapter"), "scale": 1.0}]
                data = json.dumps(json.loads(data) | {"adapters": adapters}).encode()
            changed.writestr(name, data)
    monkeypatch.setattr(Editor, "load_adapter", lambda *_, **__: pytest.fail("an adapter was loaded"))
    assert export.reopen(studio, studio.session("other"), told.getvalue()).prompt == CAT


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["../session.json"], "other files"),
        (["/etc/passwd"], "other files"),
        (["session.json", "run.sh"], "other files"),
        (["session.json"], "damaged"),
        ([], "damaged"),
    ],
)
def test_a_zip_is_not_believed(studio, session, names, why):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for name in names:
            packed.writestr(name, "{}")
    source = made(studio, session)
    with pytest.raises(FisEditError, match=why):
        export.reopen(studio, session, file.getvalue())
    assert session.current is source and session.idle
    assert {path.name for path in studio.folder.iterdir()} == {session.key}


def test_no_zip_unpacks_beyond_its_bound(studio, session, monkeypatch):
    from app import archive

    monkeypatch.setattr(archive, "MOST_UNPACKED", 1000)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("0.png", b"\0" * 5000)
    with pytest.raises(InputError, match="unpacked"):
        export.reopen(studio, session, file.getvalue())
    with pytest.raises(InputError, match="something else"):
        export.reopen(studio, session, b"PK no zip")


@pytest.mark.parametrize("failing", ["a member", "the index"])
def test_a_full_disk_is_not_taken_for_a_bad_zip(studio, session, tmp_path, monkeypatch, failing):
    made(studio, session)
    packed, wrote = archive.pack(session.folder), archive.write_bytes
    members = len(zipfile.ZipFile(io.BytesIO(packed)).namelist())
    room = {"a member": members - 1, "the index": members}[failing]
    written = []

    def full(content, path):
        if len(written) == room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        wrote(content, path)

    monkeypatch.setattr(archive, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        archive.unpack(packed, tmp_path / "there", "demo")


def test_a_dense_run_is_measured_and_kept_out_of_the_history(studio, session):
    made(studio, session)
    dog = last(handlers.edit(studio, session, DOG))
    end = list(handlers.dense(studio, session, dog.id))[-1]
    assert end.result is None and end.seconds == session.measured[dog.id] > 0
    assert len(session.history) == 2


def test_a_dense_run_is_the_dense_picture(studio, session, monkeypatch):
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: False)  # where products are widened they differ by rounding
    source = made(studio, session)
    assert np.array_equal(np.asarray(studio.shelf.first.desk(session).dense(source.id)[0]), np.asarray(source.image))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Settings(steps=0), "steps"),
        (Settings(steps=151), "steps"),
        (Settings(steps=2.5), "steps"),
        (Settings(steps=True), "steps"),
        (Settings(guidance=float("nan")), "guidance"),
        (Settings(guidance=1e9), "guidance"),
        (Settings(seed=-1), "seed"),
        (Settings(seed=2**70), "seed"),
        (Settings(width=4096), "width"),
        (Settings(height=100), "divisible by 8"),
        (Settings(scheduler="../../etc/passwd"), "scheduler"),
        (Settings(negative_prompt="x" * (MOST_LETTERS + 1)), "negative prompt"),
    ],
)
def test_settings_out_of_range_are_refused_before_any_work(studio, session, settings, why):
    with pytest.raises(InputError, match=why) as refused:
        handlers.generate(studio, session, CAT, settings)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


@pytest.mark.parametrize("prompt", ["", " \n\t", "x" * 100_000, "\x1b\x00", None, 5])
def test_prompts_that_cannot_be_used(studio, session, prompt):
    with pytest.raises(PromptError):
        handlers.generate(studio, session, prompt, QUICK)


def test_control_characters_become_spaces(studio, session):
    assert made(studio, session, "a cat\x1b[31m\r\non a beach").prompt == "a cat [31m  on a beach"


@pytest.mark.parametrize(
    ("region", "why"),
    [
        (Region(words=("cat",) * 17), "words"),
        (Region(grow=17), "grow"),
        (Region(grow=1.5), "grow"),
        (Region(instance=-1), "instance"),
        (Region(instance=5), "instance"),
    ],
)
def test_regions_out_of_range(studio, session, region, why):
    made(studio, session)
    with pytest.raises(FisEditError, match=why):
        handlers.preview(studio, session, DOG, region)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "something else"),
        (b"\0" * (MOST_BYTES + 1), "32 MiB"),
        (png(Image.new("L", (12_001, 8))), "12000"),
        (png(Image.new("L", (8, 8)))[:40], "picture must be"),
    ],
    ids=["nothing", "svg", "bytes", "sides", "cut"],
)
def test_pictures_that_are_refused(studio, session, data, why):
    with pytest.raises(InputError, match=why):
        handlers.open_picture(studio, session, data)
    with pytest.raises(InputError, match=why):
        export.restore(studio, data)


def test_strokes_become_two_areas():
    painted = Image.new("RGBA", (64, 32))
    painted.paste((255, 64, 96, 255), (0, 0, 8, 8))
    painted.paste((48, 112, 255, 255), (32, 16, 64, 32))
    sent = as_url(painted)
    add, protect = views.strokes(sent, (128, 64))
    assert np.asarray(add)[:16, :16].all() and np.asarray(add).sum() == 255 * 16 * 16
    assert np.asarray(protect)[32:, 64:].all() and np.asarray(protect).sum() == 255 * 32 * 64
    assert views.strokes("", (8, 8)) == views.strokes(as_url(Image.new("RGBA", (8, 8))), (8, 8)) == (None, None)


@pytest.mark.parametrize(
    "sent",
    ["data:image/svg+xml;base64,AAAA", "data:image/png;base64,AAAA", "data:image/png;base64,%", {"a": 1}, "x" * 2**21],
)
def test_strokes_that_are_none(sent):
    with pytest.raises((MaskError, InputError)):
        views.strokes(sent, (8, 8))


def test_before_and_after_meet_within_the_mask():
    grid = np.zeros((8, 16), bool)
    assert views.border(None) == views.border(EditMask(grid, MaskSource.NOWHERE)) == 50
    assert views.border(EditMask(~grid, MaskSource.GIVEN)) == 50
    grid[2:4, 12:15] = True
    assert views.border(EditMask(grid, MaskSource.GIVEN)) == 13.5 / 16 * 100
    grid[:, 0] = True
    assert views.border(EditMask(grid, MaskSource.GIVEN)) == 0.5 / 16 * 100


def test_changed_words_are_marked_and_nothing_else_becomes_html():
    assert views.changes(CAT, DOG) == "a <del>cat</del> <ins>dog</ins> and a cake on a beach"
    assert views.changes("a cat", "a cat in a hat") == "a cat <ins>in a hat</ins>"
    assert views.changes("a big cat", "a cat") == "a <del>big</del> cat"
    assert views.changes("a <b>", "a <script>x") == "a &lt;<del>b</del><ins>script</ins>&gt;<ins>x</ins>"


def test_names_in_the_history_are_escaped(studio, session):
    made(studio, session, '"><img src=x onerror=alert(1)>')
    drawn = views.tree(session.history, "0")
    assert "<img src=x" not in drawn and drawn.count("<button") == 1


def test_the_line_of_truth(studio, session):
    source = made(studio, session)
    dog = last(handlers.edit(studio, session, DOG))
    seconds, dense = dog.stats.seconds["total"], dog.stats.growth.count(DENSE_STEP)
    rows = (dense + (len(dog.stats.growth) - dense) * dog.stats.active_rows[0] / 256) / len(dog.stats.growth)
    told = views.truth(dog, source, seconds * 3, measured=False)
    assert f"{seconds:.1f} s" in told and "3.0 times faster than dense (predicted)" in told
    assert f"{rows:.0%} of the rows computed" in told and "outside the mask: identical" in told
    assert "2.0 times slower than dense (measured)" in views.truth(dog, source, seconds / 2, measured=True)
    assert "as fast as dense (measured)" in views.truth(dog, source, seconds * 1.02, measured=True)
    night = last(handlers.edit(studio, session, "a dog and a cake at night"))
    assert "ran dense: " in views.truth(night, dog, None, measured=False)


# Several people


def test_people_do_not_see_each_other(studio):
    a, b = studio.session("a"), studio.session("b")
    made(studio, a)
    assert len(b.history) == 0 and a.folder != b.folder and a.key != b.key
    assert studio.session("a") is a and studio.adopt("c", b.key) is b


@pytest.mark.parametrize("key", ["", "0" * 32, "../a", "/etc", "a/../b", "A" * 32, "..", "é" * 32])
def test_a_key_that_nobody_has_opens_a_new_session(studio, session, key):
    made(studio, session)
    opened = studio.adopt("stranger", key)
    assert opened is not session and len(opened.history) == 0
    assert opened.folder.parent == studio.folder


def test_work_at_once_gives_what_work_alone_gives(studio):
    alone = [made(studio, studio.session(f"alone {seed}"), CAT, Settings(4, seed=seed)) for seed in range(3)]
    together = {}

    def work(seed):
        together[seed] = made(studio, studio.session(str(seed)), CAT, Settings(4, seed=seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(alone[seed], together[seed]) for seed in range(3))


def test_features_of_the_longest_idle_go_first_and_come_back(studio):
    a, b = studio.session("a"), studio.session("b")
    made(studio, a)
    expected = last(handlers.edit(studio, a, DOG))
    handlers.undo(a)
    recorded = studio.shelf.recorded_bytes
    studio.feature_bytes = recorded(a)
    studio.session("a")
    made(studio, b)
    assert recorded(a) == 0 < recorded(b) <= studio.feature_bytes
    assert len(a.history) == 2
    again = last(handlers.edit(studio, a, DOG))
    assert same(again, expected) and "rebuilt" in " ".join(again.stats.notes)
    assert recorded(b) == 0


def test_who_is_put_aside_finds_everything_again(studio):
    studio.capacity = 2
    a = studio.session("a")
    source = made(studio, a)
    studio.session("b"), studio.session("c")
    assert len(studio) == 2
    back = studio.session("a")
    assert back is not a and back.key == a.key and same(back.current, source)
    assert last(handlers.edit(studio, back, DOG)).parent == source.id


def test_nobody_at_work_is_put_aside(studio):
    studio.capacity = 1
    running = handlers.generate(studio, studio.session("a"), CAT, Settings(steps=50))
    next(running)
    with pytest.raises(Busy, match="try again"):
        studio.session("b")
    running.close()
    idle(studio.session("a"))
    assert studio.session("b").idle


def test_a_temporary_studio_leaves_nothing(shared):
    studio = shared.another(None)
    made(studio, studio.session("a"))
    folder = studio.folder
    assert list(folder.iterdir())
    studio.close()
    assert not folder.exists()


def test_what_is_damaged_is_put_aside(studio, session):
    made(studio, session)
    (session.folder / "session.json").write_text("{")
    studio.capacity = 1
    studio.session("other")
    back = studio.session("me")
    assert back.key == session.key and back.lost and len(back.history) == 0
    (aside,) = studio.folder.glob(f"{session.key}.*")
    assert (aside / "0.png").exists()
    assert made(studio, back).id == "0"


def test_handlers_load_neither_gradio_nor_torch():
    heavy = {"gradio", "torch", "diffusers"}
    told = f"import app.handlers, app.export, app.views, sys; print({heavy} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
