"""Baselines by diffusers' pipelines, by their limits."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.quality import diffusers_baselines as by_diffusers
from benchmarks.quality.methods import METHODS
from benchmarks.quality.scores import score_edit
from fisedit.bench.edit_case import EditCase
from tests.support.edits import BIRD, DOG
from tests.support.quality import SQUARE, fresh, levels


def decoded_by(name: str, case: EditCase) -> torch.Tensor:
    """The latents [4, h, w] that a method decodes in the end."""
    seen: list[torch.Tensor] = []
    vae = case.editor.pipe.vae
    watched = vae.post_quant_conv.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    METHODS[name](case)
    watched.remove()
    return seen[-1] * vae.config.scaling_factor


def test_inpainting_paints_the_true_mask_and_nothing_else(opened):
    """With the same noise, two prompts differ in all of it and nowhere else."""
    dog, bird = (decoded_by("inpaint-true", fresh(opened, prompt=prompt)) for prompt in (DOG, BIRD))
    moved = (dog != bird).any(0).numpy()
    assert moved[SQUARE].all() and not moved[~SQUARE].any()
    assert np.array_equal(METHODS["inpaint-true"](fresh(opened)).grid, SQUARE)
    assert METHODS["inpaint-true"](fresh(opened, true_mask=None)) is None


def test_image_to_image_begins_at_the_picture(opened, monkeypatch):
    """The less it runs, the more of the picture stays."""
    moved = []
    for strength in (0.15, 0.5, by_diffusers.STRENGTH):
        monkeypatch.setattr(by_diffusers, "STRENGTH", strength)
        moved.append(float((decoded_by("img2img", fresh(opened)) - opened.trajectory.latents[-1][0]).norm()))
        assert METHODS["img2img"](fresh(opened)).evaluations == int(7 * strength)
    assert moved[0] < moved[1] < moved[2]


def test_a_source_sampled_again(generated, opened):
    """A generated one comes back; an opened one does not, and less so with guidance."""
    again, unguided = ("resampled", "resampled-unguided")
    assert levels(METHODS[again](generated).picture, generated.source.image) <= 1
    told = {name: score_edit(opened, METHODS[name](opened), None).again_psnr for name in (again, unguided, "no-edit")}
    assert told[again] < told[unguided] < told["no-edit"] < 60
    assert score_edit(opened, opened.plain, None).again_psnr is None
