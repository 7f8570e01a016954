"""Lays the page out and wires it: components here, what they do in `handlers`, how it looks in `views` and `page/`.

`build` gives the page, `looks` what a server hands to gradio beside it. The page's events are private; programs use
`api`.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import api, export, handlers, validation
from app.events import ALL_PIECES, SAMPLERS, Answers

if TYPE_CHECKING:
    from app.sessions import Studio

_PAGE = Path(__file__).parent / "page"
_RUNS: dict[str, Any] = {"concurrency_id": "run", "concurrency_limit": 2}
"""Generating, opening, editing and measuring share one queue, whoever asks."""


def looks() -> dict[str, Any]:
    """Theme, style and script, as `gradio.mount_gradio_app` and `Blocks.launch` take them."""
    grey, rose = gr.themes.colors.zinc, gr.themes.colors.rose
    theme = gr.themes.Base(
        primary_hue=rose,
        neutral_hue=grey,
        radius_size=gr.themes.sizes.radius_md,
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
    )
    script = f"<script>{_read('page.js')}</script>"
    head = f'<meta name="viewport" content="width=device-width, initial-scale=1">{script}'
    return {"theme": theme, "css": _read("style.css"), "head": head}


def build(studio: Studio) -> gr.Blocks:
    """The page over a studio, with the API's endpoints."""
    blocks = gr.Blocks(title="fisedit", analytics_enabled=False, delete_cache=(600, 3600))
    with blocks:
        page = Page(studio)
        page.lay_out()
        page.wire(blocks)
        api.add(studio, _RUNS)
    return blocks


class Page:
    """The page's components, and what happens when they are used."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.shelf = studio.shelf

    def lay_out(self) -> None:
        """Header, stage and panel side by side, history below."""
        gr.HTML(_header(self.studio), elem_id="header")
        with gr.Row(elem_id="desk"):
            with gr.Column(scale=7, min_width=320, elem_id="left"):
                self.stage = gr.HTML(
                    value="",
                    html_template=_read("stage.html"),
                    js_on_load=_read("stage.js"),
                    picture={},
                    region="",
                    live="",
                    apply_default_css=False,
                    elem_id="stage",
                )
                self.truth = gr.HTML(elem_id="truth", elem_classes="line")
                with gr.Row(elem_id="after"):
                    self.undo = gr.Button("Undo", size="sm", interactive=False, elem_id="undo")
                    self.redo = gr.Button("Redo", size="sm", interactive=False, elem_id="redo")
                    self.delete = gr.Button("Delete", size="sm", interactive=False, elem_id="delete")
                    self.measure = gr.Button("Measure dense", size="sm", interactive=False, elem_id="measure")
                    self.download = gr.Button("Download", size="sm", interactive=False, elem_id="download")
                    self.save = gr.Button("Download all", size="sm", interactive=False, elem_id="save")
                self.tree = gr.HTML(elem_id="history", js_on_load=_read("tree.js"), apply_default_css=False)
                self.before = gr.Dropdown([], label="Compare with", visible=False, elem_id="before", filterable=False)
            with gr.Column(scale=5, min_width=320, elem_id="right"):
                self._panel()
        self._hidden()

    def _panel(self) -> None:
        self.prompt = gr.Textbox(
            label="Prompt",
            lines=3,
            max_lines=8,
            max_length=validation.MOST_LETTERS,
            placeholder="a cat and a cake on a beach",
            elem_id="prompt",
            autofocus=True,
        )
        self.words_line = gr.HTML(elem_id="words-line", elem_classes="line")
        with gr.Row(elem_id="actions"):
            self.run = gr.Button("Run edit", variant="secondary", interactive=False, elem_id="run")
            self.make = gr.Button("New picture", variant="primary", interactive=False, elem_id="make")
            self.stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop")
        self.facts = gr.HTML(elem_id="facts", elem_classes="line")
        self.status = gr.HTML(elem_id="status")
        with gr.Accordion("Region", open=False, elem_id="region-panel"):
            self.words = gr.Dropdown(
                [], multiselect=True, label="Use only these words", elem_id="words", allow_custom_value=True
            )
            self.instance = gr.Dropdown(
                [ALL_PIECES], value=ALL_PIECES[1], label="Piece", elem_id="piece", filterable=False
            )
            self.grow = gr.Slider(*validation.GROW, value=0, step=1, label="Grow or shrink", elem_id="grow")
            self.only = gr.Checkbox(label="Only where I paint", elem_id="only")
        with gr.Accordion("Settings of new pictures", open=False, elem_id="settings-panel"):
            self._settings()
        with gr.Accordion("Look of another picture", open=False, visible=self.studio.reads_looks, elem_id="look-panel"):
            self.reference = gr.File(
                label="Picture whose look is taken",
                type="binary",
                file_types=["image"],
                height=120,
                elem_id="reference",
            )
            self.likeness = gr.Slider(*validation.LOOK_SCALE, value=1, step=0.05, label="Scale", elem_id="likeness")
        self.open_panel = gr.Accordion("Open a picture or a saved session", open=False, elem_id="open-panel")
        with self.open_panel:
            self.file = gr.File(
                label="Picture or saved session",
                type="binary",
                file_types=["image", ".zip"],
                height=120,
                elem_id="file",
            )
            self.found = gr.HTML(elem_id="found", elem_classes="line")
            self.open = gr.Button("Open this picture", interactive=False, elem_id="open")

    def _settings(self) -> None:
        native = self.shelf.first.native_size
        labels = [model.label for model in self.shelf.models]
        self.model = gr.Dropdown(
            labels, value=labels[0], label="Model", visible=len(labels) > 1, filterable=False, elem_id="model"
        )
        offered = self.studio.wardrobe.labels
        self.loras = gr.Dropdown(
            list(offered),
            multiselect=True,
            max_choices=validation.MOST_LORAS,
            label="LoRAs",
            visible=bool(offered),
            elem_id="loras",
        )
        self.lora_scales = {
            label: gr.Slider(
                *validation.LORA_SCALE, value=1, step=0.05, label=label, visible=False, elem_classes="lora-scale"
            )
            for label in offered
        }
        with gr.Row():
            self.steps = gr.Slider(*validation.STEPS, value=25, step=1, label="Steps", elem_id="steps")
            self.guidance = gr.Slider(
                *validation.GUIDANCE, value=self.shelf.first.guidance, step=0.5, label="Guidance", elem_id="guidance"
            )
        with gr.Row(elem_id="seed-row"):
            self.seed = gr.Number(
                value=0, precision=0, minimum=0, maximum=validation.SEEDS[1], label="Seed", elem_id="seed", scale=3
            )
            self.reuse = gr.Button("Reuse", size="sm", elem_id="reuse", min_width=60)
            self.dice = gr.Button("Dice", size="sm", elem_id="dice", min_width=60)
        with gr.Row():
            self.width = gr.Slider(*validation.SIDES, value=native, step=8, label="Width", elem_id="width")
            self.height = gr.Slider(*validation.SIDES, value=native, step=8, label="Height", elem_id="height")
        self.scheduler = gr.Dropdown(list(SAMPLERS), value="DDIM", label="Scheduler", elem_id="scheduler")
        self.negative = gr.Textbox(
            label="Negative prompt", lines=1, max_length=validation.MOST_LETTERS, elem_id="negative"
        )

    def _hidden(self) -> None:
        """What scripts press and the browser fetches."""
        self.tell = gr.Button(visible="hidden", elem_id="tell")
        self.look = gr.Button(visible="hidden", elem_id="look")
        self.listen = gr.Button(visible="hidden", elem_id="listen")
        self.delete_now = gr.Button(visible="hidden", elem_id="delete-now")
        self.fetch = gr.DownloadButton(visible="hidden", elem_id="fetch")
        self.key = gr.Textbox(visible="hidden", elem_id="key")
        self.follow = gr.Number(0, visible="hidden", elem_id="follow")

    @property
    def wish(self) -> list[Any]:
        """What says how an edit is wanted."""
        return [self.prompt, *self.taken, self.stage, self.words, self.instance, self.grow, self.only]

    @property
    def taken(self) -> list[Any]:
        """What says whose look is taken."""
        return [self.reference, self.likeness]

    @property
    def config(self) -> list[Any]:
        """What says how a new picture is made."""
        size = [self.steps, self.guidance, self.seed, self.width, self.height]
        return [*size, self.scheduler, self.negative, self.model, self.loras, *self.lora_scales.values()]

    @property
    def state(self) -> list[Any]:
        """What shows where the session stands."""
        shown = [self.stage, self.truth, self.tree, self.before, self.status, self.prompt, self.words_line, self.facts]
        buttons = [self.undo, self.redo, self.delete, self.measure, self.download, self.save, self.run, self.make]
        return [*shown, *buttons, self.stop, self.words, self.instance, self.follow, self.open]

    def wire(self, blocks: gr.Blocks) -> None:
        """Who calls whom."""
        do = Answers(self.studio, self)
        quick: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        still = quick | {"queue": False}
        long = _RUNS | {"api_visibility": "private", "show_progress": "minimal", "show_progress_on": self.status}
        blocks.load(do.on_arrive, self.key, [self.key, *self.state], js="() => window.fisedit.key()", **still).then(
            None, self.key, js="(key) => { window.fisedit.keep(key); }", **quick
        )
        blocks.unload(do.on_leave)
        self.make.click(do.on_make, [self.prompt, *self.taken, *self.config], self.state, **long)
        self.open.click(do.on_open, [self.file, self.prompt, *self.config], self.state, **long)
        self.run.click(do.on_edit, self.wish, self.state, **long)
        self.measure.click(do.on_measure, None, self.state, **long)
        self.listen.click(lambda: None, **quick)
        self.stop.click(do.on_stop, None, self.status, **still)
        self.tell.click(
            do.on_words, [self.prompt, self.words], [self.words_line, self.words], trigger_mode="always_last", **still
        )
        wishes = [self.stage.input, self.words.input, self.instance.input, self.grow.release, self.only.input]
        wishes += [self.reference.upload, self.reference.clear, self.likeness.release]
        gr.on(
            [self.look.click, *wishes],
            do.on_look,
            self.wish,
            [self.stage, self.facts, self.instance],
            trigger_mode="always_last",
            **still,  # a run that joins the queue while a look leaves it may never hear of itself
        )
        moves = {self.undo: handlers.undo, self.redo: handlers.redo, self.delete_now: handlers.delete_current}
        for button, move in moves.items():
            button.click(do.moves(move), None, self.state, **still)
        self.tree.select(do.on_select, None, self.state, **still)
        self.before.input(do.on_compare, self.before, [self.stage, self.status], **still)
        self.delete.click(None, self.follow, js="(follow) => { window.fisedit.remove(follow); }", **quick)
        for button, job in ((self.download, export.picture_file), (self.save, export.archive)):
            fetched = button.click(do.fetches(job), None, [self.fetch, self.status], **still)
            fetched.success(None, js="() => { window.fisedit.fetch(); }", **quick)
        self.file.upload(do.on_file, self.file, [*self.state, *self.config, self.found, self.open_panel], **still)
        self.file.clear(lambda: ("", gr.update(interactive=False)), None, [self.found, self.open], **still)
        scales = list(self.lora_scales.values())
        self.loras.change(do.on_loras, [self.loras, *scales], scales, **still)
        self.model.input(do.on_model, self.model, [self.width, self.height, self.guidance, self.status], **still)
        self.dice.click(lambda: SystemRandom().randrange(2**32), None, self.seed, **still)
        self.reuse.click(do.on_reuse, None, self.seed, **still)


def _header(studio: Studio) -> str:
    labels = [model.label for model in studio.shelf.models]
    shown = labels[0] if len(labels) == 1 else f"{len(labels)} models"
    told = escape(f"{shown}, {studio.shelf.dtype} on {studio.shelf.device}")
    return (
        f"<header><h1>fisedit</h1><p>Change a word. Only what it means is painted again.</p>"
        f'<span class="chip" title="{escape(", ".join(labels), quote=True)}">{told}</span></header>'
    )


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")
