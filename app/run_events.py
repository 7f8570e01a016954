"""Event handlers of the page that run edits: each begins one by `app.handlers`, and shows how it goes and what it gave.

Knows components by name and handlers by what they return; lays nothing out and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import handlers, html, inputs, live, variations, views
from app.events import PageEvents
from app.runs import RunProgress
from app.updates import Updates
from app.validation import NO_CONDITIONS, Busy, PartNotOpened, printable
from fisedit.errors import Cancelled, FisEditError

if TYPE_CHECKING:
    from app.session import Session
    from fisedit import EditResult

PREVIEW_INTERVAL = 0.25
"""Seconds between two previews of a run: showing every step of a quick one would slow it down."""


class RunEvents(PageEvents):
    """Events that run an edit, and the one that stops it."""

    def on_make(self, request: gr.Request, count: str, prompt: str, *values: Any) -> Iterator[Updates]:
        """Generate new pictures from a prompt.

        Args:
            request: the page's request.
            count: number of pictures; several are candidates.
            prompt: what the picture shows.
            values: values of `PageComponents.condition_inputs` and `settings_inputs`.
        """

        def make(session: Session) -> Iterator[RunProgress]:
            conditions, settings = inputs.conditions_of(*values)
            new = inputs.settings(self.page, *settings)
            return handlers.generate(self.state, session, prompt, new, conditions, int(count))

        yield from self._run(request, make)

    def on_open(self, request: gr.Request, data: bytes | None, prompt: str, *settings: Any) -> Iterator[Updates]:
        """Open a file as a new picture.

        Args:
            request: the page's request.
            data: the picture's file, or None.
            prompt: what the picture shows; "" where that is not known.
            settings: values of `PageComponents.settings_inputs`.
        """

        def start(session: Session) -> Iterator[RunProgress]:
            own_size = replace(inputs.settings(self.page, *settings), width=None, height=None)
            for progress in handlers.open_picture(self.state, session, data or b"", prompt, own_size):
                opened.extend(filter(None, [progress.result]))
                yield progress

        opened: list[EditResult] = []
        yield from self._run(request, start, opens=True)
        if opened:
            yield {self.page.file: None, self.page.found: "", self.page.open: gr.update(interactive=False)}

    def on_edit(self, request: gr.Request, count: str, prompt: str, *values: Any) -> Iterator[Updates]:
        """Edit the current picture.

        Args:
            request: the page's request.
            count: number of edits; several have noise of their own, and are candidates.
            prompt: what the picture should show.
            values: values of the further `PageComponents.edit_inputs`.
        """
        begin = handlers.edit if count == "1" else partial(variations.vary, count=int(count))
        yield from self._edit(begin, request, prompt, *values)

    def on_vary(self, request: gr.Request, prompt: str, *values: Any) -> Iterator[Updates]:
        """Edit the current picture several times, each with other noise.

        Args:
            request: the page's request.
            prompt: what the picture should show.
            values: values of the further `PageComponents.edit_inputs`.
        """
        yield from self._edit(variations.vary, request, prompt, *values)

    def on_erase(self, request: gr.Request, *values: Any) -> Iterator[Updates]:
        """Let what is around the painted area of the current picture grow into it.

        Args:
            request: the page's request.
            values: values of `PageComponents.edit_inputs`, of which the region's are read.
        """
        prompt, *others = values

        def erase(session: Session) -> Iterator[RunProgress]:
            _, region = inputs.conditions_of(*others)
            where = inputs.region(session, session.current.prompt, NO_CONDITIONS, *region, soft=False)
            return handlers.erase(self.state, session, where)

        yield from self._run(request, erase, prompt)

    def on_extend(self, request: gr.Request, prompt: str, *widths: float | None) -> Iterator[Updates]:
        """Make the current picture larger and paint what is added.

        Args:
            request: the page's request.
            prompt: what the larger picture shows.
            widths: pixels at the left, top, right and bottom.
        """
        left, top, right, bottom = (int(width or 0) for width in widths)
        yield from self._run(
            request, lambda session: handlers.extend(self.state, session, (left, top, right, bottom), prompt)
        )

    def on_live(self, request: gr.Request, prompt: str, *values: Any) -> Iterator[Updates]:
        """Draw an edit over the current picture while its prompt is typed; a newer one stops it.

        Args:
            request: the page's request.
            prompt: what the picture should show.
            values: values of the further `PageComponents.edit_inputs`.
        """
        page, shown = self.page, 0.0
        try:
            session = self.session(request)
            if not len(session.history) or printable(prompt) in ("", session.current.prompt):
                if session.live_request is not None and not session.running:
                    session.live_request = None
                    yield {page.stage: gr.update(live=""), page.status: ""}
                return
            conditions, region = inputs.conditions_of(*values)
            where = inputs.region(session, prompt, conditions, *region)
            for progress in live.edit_live(self.state, session, prompt, where, conditions):
                if session.live_request is None:  # the stage was cleared meanwhile
                    return
                if progress.result is not None:
                    made = progress.result
                    drawn = views.preview_overlay(made.canvas, made.mask, made.size, made.config.crop)
                    yield {page.stage: gr.update(live=drawn), page.status: html.message("Live: Run keeps it.")}
                elif progress.picture is not None and perf_counter() - shown >= PREVIEW_INTERVAL:
                    shown = perf_counter()
                    yield {page.stage: gr.update(live=_preview_overlay(session, progress, prompt))}
        except (Cancelled, Busy):
            return
        except PartNotOpened as error:
            yield {page.stage: gr.update(live=""), page.status: html.message(str(error))}
        except FisEditError as error:
            yield {page.stage: gr.update(live=""), page.status: html.message(str(error), "error")}

    def on_measure(self, request: gr.Request) -> Iterator[Updates]:
        """A dense run of the result on the stage, to compare."""
        yield from self._run(
            request, lambda session: handlers.measure_dense(self.state, session, session.current.id), None
        )

    def on_follow(self, request: gr.Request) -> Iterator[Updates]:
        """Show how a run goes that was begun before the page was loaded again, and what it gave."""
        session = self.session(request)
        if not session.running:
            return
        before = len(session.history)
        while not session.idle:
            progress = session.progress
            yield {self.page.status: html.progress(RunProgress(*progress)) if progress else html.message("Waiting ...")}
            sleep(PREVIEW_INTERVAL)
        status = html.message(session.notice, "error lasting")
        is_new = len(session.history) > before
        yield self.updates.after_run(session) if is_new else self.updates.unchanged(session, status)

    def on_stop(self, request: gr.Request) -> Updates:
        """Stop the current run before its next step.

        The button says so, not the status line: this answer may arrive after the stopped run's last one.
        """
        self.session(request).stop()
        return {self.page.stop: gr.update(value="Stopping ...")}

    def _edit(
        self, begin: Callable[..., Iterator[RunProgress]], request: gr.Request, prompt: str, *values: Any
    ) -> Iterator[Updates]:
        """Show a run of an edit: `handlers.edit` or `variations.vary`; other arguments as in `on_edit`."""

        def start(session: Session) -> Iterator[RunProgress]:
            conditions, region = inputs.conditions_of(*values)
            where = inputs.region(session, prompt, conditions, *region)
            return begin(self.state, session, prompt, where, conditions)

        yield from self._run(request, start, prompt)

    def _run(
        self,
        request: gr.Request,
        start: Callable[[Session], Iterator[RunProgress]],
        prompt: str | None = "",
        *,
        opens: bool = False,
    ) -> Iterator[Updates]:
        """Show a run's progress, and the session after it.

        Args:
            request: the page's request.
            start: begins the run.
            prompt: an edit's, whose previews are drawn inside its mask if that is known; "" for a new picture, whose
                previews are drawn whole; None for a run without previews.
            opens: whether the picture that waits on the stage is opened; else the stage shows the current one.
        """
        page, updates, session = self.page, self.updates, None
        try:
            session = self.session(request)
            stage = gr.skip() if opens else gr.update(photo="")
            yield {**updates.running(session), page.status: html.message("Starting ..."), page.stage: stage}
            shown = 0.0
            for progress in start(session):
                if progress.ahead:
                    yield {page.status: html.message(f"Waiting: {progress.ahead} before you ...")}
                if progress.picture is None or perf_counter() - shown < PREVIEW_INTERVAL:
                    continue
                shown = perf_counter()
                live = "" if prompt is None else _preview_overlay(session, progress, prompt)
                yield {page.stage: gr.update(live=live), page.status: html.progress(progress)}
            yield updates.after_run(session)
        except Cancelled:
            yield updates.unchanged(session, html.message("Stopped. Nothing was changed."))
        except FisEditError as error:
            yield updates.unchanged(session, html.message(str(error), "error"))
        except Exception:
            why = "That should not have happened: see the server's log."
            yield updates.unchanged(session, html.message(why, "error"))
            raise


def _preview_overlay(session: Session, progress: RunProgress, prompt: str) -> str:
    """A run's preview, within the region of its prompt's last preview."""
    preview = session.last_preview
    mask = preview.mask if preview and preview.diff.prompt == printable(prompt) else None
    if not progress.picture:
        return ""
    shown = session.current if prompt and len(session.history) else None
    return views.preview_overlay(progress.picture, mask, *((shown.size, shown.config.crop) if shown else ()))
