"""Pictures for programs that keep no session: each is made in a session, and edited in the one that made or opened it.

What a program sends back is known by its pixels, so that a further edit of the same picture reads what was recorded.
Knows sessions and handlers; neither routes nor their formats.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

from app import export, handlers, history
from app.runs import RunProgress
from app.validation import Busy, RegionSettings, decode_picture
from fisedit import Region

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.session import Session
    from app.sessions import AppState
    from app.validation import SourceSettings
    from fisedit import EditResult

MAX_WAITING = 20
"""Requests of programs that run or wait; further ones are refused as busy."""


class ProgramPictures:
    """Generates and edits for programs.

    Args:
        state: whose sessions and worker are used.

    Attributes:
        progress: of the run that told of itself last; None while none runs.
    """

    def __init__(self, state: AppState) -> None:
        self.state = state
        self.progress: RunProgress | None = None
        self._places = BoundedSemaphore(MAX_WAITING)
        self._running: dict[object, Session] = {}  # by request

    def generate(self, prompt: str, settings: SourceSettings) -> bytes:
        """A picture of a prompt, as a PNG that records how it was made.

        Args:
            prompt: what it shows.
            settings: how it is made.

        Raises:
            FisEditError: an argument out of range, or the machine is busy.
        """
        caller = f"program {secrets.token_hex(16)}"
        session = self.state.session(caller)
        with self._running_in(session):
            result = self._last(handlers.generate(self.state, session, prompt, settings))
            return self._finished(session, result)

    def edit(
        self,
        data: bytes,
        prompt: str,
        settings: SourceSettings,
        region: RegionSettings | None = None,
        source_prompt: str = "",
        *,
        own_noise: bool = False,
    ) -> bytes:
        """A picture changed to fit a prompt, as a PNG; every pixel outside the region keeps its bytes.

        Args:
            data: the picture's file.
            prompt: what it should show.
            settings: how it is opened, if it is not known already.
            region: where it may change; None for where the words say.
            source_prompt: what it shows; "" where that is not known.
            own_noise: whether the region gets the noise of the settings' seed, instead of the picture's; so it does
                where the prompt is the picture's own.

        Raises:
            FisEditError: an argument out of range, no picture, or the machine is busy.
        """
        digest = _digest(decode_picture(data))
        session = self.state.session(_caller(digest))
        with self._running_in(session):
            known = [result for result in session.history if _digest(result.image) == digest]
            if known:
                history.checkout(session, known[-1].id)
            else:
                part = Region.mask(region.add) if region is not None and region.add is not None else None
                self._last(handlers.open_picture(self.state, session, data, source_prompt, settings, part))
            if own_noise or prompt == session.current.prompt:
                region = replace(region or RegionSettings(), seed=settings.seed)
            result = self._last(handlers.edit(self.state, session, prompt, region))
            return self._finished(session, result)

    def interrupt(self) -> None:
        """Stop all runs of programs before their next step."""
        for session in list(self._running.values()):
            session.stop()

    def _last(self, run: Iterator[RunProgress]) -> EditResult:
        result: EditResult | None = None
        try:
            for progress in run:
                self.progress, result = progress, progress.result
        finally:
            self.progress = None
        assert result is not None, "a run ends with a result or an error"
        return result

    def _finished(self, session: Session, result: EditResult) -> bytes:
        """The result's file; its pixels name the session from now on."""
        self.state.adopt(_caller(_digest(result.image)), session.key)
        return export.picture_bytes(session, result)

    @contextmanager
    def _running_in(self, session: Session) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise Busy(f"{MAX_WAITING} requests run or wait; try again in a moment")
        request = object()
        self._running[request] = session
        try:
            yield
        finally:
            del self._running[request]
            self._places.release()


def _caller(digest: str) -> str:
    return f"picture {digest}"


def _digest(image: Image) -> str:
    return sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()
