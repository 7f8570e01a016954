"""E4: a sparse forward equals the oracle, a dense one whose maps are the recorded ones where nothing is active.

Single steps, then whole trajectories; latents in units of their spread. With adapters: tests/adapters/.
"""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.resnet import ResnetBlock2D

from fisedit.features.cache import FeatureOverlay
from fisedit.runners.cuda_graphs import GraphExecutor
from fisedit.sampling.engine import Engine
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels import ops, tuning
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import Step
from tests.support import oracle
from tests.support.edits import DOG, FP32, cells, check_pinned, config_of, latents, oracle_chain, record, replay
from tests.support.graph_steps import TIME, Case
from tests.support.grids import grids
from tests.support.pipelines import ALL_SCHEDULERS, DISTILLED, SCHEDULERS, SHAPES, build_pipeline, with_scheduler
from tests.support.steps import StepEdit, rows

TOLERANCE = 1e-4
PIXELS = [(128, 128), (192, 128), (104, 136)]
CELLS = [(16, 16), (16, 24), (13, 17)]

each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
each_guidance = pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
each_size = pytest.mark.parametrize("size", PIXELS, ids=lambda size: f"{size[0]}x{size[1]}")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", CELLS, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", grids(8, 8))
def test_sparse_equals_the_oracle(pipelines, monkeypatch, shape, size, name):
    """Whether maps are normed whole, summed whole, or summed where they changed."""
    unet, grid = pipelines[shape].unet, grids(*size)[name]
    case, executor = StepEdit(unet, grid), Executor(unet)
    expected = rows(case.oracle(unet), grid)
    for limits in ({}, {"SHORT_MAP": 0}, {"SMALL_MAP": 0}):
        with monkeypatch.context() as patch:
            for limit, value in limits.items():
                patch.setattr(tuning, limit, value)
            got, _ = case.sparse(executor, make_row_plan(grid, executor.num_levels))
        assert torch.allclose(got, expected, atol=TOLERANCE, rtol=0), limits


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", sorted(ops.BACKENDS))
def test_every_backend_equals_the_oracle_without_guidance(pipelines, shape, backend):
    unet, grid = pipelines[shape].unet, grids(13, 17)["blobs"]
    case, executor = StepEdit(unet, grid, batch=1), Executor(unet)
    with ops.use(backend):
        got, _ = case.sparse(executor, make_row_plan(grid, executor.num_levels))
    assert torch.allclose(got, rows(case.oracle(unet), grid), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", DISTILLED)
def test_distilled_relatives_equal_the_oracle(name):
    """With fewer layers, and with a middle block without attention or none; eagerly, and by captured steps."""
    unet, grid = build_pipeline(name).unet, grids(13, 17)["blobs"]
    case, executor = StepEdit(unet, grid), Executor(unet)
    got, _ = case.sparse(executor, make_row_plan(grid, executor.num_levels))
    assert torch.allclose(got, rows(case.oracle(unet), grid), atol=TOLERANCE, rtol=0)
    captured = Case(unet, [grid])
    captured.check(captured.begin(GraphExecutor(captured.executor)).step(0, captured.batch(), TIME))


def test_blocks_with_plain_feed_forwards_and_scaled_sums_equal_the_oracle():
    unet, grid = build_pipeline("sd15").unet, grids(16, 16)["square"]
    torch.manual_seed(0)
    for module in unet.modules():
        if isinstance(module, BasicTransformerBlock):
            module.ff = FeedForward(module.norm3.normalized_shape[0], activation_fn="gelu").eval().requires_grad_(False)
        elif isinstance(module, ResnetBlock2D):
            module.output_scale_factor = 1.5
    case, executor = StepEdit(unet, grid), Executor(unet)
    got, _ = case.sparse(executor, make_row_plan(grid, executor.num_levels))
    assert torch.allclose(got, rows(case.oracle(unet), grid), atol=TOLERANCE, rtol=0)


def test_the_comparison_can_fail(pipelines):
    unet, grid = pipelines["sd15"].unet, grids(16, 16)["square"]
    case, executor = StepEdit(unet, grid), Executor(unet)
    got, _ = case.sparse(executor, make_row_plan(grid, executor.num_levels))
    dense = unet(case.edited, case.timestep, **case.texts[1].unet_inputs)[0]
    assert not torch.allclose(got, rows(dense, grid), atol=10 * TOLERANCE, rtol=0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("few", [0, tuning.SMALL_MAP])
@pytest.mark.parametrize("name", ["square", "blobs", "noise"])
def test_an_overlay_is_as_good_as_a_recording(pipelines, monkeypatch, name, few):
    """The mixed maps of an edit, read through its overlay, are those the oracle mixes."""
    monkeypatch.setattr(tuning, "SMALL_MAP", few)
    unet, first, second = pipelines["sd15"].unet, grids(16, 16)[name], grids(16, 16)["checkerboard"]
    case, executor = StepEdit(unet, first), Executor(unet)
    again = torch.where(torch.from_numpy(second), torch.randn(case.source.shape), case.edited)
    _, overlay = case.sparse(executor, make_row_plan(first, executor.num_levels))
    got, _ = executor.run_sparse(
        again, case.timestep, case.texts[0], {}, FeatureOverlay(overlay, make_row_plan(second, executor.num_levels))
    )
    base = oracle.record(unet, case.source, case.timestep, case.texts[0].unet_inputs)
    mixed = oracle.mix(unet, base, case.edited, case.timestep, case.texts[1].unet_inputs, case.inside)
    expected = oracle.mixed_forward(
        unet, mixed, again, case.timestep, case.texts[0].unet_inputs, torch.from_numpy(second)
    )
    assert torch.allclose(got, rows(expected, second), atol=TOLERANCE, rtol=0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("scheduler", ALL_SCHEDULERS)
@each_guidance
def test_a_sparse_edit_is_the_oracles(pipelines, scheduler, guidance):
    """Over all steps."""
    pipe, grid = pipelines["shallow"], grids(16, 16)["square"]
    engine, config = Engine(pipe), config_of(scheduler=scheduler, guidance_scale=guidance)
    growth = (1,) * config.num_timesteps
    got = replay(engine, record(engine, config), DOG, grid, growth)
    _, expected = oracle_chain(with_scheduler(pipe, scheduler), config, [(DOG, grid, growth)])
    assert oracle.deviation(latents(got), expected) <= FP32


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "growth", [(0,) * 3, (2,) * 3, (3, 1, 1), (0, 1, 16), (1, Step.DENSE, 1), (Step.DENSE, 2, 0)], ids=str
)
@each_size
def test_a_sparse_edit_at_any_growth(pipelines, growth, size):
    check_sparse_edit(pipelines["shallow"], grids(*cells(size))["blobs"], growth, size)


@each_scheduler
def test_dense_steps_in_between(pipelines, scheduler):
    """What they find changed outside is carried on; the last step reads what the second of them found."""
    pipe, config = pipelines["demo"], config_of(scheduler=scheduler, num_inference_steps=5)
    engine, grid, growth = Engine(pipe), grids(16, 16)["blobs"], (1, Step.DENSE, 1, Step.DENSE, 0)
    source = record(engine, config)
    got, plain = (replay(engine, source, DOG, grid, widths) for widths in (growth, (1, 1, 1, 1, 0)))
    _, expected = oracle_chain(with_scheduler(pipe, scheduler), config, [(DOG, grid, growth)])
    assert oracle.deviation(latents(got), expected) <= FP32 < oracle.deviation(latents(plain), expected)
    check_pinned(got, source, grid)
    assert got.own_bytes > plain.own_bytes


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
    check_pinned(got, source, grid)
