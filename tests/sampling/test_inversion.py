"""Edit-friendly DDPM inversion, against the formulas of diffusers' LEdits++."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from diffusers.pipelines.ledits_pp.pipeline_leditspp_stable_diffusion import compute_noise

from fisedit import Cancelled, Editor
from fisedit.errors import InputError
from fisedit.models.vae import encode
from fisedit.sampling import denoise
from fisedit.values import ActiveCells
from tests.support import oracle
from tests.support.edits import BIRD, CAT, DOG, Calls, latents, trajectory, unwatched
from tests.support.grids import grids
from tests.support.pictures import scene
from tests.support.pipelines import SHAPES, build_scheduler

SQUARE, BLOBS, EVERYWHERE = *(grids(16, 16)[name] for name in ("square", "blobs")), np.ones((16, 16), bool)
STEPS = 5
QUICK = {"num_inference_steps": STEPS, "inversion": "ddpm", "guidance_scale": 4.0}


def open_scene(editor, **options):
    source = editor.open(scene(), CAT, **(QUICK | options))
    return source, trajectory(editor, source)


def test_the_path_is_the_picture_noised_anew_for_every_step(editor):
    """By the closed form; between the steps' noises lies no correlation."""
    _, told = open_scene(editor, num_inference_steps=20)
    scheduler = DDIMScheduler.from_config(editor.pipe.scheduler.config)
    scheduler.set_timesteps(20)
    clean = told.latents[-1]
    alphas = scheduler.alphas_cumprod[scheduler.timesteps].view(-1, 1, 1, 1)
    noises = (latents(told)[:-1] - alphas.sqrt() * clean) / (1 - alphas).sqrt()
    assert abs(float(noises.mean())) < 0.02 and abs(float(noises.std()) - 1) < 0.02
    correlation = torch.corrcoef(noises.flatten(1)) - torch.eye(20)
    assert float(correlation.abs().max()) < 0.15
    _, again = open_scene(editor, num_inference_steps=20)
    _, other = open_scene(editor, num_inference_steps=20, seed=1)
    assert torch.equal(latents(again), latents(told)) and not torch.equal(latents(other), latents(told))


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_the_noise_maps_are_those_of_ledits(editor, steps):
    """Whose formulas are for epsilon alone."""
    _, told = open_scene(editor, num_inference_steps=steps)
    scheduler = build_scheduler("ddim")
    scheduler.set_timesteps(steps)
    for i, t in enumerate(scheduler.timesteps):
        expected, reached = compute_noise(scheduler, told.latents[i + 1], told.latents[i], t, told.predictions[i], 1.0)
        assert oracle.deviation(told.noises[i], expected) <= 1e-3
        assert oracle.deviation(reached, told.latents[i + 1]) <= 1e-4


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5, 30])
def test_the_sampler_finds_its_way_back(pipelines, shape, steps):
    """Sampling again with the source's prompt, nothing pinned, gives the recorded path."""
    editor = Editor(pipelines[shape])
    source, told = open_scene(editor, num_inference_steps=steps)
    engine = editor._engine
    with torch.inference_mode():
        text = engine.encode(source.config)
        again = denoise.run_dense(engine, source.config, text, unwatched, (ActiveCells(EVERYWHERE), told))
    assert torch.equal(latents(again), latents(told))
    with torch.no_grad():
        clean = encode(editor.pipe.vae, scene())
    assert oracle.deviation(latents(told)[-1:], clean) <= 1e-4


def test_without_the_maps_it_does_not(editor):
    """So that the test above can fail."""
    source, told = open_scene(editor)
    engine = editor._engine
    with torch.inference_mode():
        text = engine.encode(source.config)
        again = denoise.run_dense(
            engine, source.config, text, unwatched, (ActiveCells(EVERYWHERE), replace(told, noises=[]))
        )
    assert oracle.deviation(latents(again), latents(told)) > 0.1


@pytest.mark.parametrize("guidance", [4.0, 1.0])
@pytest.mark.parametrize("start", [0, 2])
def test_a_dense_edit_steps_as_ledits_does(pipelines, guidance, start):
    """DDPM's steps on the new prompt, with the source's noise; written out."""
    pipe = pipelines["demo"]
    editor = Editor(pipe)
    _, told = open_scene(editor, guidance_scale=guidance)
    result = editor.edit(DOG, mask=EVERYWHERE, strength=1 - start / STEPS)
    scheduler = build_scheduler("ddim")
    scheduler.set_timesteps(STEPS)
    with torch.no_grad():
        text, empty = pipe.encode_prompt(DOG, pipe.device, 1, True)
        x = told.latents[start]
        for noise, t in list(zip(told.noises, scheduler.timesteps, strict=True))[start:]:
            without, with_text = (pipe.unet(x, t, each)[0] for each in (empty, text))
            x = scheduler.step(without + guidance * (with_text - without), t, x, eta=1.0, variance_noise=noise)[0]
    assert oracle.deviation(trajectory(editor, result).latents[-1], x) <= 1e-4


@pytest.mark.parametrize("grid", [SQUARE, BLOBS])
def test_what_lies_outside_is_pinned(editor, grid):
    """E2 and E3."""
    source, told = open_scene(editor)
    with Calls(editor.pipe.unet) as calls:
        same = editor.edit(CAT)
        result = editor.edit(DOG, mask=grid, growth=1)
    assert (calls.dense, calls.sparse) == (0, STEPS) and same.image.tobytes() == source.image.tobytes()
    ours, outside = trajectory(editor, result), ~torch.from_numpy(grid)
    assert torch.equal(latents(ours)[..., outside], latents(told)[..., outside])
    assert not torch.equal(latents(ours), latents(told)) and ours.noises is told.noises
    pixels = ~np.kron(grid, np.ones((8, 8), bool))
    assert np.array_equal(np.asarray(result.image)[pixels], np.asarray(source.image)[pixels])


def test_it_is_opened_in_one_pass(editor):
    seen = []
    with Calls(editor.pipe.unet) as calls:
        editor.open(scene(), CAT, on_step=lambda i, n, _: seen.append((i, n)), **QUICK)
    assert calls.dense == STEPS and seen == [(i, STEPS) for i in range(STEPS)]

    def cancel(*_):
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        editor.open(scene(), CAT, on_step=cancel, **QUICK)
    assert len(editor.history) == 1


def chain(editor):
    editor.edit(DOG, mask=SQUARE, growth=1)
    editor.edit(BIRD, mask=EVERYWHERE, strength=0.6)
    editor.edit(CAT, mask=BLOBS, growth=1)
    return [result.image.tobytes() for result in editor.history]


def test_what_was_dropped_is_rebuilt(pipelines):
    def run(budget):
        editor = Editor(pipelines["shallow"], max_recorded_bytes=budget)
        open_scene(editor, seed=3)
        return chain(editor)

    assert run(0) == run(None)


@pytest.mark.slow
def test_a_session_keeps_it(pipelines, tmp_path):
    pipelines["demo"].save_pretrained(tmp_path / "model")
    editor = Editor.from_pretrained(tmp_path / "model", device="cpu", dtype="fp32")
    open_scene(editor, seed=3)
    chain(editor)
    editor.save(tmp_path / "session")
    again = Editor.resume(tmp_path / "session", device="cpu")
    assert [result.config for result in again.history] == [result.config for result in editor.history]
    assert again.history[0].config.inversion == "ddpm"
    for each in (editor, again):
        each.edit(DOG, mask=SQUARE, growth=1)
    assert again.current.image.tobytes() == editor.current.image.tobytes()


def test_masks_from_latents_sample_with_the_same_noise(editor):
    """The dense steps that the method compares differ by the prompt alone: on the source's they differ nowhere."""
    source, told = open_scene(editor)
    engine = editor._engine
    with torch.inference_mode():
        path = denoise.sample(engine, source.config, engine.encode(source.config), told, STEPS)
    assert oracle.deviation(torch.cat(path), latents(told)) <= 1e-4
    assert editor.preview(DOG, mask_method="latents", probe_steps=2).mask.grid.any()


@pytest.mark.parametrize("inversion", ["null-text", "", None, "DDIM"])
def test_an_unknown_inversion(editor, inversion):
    with pytest.raises(InputError, match="inversion must be one of ddim, ddpm, got"):
        editor.open(scene(), CAT, inversion=inversion)
