"""Sessions of an editor on disk: they come back whole, or are refused in one line."""

from __future__ import annotations

import numpy as np
import pytest

from fisedit import Editor
from fisedit.errors import ModelError, SessionError
from fisedit.metadata.cell_runs import run_entry
from tests.support.edit_trees import QUICK, SQUARE, last_edit, same_pictures, session
from tests.support.edits import BIRD, CAT, DOG, Calls, latents
from tests.support.pipelines import build_pipeline
from tests.support.sessions import change_index, file_of


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
        assert (
            run_entry(ours.run) == run_entry(theirs.run)
            and ours.stats == theirs.stats
            and str(ours.diff) == str(theirs.diff)
        )
    assert same_pictures(last_edit(again), last_edit(editor))
    assert same_pictures([again.checkout("1"), again.edit(BIRD)], [editor.checkout("1"), editor.edit(BIRD)]), (
        "an automatic mask needs the recorded attention"
    )


def test_it_comes_back_with_the_variant_of_its_model(pipelines, tmp_path):
    pipelines["demo"].save_pretrained(tmp_path / "model")
    build_pipeline("demo", seed=1).save_pretrained(tmp_path / "model", variant="non_ema")
    editor = Editor.from_pretrained(tmp_path / "model", variant="non_ema", device="cpu", dtype="fp32")
    source = editor.generate(CAT, **QUICK)
    editor.save(tmp_path / "session")
    again = Editor.resume(tmp_path / "session", device="cpu")
    assert again.variant == "non_ema" and again.generate(CAT, **QUICK).image.tobytes() == source.image.tobytes()
    plain = Editor.from_pretrained(tmp_path / "model", device="cpu", dtype="fp32")
    with pytest.raises(SessionError, match="of the variant non_ema, got weights without a variant; load that one"):
        plain.load(tmp_path / "session")


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
    ours, theirs = (e._trajectory_cache.get(source.id)[0] for e in (again, editor))
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
    monkeypatch.setattr("fisedit.editor.base.load", lambda *_, **__: pipelines["demo"])
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
