"""Pictures of the page: `python -m tests.support.app.screenshots` writes docs/app-*.png.

`python -m tests.support.app.screenshots --all FOLDER` writes many more, of a page that offers all it can, to look at.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import expect, sync_playwright

from fisedit import Editor
from fisedit.adapters.row_column.checkpoints import save_adapter
from tests.support.adapters import lively
from tests.support.app.models import derived
from tests.support.app.site import CHROMIUM, FLAGS, served
from tests.support.lora import Lora

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DOCS = Path(__file__).resolve().parents[3] / "docs"
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
STORY = ("a cat and a cake on a beach", "a dog and a cake on a beach", "a dog and a castle on a beach")
LORAS = ("ink", "oil-on-canvas", "a-very-long-name-of-a-style-v2-final-fp16")
LONG = ", ".join([STORY[0], *["golden hour, soft light, film grain, highly detailed, a long walk in the sun"] * 4])


def ready(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_function("sessionStorage.getItem('fisedit-session')")


def tell(page: Page, url: str, folder: Path) -> None:
    """A picture and two edits, with a third one typed."""
    ready(page, url)
    for number, prompt in enumerate(STORY):
        page.locator("#prompt textarea").fill(prompt)
        if number:
            expect(page.locator("#facts")).to_contain_text("of the picture")
        if number == 1:
            shoot(page, folder / "app-region.png")
        page.locator("#run" if number else "#make").click()
        expect(page.locator("#history [data-id]")).to_have_count(number + 1)
        page.wait_for_timeout(500)


def shoot(page: Page, path: Path) -> None:
    page.wait_for_timeout(500)
    page.evaluate("window.scrollTo({ top: 0, behavior: 'instant' })")
    page.screenshot(path=path, full_page=True)


def documents(browser: Browser, folder: Path) -> None:
    """What docs/app.md shows."""
    with served() as site:
        page = browser.new_context(viewport=DESK, color_scheme="light").new_page()
        tell(page, site.url, folder)
        shoot(page, folder / "app-after.png")
        page.emulate_media(color_scheme="dark")
        page.goto(f"{site.url}?__theme=dark")
        expect(page.locator("#history [data-id]")).to_have_count(len(STORY))
        shoot(page, folder / "app-dark.png")
        page.set_viewport_size(PHONE)
        page.goto(f"{site.url}?__theme=light")
        expect(page.locator("#history [data-id]")).to_have_count(len(STORY))
        shoot(page, folder / "app-phone.png")


def everything(browser: Browser, folder: Path) -> None:
    """A page that offers models, LoRAs and an adapter, at both widths, light and dark: empty, chosen, made, wrong."""
    with tempfile.TemporaryDirectory() as name:
        place, pipe = Path(name), Editor.from_pretrained("demo").pipe
        save_adapter(lively(pipe.unet, "v3"), place / "adapter")
        loras = [Lora(pipe, seed).kohya(place / f"{label}.safetensors") for seed, label in enumerate(LORAS)]
        models = ["demo", derived(place / "paper-cut"), derived(place / "a-model-with-a-long-name-pruned-emaonly")]
        with served(*models, loras=loras, adapters=[place / "adapter"], folder=place / "sessions") as site:
            for wide, size in (("desk", DESK), ("phone", PHONE)):
                for theme in ("light", "dark"):
                    page = browser.new_context(viewport=size, color_scheme=theme).new_page()
                    _offered(page, f"{site.url}?__theme={theme}", folder, f"{wide}-{theme}")
                    page.context.close()


def _offered(page: Page, url: str, folder: Path, name: str) -> None:
    ready(page, url)
    shoot(page, folder / f"{name}-empty.png")
    page.locator("#prompt textarea").fill(STORY[0])
    for panel in (
        "Settings of new pictures",
        "Reference picture",
        "Region",
        "Open a picture or a saved session",
    ):
        page.get_by_role("button", name=panel).click()
    for box, options in (("model", ["paper-cut"]), ("loras", LORAS)):
        for option in options:
            page.locator(f"#{box} input").click()
            page.get_by_role("option", name=option).click()
    page.locator("#prompt textarea").click()
    shoot(page, folder / f"{name}-chosen.png")
    page.locator("#make").click()
    expect(page.locator("#history [data-id]")).to_have_count(1)
    page.locator("#prompt textarea").fill(LONG)
    expect(page.locator("#facts")).not_to_be_empty()
    shoot(page, folder / f"{name}-long.png")
    page.locator("#run").click()
    expect(page.locator("#history [data-id]")).to_have_count(2)
    shoot(page, folder / f"{name}-made.png")


def main() -> None:
    """Serve the app, and look at it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    expect.set_options(timeout=60_000)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        if asked.all is None:
            documents(browser, DOCS)
        else:
            asked.all.mkdir(parents=True, exist_ok=True)
            everything(browser, asked.all)
        browser.close()


if __name__ == "__main__":
    main()
