"""LoRAs and an adapter that the app offers: what one person chooses changes nobody else's picture."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from app import export, handlers, history
from app.lora_catalog import LoraCatalog, shipped
from app.model_pool import LoadedModel
from app.program_pictures import ProgramPictures
from app.sessions import AppState
from app.validation import AdapterPicture, Busy, Conditions, RegionSettings, SourceSettings
from fisedit import Cancelled, Editor
from fisedit.adapters.lora import SuggestedSampling
from fisedit.adapters.row_column.checkpoints import save_adapter
from fisedit.errors import AdapterError, InputError, SessionError
from fisedit.values import SchedulerName
from tests.support.adapters import lively
from tests.support.app.requests import last, png
from tests.support.edits import same
from tests.support.lora import Lora
from tests.support.references import BLUE, RED

CAT, DOG = "a cat and a cake on a beach", "a dog and a cake on a beach"
QUICK = {"seed": 7, "num_inference_steps": 4, "guidance_scale": 4.0}
PLAIN, INK, OIL = (SourceSettings(4, seed=7, loras=loras) for loras in ({}, {"ink": 0.6}, {"oil": 1.0}))
SQUARE = np.zeros((128, 128), bool)
SQUARE[32:96, 32:96] = True


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Two LoRAs and an adapter for the demo model."""
    folder, pipe = tmp_path_factory.mktemp("offers"), Editor.from_pretrained("demo").pipe
    files = {name: Lora(pipe, seed).kohya(folder / f"{name}.safetensors") for seed, name in enumerate(("ink", "oil"))}
    save_adapter(lively(pipe.unet, "v3"), folder / "adapter")
    return files | {"adapter": folder / "adapter"}


@pytest.fixture(scope="module")
def shared(places, tmp_path_factory):
    return AppState.open(
        loras=[places["ink"], places["oil"]], adapters=[places["adapter"]], folder=tmp_path_factory.mktemp("state")
    )


@pytest.fixture
def plain():
    """An editor over a model of its own."""
    return Editor.from_pretrained("demo")


def without(state, folder):
    """A state over the same models that offers no LoRA."""
    fewer = AppState(copy.copy(state.pool), state.worker, folder=folder)
    fewer.pool.loras = LoraCatalog(state.pool.first.loaded.editor, [])
    return fewer


@pytest.mark.slow
def test_what_nobody_chose_changes_nothing(state, session, plain):
    made = last(handlers.generate(state, session, CAT, PLAIN))
    assert same(made, plain.generate(CAT, **QUICK)) and made.config.loras == ()
    assert same(last(handlers.edit(state, session, DOG)), plain.edit(DOG))


def test_a_chosen_lora_paints_a_picture_and_its_edits(state, session, places, plain):
    without = last(handlers.generate(state, session, CAT, PLAIN))
    source = last(handlers.generate(state, session, CAT, INK))
    edit = last(handlers.edit(state, session, DOG))
    seen = handlers.preview(state, session, "a fox and a cake on a beach").preview
    plain.load_lora(places["ink"], 0.6)
    assert same(source, plain.generate(CAT, **QUICK)) and not same(source, without)
    assert same(edit, plain.edit(DOG)) and source.config.loras == edit.config.loras != ()
    assert np.array_equal(seen.mask.grid, plain.preview("a fox and a cake on a beach").mask.grid)
    assert state.pool.loras.as_text(edit.config.loras) == "ink at 0.6" and state.pool.loras.as_text(()) == ""

    history.checkout(session, without.id)
    assert last(handlers.edit(state, session, DOG)).config.loras == ()
    history.checkout(session, source.id)
    session.drop_editors()
    assert same(last(handlers.edit(state, session, DOG)), edit)
    assert list(handlers.measure_dense(state, session, edit.id))[-1].seconds > 0


@pytest.mark.slow
def test_tags_in_a_prompt(state, session):
    """Applied and taken out of it; a picture that other LoRAs made is opened anew for an edit."""
    wanted = last(handlers.generate(state, session, CAT, INK))
    tagged = last(handlers.generate(state, session, f"{CAT} <lora:ink:0.6>", PLAIN))
    assert same(tagged, wanted) and tagged.config == wanted.config and tagged.prompt == CAT
    edit = last(handlers.edit(state, session, f"{DOG} <lora:ink:0.6>"))
    assert edit.prompt == DOG and edit.config.loras == wanted.config.loras
    with pytest.raises(InputError, match=r"an edit has its picture's LoRAs, ink at 0.6, got tags of oil"):
        last(handlers.edit(state, session, f"{CAT} <lora:oil:1>"))
    for prompt, settings, message in (
        (f"{CAT} <lora:nothere:1>", PLAIN, "lora must be one of ink, oil, got 'nothere'"),
        (f"{CAT} <lora:ink:1>", INK, "the LoRA ink must have one scale, got 1 and 0.6"),
        (f"{CAT} <lora:ink:9>", PLAIN, r"lora scale must be a number in \[-2, 2\]"),
        ("<lora:ink:1>", PLAIN, "prompt must say something"),
    ):
        with pytest.raises(InputError, match=message):
            last(handlers.generate(state, session, prompt, settings))
    pictures = ProgramPictures(state)
    (cat,) = pictures.generate(CAT, [PLAIN])
    region = RegionSettings(add=Image.fromarray(SQUARE), only=True)
    kept, changed = (pictures.edit(cat.data, f"{DOG}{tag}", [PLAIN], region)[0] for tag in ("", " <lora:oil:1>"))
    assert kept.config.loras == () and state.pool.loras.as_text(changed.config.loras) == "oil at 1"
    assert changed.config.prompt == DOG and changed.config.opened and not kept.config.opened


def test_several_loras_at_once(state, session, places, plain):
    several = SourceSettings(4, 4.0, 7, 128, 128, model="demo", loras={"oil": 0.5, "ink": 0.6})
    source, edit = last(handlers.generate(state, session, CAT, several)), last(handlers.edit(state, session, DOG))
    plain.load_lora(places["ink"], 0.6)
    plain.load_lora(places["oil"], 0.5)
    assert same(source, plain.generate(CAT, **QUICK, width=128, height=128)) and same(edit, plain.edit(DOG))
    assert state.pool.loras.as_text(edit.config.loras) == "ink at 0.6 and oil at 0.5"
    assert export.restore_settings(state, export.picture_bytes(session, source)).settings == several


def test_a_picture_tells_its_lora(shared, state, session):
    data = export.picture_bytes(session, last(handlers.generate(state, session, CAT, INK)))
    side = state.pool.first.native_size
    assert export.restore_settings(state, data).settings == SourceSettings(
        4, 4.0, 7, side, side, model="demo", loras={"ink": 0.6}
    )
    fewer = without(shared, None)
    found = export.restore_settings(fewer, data)
    assert found.settings is None and "start the app with it" in found.message
    fewer.close()


@pytest.mark.slow
def test_people_who_chose_differently_at_once(state):
    choices = {"none": PLAIN, "ink": INK, "oil": OIL, "more ink": SourceSettings(4, seed=7, loras={"ink": 0.9})}

    def work(name, into):
        session = state.session(f"{name} {id(into)}")
        source = last(handlers.generate(state, session, CAT, choices[name]))
        into[name] = source, last(handlers.edit(state, session, DOG))

    alone, together = {}, {}
    for name in choices:
        work(name, alone)
    threads = [threading.Thread(target=work, args=(name, together)) for name in choices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(a, b) for name in choices for a, b in zip(alone[name], together[name], strict=True))
    assert len({np.asarray(source.image).tobytes() for source, _ in alone.values()}) == len(choices)


def test_an_opened_picture_has_its_lora_too(state, session):
    source = last(handlers.open_picture(state, session, png(RED), CAT, OIL))
    edit = last(handlers.edit(state, session, DOG, RegionSettings(add=Image.fromarray(SQUARE), only=True)))
    assert source.config.loras == edit.config.loras and state.pool.loras.as_text(edit.config.loras) == "oil at 1"


def test_who_comes_back_to_an_app_that_does_not_offer_it(shared, state, session):
    last(handlers.generate(state, session, CAT, INK))
    fewer = without(shared, state.folder)
    back = fewer.adopt("me", session.key)
    assert len(back.history) == 1 and fewer.pool.loras.as_text(back.current.config.loras) == ""
    for refused in (lambda: last(handlers.edit(fewer, back, DOG)), lambda: handlers.preview(fewer, back, DOG)):
        with pytest.raises(SessionError, match=r"made with the LoRA ink_\w+; start the app with it, as --lora"):
            refused()
    back.drop_editors()
    assert last(handlers.edit(state, state.adopt("you", session.key), DOG)).parent == "0"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (SourceSettings(4, loras={"../ink": 1.0}), "lora must be one of ink, oil, got '../ink'"),
        (SourceSettings(4, loras=["ink"]), "loras must be at most 8 names"),
        (SourceSettings(4, loras={str(n): 1.0 for n in range(9)}), "loras must be at most 8 names"),
        (SourceSettings(4, loras={"ink": 2.5}), r"lora scale must be a number in \[-2, 2\]"),
        (SourceSettings(4, loras={"ink": float("nan")}), "lora scale"),
        (SourceSettings(4, loras={"ink": True}), "lora scale"),
    ],
)
def test_choices_that_are_none(state, session, settings, why):
    for ask in (
        lambda: handlers.generate(state, session, CAT, settings),
        lambda: handlers.open_picture(state, session, png(RED), CAT, settings),
    ):
        with pytest.raises(InputError, match=why):
            list(ask())


def test_loras_that_cannot_be_offered(places, tmp_path, plain):
    (tmp_path / "ink.safetensors").write_bytes(places["ink"].read_bytes())
    with pytest.raises(InputError, match="two LoRAs are called ink"):
        LoraCatalog(plain, [places["ink"], tmp_path / "ink.safetensors"])
    with pytest.raises(AdapterError, match=r"nowhere\.safetensors"):
        LoraCatalog(plain, [tmp_path / "nowhere.safetensors"])


def test_a_lora_of_the_text_encoder_alone_is_offered(tmp_path, plain):
    words = Lora(plain.pipe)
    words.parts = {(part, name): halves for (part, name), halves in words.parts.items() if part == "text_encoder"}
    catalog = LoraCatalog(plain, [words.kohya(tmp_path / "words.safetensors")])
    plain.scale_loras(catalog.select({"words": 0.5}))
    assert catalog.scales_by_label(plain.generate(CAT, **QUICK).config.loras) == {"words": 0.5}


# Active LoRAs


class CountingEditor:
    """Which scales it was given, in order."""

    def __init__(self):
        self.scales = []

    def scale_loras(self, scales):
        self.scales.append(dict(scales))


def test_loras_are_scaled_where_they_change():
    editor = CountingEditor()
    model = LoadedModel(editor, {"c": "third"})
    for scales in ({"a": 1.0}, {"a": 1.0}, {}, {}, {"a": 1.0, "b": 0.5}):
        model.activate_loras(scales)
    with pytest.raises(InputError, match="the LoRA third does not fit"):
        model.activate_loras({"c": 1.0})
    assert editor.scales == [{}, {"a": 1.0}, {}, {"a": 1.0, "b": 0.5}]


def test_a_preview_waits_for_a_run_with_other_loras(state, session):
    last(handlers.generate(state, session, CAT, INK))
    other = state.session("other")
    running = handlers.generate(state, other, CAT, SourceSettings(150, seed=7, loras={"oil": 1.0}))
    next(running)
    with pytest.raises(Busy, match="other LoRAs"):
        handlers.preview(state, session, DOG)
    running.close()
    assert not handlers.preview(state, session, DOG).preview.nothing
    with pytest.raises(Cancelled):
        other.raise_if_stopped()


# Looks


@pytest.mark.slow
def test_a_look_is_taken_from_an_uploaded_picture(state, session, places, plain):
    plain.load_adapter(places["adapter"], 0.5)
    source = last(handlers.generate(state, session, CAT, replace(PLAIN, width=128, height=128)))
    region, look = (
        RegionSettings(add=Image.fromarray(SQUARE), only=True),
        Conditions(AdapterPicture(png(RED), 0.5)),
    )
    assert not handlers.preview(state, session, CAT, region, look).preview.nothing
    painted = last(handlers.edit(state, session, CAT, region, look))
    assert same(source, plain.generate(CAT, **QUICK, width=128, height=128))
    assert same(painted, plain.edit(CAT, mask=SQUARE, reference=RED)) and not same(painted, source)
    assert [one.use.scale for one in painted.config.like] == [0.5]


def test_a_look_stays_with_a_picture_and_with_its_owner(state, session, tmp_path):
    mine = last(handlers.generate(state, session, CAT, PLAIN, Conditions(AdapterPicture(png(RED), 0.5))))
    other = state.session("you")
    theirs = last(handlers.generate(state, other, CAT, PLAIN, Conditions(AdapterPicture(png(BLUE), 1.0))))
    assert not same(mine, theirs)
    edit = last(handlers.edit(state, session, DOG))
    assert edit.config.like == mine.config.like != theirs.config.like
    packed = export.export_session(session).read_bytes()
    back = state.session("back")
    export.import_session(state, back, packed)
    history.checkout(back, mine.id)
    assert same(last(handlers.edit(state, back, DOG)), edit)


def test_looks_that_are_none(state, session):
    last(handlers.generate(state, session, CAT, PLAIN))
    for look, why in (
        (Conditions(AdapterPicture(b"no")), "picture"),
        (Conditions(AdapterPicture(png(RED), 3)), "scale of the reference"),
        (Conditions(AdapterPicture(png(RED), True)), "scale"),
    ):
        with pytest.raises(InputError, match=why):
            handlers.edit(state, session, DOG, None, look)
    state.pool = copy.copy(state.pool)
    state.pool.reads = frozenset()
    with pytest.raises(InputError, match="start the app with --adapter"):
        handlers.edit(state, session, DOG, None, Conditions(AdapterPicture(png(RED))))


def test_the_demo_models_lora_is_offered_with_its_sampling(plain, monkeypatch):
    catalog = LoraCatalog(plain, shipped())
    assert catalog.labels == ("demo-fast",)
    assert catalog.sampling == {"demo-fast": SuggestedSampling(SchedulerName.LCM, 4, 1.0)}
    monkeypatch.setattr("app.lora_catalog.find_spec", lambda name: None)
    assert shipped() == []
