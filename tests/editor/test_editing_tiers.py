"""Editors whose features do not fit in memory, or lie in a session on disk: every picture is the same to the byte."""

from __future__ import annotations

import gc
import shutil
from weakref import ref

import numpy as np
import pytest
import torch
from PIL import Image

from fisedit import Editor
from fisedit.features.cache import PagedMaps
from fisedit.sampling import records
from fisedit.sessions import store as session_store
from tests.support.edit_trees import QUICK, SQUARE, last_edit, same_pictures, session
from tests.support.edits import BIRD, CAT, DOG, Calls
from tests.support.pipelines import build_pipeline

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8))


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """The folder that pages of editors go to."""
    folder = tmp_path / "pages"
    monkeypatch.setenv("FISEDIT_PAGES", str(folder))
    return folder


def written(editor):
    """Wait for what the editor writes."""
    writes = editor._trajectory_cache.tiers._writes
    while writes:
        writes.popleft().result()


def files(folder):
    return sorted(folder.glob("*/*.safetensors"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def features(editor, result="0"):
    return editor._trajectory_cache.get(result)[0].features


@pytest.mark.parametrize("share", [0, 0.4])
def test_edits_over_pages_are_the_same(pipelines, pages, share):
    """Every kind of edit, and one more on each, with a part of the memory that they take."""
    roomy = Editor(pipelines["shallow"])
    tight = Editor(pipelines["shallow"], max_recorded_bytes=int(share * session(roomy).recorded_bytes))
    session(tight)
    written(tight)
    assert files(pages) and tight.recorded_bytes < roomy.recorded_bytes
    rebuilt = any("rebuilt" in note for result in tight.history for note in result.stats.notes)
    assert not rebuilt or share == 0, "only what is neither in a page nor within the bound is dropped"
    assert same_pictures(last_edit(tight), last_edit(roomy))


@pytest.mark.parametrize("inversion", ["ddim", "ddpm"])
def test_opened_pictures_lie_on_disk_too(pipelines, pages, inversion):
    editors = [Editor(pipelines["shallow"], max_recorded_bytes=limit) for limit in (None, 0)]
    for editor in editors:
        editor.open(PICTURE, CAT, inversion=inversion, num_inference_steps=3)
        written(editor)
    assert all(isinstance(step.maps, PagedMaps) for step in features(editors[1]))
    assert same_pictures(*([editor.edit(BIRD)] for editor in editors))


@pytest.mark.parametrize("begin", ["generate", "ddim", "ddpm"])
@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_a_damaged_page_is_made_again_to_the_bit(pipelines, pages, damage, begin):
    """By a dense step each, and no whole source; an edit's pages by its sparse steps."""
    editors = [Editor(pipelines["shallow"], max_recorded_bytes=limit) for limit in (None, 0)]
    for editor in editors:
        if begin == "generate":
            editor.generate(CAT, **QUICK)
        else:
            editor.open(PICTURE, CAT, inversion=begin, num_inference_steps=3)
        written(editor)
    for path in files(pages):
        flip(path) if damage == "flip" else path.unlink()
    with Calls(editors[1].pipe.unet) as calls:
        tight = editors[1].edit(DOG, mask=SQUARE, growth=1)
    assert (calls.dense, calls.sparse) == (3, 3), "each page was made again once"
    assert same_pictures([tight], [editors[0].edit(DOG, mask=SQUARE, growth=1)])
    written(editors[1])
    for path in files(pages):
        flip(path) if damage == "flip" else path.unlink()
    assert same_pictures(*([editor.edit(BIRD, mask=SQUARE, growth=0)] for editor in editors))
    for ours, theirs in zip(features(editors[1]), features(editors[0]), strict=True):
        assert all(torch.equal(ours.own_map(name), theirs.own_map(name)) for name in theirs.maps)


@pytest.mark.parametrize("begin", ["generate", "ddim", "ddpm"])
def test_a_damaged_decoder_is_made_again(pipelines, pages, begin):
    """Of a picture whose edits decode sparsely: boxes over the recorded coarse maps."""
    editors = [Editor(pipelines["shallow"], max_recorded_bytes=limit) for limit in (None, 0)]
    for editor in editors:
        if begin == "generate":
            editor.generate(CAT, **QUICK, width=256, height=256)
        else:
            editor.open(PICTURE, CAT, inversion=begin, num_inference_steps=3, width=256, height=256)
        written(editor)
    for path in files(pages):
        flip(path)
    mask = np.zeros((32, 32), bool)
    mask[4:9, 6:12] = True
    results = [editor.edit(DOG, mask=mask, growth=1) for editor in editors]
    assert same_pictures(results[:1], results[1:])
    assert not any("rebuilt" in note for note in results[1].stats.notes)


def test_attention_is_shown_again_over_a_damaged_edit(pipelines, pages):
    editors = [Editor(pipelines["shallow"], max_recorded_bytes=limit) for limit in (None, 0)]
    for editor in editors:
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE, growth=1)
        written(editor)
    for path in files(pages):
        flip(path)
    assert np.array_equal(*(editor.attention(BIRD) for editor in editors))


def test_eight_editors_share_the_room_of_two(pipelines, pages):
    """In turn, byte-identical to one that has room for all."""
    roomy = Editor(pipelines["shallow"])
    roomy.generate(CAT, **QUICK)
    first = Editor(pipelines["shallow"], max_recorded_bytes=2 * roomy.recorded_bytes)
    editors = [first, *(first.beside() for _ in range(7))]
    for seed, editor in enumerate(editors):
        editor.generate(CAT, **(QUICK | {"seed": seed}))
    tiers = first._trajectory_cache.tiers
    for _ in range(2):
        for seed, editor in enumerate(editors):
            got = editor.edit(DOG, mask=SQUARE, growth=1)
            editor.undo()
            written(editor)
            assert tiers.bytes <= first.max_recorded_bytes
            roomy.generate(CAT, **(QUICK | {"seed": seed}))
            assert same_pictures([got], [roomy.edit(DOG, mask=SQUARE, growth=1)])
    assert files(pages)


def test_without_a_disk_what_does_not_fit_is_made_again(pipelines, pages):
    editor = Editor(pipelines["shallow"], max_recorded_bytes=0, max_disk_bytes=0)
    editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, growth=1)
    assert not pages.exists()


@pytest.mark.parametrize("limit", [None, 0], ids=["in memory", "on disk"])
def test_what_was_recorded_goes_with_its_editor(pages, limit):
    """At once, model and all, without the garbage collector."""
    pipe = build_pipeline("shallow")
    editor = Editor(pipe, max_recorded_bytes=limit)
    session(editor)
    written(editor)
    kept = [
        ref(pipe.unet),
        ref(editor),
        *(ref(editor._trajectory_cache.get(str(i))[0]) for i in range(6) if limit is None),
    ]
    assert all(each() is not None for each in kept) and bool(files(pages)) == (limit == 0)
    gc.disable()
    try:
        del editor, pipe
        assert not any(each() is not None for each in kept) and not files(pages)
    finally:
        gc.enable()


@pytest.fixture
def saved(model, tmp_path):
    """An editor, and its session with features."""
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    session(editor)
    editor.save(tmp_path / "session", features=True)
    return editor, tmp_path / "session"


def resumed(folder, **arguments):
    return Editor.resume(folder, device="cpu", **arguments)


def session_pages(folder):
    return sorted(folder.glob("*.safetensors"))


def test_a_resumed_session_reads_its_features(saved):
    """The first edit runs no dense step for its source; what it gives is the same to the byte."""
    editor, folder = saved
    assert [path.name.split("-")[0] for path in session_pages(folder)] == ["0.0000", "0.0001", "0.0002", "0.0003"]
    again = resumed(folder)
    again.checkout("0"), editor.checkout("0")
    with Calls(again.pipe.unet) as calls:
        assert np.array_equal(again.attention(BIRD), editor.attention(BIRD)), "masks are made of what was recorded"
        ours = again.edit(DOG, mask=SQUARE, growth=1)
    assert (calls.dense, calls.sparse) == (0, 3) and not ours.stats.notes
    assert same_pictures([ours], [editor.edit(DOG, mask=SQUARE, growth=1)])
    assert same_pictures(last_edit(resumed(folder)), last_edit(resumed(folder)))


def test_saving_without_features_keeps_those_that_are_there(saved):
    editor, folder = saved
    before = [path.name for path in session_pages(folder)]
    editor.edit(BIRD, mask=SQUARE, growth=1)
    editor.save(folder)
    assert [path.name for path in session_pages(folder)] == before
    again = resumed(folder)
    again.edit(DOG, mask=SQUARE, growth=1)
    again.save(folder, features=True)
    assert [path.name for path in session_pages(folder)] == before
    again.delete("0")
    again.generate(DOG, **QUICK)
    again.save(folder)
    assert not session_pages(folder)


@pytest.mark.parametrize("which", [0, 1, 3])
@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_damaged_features_of_a_session_are_made_again(saved, damage, which):
    editor, folder = saved
    page = session_pages(folder)[which]
    flip(page) if damage == "flip" else page.unlink()
    again = resumed(folder)
    again.checkout("0"), editor.checkout("0")
    with Calls(again.pipe.unet) as calls:
        ours = again.edit(DOG, mask=SQUARE, growth=1)
    assert calls.dense == (3 if which == 0 else 1)
    assert same_pictures([ours], [editor.edit(DOG, mask=SQUARE, growth=1)])


def test_features_of_other_weights_are_not_read(saved, model, tmp_path):
    _, folder = saved
    other = tmp_path / "other"
    shutil.copytree(model, other)
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    with torch.no_grad():
        editor.pipe.unet.conv_in.weight.mul_(1.5)
    editor.load(folder)
    editor.checkout("0")
    with Calls(editor.pipe.unet) as calls:
        editor.edit(DOG, mask=SQUARE, growth=1)
    assert calls.dense == 3


@pytest.mark.parametrize("change", ["scheduler", "encoding", "text encoder"])
def test_features_made_with_other_settings_are_not_read(saved, model, change):
    _, folder = saved
    cache_dtype = "int8" if change == "encoding" else "auto"
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32", cache_dtype=cache_dtype)
    if change == "scheduler":
        editor.pipe.scheduler.register_to_config(timestep_spacing="trailing")
    elif change == "text encoder":
        with torch.no_grad():
            next(editor.pipe.text_encoder.parameters()).mul_(1.5)
    editor.load(folder)
    editor.checkout("0")
    with Calls(editor.pipe.unet) as calls:
        editor.edit(DOG, mask=SQUARE, growth=1)
    assert calls.dense == 3


def test_features_of_weights_that_changed_since_are_not_saved(model, tmp_path):
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    editor.generate(CAT, **QUICK)
    with torch.no_grad():
        editor.pipe.unet.conv_in.weight.mul_(1.5)
    editor.save(tmp_path, features=True)
    assert not session_pages(tmp_path)


@pytest.mark.parametrize("why", ["full", "damaged"])
def test_a_session_is_saved_without_features_that_cannot_be(model, tmp_path, pages, monkeypatch, caplog, why):
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32", max_recorded_bytes=0)
    editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, growth=1)
    written(editor)
    if why == "damaged":
        monkeypatch.setattr(records, "remake_step", None)
        for path in files(pages):
            flip(path)
        for entry in editor._trajectory_cache.tiers._entries.values():
            entry.remake = None
    else:
        write = session_store.write_bytes

        def full(data, path):
            if path.suffix == ".safetensors":
                raise OSError(28, "No space left on device")
            write(data, path)

        monkeypatch.setattr(session_store, "write_bytes", full)
    editor.save(tmp_path / "session", features=True)
    assert len(caplog.messages) == 1 and "without recorded features" in caplog.text
    assert not session_pages(tmp_path / "session")
    monkeypatch.undo()
    assert same_pictures(resumed(tmp_path / "session").history, editor.history)


def test_features_of_another_dtype_are_not_read(saved):
    _, folder = saved
    again = resumed(folder, dtype="bf16")
    again.checkout("0")
    with Calls(again.pipe.unet) as calls:
        again.edit(DOG, mask=SQUARE, growth=1)
    assert calls.dense == 3
