"""E4 and E8 on single steps: a sparse evaluation equals the oracle's mixed dense forward, and leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0

from fisedit.errors import UnsupportedModuleError
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels import ops, tuning
from fisedit.sparse_kernels.row_plan import make_plan
from tests.support import oracle
from tests.support.grids import grids
from tests.support.pipelines import SHAPES, build_pipeline

TOLERANCE = 1e-4
SIZES = [(16, 16), (16, 24), (13, 17)]


class Case:
    """A source and an edit of it on one UNet: same latents outside the mask, new ones inside, new text."""

    def __init__(self, unet, grid, batch=2, seed=0):
        make = torch.Generator().manual_seed(seed)
        width = unet.config.cross_attention_dim
        self.source = torch.randn(batch, 4, *grid.shape, generator=make)
        self.texts = torch.randn(2, batch, 11, width, generator=make)
        self.timestep = torch.tensor(500)
        self.inside = torch.from_numpy(grid)
        self.edited = torch.where(self.inside, torch.randn(self.source.shape, generator=make), self.source)

    def oracle(self, unet):
        recording = oracle.record(unet, self.source, self.timestep, self.texts[0])
        return oracle.mixed_forward(unet, recording, self.edited, self.timestep, self.texts[1], self.inside)

    def sparse(self, executor, plan):
        """Returns the edit's rows, and where they belong."""
        _, maps = executor.run_dense(self.source, self.timestep, self.texts[0], {})
        return executor.run_sparse(self.edited, self.timestep, self.texts[1], {}, maps, plan)


def rows(full, grid):
    return full.flatten(2).transpose(1, 2)[:, torch.from_numpy(grid).flatten()]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", grids(8, 8))
def test_sparse_equals_the_oracle(pipelines, monkeypatch, shape, size, name):
    """Whether maps are normed whole, summed whole, or summed where they changed."""
    unet, grid = pipelines[shape].unet, grids(*size)[name]
    case, executor = Case(unet, grid), Executor(unet)
    expected = rows(case.oracle(unet), grid)
    for limits in ({}, {"SHORT_MAP": 0}, {"SMALL_MAP": 0}):
        with monkeypatch.context() as patch:
            for limit, value in limits.items():
                patch.setattr(tuning, limit, value)
            got, _ = case.sparse(executor, make_plan(grid, executor.depth))
        assert torch.allclose(got, expected, atol=TOLERANCE, rtol=0), limits


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", sorted(ops.BACKENDS))
def test_every_backend_equals_the_oracle_without_guidance(pipelines, shape, backend):
    unet, grid = pipelines[shape].unet, grids(13, 17)["blobs"]
    case, executor = Case(unet, grid, batch=1), Executor(unet)
    with ops.use(backend):
        got, _ = case.sparse(executor, make_plan(grid, executor.depth))
    assert torch.allclose(got, rows(case.oracle(unet), grid), atol=TOLERANCE, rtol=0)


def test_the_comparison_can_fail(pipelines):
    unet, grid = pipelines["sd15"].unet, grids(16, 16)["square"]
    case, executor = Case(unet, grid), Executor(unet)
    got, _ = case.sparse(executor, make_plan(grid, executor.depth))
    dense = unet(case.edited, case.timestep, case.texts[1])[0]
    assert not torch.allclose(got, rows(dense, grid), atol=10 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_recording_is_the_dense_forward_itself(pipelines, shape):
    unet, grid = pipelines[shape].unet, grids(13, 17)["square"]
    case = Case(unet, grid)
    got, _ = Executor(unet).run_dense(case.source, case.timestep, case.texts[0], {})
    assert torch.allclose(got, unet(case.source, case.timestep, case.texts[0])[0], atol=1e-6, rtol=0)


def test_a_recorded_step_attends_as_it_was_told():
    """An attention processor that came after the executor works on every attention."""
    seen, unet = set(), build_pipeline("sd15").unet
    case, executor = Case(unet, grids(16, 16)["square"]), Executor(unet)

    class Watching(AttnProcessor2_0):
        def __call__(self, attention, *args, **kwargs):
            seen.add(attention)
            return super().__call__(attention, *args, **kwargs)

    unet.set_attn_processor(Watching())
    executor.run_dense(case.source, case.timestep, case.texts[0], {})
    assert seen == {module for module in unet.modules() if isinstance(module, Attention)}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("few", [0, tuning.SMALL_MAP])
@pytest.mark.parametrize("name", ["square", "blobs", "noise"])
def test_an_overlay_is_as_good_as_a_recording(pipelines, monkeypatch, name, few):
    """The mixed maps of an edit, read through its overlay, are those the oracle mixes."""
    monkeypatch.setattr(tuning, "SMALL_MAP", few)
    unet, first, second = pipelines["sd15"].unet, grids(16, 16)[name], grids(16, 16)["checkerboard"]
    case, executor = Case(unet, first), Executor(unet)
    again = torch.where(torch.from_numpy(second), torch.randn(case.source.shape), case.edited)
    _, overlay = case.sparse(executor, make_plan(first, executor.depth))
    got, _ = executor.run_sparse(again, case.timestep, case.texts[0], {}, overlay, make_plan(second, executor.depth))
    base = oracle.record(unet, case.source, case.timestep, case.texts[0])
    mixed = oracle.mix(unet, base, case.edited, case.timestep, case.texts[1], case.inside)
    expected = oracle.mixed_forward(unet, mixed, again, case.timestep, case.texts[0], torch.from_numpy(second))
    assert torch.allclose(got, rows(expected, second), atol=TOLERANCE, rtol=0)


def test_replaying_leaves_the_recording_alone(pipelines):
    unet, grid = pipelines["sd15"].unet, grids(16, 16)["square"]
    case, executor = Case(unet, grid), Executor(unet)
    _, maps = executor.run_dense(case.source, case.timestep, case.texts[0], {})
    before = {key: value.clone() for key, value in maps.maps.items()}
    for _ in range(2):
        executor.run_sparse(case.edited, case.timestep, case.texts[1], {}, maps, make_plan(grid, executor.depth))
    assert all(torch.equal(maps.maps[key], value) for key, value in before.items())


def test_batches_of_edits_equal_one_by_one(pipelines):
    """E7: edits of one source with one mask, stacked along the batch."""
    unet, grid = pipelines["sd15"].unet, grids(16, 16)["blobs"]
    case, executor = Case(unet, grid, batch=4), Executor(unet)
    plan = make_plan(grid, executor.depth)
    together, _ = case.sparse(executor, plan)
    for i in range(4):
        _, maps = executor.run_dense(case.source[i : i + 1], case.timestep, case.texts[0, i : i + 1], {})
        alone, _ = executor.run_sparse(case.edited[i : i + 1], case.timestep, case.texts[1, i : i + 1], {}, maps, plan)
        assert torch.allclose(together[i], alone[0], atol=TOLERANCE, rtol=0)


def test_the_model_is_left_as_it_was():
    """E8, also after an exception in the middle of a step."""
    unet = build_pipeline("sd15").unet
    keys, weights = list(unet.state_dict()), {k: v.clone() for k, v in unet.state_dict().items()}
    case, executor = Case(unet, grids(16, 16)["square"]), Executor(unet)
    dense = unet(case.source, case.timestep, case.texts[0])[0]
    case.sparse(executor, make_plan(grids(16, 16)["square"], executor.depth))

    def burst(*_):
        assert list(unet.state_dict()) == keys
        raise RuntimeError("burst")

    handle = unet.mid_block.register_forward_pre_hook(burst)
    with pytest.raises(RuntimeError, match="burst"):
        executor.run_dense(case.source, case.timestep, case.texts[0], {})
    handle.remove()
    assert not any("forward" in vars(module) for module in unet.modules())
    assert list(unet.state_dict()) == keys
    assert all(torch.equal(unet.state_dict()[k], v) for k, v in weights.items())
    assert torch.equal(unet(case.source, case.timestep, case.texts[0])[0], dense)


def test_an_unknown_layer_is_refused_by_name():
    unet = build_pipeline("sd15").unet
    unet.down_blocks[0].resnets[1] = torch.nn.Identity()
    with pytest.raises(UnsupportedModuleError, match=r"down_blocks\.0\.resnets\.1 is a Identity"):
        Executor(unet)


def test_a_strange_conv_is_refused_by_name():
    unet = build_pipeline("sd15").unet
    unet.conv_in = torch.nn.Conv2d(4, unet.conv_in.out_channels, 5, padding=2)
    with pytest.raises(UnsupportedModuleError, match="conv_in"):
        Executor(unet)


def test_steps_in_any_order_give_the_same(pipelines):
    """E5: no state hides between evaluations, and two sessions may take turns."""
    unet, grid = pipelines["sd15"].unet, grids(16, 16)["blobs"]
    executor = Executor(unet)
    plan = make_plan(grid, executor.depth)
    cases = [Case(unet, grid, seed=seed) for seed in range(3)]
    forwards = [case.sparse(executor, plan)[0] for case in cases]
    backwards = [case.sparse(executor, plan)[0] for case in reversed(cases)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not np.allclose(forwards[0], forwards[1])
