"""Starts the app: an address of its own, routes for programs, the page, and a request guard before them.

Everything of gradio's that would reach other machines or share anything is off. Knows uvicorn and gradio; no editing.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from signal import SIGTERM, signal
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

from fisedit.errors import InputError

if TYPE_CHECKING:
    import gradio
    import uvicorn
    from fastapi import FastAPI

    from app.security import RequestGuard
    from app.sessions import AppState

MAX_WAITING = 20
"""Runs that gradio begins, all but one of which wait at the worker, and jobs in its own queue; further ones are refused
as busy."""

MAX_CONCURRENT = 2
"""Jobs of one kind that gradio runs at a time."""

MAX_PAGE_STATES = 128
"""Connections whose page state gradio keeps (its default is 10,000); sessions do not depend on it."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")
_LOCAL = ("127.0.0.1", "localhost", "::1")
_ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_RUN_HISTORY": "False",
    "GRADIO_SSR_MODE": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@dataclass(frozen=True)
class Address:
    """The socket that the app listens on, and the names that it answers to.

    Args:
        listener: a bound socket.
        host: name or address as it was given.
        token: what every request must know; "" for none.
        hosts: names and addresses that requests may call this machine by.
    """

    listener: socket.socket
    host: str
    token: str
    hosts: frozenset[str]

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        host, port = self.host, self.listener.getsockname()[1]
        name = f"[{host}]" if ":" in host else {"0.0.0.0": socket.gethostname()}.get(host, host)  # noqa: S104
        return f"http://{name}:{port}/" + (f"?token={self.token}" if self.token else "")


@dataclass(frozen=True)
class ServedPage:
    """The page, and what a server needs to know of it.

    Args:
        blocks: from `app.main.build`.
        theme: from `app.main.theme`.
        uploads: the folder that files of requests lie in, from `environment`.
    """

    blocks: gradio.Blocks
    theme: Mapping[str, Any]
    uploads: Path


def listen(host: str = "127.0.0.1", port: int = 7860, token: str = "", allowed_hosts: Sequence[str] = ()) -> Address:
    """Take a port, before anything heavy is loaded.

    Args:
        host: an address of this machine, or a name of it.
        port: 0 for any free one.
        token: at least 16 letters, digits, `-` or `_`.
        allowed_hosts: other names that this machine is reached by.

    Raises:
        InputError: others could come in without a token, or the port cannot be had.
    """
    if token and not _TOKEN.fullmatch(token):
        raise InputError(f"token must have at least 16 letters, digits, - or _, got {len(token)} signs")
    family, where = _resolve(host, port)
    if not ipaddress.ip_address(where[0]).is_loopback and not token:
        raise InputError(f"others could reach {host}: give --token, or leave --host out for this machine alone")
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY by it
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        listener.close()
        why = os.strerror(error.errno) if error.errno else error
        raise InputError(f"port {port} of {host} cannot be had ({why}); give another --port, or 0 for any") from error
    names = {host.lower(), where[0], *map(str.lower, allowed_hosts)}
    if ipaddress.ip_address(where[0]).is_unspecified:
        names |= {socket.gethostname().lower()}
    return Address(listener, host, token, frozenset({*names, *_LOCAL}))


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(f"host must be an address or name of this machine, got {host!r} and port {port}") from error
    return family, where


@contextmanager
def environment(*, offline: bool) -> Iterator[Path]:
    """Set what gradio, the hub and Pillow go by, before they are imported; yields the folder that uploads lie in.

    Raises:
        InputError: gradio is not installed.
    """
    check_packages("gradio")
    with tempfile.TemporaryDirectory(prefix="fisedit-app-") as folder:
        uploads = Path(folder).resolve()
        os.environ.update(_ENVIRONMENT | {"GRADIO_TEMP_DIR": str(uploads)})
        if offline:
            os.environ["HF_HUB_OFFLINE"] = "1"
        with pixel_limit():
            yield uploads


def check_packages(*names: str) -> None:
    """Raise InputError if one of these packages is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise InputError(f"the app needs {name}, which is not installed: pip install 'fisedit[app]'")


@contextmanager
def pixel_limit() -> Iterator[None]:
    """Have Pillow refuse pictures of too many pixels, and the process end in order when it is asked to."""
    from PIL import Image

    from fisedit.storage.canvas import MAX_PIXELS

    if current_thread() is main_thread():
        signal(SIGTERM, lambda *_: sys.exit(128 + SIGTERM))  # so that what follows `with` runs, too
    most, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, MAX_PIXELS // 2  # Pillow refuses twice as many
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = most


def make_server(
    state: AppState,
    address: Address,
    page: ServedPage | None = None,
) -> uvicorn.Server:
    """A server of the routes for programs and the page; `run([address.listener])` answers until it is stopped.

    Args:
        state: the app's state, whose models and sessions are served.
        address: from `listen`.
        page: None to serve programs alone.
    """
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            application(state, address, page),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
    )


def application(state: AppState, address: Address, page: ServedPage | None = None) -> RequestGuard:
    """The routes for programs and the page behind their request guard, as an ASGI application.

    Args:
        state: the app's state, whose models and sessions are served.
        address: from `listen`.
        page: None to serve programs alone.
    """
    from fastapi import FastAPI
    from fastapi.routing import APIRoute

    from app import allowed_calls, openai_api, security, webui_api
    from app.error_responses import add_error_handlers
    from app.program_pictures import ProgramPictures

    outer, pictures = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), ProgramPictures(state)
    add_error_handlers(outer)
    routers = webui_api.router(pictures), openai_api.router(pictures)
    for routes in routers:
        outer.include_router(routes)
    programs = frozenset(route.path for routes in routers for route in routes.routes if isinstance(route, APIRoute))
    uploads, calls = None, allowed_calls.CallTable({})
    if page is not None:
        _mount(page, outer)
        uploads, calls = page.uploads, allowed_calls.call_table(page.blocks)
    return security.RequestGuard(outer, address.hosts, address.token, uploads, calls, programs)


def _mount(page: ServedPage, outer: FastAPI) -> None:
    """Add the page to the routes."""
    import gradio as gr

    from app.security import MAX_UPLOAD_BYTES

    blocks = page.blocks
    blocks.queue(max_size=MAX_WAITING, default_concurrency_limit=MAX_CONCURRENT, api_open=False)
    blocks.state_session_capacity = MAX_PAGE_STATES
    blocks.has_launched = True  # else gradio does not look where a request's files lie
    gr.mount_gradio_app(
        outer,
        blocks,
        path="/",
        footer_links=["api"],
        run_history=False,
        allowed_paths=[],
        blocked_paths=[],
        show_error=False,  # what is not one of our errors stays in the log
        max_file_size=MAX_UPLOAD_BYTES,
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        **page.theme,
    )
