"""Control pictures in the app's handlers, and how programs' arguments and the page's components become them."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from diffusers import ControlNetModel
from PIL import Image

from app import handlers
from app.inputs import conditions_of
from app.sessions import AppState
from app.validation import NO_CONDITIONS, AdapterPicture, Conditions, RegionSettings, SourceSettings
from fisedit import Drive, Editor
from fisedit.adapters.control_pictures import canny
from fisedit.errors import InputError
from tests.support.adapters import filled
from tests.support.app.requests import last, png
from tests.support.edits import CAT, DOG, same
from tests.support.references import RED

PLAIN = SourceSettings(2, seed=7, width=128, height=128)
AREA = np.zeros((128, 128), bool)
AREA[32:96, 32:96] = True
POSE = (5, -10, 20, 0.1, 0, 0.4, 0, 1, 0, 0.5, 0)
REGION = RegionSettings(add=Image.fromarray(AREA), only=True)


@pytest.fixture(scope="module")
def control_net(pipelines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("control")
    pipelines["sd15"].save_pretrained(folder / "model", safe_serialization=True)
    network = filled(ControlNetModel.from_unet(pipelines["sd15"].unet))
    for layer in (*network.controlnet_down_blocks, network.controlnet_mid_block):
        layer.weight.data.mul_(0.3)
    network.save_pretrained(folder / "network")
    return folder


@pytest.fixture(scope="module")
def state(control_net, tmp_path_factory):
    state = AppState.open(
        control_net / "model", adapters=[control_net / "network"], folder=tmp_path_factory.mktemp("state"), dtype="fp32"
    )
    yield state
    state.close()


@pytest.fixture
def plain(control_net):
    editor = Editor.from_pretrained(control_net / "model", dtype="fp32")
    editor.load_adapter(control_net / "network", 0.5)
    return editor


@pytest.mark.parametrize("edges", [False, True], ids=["picture", "its edges"])
def test_handlers_give_what_an_editor_does(state, plain, edges):
    session, control = state.session(f"handlers {edges}"), canny(RED) if edges else RED
    given = Conditions(control=AdapterPicture(png(RED), 0.5, edges))
    source = last(handlers.generate(state, session, CAT, PLAIN, given))
    own = plain.generate(CAT, seed=7, num_inference_steps=2, guidance_scale=7.5, width=128, height=128, control=control)
    assert same(source, own)
    edit = last(handlers.edit(state, session, DOG, REGION, given))
    assert same(edit, plain.edit(DOG, mask=Image.fromarray(AREA), control=control))


def test_the_edges_of_the_picture_on_the_stage(state, plain):
    session = state.session("edges")
    source = last(handlers.generate(state, session, CAT, PLAIN))
    edit = last(handlers.edit(state, session, DOG, REGION, Conditions(control=AdapterPicture(b"", 0.5, True))))
    plain.generate(CAT, seed=7, num_inference_steps=2, guidance_scale=7.5, width=128, height=128)
    assert same(edit, plain.edit(DOG, mask=Image.fromarray(AREA), control=canny(source.canvas)))
    assert not edit.changed_outside(source)
    again = last(handlers.edit(state, session, CAT, REGION, Conditions(control=AdapterPicture(b"", 0.5, True))))
    assert again.config.like == edit.config.like


def test_what_the_page_sends():
    still, head = (False, *POSE), Drive(POSE[:6], {"eyeBlinkRight": 1, "mouthSmileLeft": 0.5})
    assert conditions_of(None, 1, None, 1, False, *still, "more") == (NO_CONDITIONS, ("more",))
    assert conditions_of(b"a", 0.5, None, 1, False, *still)[0] == Conditions(AdapterPicture(b"a", 0.5))
    assert conditions_of(None, 1, None, 0.7, True, *still)[0] == Conditions(control=AdapterPicture(b"", 0.7, True))
    assert conditions_of(None, 1, None, 1, False, True, *POSE, "more") == (Conditions(drive=head), ("more",))


def test_a_reference_that_no_adapter_reads(state):
    session = state.session("none")
    last(handlers.generate(state, session, CAT, PLAIN))
    with pytest.raises(InputError, match="a reference needs an adapter that reads it; start the app with --adapter"):
        handlers.edit(state, session, DOG, None, Conditions(AdapterPicture(png(RED))))


def test_a_program_sends_a_control(state):
    from app.api_inputs import lazy_conditions

    text = base64.b64encode(png(RED)).decode()
    assert lazy_conditions("", 1.0, text, 0.5, {}, edges=True)() == Conditions(
        control=AdapterPicture(png(RED), 0.5, True)
    )
    assert lazy_conditions("", 1.0, "", 1.0, {}, edges=False)() == NO_CONDITIONS
    told = {"pose": POSE[:6], "expression": {"jawOpen": 1}}
    assert lazy_conditions("", 1.0, "", 1.0, told, edges=False)() == Conditions(drive=Drive(**told))
    with pytest.raises(InputError, match="a drive must be a JSON object"):
        lazy_conditions("", 1.0, "", 1.0, [1], edges=False)()
    with pytest.raises(InputError, match="edges must be true or false, got 'false'"):
        lazy_conditions("", 1.0, text, 0.5, {}, edges="false")()
