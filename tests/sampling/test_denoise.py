"""E1, E3, E4 and E6 over whole trajectories: the engine against diffusers' pipelines and the oracle.

Deviations are in units of the expected latents' spread.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fisedit.sampling.denoise import Engine
from fisedit.sampling.trajectory import Trajectory
from fisedit.sparse_kernels import prepacked, tuning
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import DENSE_STEP, LATENT_FACTOR
from tests.support import oracle
from tests.support.edits import BIRD, CAT, DOG, as_oracle, config_of, latents, oracle_chain, record, replay, unwatched
from tests.support.grids import grids
from tests.support.pipelines import SCHEDULERS, SHAPES, build_pipeline, with_scheduler

FP32, BF16 = 1e-4, 2e-2
SIZES = [(128, 128), (192, 128), (104, 136)]

each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
each_guidance = pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")


def cells(size):
    return size[0] // LATENT_FACTOR, size[1] // LATENT_FACTOR


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


@pytest.mark.sweep(1)
@each_scheduler
@each_guidance
def test_a_replay_of_everything_is_the_dense_edit(pipelines, scheduler, guidance):
    """E1, over a source of another prompt."""
    pipe, sampling = pipelines["shallow"], {"scheduler": scheduler, "guidance_scale": guidance}
    engine = Engine(pipe)
    got = replay(engine, record(engine, config_of(**sampling)), DOG, np.ones((16, 16), bool), (0,) * 4)
    dense = oracle.dense_generate(with_scheduler(pipe, scheduler), as_oracle(config_of(DOG, **sampling))).latents
    assert oracle.deviation(latents(got), dense) <= FP32


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES[1:], ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_replay_of_everything_at_any_shape_and_size(pipelines, shape, size):
    height, width = size
    pipe, config = pipelines[shape], config_of(height=height, width=width)
    engine = Engine(pipe)
    got = replay(engine, record(engine, config), DOG, np.ones(cells(size), bool), (0,) * 4)
    dense = oracle.dense_generate(pipe, as_oracle(config_of(DOG, height=height, width=width))).latents
    assert oracle.deviation(latents(got), dense) <= FP32


@pytest.mark.parametrize("fp32", [False, True], ids=["bf16", "widened"])
def test_a_replay_of_everything_in_bf16(fp32, monkeypatch):
    """Root mean square over all steps: .008. The largest single difference is .04 spreads. On a CPU that multiplies
    faster in float32 no conv is in bf16."""
    pipe, seen, convolve = build_pipeline("demo").to(torch.bfloat16), set(), F.conv2d
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: fp32)
    monkeypatch.setattr(prepacked, "LARGE", 0)
    monkeypatch.setattr(prepacked, "MUCH", 0)
    monkeypatch.setattr(F, "conv2d", lambda x, *rest, **named: seen.add(x.dtype) or convolve(x, *rest, **named))
    engine, config = Engine(pipe), config_of(guidance_scale=1.0)
    source = record(engine, config)
    got = latents(replay(engine, source, DOG, np.ones((16, 16), bool), (0,) * 4)).float()
    assert (torch.bfloat16 if fp32 else torch.float32) not in seen
    dense = oracle.dense_generate(pipe, as_oracle(config_of(DOG, guidance_scale=1.0))).latents.float()
    assert (got - dense).norm() <= BF16 * dense.norm()


@pytest.mark.sweep(1)
@each_scheduler
@each_guidance
def test_a_sparse_edit_is_the_oracles(pipelines, scheduler, guidance):
    """E4 over all steps."""
    pipe, grid, growth = pipelines["shallow"], grids(16, 16)["square"], (1,) * 4
    engine, config = Engine(pipe), config_of(scheduler=scheduler, guidance_scale=guidance)
    got = replay(engine, record(engine, config), DOG, grid, growth)
    _, expected = oracle_chain(with_scheduler(pipe, scheduler), config, [(DOG, grid, growth)])
    assert oracle.deviation(latents(got), expected) <= FP32


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "growth", [(0,) * 3, (2,) * 3, (3, 1, 1), (0, 1, 16), (1, DENSE_STEP, 1), (DENSE_STEP, 2, 0)], ids=str
)
@each_size
def test_a_sparse_edit_at_any_growth(pipelines, growth, size):
    check_sparse_edit(pipelines["shallow"], grids(*cells(size))["blobs"], growth, size)


@each_scheduler
def test_dense_steps_in_between(pipelines, scheduler):
    """What they find changed outside is carried on; the last step reads what the second of them found."""
    pipe, config = pipelines["demo"], config_of(scheduler=scheduler, num_inference_steps=5)
    engine, grid, growth = Engine(pipe), grids(16, 16)["blobs"], (1, DENSE_STEP, 1, DENSE_STEP, 0)
    source = record(engine, config)
    got, plain = (replay(engine, source, DOG, grid, widths) for widths in (growth, (1, 1, 1, 1, 0)))
    _, expected = oracle_chain(with_scheduler(pipe, scheduler), config, [(DOG, grid, growth)])
    assert oracle.deviation(latents(got), expected) <= FP32 < oracle.deviation(latents(plain), expected)
    assert_pinned(got, source, grid)
    assert got.own_bytes > plain.own_bytes


def test_dense_steps_alone_are_the_dense_blended_edit(pipelines):
    pipe, grid = pipelines["demo"], grids(16, 16)["blobs"]
    engine, config = Engine(pipe), config_of()
    got = replay(engine, record(engine, config), DOG, grid, (DENSE_STEP,) * 4)
    expected = oracle.dense_blended(pipe, as_oracle(config), DOG, torch.from_numpy(grid)).latents
    assert oracle.deviation(latents(got), expected) <= FP32


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["one_cell", "border", "checkerboard"])
@pytest.mark.parametrize("shape", ["sd15", "sd2"])
def test_a_sparse_edit_of_any_shape(pipelines, shape, name):
    check_sparse_edit(pipelines[shape], grids(13, 17)[name], (1, 1), (104, 136))


def check_sparse_edit(pipe, grid, growth, size):
    engine = Engine(pipe)
    config = config_of(height=size[0], width=size[1], num_inference_steps=len(growth))
    source = record(engine, config)
    got = replay(engine, source, DOG, grid, growth)
    _, expected = oracle_chain(pipe, config, [(DOG, grid, growth)])
    assert oracle.deviation(latents(got), expected) <= FP32
    assert_pinned(got, source, grid)


def assert_pinned(edit, source, grid):
    """E3: the latents outside are the source's at every step, bit for bit."""
    outside = ~torch.from_numpy(grid)
    assert torch.equal(latents(edit)[..., outside], latents(source)[..., outside])
    assert not torch.equal(latents(edit)[1:], latents(source)[1:])


@each_scheduler
def test_latents_outside_never_move(pipelines, scheduler):
    engine, grid = Engine(pipelines["shallow"]), grids(16, 16)["noise"]
    source = record(engine, config_of(scheduler=scheduler))
    assert_pinned(replay(engine, source, DOG, grid, (2,) * 4), source, grid)


def test_a_pinned_recording_is_the_dense_blended_edit(pipelines):
    """E9's reference, which fallbacks with something protected run."""
    pipe, grid = pipelines["demo"], grids(16, 16)["blobs"]
    engine, config = Engine(pipe), config_of()
    source = record(engine, config)
    with torch.inference_mode():
        edit = config_of(DOG)
        got = engine.record(edit, engine.encode(edit), unwatched, (grid, source))
    expected = oracle.dense_blended(pipe, as_oracle(config), DOG, torch.from_numpy(grid)).latents
    assert oracle.deviation(latents(got), expected) <= FP32
    assert_pinned(got, source, grid)


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
    edits = [replay(engine, source, DOG, grid, (1,) * 4), replay(engine, source, DOG, grid, (DENSE_STEP, 1, 1, 1))]
    for over in (source, *edits):
        assert first_batches(engine, lambda over=over: replay(engine, over, BIRD, grid, (DENSE_STEP, 1, 1, 1))) == (
            1,
            2,
        )
    edit, other = config_of(BIRD), config_of(BIRD, negative_prompt="a cake")
    brushed = replace(edit, loras=(("brush", 1.0),))
    with torch.inference_mode():
        text, its = engine.encode(edit), engine.encode(other)
        over = engine.replay(source, brushed, text, {}, grid, (1,) * 4, unwatched)  # its first step is half another's

    def dense(config, text, trajectory, start=0):
        return engine.record(config, text, unwatched, (grid, trajectory), start=start)

    assert first_batches(engine, lambda: dense(edit, text, source)) == (1, 2)
    for given in ((edit, text, source, 1), (other, its, source), (brushed, text, source), (brushed, text, over)):
        assert first_batches(engine, lambda given=given: dense(*given)) == (2, 2)
    assert first_batches(engine, lambda: dense(edit, text * 1.01, source)) == (2, 2)  # the text encoder has changed
    got, expected = dense(edit, text, source).features[0], record(engine, edit).features[0]
    assert got.maps.keys() == expected.maps.keys() and got.totals.keys() == expected.totals.keys()
    for made, wanted in ((got.maps, expected.maps), (got.totals, expected.totals)):
        assert all(oracle.deviation(made[name], wanted[name]) <= FP32 for name in wanted)


def test_a_chain_of_edits_is_the_oracles_chain(pipelines):
    """E6: an edit over an overlay reads the very maps that the mixed forward of the first edit had."""
    pipe, at = pipelines["sd15"], grids(16, 16)
    edits = [
        (DOG, at["square"], (1,) * 4),
        (BIRD, at["blobs"], (2, DENSE_STEP, 0, 0)),
        (CAT, at["corner"], (1,) * 4),
        (DOG, at["blobs"], (DENSE_STEP, 1, DENSE_STEP, 1)),
    ]
    engine, config = Engine(pipe), config_of()
    trajectories = [record(engine, config)]
    for edit in edits:
        trajectories.append(replay(engine, trajectories[-1], *edit))
    for got, expected in zip(trajectories, oracle_chain(pipe, config, edits), strict=True):
        assert oracle.deviation(latents(got), expected) <= FP32


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("growth", "tolerance"), [(2, 0.3), (4, 0.2), (8, FP32)])
@pytest.mark.parametrize("again", ["square", "corner"])
def test_an_edit_on_a_fresh_recording_of_an_edit(pipelines, again, growth, tolerance):
    """E6: the copy's maps are dense forwards of the edit's latents. They differ from the overlay's where the first edit
    kept what the source had, so this tolerance is of semantics, not of rounding, and ends where the first edit computed
    everything: a root mean square of .14 to .20 at growth 2, .09 to .12 at 4, 3e-6 at 8, in a random network whose
    attention looks everywhere (the second edit itself moves .32 to .41)."""
    engine, at = Engine(pipelines["demo"]), grids(16, 16)
    edit = replay(engine, record(engine, config_of()), DOG, at["square"], (growth,) * 4)
    trajectories = (edit, recorded_afresh(engine, edit))
    over, fresh = (latents(replay(engine, trajectory, BIRD, at[again], (1,) * 4)) for trajectory in trajectories)
    over, fresh = (trajectory[1:, ..., torch.from_numpy(at[again])] for trajectory in (over, fresh))
    assert (over - fresh).norm() <= tolerance * fresh.norm()


def recorded_afresh(engine, edit):
    """A trajectory with the edit's latents whose every step was recorded densely."""
    sampler, copy = engine.sampler(edit.config), Trajectory(edit.config, latents=edit.latents)
    with torch.inference_mode():
        text = engine.encode(edit.config)
        for x, t in zip(edit.latents, sampler.timesteps, strict=False):
            scaled, extra = engine._inputs(sampler, edit.config, x, t)
            raw, maps = engine.executor.run_dense(scaled, t, text, copy.text, timestep_cond=extra)
            copy.predictions.append(engine._guide(raw, edit.config))
            copy.features.append(maps)
    return copy


def test_growing_as_the_steps_say(pipelines):
    """The prediction kept for later edits is the source's outside the grown mask of its own step."""
    engine, grid = Engine(pipelines["demo"]), grids(16, 16)["square"]
    source = record(engine, config_of())
    edit = replay(engine, source, DOG, grid, (0, 3, 1, 2))
    for i, growth in enumerate((0, 3, 1, 2)):
        same = (edit.predictions[i] == source.predictions[i]).all(1)[0].numpy()
        assert np.array_equal(~same, dilate(grid, growth))


@pytest.mark.sweep(1)
@each_scheduler
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_any_number_of_steps_samples_as_diffusers_does(pipelines, scheduler, steps):
    pipe = pipelines["shallow"]
    config = config_of(num_inference_steps=steps, scheduler=scheduler, guidance_scale=1.0, width=64, height=64)
    dense = oracle.dense_generate(with_scheduler(pipe, scheduler), as_oracle(config))
    assert torch.equal(latents(record(Engine(pipe), config)), dense.latents)


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
