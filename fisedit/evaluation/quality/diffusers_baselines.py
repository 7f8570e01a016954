"""What diffusers' own pipelines make of a picture, called as anyone would call them, each on one `Case`.

Image to image (SDEdit, Meng et al., arXiv 2108.01073) noises the picture and paints all of it again. Inpainting is told
where; a model that was not made for it has the picture, noised, put back outside the mask after every step (Blended
Latent Diffusion, Avrahami et al., arXiv 2206.02779).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fisedit.evaluation.quality.edit_case import EditCase, MethodResult
from fisedit.values import EditMask, MaskSource, first_step

if TYPE_CHECKING:
    from PIL.Image import Image

STRENGTH = 0.8
"""Share of the steps that image to image runs: diffusers' default."""


def img2img(case: EditCase) -> MethodResult:
    """The picture noised to 80 %, and painted again with the new prompt."""
    steps = case.steps - first_step(STRENGTH, case.steps)
    picture = _painted(case, "StableDiffusionImg2ImgPipeline", strength=STRENGTH)
    return MethodResult(picture, None, steps, case.dense_macs(steps))


def inpaint_true(case: EditCase) -> MethodResult | None:
    """The true mask painted with the new prompt; None where nobody knows it."""
    if case.true_grid is None:
        return None
    size = {"width": case.config.width, "height": case.config.height}
    mask = EditMask(case.true_grid, MaskSource.GIVEN).image()
    picture = _painted(case, "StableDiffusionInpaintPipeline", mask_image=mask, strength=1.0, **size)
    return MethodResult(picture, case.true_grid, case.steps, case.dense_macs(case.steps))


def _painted(case: EditCase, pipeline: str, **how: Any) -> Image:
    config = case.config
    pictures: list[Image] = case.pipeline(pipeline)(
        config.prompt,
        image=case.source.image,
        negative_prompt=config.negative_prompt,
        num_inference_steps=config.num_inference_steps,
        guidance_scale=config.guidance_scale,
        generator=torch.Generator().manual_seed(case.edit.seed),
        **how,
    ).images
    return pictures[0]


def resampled(case: EditCase, guidance_scale: float | None = None) -> MethodResult:
    """The source's prompt sampled again from its first latents, nothing put back: what inversion alone loses.

    Args:
        guidance_scale: None for the source's; 1 is what inversion itself has.
    """
    picture = case.dense([case.source.prompt], guidance_scale=guidance_scale)
    branches = case.engine.batch(case.config)
    share = 1 if guidance_scale is None or guidance_scale > 1 else 1 / branches
    return MethodResult(picture, None, case.steps, case.dense_macs(share * case.steps), again=True)
