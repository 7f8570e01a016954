"""Whole trajectories: the engine against diffusers' pipelines. Against the oracle: tests/contract/.

Deviations are in units of the expected latents' spread.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fisedit.sampling.denoise import Engine
from fisedit.sampling.trajectory import LatentEdit
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import DENSE_STEP
from tests.support import oracle
from tests.support.edits import (
    BIRD,
    DOG,
    FP32,
    as_oracle,
    config_of,
    latents,
    oracle_chain,
    record,
    replay,
    unwatched,
)
from tests.support.grids import grids
from tests.support.pipelines import SCHEDULERS, SHAPES, build_pipeline, with_scheduler

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
        (over,) = engine.run_sparse(
            source, [LatentEdit(brushed, text, {}, grid, (1,) * 4)], unwatched
        )  # its first step is half another's

    def dense(config, text, trajectory, start=0):
        return engine.run_dense(config, text, unwatched, (grid, trajectory), start=start)

    assert first_batches(engine, lambda: dense(edit, text, source)) == (1, 2)
    for given in ((edit, text, source, 1), (other, its, source), (brushed, text, source), (brushed, text, over)):
        assert first_batches(engine, lambda given=given: dense(*given)) == (2, 2)
    assert first_batches(engine, lambda: dense(edit, text * 1.01, source)) == (2, 2)  # the text encoder has changed
    got, expected = dense(edit, text, source).features[0], record(engine, edit).features[0]
    assert got.maps.keys() == expected.maps.keys() and got.totals.keys() == expected.totals.keys()
    for made, wanted in ((got.maps, expected.maps), (got.totals, expected.totals)):
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
