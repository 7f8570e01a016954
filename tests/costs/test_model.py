"""Multiply-accumulates as torch counts them, and the dilations that they make cheapest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel

from fisedit.bench.cuda_speed import PEAKS
from fisedit.bench.workload import STEP_DILATION, square_mask
from fisedit.costs.model import CostedLayers, Costs, decoder_macs, fixed_macs, text_macs, unet_macs
from fisedit.costs.schedules import find_shallow_steps
from fisedit.decoder.decode import decode, decode_sparse
from fisedit.decoder.tiles import box_areas, frame_areas
from fisedit.features.cache import FeatureOverlay
from fisedit.features.sites import num_levels, unet_sites
from fisedit.models.families.family import SD1
from fisedit.runners.stepping import Graphs
from fisedit.sampling.engine import Engine
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import Quality, Step, shallow_steps
from tests.support.conditions import random_conditions
from tests.support.edits import config_of
from tests.support.grids import grids
from tests.support.macs import counted, time_macs
from tests.support.pipelines import SHAPES

HEIGHT, WIDTH = 13, 17
SQUARE = grids(16, 16)["square"]


class Evaluation:
    """One UNet evaluation, dense or sparse."""

    def __init__(self, unet, batch):
        self.unet, self.batch, self.executor = unet, batch, Executor(unet)
        make = torch.Generator().manual_seed(0)
        self.latents = torch.randn(batch, 4, HEIGHT, WIDTH, generator=make)
        self.text = random_conditions(unet, batch, make)
        self.sizes = make_row_plan(np.ones((HEIGHT, WIDTH), bool), self.executor.num_levels).rows

    def dense(self):
        return self.unet(self.latents, torch.tensor(500), **self.text.unet_inputs)

    def sparse(self, plan, text_cache):
        with torch.no_grad():
            _, maps = self.executor.run_dense(self.latents, torch.tensor(500), self.text, {})
        return lambda: self.executor.run_sparse(
            self.latents, torch.tensor(500), self.text, text_cache, FeatureOverlay(maps, plan)
        )

    def own(self, rows):
        return unet_macs(self.executor.sites, rows, self.sizes, self.batch, 11)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_dense_step_costs_what_torch_counts(pipelines, shape, batch):
    unet = pipelines[shape].unet
    step = Evaluation(unet, batch)
    own = step.own(step.sizes) + text_macs(step.executor.sites, batch, 11)
    assert own + time_macs(unet, batch) == counted(step.dense)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["one_cell", "noise"])
def test_a_sparse_step_costs_what_torch_counts(pipelines, shape, name):
    """The text is projected at the first step of a prompt only, and not counted with a step."""
    unet = pipelines[shape].unet
    step, cache = Evaluation(unet, 2), {}
    plan = make_row_plan(grids(HEIGHT, WIDTH)[name], step.executor.num_levels)
    own = step.own(plan.rows) + time_macs(unet, 2)
    text = text_macs(step.executor.sites, 2, 11)
    assert counted(step.sparse(plan, cache)) == own + text
    assert counted(step.sparse(plan, cache)) == own


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shallow_step_costs_what_torch_counts(pipelines, shape):
    unet, grid = pipelines[shape].unet, grids(HEIGHT, WIDTH)["noise"]
    step, cache, plan = Evaluation(unet, 2), {}, make_row_plan(grid, num_levels(unet_sites(unet)))
    with torch.no_grad():
        _, maps = step.executor.run_dense(step.latents, torch.tensor(500), step.text, {})
        step.sparse(plan, cache)()
    entry = step.executor.shallow

    def run():
        overlay = FeatureOverlay(maps, plan, shallow=True)
        overlay.maps[entry.entry] = maps.rows(entry.entry, 0, plan.levels[0].active)[..., : entry.channels]
        step.executor.run_sparse(step.latents, torch.tensor(500), step.text, cache, overlay)

    sites = [site for site in step.executor.sites if entry.runs(site.name)]
    embedding, last = unet.time_embedding, unet.up_blocks[-1].resnets[-1]
    added = (
        [] if unet.config.addition_embed_type is None else [unet.add_embedding.linear_1, unet.add_embedding.linear_2]
    )
    layers = embedding.linear_1, embedding.linear_2, *added, last.time_emb_proj
    time = 2 * sum(layer.weight.numel() for layer in layers)
    assert counted(run) == unet_macs(sites, plan.rows, step.sizes, 2, 11) + time


def test_a_dense_decode_costs_what_torch_counts(pipelines):
    vae, latents = pipelines["sd15"].vae, torch.randn(1, 4, HEIGHT, WIDTH)
    assert decoder_macs(vae, frame_areas(HEIGHT * WIDTH), HEIGHT * WIDTH) == counted(lambda: decode(vae, latents))


@pytest.mark.parametrize("name", ["one_cell", "corner", "blobs", "row", "everything"])
def test_a_boxed_decode_costs_what_torch_counts(pipelines, name):
    vae, grid, latents = pipelines["sd15"].vae, grids(32, 24)[name], torch.randn(1, 4, 32, 24)
    with torch.no_grad():
        _, record = decode(vae, latents)
    torchs = counted(lambda: decode_sparse(vae, latents, grid, record))
    assert decoder_macs(vae, box_areas(grid), 32 * 24) == torchs


def test_what_a_step_takes_at_least_on_each_device():
    """On a GPU an estimate: the floor that is hoped for, at a third of the chip's peak, less what a step computes."""
    config = UNet2DConditionModel.load_config(SD1.configs / "unet")
    with torch.device("meta"):
        executor = Executor(UNet2DConditionModel.from_config(config))
    grid, sizes = square_mask(0.05, 64), tuple(4**level * 64 for level in reversed(range(4)))
    macs = unet_macs(executor.sites, make_row_plan(dilate(grid, STEP_DILATION), executor.num_levels).rows, sizes, 2, 77)
    operations, _ = PEAKS["H200"]
    assert fixed_macs(torch.device("cuda"), executor.sites) == pytest.approx(
        1.3e-3 * operations / 2 / 3 - macs, rel=0.05
    )
    assert 8e9 < fixed_macs(torch.device("cpu"), executor.sites) < 12e9  # 50 ms, measured on two Zen 5 cores in bf16


@pytest.mark.parametrize(("kind", "expected"), [("cpu", (5, 5)), ("cuda", (5, 5))])
def test_growth_is_as_wide_as_costs_hardly_more_time_there(pipelines, monkeypatch, kind, expected):
    """One mask of one model: where a step's fixed part is larger, more cells come for nothing."""
    costs = Engine(pipelines["sd15"]).costs(config_of(num_inference_steps=2))
    spent = costs.sparse_step(SQUARE, 5)
    fixed = {"cpu": 4 * spent, "cuda": 40 * spent}[kind]
    monkeypatch.setattr("fisedit.costs.model.fixed_macs", lambda *_: fixed)
    assert costs.choose_dilations(SQUARE, plain=True) == expected


def test_captured_edits_have_shallow_steps_where_they_save_what_nearness_may_cost(pipelines, monkeypatch):
    """And no dense ones; a close one has neither."""
    costs = Engine(pipelines["sd15"], Graphs(True)).costs(config_of(num_inference_steps=20))
    steps, chosen = find_shallow_steps(20), {}
    for fixed in (0, 100 * costs.dense_step()):
        monkeypatch.setattr("fisedit.costs.model.fixed_macs", lambda *_, fixed=fixed: fixed)
        found = {quality: costs.choose_dilations(SQUARE, quality=quality, shallow=steps) for quality in Quality}
        assert not any(Step.DENSE in dilation for dilation in found.values())
        chosen[fixed == 0] = {quality: shallow_steps(dilation) for quality, dilation in found.items()}
    assert chosen[True] == {Quality.FAST: steps, Quality.BALANCED: steps, Quality.CLOSE: ()}
    assert set(chosen[False].values()) == {()}
    assert shallow_steps(costs.choose_dilations(SQUARE, shallow=steps, plain=True)) == ()


@pytest.mark.parametrize(("area", "are_shallow"), [(0.02, False), (0.05, False), (0.15, True), (0.25, True)])
def test_on_a_gpu_that_was_not_measured_large_masks_alone_have_shallow_steps(area, are_shallow):
    """Of a small one's step the fixed part is most, which a shallow step is taken to have as well."""
    with torch.device("meta"):
        executor = Executor(UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(SD1.configs / "unet")))
    shallow = tuple(site for site in executor.sites if executor.shallow.runs(site.name))
    layers = CostedLayers(executor.sites, None, [(64 >> level, 64 >> level) for level in range(4)], 77, shallow)
    costs = Costs(layers, 20, 2, torch.device("cuda"), captured=True)
    grid, steps = square_mask(area, 64), find_shallow_steps(20)
    chosen = costs.choose_dilations(grid, shallow=steps)
    assert shallow_steps(chosen) == (steps if are_shallow else ())
    assert are_shallow or chosen == costs.choose_dilations(grid)


def test_dense_steps_in_between_where_they_cost_hardly_more_time(pipelines, monkeypatch):
    costs = Engine(pipelines["sd15"]).costs(config_of(num_inference_steps=25))
    fixed = 100 * costs.dense_step()
    monkeypatch.setattr("fisedit.costs.model.fixed_macs", lambda *_: fixed)
    dense = 0, 3, 7, 12, 18
    assert costs.choose_dilations(SQUARE) == tuple(Step.DENSE if i in dense else 1 for i in range(25))
    assert costs.choose_dilations(SQUARE, 10) == tuple(Step.DENSE if i in (10, 13, 19) else 1 for i in range(25))
    monkeypatch.setattr("fisedit.costs.model.fixed_macs", lambda *_: 0)
    monkeypatch.setattr("fisedit.costs.model.MAX_TIME_RATIO", 1)
    monkeypatch.setattr("fisedit.costs.model.MAX_DENSE_RATIO", 1)
    chosen = {quality: costs.choose_dilations(SQUARE, quality=quality) for quality in Quality}
    assert chosen[Quality.FAST] == (2,) * 13 + (1,) * 12
    assert chosen[Quality.BALANCED] == (3,) * 13 + (2,) * 12
    assert chosen[Quality.CLOSE] == tuple(Step.DENSE if i in dense else 1 for i in range(25))
    assert costs.choose_dilations(SQUARE) == chosen[Quality.BALANCED]
    assert costs.choose_dilations(SQUARE, quality=Quality.CLOSE, plain=True) == (5,) * 25
