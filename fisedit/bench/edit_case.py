"""An edit whose source is recorded, and its dense references by diffusers' own pipeline.

Every dense run starts from the source's first latents: the seed's noise, or inverted ones. Knows one edit at a time and
no reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import DDIMScheduler
from torch import Tensor

from fisedit.bench import metrics
from fisedit.costs.model import Costs
from fisedit.editor import Editor
from fisedit.models.families.family import assemble
from fisedit.models.loader import quiet_loaders
from fisedit.sampling.engine import Engine

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.history import EditResult
    from fisedit.machine.model import Model
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.values import BoolGrid, GenerationConfig

Hook = Callable[[int, Tensor], Tensor]
"""Called with a step's index and the latents after it [B, 4, h, w]; returns the latents of the next step."""


@dataclass(frozen=True, eq=False)
class BenchmarkEdit:
    """An edit whose truth is known.

    Args:
        kind: the name of the change, such as "swap".
        source_prompt: what the source shows.
        prompt: what the edit shall show.
        picture: The picture to open, [S, S] pixels; None to generate one.
        seed: The seed of a generated source.
        true_mask: pixels that the edit concerns, bool [S, S]; None where they are unknown, or all.
        removed: visible pixels of the object that is replaced or deleted, bool [S, S]; None where there is none.
        is_global: whether it concerns the whole picture; None where that is unknown.
        change: the scenes before and after, for the classifier; None for pictures that were not drawn.
    """

    kind: str
    source_prompt: str
    prompt: str
    picture: Image | None = None
    seed: int = 0
    true_mask: BoolGrid | None = None
    removed: BoolGrid | None = None
    is_global: bool | None = None
    change: Any = None


@dataclass(frozen=True, eq=False)
class MethodResult:
    """A method's result of one edit.

    Args:
        picture: the edited one.
        grid: mask of latent cells [h, w]; None for a method without one.
        rim: cells [h, w] beside it whose pixels may have changed too, or None.
        evaluations: The number of evaluations of the UNet, with those that predict a mask; a batch of any size is one.
        macs: multiply-accumulates of UNet and decoder.
        sparse: whether it ran sparsely, so that the dense blended edit is its reference.
        reason: why it fell back to a dense run, or "".
        reconstructs: whether it reconstructs the source instead of editing it.
    """

    picture: Image
    grid: BoolGrid | None
    evaluations: int
    macs: int
    sparse: bool = False
    reason: str = ""
    reconstructs: bool = False
    rim: BoolGrid | None = None

    @property
    def painted(self) -> BoolGrid | None:
        """The cells [h, w] whose pixels may have changed; None for a method without a mask."""
        return self.grid if self.grid is None or self.rim is None else self.grid | self.rim


@dataclass(eq=False)
class EditCase:
    """An edit and its source.

    Args:
        editor: its current result is the source.
        edit: prompts, picture and truth.
        source: the opened or generated picture.
        trajectory: recorded with the source.
    """

    editor: Editor
    edit: BenchmarkEdit
    source: EditResult
    trajectory: Trajectory
    _blended: dict[bytes, Image] = field(default_factory=dict)

    @property
    def config(self) -> GenerationConfig:
        """The source's generation config with the new prompt."""
        return replace(self.source.config, prompt=self.edit.prompt)

    @property
    def steps(self) -> int:
        """Number of denoising steps."""
        return self.config.num_inference_steps

    @property
    def everywhere(self) -> BoolGrid:
        """All latent cells [h, w]."""
        return np.ones(self.source.mask.grid.shape, bool)

    @property
    def true_grid(self) -> BoolGrid | None:
        """The latent cells [h, w] that the edit concerns; None where they are unknown."""
        if self.edit.is_global:
            return self.everywhere
        return None if self.edit.true_mask is None else metrics.pixels_to_cells(self.edit.true_mask)

    @cached_property
    def engine(self) -> Engine:
        """An engine over the editor's pipeline, for methods with their own denoising loop."""
        return Engine(self.editor.pipe)

    @cached_property
    def costs(self) -> Costs:
        """Costs of this edit in multiply-accumulates."""
        return self.engine.costs(self.config)

    @property
    def decode_macs(self) -> int:
        """Multiply-accumulates of a dense decode."""
        return self.costs.dense() - self.steps * self.costs.dense_step()

    def dense_macs(self, evaluations: float) -> int:
        """Multiply-accumulates of a number of dense evaluations and a dense decode."""
        return round(evaluations * self.costs.dense_step()) + self.decode_macs

    @cached_property
    def plain(self) -> MethodResult:
        """The editor's result, given the prompt alone."""
        return self.edited()

    def edited(self, mask: BoolGrid | None = None, **options: Any) -> MethodResult:
        """The editor's result.

        Args:
            mask: booleans [h, w]; None to predict one.
            **options: The further arguments of `Editor.edit`.
        """
        self.editor.checkout(self.source.id)
        calls: list[None] = []  # counted here: an edit's stats leave out a run that drift broke off
        hook_handle = self.editor.pipe.unet.register_forward_pre_hook(lambda *_: calls.append(None))
        try:
            result = self.editor.edit(self.edit.prompt, mask=mask, **options)
        finally:
            hook_handle.remove()
        stats = result.stats
        sparse = stats.unet_evaluations_sparse > 0
        return MethodResult(
            result.image, result.latent_cells, len(calls), stats.macs, sparse, stats.fallback, rim=result.run.rim
        )

    def blended(self, grid: BoolGrid) -> Image:
        """The dense blended edit: outside the mask [h, w], the source's latents after every step."""
        key = grid.tobytes()
        if key not in self._blended:
            self._blended[key] = self.blended_by(None, grid)
        return self._blended[key]

    def blended_by(self, pipe: Any | None, grid: BoolGrid) -> Image:
        """The dense blended edit as a pipeline makes it.

        Args:
            pipe: A pipeline with the same model; None for diffusers' own.
            grid: booleans [h, w].
        """
        inside, path = torch.from_numpy(grid.copy()).to(self.trajectory.latents[0].device), self.trajectory.latents
        return self.dense([self.edit.prompt], lambda i, x: torch.where(inside, x, path[i + 1].to(x.dtype)), pipe=pipe)

    def dense(
        self,
        prompts: Sequence[str],
        hook: Hook = lambda i, latents: latents,
        guidance_scale: float | None = None,
        pipe: Any | None = None,
    ) -> Image:
        """The last prompt's picture by diffusers' pipeline.

        Args:
            prompts: The prompts of one batch, each from the source's first latents.
            hook: replaces the latents after every step.
            guidance_scale: None for the source's.
            pipe: A pipeline with the same model and a DDIM scheduler; None for diffusers' own.
        """
        config, pipe = self.source.config, pipe or self.pipeline()

        def on_step_end(_pipeline: Any, i: int, _timestep: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"latents": hook(i, state["latents"])}

        pictures: list[Image] = pipe(
            list(prompts),
            negative_prompt=[config.negative_prompt] * len(prompts) if config.negative_prompt else None,
            latents=torch.cat([self.trajectory.latents[0]] * len(prompts)).to(pipe.unet.dtype),
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale if guidance_scale is None else guidance_scale,
            width=config.width,
            height=config.height,
            callback_on_step_end=on_step_end,
        ).images
        return pictures[-1]

    def pipeline(self, name: str | None = None) -> Any:
        """A pipeline of diffusers: the editor's modules with a DDIM scheduler, as its sources have.

        Args:
            name: Its class; None for the one that generates.
        """
        pipe = self.editor.pipe
        modules = pipe.components | {"scheduler": DDIMScheduler.from_config(pipe.scheduler.config)}
        with quiet_loaders():
            pipeline = assemble(modules, name)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def make_case(
    pipe: Model,
    edit: BenchmarkEdit,
    *,
    num_inference_steps: int,
    guidance_scale: float,
    cache_dtype: str = "auto",
) -> EditCase:
    """Open an edit's picture, or generate one of the model's own size.

    Args:
        pipe: the model.
        edit: prompts, picture and truth.
        num_inference_steps: denoising steps.
        guidance_scale: The scale of classifier-free guidance.
        cache_dtype: what recorded features are kept in, as in `Editor`.

    Raises:
        PromptError, InputError: steps, guidance, prompts or the picture's size out of range.
        NumericsError: the model produced NaN.
    """
    editor = Editor(pipe, cache_dtype=cache_dtype)
    steps, guidance = num_inference_steps, guidance_scale
    prompt = edit.source_prompt
    if edit.picture is None:
        source = editor.generate(prompt, seed=edit.seed, num_inference_steps=steps, guidance_scale=guidance)
    else:
        source = editor.open(edit.picture, prompt, num_inference_steps=steps, guidance_scale=guidance)
    return EditCase(editor, edit, source, get_trajectory(editor, source))


def get_trajectory(editor: Editor, result: EditResult) -> Trajectory:
    """The trajectory recorded with a result that was just made."""
    return editor._trajectory_cache.get(result.id)[0]  # noqa: SLF001 (no user needs it)
