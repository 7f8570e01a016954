"""What the page's scripts and styles do in a real browser: the region, the prompt, the stage, and what can be read."""

from __future__ import annotations

import re
import uuid
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.support.app.page import CAT, DOG, low_contrast, make, nodes, open_region, pixels, run, still, stroke
from tests.support.app.program import Program, settle
from tests.support.app.requests import png

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow  # one walk through the page is of every run: `test_browser`

PASTE = """([selector, text, bytes]) => {
  const data = new DataTransfer();
  if (text) data.setData("text/plain", text);
  if (bytes) data.items.add(new File([new Uint8Array(bytes)], "a.png", { type: "image/png" }));
  const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
  document.querySelector(selector).dispatchEvent(event);
}"""
"""Pastes text, or a picture's bytes."""

CONTRAST = """(selector) => {
  const light = (rgb) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((level) => linear(level / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const numbers = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const node = document.querySelector(selector.replace("::placeholder", ""));
  const pseudo = selector.endsWith("::placeholder") ? "::placeholder" : null;
  const below = (one) => getComputedStyle(one).backgroundColor;
  let behind = node;
  while (/rgba\\(0, 0, 0, 0\\)|transparent/.test(below(behind))) behind = behind.parentElement;
  const [a, b] = [getComputedStyle(node, pseudo).color, below(behind)].map((text) => light(numbers(text)));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""
"""The contrast of an element's text, as WCAG 2 has it."""


def typed(page: Page, words: str) -> None:
    page.locator("#prompt textarea").fill(words)


def region_area(page: Page) -> float:
    return float((pixels(page, ".region", "RGBA")[..., 3] > 0).mean())


def test_the_region_is_made_wider_and_tighter_on_the_stage_and_by_a_number(browser):
    page = browser().open()
    open_region(page)
    make(page)
    typed(page, DOG)
    expect(page.locator("#facts")).to_contain_text("of the picture")
    areas = [region_area(page)]
    for act in (
        lambda: page.get_by_label("Wider region").click(),
        lambda: page.get_by_label("Tighter region").click(),
        lambda: number(page, "2"),
    ):
        before = page.locator("#stage .region").get_attribute("src")
        act()
        expect(page.locator("#stage .region")).not_to_have_attribute("src", before)
        areas.append(region_area(page))
    assert areas[0] < areas[1] < areas[3] and areas[2] == areas[0]
    page.locator("#reset-region").click()
    expect(page.locator("#grow input[type=number]")).to_have_value("0")


def number(page: Page, text: str) -> None:
    """Types how many cells wider the region is."""
    field = page.locator("#grow input[type=number]")
    field.fill(text)
    field.press("Enter")


def test_a_prompt_that_is_cleared_takes_the_region_away(browser):
    page = browser().open()
    make(page)
    typed(page, DOG)
    expect(page.locator("#stage .region")).to_have_attribute("src", re.compile("^data"))
    typed(page, " ")
    expect(page.locator("#stage .region")).not_to_have_attribute("src", re.compile("^data"))


def test_words_that_are_typed_during_a_run_stay_and_outlive_a_reload(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    typed(page, DOG)
    page.locator("#run").click()
    later = "a fox and a cake on a beach"
    typed(page, later)
    expect(nodes(page)).to_have_count(2)
    expect(page.locator("#words-line ins")).to_have_text("fox")
    assert page.locator("#prompt textarea").input_value() == later
    page.reload()
    expect(nodes(page)).to_have_count(2)
    expect(page.locator("#prompt textarea")).to_have_value(later)


def test_words_that_were_not_run_wait_at_their_picture(browser):
    page = browser().open()
    make(page)
    run(page, DOG, 2)
    prompt, fox = page.locator("#prompt textarea"), "a fox and a cake on a beach"
    typed(page, fox)
    expect(page.locator("#words-line ins")).to_have_text("fox")
    nodes(page).first.click()
    expect(prompt).to_have_value(CAT)
    page.locator("#redo").click()
    expect(prompt).to_have_value(fox)
    expect(page.locator("#words-line ins")).to_have_text("fox")
    page.get_by_role("button", name="Reset words").click()
    expect(prompt).to_have_value(DOG)
    expect(page.locator("#words-line")).to_have_text(DOG)
    typed(page, fox)
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(3)
    expect(page.locator("#run")).to_be_visible()
    nodes(page).nth(1).click()
    expect(prompt).to_have_value(DOG)


def test_an_error_goes_with_what_it_was_about(browser):
    page = browser().open()
    wrong, status, error = "a <lora:nothing:1> cat", page.locator("#status"), page.locator("#status .error")
    typed(page, wrong)
    page.locator("#make").click()
    expect(error).to_contain_text("nothing")
    page.wait_for_timeout(500)  # what follows every run leaves it there
    expect(error).to_contain_text("nothing")
    make(page)
    expect(nodes(page)).to_have_count(1)
    for act in (
        lambda: stroke(page, (0.3, 0.3), (0.6, 0.3)),
        lambda: typed(page, DOG),
        nodes(page).first.click,
    ):
        typed(page, wrong)
        page.locator("#run").click()
        expect(error).to_contain_text("nothing")
        act()
        expect(status).to_have_text("")
        page.wait_for_timeout(1000)  # the region is told of anew, without the error of before


def red(page: Page) -> list[str]:
    """Ids of the buttons in sight that are red and can be pressed."""
    found = """() => [...document.querySelectorAll("button")]
      .filter((one) => one.checkVisibility() && !one.disabled && one.ariaDisabled !== "true")
      .filter((one) => getComputedStyle(one).backgroundColor === "rgb(190, 18, 60)")
      .map((one) => one.id || one.className)"""
    still(page)
    return page.evaluate(found)


def test_one_button_is_red_and_none_can_do_nothing(browser):
    page = browser().open()
    expect(page.locator("#make")).to_be_disabled()
    typed(page, CAT)
    expect(page.locator("#make")).to_be_enabled()
    assert red(page) == ["make"]
    make(page)
    expect(nodes(page)).to_have_count(1)
    expect(page.locator("#examples")).to_be_hidden()
    for button in ("run", "vary", "erase", "undo", "redo", "measure"):
        expect(page.locator(f"#{button}")).to_be_disabled()
    page.locator("#stage canvas").focus()
    page.keyboard.press("Control+Enter")
    stroke(page, (0.3, 0.3), (0.4, 0.3))
    for button in ("run", "vary", "erase"):
        expect(page.locator(f"#{button}")).to_be_enabled()
    page.locator("#stage [data-do=undo]").click()
    expect(page.locator("#erase")).to_be_disabled()
    typed(page, DOG)
    expect(page.locator("#run")).to_be_enabled()
    assert red(page) == ["run"]
    page.get_by_role("radio", name="2").check()
    page.locator("#run").click()
    expect(page.locator("#candidates [data-id]")).to_have_count(2)
    expect(page.locator("#keep")).to_be_enabled()
    assert red(page) == ["keep"]
    page.locator("#discard").click()
    expect(page.locator("#choice")).to_be_hidden()
    expect(nodes(page)).to_have_count(1)
    page.evaluate(PASTE, ["body", "", list(png(Image.new("RGB", (128, 128), "teal")))])
    expect(page.locator("#stage .open")).to_be_visible()
    assert red(page) == ["open"]


def test_words_that_the_model_does_not_know_are_underlined_and_tokens_counted(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    typed(page, CAT.replace("cat", "Robott"))
    expect(page.locator("#words-line u")).to_have_text("Robott")
    expect(page.locator("#words-line ins u")).to_have_count(1)
    expect(page.locator("#tokens")).to_have_text(re.compile(r"^\s*\d+ of 75 tokens\s*$"))
    typed(page, f"{CAT}, " * 15)
    expect(page.locator("#tokens .long")).to_have_text("135 tokens: read in 2 parts of at most 75")
    typed(page, DOG)
    expect(page.locator("#words-line u")).to_have_count(0)
    expect(page.locator("#tokens")).to_have_text(re.compile(r"^\s*8 of 75 tokens\s*$"))


def test_words_are_weighed_by_keys(browser):
    page = browser().open()
    prompt = page.locator("#prompt textarea")
    prompt.fill(CAT)
    prompt.evaluate("(node) => node.setSelectionRange(3, 3)")
    for _ in range(4):
        prompt.press("Control+ArrowUp")
    assert prompt.input_value() == CAT.replace("cat", "(cat:1.4)")
    for _ in range(5):
        prompt.press("Control+ArrowDown")
    assert prompt.input_value() == CAT.replace("cat", "(cat:0.9)")
    prompt.press("Control+ArrowUp")
    assert prompt.input_value() == CAT


def test_what_does_not_fit_into_the_prompt_is_said(browser):
    page = browser().open()
    page.evaluate(PASTE, ["#prompt textarea", "a cat " * 400, None])
    expect(page.locator("#words-line")).to_contain_text("Only the first 2,000 letters were taken")


@pytest.mark.parametrize(
    ("size", "told"), [((1280, 800), "Paint what shall change then"), ((160, 96), "does not say how")]
)
def test_a_picture_is_pasted_and_a_large_one_warned_of(browser, size, told):
    page = browser().open()
    page.evaluate(PASTE, ["body", "", list(png(Image.new("RGB", size, "teal")))])
    expect(page.locator("#found")).to_contain_text(told)
    expect(page.locator("#open")).to_be_enabled()


def test_the_wheel_zooms_and_painting_goes_where_the_pointer_is(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    expect(page.locator("#stage .picture")).to_have_attribute("src", re.compile("^data"))
    page.locator("#stage .frame").scroll_into_view_if_needed()  # making it opened the settings further down
    frame, canvas = page.locator("#stage .frame").bounding_box(), page.locator("#stage canvas")
    corner = frame["x"] + frame["width"] * 0.75, frame["y"] + frame["height"] * 0.25
    page.mouse.move(*corner)
    page.mouse.wheel(0, -300)
    larger = "(width) => document.querySelector('#stage canvas').getBoundingClientRect().width > 1.5 * width"
    page.wait_for_function(larger, arg=frame["width"])
    box = canvas.bounding_box()
    assert box["x"] + box["width"] > frame["x"] + frame["width"]
    page.mouse.down()
    page.mouse.move(corner[0] + 5, corner[1], steps=2)
    page.mouse.up()
    painted = page.evaluate(
        """() => {
          const canvas = document.querySelector("#stage canvas"), { width, height } = canvas;
          const levels = canvas.getContext("2d").getImageData(0, 0, width, height).data, at = [];
          for (let i = 0; i < width * height; i += 1) {
            if (levels[4 * i + 3] > 127) at.push([(i % width) / width, Math.floor(i / width) / height]);
          }
          return at;
        }"""
    )
    assert np.allclose(np.mean(painted, axis=0), (0.75, 0.25), atol=0.03)
    transform, plain = "(node) => getComputedStyle(node).transform", ("none", "matrix(1, 0, 0, 1, 0, 0)")
    close_up = canvas.evaluate(transform)
    assert close_up not in plain
    page.locator("#count").get_by_label("2").check()
    typed(page, DOG)
    page.locator("#run").click()
    candidates = page.locator("#candidates [data-id]")
    expect(candidates).to_have_count(2)
    for number in "21":
        page.locator("#stage canvas").focus()
        page.keyboard.press(number)
        expect(candidates.nth(int(number) - 1)).to_have_attribute("aria-current", "true")
        assert canvas.evaluate(transform) == close_up
    page.evaluate(PASTE, ["body", "", list(png(Image.new("RGB", (96, 64), "teal")))])
    expect(page.locator("#stage[data-waiting], #stage [data-waiting]")).to_be_visible()
    assert canvas.evaluate(transform) in plain


def test_b_shows_what_was_before_while_it_is_held(browser):
    page = browser().open()
    make(page)
    run(page, DOG, 2)
    page.get_by_role("radio", name="Edit").click()
    expect(page.locator("#stage .before")).not_to_be_visible()
    page.keyboard.down("b")
    expect(page.locator("#stage .before")).to_be_visible()
    page.keyboard.up("b")
    expect(page.locator("#stage .before")).not_to_be_visible()


def test_the_first_run_is_seen_in_its_own_shape(browser):
    page = browser().open()
    make(page, steps=150)
    expect(page.locator("#stage .live")).to_have_attribute("src", re.compile("^data"))
    expect(page.locator("#stage .empty")).not_to_be_visible()
    box = page.locator("#stage .frame").bounding_box()
    assert box["width"] == pytest.approx(box["height"], rel=0.02)
    page.locator("#stop").click()


def test_each_new_picture_has_a_seed_of_its_own_which_is_told(browser):
    page = browser().open()
    make(page)
    expect(page.locator("#truth")).to_contain_text("seed 0")
    page.get_by_label("Random seed").check()
    page.locator("#make").click()
    expect(nodes(page)).to_have_count(2)
    expect(page.locator("#truth")).to_contain_text(re.compile(r"seed [1-9]\d+"))
    page.locator("#reuse").click()
    expect(page.get_by_label("Random seed")).not_to_be_checked()
    seed = page.locator("#seed input").input_value()
    expect(page.locator("#truth")).to_contain_text(f"seed {seed}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_written_can_be_read(browser, scheme):
    page = browser(color_scheme=scheme).open()
    typed(page, "")
    for panel in ("Region", "Extend the picture", "Settings of new pictures", "Open a picture or a saved session"):
        page.get_by_role("button", name=f"{panel} ▼").click()
    page.wait_for_selector("#steps input[type=number]")
    assert low_contrast(page) == []
    assert page.evaluate(CONTRAST, "#prompt textarea::placeholder") >= 4.5  # which axe-core does not measure
    page.locator("#prompt textarea").fill("a spaceship")
    expect(page.locator("#words-line")).to_contain_text("it does not know")
    assert low_contrast(page) == []
    page.locator("#prompt textarea").fill(CAT)
    page.locator("#make").click()
    expect(nodes(page)).to_have_count(1)
    expect(page.locator("#words-line .noun")).to_have_count(2)
    page.locator("#words-line .noun").first.click()
    assert low_contrast(page) == []
    typed(page, "a <lora:nothing:1> cat")
    page.locator("#run").click()
    expect(page.locator("#status .error")).to_be_visible()
    assert low_contrast(page) == []
    typed(page, DOG)
    expect(page.locator("#facts")).to_contain_text("of the picture")
    page.get_by_role("radio", name="2").check()
    page.locator("#run").click()
    expect(page.locator("#candidates [data-id]")).to_have_count(2)
    assert low_contrast(page) == []


def test_on_a_phone_the_buttons_stay_in_sight_and_are_large_enough(browser):
    page = browser(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).open()
    open_region(page)
    make(page)
    run(page, DOG, 2)
    page.get_by_role("radio", name="Edit").click()
    typed(page, CAT)
    expect(page.locator("#facts")).to_contain_text("picture")
    page.get_by_role("button", name="Open a picture or a saved session").click()
    page.evaluate("() => window.scrollTo(0, 0)")
    box = page.locator("#make").bounding_box()
    assert box["y"] + box["height"] <= 844
    small = {
        button.evaluate("(node) => node.outerHTML.slice(0, 120)"): box
        for button in page.locator("#desk button").all()
        if button.is_visible() and min((box := button.bounding_box())["width"], box["height"]) < 43.5
    }
    assert not small


def test_a_dropped_picture_is_shown_and_opened_with_the_words_that_were_asked_for(browser):
    page = browser().open()
    page.evaluate(PASTE, ["body", "", list(png(Image.new("RGB", (128, 128), "teal")))])
    assert (pixels(page, ".photo") == (0, 128, 128)).all()
    for shown in ("#stage .photo", "#stage .open", "#found .waiting"):
        expect(page.locator(shown)).to_be_in_viewport()
    expect(page.locator("#found")).to_contain_text("To edit it by words alone, say as the prompt what it shows.")
    expect(page.locator("#prompt textarea")).to_be_focused()
    page.keyboard.type("a teal wall")
    page.keyboard.press("Control+Enter")
    expect(nodes(page)).to_have_count(1)
    assert (pixels(page, ".picture") == (0, 128, 128)).all()
    expect(page.locator("#history [data-id]")).to_have_attribute("title", re.compile("a teal wall"))
    expect(page.locator("#stage .photo")).to_be_hidden()
    expect(page.locator("#found")).to_have_text("")
    expect(page.locator("#open")).to_be_disabled()


def test_a_picture_is_edited_without_a_description_and_prompts_that_were_run_are_recalled(browser):
    page = browser().open()
    prompt = page.locator("#prompt textarea")
    make(page)
    expect(nodes(page)).to_have_count(1)
    photo = Image.fromarray(pixels(page, ".picture"))
    page.evaluate(PASTE, ["body", "", list(png(photo))])
    expect(page.locator("#found")).to_contain_text("mark a place, and say what shall be there")
    expect(prompt).to_have_value("")  # the words were of the picture on the stage
    page.keyboard.press("Control+Enter")
    expect(nodes(page)).to_have_count(2)
    source = pixels(page, ".picture")
    page.get_by_role("radio", name="Box").click()
    stroke(page, (0.1, 0.5), (0.45, 0.95))
    prompt.fill("a dog")
    expect(page.locator("#facts")).to_contain_text("where you marked")
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(3)
    changed = (pixels(page, ".picture") != source).any(-1)
    side = len(changed)
    assert changed.any() and not changed[: side // 2 - 8].any() and not changed[:, side // 2 :].any()

    prompt.press("ArrowUp")
    expect(prompt).to_have_value(CAT)
    prompt.press("ArrowDown")
    expect(prompt).to_have_value("a dog")
    prompt.fill("a fox")
    prompt.press("ArrowUp")
    expect(prompt).to_have_value("a fox")
    prompt.press("Alt+ArrowUp")
    expect(prompt).to_have_value("a dog")
    page.reload()
    expect(nodes(page)).to_have_count(3)
    prompt.press("Alt+ArrowUp")
    prompt.press("Alt+ArrowUp")
    expect(prompt).to_have_value(CAT)


def test_a_waiting_picture_lies_over_the_current_one_until_something_else_is_asked_for(browser):
    page = browser(viewport={"width": 1280, "height": 900}).open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    photo, picture = page.locator("#stage .photo"), page.locator("#stage .picture")
    page.evaluate(PASTE, ["body", "", list(png(Image.new("RGB", (256, 128), "teal")))])
    expect(photo).to_be_visible()
    expect(picture).to_be_hidden()
    box = photo.bounding_box()
    assert box["width"] / box["height"] == pytest.approx(2, rel=0.02)
    page.locator("#prompt textarea").fill(DOG)
    page.wait_for_timeout(1000)
    expect(page.locator("#facts")).to_have_text("")  # which is of the current one
    nodes(page).first.click()
    expect(photo).to_be_hidden()
    expect(picture).to_be_visible()
    page.locator("#open").click()  # it can still be opened
    expect(nodes(page)).to_have_count(2)
    assert (pixels(page, ".picture") == (0, 128, 128)).all()


def test_a_live_edit_does_not_begin_again_after_stop(browser):
    page = browser().open()
    make(page, steps=60)
    expect(nodes(page)).to_have_count(1)
    page.get_by_label("Live: draw while I type").check()
    page.evaluate(
        """() => {
            window.pressed = [];
            document.addEventListener("click", ({ target }) => {
                const button = target.closest("#draw, #run, #stop");
                if (button) pressed.push(button.id);
            }, true);
        }"""
    )
    page.evaluate(  # at once, so that nothing is drawn before it
        """(words) => {
            const text = document.querySelector("#prompt textarea");
            text.value = words;
            text.dispatchEvent(new Event("input", { bubbles: true }));
            document.querySelector("#run").click();
        }""",
        DOG,
    )
    page.locator("#stop").click()
    expect(page.locator("#status")).to_contain_text("Stopped")
    page.wait_for_timeout(1000)
    assert page.evaluate("pressed") == ["run", "stop"], "nothing is drawn after it"
    expect(nodes(page)).to_have_count(1)


def test_the_history_is_seen_beside_the_picture(browser):
    page = browser(viewport={"width": 1280, "height": 900}).open()
    typed(page, CAT)
    page.locator("#make").click()
    expect(nodes(page)).to_have_count(1)
    expect(nodes(page).first).to_be_in_viewport(ratio=1)


def test_a_number_out_of_range_is_said_in_one_line(browser):
    watched = browser()
    page = watched.open()
    open_region(page)
    make(page)
    typed(page, DOG)
    expect(page.locator("#facts")).to_contain_text("picture")
    page.locator("#grow input[type=number]").fill("99")
    said = page.locator("#facts .said")
    expect(said).to_have_text("Grow or shrink must be from -8 to 8, got 99.")  # a quarter of 32 cells
    page.locator("#grow input[type=number]").blur()
    expect(said).to_have_count(0)
    watched.bad[:] = [line for line in watched.bad if "400" not in line]  # Chromium's own of the refused call


def test_a_reload_during_a_run_throws_nothing_away(browser, site, monkeypatch):
    """The run waits at its first step until the page is there again."""
    gate, watched = Event(), browser()
    page = watched.open()
    monkeypatch.setattr(site.state.worker, "run_brief_jobs", lambda: gate.wait(120))
    make(page)
    expect(page.locator("#status")).to_contain_text("step ")
    page.reload()
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("step ")
    gate.set()
    expect(nodes(page)).to_have_count(1)
    expect(page.locator("#stage .picture")).to_have_attribute("alt", CAT)
    expect(page.locator("#make")).to_be_enabled()
    expect(page.locator("#prompt textarea")).to_have_value(CAT)
    expect(page.locator("#words-line .noun")).to_have_text(["cat", "cake"])  # as after a run of this page
    watched.bad[:] = [line for line in watched.bad if not line.startswith("console: ")]  # gradio's of its broken stream


def test_who_waits_is_told_how_many_come_before_and_can_stop(browser, site):
    page = browser(viewport={"width": 1280, "height": 900}).open()
    typed(page, CAT)
    ahead = [Program(site.url, uuid.uuid4().hex) for _ in range(2)]
    runs = [one.events("generate", one.send("generate", CAT, 0, 150, 4.0)) for one in ahead]
    for events in runs:
        next(events)
    page.locator("#make").click()
    expect(page.locator("#status")).to_have_text("Waiting: 2 before you ...")
    for shown in (page.locator("#status p"), page.locator("#stop")):
        expect(shown).to_be_in_viewport()
    page.locator("#stop").click()
    expect(page.locator("#status")).to_have_text("Stopped. Nothing was changed.")
    expect(page.locator("#make")).to_be_enabled()
    assert [next(events).kind for events in runs] == ["generating"] * 2, "other people's runs go on"
    for events in runs:
        events.close()
    settle(site)
    expect(nodes(page)).to_have_count(0)


def test_an_empty_tab_takes_no_sessions_place_and_earlier_ones_are_listed(browser):
    watched = browser()
    first = watched.open()
    make(first)
    expect(nodes(first)).to_have_count(1)
    second = watched.open()
    expect(nodes(second)).to_have_count(0)
    for page in (second, first):
        page.close()
    third = watched.open()  # the last session with pictures, which no tab has open
    expect(nodes(third)).to_have_count(1)
    fourth = watched.open()
    make(fourth, DOG)
    expect(nodes(fourth)).to_have_count(1)
    fourth.get_by_role("button", name="Open a picture or a saved session").click()
    listed = fourth.locator("#earlier button")
    expect(listed).to_have_text([f"{CAT} (1 picture)"])
    listed.click()
    expect(listed).to_have_text(["It is open in another tab."])
    third.close()
    first_node = fourth.locator("#history [data-id]")
    for _ in range(80):  # until the server has heard that the tab is gone
        if listed.count():
            listed.click()
        if CAT in str(first_node.get_attribute("title")):
            break
        fourth.wait_for_timeout(250)
    expect(first_node).to_have_attribute("title", re.compile(CAT))
