"""The base of the page's event handlers: the state with the sessions, and the page whose components are updated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.updates import PageUpdates
from fisedit.errors import SessionError

if TYPE_CHECKING:
    import gradio as gr

    from app.components import PageComponents
    from app.session import Session
    from app.sessions import AppState


class PageEvents:
    """Events of a page.

    Args:
        state: the app's state, whose sessions are meant.
        page: the page whose components are updated.
    """

    def __init__(self, state: AppState, page: PageComponents) -> None:
        self.state, self.page, self.updates = state, page, PageUpdates(page, state.pool)

    def session(self, request: gr.Request) -> Session:
        """The session of a request.

        Raises:
            SessionError: the request names none.
        """
        return self.state.session(caller(request))


def caller(request: gr.Request) -> str:
    """Return the name of the browser's tab that sent a request.

    Raises:
        SessionError: it has none.
    """
    if not request.session_hash:
        raise SessionError("a request must say its session: send session_hash")
    return str(request.session_hash)[:64]
