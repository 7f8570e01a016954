"""Builds the page: components, events and the HTTP API over the app's state.

`build` gives the page, `theme` what a server hands to gradio beside it. The page's events are private; programs use
`api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gradio as gr

from app import api, export, history
from app.components import PageComponents, read_asset
from app.page_blocks import PageBlocks
from app.run_events import RunEvents
from app.server import MAX_WAITING
from app.session_events import SessionEvents

if TYPE_CHECKING:
    from app.sessions import AppState

_RUNS: dict[str, Any] = {"concurrency_id": "run", "concurrency_limit": MAX_WAITING}
"""Arguments of the events that start runs.

Runs of all users wait at the worker, which tells each how many come before it and lets it be stopped. Gradio's own
queue begins where so many wait there.
"""

_LIVE: dict[str, Any] = {"concurrency_id": "live", "concurrency_limit": 4, "trigger_mode": "multiple"}
"""A live edit begins while the one that it stops still ends."""

_QUICK: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
_UNQUEUED = _QUICK | {"queue": False}


def theme() -> dict[str, Any]:
    """Theme, style and script, as `gradio.mount_gradio_app` and `Blocks.launch` take them."""
    grey, rose = gr.themes.colors.zinc, gr.themes.colors.rose
    base = gr.themes.Base(
        primary_hue=rose,
        neutral_hue=grey,
        radius_size=gr.themes.sizes.radius_md,
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
    )
    script = f"<script>{read_asset('page.js')}</script>"
    head = f'<meta name="viewport" content="width=device-width, initial-scale=1">{script}'
    return {"theme": base, "css": read_asset("style.css"), "head": head}


def build(state: AppState) -> gr.Blocks:
    """The page over the app's state, with the API's endpoints."""
    blocks = PageBlocks(title="fisedit", analytics_enabled=False, delete_cache=(600, 3600))
    with blocks:
        page = PageComponents(state.pool)
        events = SessionEvents(state, page)
        runs = RunEvents(state, page)
        _connect_session(blocks, page, events, runs)
        _connect_runs(page, runs)
        _connect_previews(page, events)
        _connect_history(page, events)
        _connect_settings(page, events)
        api.add(state, _RUNS)
    return blocks


def _connect_session(blocks: gr.Blocks, page: PageComponents, events: SessionEvents, runs: RunEvents) -> None:
    arrived = blocks.load(
        events.on_arrive, page.key, [page.key, *page.session_outputs], js="() => window.fisedit.key()", **_UNQUEUED
    )
    arrived.then(None, page.key, js="(key) => { window.fisedit.keep(key); window.fisedit.restore(); }", **_QUICK)
    followed = page.follow_run.click(
        runs.on_follow, None, page.session_outputs, concurrency_limit=MAX_WAITING, **_QUICK
    )
    followed.then(None, js="() => { window.fisedit.showDraft(); }", **_QUICK)  # and the words of what it gave
    blocks.unload(events.on_leave)


def _connect_runs(page: PageComponents, events: RunEvents) -> None:
    run = _RUNS | {"api_visibility": "private", "show_progress": "minimal", "show_progress_on": page.status}
    settings, shown = page.settings_inputs, page.session_outputs
    made = page.make.click(events.on_make, [page.count, page.prompt, *page.condition_inputs, *settings], shown, **run)
    opened = page.open.click(
        events.on_open, [page.file, page.prompt, *settings], [*shown, page.file, page.found], **run
    )
    edited = page.run.click(events.on_edit, [page.count, *page.edit_inputs], shown, **run)
    varied = page.vary.click(events.on_vary, page.edit_inputs, shown, **run)
    erased = page.erase.click(events.on_erase, page.edit_inputs, shown, **run)
    extended = page.extend.click(events.on_extend, [page.prompt, *page.extension], shown, **run)
    for ended in (made, opened, edited, varied, erased, extended):  # what was typed meanwhile is told of
        ended.then(None, js="() => { window.fisedit.moveDraft(); }", **_QUICK)
    page.draw_live.click(events.on_live, page.edit_inputs, [page.stage, page.status], **_QUICK | _LIVE)
    page.measure.click(events.on_measure, None, shown, **run)
    page.reconnect.click(lambda: None, **_QUICK)
    page.stop.click(events.on_stop, None, page.stop, **_UNQUEUED)


def _connect_previews(page: PageComponents, events: SessionEvents) -> None:
    latest = _UNQUEUED | {"trigger_mode": "always_last"}
    typed = [page.prompt, page.words, page.model]
    page.show_words.click(events.on_words, typed, [page.words_line, page.tokens, page.words, page.status], **latest)
    for button, cells in ((page.wider, 1), (page.tighter, -1)):
        button.click(events.on_widen(cells), page.grow, page.grow, **_UNQUEUED)
    reset = page.reset_region.click(events.on_reset, None, page.region_inputs, **_UNQUEUED)
    reset.then(None, js="() => { window.fisedit.typed(); }", **_QUICK)  # what a server sets tells no one
    changes = [
        page.stage.input,
        page.words.input,
        page.instance.input,
        page.grow.change,
        page.only.input,
        page.feather.change,
        page.strength.change,
        page.quality.input,
    ]
    changes += [page.reference.upload, page.reference.clear, page.reference_scale.release]
    changes += [page.control.upload, page.control.clear, page.control_scale.release, page.edges.input]
    changes += [page.driven.input, *(slider.release for slider in (*page.pose, *page.expression))]
    if page.pool.detector is not None:
        changes.append(page.things.change)
        page.find.click(events.on_find, None, [page.things, page.status], **_UNQUEUED)
    settings = [*page.settings_inputs, *page.extension, page.file]
    gr.on(
        [page.change_words.click, *changes, *(each.change for each in settings)],
        None,
        page.status,
        page.status,
        js="(status) => window.fisedit.answered(status)",
        **_QUICK,
    )
    shown = gr.on(
        [page.show_preview.click, *changes],
        events.on_preview,
        page.edit_inputs,
        [page.stage, page.facts, page.instance],
        **latest,  # a run that joins the queue while a preview leaves it may never hear of itself
    )
    shown.success(None, js="() => { window.fisedit.askAgain(); }", **_QUICK)
    shown.failure(None, None, page.facts, js="() => window.fisedit.failedPreview()", **_QUICK)


def _connect_history(page: PageComponents, events: SessionEvents) -> None:
    shown = page.session_outputs
    moves = {page.undo: history.undo, page.redo: history.redo, page.delete_now: history.delete_current}
    moves |= {page.keep: history.keep, page.discard: history.discard}
    moved = [button.click(events.on_move(move), None, shown, **_UNQUEUED) for button, move in moves.items()]
    moved += [each.select(events.on_select, None, shown, **_UNQUEUED) for each in (page.tree, page.candidates)]
    for event in moved:
        event.then(None, js="() => { window.fisedit.showDraft(); }", **_QUICK)
    page.before.input(events.on_compare, page.before, [page.stage, page.status], **_UNQUEUED)
    page.delete.click(None, page.descendants, js="(follow) => { window.fisedit.remove(follow); }", **_QUICK)
    for button, make_file in ((page.download, export.picture_file), (page.save, export.export_session)):
        fetched = button.click(events.on_fetch(make_file), None, [page.fetch, page.status], **_UNQUEUED)
        fetched.success(None, js="() => { window.fisedit.fetch(); }", **_QUICK)


def _connect_settings(page: PageComponents, events: SessionEvents) -> None:
    restored = [*page.session_outputs, *page.settings_inputs, page.sizes_row, page.file, page.found, page.open_panel]
    asked = "(file, model) => window.fisedit.drop(file, model)"
    dropped = page.file.upload(events.on_file, [page.file, page.model], restored, js=asked, **_UNQUEUED)
    dropped.then(None, js="() => { window.fisedit.ask(); }", **_QUICK)
    page.file.clear(
        lambda: ("", gr.update(interactive=False), gr.update(photo="")),
        None,
        [page.found, page.open, page.stage],
        **_UNQUEUED,
    )
    scales = list(page.lora_scales.values())
    page.loras.change(events.on_loras, [page.loras, *scales], scales, **_UNQUEUED)
    sampling = [page.steps, page.guidance, page.scheduler]
    page.loras.input(events.on_loras_chosen, [page.loras, page.model, *sampling], sampling, **_UNQUEUED)
    suggested = [page.width, page.height, page.guidance, page.sizes_row, page.examples, page.status]
    page.model.input(events.on_model, page.model, suggested, **_UNQUEUED)
    page.calibrate.click(events.on_calibrate, None, page.status, concurrency_limit=4, **_QUICK)
    page.reuse.click(events.on_reuse, None, [page.seed, page.random], **_UNQUEUED)
