"""Several models in one app: each picture is its model's, whoever else is at work, and whichever are in memory."""

from __future__ import annotations

import gc
import io
import json
import logging
import shutil
import threading
import weakref
import zipfile

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from app import export, handlers, views
from app.model_pool import Shelf
from app.sessions import Studio
from app.validation import Busy, Settings
from fisedit import Cancelled, Editor
from fisedit.adapters.checkpoints import save_adapter
from fisedit.errors import InputError, ModelError, SessionError
from fisedit.models.loader import demo_folder
from tests.adapters.test_derivatives import Lora
from tests.adapters.test_references import RED
from tests.app.test_lora_catalog import file, last, same
from tests.support.adapters import lively
from tests.support.pipelines import build_pipeline

CAT, DOG, FOX = "a cat and a cake on a beach", "a dog and a cake on a beach", "a fox and a cake on a beach"
DEMO, OTHER = Settings(4, 4.0, 7), Settings(4, 4.0, 7, 128, 128, model="other")
QUICK = {"seed": 7, "num_inference_steps": 4, "guidance_scale": 4.0, "width": 128, "height": 128}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The demo model, but for what its UNet ends in; made for smaller pictures."""
    return derived(tmp_path_factory.mktemp("models") / "other")


def derived(folder):
    shutil.copytree(demo_folder(), folder, ignore=shutil.ignore_patterns("log", "*.png", "judge*", "*.md"))
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"conv_out.weight": tensors["conv_out.weight"] * 0.8}, weights, {"format": "pt"})
    config = folder / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sample_size": 8}))
    return folder


@pytest.fixture(scope="module")
def shared(other, tmp_path_factory):
    return Studio("demo", other, folder=tmp_path_factory.mktemp("studio"))


@pytest.fixture
def studio(shared, tmp_path):
    return shared.another(tmp_path / "sessions")


@pytest.fixture
def session(studio):
    return studio.session("me")


@pytest.fixture
def one(other, tmp_path):
    """A studio with room for one model."""
    return Studio("demo", other, loaded=1, folder=tmp_path / "narrow")


def loaded(studio):
    return [model.label for model in studio.shelf.models if model.editor]


def both(studio, session):
    """A picture of either model, and an edit of each."""
    made = [last(handlers.generate(studio, session, CAT, DEMO)), last(handlers.generate(studio, session, CAT, OTHER))]
    edits = [last(handlers.edit(studio, session, DOG))]
    handlers.checkout(session, made[0].id)
    return made, [last(handlers.edit(studio, session, DOG)), *edits]


def test_a_picture_and_its_edits_are_its_models(studio, session, other):
    made, edits = both(studio, session)
    for number, place in enumerate(("demo", other)):
        editor = Editor.from_pretrained(place)
        assert same(made[number], editor.generate(CAT, **QUICK)) and same(edits[number], editor.edit(DOG))
    assert not same(made[0], made[1])
    assert views.layout(session.history) == {"0": (0, 0), "1": (0, 1), "2": (1, 1), "3": (1, 0)}
    assert [session.model(result) for result in session.history] == ["demo", str(other), str(other), "demo"]
    assert list(handlers.dense(studio, session, edits[1].id))[-1].seconds > 0
    handlers.checkout(session, edits[1].id)
    seen = handlers.preview(studio, session, FOX)
    assert np.array_equal(seen.preview.mask.grid, last(handlers.edit(studio, session, FOX)).mask.grid)


def test_a_model_is_loaded_when_it_is_needed_first(other, tmp_path):
    studio = Studio("demo", other, folder=tmp_path)
    shelf = studio.shelf
    assert loaded(studio) == ["demo"]
    assert [(model.native_size, model.guidance) for model in shelf.models] == [(128, 4.0), (64, 7.5)]
    own = last(handlers.generate(studio, studio.session("me"), CAT, Settings(2, model="other")))
    assert own.image.size == (64, 64) and own.config.guidance_scale == 7.5
    assert loaded(studio) == ["demo", "other"]


def test_the_idle_one_makes_room_and_pictures_stay(one):
    session = one.session("me")
    source = last(handlers.generate(one, session, CAT, DEMO))
    edit = last(handlers.edit(one, session, DOG))
    handlers.checkout(session, source.id)
    weights, recorded = weakref.ref(one.shelf.first.editor.pipe.unet), one.shelf.recorded_bytes
    assert recorded(session) > 0
    other = last(handlers.generate(one, session, CAT, OTHER))
    assert loaded(one) == ["other"] and recorded(session) > 0
    gc.collect()
    assert weights() is None
    assert [result.id for result in session.history] == ["0", "1", "2"]
    handlers.checkout(session, source.id)
    again = last(handlers.edit(one, session, DOG))
    assert same(again, edit) and "rebuilt" in " ".join(again.stats.notes) and loaded(one) == ["demo"]
    handlers.checkout(session, other.id)
    assert last(handlers.edit(one, session, DOG)).parent == other.id


def test_who_is_at_work_keeps_the_model(one):
    first, second = one.shelf.models
    waits, done = threading.Event(), []

    def stop():
        raise Cancelled("stopped")

    def work():
        with one.shelf.lent(second, waits.set) as model:
            done.append(model.editor is not None)

    with one.shelf.lent(first), one.shelf.lent(first):
        thread = threading.Thread(target=work)
        thread.start()
        assert waits.wait(60) and not done
        with pytest.raises(Busy, match="other models"), one.shelf.lent(first, patience=0.2):
            done.append("jumped the line")
        with pytest.raises(Cancelled), one.shelf.lent(second, stop):
            pass
        assert loaded(one) == ["demo"]
    thread.join()
    assert done == [True] and loaded(one) == ["other"]


def test_people_with_several_models_at_once_and_room_for_one(one):
    def work(name, settings, into):
        session = one.session(f"{name} {id(into)}")
        source = last(handlers.generate(one, session, CAT, settings))
        into[name] = source, last(handlers.edit(one, session, DOG))

    people = {f"{label} {n}": settings for n in range(2) for label, settings in (("demo", DEMO), ("other", OTHER))}
    alone, together = {}, {}
    for name, settings in people.items():
        work(name, settings, alone)
    threads = [threading.Thread(target=work, args=(*person, together)) for person in people.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(a, b) for name in people for a, b in zip(alone[name], together[name], strict=True))


def test_a_model_that_cannot_be_loaded_is_told_without_its_place(tmp_path, caplog):
    place = derived(tmp_path / "broken")
    studio = Studio("demo", place, loaded=1, folder=tmp_path / "sessions")
    weights = place / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    session = studio.session("me")
    with caplog.at_level(logging.ERROR), pytest.raises(ModelError, match="the model broken cannot be loaded") as told:
        list(handlers.generate(studio, session, CAT, Settings(2, model="broken")))
    assert str(tmp_path) not in str(told.value) and str(place) in caplog.text
    assert session.idle and last(handlers.generate(studio, session, CAT, DEMO)).id == "0"


@pytest.mark.parametrize("model", ["../other", "/etc/passwd", "owner/name", "x" * 10_000, None, 7])
def test_models_that_are_not_offered(studio, session, model):
    for ask in (
        lambda settings: handlers.generate(studio, session, CAT, settings),
        lambda settings: handlers.open_picture(studio, session, file(RED), CAT, settings),
    ):
        with pytest.raises(InputError, match="model must be") as told:
            list(ask(Settings(4, model=model)))
        assert "\n" not in str(told.value) and len(str(told.value)) < 200


def test_models_that_cannot_be_offered(other, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        Shelf(["demo", tmp_path / "nowhere"])
    with pytest.raises(InputError, match="two models are called other"):
        Shelf([other, other])
    (tmp_path / "unet").mkdir()
    with pytest.raises(ModelError, match=str(tmp_path)):
        Shelf(["demo", tmp_path])


# Coming back


def test_a_session_of_several_models_comes_back(shared, studio, session, other):
    _, edits = both(studio, session)
    for model in studio.shelf.models:
        model.drop()
    studio.shelf._held.clear()
    back = shared.another(studio.folder).adopt("me", session.key)
    assert not loaded(studio) and back is not session
    assert [back.model(result) for result in back.history] == ["demo", str(other), str(other), "demo"]
    assert back.current.id == edits[0].id and str(back.current.diff) == str(edits[0].diff)
    handlers.checkout(back, "1")
    assert same(last(handlers.edit(studio, back, DOG)), edits[1])
    with pytest.raises(SessionError, match=r"is of the model '.*other', got 'demo'; start that one"):
        Editor.from_pretrained("demo").load(studio.folder / session.key)


def test_pictures_of_a_model_that_is_not_offered_can_be_looked_at(studio, session, tmp_path):
    made, _ = both(studio, session)
    picture = export.picture_bytes(session, made[1])
    fewer = Studio(folder=studio.folder)
    back = fewer.adopt("me", session.key)
    assert len(back.history) == 4
    handlers.checkout(back, made[1].id)
    for refused in (
        lambda: last(handlers.edit(fewer, back, DOG)),
        lambda: handlers.preview(fewer, back, DOG),
        lambda: list(handlers.dense(fewer, back, made[1].id)),
    ):
        with pytest.raises(SessionError, match="made with the model other; start the app with it, as --model"):
            refused()
    handlers.checkout(back, made[0].id)
    assert last(handlers.edit(fewer, back, FOX)).parent == made[0].id
    found = export.restore(fewer, picture)
    assert "It was made with the model other, which is not offered here." in found.words
    assert found.settings == Settings(4, 4.0, 7, 128, 128)
    assert export.restore(studio, picture).settings == OTHER


def test_an_archive_of_several_models(studio, session, tmp_path):
    _, edits = both(studio, session)
    data = export.archive(session).read_bytes()
    assert str(tmp_path).encode() not in data and b"/other" in data
    elsewhere = Studio("demo", derived(tmp_path / "elsewhere" / "other"), folder=tmp_path / "there")
    back = elsewhere.session("me")
    assert same(export.reopen(elsewhere, back, data), edits[0])
    handlers.checkout(back, "1")
    assert same(last(handlers.edit(elsewhere, back, DOG)), edits[1])


@pytest.mark.parametrize(
    "name", ["owner/name", "/etc/passwd", "~root/x", "./../../x", "a\0b", "\x1b[31m<b>", "x" * 9999]
)
def test_a_model_that_an_archive_names_is_not_believed(studio, session, name):
    made = last(handlers.generate(studio, session, CAT, DEMO))
    told = io.BytesIO()
    with zipfile.ZipFile(export.archive(session)) as packed, zipfile.ZipFile(told, "w") as changed:
        for member in packed.namelist():
            data = packed.read(member)
            changed.writestr(member, json.dumps(json.loads(data) | {"model": name}) if "json" in member else data)
    back = studio.session("other")
    assert same(export.reopen(studio, back, told.getvalue()), made)
    saved = json.loads((back.folder / "session.json").read_text())["model"]
    assert saved.startswith("./") and len(saved) < 90 and saved.isprintable() and ".." not in saved
    with pytest.raises(SessionError, match="start the app with it, as --model"):
        handlers.preview(studio, back, DOG)


# LoRAs and an adapter, where models differ


def test_what_does_not_fit_another_model_is_told(tmp_path):
    pipe = Editor.from_pretrained("demo").pipe
    build_pipeline("sd15").save_pretrained(tmp_path / "tiny")
    lora = Lora(pipe).kohya(tmp_path / "ink.safetensors")
    save_adapter(lively(pipe.unet, "v3"), tmp_path / "adapter")
    studio = Studio("demo", tmp_path / "tiny", loras=[lora], adapter=tmp_path / "adapter", folder=tmp_path / "sessions")
    session, tiny = studio.session("me"), Settings(2, seed=7, width=64, height=64, model="tiny")
    assert last(handlers.generate(studio, session, CAT, tiny)).config.loras == ()
    with pytest.raises(InputError, match="the LoRA ink does not fit the model; choose another one"):
        list(handlers.generate(studio, session, CAT, Settings(2, model="tiny", loras={"ink": 1.0})))
    with pytest.raises(InputError, match="the adapter does not fit the model"):
        list(handlers.edit(studio, session, DOG, None, handlers.Look(file(RED))))
    assert last(handlers.generate(studio, session, CAT, Settings(2, loras={"ink": 1.0}))).config.loras != ()
