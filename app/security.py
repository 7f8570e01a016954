"""The guard of the server: which requests pass, by which route, and with what.

A request is refused before it reaches gradio if it names a host of others or comes from another site's page. So is one
that lacks the token, carries a path or an address, or calls an event with other arguments than it takes. Knows HTTP and
the folder of uploads; neither gradio's insides nor the editor.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from secrets import compare_digest
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.allowed_calls import CallTable
from app.error_responses import RequestRefused, with_plain_errors

MAX_UPLOAD_BYTES, MAX_BODY_BYTES, MAX_PROGRAM_BYTES = 257 << 20, 4 << 20, 96 << 20
"""Bytes of one request: with files, without, and to routes whose JSON or form holds a picture and a mask."""

_MAX_NAME_BYTES = 255
"""Limit in bytes of one part of a path; file systems take no more."""

COOKIE = "fisedit-token"
_API = "/gradio_api/"
_FILE = f"{_API}file="
_GET_PATHS = re.compile(
    r"/((config|theme\.css|favicon\.ico|robots\.txt|manifest\.json)?/?|(assets|static|svelte|pwa_icon)/.+"
    r"|gradio_api/((info|openapi\.json|app_id|theme\.css|startup-events|upload_progress|user|token|login_check"
    r"|queue/(data|status))/?|heartbeat/[^/]+|call/(v2/)?[^/]+/[^/]+|file=.+))"
)
_POST_PATHS = re.compile(r"/gradio_api/((cancel|reset|queue/join)|(run|api|call|call/v2)/[^/]+)/?")
_UPLOAD_PATH = re.compile(r"/gradio_api/upload/?")
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class RequestGuard:
    """ASGI middleware that lets in what the page and the HTTP API need, and nothing else.

    Args:
        app: what answers the requests that pass.
        hosts: names and addresses that a request may call this machine by.
        token: what every request must know; "" for none.
        uploads: the folder that files of requests lie in; None where no page is served.
        calls: the events that may be called.
        programs: paths of the routes for other people's programs.
    """

    app: ASGIApp
    hosts: frozenset[str]
    token: str
    uploads: Path | None
    calls: CallTable
    programs: frozenset[str] = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with the reason why not."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            send = _add_headers(send)
            request = Request(scope, receive)
            try:
                answer = self._check(request)
                if answer is None and request.method == "POST" and _POST_PATHS.fullmatch(scope["path"]):
                    scope, body = await self._read_body(request)
                    receive = _replay_body(body, receive)
            except RequestRefused as refused:
                answer = refused.answer(scope["path"])
            except ClientDisconnect:  # in the middle of its body: no client waits for an answer
                return
            if answer is None:
                await self._pass_on(scope, receive, send)
            else:
                await answer(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, with_plain_errors(scope, receive, send))
        except RuntimeError as error:  # of a run that is not there gradio says so in the stream, and then raises
            if "response already started" not in str(error):
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _check(self, request: Request) -> Response | None:
        """Raises RequestRefused; returns an answer where the request needs no more."""
        host = request.headers.get("host", "")
        if _host_name(host) not in self.hosts | _own_address(request.scope):
            why = f"this is not {host[:80]!r}: open the address that was printed, or use --allowed-host"
            raise RequestRefused(400, why)
        origin = request.headers.get("origin")
        if origin is not None and _netloc(origin) != host:
            raise RequestRefused(403, "a page of another site may not use this server")
        if answer := self._check_token(request):
            return answer
        path = request.scope["path"]
        if any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in path.split("/")):
            raise RequestRefused(404, "nothing here")  # no file has such a name
        if path.removesuffix("/") in self.programs:
            if request.method not in ("GET", "HEAD"):
                _check_length(request.headers, MAX_PROGRAM_BYTES)
        else:
            self._check_page(request, path)
        return None

    def _check_page(self, request: Request, path: str) -> None:
        """Raises RequestRefused for what neither the page nor gradio's API needs."""
        if self.uploads is None:
            raise RequestRefused(404, "nothing here; docs/app.md says which routes there are")
        if request.method in ("GET", "HEAD") and _GET_PATHS.fullmatch(path):
            if path.startswith(_FILE):
                self._check_upload(path.removeprefix(_FILE))
        elif request.method == "POST" and (_POST_PATHS.fullmatch(path) or _UPLOAD_PATH.fullmatch(path)):
            most = MAX_UPLOAD_BYTES if _UPLOAD_PATH.fullmatch(path) else MAX_BODY_BYTES
            _check_length(request.headers, most)
        else:
            raise RequestRefused(404, "nothing here")

    def _check_token(self, request: Request) -> Response | None:
        """Raises RequestRefused without the token; the printed address moves it into a cookie."""
        if not self.token:
            return None
        given = request.query_params.get("token")
        if given is not None and request.url.path == "/" and self._is_token(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, given, httponly=True, samesite="lax")
            return answer
        if self._is_token(request.cookies.get(COOKIE, "")) or self._is_token(_sent_token(request.headers)):
            return None
        raise RequestRefused(
            401, "the token is missing or wrong: open /?token=TOKEN, or send 'Authorization: Bearer TOKEN'"
        )

    def _is_token(self, given: str) -> bool:
        return compare_digest(given.encode(), self.token.encode())

    async def _read_body(self, request: Request) -> tuple[Scope, bytes]:
        """Return a request as it is passed on, and its JSON as bytes.

        Every file in it is one that was uploaded here, to an event that takes it, with its arguments in order.
        """
        body = await request.body()
        try:
            value = json.loads(body)
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
            for part in _iterate_objects(value):
                self._check_file(part, request.headers["host"])
        except (ValueError, RecursionError) as error:
            raise RequestRefused(400, "a request must be JSON") from error
        scope = request.scope
        self.calls.check(scope["path"], value)
        path, passed = self.calls.by_position(scope["path"], value)
        if path == scope["path"]:
            return scope, body
        passed_body = json.dumps(passed).encode()
        headers = MutableHeaders(raw=list(scope["headers"]))
        headers["content-length"] = str(len(passed_body))
        return {**scope, "path": path, "raw_path": path.encode(), "headers": headers.raw}, passed_body

    def _check_file(self, value: dict[str, Any], host: str) -> None:
        path, url = value.get("path"), value.get("url")
        if path is not None:
            self._check_upload(path)
        if url is not None:
            parts = urlsplit(url) if isinstance(url, str) else None
            own = parts and parts.netloc in ("", host) and parts.scheme in ("", "http", "https")
            if path is None or parts is None or not own or not parts.path.startswith(_FILE):
                raise RequestRefused(403, "addresses are not read: upload the file first")

    def _check_upload(self, path: object) -> None:
        """Raises RequestRefused for any file but a plain one among the uploads."""
        try:
            assert self.uploads is not None, "where no page is served no file is asked for"
            file = Path(path) if isinstance(path, str) else self.uploads
            if file.is_relative_to(self.uploads) and file.resolve(strict=True) == file and file.is_file():
                return
        except (OSError, ValueError):
            pass
        raise RequestRefused(403, "paths are not read: upload the file first")


def _sent_token(headers: Headers) -> str:
    """The token of an Authorization header, or the password of one, with any user's name; "" for none."""
    kind, _, sent = headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return sent if kind.lower() == "bearer" else ""
    try:
        return b64decode(sent, validate=True).decode().partition(":")[2]
    except ValueError:  # no base64, or no text
        return ""


def _add_headers(send: Send) -> Send:
    """Add headers that isolate the page from other sites."""

    async def guarded_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_HEADERS)
        await send(message)

    return guarded_send


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Replay a body that was read already, then receive further messages."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again


def _own_address(scope: Scope) -> set[str]:
    """The address of this machine that a request came to, which no name of another site can be."""
    try:
        return {str(ip_address((scope.get("server") or ("", None))[0]))}
    except ValueError:
        return set()


def _host_name(host: str) -> str:
    """A Host header's name or address, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _netloc(address: str) -> str:
    """An address's host and port; "" where it is no address."""
    try:
        return urlsplit(address).netloc
    except ValueError:
        return ""


def _check_length(headers: Headers, most: int) -> None:
    """Refuse a body that is too long, or comes in chunks, whose length is unknown whatever `content-length` says."""
    length = headers.get("content-length")
    if length is None or not length.isdecimal() or "transfer-encoding" in headers:
        raise RequestRefused(411, "a request must say its length")
    if int(length) > most:
        raise RequestRefused(413, f"a request may have at most {most >> 20} MiB, got {int(length) / 2**20:.0f}")


def _iterate_objects(value: object) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value, at any depth."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value
