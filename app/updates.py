"""The state of a session in the page's components, as gradio updates. Knows components and sessions; starts no work."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import html, views
from app.components import ALL_PIECES, SCHEDULERS, SIZES
from app.history import count_descendants
from app.validation import GROW, grow_bound, label
from fisedit.values import Quality, SchedulerName
from fisedit.values.sizes import Sizes, make_sizes

if TYPE_CHECKING:
    from app.components import PageComponents
    from app.handlers import EditEstimate
    from app.model_pool import ModelPool
    from app.session import Session
    from app.validation import SourceSettings
    from fisedit import EditResult
    from fisedit.integrations.mask_providers import Detection

Updates = dict[Any, Any]
"""Components -> their new values, or gradio's updates."""


class PageUpdates:
    """Updates of a page's components.

    Args:
        page: the components.
        pool: the models and LoRAs that are offered.
    """

    def __init__(self, page: PageComponents, pool: ModelPool) -> None:
        self.page, self.pool = page, pool

    def after_run(self, session: Session) -> Updates:
        """The session after a run: the prompt stays as it is, as more may have been typed meanwhile."""
        shown = self.session(session, view="edit" if session.candidates else "compare")
        shown.pop(self.page.prompt, None)
        return shown | (self.region(session) if session.current.parent is None else {})

    def region(self, session: Session) -> Updates:
        """The region's controls as they are at first."""
        page = self.page
        return {
            page.grow: self._grow(session, value=0),
            page.only: False,
            page.feather: 0,
            page.strength: 1,
            page.quality: Quality.BALANCED,
        }

    def _grow(self, session: Session, **more: Any) -> Updates:
        """The slider of the region's width, whose ends the picture sets."""
        most = grow_bound(session.current.canvas.size) if len(session.history) else GROW[1]
        return gr.update(minimum=-most, maximum=most, **more)

    def session(self, session: Session, view: str) -> Updates:
        """Everything that shows the state of a session; `view` is the stage's: "edit" or "compare"."""
        page, history = self.page, session.history
        cleared: Updates = {page.words_line: "", page.facts: "", **self.buttons(session)}
        cleared[page.status] = html.message(session.unsaved, "error lasting")
        if not len(history):
            none = {page.stage: gr.update(picture={}, region="", live="", photo=""), page.cost_line: "", page.tree: ""}
            none |= {page.candidates: ""}
            return cleared | none | {page.before: gr.update(choices=[], value=None, visible=False)}
        current, kept = history.current, session.kept
        parent = history.find(current.parent) if current.parent is not None else None
        before = history.step_before(current)
        others = [(f"{n}. {html.caption(r, kept.step_before(r))}", r.id) for n, r in enumerate(kept.steps, 1)]
        others = [(name, each) for name, each in others if each != current.id]
        others += [] if parent is None or parent.extends is None else [("before it was painted", parent.id)]
        candidates = session.candidates
        return cleared | {
            page.stage: gr.update(picture=self.picture(current, parent, view), region="", live="", photo=""),
            page.cost_line: self._cost_line(session),
            page.candidates: html.candidates(candidates, current.id),
            page.tree: html.tree(kept, before.id if before and current in candidates else current.id),
            page.before: gr.update(choices=others, value=current.parent, visible=bool(others)),
            page.prompt: current.prompt,
            page.words: gr.update(choices=list(dict.fromkeys(re.findall(r"\w+", current.prompt.lower()))), value=[]),
            page.instance: gr.update(choices=[ALL_PIECES], value=ALL_PIECES[1]),
            page.grow: self._grow(session),
            page.descendants: count_descendants(session),
            **self._no_things(),
        }

    def _no_things(self) -> Updates:
        """Before a detector has looked at the picture; nothing without one."""
        return {} if self.pool.detector is None else {self.page.things: gr.update(choices=[], value=[])}

    def buttons(self, session: Session, *, busy: bool = False) -> Updates:
        """Enable the buttons that may be pressed, and disable the others."""
        page, history = self.page, session.history
        some = bool(len(history)) and not busy
        child = some and history.step_before(history.current) is not None
        may = {
            page.undo: child,
            page.redo: some and history.redo_id is not None,
            page.vary: some,
            page.erase: some,
            page.extend: some,
            page.delete: some,
            page.measure: child,
            page.run: some,
            page.download: some,
            page.save: some,
            page.make: not busy,
            page.keep: some and history.current in session.candidates,
        }
        if self.pool.detector is not None:
            may[page.find] = some
        updates = {button: gr.update(interactive=bool(allowed)) for button, allowed in may.items()}
        kinds = {page.run: "secondary" if session.candidates else "primary", page.make: "secondary"}
        kinds = kinds if len(history) else {page.make: "primary"}
        for button, kind in kinds.items():
            updates[button] = gr.update(interactive=bool(may[button]), variant=kind, visible=not busy)
        return updates | {page.stop: gr.update(value="Stop", interactive=True, visible=busy)}

    def unchanged(self, session: Session | None, status: str) -> Updates:
        """Return the updates after a run without a result: all as it was, and why."""
        buttons = self.buttons(session) | {self.page.cost_line: self._cost_line(session)} if session else {}
        return {**buttons, self.page.stage: gr.update(live=""), self.page.status: status}

    def estimate(self, edit: EditEstimate, *, all_pieces: bool) -> Updates:
        """Show where an edit would paint; `all_pieces` is whether no single piece is chosen."""
        page = self.page
        pieces = [ALL_PIECES] + [(f"{n + 1}. from the left", str(n)) for n in range(edit.preview.pieces)]
        return {
            page.stage: gr.update(
                region="" if edit.preview.nothing else views.region(edit.preview.mask, edit.size, edit.crop)
            ),
            page.facts: html.estimate(edit),
            page.instance: gr.update(choices=pieces) if all_pieces else gr.skip(),
        }

    def things(self, found: Sequence[Detection]) -> Updates:
        """Show the things that a detector found, to be chosen from; the best alone is chosen."""
        page, best = self.page, max(range(len(found)), key=lambda i: found[i].score, default=None)
        choices = [(f"{i + 1}. {each.label or 'thing'}, {each.score:.0%}", str(i)) for i, each in enumerate(found)]
        note = "" if found else html.message("The detector found nothing in this picture.")
        return {
            page.things: gr.update(choices=choices, value=[] if best is None else [str(best)]),
            page.status: note,
        }

    def words(self, session: Session, prompt: str, chosen: list[str] | None, model: str) -> Updates:
        """The words of a new prompt that differ from the current one, and those that the model does not know.

        Nouns of an unchanged prompt can be clicked. With them come those that can be chosen, and the number of tokens.

        Args:
            session: the session whose prompt is compared; without one, words are named that the model does not know.
            prompt: the new prompt.
            chosen: words that are selected; those of neither prompt are dropped.
            model: label of the model that is selected for new pictures.
        """
        history, new = session.history, str(prompt)[: html.MAX_DIFF_CHARACTERS]
        offered = self.pool.find(session.model_name(history.current)) if len(history) else self.pool.select(model)
        vocabulary = offered.vocabulary if offered else None
        counted = {self.page.tokens: html.tokens(offered.count_tokens(new), offered.chunk_room) if offered else ""}
        if not len(history):
            return counted | {self.page.words_line: html.message(vocabulary.note(new) if vocabulary else "")}
        old, unknown = history.current.prompt, vocabulary.unknown_words(new) if vocabulary else ()
        same = html.nouns(new, offered.noun_edits(new) if offered else (), unknown) if old == new else ""
        shown = same or html.changes(old, new, unknown)
        known = list(dict.fromkeys(re.findall(r"\w+", f"{old} {new}".lower())))
        return counted | {
            self.page.words_line: shown + html.OWN_WORDS * (old != new),
            self.page.words: gr.update(choices=known, value=[word for word in chosen or [] if word in known]),
        }

    def settings(self, settings: SourceSettings) -> Updates:
        """The settings of a new picture."""
        page, known = self.page, {value: name for name, value in SCHEDULERS.items()}
        model, sizes = self.pool.select(settings.model), make_sizes(settings.sizes) or Sizes()
        told = [number for name in SIZES for number in sizes.as_dict().get(name, (0, 0))]
        return {
            page.steps: settings.steps,
            page.guidance: gr.skip() if settings.guidance is None else settings.guidance,
            page.seed: settings.seed,
            page.random: False,
            page.width: settings.width or gr.skip(),
            page.height: settings.height or gr.skip(),
            page.scheduler: known[SchedulerName(settings.scheduler)],
            page.clip_skip: settings.clip_skip,
            page.negative: settings.negative_prompt,
            page.model: model.label,
            page.sizes_row: gr.update(visible=model.reads_sizes),
            **dict(zip(page.sizes, told, strict=True)),
            page.loras: list(settings.loras),
            **self.lora_scales(settings.loras),
        }

    def lora_scales(self, chosen: Mapping[str, float]) -> Updates:
        """A slider for each chosen LoRA, and no others."""
        return {
            slider: gr.update(visible=label in chosen, value=chosen.get(label, 1.0))
            for label, slider in self.page.lora_scales.items()
        }

    def picture(self, after: EditResult, before: EditResult | None, view: str) -> Updates:
        """The stage's picture: a result, the one it is compared with, and its mask.

        Args:
            after: the result.
            before: the result to compare with, of the same size; None for none.
            view: "edit" or "compare".
        """
        size = after.size
        shown = {"id": after.id, "url": views.screen_url(after.image), "width": size[0], "height": size[1]}
        shown |= {"alt": after.prompt, "view": view}
        if before is None or before.size != size:
            return shown
        mask = after.mask if after.parent == before.id else None
        shown |= {"before": views.screen_url(before.image), "label": "before" if mask else html.caption(before)}
        place = size, after.config.crop
        return shown | {"mask": views.region(mask, *place) if mask else "", "split": views.border(mask, *place)}

    def running(self, session: Session) -> Updates:
        """Return the updates as a run begins: what it costs is told with its result, and not of the one before."""
        return self.buttons(session, busy=True) | {self.page.cost_line: ""}

    def _cost_line(self, session: Session) -> str:
        """The cost of the current result; "" before the first."""
        if not len(session.history):
            return ""
        result, name = session.current, session.model_name(session.current)
        parent = None if result.parent is None else session.history.find(result.parent)
        model, loras = self.pool.find(name), self.pool.loras.as_text(result.config.loras)
        made = f"by {model.label}" if model and len(self.pool.models) > 1 else ""
        source_text = " ".join(filter(None, (made, f"with {loras}" if loras else "")))
        unavailable = "" if model else f"made by {label(name)}, which is not offered: start the app with it, as --model"
        return html.cost_summary(
            result,
            parent,
            session.measured.get(result.id),
            source=session.history.lineage(result.id)[0],
            source_text=source_text,
            unavailable=unavailable,
        )
