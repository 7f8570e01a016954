"""Baselines by diffusers' own pipelines with their usual arguments, each on one `EditCase`.

Image to image (SDEdit, Meng et al., arXiv 2108.01073) noises the picture and denoises all of it. Inpainting is given
the true mask. A model not trained for it uses Blended Latent Diffusion (Avrahami et al., arXiv 2206.02779). Its latents
outside the mask are replaced by the noised picture's after every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.quality.scene_edits import DELETE
from fisedit.bench.edit_case import EditCase, MethodResult
from fisedit.values import EditMask, MaskSource, first_step

if TYPE_CHECKING:
    from PIL.Image import Image

STRENGTH = 0.8
"""Share of the steps that image to image runs: diffusers' default."""


def img2img(case: EditCase) -> MethodResult:
    """The picture noised to 80 % of the schedule, and denoised with the new prompt."""
    steps = case.steps - first_step(STRENGTH, case.steps)
    picture = _run_pipeline(case, "StableDiffusionImg2ImgPipeline", strength=STRENGTH)
    return MethodResult(picture, None, steps, case.dense_macs(steps))


def inpaint_true(case: EditCase) -> MethodResult | None:
    """Inpainting of the true mask with the new prompt; None where the mask is unknown."""
    return _inpaint(case, case.config.prompt)


def inpaint_empty(case: EditCase) -> MethodResult | None:
    """Inpainting of the true mask without words, as things are removed; None but for edits that remove one."""
    return _inpaint(case, "") if case.edit.kind == DELETE else None


def _inpaint(case: EditCase, prompt: str) -> MethodResult | None:
    if case.true_grid is None:
        return None
    size = {"width": case.config.width, "height": case.config.height}
    mask = EditMask(case.true_grid, MaskSource.GIVEN).image()
    options = {"prompt": prompt, "mask_image": mask, "strength": 1.0} | size
    picture = _run_pipeline(case, "StableDiffusionInpaintPipeline", **options)
    return MethodResult(picture, case.true_grid, case.steps, case.dense_macs(case.steps))


def _run_pipeline(case: EditCase, pipeline: str, **options: Any) -> Image:
    config = case.config
    pictures: list[Image] = case.pipeline(pipeline)(
        options.pop("prompt", config.prompt),
        image=case.source.image,
        negative_prompt=config.negative_prompt,
        num_inference_steps=config.num_inference_steps,
        guidance_scale=config.guidance_scale,
        generator=torch.Generator().manual_seed(case.edit.seed),
        **options,
    ).images
    return pictures[0]


def resampled(case: EditCase, guidance_scale: float | None = None) -> MethodResult:
    """The source's prompt sampled again from its first latents without blending: what inversion loses.

    Args:
        case: the edit, of which only the source is used.
        guidance_scale: None for the source's; 1 is inversion's own.
    """
    picture = case.dense([case.source.prompt], guidance_scale=guidance_scale)
    branches = case.engine.batch(case.config)
    share = 1 if guidance_scale is None or guidance_scale > 1 else 1 / branches
    return MethodResult(picture, None, case.steps, case.dense_macs(share * case.steps), reconstructs=True)
