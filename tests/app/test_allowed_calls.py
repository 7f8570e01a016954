"""Events over HTTP: programs reach the named endpoints, the page its own events, and every other call one line."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.app.fuzz import CAT, LINE, Attack
from tests.support.app.program import USUAL

if TYPE_CHECKING:
    from tests.support.app.site import LayerSite


@pytest.fixture(scope="module")
def attack(site: LayerSite) -> Attack:
    return Attack.on(site.url, site.uploads, site.state.folder)


def post(attack: Attack, route: str, **body: object) -> httpx.Response:
    """Sends a call with a session of its own."""
    return httpx.post(f"{attack.url}gradio_api/{route}", json={"session_hash": uuid.uuid4().hex} | body, timeout=60)


def refused(answer: httpx.Response, status: int, code: str) -> None:
    """Checks that a call is refused in one line with a code."""
    line = answer.json()["detail"]
    assert (answer.status_code, line.startswith(f"error[{code}]: ")) == (status, True), answer.text
    assert LINE.fullmatch(line) and answer.json()["error"] == line


def test_fuzzed_calls(attack):
    seen = attack.run(seed=7, count=200)
    assert seen["done"] >= 5 and seen["error[input"] > 50 and seen["error[not-found"] > 40, seen


@pytest.mark.slow
def test_2000_fuzzed_calls(attack):
    seen = attack.run(seed=23, count=2000)
    assert seen["done"] > 50 and seen["error[input"] > 500 and seen["error[not-found"] > 400, seen


def test_events_of_the_page_have_no_names(attack):
    for number, name in attack.page.names.items():
        if attack.page.private[number]:
            for way in ("call", "call/v2", "run", "api"):
                refused(post(attack, f"{way}/{name}", data=[]), 404, "not-found")


def test_endpoints_have_the_queue_alone(attack):
    for number, name in attack.page.names.items():
        if not attack.page.private[number]:
            data = list(USUAL[name])
            for body in ({"data": data}, {"data": data, "fn_index": number}):
                refused(post(attack, f"run/{name}", **body), 404, "not-found")
            refused(post(attack, f"call/{name}", data=data[:-1]), 400, "input")
            refused(post(attack, f"call/{name}", data=[*data, 7]), 400, "input")


def number_of(attack: Attack, name: str) -> int:
    return next(number for number, known in attack.page.names.items() if known == name)


def test_what_leaves_a_page_is_called_by_the_server_alone(attack):
    refused(post(attack, "queue/join", fn_index=number_of(attack, "on_leave"), data=[]), 404, "not-found")


def test_an_event_of_the_page_takes_what_the_page_sends(attack):
    words = number_of(attack, "on_words")
    answer = post(attack, "run/predict", fn_index=words, data=[CAT, [], None])
    assert answer.status_code == 200, answer.text
    for data in ([], [CAT], [CAT, []], [CAT, [], "", 7], [7, [], ""], [CAT, 7, ""], [[CAT], None, ""], [True, [], ""]):
        refused(post(attack, "run/predict", fn_index=words, data=data), 400, "input")
    refused(post(attack, "run/predict", fn_index=words, data=[CAT, [], None], trigger_id=1), 400, "input")
    refused(post(attack, "run/predict", fn_index=words, data=[CAT, [], None], session_hash=None), 400, "session")
    refused(post(attack, "queue/join", fn_index=words, data=[CAT, [], None]), 404, "not-found")


def test_by_name(attack):
    answer = httpx.post(f"{attack.url}gradio_api/call/v2/generate", json={"promt": CAT}, timeout=60)
    refused(answer, 400, "input")
    assert "no argument 'promt'" in answer.json()["detail"]
    refused(httpx.post(f"{attack.url}gradio_api/call/v2/history", json={"session_hash": ""}), 400, "session")
    done = httpx.post(f"{attack.url}gradio_api/call/v2/history", json={"checkout": ""}, timeout=60)
    assert done.status_code == 200 and done.json()["event_id"]
    refused(httpx.post(f"{attack.url}gradio_api/call/v2/generate", json={"seed": 7}), 400, "input")


def by_name(site, name: str, **arguments) -> object:
    """What an endpoint answers at the end."""
    asked = httpx.post(f"{site.url}gradio_api/call/v2/{name}", json=arguments, timeout=60).json()
    with httpx.stream("GET", f"{site.url}gradio_api/call/{name}/{asked['event_id']}", timeout=120) as stream:
        *_, last = [line for line in stream.iter_lines() if line.startswith("data: ")]
    return json.loads(last.removeprefix("data: "))[0]


def test_a_session_by_name(attack):
    mine = {"session_hash": uuid.uuid4().hex}
    source = by_name(attack, "generate", prompt=CAT, seed=7, steps=2, **mine)
    edit = by_name(attack, "edit", prompt="a dog and a cake on a beach", region={"box": [0, 0, 64, 64]}, **mine)
    assert edit["parent"] == source["id"] and edit["prompt"] == "a dog and a cake on a beach"
    assert len(by_name(attack, "history", **mine)["results"]) == 2


def test_a_run_that_is_not_there(attack, caplog):
    """gradio breaks such a stream off once it has answered; the server's log has no traceback of it."""
    with httpx.stream("GET", f"{attack.url}gradio_api/call/edit/{uuid.uuid4().hex}") as stream:
        assert next(stream.iter_text()) == 'event: error\ndata: {"error": "error[not-found]: there is no such run"}\n\n'
    with httpx.stream("GET", f"{attack.url}gradio_api/queue/data?session_hash=none") as stream:
        assert '"message": "error[not-found]: there is no such run"' in next(stream.iter_text())
    assert "Traceback" not in caplog.text and "ASGI" not in caplog.text
