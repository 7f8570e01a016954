"""Inpainting models: whole pictures are diffusers' own pipeline's, sparse edits the mixed dense forward's."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionInpaintPipeline, StableDiffusionXLInpaintPipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from fisedit import Editor
from tests.support import oracle
from tests.support.edits import CAT, DOG, as_oracle, check_outside, same, trajectory
from tests.support.grids import grids
from tests.support.inpainting import inpainting, reading
from tests.support.pipelines import assembled

QUICK = {"seed": 7, "num_inference_steps": 3, "width": 128, "height": 128}
GRIDS = grids(16, 16)


@pytest.fixture(params=["sd15", "demo", "sdxl"])
def pipe(request, pipelines):
    return inpainting(pipelines[request.param])


@pytest.fixture
def editor(pipe):
    return Editor(pipe, model="demo")


def expected_inputs(pipe, image, grid):
    """What diffusers' pipeline concatenates, but for the mode of the encoder's distribution: [1, 5, h, w]."""
    mask = torch.from_numpy(np.kron(grid, np.ones((8, 8)))).float()[None, None]
    pixels = VaeImageProcessor().preprocess(image)  # in its layout: norms of plain grey enlarge roundings
    with torch.no_grad():
        latents = pipe.vae.encode(pixels * (mask < 0.5)).latent_dist.mode() * pipe.vae.config.scaling_factor
    return torch.cat([torch.from_numpy(grid)[None, None].float(), latents], 1)


def of_diffusers(pipe, config, image, grid):
    """Latents after every step [N, 4, h, w] of diffusers' inpainting pipeline."""
    kind = StableDiffusionXLInpaintPipeline if "text_encoder_2" in pipe.components else StableDiffusionInpaintPipeline
    own = assembled(pipe, kind)
    path, shape = [], (1, 4, config.height // 8, config.width // 8)
    own(
        config.prompt,
        image=image,
        mask_image=Image.fromarray(np.kron(grid, np.full((8, 8), 255, np.uint8)).astype(np.uint8)),
        masked_image_latents=expected_inputs(pipe, image, grid)[:, 1:],
        height=config.height,
        width=config.width,
        strength=1.0,
        num_inference_steps=config.num_inference_steps,
        guidance_scale=config.guidance_scale,
        latents=torch.randn(shape, generator=torch.Generator().manual_seed(config.seed)),
        callback_on_step_end=lambda pipeline, step, t, told: path.append(told["latents"]) or told,
    )
    return torch.cat(path)


@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_whole_pictures_are_diffusers(pipe, editor, guidance):
    everywhere = np.ones((16, 16), bool)
    source = editor.generate(CAT, **QUICK, guidance_scale=guidance)
    edit = editor.edit(DOG, mask=everywhere)
    for result in (source, edit):
        expected = of_diffusers(pipe, result.config, source.image, everywhere)
        got = torch.cat(trajectory(editor, result).latents[1:])
        assert oracle.deviation(got, expected) < 1e-4


@pytest.mark.parametrize(("name", "guidance"), [("square", 7.5), ("square", 1.0), ("blobs", 7.5)])
def test_sparse_edits_are_the_mixed_forward(pipe, editor, name, guidance):
    grid = GRIDS[name]
    source = editor.generate(CAT, **QUICK, guidance_scale=guidance)
    edit = editor.edit(DOG, mask=grid, growth=0)
    assert edit.stats.unet_evaluations_sparse == 3
    dense, steps, config = oracle_pipe(pipe), defaultdict(dict), as_oracle(source.config)
    with (
        reading(dense.unet, expected_inputs(pipe, source.image, np.ones((16, 16), bool))),
        oracle._around_calls(dense.unet, lambda call: oracle.recording(dense.unet, steps[call])),
    ):
        path = oracle.dense_generate(dense, config).latents
    cells = torch.from_numpy(grid)
    with (
        reading(dense.unet, expected_inputs(pipe, source.image, grid)),
        oracle._around_calls(dense.unet, lambda call: oracle.mixing(dense.unet, steps[call], cells)),
    ):
        mixed = oracle.dense_generate(dense, replace(config, prompt=DOG), oracle.pinned(path, cells)).latents
    assert oracle.deviation(torch.cat(trajectory(editor, edit).latents), mixed) < 1e-4
    check_outside(editor, edit, source)


def oracle_pipe(pipe):
    """The pipeline with a UNet that says of itself that it reads latents alone."""
    unet = deepcopy(pipe.unet)
    unet.register_to_config(in_channels=4)
    return type(pipe)(**{**pipe.components, "unet": unet}, requires_safety_checker=False)


def test_an_opened_picture_is_known_where_it_is_not_masked(pipe, editor, tmp_path):
    picture = editor.generate(CAT, **QUICK).image
    opened = editor.open(picture, CAT, num_inference_steps=3)
    nowhere = np.zeros((16, 16), bool)
    inputs = trajectory(editor, opened).inpaint_inputs
    assert torch.allclose(inputs, expected_inputs(pipe, picture, nowhere), atol=1e-5)
    edit = editor.edit(DOG, mask=GRIDS["square"])
    inputs = trajectory(editor, edit).inpaint_inputs
    assert torch.allclose(inputs, expected_inputs(pipe, picture, GRIDS["square"]), atol=1e-5)
    check_outside(editor, edit, opened)


@pytest.mark.parametrize("features", [False, True])
def test_sessions_go_on_as_if_never_closed(pipe, editor, tmp_path, features):
    editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=GRIDS["square"])
    editor.save(tmp_path / "session", features=features)
    loaded = Editor(pipe, model="demo")
    loaded.load(tmp_path / "session")
    assert same(loaded.edit("a bird", mask=GRIDS["square"]), editor.edit("a bird", mask=GRIDS["square"]))
