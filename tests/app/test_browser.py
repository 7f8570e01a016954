"""The page in a real browser, on the demo model. Whatever else a test looks at, no page may reach another machine or
complain in its console: `conftest` sees to that."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect
from scipy.ndimage import distance_transform_edt

from fisedit.metadata import image_metadata, provenance
from tests.support.app.page import CASTLE, CAT, DOG, make, nodes, open_region, pixels, run, stroke
from tests.support.app.program import settle

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route


def here(page: Page):
    return page.locator("#history [aria-current=true]")


def test_from_words_to_a_file(browser, tmp_path):
    page = browser().open()
    expect(page.locator("#stage .empty")).to_be_visible()
    page.locator("#prompt textarea").fill("a spaceship")
    expect(page.locator("#words-line")).to_contain_text("it does not know 'spaceship'")
    page.locator("#examples button").first.click()
    expect(page.locator("#prompt textarea")).to_have_value(CAT)
    expect(page.locator("#words-line")).to_have_text("")
    make(page)
    expect(nodes(page)).to_have_count(1)
    source = pixels(page, ".picture")

    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#words-line del")).to_have_text("cat")
    expect(page.locator("#words-line ins")).to_have_text("dog")
    expect(page.locator("#facts")).to_contain_text(
        re.compile(r"\d+% of the picture.*confidence \d+%.*times less arithmetic")
    )
    region = pixels(page, ".region", "RGBA")[..., 3] > 0
    assert 0.01 < region.mean() < 0.9

    page.locator("#run").click()
    expect(nodes(page)).to_have_count(2)
    expect(page.locator("#truth")).to_contain_text("outside the mask: identical")
    expect(page.locator("#truth")).to_contain_text(
        re.compile(r"[\d.]+ s.*the new picture took [\d.]+ s.*times less arithmetic")
    )
    edited, mask = pixels(page, ".picture"), pixels(page, ".mask", "RGBA")[..., 3] > 0
    assert (edited != source).any() and (edited[~mask] == source[~mask]).all()
    assert (pixels(page, ".before") == source).all()

    column, split = round(border(page) * mask.shape[1]), page.locator("#stage .split")
    assert 0.4 < mask[:, :column].sum() / mask.sum() < 0.6  # the change lies on both sides
    assert float(split.input_value()) == pytest.approx(border(page) * 100, abs=0.5)
    split.focus()
    split.press("Home")
    assert border(page) == 0
    split.press("End")
    assert border(page) == 1

    nodes(page).first.click()
    expect(here(page)).to_have_attribute("data-id", "0")
    expect(page.locator("#prompt textarea")).to_have_value(CAT)
    run(page, CASTLE, 3)
    branch = pixels(page, ".picture")
    assert (branch != edited).any()
    rows = [node.evaluate("node => node.style.gridRow") for node in nodes(page).all()]
    assert len(set(rows)) == 2

    page.locator("#undo").click()
    expect(here(page)).to_have_attribute("data-id", "0")
    assert (pixels(page, ".picture") == source).all()
    page.locator("#redo").click()
    expect(here(page)).to_have_attribute("data-id", "2")

    with page.expect_download() as told:
        page.locator("#download").click()
    told.value.save_as(tmp_path / "castle.png")
    with Image.open(tmp_path / "castle.png") as image:
        assert (np.asarray(image.convert("RGB")) == branch).all()
        assert provenance.parse_origin(image_metadata.read_metadata(image)).prompt == CASTLE


@pytest.mark.slow
def test_live(browser):
    """A letter draws the edit over the picture, the next one another; Run keeps what is seen, with no further run."""
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    source = pixels(page, ".picture")
    page.get_by_label("Live: draw while I type").check()
    page.locator("#prompt textarea").fill(CASTLE)
    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#status")).to_contain_text("Run keeps it")
    drawn = pixels(page, ".live", "RGBA")
    inside = drawn[..., 3] > 0
    assert inside.any() and not inside.all() and (drawn[inside][:, :3] != source[inside]).any()
    expect(nodes(page)).to_have_count(1)
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(2)
    kept = pixels(page, ".picture")
    assert (kept[inside] == drawn[inside][:, :3]).all() and (kept[~inside] == source[~inside]).all()


@pytest.mark.slow
def test_painting(browser):
    page = browser().open()
    open_region(page)
    make(page)
    expect(nodes(page)).to_have_count(1)
    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#facts")).to_contain_text("confidence")
    page.get_by_label("Only the painted region").check()

    stroke(page, (0.2, 0.2), (0.4, 0.2))
    expect(page.locator("#facts")).to_contain_text("where you marked")
    region = pixels(page, ".region", "RGBA")[..., 3] > 0
    side = len(region)
    assert region[side // 5, side * 3 // 10] and not region[side // 2 :].any() and not region[:, side * 3 // 5 :].any()
    assert painted(page, 0.3, 0.2) == [255, 64, 96, 255] and painted(page, 0.7, 0.7)[3] == 0

    page.get_by_role("radio", name="Protect").click()
    stroke(page, (0.2, 0.2), (0.26, 0.2))
    assert painted(page, 0.2, 0.2) == [48, 112, 255, 255] and painted(page, 0.36, 0.2) == [255, 64, 96, 255]
    page.get_by_role("radio", name="Unmark").click()
    stroke(page, (0.36, 0.1), (0.36, 0.3))
    assert painted(page, 0.36, 0.2)[3] == 0
    page.locator("#stage [data-do=undo]").click()
    assert painted(page, 0.36, 0.2) == [255, 64, 96, 255]

    page.locator("#run").click()
    expect(nodes(page)).to_have_count(2)
    mask = pixels(page, ".mask", "RGBA")[..., 3] > 0
    assert mask.any() and not (mask & ~region).any() and not mask[side // 5, side // 5]
    assert painted(page, 0.36, 0.2)[3] == 0  # another picture: the strokes were of the last


@pytest.mark.slow
def test_what_is_painted_with_the_same_words_is_painted_anew(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    source = pixels(page, ".picture")
    stroke(page, (0.3, 0.3), (0.6, 0.3))
    expect(page.locator("#facts")).to_contain_text("where you marked")
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(2)
    mask = pixels(page, ".mask", "RGBA")[..., 3] > 0
    changed = (pixels(page, ".picture") != source).any(-1)
    assert changed[mask].any() and not changed[~mask].any()
    page.locator("#vary").click()  # in the same place, of the same picture
    candidates = page.locator("#candidates [data-id]")
    expect(candidates).to_have_count(4)
    expect(page.locator("#run")).to_be_visible()
    again = (pixels(page, ".picture") != source).any(-1)
    assert again[mask].any() and not again[~mask].any()
    first = pixels(page, ".picture")
    page.locator("#stage canvas").focus()
    page.keyboard.press("3")
    expect(candidates.nth(2)).to_have_attribute("aria-current", "true")
    third = pixels(page, ".picture")
    assert (third != first).any() and np.array_equal(third[~mask], source[~mask])
    expect(nodes(page)).to_have_count(2)
    page.reload()
    expect(candidates).to_have_count(4)
    page.locator("#keep").click()
    expect(nodes(page)).to_have_count(3)
    expect(here(page)).to_have_attribute("data-id", "4")
    expect(page.locator("#keep")).to_be_hidden()
    assert np.array_equal(pixels(page, ".picture"), third)


@pytest.mark.slow
def test_painting_by_keys(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#facts")).to_contain_text("confidence")

    canvas, keys = page.locator("#stage canvas"), page.locator("#stage .keys")
    page.get_by_role("radio", name="Brush").focus()
    expect(keys).to_have_css("opacity", "0")
    while not canvas.evaluate("canvas => canvas === document.activeElement"):
        page.keyboard.press("Tab")
    expect(keys).to_have_css("opacity", "1")
    expect(page.locator("#stage .ring")).to_be_visible()

    press(page, "Shift+ArrowLeft", 5)
    press(page, "Shift+ArrowUp", 5)
    expect(page.locator("#stage .where")).to_have_text("· at 19 %, 19 %")
    page.keyboard.down(" ")
    press(page, "ArrowRight", 12)
    page.keyboard.up(" ")
    press(page, "ArrowDown", 16)
    expect(page.locator("#facts")).to_contain_text("of the picture")
    assert painted(page, 0.19, 0.19) == painted(page, 0.37, 0.19) == [255, 64, 96, 255]
    assert painted(page, 0.37, 0.3)[3] == painted(page, 0.6, 0.19)[3] == painted(page, 0.5, 0.5)[3] == 0

    press(page, "]", 5)
    expect(page.get_by_label("Brush size")).to_have_value("20")
    press(page, "Enter")
    press(page, "ArrowDown", 16)
    press(page, "Enter")
    press(page, "ArrowDown", 16)
    assert (
        painted(page, 0.3, 0.55) == painted(page, 0.45, 0.68) == [255, 64, 96, 255] and painted(page, 0.37, 0.9)[3] == 0
    )
    press(page, "[", 7)
    expect(page.get_by_label("Brush size")).to_have_value("6")

    press(page, "Control+z")
    assert painted(page, 0.37, 0.55)[3] == 0 and painted(page, 0.37, 0.19) == [255, 64, 96, 255]
    before = pixels(page, ".region", "RGBA")[..., 3] > 0
    side = len(before)
    assert before[side * 3 // 16, side * 5 // 16]
    press(page, "Control+Enter")
    expect(nodes(page)).to_have_count(2)
    mask = pixels(page, ".mask", "RGBA")[..., 3] > 0
    assert mask[side * 3 // 16, side * 5 // 16]


@pytest.mark.slow
def test_a_box_is_erased_and_undone(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    source = pixels(page, ".picture")
    expect(page.locator("#erase")).to_be_disabled()  # nothing is marked
    page.get_by_role("radio", name="Box").click()
    stroke(page, (0.51, 0.49), (0.26, 0.24))  # from any corner
    assert painted(page, 0.28, 0.26) == painted(page, 0.49, 0.47) == [255, 64, 96, 255]
    assert painted(page, 0.24, 0.3)[3] == painted(page, 0.53, 0.3)[3] == 0
    page.locator("#erase").click()
    expect(nodes(page)).to_have_count(2)
    mask = pixels(page, ".mask", "RGBA")[..., 3] > 0
    assert 64 / 1024 <= mask.mean() < 90 / 1024  # with its smooth outline
    changed = (pixels(page, ".picture") != source).any(-1)
    assert changed[mask].any() and not changed[~mask].any()
    expect(page.locator("#prompt textarea")).to_have_value(CAT)
    page.locator("#undo").click()
    expect(here(page)).to_have_attribute("data-id", "0")
    assert np.array_equal(pixels(page, ".picture"), source)


@pytest.mark.slow
def test_a_box_by_keys_with_a_soft_edge(browser):
    page = browser().open()
    open_region(page)
    make(page)
    expect(nodes(page)).to_have_count(1)
    page.get_by_role("radio", name="Brush").focus()
    press(page, "ArrowRight")
    expect(page.get_by_role("radio", name="Box")).to_be_focused()
    canvas = page.locator("#stage canvas")
    while not canvas.evaluate("canvas => canvas === document.activeElement"):
        page.keyboard.press("Tab")
    press(page, "Enter")
    press(page, "Shift+ArrowRight", 4)
    press(page, "Shift+ArrowDown", 4)
    press(page, "Enter")
    assert painted(page, 0.52, 0.52) == painted(page, 0.73, 0.73) == [255, 64, 96, 255]
    assert painted(page, 0.48, 0.6)[3] == painted(page, 0.77, 0.6)[3] == 0
    expect(page.locator("#facts")).to_contain_text("where you marked")
    hard, seen = pixels(page, ".region", "RGBA")[..., 3], source_of(page)
    page.locator("#feather input[type=number]").fill("1")
    page.locator("#feather input[type=number]").blur()
    page.wait_for_function("before => document.querySelector('#stage .region').src !== before", arg=seen)
    expect(page.locator("#facts")).to_contain_text("where you marked")
    soft = pixels(page, ".region", "RGBA")[..., 3]
    assert ((soft > 0) <= (hard > 0)).all() and (soft != hard).any()
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(2)


@pytest.mark.slow
def test_a_thing_is_picked_and_erased(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    source = pixels(page, ".picture")
    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#facts")).to_contain_text("confidence")
    row, column = middle_of(pixels(page, ".region", "RGBA")[..., 3] > 0)
    page.locator("#prompt textarea").fill(CAT)
    page.get_by_role("radio", name="Pick", exact=True).click()
    stroke(page, (column, row))
    assert painted(page, column, row) == [0, 176, 80, 255]
    expect(page.locator("#facts")).to_contain_text("where you marked")
    expect(page.locator("#facts")).to_contain_text("Erase leaves what lies outside")
    picked = pixels(page, ".region", "RGBA")[..., 3] > 0
    assert picked[int(row * len(picked)), int(column * len(picked))] and 0.01 < picked.mean() < 0.5
    page.get_by_role("radio", name="Unpick").click()
    stroke(page, (0.03, 0.97))
    assert painted(page, 0.03, 0.97) == [255, 170, 0, 255]
    expect(page.locator("#erase")).to_be_enabled()
    page.locator("#erase").click()
    expect(nodes(page)).to_have_count(2)
    mask = pixels(page, ".mask", "RGBA")[..., 3] > 0
    changed = (pixels(page, ".picture") != source).any(-1)
    assert mask[int(row * len(mask)), int(column * len(mask))] and changed[mask].any() and not changed[~mask].any()
    expect(page.locator("#prompt textarea")).to_have_value("a cake on a beach")
    expect(page.locator("#words-line")).to_have_text("a cake on a beach")
    page.locator("#undo").click()
    expect(page.locator("#prompt textarea")).to_have_value(CAT)


@pytest.mark.slow
def test_one_stroke_erases_and_a_click_on_a_noun_changes_it(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    source, prompt, line = pixels(page, ".picture"), page.locator("#prompt textarea"), page.locator("#words-line")
    page.get_by_role("radio", name="Erase").click()
    stroke(page, (0.3, 0.3), (0.5, 0.3))
    expect(nodes(page)).to_have_count(2)
    mask = pixels(page, ".mask", "RGBA")[..., 3] > 0
    changed = (pixels(page, ".picture") != source).any(-1)
    assert changed[mask].any() and not changed[~mask].any() and mask.mean() < 0.3
    page.locator("#undo").click()
    expect(here(page)).to_have_attribute("data-id", "0")
    assert np.array_equal(pixels(page, ".picture"), source)

    expect(line.locator(".noun")).to_have_text(["cat", "cake"])
    line.get_by_role("button", name="cat").click()
    page.get_by_role("menuitem", name="Swap").click()
    page.keyboard.type("dog")
    expect(prompt).to_have_value(DOG)
    expect(page.locator("#facts")).to_contain_text("confidence")
    page.get_by_role("button", name="Reset words").click()
    line.get_by_role("button", name="cat").click()
    page.locator("#look").dispatch_event("click")  # as the page's script does a moment after the words were reset
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(prompt).to_have_value("a cake on a beach")
    page.get_by_role("button", name="Reset words").click()
    menu = page.get_by_role("menu")
    for leave in (lambda: page.locator("#header").click(), lambda: prompt.fill(DOG)):
        line.get_by_role("button", name="cake").click()
        expect(menu).to_be_visible()
        leave()
        expect(menu).not_to_be_visible()
    page.get_by_role("button", name="Reset words").click()
    line.get_by_role("button", name="cake").click()
    page.get_by_role("menuitem", name="Recolour: orange").click()
    expect(prompt).to_have_value("a cat and an orange cake on a beach")
    expect(line.locator("ins")).to_have_text("an orange")


@pytest.mark.slow
def test_a_thing_is_picked_by_keys_and_by_touch(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    page.get_by_role("radio", name="Pick", exact=True).click()
    page.locator("#stage canvas").focus()
    press(page, "ArrowLeft")
    press(page, "Enter")
    assert painted(page, 0.5 - 1 / 64, 0.5) == [0, 176, 80, 255]
    expect(page.locator("#facts")).to_contain_text(re.compile("where you marked|whole picture"))
    page = browser(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    page.get_by_role("radio", name="Pick", exact=True).tap()
    swipe(page, (0.4, 0.4))
    assert painted(page, 0.4, 0.4) == [0, 176, 80, 255]
    expect(page.locator("#facts")).to_contain_text(re.compile("where you marked|whole picture"))


@pytest.mark.slow
def test_the_picture_is_extended(browser):
    page = browser().open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    source = pixels(page, ".picture")
    page.get_by_role("button", name="Extend the picture ▼").click()
    page.get_by_label("Right").fill("32")
    page.get_by_label("Right").blur()
    page.locator("#extend").click()
    expect(here(page)).to_have_attribute("data-id", "2")
    expect(page.locator("#run")).to_be_visible()
    expect(nodes(page)).to_have_count(2)  # and none of the canvas
    expect(here(page)).to_contain_text("larger")
    larger, side = pixels(page, ".picture"), len(source)
    assert larger.shape == (side, side + 32, 3) and np.array_equal(larger[:, : side - 8], source[:, :-8])


@pytest.mark.slow
def test_the_part_of_a_photograph_is_shown_before_it_is_opened(browser, tmp_path):
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (960, 1280, 3), np.uint8)).save(tmp_path / "photo.png")
    page = browser().open()
    page.locator("#open-panel > button").click()
    page.locator("#open-panel input[type=file]").set_input_files(tmp_path / "photo.png")
    page.locator("#open").click()
    expect(nodes(page)).to_have_count(1)
    page.get_by_role("radio", name="Box").click()
    stroke(page, (0.1, 0.1), (0.15, 0.15))
    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#facts")).to_contain_text("Run first opens this part of the picture")
    dark = pixels(page, ".region", "RGBA")[..., 3]
    assert dark.shape == (960, 1280) and not dark[100:140, 130:190].any() and (dark[500:, 700:] == 120).all()


@pytest.mark.slow
def test_painting_and_erasing_by_touch(browser):
    page = browser(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    source = pixels(page, ".picture")
    page.get_by_role("radio", name="Box").tap()
    swipe(page, (0.3, 0.3), (0.6, 0.6))
    assert painted(page, 0.45, 0.45) == [255, 64, 96, 255]
    page.locator("#erase").tap()
    expect(nodes(page)).to_have_count(2)
    mask = pixels(page, ".mask", "RGBA")[..., 3] > 0
    changed = (pixels(page, ".picture") != source).any(-1)
    assert changed[mask].any() and not changed[~mask].any()


def middle_of(inside: np.ndarray) -> tuple[float, float]:
    """Row and column of the pixel that is deepest inside a mask, as shares of the sides."""
    depth = distance_transform_edt(inside)
    row, column = np.unravel_index(int(depth.argmax()), depth.shape)
    return (row + 0.5) / len(inside), (column + 0.5) / inside.shape[1]


def source_of(page: Page) -> str:
    return page.locator("#stage .region").get_attribute("src") or ""


def swipe(page: Page, *points: tuple[float, float]) -> None:
    """Draws on the picture with a finger; points are shares of its width and height."""
    canvas, touch = page.locator("#stage canvas"), page.context.new_cdp_session(page)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    for i, (x, y) in enumerate([*points, points[-1]]):  # it rests before it leaves: a tap after a fling only stops that
        place = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
        touch.send("Input.dispatchTouchEvent", {"type": "touchMove" if i else "touchStart", "touchPoints": [place]})
        page.wait_for_timeout(150)
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@pytest.mark.slow
def test_stop(browser, site, steps):
    page = browser().open()
    make(page, steps=150)
    expect(page.locator("#status")).to_contain_text(re.compile(r"step \d+ of 150, "))
    page.locator("#stop").click()
    expect(page.locator("#status")).to_contain_text("Stopped")
    page.locator("#prompt textarea").fill(f"{CAT} zebra")  # what is typed next leaves it there
    expect(page.locator("#words-line")).to_contain_text("zebra")
    expect(page.locator("#status")).to_contain_text("Stopped")
    assert steps[steps.index("stop") :].count("step") <= 1 and steps.count("step") < 150
    expect(nodes(page)).to_have_count(0)
    expect(page.locator("#make")).to_be_enabled()


@pytest.mark.slow
def test_a_reload_keeps_the_session_and_others_do_not_see_it(browser):
    mine, other = browser(), browser()
    page = mine.open()
    make(page)
    expect(nodes(page)).to_have_count(1)
    picture = pixels(page, ".picture")
    page.reload()
    expect(nodes(page)).to_have_count(1)
    assert (pixels(page, ".picture") == picture).all()
    run(page, DOG, 2)

    page = other.open()
    expect(page.locator("#stage .empty")).to_be_visible()
    expect(nodes(page)).to_have_count(0)
    page.locator("#prompt textarea").fill(DOG)
    expect(page.locator("#words-line del")).to_have_count(0)


@pytest.mark.slow
def test_a_run_ends_though_its_page_is_left(browser, site, steps):
    mine = browser()
    page = mine.open()
    make(page, steps=60)
    expect(page.locator("#status")).to_contain_text(re.compile(r"step \d+ of 60, "))
    page.close()
    settle(site)
    assert "stop" not in steps and steps.count("step") >= 60
    expect(nodes(mine.open())).to_have_count(1)


@pytest.mark.slow
def test_a_run_whose_stream_closed_as_it_was_asked_for(browser):
    """What gradio's page does where a stream's end and the answer to a request cross: it waits for nobody."""
    page, closed = browser().open(), []

    def close_once(route: Route) -> None:
        if closed:
            route.continue_()
            return
        closed.append(route.request.url)
        route.fulfill(content_type="text/event-stream", body='data: {"msg": "close_stream"}\n\n')

    page.route("**/gradio_api/queue/data*", close_once)
    make(page)
    expect(nodes(page)).to_have_count(1)
    assert closed
    run(page, DOG, 2)
    expect(page.locator("#truth")).to_contain_text("outside the mask: identical")


@pytest.mark.slow
def test_words_of_users_are_words(browser):
    page = browser().open()
    shouted: list[str] = []
    page.on("dialog", lambda dialog: (shouted.append(dialog.message), dialog.dismiss()))
    bad = 'a cat <img src=x onerror="alert(1)"><script>alert(2)</script> \x1b[31m & "a cake"'
    make(page, bad)
    expect(nodes(page)).to_have_count(1)
    expect(nodes(page).first).to_have_attribute("title", re.compile(re.escape('<img src=x onerror="alert(1)">')))
    page.locator("#prompt textarea").fill(bad.replace("cat", "<b id=bold>dog</b>"))
    expect(page.locator("#words-line")).to_contain_text("<b id=bold>dog</b>")
    assert page.locator("#bold, img[src=x]").count() == 0 and not shouted


def border(page: Page) -> float:
    """Where before and after meet, as a share of the picture's width."""
    at = page.locator("#stage .frame").evaluate("frame => getComputedStyle(frame).getPropertyValue('--at')")
    return float(at.removesuffix("%")) / 100


def press(page: Page, key: str, times: int = 1) -> None:
    for _ in range(times):
        page.keyboard.press(key)


def painted(page: Page, x: float, y: float) -> list[int]:
    """Red, green, blue, alpha of the strokes at a place."""
    look = "(c, [x, y]) => [...c.getContext('2d').getImageData(x * c.width, y * c.height, 1, 1).data]"
    return page.locator("#stage canvas").evaluate(look, [x, y])
