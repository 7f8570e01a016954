"""What a person does on the app's page, and what the page shows."""

from __future__ import annotations

import base64
import re
from importlib.resources import files
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

CAT, DOG, CASTLE = "a cat and a cake on a beach", "a dog and a cake on a beach", "a cat and a castle on a beach"
STEPS = 5


def make(page: Page, prompt: str = CAT, steps: int = STEPS) -> None:
    """Types a prompt, and makes a picture of it in a few steps."""
    page.locator("#prompt textarea").fill(prompt)
    page.get_by_text("Settings of new pictures").click()
    page.get_by_label("Random seed").uncheck()
    number, slider = (page.locator(f"#steps input[type={kind}]") for kind in ("number", "range"))
    for _ in range(50):  # the panel draws itself when it is opened, and may lose what is typed meanwhile
        number.fill(str(steps))
        number.blur()
        page.wait_for_timeout(200)
        if slider.input_value() == str(steps):
            break
    expect(slider).to_have_value(str(steps))
    page.locator("#make").click()


def open_region(page: Page) -> None:
    """Opens the region's panel. Before anything is made: it may lose what is typed while it draws what was made."""
    page.get_by_role("button", name="Region ▼").click()


def run(page: Page, prompt: str, pictures: int) -> None:
    """Changes the prompt, waits for the region, runs the edit."""
    page.locator("#prompt textarea").fill(prompt)
    expect(page.locator("#facts")).to_contain_text("of the picture")
    page.locator("#run").click()
    expect(nodes(page)).to_have_count(pictures)
    expect(page.locator("#run")).to_be_visible()


def nodes(page: Page):
    return page.locator("#history [data-id]")


def pixels(page: Page, selector: str, mode: str = "RGB") -> np.ndarray:
    """A picture on the stage, as the page shows it."""
    image = page.locator(f"#stage {selector}")
    expect(image).to_have_attribute("src", re.compile("^data:image/png"))
    data = (image.get_attribute("src") or "").partition(",")[2]
    return np.asarray(Image.open(BytesIO(base64.b64decode(data))).convert(mode))


def still(page: Page) -> None:
    """Wait until no colour of a page changes any more."""
    page.evaluate("() => Promise.allSettled(document.getAnimations().map((one) => one.finished))")


def low_contrast(page: Page) -> list[str]:
    """Selectors of texts whose contrast is below that of WCAG 2's level AA, as axe-core measures it."""
    if not page.evaluate("() => Boolean(window.axe)"):
        page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = """async () => {
      const { violations } = await axe.run(document, { runOnly: ["color-contrast"], resultTypes: ["violations"] });
      return violations.flatMap(({ nodes }) => nodes.map(({ target, any }) => {
        const { fgColor, bgColor, contrastRatio } = any[0].data;
        return `${target.join(" ")}: ${fgColor} on ${bgColor} is ${contrastRatio}`;
      }));
    }"""
    still(page)
    told: list[str] = page.evaluate(found)
    return told


def stroke(page: Page, *points: tuple[float, float]) -> None:
    """Draws on the picture with the mouse; points are shares of its width and height."""
    page.locator("#stage canvas").scroll_into_view_if_needed()
    box = page.locator("#stage canvas").bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places:
        page.mouse.move(*place, steps=5)
    page.mouse.up()
