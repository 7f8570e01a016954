"""An edit whose source is recorded, and what diffusers' own dense pipeline makes of it.

Every dense picture starts from the source's first latents: the seed's noise, or what inversion found. Knows one edit at
a time; nothing of metrics or reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import DDIMScheduler
from torch import Tensor

from fisedit.editor import Editor
from fisedit.evaluation.quality import metrics
from fisedit.models.loader import quiet_loaders
from fisedit.sampling.denoise import Engine
from fisedit.sparse.cost_model import Costs

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from PIL.Image import Image

    from fisedit.evaluation.quality.scene_edits import BenchmarkEdit
    from fisedit.history import EditResult
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.values import BoolGrid, GenerationConfig

Hook = Callable[[int, Tensor], Tensor]
"""Called with a step's index and the latents after it [B, 4, h, w]; gives those to go on with."""


@dataclass(frozen=True, eq=False)
class MethodResult:
    """What a method made of an edit.

    Args:
        picture: the edited one.
        grid: latent cells [h, w] that it meant to paint; None where it knows no mask.
        evaluations: of the UNet, those that look for a mask included; a batch of any size is one.
        macs: multiply-accumulates of UNet and decoder.
        sparse: whether part of the rows was computed, so that the dense blended edit is the truth of the rest.
        reason: why it fell back to a dense run, or "".
        again: whether it means to show the source again, and to edit nothing.
    """

    picture: Image
    grid: BoolGrid | None
    evaluations: int
    macs: int
    sparse: bool = False
    reason: str = ""
    again: bool = False


@dataclass(eq=False)
class EditCase:
    """An edit and its source.

    Args:
        editor: stands on the source. edit: what is asked. source: the picture, `trajectory` what was recorded with it.
    """

    editor: Editor
    edit: BenchmarkEdit
    source: EditResult
    trajectory: Trajectory
    _blended: dict[bytes, Image] = field(default_factory=dict)

    @property
    def config(self) -> GenerationConfig:
        """The source's, with the new prompt."""
        return replace(self.source.config, prompt=self.edit.prompt)

    @property
    def steps(self) -> int:
        """N."""
        return self.config.num_inference_steps

    @property
    def everywhere(self) -> BoolGrid:
        """All latent cells [h, w]."""
        return np.ones(self.source.mask.grid.shape, bool)

    @property
    def true_grid(self) -> BoolGrid | None:
        """The latent cells [h, w] that the edit concerns; None where nobody knows."""
        if self.edit.whole:
            return self.everywhere
        return None if self.edit.true_mask is None else metrics.cells(self.edit.true_mask)

    @cached_property
    def engine(self) -> Engine:
        """The editor's pipeline, for methods that go their own way."""
        return Engine(self.editor.pipe)

    @cached_property
    def costs(self) -> Costs:
        """Prices of this edit."""
        return self.engine.costs(self.config)

    @property
    def decode_macs(self) -> int:
        """Multiply-accumulates of a dense decode."""
        return self.costs.dense() - self.steps * self.costs.dense_step()

    def dense_macs(self, evaluations: float) -> int:
        """Multiply-accumulates of so many dense evaluations and a dense decode."""
        return round(evaluations * self.costs.dense_step()) + self.decode_macs

    @cached_property
    def ours(self) -> MethodResult:
        """What the editor makes of the prompt alone."""
        return self.edited()

    def edited(self, mask: BoolGrid | None = None, **options: Any) -> MethodResult:
        """What the editor makes of the prompt, in a given mask [h, w] or in its own; `options` as of `Editor.edit`."""
        self.editor.checkout(self.source.id)
        calls: list[None] = []  # counted here: an edit's stats leave out a run that drift broke off
        watched = self.editor.pipe.unet.register_forward_pre_hook(lambda *_: calls.append(None))
        try:
            result = self.editor.edit(self.edit.prompt, mask=mask, **options)
        finally:
            watched.remove()
        stats = result.stats
        sparse = stats.unet_evaluations_sparse > 0
        return MethodResult(result.image, result.mask.grid, len(calls), stats.macs, sparse, stats.fallback)

    def blended(self, grid: BoolGrid) -> Image:
        """The dense blended edit over a mask [h, w]: outside, the source's latents after every step."""
        key = grid.tobytes()
        if key not in self._blended:
            inside = torch.from_numpy(grid.copy()).to(self.trajectory.latents[0].device)
            path = self.trajectory.latents
            self._blended[key] = self.dense([self.edit.prompt], lambda i, x: torch.where(inside, x, path[i + 1]))
        return self._blended[key]

    def dense(
        self, prompts: Sequence[str], hook: Hook = lambda i, latents: latents, guidance_scale: float | None = None
    ) -> Image:
        """The last prompt's picture by diffusers' pipeline; all prompts in one batch from the first latents.

        Args:
            guidance_scale: None for the source's.
        """
        config = self.source.config

        def after(_: Any, i: int, __: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"latents": hook(i, state["latents"])}

        pictures: list[Image] = self.pipeline("StableDiffusionPipeline")(
            list(prompts),
            negative_prompt=[config.negative_prompt] * len(prompts),
            latents=torch.cat([self.trajectory.latents[0]] * len(prompts)),
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale if guidance_scale is None else guidance_scale,
            width=config.width,
            height=config.height,
            callback_on_step_end=after,
        ).images
        return pictures[-1]

    def pipeline(self, name: str) -> Any:
        """A pipeline of diffusers', by name: the editor's modules with a DDIM scheduler, as its sources have."""
        pipe = self.editor.pipe
        modules = pipe.components | {"scheduler": DDIMScheduler.from_config(pipe.scheduler.config)}
        with quiet_loaders():
            made = getattr(import_module("diffusers"), name)(**modules, requires_safety_checker=False)
        made.set_progress_bar_config(disable=True)
        return made


def make_case(
    pipe: StableDiffusionPipeline, edit: BenchmarkEdit, *, num_inference_steps: int, guidance_scale: float
) -> EditCase:
    """Open an edit's picture, or generate one of the model's own size.

    Raises:
        PromptError, InputError: steps, guidance, prompts or the picture's size out of range.
        NumericsError: the model produced NaN.
    """
    editor = Editor(pipe)
    steps, guidance = num_inference_steps, guidance_scale
    prompt = edit.source_prompt
    if edit.picture is None:
        source = editor.generate(prompt, seed=edit.seed, num_inference_steps=steps, guidance_scale=guidance)
    else:
        source = editor.open(edit.picture, prompt, num_inference_steps=steps, guidance_scale=guidance)
    return EditCase(editor, edit, source, trajectory_of(editor, source))


def trajectory_of(editor: Editor, result: EditResult) -> Trajectory:
    """What was recorded with a result that was just made."""
    return editor._memory.get(result.id)[0]  # noqa: SLF001 (no user needs it)
