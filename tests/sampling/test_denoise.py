"""Whole trajectories, and edits with a strength: the engine against diffusers' pipelines. The oracle: tests/contract/.

Deviations are in units of the expected latents' spread.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline
from PIL import Image

from fisedit import Editor
from fisedit.errors import InputError, SessionError
from fisedit.models.families.conditioning import Conditioning
from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.sampling.trajectory import LatentEdit
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import ActiveCells, EditMask, EditMode, MaskSource, Step, first_step
from tests.support import oracle
from tests.support.edits import (
    BIRD,
    CAT,
    DOG,
    FP32,
    Calls,
    as_oracle,
    config_of,
    latents,
    midway,
    oracle_chain,
    record,
    replay,
    unwatched,
)
from tests.support.grids import grids
from tests.support.pictures import scene
from tests.support.pipelines import SCHEDULERS, SHAPES, build_pipeline, diffedit, with_scheduler

each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
each_guidance = pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])


@pytest.mark.sweep(1)
@each_scheduler
@each_guidance
def test_recording_is_diffusers_own_pipeline(pipelines, scheduler, guidance):
    """Every latent, bit for bit."""
    pipe = pipelines["shallow"]
    config = config_of(scheduler=scheduler, guidance_scale=guidance, height=104, width=136)
    dense = oracle.dense_generate(with_scheduler(pipe, scheduler), as_oracle(config))
    assert torch.equal(latents(record(Engine(pipe), config)), dense.latents)


@pytest.mark.parametrize("shape", SHAPES)
def test_recording_with_a_negative_prompt(pipelines, shape):
    pipe, config = pipelines[shape], config_of(negative_prompt="the red house in snow")
    dense = oracle.dense_generate(pipe, as_oracle(config))
    assert torch.equal(latents(record(Engine(pipe), config)), dense.latents)
    assert not torch.equal(latents(record(Engine(pipe), config_of())), dense.latents)


def first_batches(engine, run) -> tuple[int, int]:
    """Branches that the UNet runs at a run's first two steps."""
    seen = []
    watching = engine.pipe.unet.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    try:
        run()
    finally:
        watching.remove()
    return seen[0], seen[1]


def test_an_edit_takes_the_branch_without_words_of_its_first_step_from_the_source(pipelines):
    engine, grid = Engine(pipelines["demo"]), grids(16, 16)["blobs"]
    source = record(engine, config_of())
    edits = [replay(engine, source, DOG, grid, (1,) * 4), replay(engine, source, DOG, grid, (Step.DENSE, 1, 1, 1))]
    for over in (source, *edits):
        assert first_batches(engine, lambda over=over: replay(engine, over, BIRD, grid, (Step.DENSE, 1, 1, 1))) == (
            1,
            2,
        )
    edit, other = config_of(BIRD), config_of(BIRD, negative_prompt="a cake")
    brushed = replace(edit, loras=(("brush", 1.0),))
    with torch.inference_mode():
        text, its = engine.encode(edit), engine.encode(other)
        (over,) = denoise.run_sparse(
            engine, source, [LatentEdit(brushed, text, {}, ActiveCells(grid), EditMode((1,) * 4))], unwatched
        )  # its first step is half another's

    def dense(config, text, trajectory, start=0):
        return denoise.run_dense(engine, config, text, unwatched, (ActiveCells(grid), trajectory), start=start)

    assert first_batches(engine, lambda: dense(edit, text, source)) == (1, 2)
    for given in ((edit, text, source, 1), (other, its, source), (brushed, text, source), (brushed, text, over)):
        assert first_batches(engine, lambda given=given: dense(*given)) == (2, 2)
    changed = Conditioning(text.text * 1.01)  # by another text encoder
    assert first_batches(engine, lambda: dense(edit, changed, source)) == (2, 2)
    got, expected = dense(edit, text, source).features[0], record(engine, edit).features[0]
    assert got.maps.keys() == expected.maps.keys() and got.statistics.keys() == expected.statistics.keys()
    for made, wanted in ((got.maps, expected.maps), (got.statistics, expected.statistics)):
        assert all(oracle.deviation(made[name], wanted[name]) <= FP32 for name in wanted)


def test_growing_as_the_steps_say(pipelines):
    """The prediction kept for later edits is the source's outside the grown mask of its own step."""
    engine, grid = Engine(pipelines["demo"]), grids(16, 16)["square"]
    source = record(engine, config_of())
    edit = replay(engine, source, DOG, grid, (0, 3, 1, 2))
    for i, growth in enumerate((0, 3, 1, 2)):
        same = (edit.predictions[i] == source.predictions[i]).all(1)[0].numpy()
        assert np.array_equal(~same, dilate(grid, growth))


def test_a_distilled_model_takes_guidance_as_an_input():
    """LCM with `time_cond_proj_dim`: one branch, with the guidance embedded beside the time."""
    pipe = build_pipeline("demo")
    pipe.unet.time_embedding.cond_proj = torch.nn.Linear(32, pipe.unet.time_embedding.linear_1.in_features, bias=False)
    pipe.unet.register_to_config(time_cond_proj_dim=32)
    lcm, grid = with_scheduler(pipe, "lcm"), grids(16, 16)["blobs"]
    config, growth = config_of(scheduler="lcm"), (1,) * 4
    engine = Engine(pipe)
    source = record(engine, config)
    got = replay(engine, source, DOG, grid, growth)
    dense, expected = oracle_chain(lcm, config, [(DOG, grid, growth)])
    assert source.features[0].maps["conv_norm_out"].shape[0] == 1
    assert torch.equal(latents(source), dense)
    assert oracle.deviation(latents(got), expected) <= FP32
    assert not torch.equal(latents(record(engine, config_of(scheduler="lcm", guidance_scale=3.0))), dense)


@pytest.mark.sweep(1)
@each_scheduler
def test_an_edit_with_a_seed_of_its_own_begins_with_its_noise_inside_the_mask(pipelines, scheduler):
    """And an edit of it begins with the same."""
    pipe, (square, blobs) = pipelines["demo"], (grids(16, 16)[name] for name in ("square", "blobs"))
    engine, config = Engine(pipe), config_of(scheduler=scheduler)
    source = record(engine, config)
    growths, seed = [(1, Step.DENSE, 0, 2), (1, 1, 1, 1)], config.seed + 1
    edit = replay(engine, source, DOG, blobs, growths[0], seed)
    later = replay(engine, edit, BIRD, square, growths[1])
    expected = oracle_chain(
        with_scheduler(pipe, scheduler),
        config,
        [(DOG, blobs, growths[0]), (BIRD, square, growths[1])],
        seeds=(seed, seed),
    )
    for got, wanted in zip((source, edit, later), expected, strict=True):
        assert oracle.deviation(latents(got), wanted) <= FP32
    assert not torch.equal(edit.latents[0], source.latents[0]) and torch.equal(later.latents[0], edit.latents[0])
    changed = replace(config, prompt=DOG, seed=seed)
    with torch.inference_mode():
        dense = denoise.run_dense(
            engine, changed, engine.encode(changed), unwatched, (ActiveCells(np.ones_like(blobs)), source)
        )
    alone = oracle.dense_generate(with_scheduler(pipe, scheduler), as_oracle(changed))
    assert oracle.deviation(latents(dense), alone.latents) <= FP32


@pytest.mark.sweep(1)
@each_scheduler
@pytest.mark.parametrize("strength", [0.9, 0.5, 0.25])
def test_a_seed_and_a_strength_are_image_to_image_of_diffusers(pipelines, scheduler, strength):
    """Where the mask is everywhere; elsewhere, what is outside it stays."""
    pipe = with_scheduler(pipelines["shallow"], scheduler)
    config = config_of(scheduler=scheduler, num_inference_steps=8)
    engine, start = Engine(pipelines["shallow"]), first_step(strength, 8)
    source, edit = record(engine, config), replace(config, prompt=DOG, seed=config.seed + 1)
    theirs = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(
        DOG,
        image=source.latents[-1] * 1.0,
        strength=strength,
        num_inference_steps=8,
        guidance_scale=config.guidance_scale,
        generator=torch.Generator().manual_seed(edit.seed),
        output_type="latent",
    ).images
    with torch.inference_mode():
        text, everywhere = engine.encode(edit), np.ones((16, 16), bool)
        dense = denoise.run_dense(engine, edit, text, unwatched, (ActiveCells(everywhere), source), start=start)
        half = np.arange(16) < np.full((16, 1), 8)
        (part,) = denoise.run_sparse(
            engine, source, [LatentEdit(edit, text, {}, ActiveCells(half), EditMode((1,) * 8, start=start))], unwatched
        )
    assert oracle.deviation(dense.latents[-1], expected) <= FP32
    for got, kept in zip(part.latents[start:], source.latents[start:], strict=True):
        assert torch.equal(got[..., 8:], kept[..., 8:]) and not torch.equal(got[..., :8], kept[..., :8])


SQUARE, BLOBS = (grids(16, 16)[name] for name in ("square", "blobs"))
EVERYWHERE = np.ones((16, 16), bool)
STEPS = 5
QUICK = {"seed": 7, "num_inference_steps": STEPS}
each_start = pytest.mark.parametrize("start", [1, 3, 4])


@pytest.mark.sweep(1)
@each_scheduler
@each_start
def test_a_dense_edit_is_a_pipeline_whose_prompt_changes(pipelines, scheduler, start):
    """Also what a multistep sampler remembers of the source's steps, and a stochastic one's noise."""
    pipe = pipelines["shallow"]
    engine, config = Engine(pipe), config_of(scheduler=scheduler, num_inference_steps=STEPS)
    source = record(engine, config)
    edit = replace(config, prompt=DOG)
    with torch.inference_mode():
        got = denoise.run_dense(engine, edit, engine.encode(edit), unwatched, (ActiveCells(BLOBS), source), start=start)
    expected = midway(with_scheduler(pipe, scheduler), as_oracle(config), DOG, start, BLOBS)
    assert oracle.deviation(latents(got), expected) <= 1e-4
    assert torch.equal(latents(got)[: start + 1], latents(source)[: start + 1])


@pytest.mark.sweep(1)
@each_scheduler
@each_start
def test_a_sparse_edit_is_the_oracles(pipelines, scheduler, start):
    pipe = with_scheduler(pipelines["shallow"], scheduler)
    engine, config = Engine(pipe), config_of(scheduler=scheduler, num_inference_steps=STEPS)
    source = record(engine, config)
    edit = replace(config, prompt=DOG)
    with torch.inference_mode():
        told = LatentEdit(edit, engine.encode(edit), {}, ActiveCells(SQUARE), EditMode((0,) * STEPS, start=start))
        (got,) = denoise.run_sparse(engine, source, [told], unwatched)
    maps = [{} for _ in range(STEPS)]
    with oracle._around_calls(pipe.unet, lambda i: oracle.recording(pipe.unet, maps[i])):
        oracle.dense_generate(pipe, as_oracle(config))

    @contextmanager
    def mixed(i):
        with oracle.mixing(pipe.unet, maps[i], torch.from_numpy(SQUARE)) if i >= start else nullcontext():
            yield

    expected = midway(pipe, as_oracle(config), DOG, start, SQUARE, mixed)
    assert oracle.deviation(latents(got), expected) <= 1e-4
    assert not torch.equal(latents(got)[start + 1], latents(source)[start + 1])


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(("steps", "strength"), [(5, 0.6), (7, 0.99), (50, 0.58)])
@pytest.mark.parametrize("guidance", [7.5, 1.0])
def test_of_an_opened_picture_it_is_diffedits(pipelines, steps, strength, guidance):
    """diffusers' own pipeline, which goes on from the inverted latents; how many steps it runs, too."""
    pipe = pipelines["shallow"]
    editor = Editor(pipe)
    source = editor.open(scene(), CAT, num_inference_steps=steps, guidance_scale=guidance)
    result = editor.edit(DOG, mask=EVERYWHERE, strength=strength)
    dense = diffedit(pipe)(
        DOG,
        mask_image=torch.ones(1, 1, 16, 16),
        image_latents=latents(editor._trajectory_cache.get(source.id)[0])[None, result.run.start : -1],
        inpaint_strength=strength,
        num_inference_steps=steps,
        guidance_scale=guidance,
        output_type="latent",
    )
    assert oracle.deviation(latents(editor._trajectory_cache.get(result.id)[0])[-1:], dense.images) <= 1e-4
    assert result.stats.unet_evaluations_dense == int(steps * strength)


@pytest.mark.parametrize("mask", [EVERYWHERE, SQUARE], ids=["dense", "sparse"])
def test_what_it_costs(editor, mask):
    editor.generate(CAT, **QUICK)
    with Calls(editor.pipe.unet) as calls:
        result = editor.edit(DOG, mask=mask, strength=0.4, growth=1)
    stats, costs = result.stats, editor._engine.costs(result.config)
    assert calls.dense + calls.sparse == stats.unet_evaluations_dense + stats.unet_evaluations_sparse == 2
    assert (stats.steps_shared, result.run.start) == (3, 3)
    assert costs.dense() - stats.macs_dense == 3 * costs.dense_step()
    editor.undo()
    seen = editor.preview(DOG, mask=mask, strength=0.4, growth=1)
    assert (seen.macs, seen.macs_dense) == (stats.macs, stats.macs_dense)
    editor.edit(DOG, mask=mask, growth=1)
    assert editor.current.stats.steps_shared == 0
    whole = editor._trajectory_cache.get(editor.current.id)[0].own_bytes
    assert 0.4 * whole < editor._trajectory_cache.get(result.id)[0].own_bytes < 0.6 * whole


def test_less_strength_keeps_more(editor):
    source = editor.generate(CAT, **QUICK)
    moved = []
    for strength in (0.2, 0.6, 1.0):
        editor.checkout(source.id)
        result = editor.edit(DOG, mask=SQUARE, strength=strength, growth=1)
        ours, theirs = (latents(editor._trajectory_cache.get(r.id)[0])[-1] for r in (result, source))
        moved.append(float((ours - theirs).norm()))
    assert 0 < moved[0] < moved[1] < moved[2]


def test_a_late_check_looks_at_a_step_that_runs(pipelines, monkeypatch):
    """The mask is checked within the steps that remain. (A random model's own mask may be too large.)"""
    editor, looked = Editor(pipelines["demo"]), []
    monkeypatch.setattr("fisedit.masking.drift_check.DriftCheck.compare", lambda check, *_: looked.append(check.step))
    monkeypatch.setattr("fisedit.masking.edit_scope.predict_mask", lambda *_: EditMask(SQUARE, MaskSource.ATTENTION))
    editor.generate(CAT, **QUICK)
    editor.edit(DOG, strength=0.6, growth=0)
    assert looked == [3]


CHAIN = [(DOG, SQUARE, 0.6), (BIRD, EVERYWHERE, 0.4), (CAT, BLOBS, 0.8)]


def chain(editor):
    for prompt, grid, strength in CHAIN:
        editor.edit(prompt, mask=grid, strength=strength, growth=1)
    return [result.image.tobytes() for result in editor.history]


@pytest.mark.parametrize("picture", [None, scene()], ids=["generated", "opened"])
def test_what_was_dropped_is_rebuilt(pipelines, picture):
    def run(budget):
        editor = Editor(pipelines["shallow"], max_recorded_bytes=budget)
        if picture is None:
            editor.generate(CAT, **QUICK)
        else:
            editor.open(picture, CAT, num_inference_steps=STEPS)
        return chain(editor)

    assert run(0) == run(None)


def test_a_session_keeps_it(pipelines, tmp_path):
    pipelines["demo"].save_pretrained(tmp_path / "model")
    editor = Editor.from_pretrained(tmp_path / "model", device="cpu", dtype="fp32")
    editor.generate(CAT, **QUICK)
    chain(editor)
    editor.save(tmp_path / "session")
    again = Editor.resume(tmp_path / "session", device="cpu")
    assert [result.run.start for result in again.history] == [0, 2, 3, 1]
    for each in (editor, again):
        each.edit(DOG, mask=SQUARE, growth=1)
    assert again.current.image.tobytes() == editor.current.image.tobytes()
    index = tmp_path / "session" / "session.json"
    index.write_text(index.read_text().replace('"start": 3', '"start": 5'))
    with pytest.raises(SessionError, match="is damaged"):
        Editor.resume(tmp_path / "session", device="cpu")


@pytest.mark.parametrize(
    ("strength", "message"),
    [
        (0, r"strength must be in \(0, 1\], got 0"),
        (1.7, "got 1.7"),
        (float("nan"), "got nan"),
        ("much", "got 'much'"),
        (None, "got None"),
        (0.1, "strength must leave a step of 5 to run, got 0.1; use 0.2 or more"),
    ],
)
def test_refused_in_one_line(editor, strength, message):
    source = editor.generate(CAT, **QUICK)
    for call in (editor.edit, editor.preview):
        with pytest.raises(InputError, match=message):
            call(DOG, strength=strength)
    assert list(editor.history) == [source]


def test_a_dense_edit_of_an_opened_picture_begins_at_its_latents(editor):
    """And not at the noise that a generated picture of the same config would begin at."""
    source = editor.open(Image.new("RGB", (128, 128), "teal"), CAT, num_inference_steps=3)
    result = editor.edit("a cat and a cake at night")
    first, theirs = (editor._trajectory_cache.get(r.id)[0].latents[0] for r in (result, source))
    assert result.stats.fallback.startswith("global edit") and torch.equal(first, theirs)


@each_scheduler
def test_frames_meet_the_noise_of_their_source(pipelines, scheduler):
    """Frames that read the same are the edit alone; a batch would draw every frame noise of its own."""
    engine, config = Engine(pipelines["shallow"]), config_of(scheduler=scheduler, num_inference_steps=4)
    source, edit = record(engine, config), replace(config, prompt=DOG)
    with torch.inference_mode():
        told = LatentEdit(edit, engine.encode(edit), {}, ActiveCells(SQUARE), EditMode((1,) * 4))
        (alone,) = denoise.run_sparse(engine, source, [told], unwatched)
        frames = denoise.run_clip(engine, source, [told, told], unwatched)
    for frame in frames:
        assert oracle.deviation(frame, alone.latents[-1]) <= FP32
