"""What a person at the page waits for, in Chromium: `python -m tests.support.app.waits --rounds 7`.

The page's first load, once the server is up; the region, from the last letter typed; a new picture, and an edit of it
by words, from the click until it lies in the history. With --live the LoRA demo-fast is chosen, and the edit is drawn
while one types: from the last letter to the region, and to the edit. Rounds alternate; medians are told. Seconds of a
busy machine say little; how an edit compares with a picture says more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from playwright.sync_api import expect, sync_playwright

from tests.support.app.site import CHROMIUM, FLAGS
from tests.support.app.soak import say, started

if TYPE_CHECKING:
    from playwright.sync_api import Page

SOURCE, EDIT = "a cat and a cake on a beach", "a dog and a cake on a beach"

UNTIL = """([what, done]) => new Promise(tell => {
    const began = performance.now(), reached = new Function('return ' + done);
    new MutationObserver((_, observer) => {
        if (!reached()) return;
        observer.disconnect();
        tell((performance.now() - began) / 1000);
    }).observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
    new Function(what)();
})"""
"""Seconds from doing something on the page until something is true of it."""

NODES = "document.querySelectorAll('#history [data-id]').length"
REGION = "document.querySelector('#facts').textContent.includes('of the picture')"
DRAWN = "document.querySelector('#status').textContent.includes('Run keeps it')"


def clicked(page: Page, button: str, pictures: int) -> float:
    seconds: float = page.evaluate(UNTIL, [f"document.querySelector('{button}').click()", f"{NODES} === {pictures}"])
    return seconds


def typed(page: Page, text: str, done: str) -> float:
    """Seconds from a prompt's last letter until something is true of the page."""
    typing = (
        "const box = document.querySelector('#prompt textarea');"
        f"box.value = '{text}'; box.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    seconds: float = page.evaluate(UNTIL, [typing, done])
    return seconds


def region(page: Page) -> float:
    """Seconds until the region of an edit is told; nothing is told of it before."""
    expect(page.locator("#facts")).not_to_contain_text("of the picture")
    return typed(page, EDIT, REGION)


def pictures_and_edits(page: Page, rounds: int) -> None:
    """Tell what pictures, their regions and edits take."""
    regions, pictures, edits = [], [], []
    for number in range(rounds):
        page.locator("#prompt textarea").fill(SOURCE)
        expect(page.locator("#make")).to_be_enabled()
        page.wait_for_timeout(1000)
        pictures.append(clicked(page, "#make", 2 * number + 1))
        expect(page.locator("#run")).to_be_visible()
        page.wait_for_timeout(1000)
        regions.append(region(page))
        expect(page.locator("#run")).to_be_enabled()
        told = page.locator("#facts").inner_text()
        page.wait_for_timeout(1000)
        edits.append(clicked(page, "#run", 2 * number + 2))
        expect(page.locator("#run")).to_be_visible()
        truth = page.locator("#truth").inner_text()
        say(f"region {regions[-1]:.2f} s, picture {pictures[-1]:.2f} s, edit {edits[-1]:.2f} s")
        say(f"  before: {told!r}\n  after: {truth!r}")
    ratio = median(a / b for a, b in zip(pictures, edits, strict=True))
    say(f"medians: region {median(regions):.2f} s, picture {median(pictures):.2f} s, edit {median(edits):.2f} s")
    say(f"an edit takes 1/{ratio:.2f} of a picture's time")


def live(page: Page, rounds: int) -> None:
    """Tell what a live edit takes from the last letter, and its region."""
    choose_fast_sampling(page)
    page.locator("#prompt textarea").fill(SOURCE)
    say(f"picture {clicked(page, '#make', 1):.2f} s")
    expect(page.locator("#run")).to_be_visible()
    page.get_by_label("Live: draw while I type").check()
    regions, drawn = [], []
    for _ in range(rounds):
        for done, seconds in ((REGION, regions), (DRAWN, drawn)):
            page.locator("#prompt textarea").fill(SOURCE)
            page.wait_for_function(f"!({REGION}) && !({DRAWN})")
            page.wait_for_timeout(1000)
            seconds.append(typed(page, EDIT, done))
            page.wait_for_function(DRAWN)
        say(f"region {regions[-1]:.2f} s, live edit {drawn[-1]:.2f} s")
    say(f"medians: region {median(regions):.2f} s, live edit {median(drawn):.2f} s; largest {max(drawn):.2f} s")


def choose_fast_sampling(page: Page) -> None:
    """Choose demo-fast, which sets its scheduler, steps and guidance."""
    page.get_by_text("Settings of new pictures").click()
    page.locator("#loras input").click()
    page.get_by_role("option", name="demo-fast").click()
    expect(page.locator("#steps input[type=number]")).to_have_value("4")


def main() -> None:
    """Prints what was waited for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--live", action="store_true", help="edits that are drawn while one types, in four steps")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "fisedit", "app", "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        started(command, Path(folder)) as (url, _),
        sync_playwright() as play,
    ):
        page = play.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS)).new_page()
        began = perf_counter()
        page.goto(url)
        page.wait_for_function("sessionStorage.getItem('fisedit-session')")
        say(f"first page load {perf_counter() - began:.2f} s")
        (live if arguments.live else pictures_and_edits)(page, arguments.rounds)


if __name__ == "__main__":
    main()
