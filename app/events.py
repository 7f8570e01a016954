"""What the page's events do: a handler is called, and its outcome becomes updates of components.

Knows components by name and handlers by what they return; lays nothing out and computes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import export, handlers, views
from app.validation import Busy, Look, Region, Settings, label
from fisedit.errors import Cancelled, FisEditError, SessionError
from fisedit.values import SchedulerName

if TYPE_CHECKING:
    from app.handlers import Progress
    from app.main import Page
    from app.sessions import Studio
    from app.user_session import Session
    from fisedit import EditResult

Updates = dict[Any, Any]

SAMPLERS = {
    "DDIM": SchedulerName.DDIM,
    "DPM++ 2M": SchedulerName.DPM_SOLVER,
    "Euler": SchedulerName.EULER,
    "Euler a": SchedulerName.EULER_ANCESTRAL,
    "LCM": SchedulerName.LCM,
}
"""Names that people know."""

OFTEN = 0.25
"""Seconds between two previews of a run: showing every step of a quick one would slow it down."""

ALL_PIECES = ("All pieces", "all")


class Answers:
    """The events of a page.

    Args:
        studio: whose sessions are meant. page: whose components are updated.
    """

    def __init__(self, studio: Studio, page: Page) -> None:
        self.studio, self.page = studio, page

    def on_arrive(self, request: gr.Request, key: str) -> Updates:
        """A page is there: its session, or a new one."""
        try:
            session = self.studio.adopt(_caller(request), key if isinstance(key, str) else "")
        except FisEditError as error:
            return {self.page.status: views.said(str(error), "error"), self.page.make: gr.update(interactive=True)}
        lost = "What was saved of this session cannot be read, and was put aside." if session.lost else ""
        return {
            self.page.key: session.key,
            **self._stands(session, view="edit"),
            self.page.status: views.said(lost, "error"),
        }

    def on_leave(self, request: gr.Request) -> None:
        """A page is gone: its work ends."""
        self.studio.leave(_caller(request))

    def on_make(
        self, request: gr.Request, prompt: str, reference: bytes | None, scale: float, *config: Any
    ) -> Iterator[Updates]:
        """A new picture from words."""
        look = _look(reference, scale)
        yield from self._run(
            request, lambda session: handlers.generate(self.studio, session, prompt, self._settings(*config), look)
        )

    def on_open(self, request: gr.Request, data: bytes | None, prompt: str, *config: Any) -> Iterator[Updates]:
        """A new picture from a file."""
        yield from self._run(
            request,
            lambda session: handlers.open_picture(
                self.studio, session, data or b"", prompt, replace(self._settings(*config), width=None, height=None)
            ),
        )

    def on_edit(
        self, request: gr.Request, prompt: str, reference: bytes | None, scale: float, *wish: Any
    ) -> Iterator[Updates]:
        """An edit of the picture on the stage."""
        look = _look(reference, scale)
        yield from self._run(
            request, lambda session: handlers.edit(self.studio, session, prompt, _region(session, *wish), look), prompt
        )

    def on_measure(self, request: gr.Request) -> Iterator[Updates]:
        """A dense run of the result on the stage, to compare."""
        yield from self._run(request, lambda session: handlers.dense(self.studio, session, session.current.id), None)

    def on_stop(self, request: gr.Request) -> str:
        """The run that goes on ends before its next step."""
        self._session(request).stop()
        return views.said("Stopping ...")

    def on_words(self, request: gr.Request, prompt: str, chosen: list[str]) -> Updates:
        """The changed words, as they are typed."""
        history = self._session(request).history
        if not len(history):
            return {self.page.words_line: ""}
        old, new = history.current.prompt, str(prompt)[: views.MOST_SHOWN]
        known = list(dict.fromkeys(re.findall(r"\w+", f"{old} {new}".lower())))
        return {
            self.page.words_line: views.changes(old, new) if old != new else "",
            self.page.words: gr.update(choices=known, value=[word for word in chosen or [] if word in known]),
        }

    def on_look(
        self, request: gr.Request, prompt: str, reference: bytes | None, scale: float, paint: str, *wish: Any
    ) -> Updates:
        """Where an edit would paint, and what it would cost."""
        page, session = self.page, None
        try:
            session = self.studio.session(_caller(request))
            if not len(session.history) or not prompt.strip():
                return {page.facts: ""}
            region, look = _region(session, paint, *wish), _look(reference, scale)
            seen = handlers.preview(self.studio, session, prompt, region, look)
        except Busy as error:
            own = session is not None and not session.idle
            return {page.facts: gr.skip() if own else views.said(str(error))}
        except FisEditError as error:
            return {page.facts: views.said(str(error), "error"), page.stage: gr.update(region="")}
        pieces = [ALL_PIECES] + [(f"{n + 1}. from the left", str(n)) for n in range(seen.preview.pieces)]
        whole = wish[1] == ALL_PIECES[1]
        return {
            page.stage: gr.update(region="" if seen.preview.nothing else views.region(seen.preview.mask)),
            page.facts: views.outlook(seen),
            page.instance: gr.update(choices=pieces) if whole else gr.skip(),
        }

    def moves(self, move: Callable[[Session], object]) -> Callable[..., Updates]:
        """An event that goes elsewhere in the history."""

        def on_move(request: gr.Request) -> Updates:
            return self._quick(request, move)

        return on_move

    def on_select(self, request: gr.Request, event: gr.EventData) -> Updates:
        """A picture of the history was chosen."""
        chosen = str(getattr(event, "id", ""))
        return self._quick(request, lambda session: handlers.checkout(session, chosen))

    def on_compare(self, request: gr.Request, other: str) -> Updates:
        """Another picture to compare the one on the stage with."""
        session = self._session(request)
        try:
            before, after = handlers.compare(session, str(other))
        except FisEditError as error:
            return {self.page.status: views.said(str(error), "error")}
        return {self.page.stage: gr.update(picture=self._picture(after, before, "compare"))}

    def fetches(self, job: Callable[[Session], Path]) -> Callable[..., Updates]:
        """An event that gives the browser a file."""

        def on_fetch(request: gr.Request) -> Updates:
            try:
                return {self.page.fetch: str(job(self.studio.session(_caller(request))))}
            except FisEditError as error:
                return {self.page.status: views.said(str(error), "error")}

        return on_fetch

    def on_file(self, request: gr.Request, data: bytes) -> Updates:
        """A file was dropped: a saved session is taken up, of a picture the settings are."""
        page = self.page
        try:
            session = self.studio.session(_caller(request))
            if data[:2] == b"PK":
                export.reopen(self.studio, session, data)
                return {**self._stands(session, view="edit"), page.found: views.said("The session is open.")}
            found = export.restore(self.studio, data)
        except FisEditError as error:
            return {page.found: views.said(str(error), "error"), page.open: gr.update(interactive=False)}
        told: Updates = {page.found: views.said(found.words), page.open: gr.update(interactive=True)}
        told |= {page.open_panel: gr.update(open=True)}
        told |= {page.prompt: found.prompt} if found.prompt else {}
        return told | (self._recipe(found.settings) if found.settings else {})

    def _recipe(self, settings: Settings) -> Updates:
        page, known = self.page, {value: name for name, value in SAMPLERS.items()}
        return {
            page.steps: settings.steps,
            page.guidance: settings.guidance,
            page.seed: settings.seed,
            page.width: settings.width or gr.skip(),
            page.height: settings.height or gr.skip(),
            page.scheduler: known[SchedulerName(settings.scheduler)],
            page.negative: settings.negative_prompt,
            page.model: self.studio.shelf.chosen(settings.model).label,
            page.loras: list(settings.loras),
            **self._scales(settings.loras),
        }

    def _scales(self, chosen: Mapping[str, float]) -> Updates:
        """A slider for each chosen LoRA, and no others."""
        return {
            slider: gr.update(visible=label in chosen, value=chosen.get(label, 1.0))
            for label, slider in self.page.lora_scales.items()
        }

    def on_model(self, label: str) -> Updates:
        """A model was chosen: its own size and guidance are suggested."""
        try:
            model = self.studio.shelf.chosen(str(label))
        except FisEditError as error:
            return {self.page.status: views.said(str(error), "error")}
        side, page = model.native_size, self.page
        return {page.width: side, page.height: side, page.guidance: model.guidance}

    def on_loras(self, chosen: list[str] | None, *scales: float) -> Updates:
        """LoRAs were chosen: each has a scale, as it was before or 1."""
        before = dict(zip(self.page.lora_scales, scales, strict=True))
        return self._scales({label: before[label] for label in chosen or () if label in before})

    def _settings(self, *config: Any) -> Settings:
        """What `Page.config` holds; sliders give floats."""
        steps, guidance, seed, width, height, scheduler, negative, model, chosen, *scales = config
        steps, seed, width, height = (
            int(value) if isinstance(value, float) and value.is_integer() else value
            for value in (steps, seed, width, height)
        )
        scale = dict(zip(self.page.lora_scales, scales, strict=True))
        loras = {str(name): scale.get(name, 1.0) for name in chosen or ()}
        sampler = SAMPLERS.get(scheduler, str(scheduler))
        return Settings(steps, guidance, seed, width, height, sampler, str(negative or ""), str(model or ""), loras)

    def on_reuse(self, request: gr.Request) -> Any:
        """The seed of the picture on the stage."""
        history = self._session(request).history
        return history.current.config.seed if len(history) else gr.skip()

    def _run(
        self, request: gr.Request, start: Callable[[Session], Iterator[Progress]], prompt: str | None = ""
    ) -> Iterator[Updates]:
        """Show a run as it goes, and where the session stands after it.

        Args:
            prompt: an edit's, whose previews lie in its region where that was looked for; "" for a new picture, whose
                previews lie over all; None for a run without previews.
        """
        page, session = self.page, None
        try:
            session = self.studio.session(_caller(request))
            yield {**self._buttons(session, busy=True), page.status: views.said("Starting ...")}
            shown = 0.0
            for news in start(session):
                if news.picture is None or perf_counter() - shown < OFTEN:
                    continue
                shown = perf_counter()
                seen = session.seen if session.seen and session.seen.diff.prompt == prompt else None
                live = "" if prompt is None else views.live(news.picture, seen.mask if seen else None)
                yield {page.stage: gr.update(live=live), page.status: views.status(news)}
            yield self._stands(session, view="compare")
        except Cancelled:
            yield self._stays(session, views.said("Stopped. Nothing was changed."))
        except FisEditError as error:
            yield self._stays(session, views.said(str(error), "error"))
        except Exception:
            yield self._stays(session, views.said("That should not have happened: see the server's log.", "error"))
            raise

    def _session(self, request: gr.Request) -> Session:
        """The session of a request; errors as the page shows them beside itself."""
        try:
            return self.studio.session(_caller(request))
        except FisEditError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def _quick(self, request: gr.Request, move: Callable[[Session], object]) -> Updates:
        try:
            session = self.studio.session(_caller(request))
            move(session)
            return self._stands(session, view="edit")
        except FisEditError as error:
            return {self.page.status: views.said(str(error), "error")}

    def _stays(self, session: Session | None, status: str) -> Updates:
        """After a run that came to nothing: all as it was, and why."""
        buttons = self._buttons(session) if session else {}
        return {**buttons, self.page.stage: gr.update(live=""), self.page.status: status}

    def _stands(self, session: Session, view: str) -> Updates:
        """Everything that shows where a session stands."""
        page, history = self.page, session.history
        cleared: Updates = {page.words_line: "", page.facts: "", page.status: "", **self._buttons(session)}
        if not len(history):
            none = {page.stage: gr.update(picture={}, region="", live=""), page.truth: "", page.tree: ""}
            return cleared | none | {page.before: gr.update(choices=[], value=None, visible=False)}
        current = history.current
        parent = history.find(current.parent) if current.parent is not None else None
        others = [(f"{n}. {views.caption(r)}", r.id) for n, r in enumerate(history, 1) if r is not current]
        return cleared | {
            page.stage: gr.update(picture=self._picture(current, parent, view), region="", live=""),
            page.truth: self._truth(session, current, parent),
            page.tree: views.tree(history, current.id),
            page.before: gr.update(choices=others, value=current.parent, visible=bool(others)),
            page.prompt: current.prompt,
            page.words: gr.update(choices=re.findall(r"\w+", current.prompt.lower()), value=[]),
            page.instance: gr.update(choices=[ALL_PIECES], value=ALL_PIECES[1]),
            page.follow: handlers.followers(session),
        }

    def _buttons(self, session: Session, *, busy: bool = False) -> Updates:
        """What may be pressed."""
        page, history = self.page, session.history
        some = bool(len(history)) and not busy
        child = some and history.current.parent is not None
        may = {
            page.undo: child,
            page.redo: some and history.later is not None,
            page.delete: some,
            page.measure: child,
            page.run: some,
        }
        may |= {page.download: some, page.save: some, page.make: not busy}
        updates = {button: gr.update(interactive=bool(allowed)) for button, allowed in may.items()}
        kinds = {page.run: "primary", page.make: "secondary"} if len(history) else {page.make: "primary"}
        for button, kind in kinds.items():
            updates[button] = gr.update(interactive=bool(may[button]), variant=kind, visible=not busy)
        return updates | {page.stop: gr.update(visible=busy)}

    def _truth(self, session: Session, result: EditResult, parent: EditResult | None) -> str:
        measured, shelf, name = session.measured.get(result.id), self.studio.shelf, session.model(result)
        model, loras = shelf.known(name), self.studio.wardrobe.words(result.config.loras)
        dense = measured or (model.pace.dense(result.stats.macs_dense) if model else None)
        made = f"by {model.label}" if model and len(shelf.models) > 1 else ""
        means = " ".join(filter(None, (made, f"with {loras}" if loras else "")))
        gone = "" if model else f"made by {label(name)}, which is not offered: start the app with it, as --model"
        return views.truth(result, parent, dense, measured=measured is not None, means=means, gone=gone)

    def _picture(self, after: EditResult, before: EditResult | None, view: str) -> Updates:
        """What the stage shows: a result, what it is compared with, and its mask."""
        size = after.image.size
        told = {"id": after.id, "url": views.shown(after.image), "width": size[0], "height": size[1]}
        told |= {"alt": after.prompt, "view": view}
        if before is None or before.image.size != size:
            return told
        mask = after.mask if after.parent == before.id else None
        told |= {"before": views.shown(before.image), "label": "before" if mask else views.caption(before)}
        return told | {"mask": views.region(mask) if mask else "", "split": views.border(mask)}


def _caller(request: gr.Request) -> str:
    if not request.session_hash:
        raise SessionError("a request must say its session: send session_hash")
    return str(request.session_hash)[:64]


def _look(reference: bytes | None, scale: float) -> Look | None:
    """The page's wish for a look."""
    return Look(reference, scale) if reference else None


def _region(session: Session, paint: Any, words: Any, instance: Any, grow: Any, only: Any) -> Region:
    """The page's wish for where."""
    add, protect = views.strokes(paint, session.current.image.size)
    piece = None if instance == ALL_PIECES[1] else int(instance)
    chosen = tuple(str(word) for word in words or ())
    return Region(chosen, piece, int(grow or 0), add, protect, bool(only) and add is not None)
