"""Pictures of the page for the documents: `python -m tests.app.screenshots` writes docs/app-*.png."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import expect, sync_playwright

from tests.app.conftest import CHROMIUM, FLAGS, served

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = Path(__file__).resolve().parents[2] / "docs"
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
STORY = ("a cat and a cake on a beach", "a dog and a cake on a beach", "a dog and a castle on a beach")


def tell(page: Page, url: str) -> None:
    """A picture and two edits, with a third one typed."""
    page.goto(url)
    page.wait_for_function("sessionStorage.getItem('fisedit-session')")
    for number, prompt in enumerate(STORY):
        page.locator("#prompt textarea").fill(prompt)
        if number:
            expect(page.locator("#facts")).to_contain_text("of the picture")
        if number == 1:
            shoot(page, "region")
        page.locator("#run" if number else "#make").click()
        expect(page.locator("#history [data-id]")).to_have_count(number + 1)
        page.wait_for_timeout(500)


def shoot(page: Page, name: str) -> None:
    page.wait_for_timeout(500)
    page.evaluate("window.scrollTo({ top: 0, behavior: 'instant' })")
    page.screenshot(path=DOCS / f"app-{name}.png", full_page=True)


def main() -> None:
    """Serve the app on the demo model, and look at it."""
    expect.set_options(timeout=60_000)
    with served() as site, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_context(viewport=DESK, color_scheme="light").new_page()
        tell(page, site.url)
        shoot(page, "after")
        page.emulate_media(color_scheme="dark")
        page.goto(f"{site.url}?__theme=dark")
        expect(page.locator("#history [data-id]")).to_have_count(len(STORY))
        shoot(page, "dark")
        page.set_viewport_size(PHONE)
        page.goto(f"{site.url}?__theme=light")
        expect(page.locator("#history [data-id]")).to_have_count(len(STORY))
        shoot(page, "phone")
        browser.close()


if __name__ == "__main__":
    main()
