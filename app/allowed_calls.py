"""The events of the page that may be called over HTTP: by which route, and with what kinds of arguments.

Programs call the endpoints that have a name in the API. Every other event is the page's own, and is called as the page
calls it or not at all. Knows gradio's table of events and the fields of a call; not what events do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from types import NoneType
from typing import TYPE_CHECKING, Any

from app.error_responses import RequestRefused

if TYPE_CHECKING:
    import gradio as gr

MAX_SESSION_CHARACTERS = 64
"""Greatest length of a `session_hash`."""

_ROUTE = re.compile(r"/gradio_api/(?:(cancel|reset|queue/join)|(run|api|call/v2|call)/([^/]+))/?")
_TEXT, _NUMBER, _INTEGER = (str, NoneType), (int, float, NoneType), (int, NoneType)
_FIELDS: dict[str, tuple[type, ...]] = {
    "session_hash": _TEXT,
    "fn_index": _INTEGER,
    "trigger_id": _INTEGER,
    "event_id": _TEXT,
    "oauth_token": _TEXT,
    "simple_format": (bool, NoneType),
    "batched": (NoneType,),
}
"""Fields of a call beside its arguments -> what they may be."""

_KINDS: dict[str, tuple[type, ...]] = {
    "textbox": _TEXT,
    "html": _TEXT,
    "number": _NUMBER,
    "slider": _NUMBER,
    "checkbox": (bool, NoneType),
    "dropdown": _TEXT,
    "radio": _TEXT,
    "file": (dict, NoneType),
}
"""Components that events read -> what the page sends for them."""


NEEDED = object()
"""The marker, in place of an argument's usual value, of an argument that must be given."""

_SESSION = "session_hash"


@dataclass(frozen=True)
class CallableEvent:
    """An event that may be called.

    Args:
        name: in the API; "" for one of the page's own.
        queued: whether it is called by way of the queue.
        kinds: what each argument may be, in order.
        triggers: ids of the components that the event may come from.
        usual: names of a named event's arguments in order -> what they are if they are not given, or `NEEDED`.
    """

    name: str
    queued: bool
    kinds: tuple[tuple[type, ...], ...]
    triggers: frozenset[int]
    usual: Mapping[str, object]


@dataclass(frozen=True)
class CallTable:
    """The events of a page.

    Args:
        events: by gradio's number of each.
    """

    events: Mapping[int, CallableEvent]

    def check(self, path: str, body: object) -> None:
        """Refuse a call that no page and no program of ours sends.

        Args:
            path: path of the request.
            body: its JSON.

        Raises:
            RequestRefused: there is no such event, it is called another way, or takes other arguments.
        """
        match = _ROUTE.fullmatch(path)
        if match is None:
            return
        if not isinstance(body, dict):
            raise RequestRefused(400, "a call must be a JSON object")
        route, by_name, name = match.groups()
        if by_name == "call/v2":
            _check_names(self._find(name), body)
            return
        _check_fields(body)
        checks: dict[str, Callable[[], None]] = {
            "cancel": lambda: _require_text(body, "session_hash", "event_id", fn_index=True),
            "reset": lambda: _require_text(body, "event_id"),
            "call": lambda: _check_count(self._find(name), body),
        }
        checks.get(route or by_name, lambda: self._check_numbered(body, queued=route == "queue/join"))()

    def by_position(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The same call with its arguments in order: gradio's calls by name have no session.

        Args:
            path: path of a request that was checked.
            body: its JSON.
        """
        match = _ROUTE.fullmatch(path)
        if match is None or match[2] != "call/v2":
            return path, body
        session = {name: body[name] for name in (_SESSION,) if name in body}
        arguments = [body.get(name, usual) for name, usual in self._find(match[3]).usual.items()]
        return f"/gradio_api/call/{match[3]}", {"data": arguments} | session

    def _find(self, name: str) -> CallableEvent:
        """The event that programs call by a name."""
        for event in self.events.values():
            if event.name == name:
                return event
        known = ", ".join(sorted(event.name for event in self.events.values() if event.name))
        raise RequestRefused(404, f"no endpoint has that name; there are {known}")

    def _check_numbered(self, body: dict[str, Any], *, queued: bool) -> None:
        """A call by number: any endpoint or event of the page through the queue, else those that have none."""
        number = body.get("fn_index")
        event = self.events.get(-1 if number is None else number)
        if event is None:
            raise RequestRefused(404, "there is no such event; programs call /gradio_api/call/NAME")
        if event.queued != queued:
            why = "not through" if queued else "through"
            raise RequestRefused(404, f"this event is called {why} the queue; programs call /gradio_api/call/NAME")
        _require_text(body, "session_hash")
        _check_count(event, body)
        if body.get("trigger_id") not in {None, *event.triggers}:
            raise RequestRefused(400, "trigger_id must be of a component that the event comes from")
        for place, (value, kinds) in enumerate(zip(body["data"], event.kinds, strict=True)):
            if not event.name and not _is_of(value, kinds):
                raise RequestRefused(400, f"argument {place} must be {_join(kinds)}, got {type(value).__name__}")


def call_table(page: gr.Blocks) -> CallTable:
    """The events of a page that something outside the server may call."""
    described = page.get_api_info()["named_endpoints"]
    called = {
        number: fn
        for number, fn in page.fns.items()
        if fn.fn is not None and not all(event == "unload" for _, event in fn.targets or [(None, "")])
    }
    return CallTable({number: _event(fn, described) for number, fn in called.items()})


def _event(fn: Any, described: Mapping[str, Any]) -> CallableEvent:
    public = fn.api_visibility == "public"
    parameters = described[f"/{fn.api_name}"]["parameters"] if public else ()
    return CallableEvent(
        name=fn.api_name if public else "",
        queued=fn.queue is not False,
        kinds=tuple((object,) if public else _kinds(block) for block in fn.inputs),
        triggers=frozenset(source for source, _ in fn.targets if source is not None),
        usual={
            one["parameter_name"]: one["parameter_default"] if one["parameter_has_default"] else NEEDED
            for one in parameters
        },
    )


def _kinds(block: Any) -> tuple[type, ...]:
    return (list, NoneType) if getattr(block, "multiselect", False) else _KINDS[block.get_block_name()]


def _check_fields(body: dict[str, Any]) -> None:
    for name, kinds in _FIELDS.items():
        if not _is_of(body.get(name), kinds) and not (name == "batched" and body[name] is False):
            raise RequestRefused(400, f"{name} must be {_join(kinds)}, got {type(body[name]).__name__}")
    session = body.get("session_hash")
    if session is not None and not 0 < len(session) <= MAX_SESSION_CHARACTERS:
        why = f"session_hash must have 1 to {MAX_SESSION_CHARACTERS} letters, got {len(session)}"
        raise RequestRefused(400, why, "session")


def _require_text(body: dict[str, Any], *names: str, fn_index: bool = False) -> None:
    for name in names:
        if body.get(name) is None:
            raise RequestRefused(400, f"a request must say its {name}", "session" if name == "session_hash" else "")
    if fn_index and body.get("fn_index") is None:
        raise RequestRefused(400, "a request must say its fn_index")


def _check_count(event: CallableEvent, body: dict[str, Any]) -> None:
    data, most = body.get("data"), len(event.kinds)
    if not isinstance(data, list) or len(data) != most:
        got = len(data) if isinstance(data, list) else type(data).__name__
        raise RequestRefused(400, f"data must be a list of {most} arguments, got {got}")


def _check_names(event: CallableEvent, body: dict[str, Any]) -> None:
    """Arguments by name, as /gradio_api/openapi.json describes them, and a session's."""
    _check_fields({name: value for name, value in body.items() if name == _SESSION})
    if unknown := sorted(body.keys() - event.usual.keys() - {_SESSION}):
        known = ", ".join((*event.usual, _SESSION))
        raise RequestRefused(400, f"there is no argument {unknown[0][:40]!r}; arguments are {known}")
    missing = [name for name, usual in event.usual.items() if usual is NEEDED and name not in body]
    if missing:
        raise RequestRefused(400, f"arguments are missing: {', '.join(missing)}")


def _is_of(value: object, kinds: tuple[type, ...]) -> bool:
    """Return whether a JSON value is of a kind; true, false, NaN and infinities are no numbers."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) and not (isinstance(value, float) and not isfinite(value))


def _join(kinds: tuple[type, ...]) -> str:
    return " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
