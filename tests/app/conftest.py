"""The app on the demo model, served once for all tests of this folder, and browsers that look at it.

Every page that a test opens is watched: a request to another machine or an error in its console fails the test.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.support.app.site import CHROMIUM, FLAGS, LayerSite, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page

    from app.session import Session
    from app.sessions import AppState
    from tests.support.app.program import Program


@pytest.fixture(scope="module")  # a server lowers Pillow's limit of pixels for the whole process: not for other tests
def site() -> Iterator[LayerSite]:
    """The app on the demo model, in a thread of this process, where tests can look behind the page."""
    with served() as site:
        yield site


@pytest.fixture
def program(site) -> Program:
    """A program that speaks to the app, with a session of its own."""
    from tests.support.app.program import Program

    return Program(site.url, uuid.uuid4().hex)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Iterator[AppState]:
    """The app's state over the demo model, whose worker and models other states share; a module may offer more."""
    from app.sessions import AppState

    with closing(AppState.open(folder=tmp_path_factory.mktemp("shared"))) as state:
        yield state


@pytest.fixture
def state(shared, tmp_path) -> AppState:
    """A state of its own over the one loaded model."""
    return type(shared)(shared.pool, shared.worker, folder=tmp_path / "sessions")


@pytest.fixture
def session(state) -> Session:
    """A session of its own."""
    return state.session("me")


@dataclass
class Watched:
    """A browser's context, and what it did that a page of this app must not do."""

    context: BrowserContext
    url: str
    bad: list[str] = field(default_factory=list)

    def open(self) -> Page:
        """Opens the app, and waits until its session is there: the page may lose what is typed before."""
        page = self.context.new_page()
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.bad.append(f"error: {error}"))
        page.goto(self.url)
        page.wait_for_function("() => sessionStorage.getItem('fisedit-session')")
        return page

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.bad.append(f"console: {message.text}")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser process."""
    from playwright.sync_api import expect, sync_playwright

    if CHROMIUM is None:
        pytest.skip("needs Chromium: `make test` installs it where there is apt-get")
    expect.set_options(timeout=60_000)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium, site) -> Iterator[Callable[..., Watched]]:
    """Opens browsers that know nothing of one another."""
    opened: list[Watched] = []

    def new(**options: object) -> Watched:
        watched = Watched(chromium.new_context(**options), site.url)
        watched.context.set_default_timeout(60_000)
        here = urlsplit(site.url).netloc
        watched.context.on(
            "request",
            lambda request: (
                request.url.startswith(("data:", "blob:"))
                or urlsplit(request.url).netloc == here
                or watched.bad.append(f"request: {request.url}")
            ),
        )
        opened.append(watched)
        return watched

    yield new
    for watched in opened:
        watched.context.close()
    assert [bad for watched in opened for bad in watched.bad] == []


@pytest.fixture
def steps(site, monkeypatch) -> list[str]:
    """What was done, in order: "step" before each step of any run, "stop" where one that goes on is asked to end."""
    from app.session import Session

    told: list[str] = []
    check, stop = Session.raise_if_stopped, Session.stop_work
    monkeypatch.setattr(Session, "raise_if_stopped", lambda self: (told.append("step"), check(self)))
    monkeypatch.setattr(Session, "stop_work", lambda self: (self.idle or told.append("stop"), stop(self)))
    return told
