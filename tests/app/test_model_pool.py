"""Several models in one app: each picture is its model's, whoever else is at work, and whichever are in memory."""

from __future__ import annotations

import gc
import io
import json
import logging
import threading
import weakref
import zipfile

import numpy as np
import pytest

from app import export, handlers, history, html
from app.model_pool import ModelPool
from app.sessions import AppState
from app.validation import AdapterPicture, Conditions, SourceSettings
from fisedit import Cancelled, Editor
from fisedit.adapters.row_column.checkpoints import save_adapter
from fisedit.errors import InputError, ModelError, SessionError
from fisedit.models.loader import config_folder
from fisedit.models.paths import demo_folder
from fisedit.sessions.index import encode_index
from tests.support.adapters import lively
from tests.support.app.models import derived
from tests.support.app.requests import last, png
from tests.support.edits import same
from tests.support.lora import Lora
from tests.support.pipelines import build_pipeline
from tests.support.references import RED

CAT, DOG, FOX = "a cat and a cake on a beach", "a dog and a cake on a beach", "a fox and a cake on a beach"
DEMO, OTHER = SourceSettings(4, 4.0, 7, 128, 128), SourceSettings(4, 4.0, 7, 128, 128, model="other")
QUICK = {"seed": 7, "num_inference_steps": 4, "guidance_scale": 4.0, "width": 128, "height": 128}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The demo model, but for what its UNet ends in; made for smaller pictures."""
    return derived(tmp_path_factory.mktemp("models") / "other")


@pytest.fixture(scope="module")
def shared(other, tmp_path_factory):
    return AppState.open("demo", other, folder=tmp_path_factory.mktemp("state"))


@pytest.fixture
def one(other, tmp_path):
    """A state with room for one model."""
    return AppState.open("demo", other, max_loaded=1, folder=tmp_path / "narrow")


def loaded(state):
    return [model.label for model in state.pool.models if model.loaded]


def both(state, session):
    """A picture of either model, and an edit of each."""
    made = [last(handlers.generate(state, session, CAT, DEMO)), last(handlers.generate(state, session, CAT, OTHER))]
    edits = [last(handlers.edit(state, session, DOG))]
    history.checkout(session, made[0].id)
    return made, [last(handlers.edit(state, session, DOG)), *edits]


def test_a_picture_and_its_edits_are_its_models(state, session, other):
    made, edits = both(state, session)
    for number, place in enumerate(("demo", other)):
        editor = Editor.from_pretrained(place)
        assert same(made[number], editor.generate(CAT, **QUICK)) and same(edits[number], editor.edit(DOG))
    assert not same(made[0], made[1])
    assert html.layout(session.history) == {"0": (0, 0), "1": (0, 1), "2": (1, 1), "3": (1, 0)}
    assert [session.model_name(result) for result in session.history] == ["demo", str(other), str(other), "demo"]
    assert list(handlers.measure_dense(state, session, edits[1].id))[-1].seconds > 0
    history.checkout(session, edits[1].id)
    seen = handlers.preview(state, session, FOX)
    assert np.array_equal(seen.preview.mask.grid, last(handlers.edit(state, session, FOX)).latent_cells)


def test_a_model_is_loaded_when_it_is_needed_first(other, tmp_path):
    state = AppState.open("demo", other, folder=tmp_path)
    assert loaded(state) == ["demo"]
    own_side = 8 * json.loads((demo_folder() / "unet/config.json").read_text())["sample_size"]
    assert [(model.native_size, model.guidance) for model in state.pool.models] == [(own_side, 4.0), (64, 7.5)]
    own = last(handlers.generate(state, state.session("me"), CAT, SourceSettings(2, model="other")))
    assert own.image.size == (64, 64) and own.config.guidance_scale == 7.5
    assert loaded(state) == ["demo", "other"]


@pytest.mark.slow
def test_the_idle_one_makes_room_and_pictures_stay(one):
    session = one.session("me")
    source = last(handlers.generate(one, session, CAT, DEMO))
    edit = last(handlers.edit(one, session, DOG))
    history.checkout(session, source.id)
    weights = weakref.ref(one.pool.first.loaded.editor.pipe.unet)
    assert session.recorded_bytes > 0
    other = last(handlers.generate(one, session, CAT, OTHER))
    assert loaded(one) == ["other"] and session.recorded_bytes > 0
    gc.collect()
    assert weights() is None
    assert [result.id for result in session.history] == ["0", "1", "2"]
    history.checkout(session, source.id)
    again = last(handlers.edit(one, session, DOG))
    assert same(again, edit) and "rebuilt" in " ".join(again.stats.notes) and loaded(one) == ["demo"]
    history.checkout(session, other.id)
    assert last(handlers.edit(one, session, DOG)).parent == other.id


def test_a_run_keeps_its_model_and_others_wait(one):
    session, other = one.session("me"), one.session("other")
    last(handlers.generate(one, session, CAT, DEMO))
    running = handlers.generate(one, session, CAT, SourceSettings(150, 4.0, 7))
    next(running)
    waiting = handlers.generate(one, other, CAT, OTHER)
    first = next(waiting)
    assert (first.step, first.steps, first.ahead) == (0, 4, 1)
    third = one.session("third")
    stopped = handlers.generate(one, third, CAT, OTHER)
    assert next(stopped).ahead == 2
    third.stop()
    with pytest.raises(Cancelled):
        list(stopped)
    assert third.idle and loaded(one) == ["demo"]
    running.close()
    assert last(waiting).id == "0" and loaded(one) == ["other"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_told_without_its_place(tmp_path, caplog):
    place = derived(tmp_path / "broken")
    state = AppState.open("demo", place, max_loaded=1, folder=tmp_path / "sessions")
    weights = place / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    session = state.session("me")
    with caplog.at_level(logging.ERROR), pytest.raises(ModelError, match="the model broken cannot be loaded") as told:
        list(handlers.generate(state, session, CAT, SourceSettings(2, model="broken")))
    assert str(tmp_path) not in str(told.value) and str(place) in caplog.text
    assert session.idle and last(handlers.generate(state, session, CAT, DEMO)).id == "0"


@pytest.mark.parametrize("model", ["../other", "/etc/passwd", "owner/name", "x" * 10_000, None, 7])
def test_models_that_are_not_offered(state, session, model):
    for ask in (
        lambda settings: handlers.generate(state, session, CAT, settings),
        lambda settings: handlers.open_picture(state, session, png(RED), CAT, settings),
    ):
        with pytest.raises(InputError, match="model must be") as told:
            list(ask(SourceSettings(4, model=model)))
        assert "\n" not in str(told.value) and len(str(told.value)) < 200


def test_models_that_cannot_be_offered(other, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        ModelPool(["demo", tmp_path / "nowhere"])
    with pytest.raises(InputError, match="two models are called other"):
        ModelPool([other, other])
    (tmp_path / "unet").mkdir()
    with pytest.raises(ModelError, match=str(tmp_path)):
        ModelPool(["demo", tmp_path])


def test_a_detector_leaves_thresholds_to_requests(monkeypatch):
    opened = []
    monkeypatch.setattr("app.model_pool.open_provider", lambda *args, **options: opened.append((args, options)))
    ModelPool(["demo"], detector="detr", local_files_only=True)
    assert opened == [(("detr",), {"threshold": 0, "local_files_only": True})]


def test_configurations_are_not_looked_for_in_the_network(monkeypatch):
    asked = []

    def look(place, **options):
        asked.append((place, options))
        return config_folder(place, **options)

    monkeypatch.setattr("app.model_pool.config_folder", look)
    ModelPool(["demo"], local_files_only=True)
    assert asked == [("demo", {"local_files_only": True})]


# Coming back


@pytest.mark.slow
def test_a_session_of_several_models_comes_back(shared, state, session, other):
    _, edits = both(state, session)
    for model in state.pool.models:
        state.pool.unload(model)
    back = AppState(shared.pool, shared.worker, folder=state.folder).adopt("me", session.key)
    assert not loaded(state) and back is not session
    assert [back.model_name(result) for result in back.history] == ["demo", str(other), str(other), "demo"]
    assert back.current.id == edits[0].id and str(back.current.diff) == str(edits[0].diff)
    history.checkout(back, "1")
    assert same(last(handlers.edit(state, back, DOG)), edits[1])
    with pytest.raises(SessionError, match=r"is of the model '.*other', got 'demo'; start that one"):
        Editor.from_pretrained("demo").load(state.folder / session.key)


@pytest.mark.slow
def test_pictures_of_a_model_that_is_not_offered_can_be_looked_at(state, session, tmp_path):
    made, _ = both(state, session)
    picture = export.picture_bytes(session, made[1])
    fewer = AppState.open(folder=state.folder)
    back = fewer.adopt("me", session.key)
    assert len(back.history) == 4
    history.checkout(back, made[1].id)
    for refused in (
        lambda: last(handlers.edit(fewer, back, DOG)),
        lambda: handlers.preview(fewer, back, DOG),
        lambda: list(handlers.measure_dense(fewer, back, made[1].id)),
    ):
        with pytest.raises(SessionError, match="made with the model other; start the app with it, as --model"):
            refused()
    history.checkout(back, made[0].id)
    assert last(handlers.edit(fewer, back, FOX)).parent == made[0].id
    found = export.restore_settings(fewer, picture)
    assert "It was made with the model other, which is not offered here." in found.message
    assert found.settings == SourceSettings(4, 4.0, 7, 128, 128)
    assert export.restore_settings(state, picture).settings == OTHER


@pytest.mark.slow
def test_an_archive_of_several_models(state, session, tmp_path):
    _, edits = both(state, session)
    data = export.export_session(session).read_bytes()
    assert str(tmp_path).encode() not in data and b"/other" in data
    elsewhere = AppState.open("demo", derived(tmp_path / "elsewhere" / "other"), folder=tmp_path / "there")
    back = elsewhere.session("me")
    assert same(export.import_session(elsewhere, back, data), edits[0])
    history.checkout(back, "1")
    assert same(last(handlers.edit(elsewhere, back, DOG)), edits[1])


@pytest.mark.parametrize(
    "name", ["owner/name", "/etc/passwd", "~root/x", "./../../x", "a\0b", "\x1b[31m<b>", "x" * 9999]
)
def test_a_model_that_an_archive_names_is_not_believed(state, session, name):
    made = last(handlers.generate(state, session, CAT, DEMO))
    told = io.BytesIO()
    with zipfile.ZipFile(export.export_session(session)) as packed, zipfile.ZipFile(told, "w") as changed:
        for member in packed.namelist():
            data = packed.read(member)
            changed.writestr(member, encode_index(json.loads(data) | {"model": name}) if "json" in member else data)
    back = state.session("other")
    assert same(export.import_session(state, back, told.getvalue()), made)
    saved = json.loads((back.folder / "session.json").read_text())["model"]
    assert saved.startswith("./") and len(saved) < 90 and saved.isprintable() and ".." not in saved
    with pytest.raises(SessionError, match="start the app with it, as --model"):
        handlers.preview(state, back, DOG)


# LoRAs and an adapter, where models differ


@pytest.mark.slow
def test_what_does_not_fit_another_model_is_told(tmp_path):
    pipe = Editor.from_pretrained("demo").pipe
    build_pipeline("sd15").save_pretrained(tmp_path / "tiny")
    lora = Lora(pipe).kohya(tmp_path / "ink.safetensors")
    save_adapter(lively(pipe.unet, "v3"), tmp_path / "adapter")
    state = AppState.open(
        "demo", tmp_path / "tiny", loras=[lora], adapters=[tmp_path / "adapter"], folder=tmp_path / "sessions"
    )
    session, tiny = state.session("me"), SourceSettings(2, seed=7, width=64, height=64, model="tiny")
    assert last(handlers.generate(state, session, CAT, tiny)).config.loras == ()
    with pytest.raises(InputError, match="the LoRA ink does not fit the model; choose another one"):
        list(handlers.generate(state, session, CAT, SourceSettings(2, model="tiny", loras={"ink": 1.0})))
    with pytest.raises(InputError, match="no adapter for a reference fits the model"):
        list(handlers.edit(state, session, DOG, None, Conditions(AdapterPicture(png(RED)))))
    assert last(handlers.generate(state, session, CAT, SourceSettings(2, loras={"ink": 1.0}))).config.loras != ()


def test_a_bound_on_features_that_was_given_is_each_models(shared, other, monkeypatch):
    pool = shared.pool
    monkeypatch.setitem(pool._options, "max_recorded_bytes", 5 << 20)
    assert pool._load_editor(pool.find(str(other))).max_recorded_bytes == 5 << 20
