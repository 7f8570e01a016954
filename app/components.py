"""The page's components, in the groups that events read and update. Knows gradio and what is offered; no events."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import html, validation
from fisedit.values import CLIP_SKIPS, CONTROL, DRIVE, REFERENCE, Quality, SchedulerName

if TYPE_CHECKING:
    from app.model_pool import ModelPool

SCHEDULERS = {name.label: name for name in SchedulerName}
"""Names that users know."""

STEPS = 25
"""Steps that a new picture has at first."""

SIZES = {
    "original_size": ("Original height", "Original width"),
    "crops_coords_top_left": ("Crop top", "Crop left"),
    "target_size": ("Target height", "Target width"),
}
"""Sizes that a model is told, as `Sizes` names them -> their labels."""

ALL_PIECES = ("All pieces", "all")

DRIVE_RANGES = {
    "Pitch": (-60, 60, 0, 1),
    "Yaw": (-60, 60, 0, 1),
    "Roll": (-60, 60, 0, 1),
    "Across": (-1, 1, 0, 0.02),
    "Down": (-1, 1, 0, 0.02),
    "Size": (0.1, 0.65, 0.4, 0.01),
}
"""Number of a drive's pose -> least, most, first, step."""

DRIVE_EXPRESSIONS = {
    "Left eye closed": "eyeBlinkLeft",
    "Right eye closed": "eyeBlinkRight",
    "Mouth open": "jawOpen",
    "Smile left": "mouthSmileLeft",
    "Smile right": "mouthSmileRight",
}
"""The coefficients of ARKit that the page offers, by their labels."""

_PAGE = Path(__file__).parent / "page"


class PageComponents:
    """The page's components, laid out: header, stage and panel with the history side by side, and hidden ones.

    Args:
        pool: the models and LoRAs that the page offers.
    """

    def __init__(self, pool: ModelPool) -> None:
        self.pool = pool
        gr.HTML(_header(pool), elem_id="header")
        with gr.Row(elem_id="desk"):
            with gr.Column(scale=7, min_width=320, elem_id="left"):
                self._add_stage()
            with gr.Column(scale=5, min_width=320, elem_id="right"):
                self._add_prompt()
                self._add_region()
                self._add_extension()
                with gr.Accordion("Settings of new pictures", open=False, elem_id="settings-panel"):
                    self._add_settings()
                self._add_conditions()
                self._add_upload()
        self._add_hidden()

    def _add_stage(self) -> None:
        self.stage = gr.HTML(
            value="",
            html_template=read_asset("stage.html"),
            js_on_load=read_asset("stage.js"),
            picture={},
            region="",
            live="",
            photo="",
            apply_default_css=False,
            elem_id="stage",
        )
        with gr.Row(elem_id="choice"):
            self.candidates = gr.HTML(elem_id="candidates", js_on_load=read_asset("tree.js"), apply_default_css=False)
            self.keep = gr.Button("Keep", variant="primary", size="sm", interactive=False, elem_id="keep")
            self.discard = gr.Button("Discard all", size="sm", elem_id="discard")
        self.found = gr.HTML(elem_id="found", elem_classes="line")
        self.before = gr.Dropdown([], label="Compare with", visible=False, elem_id="before", filterable=False)
        self.cost_line = gr.HTML(elem_id="truth", elem_classes="line")
        with gr.Row(elem_id="after"):
            self.undo = gr.Button("Undo", size="sm", interactive=False, elem_id="undo")
            self.redo = gr.Button("Redo", size="sm", interactive=False, elem_id="redo")
            self.vary = gr.Button("4 variations", size="sm", interactive=False, elem_id="vary")
            self.erase = gr.Button("Erase", size="sm", interactive=False, elem_id="erase")
            self.measure = gr.Button("Compare with a full run", size="sm", interactive=False, elem_id="measure")
            self.download = gr.Button("Download", size="sm", interactive=False, elem_id="download")
            self.save = gr.Button("Download all", size="sm", interactive=False, elem_id="save")
            self.delete = gr.Button("Delete", size="sm", interactive=False, elem_id="delete")

    def _add_prompt(self) -> None:
        self.tokens = gr.HTML(elem_id="tokens", elem_classes="line")
        self.prompt = gr.Textbox(
            label="Prompt",
            lines=3,
            max_lines=8,
            max_length=validation.MAX_PROMPT_CHARACTERS,
            placeholder="For example: a cat and a cake on a beach",
            elem_id="prompt",
            autofocus=True,
        )
        self.examples = gr.HTML(html.examples(self.pool.first.vocabulary), elem_id="examples", elem_classes="line")
        self.words_line = gr.HTML(elem_id="words-line", elem_classes="line")
        with gr.Row(elem_id="actions"):
            self.run = gr.Button("Run edit", variant="secondary", interactive=False, elem_id="run")
            self.make = gr.Button("New picture", variant="primary", interactive=False, elem_id="make")
            self.stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop")
        self.status = gr.HTML(elem_id="status")
        self.facts = gr.HTML(elem_id="facts", elem_classes="line")
        with gr.Row(elem_id="how"):
            self.live = gr.Checkbox(label="Live: draw while I type", elem_id="live", min_width=180)
            self.count = gr.Radio(
                [str(count) for count in range(validation.COUNTS[0], validation.COUNTS[1] + 1)],
                value="1",
                label="Batch count",
                elem_id="count",
                min_width=180,
            )
        self.tree = gr.HTML(elem_id="history", js_on_load=read_asset("tree.js"), apply_default_css=False)

    def _add_region(self) -> None:
        with gr.Accordion("Region", open=False, elem_id="region-panel"):
            self.words = gr.Dropdown(
                [], multiselect=True, label="Use only these words", elem_id="words", allow_custom_value=True
            )
            self.instance = gr.Dropdown(
                [ALL_PIECES], value=ALL_PIECES[1], label="Instance", elem_id="piece", filterable=False
            )
            if self.pool.detector is not None:
                self.find = gr.Button("Detect objects", size="sm", interactive=False, elem_id="find")
                self.things = gr.Dropdown([], multiselect=True, label="Only these objects", elem_id="things")
            self.grow = gr.Slider(*validation.GROW, value=0, step=1, label="Grow or shrink", elem_id="grow")
            self.only = gr.Checkbox(label="Only the painted region", elem_id="only")
            self.feather = gr.Slider(*validation.FEATHER, value=0, step=1, label="Feather", elem_id="feather")
            self.strength = gr.Slider(0.05, 1, value=1, step=0.05, label="Strength", elem_id="strength")
            self.quality = gr.Radio(list(Quality), value=Quality.BALANCED, label="Quality", elem_id="quality")
            self.reset_region = gr.Button("Reset", size="sm", elem_id="reset-region")

    def _add_extension(self) -> None:
        with gr.Accordion("Extend the picture", open=False, elem_id="extend-panel"), gr.Row(elem_id="extension"):
            self.extension = [
                gr.Number(0, label=side, precision=0, minimum=0, maximum=validation.EXTENSION[1], min_width=60)
                for side in ("Left", "Top", "Right", "Bottom")
            ]
            self.extend = gr.Button("Extend", size="sm", interactive=False, elem_id="extend")

    def _add_conditions(self) -> None:
        reads = self.pool.reads
        with gr.Accordion("Reference picture", open=False, visible=REFERENCE in reads, elem_id="look-panel"):
            self.reference = _picture_file("Image file", "reference")
            self.reference_scale = gr.Slider(
                *validation.REFERENCE_SCALE, value=1, step=0.05, label="Scale", elem_id="likeness"
            )
        with gr.Accordion("Control picture", open=False, visible=CONTROL in reads, elem_id="control-panel"):
            self.control = _picture_file("Image file", "control")
            self.edges = gr.Checkbox(label="Canny edges of it, or of the picture on the stage", elem_id="edges")
            self.control_scale = gr.Slider(
                *validation.REFERENCE_SCALE, value=1, step=0.05, label="Scale", elem_id="control-scale"
            )

        with gr.Accordion("Head pose", open=False, visible=DRIVE in reads, elem_id="drive-panel"):
            self.driven = gr.Checkbox(label="Set the pose", elem_id="driven")
            with gr.Row():
                self.pose = [_number_slider(name, *DRIVE_RANGES[name]) for name in DRIVE_RANGES]
            with gr.Row():
                self.expression = [_number_slider(name, 0, 1, 0, 0.05) for name in DRIVE_EXPRESSIONS]

    def _add_upload(self) -> None:
        self.open_panel = gr.Accordion("Open a picture or a saved session", open=False, elem_id="open-panel")
        with self.open_panel:
            self.file = gr.File(
                label="Picture or saved session",
                type="binary",
                file_types=["image", ".zip"],
                height=120,
                elem_id="file",
            )
            self.earlier = gr.HTML(html.EARLIER, elem_id="earlier", elem_classes="line")
            self.open = gr.Button("Open this picture", interactive=False, elem_id="open")

    def _add_settings(self) -> None:
        native = self.pool.first.native_size
        labels = [model.label for model in self.pool.models]
        self.model = gr.Dropdown(
            labels, value=labels[0], label="Model", visible=len(labels) > 1, filterable=False, elem_id="model"
        )
        offered = self.pool.loras.labels
        self.loras = gr.Dropdown(
            list(offered),
            multiselect=True,
            max_choices=validation.MAX_LORAS,
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
            self.steps = gr.Slider(*validation.STEPS, value=STEPS, step=1, label="Steps", elem_id="steps")
            self.guidance = gr.Slider(
                *validation.GUIDANCE, value=self.pool.first.guidance, step=0.5, label="Guidance", elem_id="guidance"
            )
        self.random = gr.Checkbox(True, label="Random seed", elem_id="random")
        with gr.Row(elem_id="seed-row"):
            self.seed = gr.Number(
                value=0, precision=0, minimum=0, maximum=validation.PAGE_SEEDS[1], label="Seed", elem_id="seed", scale=3
            )
            self.reuse = gr.Button("Reuse seed", size="sm", elem_id="reuse", min_width=60)
        with gr.Row():
            self.width = gr.Slider(*validation.SIDES, value=native, step=8, label="Width", elem_id="width")
            self.height = gr.Slider(*validation.SIDES, value=native, step=8, label="Height", elem_id="height")
        with gr.Row():
            self.scheduler = gr.Dropdown(
                list(SCHEDULERS), value=SchedulerName.DDIM.label, label="Scheduler", elem_id="scheduler"
            )
            self.clip_skip = gr.Slider(*CLIP_SKIPS, value=0, step=1, label="CLIP skip", elem_id="clip-skip")
        self.sizes_row = gr.Row(visible=self.pool.first.reads_sizes, elem_id="sizes")
        with self.sizes_row:
            self.sizes = [
                gr.Number(0, label=label, precision=0, minimum=0, min_width=180)
                for labels in SIZES.values()
                for label in labels
            ]
        self.negative = gr.Textbox(
            label="Negative prompt", lines=1, max_length=validation.MAX_PROMPT_CHARACTERS, elem_id="negative"
        )
        self.calibrate = gr.Button("Measure this machine again", size="sm", elem_id="calibrate")

    def _add_hidden(self) -> None:
        """Buttons that scripts press, and the file that the browser fetches."""
        self.show_words = gr.Button(visible="hidden", elem_id="tell")
        self.change_words = gr.Button(visible="hidden", elem_id="changed")
        self.show_preview = gr.Button(visible="hidden", elem_id="look")
        self.draw_live = gr.Button(visible="hidden", elem_id="draw")
        self.wider = gr.Button(visible="hidden", elem_id="wider")
        self.tighter = gr.Button(visible="hidden", elem_id="tighter")
        self.follow_run = gr.Button(visible="hidden", elem_id="follow-run")
        self.reconnect = gr.Button(visible="hidden", elem_id="listen")
        self.delete_now = gr.Button(visible="hidden", elem_id="delete-now")
        self.fetch = gr.DownloadButton(visible="hidden", elem_id="fetch")
        self.key = gr.Textbox(visible="hidden", elem_id="key")
        self.descendants = gr.Number(0, visible="hidden", elem_id="follow")

    @property
    def edit_inputs(self) -> list[Any]:
        """The arguments of an edit."""
        return [self.prompt, *self.condition_inputs, self.stage, *self.region_inputs]

    @property
    def region_inputs(self) -> list[Any]:
        """The region's controls."""
        controls = [self.words, self.instance, self.grow, self.only, self.feather, self.strength, self.quality]
        return [*controls, *([] if self.pool.detector is None else [self.things])]

    @property
    def condition_inputs(self) -> list[Any]:
        """The components that set what adapters read: pictures, scales and a head's drive."""
        pictures = [self.reference, self.reference_scale, self.control, self.control_scale, self.edges]
        return [*pictures, self.driven, *self.pose, *self.expression]

    @property
    def settings_inputs(self) -> list[Any]:
        """The settings of a new picture."""
        size = [self.steps, self.guidance, self.seed, self.width, self.height]
        return [
            self.random,
            *size,
            self.scheduler,
            self.clip_skip,
            self.negative,
            self.model,
            self.loras,
            *self.lora_scales.values(),
            *self.sizes,
        ]

    @property
    def session_outputs(self) -> list[Any]:
        """The components that show the state of a session."""
        shown = [
            self.stage,
            self.candidates,
            self.keep,
            self.cost_line,
            self.tree,
            self.before,
            self.status,
            self.prompt,
            self.words_line,
            self.facts,
        ]
        buttons = [
            self.undo,
            self.redo,
            self.vary,
            self.erase,
            self.delete,
            self.measure,
            self.download,
            self.save,
            self.run,
            self.make,
            self.extend,
        ]
        buttons += [] if self.pool.detector is None else [self.find]
        return [*shown, *buttons, self.stop, *self.region_inputs, self.descendants, self.open]


def _header(pool: ModelPool) -> str:
    labels = [model.label for model in pool.models]
    shown = labels[0] if len(labels) == 1 else f"{len(labels)} models"
    device = escape(f"{shown}, {pool.dtype} on {pool.device}")
    return (
        f"<header><h1>fisedit</h1><p>Change a word. Only what it means is painted again.</p>"
        f'<span class="chip" title="{escape(", ".join(labels), quote=True)}">{device}</span></header>'
    )


def read_asset(name: str) -> str:
    """A file of the page's script, style and templates."""
    return (_PAGE / name).read_text(encoding="utf-8")


def _number_slider(name: str, least: float, most: float, first: float, step: float) -> gr.Slider:
    elem_id = f"drive-{name.lower().replace(' ', '-')}"
    return gr.Slider(least, most, value=first, step=step, label=name, elem_id=elem_id, min_width=140)


def _picture_file(label: str, elem_id: str) -> gr.File:
    return gr.File(label=label, type="binary", file_types=["image"], height=120, elem_id=elem_id)
