"""Models, LoRAs, an adapter and a folder of sessions, as the command line gives them to an app: in a real browser, and
as programs ask for them."""

from __future__ import annotations

import base64
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from diffusers import T2IAdapter
from PIL import Image
from playwright.sync_api import expect

from app import handlers
from app.validation import SourceSettings, label
from fisedit import Editor
from fisedit.adapters.row_column.checkpoints import save_adapter
from fisedit.masking.region_values import RegionCanvas
from tests.support.adapters import filled, lively
from tests.support.app.models import derived
from tests.support.app.page import CAT, DOG, make, nodes, pixels, run, stroke
from tests.support.app.program import picture
from tests.support.app.site import LayerSite, served
from tests.support.app.uploads import png, upload
from tests.support.documents import APP_ADDRESS, APP_GUIDE, blocks
from tests.support.lora import Lora
from tests.support.references import RED
from training.pose import build_network, save_network

if TYPE_CHECKING:
    from collections.abc import Iterator


FOX = "a fox in the snow"

DETECTOR = Path(__file__).resolve().parents[1] / "fixtures/detector"
"""Knows cats and cakes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("offers")


@pytest.fixture(scope="module")
def site(folder) -> Iterator[LayerSite]:
    pipe = Editor.from_pretrained("demo").pipe
    save_adapter(lively(pipe.unet, "v3"), folder / "adapter")
    few = {"scheduler": "lcm", "num_inference_steps": "4", "guidance_scale": "1.0"}
    loras = [Lora(pipe).kohya(folder / "ink.safetensors"), Lora(pipe, 1).kohya(folder / "oil.safetensors")]
    loras.append(Lora(pipe, 2).kohya(folder / "fast.safetensors", **few))
    channels = list(pipe.unet.config.block_out_channels)
    filled(T2IAdapter(channels=channels, num_res_blocks=1)).save_pretrained(folder / "control")
    save_network(filled(build_network(pipe)), folder / "poses")
    adapters = [folder / name for name in ("adapter", "control", "poses")]
    offers = {"loras": loras, "adapters": adapters, "folder": folder / "kept", "detector": DETECTOR}
    with served("demo", derived(folder / "another"), **offers) as site:
        yield site


def choose(page, box, name):
    """Chooses in a dropdown."""
    page.locator(f"#{box} input").click()
    page.get_by_role("option", name=name).click()


@pytest.mark.slow
def test_loras_are_chosen(browser, site):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    plain = pixels(page, ".picture")
    expect(page.locator(".lora-scale:visible")).to_have_count(0)
    for name, scale in (("oil", "0.5"), ("ink", "0.6")):
        choose(page, "loras", name)
        field = page.get_by_label(f"number input for {name}")
        field.fill(scale)
        field.blur()
    page.locator("#make").click()
    expect(nodes(page)).to_have_count(2)
    expect(page.locator("#truth")).to_contain_text("by demo with ink at 0.6 and oil at 0.5")
    assert (pixels(page, ".picture") != plain).any()
    run(page, DOG, 3)
    nodes(page).first.click()
    expect(page.locator("#truth")).not_to_contain_text("ink")


def sampling(page) -> list[str]:
    """The settings of a new picture that a LoRA may suggest."""
    fields = ("#steps input[type=number]", "#guidance input[type=number]", "#scheduler input")
    return [page.locator(field).input_value() for field in fields]


@pytest.mark.slow
def test_a_lora_suggests_how_it_is_sampled(browser, site):
    page = browser().open()
    page.get_by_text("Settings of new pictures").click()
    choose(page, "loras", "ink")
    usual = sampling(page)
    choose(page, "loras", "fast")
    expect(page.locator("#scheduler input")).to_have_value("LCM")
    assert sampling(page) == ["4", "1", "LCM"]
    page.locator("#loras .token-remove:not(.remove-all)").last.click()
    expect(page.locator("#scheduler input")).to_have_value("DDIM")
    assert sampling(page) == usual


@pytest.mark.slow
def test_a_model_is_chosen(browser, site, tmp_path):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    choose(page, "model", "another")
    expect(page.locator("#width input[type=number]")).to_have_value("64")
    expect(page.locator("#guidance input[type=number]")).to_have_value("7.5")
    page.locator("#make").click()
    expect(nodes(page)).to_have_count(2)
    expect(page.locator("#truth")).to_contain_text("by another")
    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#facts")).to_contain_text("picture")
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(3)
    session = next(reversed(site.state._sessions.values()))
    assert [label(session.model_name(result)) for result in session.history] == [
        "demo",
        "another",
        "another",
    ]
    with page.expect_download() as told:
        page.locator("#download").click()
    told.value.save_as(tmp_path / "picture.png")
    choose(page, "model", "demo")
    page.get_by_text("Open a picture or a saved session").click()
    page.locator("#file input[type=file]").set_input_files(tmp_path / "picture.png")
    expect(page.locator("#model input")).to_have_value("another")


@pytest.mark.slow
def test_others_paint_with_another_lora(browser, site):
    """A preview does not disturb a run with another LoRA; the region comes once that is over."""
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    other = handlers.generate(site.state, site.state.session("other"), CAT, SourceSettings(150, loras={"ink": 1.0}))
    next(other)
    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#facts")).to_contain_text("at work with another model or other LoRAs")
    other.close()
    run(page, DOG, 2)
    expect(page.locator("#truth")).not_to_contain_text("ink")


@pytest.mark.slow
def test_a_look_is_taken(browser, folder):
    RED.save(folder / "red.png")
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    plain = pixels(page, ".picture")
    page.get_by_role("button", name="Reference picture ▼").click()
    page.locator("#reference input[type=file]").set_input_files(folder / "red.png")
    expect(page.locator("#reference")).to_contain_text("red")
    stroke(page, (0.3, 0.3), (0.7, 0.3))
    expect(page.locator("#facts")).to_contain_text("of the picture")
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(2)
    mask = pixels(page, ".mask", "RGBA")[..., 3] > 0
    changed = (pixels(page, ".picture") != plain).any(2)
    assert changed[mask].mean() > 0.5 and not changed[~mask].any()


@pytest.mark.slow
def test_a_control_says_where_things_are(browser, folder):
    """A picture's edges, or without one those of the picture on the stage."""
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    plain = pixels(page, ".picture")
    page.get_by_role("button", name="Control picture ▼").click()
    page.get_by_label("Canny edges of it, or of the picture on the stage").check()
    stroke(page, (0.3, 0.3), (0.7, 0.3))
    expect(page.locator("#facts")).to_contain_text("of the picture")
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(2)
    mask, edges = pixels(page, ".mask", "RGBA")[..., 3] > 0, pixels(page, ".picture")
    changed = (edges != plain).any(2)
    assert changed[mask].any() and not changed[~mask].any()
    page.locator("#undo").click()
    RED.save(folder / "red.png")
    page.locator("#control input[type=file]").set_input_files(folder / "red.png")
    expect(page.locator("#control")).to_contain_text("red")
    stroke(page, (0.3, 0.3), (0.7, 0.3))
    expect(page.locator("#facts")).to_contain_text("of the picture")
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(3)
    assert (pixels(page, ".picture") != edges).any()


@pytest.mark.slow
def test_a_head_is_turned(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    plain = pixels(page, ".picture")
    page.get_by_role("button", name="Head pose ▼").click()
    page.get_by_label("Set the pose").check()
    stroke(page, (0.3, 0.3), (0.7, 0.3))
    expect(page.locator("#facts")).to_contain_text("of the picture")
    made = []
    for roll in ("20", "-35"):
        page.locator("#drive-roll input[type=number]").fill(roll)
        page.locator("#drive-roll input[type=number]").blur()
        page.locator("#run").click()
        expect(nodes(page)).to_have_count(2 + len(made))
        made.append(pixels(page, ".picture"))
        page.locator("#undo").click()
        stroke(page, (0.3, 0.3), (0.7, 0.3))
        expect(page.locator("#facts")).to_contain_text("of the picture")
    assert (made[0] != plain).any() and (made[1] != plain).any() and (made[0] != made[1]).any()


@pytest.mark.slow
def test_a_thing_that_a_detector_finds_is_edited(browser, site):
    """The best find is chosen at once; others can be. Nothing but what is chosen changes."""
    page = browser().open()
    page.get_by_role("button", name="Region ▼").click()
    expect(page.locator("#find")).to_be_disabled()
    make(page, steps=12)
    expect(nodes(page)).to_have_count(1)
    plain = pixels(page, ".picture")
    page.locator("#find").click()
    expect(page.locator("#things .token")).to_have_count(1)
    session = next(reversed(site.state._sessions.values()))
    assert session.detections[0] == session.current.id
    found = {each.label: each.region for each in session.detections[1]}
    assert {"cat", "cake"} <= found.keys()
    page.locator("#things .remove-all").click()
    page.locator("#things input").click()
    page.get_by_role("option", name="cat").click()
    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#facts")).to_contain_text("of the picture")
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(2)
    cat = found["cat"].bind(RegionCanvas(256, 256, (256, 256))).resolve(None)
    is_cat = cat.kept_to_pixels().painted((256, 256))
    changed = (pixels(page, ".picture") != plain).any(2)
    assert changed[is_cat].mean() > 0.9 and not changed[~is_cat].any()
    expect(page.locator("#things .token")).to_have_count(0)  # another picture, in which nothing was looked for


@pytest.mark.slow
def test_a_folder_of_sessions_keeps_them_and_gives_files(browser, site, folder, tmp_path):
    """Whatever the folder is: the browser is given files of the app's own place alone."""
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    kept = {path.parent.parent for path in (folder / "kept").rglob("session.json")}
    assert kept == {site.state.folder}
    for button, name in (("#download", "picture.png"), ("#save", "session.zip")):
        with page.expect_download() as told:
            page.locator(button).click()
        told.value.save_as(tmp_path / name)
    with Image.open(tmp_path / "picture.png") as image:
        assert (np.asarray(image.convert("RGB")) == pixels(page, ".picture")).all()
    page.get_by_text("Open a picture or a saved session").click()
    with page.expect_event("dialog") as told:
        page.locator("#file input[type=file]").set_input_files(tmp_path / "session.zip")
    assert told.value.message == "Open this session in place of the 1 picture here?"
    told.value.dismiss()
    expect(page.locator("#file input[type=file]")).to_have_count(1)  # once more, as nothing was taken
    expect(page.locator("#found")).to_have_text("")
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator("#file input[type=file]").set_input_files(tmp_path / "session.zip")
    expect(page.locator("#found")).to_contain_text("The session is open.")
    expect(page.locator("#prompt textarea")).to_have_value(CAT)


# Programs


def test_programs_choose_models_and_loras(program, site):
    small = (7, 2, None, 64, 64, "ddim", "")
    plain = picture(program.ask("generate", CAT, *small))
    made = program.ask("generate", CAT, *small, "another", {"ink": 0.6, "oil": 1})
    assert (picture(made) != plain).any() and made.data[0]["model"] == "another"
    assert made.data[0]["recipe"]["guidance_scale"] == 7.5
    edit = program.ask("edit", DOG).data[0]
    assert (edit["model"], edit["recipe"]["loras"]) == ("another", made.data[0]["recipe"]["loras"])
    opened = program.ask("open", upload(site, png()), CAT, 7, 2, 4.0, "another", {"oil": 1.0}).data[0]
    assert opened["model"] == "another" and [name[:3] for name, _ in opened["recipe"]["loras"]] == ["oil"]
    told = program.ask("history").data[0]["results"]
    assert [one["model"] for one in told] == ["demo", "another", "another", "another"]


def test_programs_edit_what_a_detector_finds(program, site):
    made = program.ask("generate", CAT, 7, 12, 4.0, 256, 256)
    rest = ("", "", [], -1, 0, "", 1.0, 1.0, "fast", -1)
    edit = program.ask("edit", DOG, *rest, {"detected": ["cat"], "instance": "largest"})
    changed = (picture(edit) != picture(made)).any(2)
    assert changed[:, :128].any() and not changed[:, 140:].any() and edit.data[0]["mask_area"] < 0.3
    assert program.ask("erase", {"detected": ["CAKE"], "threshold": 0.9}).data[0]["mask_area"] < 0.3
    opened = upload(site, png()), CAT, 7, 2, 4.0
    for name, given, why in (
        ("edit", (DOG, *rest, {"detected": ["castle"]}), "the detector must find castle in the picture, got nothing"),
        ("edit", (DOG, *rest, {"detected": ["cat"], "threshold": 2}), "threshold must be in"),
        ("edit", (DOG, *rest, {"detected": "cat"}), "detected of a region must be a list of labels"),
        ("open", (*opened, "", {}, {"detected": ["cat"]}), "the detector must find cat in the picture, got nothing"),
    ):
        assert why in program.refused("input" if "must be" in why else "mask", name, *given)


def test_programs_give_a_look(program):
    program.ask("generate", CAT, 7, 2, 4.0, 64, 64)
    look, area, square = base64.b64encode(png()).decode(), Image.new("L", (64, 64)), BytesIO()
    area.paste(255, (16, 16, 40, 40))
    area.save(square, "PNG")
    mask = base64.b64encode(square.getvalue()).decode()
    seen = program.ask("preview", CAT, mask, "", [], -1, 0, look).data[0]
    edit = program.ask("edit", CAT, mask, "", [], -1, 0, look, 0.5).data[0]
    assert (seen["nothing"], edit["mask_area"]) == ("", 9 / 64)
    assert [like["scale"] for like in edit["recipe"]["like"]] == [0.5]
    made = program.ask("generate", CAT, 7, 2, 4.0, 64, 64, "ddim", "", "", {}, look).data[0]
    assert [like["scale"] for like in made["recipe"]["like"]] == [1.0]


def test_programs_turn_a_head(program):
    program.ask("generate", CAT, 7, 2, 4.0, 64, 64)
    plain = ("", "", [], -1, 0, "", 1.0, 1.0, "fast", -1, {"box": [16, 16, 48, 48]}, [], "", 1.0, False)
    made = program.ask("edit", CAT, *plain, {"pose": [0, 0, 30, 0, 0, 0.4], "expression": {"eyeBlinkLeft": 1}})
    assert made.data[0]["recipe"]["like"][0]["drive"]["pose"][2] == 30
    program.refused("input", "edit", CAT, *plain, {"pose": [0]})
    program.refused("input", "edit", CAT, *plain, {"roll": 30})


def base64_of(image):
    return base64.b64encode(png(image)).decode()


def test_programs_say_regions(program):
    before = picture(program.ask("generate", CAT, 7, 3, 4.0, 64, 64))
    source = program.ask("history").data[0]["current"]
    left, right, plain = (
        {"box": [0, 0, 16, 64]},
        {"box": [48, 0, 64, 16]},
        ("", "", [], -1, 0, "", 1.0, 1.0, "fast", -1),
    )
    grey = Image.fromarray(np.repeat(np.arange(0, 256, 4, np.uint8)[None], 64, 0))
    joined = {"any": [left, {"minus": [right, {"mask": base64_of(Image.new("L", (64, 64), 0))}]}]}
    assert program.ask("preview", DOG, *plain, joined).data[0]["mask_area"] == 20 / 64
    after = picture(program.ask("edit", DOG, *plain, joined))
    changed = (after != before).any(2)
    assert changed[:, :16].any() and changed[:16, 48:].any() and not changed[:, 16:48].any()
    program.ask("history", source)
    soft = program.ask("edit", DOG, *plain, {"mask": base64_of(grey), "soft": True}).data[0]
    hard = program.ask("history", source) and program.ask("edit", DOG, *plain, {"mask": base64_of(grey)}).data[0]
    assert soft["mask_area"] > hard["mask_area"]
    program.ask("history", source)
    both = [{"region": left, "prompt": "a dog"}, {"region": right, "prompt": "a fox"}]
    told = program.ask("edit", "", *plain, {}, both).data[0]
    assert told["prompt"] == CAT and told["mask_area"] == 20 / 64
    for wrong in (
        (DOG, base64_of(grey), *plain[1:], left),
        (DOG, *plain, left, both),
        (DOG, *plain, {"box": [0, 0, 8]}),
        (DOG, *plain, {"box": [100, 0, 164, 8]}),
        (DOG, *plain, {"mask": ""}),
        (DOG, *plain, {}, [{"region": left}]),
        (DOG, *plain[:4], 2, *plain[5:], {}, both),
        (DOG, *plain, "box"),
        ("", *plain, left),
    ):
        event = program.ask("edit", *wrong)
        assert event.kind == "error" and event.data["error"].startswith(
            ("error[input]", "error[mask]", "error[prompt]")
        )


def test_programs_erase_and_extend(program, site):
    source = picture(program.ask("generate", CAT, 7, 3, 4.0, 64, 64))
    erased = program.ask("erase", {"box": [0, 0, 16, 16]})
    changed = (picture(erased) != source).any(2)
    assert changed[:16, :16].any() and not changed[16:, 16:].any() and erased.data[0]["prompt"] == CAT
    assert program.ask("erase", {"words": ["cake"]}).data[0]["prompt"] == "a cat on a beach"
    program.ask("generate", CAT, 7, 3, 4.0, 64, 64)
    erased = program.ask("erase", {"box": [0, 0, 16, 16]})
    larger = picture(program.ask("extend", 0, 0, 32, 0))
    told = program.ask("history").data[0]["results"]
    assert [(one["id"], one["parent"]) for one in told][-3:] == [("3", None), ("4", "3"), ("6", "4")]
    assert larger.shape == (64, 96, 3) and np.array_equal(larger[:, :56], picture(erased)[:, :56])
    program.refused("input", "erase", {})
    program.refused("input", "extend", 0, 0, 0, 0)
    program.refused("input", "extend", -8, 0, 0, 0)
    photo = Image.fromarray(np.random.default_rng(1).integers(0, 255, (600, 800, 3), np.uint8))
    opened = program.ask("open", upload(site, png(photo)), CAT, 7, 2, 4.0, "", {}, {"box": [300, 300, 340, 340]}).data[
        0
    ]
    assert opened["recipe"]["crop"] and opened["recipe"]["crop"][2] - opened["recipe"]["crop"][0] < 400
    program.refused("input", "open", upload(site, png(photo)), CAT, 7, 2, 4.0, "", {}, {"words": ["cat"]})


@pytest.mark.slow
def test_the_documents_python_runs(site, tmp_path):
    first, second, third = [
        block for block in blocks("python", APP_GUIDE) if "webuiapi" not in block and "OpenAI" not in block
    ]
    RED.save(tmp_path / "reference.png")
    code = (first[: first.index("source = ")] + second).replace(APP_ADDRESS, site.url)
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    session = next(reversed(site.state._sessions.values()))
    assert (session.current.prompt, label(session.model_name(session.current))) == (FOX, "another")
    assert (
        site.state.pool.loras.scales_by_label(session.current.config.loras) == {"ink": 0.8}
        and session.current.config.like
    )
    code = first[: first.index("source = ")] + third
    run = subprocess.run(
        [sys.executable, "-c", code.replace(APP_ADDRESS, site.url)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    session = next(reversed(site.state._sessions.values()))
    assert session.current.size == (320, 256) and session.current.prompt == "a dog in the snow"


def test_what_programs_may_not_choose(program):
    small = (7, 2, 4.0, 64, 64, "ddim", "")
    for model in ("ink", "../another", "/etc/passwd", None):
        assert "model must be" in program.refused("input", "generate", CAT, *small, model)
    for loras in ({"another": 1.0}, {"../ink": 1.0}, {"ink": 3}, {"ink": "much"}, {"ink": None}, ["ink"], "ink", None):
        assert "lora" in program.refused("input", "generate", CAT, *small, "", loras)
    program.ask("generate", CAT, *small)
    where = ("", "", [], -1, 0)
    for name, before in (("generate", (*small, "", {})), ("edit", where), ("preview", where)):
        for reference in ("AAAA", "no base64", "/etc/passwd", "http://127.0.0.1:1/a.png", 7, None, "a" * (3 << 20 | 4)):
            program.refused("input", name, CAT, *before, reference)
        for scale in (-1, 3, None, "much"):
            assert "scale" in program.refused("input", name, CAT, *before, base64.b64encode(png()).decode(), scale)
