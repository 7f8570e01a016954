"""A program that uses the app's HTTP API: a request, and the events that answer it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from time import sleep
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from tests.support.app.site import LayerSite


@dataclass(frozen=True)
class Event:
    """What the server says of a run: generating, complete or error."""

    kind: str
    data: Any


@dataclass(frozen=True)
class Program:
    """One caller with a session of its own. `url` ends in a slash. patience: seconds without a word."""

    url: str
    session: str
    patience: float = 120.0

    def send(self, name: str, *data: object) -> httpx.Response:
        """Asks for a run; the answer names it. Arguments that are left out are the usual ones."""
        told = {"data": [*data, *USUAL[name][len(data) :]], "session_hash": self.session}
        return httpx.post(
            f"{self.url}gradio_api/call/{name}", content=json.dumps(told), headers=JSON, timeout=self.patience
        )

    def listen(self, name: str, answer: httpx.Response) -> AbstractContextManager[httpx.Response]:
        """The stream that a run's events come by; who closes it leaves the server."""
        return httpx.stream(
            "GET", f"{self.url}gradio_api/call/{name}/{answer.json()['event_id']}", timeout=self.patience
        )

    def events(self, name: str, answer: httpx.Response) -> Iterator[Event]:
        """What happens to a run that was asked for; who closes the generator leaves the server."""
        with self.listen(name, answer) as stream:
            kind = ""
            for line in stream.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    kind = value
                elif field == "data" and kind != "heartbeat":
                    yield Event(kind, json.loads(value))
                    if kind != "generating":
                        return  # the stream stays open where the session left another run

    def ask(self, name: str, *data: object) -> Event:
        """Runs to the end."""
        answer = self.send(name, *data)
        assert answer.status_code == 200, answer.text
        return list(self.events(name, answer))[-1]

    def refused(self, code: str, name: str, *data: object) -> str:
        """Checks that a run is refused in one line with a code."""
        event = self.ask(name, *data)
        assert event.kind == "error", str(event)[:500]
        line = str(event.data["error"])
        assert line.startswith(f"error[{code}]: ") and "\n" not in line, line[:500]
        return line


USUAL: dict[str, tuple[object, ...]] = {
    "generate": ("", 0, 25, 4.0, 64, 64, "ddim", "", "", {}, "", 1.0, 0, "", 1.0, False, {}, {}),
    "open": (None, "", 0, 25, 4.0, "", {}, {}, {}),
    "edit": ("", "", "", [], -1, 0, "", 1.0, 1.0, "balanced", -1, {}, [], "", 1.0, False, {}),
    "preview": ("", "", "", [], -1, 0, "", 1.0, 1.0, "balanced", -1, {}, [], "", 1.0, False, {}),
    "erase": ({}, "balanced", -1),
    "extend": (0, 0, 0, 0, "", "balanced", -1),
    "history": ("", False),
}
JSON = {"content-type": "application/json"}


def picture(event: Event) -> np.ndarray:
    """The picture that a run made, [H, W, 3]."""
    assert event.kind == "complete", event
    return np.asarray(Image.open(BytesIO(base64.b64decode(event.data[0]["picture"]))).convert("RGB"))


def settle(site: LayerSite) -> None:
    """Waits until nobody is at work."""
    for _ in range(600):
        if all(session.idle for session in site.state._sessions.values()):
            return
        sleep(0.1)
    raise AssertionError("somebody is still at work")
