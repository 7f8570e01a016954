"""Event handlers of the page: each calls a function of `app.handlers` and turns its outcome into component updates.

Knows components by name and handlers by what they return; lays nothing out and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import export, handlers, history, html, inputs, live, variations, views
from app.components import ALL_PIECES
from app.updates import PageUpdates, Updates
from app.validation import NO_CONDITIONS, Busy, PartNotOpened, decode_picture, grow_bound
from fisedit.errors import Cancelled, FisEditError, InputError, SessionError

if TYPE_CHECKING:
    from app.components import PageComponents
    from app.runs import RunProgress
    from app.session import Session
    from app.sessions import AppState
    from fisedit import EditResult

PREVIEW_INTERVAL = 0.25
"""Seconds between two previews of a run: showing every step of a quick one would slow it down."""


class EventHandlers:
    """The events of a page.

    Args:
        state: whose sessions are meant.
        page: whose components are updated.
    """

    def __init__(self, state: AppState, page: PageComponents) -> None:
        self.state, self.page, self.updates = state, page, PageUpdates(page, state.pool)

    # Coming and going

    def on_arrive(self, request: gr.Request, key: str) -> Updates:
        """A page was loaded: its session, or a new one."""
        try:
            session = self.state.adopt(_caller(request), key if isinstance(key, str) else "")
        except FisEditError as error:
            said = html.message(str(error), "error lasting")
            return {self.page.status: said, self.page.make: gr.update(interactive=True)}
        if not session.idle:
            session.stop_unseen()
        elif session.live is not None:
            with suppress(Busy), session.work():
                session.drop_live()
        notice = html.message(session.notice)
        if session.was_damaged:
            session.was_damaged = False
            notice = html.message("What was saved of this session cannot be read, and was put aside.", "error lasting")
        shown = self.updates.session(session, view="edit")
        return {self.page.key: session.key, **shown, self.page.status: notice}

    def on_leave(self, request: gr.Request) -> None:
        """A page was closed: its work ends."""
        self.state.leave(_caller(request))

    # Runs

    def on_make(self, request: gr.Request, prompt: str, *values: Any) -> Iterator[Updates]:
        """Generate a new picture from a prompt.

        Args:
            request: of the page.
            prompt: what the picture shows.
            values: of `PageComponents.condition_inputs` and `settings_inputs`.
        """

        def make(session: Session) -> Iterator[RunProgress]:
            conditions, settings = inputs.conditions_of(*values)
            return handlers.generate(self.state, session, prompt, inputs.settings(self.page, *settings), conditions)

        yield from self._run(request, make)

    def on_open(self, request: gr.Request, data: bytes | None, prompt: str, *settings: Any) -> Iterator[Updates]:
        """Open a file as a new picture.

        Args:
            request: of the page.
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

    def on_edit(self, request: gr.Request, prompt: str, *values: Any) -> Iterator[Updates]:
        """Edit the current picture.

        Args:
            request: of the page.
            prompt: what the picture should show.
            values: of the further `PageComponents.edit_inputs`.
        """

        def edit(session: Session) -> Iterator[RunProgress]:
            conditions, region = inputs.conditions_of(*values)
            where = inputs.region(session, prompt, conditions, *region)
            return handlers.edit(self.state, session, prompt, where, conditions)

        yield from self._run(request, edit, prompt)

    def on_vary(self, request: gr.Request, prompt: str, *values: Any) -> Iterator[Updates]:
        """Edit the current picture several times, each with other noise.

        Args:
            request: of the page.
            prompt: what the picture should show.
            values: of the further `PageComponents.edit_inputs`.
        """

        def vary(session: Session) -> Iterator[RunProgress]:
            conditions, region = inputs.conditions_of(*values)
            where = inputs.region(session, prompt, conditions, *region)
            return variations.vary(self.state, session, prompt, where, conditions)

        yield from self._run(request, vary, prompt)

    def on_erase(self, request: gr.Request, *values: Any) -> Iterator[Updates]:
        """Let what is around the painted area of the current picture grow into it.

        Args:
            request: of the page.
            values: of `PageComponents.edit_inputs`, of which the region's are read.
        """
        prompt, *others = values

        def erase(session: Session) -> Iterator[RunProgress]:
            _, region = inputs.conditions_of(*others)
            where = inputs.region(session, session.current.prompt, NO_CONDITIONS, *region)
            return handlers.erase(self.state, session, where)

        yield from self._run(request, erase, prompt)

    def on_extend(self, request: gr.Request, prompt: str, *widths: float | None) -> Iterator[Updates]:
        """Make the current picture larger and paint what is added.

        Args:
            request: of the page.
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
            request: of the page.
            prompt: what the picture should show.
            values: of the further `PageComponents.edit_inputs`.
        """
        page, shown = self.page, 0.0
        try:
            session = self._session(request)
            if not len(session.history) or prompt.strip() in ("", session.current.prompt):
                if session.live is not None:
                    yield {page.stage: gr.update(live=""), page.status: ""}
                return
            conditions, region = inputs.conditions_of(*values)
            where = inputs.region(session, prompt, conditions, *region)
            for progress in live.edit_live(self.state, session, prompt, where, conditions):
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

    def on_stop(self, request: gr.Request) -> Updates:
        """Stop the current run before its next step.

        The button says so, not the status line: this answer may arrive after the stopped run's last one.
        """
        self._session(request).stop()
        return {self.page.stop: gr.update(value="Stopping ...")}

    # Before a run

    def on_words(self, request: gr.Request, prompt: str, chosen: list[str], model: str) -> Updates:
        """Show the changed words of a prompt, and before the first picture those that the model does not know.

        Args:
            request: of the page.
            prompt: the new prompt.
            chosen: words that are selected to find the mask by.
            model: label of the model that is selected for new pictures.
        """
        session = self._session(request)
        session.stop_live()
        shown = self.updates.words(session, prompt, chosen, model)
        said = session.idle and session.notice  # else the status stays: why the last run ended, or how this one goes
        return {**shown, self.page.status: html.message(session.notice)} if said else shown

    def on_preview(self, request: gr.Request, prompt: str, *values: Any) -> Updates:
        """Predict where an edit would change the picture, and its cost.

        Args:
            request: of the page.
            prompt: what the picture should show.
            values: of the further `PageComponents.edit_inputs`.
        """
        page, session = self.page, None
        try:
            session = self.state.session(_caller(request))
            conditions, region = inputs.conditions_of(*values)
            unchanged = len(session.history) and prompt.strip() == session.current.prompt and not region[0]
            unchanged = unchanged and conditions == NO_CONDITIONS
            if not len(session.history) or not prompt.strip() or unchanged:
                return {page.facts: "", page.stage: gr.update(region="")}
            where = inputs.region(session, prompt, conditions, *region)
            estimate = handlers.preview(self.state, session, prompt, where, conditions)
        except Cancelled:  # for a run, which shows the region itself
            return {page.facts: gr.skip()}
        except Busy as error:
            own = session is not None and not session.idle
            return {page.facts: gr.skip() if own else html.message(str(error))}
        except PartNotOpened as error:
            return {page.facts: html.message(str(error)), page.stage: gr.update(region="")}
        except FisEditError as error:
            return {page.facts: html.message(str(error), "error"), page.stage: gr.update(region="")}
        return self.updates.estimate(estimate, all_pieces=region[2] == ALL_PIECES[1])

    def on_model(self, label: str) -> Updates:
        """A model was chosen: its own size and guidance are suggested."""
        try:
            model = self.state.pool.select(str(label))
            examples = html.examples(model.vocabulary)
        except FisEditError as error:
            return {self.page.status: html.message(str(error), "error")}
        side, page = model.native_size, self.page
        size = {page.width: side, page.height: side, page.guidance: model.guidance}
        return size | {page.examples: examples}

    def on_loras(self, chosen: list[str] | None, *scales: float) -> Updates:
        """LoRAs were chosen: each has a scale, as it was before or 1."""
        before = dict(zip(self.page.lora_scales, scales, strict=True))
        return self.updates.lora_scales({label: before[label] for label in chosen or () if label in before})

    def on_reuse(self, request: gr.Request) -> Updates:
        """The seed of the picture on the stage, for new pictures."""
        history = self._session(request).history
        if not len(history):
            return {self.page.seed: gr.skip()}
        return {self.page.seed: history.current.config.seed, self.page.random: False}

    def on_widen(self, cells: int) -> Callable[..., Updates]:
        """An event that makes the region wider by some cells, or tighter."""

        def handle(request: gr.Request, grow: float) -> Updates:
            most = grow_bound(self._session(request).current.canvas.size)
            return {self.page.grow: min(most, max(-most, int(grow or 0) + cells))}

        return handle

    def on_find(self, request: gr.Request) -> Updates:
        """Ask the detector what is in the picture on the stage."""
        session = self._session(request)
        try:
            return self.updates.things(handlers.find_things(self.state, session))
        except FisEditError as error:
            return {self.page.status: html.message(str(error), "error")}

    def on_reset(self, request: gr.Request) -> Updates:
        """The region's controls as they are at first."""
        region = self.updates.region(self._session(request))
        things: Updates = {} if self.state.pool.detector is None else {self.page.things: []}
        return {self.page.words: [], self.page.instance: ALL_PIECES[1], **things, **region}

    # History and files

    def on_move(self, move: Callable[[Session], object]) -> Callable[..., Updates]:
        """An event that makes another result the current one."""

        def handle(request: gr.Request) -> Updates:
            return self._move(request, move)

        return handle

    def on_select(self, request: gr.Request, event: gr.EventData) -> Updates:
        """A picture of the history was chosen."""
        try:
            chosen = str(event.id)
        except (AttributeError, TypeError) as error:  # it holds what a request sent
            raise InputError("event_data must have the id of a result") from error
        return self._move(request, lambda session: history.checkout(session, chosen))

    def on_compare(self, request: gr.Request, other: str) -> Updates:
        """Another picture to compare the one on the stage with."""
        session = self._session(request)
        try:
            before, after = history.compare(session, str(other))
        except FisEditError as error:
            return {self.page.status: html.message(str(error), "error")}
        return {self.page.stage: gr.update(picture=self.updates.picture(after, before, "compare"))}

    def on_fetch(self, make_file: Callable[[Session], Path]) -> Callable[..., Updates]:
        """An event that gives the browser a file."""

        def handle(request: gr.Request) -> Updates:
            try:
                return {self.page.fetch: str(make_file(self.state.session(_caller(request))))}
            except FisEditError as error:
                return {self.page.fetch: None, self.page.status: html.message(str(error), "error")}

        return handle

    def on_file(self, request: gr.Request, data: bytes | None, model: str) -> Updates:
        """A file was dropped: a saved session is loaded, of a picture the settings are."""
        page, data = self.page, data or b""
        try:
            session = self.state.session(_caller(request))
            if data[:2] == b"PK":
                export.import_session(self.state, session, data)
                shown = self.updates.session(session, view="edit")
                return {**shown, page.found: html.message("The session is open.")}
            found = export.restore_settings(self.state, data)
            notes = f"{found.message} {export.canvas_note(self.state, data, model)}".strip()
        except FisEditError as error:
            return {page.found: html.message(str(error), "error"), page.open: gr.update(interactive=False)}
        waiting = html.waiting_picture(notes, ask=not found.prompt)
        updates: Updates = {page.found: waiting, page.open: gr.update(interactive=True)}
        updates |= {page.stage: gr.update(photo=views.screen_url(decode_picture(data)), live="")}
        updates |= {page.open_panel: gr.update(open=True)}
        updates |= {page.prompt: found.prompt} if found.prompt else {}
        return updates | (self.updates.settings(found.settings) if found.settings else {})

    # What they share

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
            request: of the page.
            start: begins the run.
            prompt: an edit's, whose previews are drawn inside its mask if that is known; "" for a new picture, whose
                previews are drawn whole; None for a run without previews.
            opens: whether the picture that waits on the stage is opened; else the stage shows the current one.
        """
        page, updates, session = self.page, self.updates, None
        try:
            session = self.state.session(_caller(request))
            stage = gr.skip() if opens else gr.update(photo="")
            yield {**updates.buttons(session, busy=True), page.status: html.message("Starting ..."), page.stage: stage}
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

    def _session(self, request: gr.Request) -> Session:
        """The session of a request; its errors the page shows beside itself."""
        return self.state.session(_caller(request))

    def _move(self, request: gr.Request, move: Callable[[Session], object]) -> Updates:
        try:
            session = self.state.session(_caller(request))
            move(session)
            return self.updates.session(session, view="edit")
        except FisEditError as error:
            return {self.page.status: html.message(str(error), "error")}


def _caller(request: gr.Request) -> str:
    if not request.session_hash:
        raise SessionError("a request must say its session: send session_hash")
    return str(request.session_hash)[:64]


def _preview_overlay(session: Session, progress: RunProgress, prompt: str) -> str:
    """A run's preview, within the region of its prompt's last preview."""
    preview = session.last_preview
    mask = preview.mask if preview and preview.diff.prompt == prompt else None
    if not progress.picture:
        return ""
    shown = session.current if prompt and len(session.history) else None
    return views.preview_overlay(progress.picture, mask, *((shown.size, shown.config.crop) if shown else ()))
