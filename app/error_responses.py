"""The answers to requests that fail: one line that begins with a stable code, and nothing of the server's insides.

Knows HTTP answers; neither routes nor sessions.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from fisedit.errors import Cancelled, FisEditError

if TYPE_CHECKING:
    from fastapi import FastAPI

_CODES = {401: "token", 403: "forbidden", 404: "not-found", 405: "not-found", 413: "too-large", 503: "busy"}
_LINES = {
    401: "the token is missing or wrong",
    403: "this may not be read",
    404: "nothing here",
    405: "nothing here",
    413: "too large",
    503: "too many wait; try again in a moment",
}
_INPUT_LINE = "this route takes other arguments; see /gradio_api/info"
INTERNAL_LINE = "error[internal]: this is a bug; the server's log says where"
"""The line of an error that is no `FisEditError`."""

_BROKEN_RUN, _BROKEN_PAGE = b'event: error\ndata: "', b'data: {"msg":"unexpected_error"'
"""The first bytes of the events by which gradio ends a stream: of a program, and of a page."""

_STREAM_LINES = {
    b"404: ": "error[not-found]: there is no such run",
    b"Server stopped": "error[busy]: the server stops",
}


class RequestRefused(Exception):
    """A request that is not let in.

    Args:
        status: HTTP status of the answer, 400 to 599.
        why: one line.
        code: a stable name of the reason; "" for the status's own.
    """

    def __init__(self, status: int, why: str, code: str = "") -> None:
        super().__init__(why)
        self.status, self.why, self.code = status, why, code or _CODES.get(status, "input")

    def answer(self, path: str = "") -> JSONResponse:
        """The answer to the request of a path."""
        return error_answer(self.status, f"error[{self.code}]: {self.why}", path)


def error_answer(status: int, line: str, path: str = "") -> JSONResponse:
    """An answer of one line, under the names that FastAPI's clients and gradio's page read, or else OpenAI's."""
    if not path.startswith("/v1/"):
        return JSONResponse({"detail": line, "error": line}, status)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = line.removeprefix("error[").partition("]")[0]
    return JSONResponse({"error": {"message": line, "type": kind, "param": None, "code": code}}, status)


def add_error_handlers(routes: FastAPI) -> None:
    """Have routes answer errors raised on purpose with their line, and other requests than they take with another.

    Args:
        routes: routes for programs.
    """
    from fastapi.exceptions import RequestValidationError

    async def answer_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, FisEditError)
        status = 503 if error.code == "busy" else 409 if isinstance(error, Cancelled) else 400
        return error_answer(status, f"error[{error.code}]: {error}")

    async def answer_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        wrong = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))} {one['msg']}" for one in error.errors()[:3])
        return error_answer(400, f"error[input]: {wrong.strip()}")

    routes.add_exception_handler(FisEditError, answer_error)
    routes.add_exception_handler(RequestValidationError, answer_invalid)


def with_plain_errors(scope: Scope, receive: Receive, send: Send) -> Send:
    """A `send` that replaces answers of 400 and above: of their text only a line that begins with a code is kept.

    Args:
        scope: scope of the request.
        receive: channel that the request's body comes by.
        send: gets the answers.
    """
    status, body = 0, bytearray()

    async def replaced(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start" and message["status"] >= 400:
            status = message["status"]
        elif not status:
            await send(_with_plain_event(message))
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                await _plain_error(status, bytes(body), scope["path"])(scope, receive, send)

    return replaced


def _with_plain_event(message: Message) -> Message:
    """An answer's part; where it is gradio's event of a stream that broke off, its text is one of ours."""
    body = message.get("body", b"")
    if body.startswith(_BROKEN_RUN):
        payload = {"error": _stream_line(body)}
        return {**message, "body": b"event: error\ndata: " + json.dumps(payload).encode() + b"\n\n"}
    if body.startswith(_BROKEN_PAGE):
        payload = json.loads(body.removeprefix(b"data: ")) | {"message": _stream_line(body)}
        return {**message, "body": b"data: " + json.dumps(payload).encode() + b"\n\n"}
    return message


def _stream_line(event: bytes) -> str:
    """The line for a stream that broke off."""
    return next((line for part, line in _STREAM_LINES.items() if part in event), INTERNAL_LINE)


def _plain_error(status: int, body: bytes, path: str) -> JSONResponse:
    """An answer's own line where that is one of ours, else what its status means."""
    line = _own_line(body)
    if line.startswith("error[") and line != INTERNAL_LINE:
        return error_answer(400 if status == 500 else status, line, path)
    if status >= 500 and status not in _LINES:
        return error_answer(500, INTERNAL_LINE, path)
    return RequestRefused(status, _LINES.get(status, _INPUT_LINE)).answer(path)


def _own_line(body: bytes) -> str:
    """The text of a JSON answer's error, up to its first line's end."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    text = (fields.get("error") or fields.get("detail")) if isinstance(fields, dict) else None
    return text.partition("\n")[0] if isinstance(text, str) else ""
