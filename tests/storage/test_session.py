"""What is kept, dropped and rebuilt: the memory's budget, and sessions on disk."""

from __future__ import annotations

import numpy as np
import pytest

from fisedit import Editor
from fisedit.errors import ModelError, SessionError
from tests.support.edits import BIRD, CAT, DOG, Calls, latents
from tests.support.grids import grids
from tests.support.sessions import change_index, file_of

SQUARE, CORNER, MOST = (grids(16, 16)[name] for name in ("square", "corner", "all_but_one"))
QUICK = {"seed": 7, "num_inference_steps": 3}
NIGHT = "a bird and a cake at night"


def session(editor):
    """A source, a sparse edit, one that changes nothing, a sparse edit on it, a dense blended one, one on that."""
    editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, growth=(1, 1, 0))
    editor.edit(DOG)
    editor.edit(BIRD, mask=CORNER, growth=2)
    editor.edit(NIGHT, protect=SQUARE)
    editor.edit(DOG, mask=SQUARE, growth=1)
    return editor


def last_edit(editor):
    """One more edit, on each result."""
    ids = [result.id for result in editor.history]
    return [_edit_on(editor, result_id) for result_id in ids]


def _edit_on(editor, result_id):
    editor.checkout(result_id)
    return editor.edit("a car and a cake on a beach", mask=CORNER, growth=1)


def same(ours, theirs):
    return all(a.image.tobytes() == b.image.tobytes() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("budget", [0, 6_000_000])
def test_what_was_dropped_is_rebuilt(pipelines, budget):
    """A budget for nothing, and one for about one source: the pictures do not depend on it."""
    roomy = session(Editor(pipelines["shallow"]))
    tight = session(Editor(pipelines["shallow"], max_recorded_bytes=budget))
    assert same(tight.history, roomy.history)
    assert tight._memory.bytes < roomy._memory.bytes
    assert same(last_edit(tight), last_edit(roomy))


def test_with_room_nothing_is_rebuilt(pipelines):
    editor = session(Editor(pipelines["shallow"]))
    with Calls(editor.pipe.unet) as calls:
        last_edit(editor)
    assert calls.dense == 0


def test_only_what_is_gone_is_rebuilt(pipelines):
    """A dense edit stands on its own: its source may be gone without harm."""
    editor = Editor(pipelines["shallow"], max_recorded_bytes=0)
    editor.generate(CAT, **QUICK)
    dense = editor.edit("a cat and a cake at night")
    with Calls(editor.pipe.unet) as calls:
        editor.edit(NIGHT, mask=SQUARE, growth=1)
        editor.checkout(dense.id)
        editor.edit(NIGHT, mask=CORNER, growth=1)
    assert (calls.dense, calls.sparse) == (0, 6)


def test_the_least_recently_used_source_goes_first(pipelines):
    editor = Editor(pipelines["shallow"])
    first = editor.generate(CAT, **QUICK)
    editor._memory.max_bytes = int(2.5 * first.stats.recorded_bytes)
    second = editor.generate(DOG, **QUICK)
    editor.checkout(first.id)
    editor.edit(BIRD, mask=CORNER, growth=0)
    third = editor.generate(BIRD, **QUICK)
    kept = [result.id for result in (first, second, third) if result.id in editor._memory]
    assert kept == [first.id, third.id]


def test_edits_of_one_source_go_before_it(pipelines):
    """Siblings are dropped one by one, the oldest first; what the last one lies over stays."""
    editor = Editor(pipelines["shallow"])
    source = editor.generate(CAT, **QUICK)
    first = editor.edit(BIRD, mask=CORNER, growth=0)
    editor._memory.max_bytes = editor._memory.bytes
    editor.checkout(source.id)
    second = editor.edit(DOG, mask=CORNER, growth=0)
    kept = [result.id for result in (source, first, second) if result.id in editor._memory]
    assert kept == [source.id, second.id]


def test_a_result_outlives_what_was_recorded(pipelines):
    """An edit in hand keeps no features alive, and undo needs none."""
    editor = Editor(pipelines["shallow"], max_recorded_bytes=0)
    source = editor.generate(CAT, **QUICK)
    editor.generate(DOG, **QUICK)
    with Calls(editor.pipe.unet) as calls:
        assert editor.checkout(source.id) is source
    assert calls.dense == calls.sparse == 0 and source.id not in editor._memory


def test_a_session_comes_back_whole(model, tmp_path):
    editor = session(Editor.from_pretrained(model, device="cpu", dtype="fp32"))
    editor.checkout("3")
    editor.save(tmp_path)
    again = Editor.resume(tmp_path, device="cpu")
    assert again.current.id == "3" and len(again.history) == 6
    for ours, theirs in zip(again.history, editor.history, strict=True):
        assert ours.image.tobytes() == theirs.image.tobytes()
        assert np.array_equal(ours.mask.grid, theirs.mask.grid) and ours.mask.source is theirs.mask.source
        assert (ours.id, ours.parent, ours.config) == (theirs.id, theirs.parent, theirs.config)
        assert ours.growth == theirs.growth and ours.stats == theirs.stats and str(ours.diff) == str(theirs.diff)
    assert same(last_edit(again), last_edit(editor))
    assert same([again.checkout("1"), again.edit(BIRD)], [editor.checkout("1"), editor.edit(BIRD)]), (
        "an automatic mask needs the recorded attention"
    )


def test_nothing_runs_until_it_is_needed(model, tmp_path):
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    source = editor.generate(CAT, **QUICK)
    editor.save(tmp_path)
    again = Editor.resume(tmp_path, device="cpu")
    with Calls(again.pipe.unet) as calls:
        again.edit(CAT)
        again.undo()
        assert calls.dense == 0
        again.edit(DOG, mask=SQUARE, growth=1)
    assert (calls.dense, calls.sparse) == (3, 3)
    ours, theirs = (e._memory.get(source.id)[0] for e in (again, editor))
    assert latents(ours).equal(latents(theirs))


def test_saving_again_replaces(model, tmp_path):
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    editor.generate(CAT, **QUICK)
    editor.save(tmp_path)
    editor.edit(DOG, mask=SQUARE, growth=1)
    editor.save(tmp_path)
    assert len(Editor.resume(tmp_path, device="cpu").history) == 2
    images = [file_of(tmp_path, result, ending).name for result in (0, 1) for ending in (".mask.png", ".png")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*images, "session.json"])


def test_a_session_that_could_not_be_resumed_is_not_saved(pipelines, tmp_path):
    editor = Editor(pipelines["shallow"])
    editor.generate(CAT, seed=7, num_inference_steps=2)
    with pytest.raises(SessionError, match="a saved session names its model"):
        editor.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_empty_session_is_not_saved(pipelines, tmp_path):
    with pytest.raises(SessionError, match="call generate first"):
        Editor(pipelines["shallow"]).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("session")
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, growth=1)
    editor.save(path)
    return path


def cut(path):
    path.write_bytes(path.read_bytes()[:40])


def edited(change):
    """Damage to what the JSON says, with a digest of that."""
    return lambda path: change_index(path, change)


def entry(**changes):
    return edited(lambda index: index["results"][1].update(changes))


def small(path):
    from PIL import Image

    with Image.open(path) as image:
        image.resize((8, 8)).save(path)


DAMAGE = {
    "no json": ("session.json", lambda path: path.unlink(), "there is no session in"),
    "half a json": ("session.json", cut, "is damaged"),
    "empty json": ("session.json", lambda path: path.write_text(""), "is damaged"),
    "binary json": ("session.json", lambda path: path.write_bytes(b"\xff\xfe\x00"), "is damaged"),
    "a list": ("session.json", lambda path: path.write_text("[]"), "is damaged"),
    "no results": ("session.json", edited(lambda index: index.update(results=[])), "session"),
    "results of another kind": ("session.json", edited(lambda index: index.update(results=7)), "is damaged"),
    "another version": ("session.json", edited(lambda index: index.update(version=99)), "must be of version"),
    "an unknown current": ("session.json", edited(lambda index: index.update(current="9")), "session"),
    "a current of another kind": ("session.json", edited(lambda index: index.update(current=[])), "is damaged"),
    "an unknown parent": ("session.json", entry(parent="9"), "is damaged"),
    "an id that is a path": ("session.json", entry(id="../1"), "is damaged"),
    "no recipe": ("session.json", entry(recipe=None), "is damaged"),
    "a recipe out of range": ("session.json", edited(lambda i: i["results"][0]["recipe"].clear()), "is damaged"),
    "growth for other steps": ("session.json", entry(growth=[1]), "is damaged"),
    "growth of another kind": ("session.json", entry(growth=["a", "b", "c"]), "is damaged"),
    "no stats": ("session.json", entry(stats={}), "is damaged"),
    "no picture": ((1, ".png"), lambda path: path.unlink(), "is damaged"),
    "half a picture": ((1, ".png"), cut, "is damaged"),
    "a picture of another size": ((1, ".png"), small, "is damaged"),
    "no mask": ((0, ".mask.png"), lambda path: path.unlink(), "is damaged"),
    "a mask that is text": ((0, ".mask.png"), lambda path: path.write_text("mask"), "is damaged"),
    "a mask of another size": ((1, ".mask.png"), small, "is damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_session_is_told_in_one_line(saved, tmp_path, case, pipelines, monkeypatch):
    monkeypatch.setattr("fisedit.editor.load", lambda *_, **__: pipelines["demo"])
    name, damage, message = DAMAGE[case]
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path / name if isinstance(name, str) else file_of(tmp_path, *name))
    with pytest.raises(SessionError, match=message) as caught:
        Editor.resume(tmp_path, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_session_of_a_model_that_is_gone(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edited(lambda index: index.update(model=str(tmp_path / "nowhere")))(tmp_path / "session.json")
    with pytest.raises(ModelError):
        Editor.resume(tmp_path, device="cpu")
