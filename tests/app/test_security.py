"""What the request guard lets pass and what it refuses, before an application that says yes to everything."""

from __future__ import annotations

import json

import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.testclient import TestClient

from app.allowed_calls import CallableEvent, CallTable
from app.security import COOKIE, MAX_BODY_BYTES, RequestGuard
from tests.support.app.loops import in_a_thread

TOKEN = "0123456789abcdef"
HOSTS = frozenset({"127.0.0.1", "::1", "studio.local"})
CALLS = CallTable({0: CallableEvent("", queued=True, kinds=((object,),), triggers=frozenset(), usual={})})
CALL = {"fn_index": 0, "session_hash": "me"}
"""What every call of that event says beside its argument."""

CANCEL = CALL | {"event_id": "a"}


@pytest.fixture
def uploads(tmp_path):
    folder = tmp_path / "uploads"
    (folder / "abc").mkdir(parents=True)
    (folder / "abc" / "cat.png").write_bytes(b"cat")
    (tmp_path / "secret").write_text("secret")
    (folder / "link.png").symlink_to(tmp_path / "secret")
    return folder


def client(uploads, token="", base="http://127.0.0.1:7860") -> TestClient:
    return TestClient(
        RequestGuard(PlainTextResponse("in"), HOSTS, token, uploads, CALLS), base_url=base, follow_redirects=False
    )


def test_the_address_that_a_request_came_to(uploads):
    here = client(uploads, base="http://192.0.2.7:7860")
    assert here.get("/").text == "in"
    assert here.get("/", headers={"host": "192.0.2.8:7860"}).status_code == 400
    assert client(uploads, base="http://evil.example").get("/").status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:7860", "[::1]:7860", "studio.local", "STUDIO.local:80"])
def test_hosts_of_this_machine(uploads, host):
    assert client(uploads).get("/", headers={"host": host}).text == "in"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:7860", "", "[", "a@b@c", "studio.local.", "::1"]
)
def test_forged_hosts(uploads, host):
    answer = client(uploads).get("/", headers={"host": host})
    assert answer.status_code == 400 and answer.text != "in"


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example:7860", "http://["]
)
def test_pages_of_other_sites(uploads, origin):
    here = client(uploads)
    assert here.post("/gradio_api/cancel", json={}, headers={"origin": origin}).status_code == 403
    assert here.post("/gradio_api/cancel", json=CANCEL, headers={"origin": "http://127.0.0.1:7860"}).text == "in"


class TestToken:
    def test_nothing_without_it(self, uploads):
        here = client(uploads, TOKEN)
        for path in (
            "/",
            "/config",
            "/assets/a.js",
            "/gradio_api/info",
            "/?token=wrong",
            "/?token=",
            "/config?token=" + TOKEN,
        ):
            assert here.get(path).status_code == 401
        assert here.post("/gradio_api/upload", content=b"").status_code == 401
        assert here.get("/", headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
        assert here.get("/", headers={"cookie": f"{COOKIE}=é".encode()}).status_code == 401

    def test_in_a_header(self, uploads):
        assert client(uploads, TOKEN).get("/config", headers={"authorization": f"Bearer {TOKEN}"}).text == "in"

    def test_from_the_address_into_a_cookie(self, uploads):
        here = client(uploads, TOKEN)
        answer = here.get(f"/?token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert "httponly" in answer.headers["set-cookie"].lower()
        assert here.get("/").text == "in"


NOWHERE = """/gradio_api/proxy=http://127.0.0.1/ /gradio_api/file/etc/passwd /gradio_api/deep_link /gradio_api/runs
/gradio_api/vibe-code /gradio_api/dev/reload /gradio_api/stream/a/b/c/playlist.m3u8 /monitoring /monitoring/summary
/gradio_api/component_server /gradio_api/custom_component/1/client/component/style.css /docs /openapi.json /login
/nowhere"""


def test_routes_for_programs_are_those_that_are_named(uploads):
    guard = RequestGuard(PlainTextResponse("in"), HOSTS, "", None, CALLS, frozenset({"/sdapi/v1/loras"}))
    here = TestClient(guard, base_url="http://127.0.0.1:7860")
    for path, status in ("/sdapi/v1/loras", 200), ("/sdapi/v1/loras/", 200), ("/sdapi/v1/loras/a", 404), ("/", 404):
        assert here.get(path).status_code == here.post(path, json={}).status_code == status


def test_other_routes_are_not_there(uploads):
    for path in NOWHERE.split():
        here = client(uploads)
        assert here.get(path).status_code == here.post(path, json={}).status_code == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_not_there(uploads, method):
    assert client(uploads).request(method, "/").status_code == 404


def outside(uploads) -> list[object]:
    return [
        *(
            "/etc/passwd",
            "file:///etc/passwd",
            "http://127.0.0.1/",
            "https://169.254.169.254/",
            "http://example.com/a.png",
        ),
        *(f"{uploads}{end}" for end in " /abc /link.png /abc/../../secret /../secret /abc/none.png -x/a".split(" ")),
        *("abc/cat.png", ".", "/" + "a" * 5000, "data:image/png;base64,AAAA", "\\\\host\\share"),
        *("", f"{uploads}/abc/cat.png\0", 7, ["/etc/passwd"], {"path": "/etc/passwd"}),
    ]


def test_files_of_others(uploads):
    here = client(uploads)
    own = str(uploads / "abc" / "cat.png")
    assert here.get(f"/gradio_api/file={own}").text == "in"
    assert here.post("/gradio_api/queue/join", json=CALL | {"data": [[{"image": {"path": own}}]]}).text == "in"
    for path in outside(uploads):
        for told in (
            {"path": path},
            {"path": path, "meta": {"_type": "gradio.FileData"}},
            {"deep": [[{"path": path}]]},
        ):
            for route in ("queue/join", "run/predict", "api/predict", "call/edit", "call/v2/edit"):
                assert here.post(f"/gradio_api/{route}", json={"data": [told]}).status_code == 403, path
    for path in outside(uploads)[:16]:
        assert here.get(f"/gradio_api/file={path}").status_code in (403, 404), path


ELSEWHERE = """http://127.0.0.1:1/gradio_api/file=x http://169.254.169.254/ file:///etc/passwd /etc/passwd http://[
data:image/png;base64,AAAA //evil.example/gradio_api/file=x ftp://127.0.0.1:7860/gradio_api/file=x"""


@pytest.mark.parametrize("url", [*ELSEWHERE.split(), 7])
def test_addresses(uploads, url):
    here, own = client(uploads), str(uploads / "abc" / "cat.png")
    for told in ({"url": url}, {"path": None, "url": url}, {"path": own, "url": url}):
        assert here.post("/gradio_api/queue/join", json={"data": [told]}).status_code in (400, 403)
    told = {"path": own, "url": f"http://127.0.0.1:7860/gradio_api/file={own}"}
    assert here.post("/gradio_api/queue/join", json=CALL | {"data": [told]}).text == "in"


def test_too_much(uploads):
    here = client(uploads)
    assert here.post("/gradio_api/queue/join", content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    assert here.post("/gradio_api/upload", content=b"", headers={"content-length": str(10**12)}).status_code == 413
    assert here.post("/gradio_api/upload", content=iter([b"a"])).status_code == 411


@pytest.mark.parametrize("body", [b"", b"no", b"\xff", b"[" * 100_000, b'{"a": NaN', b"1" * 10_000, b'"\\ud800"'])
def test_what_is_no_json(uploads, body):
    assert client(uploads).post("/gradio_api/queue/join", content=body).status_code == 400


def test_what_is_sent_arrives(uploads):
    async def echo(scope, receive, send):
        message = await receive()
        await PlainTextResponse(message["body"])(scope, receive, send)

    here = TestClient(RequestGuard(echo, HOSTS, "", uploads, CALLS), base_url="http://127.0.0.1")
    told = CALL | {"data": [["ä" * 1000, None, 1.5]]}
    assert here.post("/gradio_api/queue/join", content=json.dumps(told)).json() == told


INSIDE = "Traceback: /tmp/secret/handler.py"


@pytest.mark.parametrize(
    ("status", "answered", "line"),
    [
        (500, PlainTextResponse(INSIDE, 500), "error[internal]: this is a bug; the server's log says where"),
        (500, JSONResponse({"error": None}, 500), "error[internal]: this is a bug; the server's log says where"),
        (502, JSONResponse({"error": INSIDE}, 502), "error[internal]: this is a bug; the server's log says where"),
        (500, JSONResponse({"error": "error[busy]: wait"}, 500), "error[busy]: wait"),
        (422, JSONResponse({"detail": [{"input": INSIDE}]}, 422), "error[input]: this route takes other arguments"),
        (404, JSONResponse({"detail": f"File not found: {INSIDE}"}, 404), "error[not-found]: nothing here"),
        (503, JSONResponse({"detail": "Queue is full."}, 503), "error[busy]: too many wait; try again in a moment"),
    ],
)
def test_answers_of_what_lies_behind_say_one_line(uploads, status, answered, line):
    here = TestClient(RequestGuard(answered, HOSTS, "", uploads, CALLS), base_url="http://127.0.0.1")
    answer = here.get("/config")
    assert answer.json()["detail"].startswith(line) and answer.json()["error"] == answer.json()["detail"]
    assert "secret" not in answer.text and answer.headers["x-content-type-options"] == "nosniff"
    assert answer.status_code == {500: 400 if "busy" in line else 500, 502: 500}.get(status, status)


def test_no_page_may_frame_it_or_reach_out(uploads):
    headers = client(uploads).get("/").headers
    assert (
        "frame-ancestors 'none'" in headers["content-security-policy"]
        and "http" not in headers["content-security-policy"]
    )
    assert headers["referrer-policy"] == "no-referrer" and headers["x-content-type-options"] == "nosniff"


def test_a_chunked_body_and_a_name_that_no_file_has_are_refused_and_a_lost_client_is_no_fault(uploads):
    here = client(uploads)
    for length in ({}, {"content-length": "5"}):  # a body in chunks may be of any length, whatever is said of it
        answer = here.post(
            "/gradio_api/cancel", content=iter([b"{}"]), headers={"transfer-encoding": "chunked", **length}
        )
        assert answer.status_code == 411 and "length" in answer.json()["detail"]
    assert here.get("/static/" + "a" * 300).status_code == 404

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    answers: list[object] = []
    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": "/gradio_api/cancel", "headers": headers, "query_string": b""}
    guard = RequestGuard(PlainTextResponse("in"), HOSTS, "", uploads, CALLS)
    in_a_thread(guard(scope, gone, answers.append))
    assert not answers
