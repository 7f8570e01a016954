"""LoRAs and an adapter that the app offers: what one person chooses changes nobody else's picture."""

from __future__ import annotations

import copy
import threading
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from app import export, handlers
from app.lora_catalog import Rail, Wardrobe
from app.sessions import Studio
from app.validation import Busy, Look, Region, Settings
from fisedit import Cancelled, Editor
from fisedit.adapters.checkpoints import save_adapter
from fisedit.errors import AdapterError, InputError, SessionError
from tests.adapters.test_derivatives import Lora
from tests.adapters.test_references import BLUE, RED
from tests.support.adapters import lively

CAT, DOG = "a cat and a cake on a beach", "a dog and a cake on a beach"
QUICK = {"seed": 7, "num_inference_steps": 4, "guidance_scale": 4.0}
PLAIN, INK, OIL = Settings(4, seed=7), Settings(4, seed=7, loras={"ink": 0.6}), Settings(4, seed=7, loras={"oil": 1.0})
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
    return Studio(
        loras=[places["ink"], places["oil"]], adapter=places["adapter"], folder=tmp_path_factory.mktemp("studio")
    )


@pytest.fixture
def studio(shared, tmp_path):
    return shared.another(tmp_path)


@pytest.fixture
def session(studio):
    return studio.session("me")


@pytest.fixture
def plain():
    """An editor over a model of its own."""
    return Editor.from_pretrained("demo")


def without(studio, folder):
    """A studio over the same models that offers no LoRA."""
    fewer = studio.another(folder)
    fewer.shelf = copy.copy(studio.shelf)
    fewer.shelf.wardrobe = Wardrobe(studio.shelf.first.editor, [])
    return fewer


def last(steps):
    return list(steps)[-1].result


def same(a, b):
    return np.array_equal(np.asarray(a.image), np.asarray(b.image))


def file(picture):
    data = BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()


def test_what_nobody_chose_changes_nothing(studio, session, plain):
    made = last(handlers.generate(studio, session, CAT, PLAIN))
    assert same(made, plain.generate(CAT, **QUICK)) and made.config.loras == ()
    assert same(last(handlers.edit(studio, session, DOG)), plain.edit(DOG))


def test_a_chosen_lora_paints_a_picture_and_its_edits(studio, session, places, plain):
    without = last(handlers.generate(studio, session, CAT, PLAIN))
    source = last(handlers.generate(studio, session, CAT, INK))
    edit = last(handlers.edit(studio, session, DOG))
    seen = handlers.preview(studio, session, "a fox and a cake on a beach").preview
    plain.load_lora(places["ink"], 0.6)
    assert same(source, plain.generate(CAT, **QUICK)) and not same(source, without)
    assert same(edit, plain.edit(DOG)) and source.config.loras == edit.config.loras != ()
    assert np.array_equal(seen.mask.grid, plain.preview("a fox and a cake on a beach").mask.grid)
    assert studio.wardrobe.words(edit.config.loras) == "ink at 0.6" and studio.wardrobe.words(()) == ""

    handlers.checkout(session, without.id)
    assert last(handlers.edit(studio, session, DOG)).config.loras == ()
    handlers.checkout(session, source.id)
    studio.shelf.forget(session)
    assert same(last(handlers.edit(studio, session, DOG)), edit)
    assert list(handlers.dense(studio, session, edit.id))[-1].seconds > 0


def test_several_loras_at_once(studio, session, places, plain):
    several = Settings(4, 4.0, 7, 128, 128, model="demo", loras={"oil": 0.5, "ink": 0.6})
    source, edit = last(handlers.generate(studio, session, CAT, several)), last(handlers.edit(studio, session, DOG))
    plain.load_lora(places["ink"], 0.6)
    plain.load_lora(places["oil"], 0.5)
    assert same(source, plain.generate(CAT, **QUICK)) and same(edit, plain.edit(DOG))
    assert studio.wardrobe.words(edit.config.loras) == "ink at 0.6 and oil at 0.5"
    assert export.restore(studio, export.picture_bytes(session, source)).settings == several


def test_a_picture_tells_its_lora(shared, studio, session):
    data = export.picture_bytes(session, last(handlers.generate(studio, session, CAT, INK)))
    side = studio.shelf.first.native_size
    assert export.restore(studio, data).settings == Settings(4, 4.0, 7, side, side, model="demo", loras={"ink": 0.6})
    fewer = without(shared, None)
    found = export.restore(fewer, data)
    assert found.settings is None and "start the app with it" in found.words
    fewer.close()


def test_people_who_chose_differently_at_once(studio):
    choices = {"none": PLAIN, "ink": INK, "oil": OIL, "more ink": Settings(4, seed=7, loras={"ink": 0.9})}

    def work(name, into):
        session = studio.session(f"{name} {id(into)}")
        source = last(handlers.generate(studio, session, CAT, choices[name]))
        into[name] = source, last(handlers.edit(studio, session, DOG))

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


def test_an_opened_picture_has_its_lora_too(studio, session):
    source = last(handlers.open_picture(studio, session, file(RED), CAT, OIL))
    edit = last(handlers.edit(studio, session, DOG, Region(add=Image.fromarray(SQUARE), only=True)))
    assert source.config.loras == edit.config.loras and studio.wardrobe.words(edit.config.loras) == "oil at 1"


def test_who_comes_back_to_an_app_that_does_not_offer_it(shared, studio, session):
    last(handlers.generate(studio, session, CAT, INK))
    fewer = without(shared, studio.folder)
    back = fewer.adopt("me", session.key)
    assert len(back.history) == 1 and fewer.wardrobe.words(back.current.config.loras) == ""
    for refused in (lambda: last(handlers.edit(fewer, back, DOG)), lambda: handlers.preview(fewer, back, DOG)):
        with pytest.raises(SessionError, match=r"made with the LoRA ink_\w+; start the app with it, as --lora"):
            refused()
    studio.shelf.forget(back)
    assert last(handlers.edit(studio, studio.adopt("you", session.key), DOG)).parent == "0"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Settings(4, loras={"../ink": 1.0}), "lora must be one of ink, oil, got '../ink'"),
        (Settings(4, loras=["ink"]), "loras must be at most 8 names"),
        (Settings(4, loras={str(n): 1.0 for n in range(9)}), "loras must be at most 8 names"),
        (Settings(4, loras={"ink": 2.5}), r"lora scale must be a number in \[-2, 2\]"),
        (Settings(4, loras={"ink": float("nan")}), "lora scale"),
        (Settings(4, loras={"ink": True}), "lora scale"),
    ],
)
def test_choices_that_are_none(studio, session, settings, why):
    for ask in (
        lambda: handlers.generate(studio, session, CAT, settings),
        lambda: handlers.open_picture(studio, session, file(RED), CAT, settings),
    ):
        with pytest.raises(InputError, match=why):
            list(ask())


def test_loras_that_cannot_be_offered(places, tmp_path, plain):
    (tmp_path / "ink.safetensors").write_bytes(places["ink"].read_bytes())
    with pytest.raises(InputError, match="two LoRAs are called ink"):
        Wardrobe(plain, [places["ink"], tmp_path / "ink.safetensors"])
    with pytest.raises(AdapterError, match=r"nowhere\.safetensors"):
        Wardrobe(plain, [tmp_path / "nowhere.safetensors"])
    words = Lora(plain.pipe)
    words.parts = {(part, name): halves for (part, name), halves in words.parts.items() if part == "text_encoder"}
    with pytest.raises(InputError, match="changes no layer of the UNet"):
        Wardrobe(plain, [words.kohya(tmp_path / "words.safetensors")])


# Turns


class Model:
    """What the wardrobe is told of, in order."""

    def __init__(self):
        self.told = []

    def scale_loras(self, scales):
        self.told.append(scales)


@pytest.fixture
def rail():
    return Rail(Model())


def test_who_wants_the_same_goes_together_and_others_wait(rail):
    done, waits = [], threading.Event()

    def other():
        with rail.worn({"b": 1.0}, waits.set):
            done.append("b")

    with rail.worn({"a": 1.0}), rail.worn({"a": 1.0}):
        thread = threading.Thread(target=other)
        thread.start()
        assert waits.wait(60) and not done
        with pytest.raises(Busy, match="other LoRAs"), rail.worn({"a": 1.0}, patience=0.2):
            done.append("jumped the line")
    thread.join()
    assert done == ["b"] and rail._editor.told == [{}, {"a": 1.0}, {"b": 1.0}]


def test_who_waits_can_be_stopped(rail):
    def stop():
        raise Cancelled("stopped")

    with rail.worn({"a": 1.0}):
        with pytest.raises(Cancelled), rail.worn({}, stop):
            pass
        with rail.worn({"a": 1.0}):
            pass
    with rail.worn({}):
        pass
    assert rail._editor.told == [{}, {"a": 1.0}, {}]


# Looks


def test_a_look_is_taken_from_an_uploaded_picture(studio, session, places, plain):
    plain.load_adapter(places["adapter"], 0.5)
    source = last(handlers.generate(studio, session, CAT, PLAIN))
    region, look = Region(add=Image.fromarray(SQUARE), only=True), Look(file(RED), 0.5)
    assert not handlers.preview(studio, session, CAT, region, look).preview.nothing
    painted = last(handlers.edit(studio, session, CAT, region, look))
    assert same(source, plain.generate(CAT, **QUICK))
    assert same(painted, plain.edit(CAT, mask=SQUARE, reference=RED)) and not same(painted, source)
    assert [one.scale for one in painted.config.like] == [0.5]


def test_a_look_stays_with_a_picture_and_with_its_owner(studio, session, tmp_path):
    mine = last(handlers.generate(studio, session, CAT, PLAIN, Look(file(RED), 0.5)))
    other = studio.session("you")
    theirs = last(handlers.generate(studio, other, CAT, PLAIN, Look(file(BLUE), 1.0)))
    assert not same(mine, theirs)
    edit = last(handlers.edit(studio, session, DOG))
    assert edit.config.like == mine.config.like != theirs.config.like
    packed = export.archive(session).read_bytes()
    back = studio.session("back")
    export.reopen(studio, back, packed)
    handlers.checkout(back, mine.id)
    assert same(last(handlers.edit(studio, back, DOG)), edit)


def test_looks_that_are_none(studio, session):
    last(handlers.generate(studio, session, CAT, PLAIN))
    for look, why in (
        (Look(b"no"), "picture"),
        (Look(file(RED), 3), "scale of the look"),
        (Look(file(RED), True), "scale"),
    ):
        with pytest.raises(InputError, match=why):
            handlers.edit(studio, session, DOG, None, look)
    studio.shelf = copy.copy(studio.shelf)
    studio.shelf.adapter = None
    with pytest.raises(InputError, match="start the app with --adapter"):
        handlers.edit(studio, session, DOG, None, Look(file(RED)))
