"""Event handlers of the page that run no edit: coming and going, previews, the history and files.

Knows components by name and handlers by what they return; lays nothing out and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import export, handlers, history, html, inputs, views
from app.components import ALL_PIECES, SCHEDULERS, STEPS
from app.events import PageEvents, caller
from app.updates import Updates
from app.validation import NO_CONDITIONS, Busy, PartNotOpened, decode_picture, grow_bound, printable
from fisedit.adapters.lora import SuggestedSampling
from fisedit.errors import Cancelled, FisEditError, InputError
from fisedit.values import SchedulerName

if TYPE_CHECKING:
    from app.session import Session

_MEASURE_POLL, _MEASURE_POLLS = 1.0, 600
"""Seconds between two looks whether the machine was measured, and their number at most."""


class SessionEvents(PageEvents):
    """Events that show a session, or what an edit of it would do."""

    # Coming and going

    def on_arrive(self, request: gr.Request, key: str) -> Updates:
        """A page was loaded: its session, or a new one."""
        try:
            session = self.state.adopt(caller(request), key if isinstance(key, str) else "")
        except FisEditError as error:
            said = html.message(str(error), "error lasting")
            return {self.page.status: said, self.page.make: gr.update(interactive=True)}
        session.stop_live()
        if session.idle and session.live is not None:
            with suppress(Busy), session.work():
                session.drop_live()
        notice = html.message(session.notice)
        if session.was_damaged:
            session.was_damaged = False
            notice = html.message("What was saved of this session cannot be read, and was put aside.", "error lasting")
        shown = self.updates.session(session, view="edit")
        if session.running:  # which `RunEvents.on_follow` shows
            shown |= self.updates.running(session)
        return {self.page.key: session.key, **shown, self.page.status: notice}

    def on_leave(self, request: gr.Request) -> None:
        """A page was closed: its live edit ends."""
        self.state.leave(caller(request))

    # Before a run

    def on_words(self, request: gr.Request, prompt: str, chosen: list[str], model: str) -> Updates:
        """Show the changed words of a prompt, and before the first picture those that the model does not know.

        Args:
            request: the page's request.
            prompt: the new prompt.
            chosen: words that are selected to find the mask by.
            model: label of the model that is selected for new pictures.
        """
        session = self.session(request)
        session.stop_live(except_prompt=printable(prompt))
        shown = self.updates.words(session, prompt, chosen, model)
        said = session.idle and session.notice  # else the status stays: why the last run ended, or how this one goes
        return {**shown, self.page.status: html.message(session.notice)} if said else shown

    def on_preview(self, request: gr.Request, prompt: str, *values: Any) -> Updates:
        """Predict where an edit would change the picture, and its cost.

        Args:
            request: the page's request.
            prompt: what the picture should show.
            values: values of the further `PageComponents.edit_inputs`.
        """
        page, session = self.page, None
        try:
            session = self.session(request)
            conditions, region = inputs.conditions_of(*values)
            marked = bool(region[0]) or any(region[8:])  # strokes, or things that are chosen
            unchanged = len(session.history) and printable(prompt) == session.current.prompt and not marked
            unchanged = unchanged and conditions == NO_CONDITIONS
            if not len(session.history) or not prompt.strip() or unchanged:
                return {page.facts: "", page.stage: gr.update(region="")}
            where = inputs.region(session, prompt, conditions, *region)
            estimate = handlers.preview(self.state, session, prompt, where, conditions)
        except Cancelled:  # for a run, which shows the region itself
            return {page.facts: gr.skip()}
        except Busy as error:
            own = session is not None and not session.idle
            return {page.facts: gr.skip() if own else html.message(str(error), "again")}
        except PartNotOpened as error:
            part = "" if session is None else views.part(session.current.size, error.part)
            return {page.facts: html.message(f"{error}."), page.stage: gr.update(region=part)}
        except FisEditError as error:
            return {page.facts: html.message(str(error), "error"), page.stage: gr.update(region="")}
        return self.updates.estimate(estimate, all_pieces=region[2] == ALL_PIECES[1])

    def on_calibrate(self, request: gr.Request) -> Iterator[Updates]:
        """Measure again what this machine takes, which decides between sparse and dense; the page waits for it."""
        status = self.page.status
        try:
            told = self.state.measure_again(self.session(request))
        except FisEditError as error:
            yield {status: html.message(str(error), "error")}
            return
        yield {status: html.message("This machine is measured once nothing runs, for about 20 s ...")}
        for _ in range(_MEASURE_POLLS):
            with suppress(TimeoutError):
                why = told.result(_MEASURE_POLL)
                said = html.message(f"Not measured: {why}.", "error") if why else html.message("Measured again.")
                yield {status: said}
                return
            yield {status: gr.skip()}

    def on_model(self, label: str) -> Updates:
        """A model was chosen: its own size and guidance are suggested; sizes that it is told are asked for."""
        try:
            model = self.state.pool.select(str(label))
            examples = html.examples(model.vocabulary)
        except FisEditError as error:
            return {self.page.status: html.message(str(error), "error")}
        side, page = model.native_size, self.page
        size: Updates = {page.width: side, page.height: side, page.guidance: model.guidance}
        size |= {page.sizes_row: gr.update(visible=model.reads_sizes)}
        return size | {page.examples: examples}

    def on_loras(self, chosen: list[str] | None, *scales: float) -> Updates:
        """LoRAs were chosen: each has a scale, as it was before or 1."""
        before = dict(zip(self.page.lora_scales, scales, strict=True))
        return self.updates.lora_scales({label: before[label] for label in chosen or () if label in before})

    def on_loras_chosen(
        self, chosen: list[str] | None, label: str, steps: float, guidance: float, scheduler: str
    ) -> Updates:
        """A user chose LoRAs: what one suggests is set; what none suggests any more is as it was at first."""
        page, offered = self.page, self.state.pool.loras.sampling
        suggested = next((offered[lora] for lora in chosen or () if lora in offered), None)
        if suggested is None:
            now = (SCHEDULERS.get(scheduler), steps, guidance)
            if now not in map(astuple, offered.values()):
                return {page.steps: gr.skip()}
            model = self.state.pool.select(str(label))
            suggested = SuggestedSampling(SchedulerName.DDIM, STEPS, model.guidance)
        sampling = {page.steps: suggested.num_inference_steps, page.guidance: suggested.guidance_scale}
        return sampling | {page.scheduler: suggested.scheduler.label}

    def on_reuse(self, request: gr.Request) -> Updates:
        """The seed of the picture on the stage, for new pictures."""
        history = self.session(request).history
        if not len(history):
            return {self.page.seed: gr.skip()}
        return {self.page.seed: history.current.config.seed, self.page.random: False}

    def on_widen(self, cells: int) -> Callable[..., Updates]:
        """An event that makes the region wider by some cells, or tighter."""

        def handle(request: gr.Request, grow: float) -> Updates:
            most = grow_bound(self.session(request).current.canvas.size)
            return {self.page.grow: min(most, max(-most, int(grow or 0) + cells))}

        return handle

    def on_find(self, request: gr.Request) -> Updates:
        """Ask the detector what is in the picture on the stage."""
        session = self.session(request)
        try:
            return self.updates.things(handlers.find_things(self.state, session))
        except FisEditError as error:
            return {self.page.status: html.message(str(error), "error")}

    def on_reset(self, request: gr.Request) -> Updates:
        """The region's controls as they are at first."""
        region = self.updates.region(self.session(request))
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
        session = self.session(request)
        try:
            before, after = history.compare(session, str(other))
        except FisEditError as error:
            return {self.page.status: html.message(str(error), "error")}
        return {self.page.stage: gr.update(picture=self.updates.picture(after, before, "compare"))}

    def on_fetch(self, make_file: Callable[[Session], Path]) -> Callable[..., Updates]:
        """An event that gives the browser a file."""

        def handle(request: gr.Request) -> Updates:
            try:
                return {self.page.fetch: str(make_file(self.session(request)))}
            except FisEditError as error:
                return {self.page.fetch: None, self.page.status: html.message(str(error), "error")}

        return handle

    def on_file(self, request: gr.Request, data: bytes | None, model: str) -> Updates:
        """A file was dropped: a saved session is loaded, of a picture the settings are; None for one that stays out."""
        page = self.page
        if data is None:
            return {page.file: None, page.found: "", page.open: gr.update(interactive=False)}
        try:
            session = self.session(request)
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

    def _move(self, request: gr.Request, move: Callable[[Session], object]) -> Updates:
        try:
            session = self.session(request)
            move(session)
            return self.updates.session(session, view="edit")
        except FisEditError as error:
            return {self.page.status: html.message(str(error), "error")}
