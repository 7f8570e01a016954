"""Sizes that Stable Diffusion XL is told (micro-conditioning): asked for on the page, by the API and by web UIs."""

from __future__ import annotations

import base64
from dataclasses import replace

import gradio as gr
import pytest
from PIL import Image
from playwright.sync_api import expect

from app import export, handlers, inputs
from app.api import Endpoints
from app.components import PageComponents
from app.program_pictures import ProgramPictures
from app.session_events import SessionEvents
from app.sessions import AppState
from app.validation import SourceSettings
from app.webui_api import WebuiApi
from fisedit.errors import InputError
from fisedit.values.sizes import Sizes, make_sizes
from tests.support.app.page import nodes
from tests.support.app.requests import CAT, ME, last, made, png
from tests.support.app.site import served
from tests.support.edits import same
from tests.support.pipelines import build_pipeline

SIZES = {"original_size": (64, 96), "crops_coords_top_left": (0, 16), "target_size": (128, 128)}
XL = SourceSettings(2, 4.0, 7, 64, 64, model="xl", sizes=SIZES)
FIELDS = (False, 2, 4.0, 7, 64, 64, "DDIM", 0, "")


@pytest.fixture(scope="module")
def xl(tmp_path_factory):
    """The folder of a random model of XL's architecture."""
    folder = tmp_path_factory.mktemp("models") / "xl"
    build_pipeline("sdxl").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shared(xl, tmp_path_factory):
    """Offers the demo model, which reads no sizes, and one that reads them."""
    return AppState.open("demo", xl, folder=tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def site(xl):
    with served("demo", xl) as site:
        yield site


@pytest.fixture
def page(state):
    with gr.Blocks():
        return PageComponents(state.pool)


def test_a_picture_is_made_with_them_as_by_the_editor(state, session):
    told = made(state, session, settings=XL)
    plain = made(state, session, settings=replace(XL, sizes=None))
    editor = state.pool.select("xl").loaded.editor
    options = {"seed": 7, "num_inference_steps": 2, "guidance_scale": 4.0, "width": 64, "height": 64}
    assert told.config.sizes == make_sizes(SIZES) and same(told, editor.beside().generate(CAT, **options, sizes=SIZES))
    assert plain.config.sizes is None and not same(told, plain)
    opened = last(handlers.open_picture(state, session, png(plain.image), CAT, XL))
    assert opened.config.sizes == make_sizes(SIZES)


def test_a_model_that_reads_none_refuses_them(state, session):
    with pytest.raises(InputError, match="sizes are read by Stable Diffusion XL alone"):
        made(state, session, settings=replace(XL, model="demo"))


def test_the_page_asks_for_them_where_a_model_reads_them(state, page):
    events = SessionEvents(state, page)
    assert not page.sizes_row.visible
    assert [events.on_model(name)[page.sizes_row]["visible"] for name in ("xl", "demo")] == [True, False]
    numbers = [0, None, 0, 16, 128, 128]
    told = inputs.settings(page, *FIELDS, "xl", [], *numbers)
    assert told.sizes == Sizes(crops_coords_top_left=(0, 16), target_size=(128, 128))
    assert inputs.settings(page, *FIELDS, "demo", [], *numbers).sizes is None
    assert inputs.settings(page, *FIELDS, "xl", [], *[0] * 6).sizes is None
    with pytest.raises(InputError, match="target_size must be height and width"):
        inputs.settings(page, *FIELDS, "xl", [], *[0] * 5, 128)


@pytest.mark.slow
def test_a_person_fills_them_in(browser, site):
    page = browser().open()
    page.get_by_text("Settings of new pictures").click()
    expect(page.locator("#steps")).to_be_visible()
    expect(page.locator("#sizes")).not_to_be_visible()
    page.locator("#model input").click()
    page.get_by_role("option", name="xl").click()
    for name in ("height", "width"):
        page.get_by_label(f"Original {name}").fill("96")
        page.get_by_label(f"Original {name}").blur()
    page.locator("#prompt textarea").fill(CAT)
    page.locator("#make").click()
    expect(nodes(page)).to_have_count(1)
    session = next(reversed(site.state._sessions.values()))
    assert session.current.config.sizes == Sizes(original_size=(96, 96))


def test_the_page_shows_those_of_a_dropped_picture(state, session, page):
    data = export.picture_bytes(session, made(state, session, settings=replace(XL, sizes={"target_size": (128, 96)})))
    shown = SessionEvents(state, page).on_file(ME, data, "xl")
    assert shown[page.sizes_row]["visible"] and shown[page.model] == "xl"
    assert [shown[field] for field in page.sizes] == [0, 0, 0, 0, 128, 96]


def test_programs_tell_them(state):
    endpoints = Endpoints(state)
    options = {"steps": 2, "width": 64, "height": 64, "model": "xl"}
    *_, given = endpoints.generate(ME, CAT, **options, sizes={name: list(pair) for name, pair in SIZES.items()})
    *_, usual = endpoints.generate(ME, CAT, **options, sizes={})
    picture = png(Image.new("RGB", (64, 64), "teal"))
    *_, opened = endpoints.open_picture(ME, picture, CAT, 0, 2, model="xl", sizes={"original_size": [64, 96]})
    assert {name: given["recipe"]["sizes"][name] for name in SIZES} == SIZES and usual["recipe"]["sizes"] is None
    assert opened["recipe"]["sizes"]["original_size"] == (64, 96)


def test_web_uis_tell_the_crop_by_their_own_names(state):
    api = WebuiApi(ProgramPictures(state))
    crop = {"sd_model_checkpoint": "xl", "sdxl_crop_top": 8, "sdxl_crop_left": 16}
    asked = {"prompt": CAT, "seed": 7, "steps": 2, "width": 64, "height": 64}
    (image,) = api.txt2img(asked | {"override_settings": crop})["images"]
    restored = export.restore_settings(state, base64.b64decode(image)).settings
    assert restored.sizes == Sizes(crops_coords_top_left=(8, 16))
    again = {"prompt": "a dog and a cake on a beach", "init_images": [image], "source_prompt": CAT, "steps": 2}
    edited = api.img2img(again | {"override_settings": crop | {"sdxl_crop_top": 24}})
    assert "sdxl_crop_top is 8, not 24: an edit has what its picture was made or opened with" in edited["info"]
    assert "sdxl_crop_left" not in edited["info"]
