"""LoRAs, an adapter and a folder of sessions, as the command line gives them to an app; in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from fisedit import Editor
from fisedit.adapters.files import save_adapter
from tests.adapters import lively
from tests.app.conftest import Site, served
from tests.app.test_browser import CAT, DOG, make, nodes, pixels, run, stroke
from tests.test_adapters_derivatives import Lora
from tests.test_adapters_editor import RED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("offers")


@pytest.fixture(scope="module")
def site(folder) -> Iterator[Site]:
    pipe = Editor.from_pretrained("demo").pipe
    save_adapter(lively(pipe.unet, "v3"), folder / "adapter")
    lora = Lora(pipe).kohya(folder / "ink.safetensors")
    with served(loras=[lora], adapter=folder / "adapter", folder=folder / "kept") as site:
        yield site


def test_a_lora_is_chosen(browser, site):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    plain = pixels(page, ".picture")
    page.locator("#lora input").click()
    page.get_by_role("option", name="ink").click()
    page.locator("#lora-scale input[type=number]").fill("0.6")
    page.locator("#lora-scale input[type=number]").blur()
    page.locator("#make").click()
    expect(nodes(page)).to_have_count(2)
    expect(page.locator("#truth")).to_contain_text("with ink at 0.6")
    assert (pixels(page, ".picture") != plain).any()
    run(page, DOG, 3)
    nodes(page).first.click()
    expect(page.locator("#truth")).not_to_contain_text("ink")


def test_others_paint_with_another_lora(browser, site):
    """Who is at work with it is not disturbed; the region comes once they are done."""
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    with site.studio.wardrobe.worn(site.studio.wardrobe.chosen("ink", 1.0)):
        page.locator("#prompt textarea").fill(DOG)
        expect(page.locator("#facts")).to_contain_text("somebody paints with other LoRAs")
    run(page, DOG, 2)
    expect(page.locator("#truth")).not_to_contain_text("ink")


def test_a_look_is_taken(browser, folder):
    RED.save(folder / "red.png")
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    plain = pixels(page, ".picture")
    page.get_by_text("Look of another picture").click()
    page.locator("#reference input[type=file]").set_input_files(folder / "red.png")
    expect(page.locator("#reference")).to_contain_text("red")
    stroke(page, (0.3, 0.3), (0.7, 0.3))
    expect(page.locator("#facts")).to_contain_text("of the picture")
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(2)
    mask = pixels(page, ".mask", "RGBA")[..., 3] > 0
    changed = (pixels(page, ".picture") != plain).any(2)
    assert changed[mask].mean() > 0.5 and not changed[~mask].any()


def test_a_folder_of_sessions_keeps_them_and_gives_files(browser, site, folder, tmp_path):
    """Whatever the folder is: the browser is given files of the app's own place alone."""
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    kept = {path.parent.parent for path in (folder / "kept").rglob("session.json")}
    assert kept == {site.studio.folder}
    for button, name in (("#download", "picture.png"), ("#save", "session.zip")):
        with page.expect_download() as told:
            page.locator(button).click()
        told.value.save_as(tmp_path / name)
    with Image.open(tmp_path / "picture.png") as image:
        assert (np.asarray(image.convert("RGB")) == pixels(page, ".picture")).all()
    page.get_by_text("Open a picture or a saved session").click()
    page.locator("#file input[type=file]").set_input_files(tmp_path / "session.zip")
    expect(page.locator("#found")).to_contain_text("The session is open.")
    expect(page.locator("#prompt textarea")).to_have_value(CAT)
