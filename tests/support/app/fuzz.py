"""Calls of the app's events over HTTP that no page and no program of ours sends, from a seed, and what they may answer.

What an attacker knows: the page's own description of its events, at /config.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
from PIL import Image

from tests.support.app.program import JSON, USUAL
from tests.support.app.requests import png

CAT = "a cat and a cake on a beach"
META = {"_type": "gradio.FileData"}
FILES = {"a.png": png(Image.new("RGB", (64, 64), "teal")), "b.png": b"none", "c.zip": b"PK\x03\x04none", "d.png": b""}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**70, 1.5, 1e308, math.nan, -math.inf, "", "a", "\0", "../../etc/passwd", "\ud800"),
    *("x" * 5000, "<b>", "1e400", [], [[]], ["a", 7], [None] * 40, {}, {"id": []}, {"a": {"b": [1]}}),
    *({"__type__": "update"}, {"value": 1}, {"meta": META}),
)
GOOD: dict[str, tuple[Any, ...]] = {
    "textbox": (CAT, "a dog and a cake on a beach", ""),
    "html": ("", "data:image/png;base64,AAAA"),
    "number": (0, 7, None),
    "slider": (2, 64, 1),
    "checkbox": (True, False),
    "radio": ("fast", "balanced", "close", "", None),
    "dropdown": ("DDIM", "all", "0", [], ["cat"], None),
}
LINE = re.compile(r"error\[[a-z-]+\]: [^\n]{1,400}")


@dataclass(frozen=True)
class Page:
    """What the page tells everybody of its events.

    Args:
        inputs: of each event, by number: kinds of components.
        names: of each event, by number.
        private: whether each event is the page's own, by number.
    """

    inputs: dict[int, list[str]]
    names: dict[int, str]
    private: dict[int, bool]

    @classmethod
    def read(cls, url: str) -> Page:
        """The page at an address that ends in a slash."""
        config = httpx.get(f"{url}config").json()
        kinds = {one["id"]: one["type"] for one in config["components"]}
        events = {one["id"]: one for one in config["dependencies"]}
        return cls(
            {number: [kinds[source] for source in one["inputs"]] for number, one in events.items()},
            {number: one["api_name"] for number, one in events.items()},
            {number: one["api_visibility"] != "public" for number, one in events.items()},
        )

    @property
    def private_names(self) -> set[str]:
        """Names of handlers that no answer may hold."""
        return {name for number, name in self.names.items() if self.private[number] and "_" in name}


@dataclass(frozen=True)
class Attack:
    """One server under fuzzed calls.

    Args:
        url: of the server, ends in a slash.
        page: what is known of it.
        secrets: what no refusal may hold.
        files: that were uploaded, as calls name them; None for none.
    """

    url: str
    page: Page
    secrets: tuple[str, ...]
    files: tuple[dict[str, object] | None, ...]

    @classmethod
    def on(cls, url: str, *folders: Path) -> Attack:
        """An attack on a server that has these folders."""
        page = Page.read(url)
        places = (*folders, tempfile.gettempdir(), Path.home(), Path(__file__).parents[3])
        insides = ("Traceback", "site-packages", "python3", ".py", "handler", "<lambda>", "gradio/")
        secrets = (*(str(place) for place in places if len(str(place)) > 1), *insides, *page.private_names)
        sent = [("files", (name, data)) for name, data in FILES.items()]
        paths = httpx.post(f"{url}gradio_api/upload", files=sent).json()
        return cls(url, page, secrets, (None, *({"path": path, "meta": META} for path in paths)))

    def run(self, seed: int, count: int) -> Counter[str]:
        """Send calls, each answer looked at; returns how many ended in which way."""
        random, seen = Random(seed), Counter[str]()
        with httpx.Client(base_url=f"{self.url}gradio_api/", timeout=60) as client:
            for _ in range(count):
                route, body = self._call(random)
                told = body if isinstance(body, str) else json.dumps(body)
                outcome = _outcome(client, body, client.post(route, content=told, headers=JSON))
                seen[outcome.partition("]")[0]] += 1
                assert not self._leaks(outcome, told), (route, told[:500], outcome[:1000])
        return seen

    def _call(self, random: Random) -> tuple[str, object]:
        """A route and a body."""
        number = random.choice([*self.page.inputs, -1, 10**30])
        name = self.page.names.get(number, "predict")
        route = random.choice(["queue/join"] * 4 + ["run/predict"] * 4 + [f"{way}/{name}" for way in ROUTES])
        if random.random() < 0.1:
            route = random.choice(["cancel", "reset"])
        data = self._arguments(random, number)
        if route.startswith("call/v2"):
            return route, dict(zip(random.sample(NAMES, min(len(data), len(NAMES))), data, strict=False))
        body = {"data": data, "fn_index": number, "session_hash": f"fuzz-{random.randrange(4)}"}
        body |= {"trigger_id": random.choice([None, None, random.randrange(70)]), "event_data": random.choice(ODD)}
        for _ in range(random.choice([0, 0, 0, 0, 1, 2])):
            body[random.choice(FIELDS)] = random.choice(ODD)
        if random.random() < 0.1:
            body.pop(random.choice(list(body)))
        return route, body if random.random() < 0.97 else random.choice(
            ["", "[", "7", "[]", "null", '"a"', '{"data": }']
        )

    def _arguments(self, random: Random, number: int) -> list[object]:
        """Arguments of an event, of which some are odd, missing or too many."""
        if number in self.page.inputs and not self.page.private[number]:
            name = self.page.names[number]
            good: list[object] = [
                CAT if value == "" and not place else value for place, value in enumerate(USUAL[name])
            ]
            good = [2 if value == 25 else value for value in good]
            good = [random.choice(self.files) if value is None else value for value in good]
        else:
            good = [
                random.choice(self.files if kind == "file" else GOOD[kind])
                for kind in self.page.inputs.get(number, ["textbox"])
            ]
        oddity = random.choice([0.0, 0.0, 0.1, 0.5, 1.0])
        data = [random.choice(ODD) if random.random() < oddity else value for value in good]
        change = random.choice([0, 0, 0, 0, -1, 1, 7])
        return data[:change] if change < 0 else [*data, *(random.choice(ODD) for _ in range(change))]

    def _leaks(self, line: str, told: str) -> bool:
        """Whether an outcome is anything but a line with a code that tells nothing of the server's insides.

        A refusal may repeat the names that the call itself gave.
        """
        if line == "done":
            return False
        known = LINE.fullmatch(line) and not line.startswith("error[internal]")
        return not known or any(
            secret in line.replace("/gradio_api/", "") and secret not in told for secret in self.secrets
        )


def _outcome(client: httpx.Client, body: object, answer: httpx.Response) -> str:
    """The line of a refusal, of the answer's own or of its run's; "done" for none."""
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    if answer.status_code >= 400:
        return str(answer.json()["detail"])
    told = answer.json()
    if not isinstance(told, dict) or "event_id" not in told:
        return "done"
    session = (body.get("session_hash") if isinstance(body, dict) else None) or told["event_id"]
    with client.stream("GET", "queue/data", params={"session_hash": session}) as stream:
        for line in stream.iter_lines():
            event = json.loads(line.removeprefix("data: ") or "{}")
            if event.get("msg") == "process_completed":
                return "done" if event["success"] else str(event["output"]["error"])
            if event.get("msg") == "unexpected_error":
                return str(event["message"])
    raise AssertionError("the stream ended without a word")


ROUTES = ("run", "api", "call", "call/v2")
FIELDS = ("data", "fn_index", "session_hash", "trigger_id", "event_data", "event_id", "batched", "simple_format")
NAMES = ("prompt", "seed", "steps", "guidance", "width", "mask", "words", "checkout", "pictures", "picture", "on_words")
