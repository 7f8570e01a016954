"""Features of a step on their way to the kernels: copied, read where they lie, fetched ahead, in a byte a number."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from fisedit.captured import GraphExecutor
from fisedit.errors import InputError
from fisedit.executor import Executor
from fisedit.feed import Feed
from fisedit.graph import Role
from fisedit.models import load
from fisedit.plan import make_plan
from fisedit.source import Engine
from fisedit.sparse_kernels import launch, ops
from fisedit.sparse_kernels.reference import Lying
from fisedit.values import Recipe, SchedulerName
from tests.grids import grids
from tests.test_captured import TIME, TOLERANCE, Case


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0)])
def test_a_feed_says_where_the_others_lie(budget, order):
    """They are the step's, also while the next one's are fetched; resident ones are not moved at all."""
    steps = {i: [torch.full((5,), float(i)), *(torch.full((2, 3), 10.0 * i + k) for k in range(2))] for i in range(3)}
    target, addresses = torch.empty(5), torch.zeros(2, dtype=torch.int64)
    feed = Feed(steps, [target], budget, addresses)
    assert feed.bytes == 3 * (5 + 2 * 6) * 4
    for i in order:
        feed.load(i, i + 1 if i < 2 else None)
        there = [Lying(at, (2, 3), torch.float32).here() for at in addresses.split(1)]
        assert (target == i).all()
        assert all((t == 10 * i + k).all() for k, t in enumerate(there))
        if budget is None:
            assert addresses.tolist() == [t.data_ptr() for t in steps[i][1:]]


class Steps:
    """Two recorded steps of a small UNet, and an edit of them."""

    def __init__(self, unet):
        self.case, self.features = Case(unet, [grids(8, 9)["one_cell"]], branches=1), {}
        for i in range(2):
            noise = torch.randn_like(self.case.latents[0])
            _, self.features[i] = self.case.executor.record(noise, TIME, self.case.texts[0], {})

    def predicted(self, coded, budget):
        """Predictions of both steps, in order, and whether their features are resident."""
        graphs, text = GraphExecutor(self.case.executor, coded=coded), self.case.texts.transpose(0, 1).flatten(0, 1)
        edit = graphs.begin(self.case.plans, self.features, text, budget)
        return [edit.step(i, self.case.batch(), TIME).clone() for i in (0, 1)], edit.feed.resident


@pytest.mark.parametrize("coded", [False, True])
def test_kept_or_fetched(pipelines, coded):
    steps = Steps(pipelines["shallow"].unet)
    (kept, here), (fetched, far) = (steps.predicted(coded, budget) for budget in (None, 1000))
    assert here and not far
    for i in (0, 1):
        assert torch.equal(kept[i], fetched[i])
        if not coded:
            steps.case.check(kept[i], steps.features[i])


def test_copied_or_read_where_they_lie(pipelines, monkeypatch):
    """Triton's kernels by addresses, of numbers and scales in stages that take turns; torch's by copies."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setattr(launch, "PROGRAMS", 1)  # fewer programs are interpreted sooner
    steps = Steps(pipelines["shallow"].unet)
    copied, _ = steps.predicted(True, None)
    with ops.use("triton"):
        lying, _ = steps.predicted(True, 1000)
    count = steps.case.plans[0].rows[0]
    for expected, got in zip(copied, lying, strict=True):
        assert torch.allclose(got[:, :count], expected[:, :count], atol=TOLERANCE, rtol=0)


def test_bytes_of_keys_and_values_in_a_byte_a_number(pipelines):
    """One instead of the model's own, and the scales, which are few where heads are wide."""
    case = Case(pipelines["sd15"].unet, [grids(16, 16)["blobs"]])
    feeds = {coded: case.begin(GraphExecutor(case.executor, coded=coded)).feed.bytes for coded in (False, True)}
    tokens = [case.maps.maps[site.name] for site in case.executor.sites if site.role is Role.TOKENS]
    numbers, scales = sum(t.numel() for t in tokens), sum(8 * t[..., 0].numel() for t in tokens)  # eight heads
    assert feeds[False] - feeds[True] == 4 * numbers - (numbers + 4 * scales)


def test_a_byte_a_number_by_a_word_in_the_environment(pipelines, monkeypatch):
    executor = Executor(pipelines["shallow"].unet)
    monkeypatch.delenv("FISEDIT_CODED", raising=False)
    assert not GraphExecutor(executor).fused.heads
    monkeypatch.setenv("FISEDIT_CODED", "1")
    assert set(GraphExecutor(executor).fused.heads.values()) == {4}
    assert not GraphExecutor(executor, coded=False).fused.heads
    monkeypatch.setenv("FISEDIT_CODED", "int8")
    with pytest.raises(InputError, match="FISEDIT_CODED must be 0 or 1, got 'int8'"):
        GraphExecutor(executor)


def test_what_a_byte_a_number_costs_on_the_demo_model():
    """A recorded source of the shipped model; the error of a step's prediction beside the edit that it makes."""
    recipe = Recipe("a cat and a cake on a beach", 7, "", 4, 4.0, 256, 256, SchedulerName.DDIM)
    engine = Engine(load("demo", dtype=torch.float32))
    executor, source = engine.executor, engine.record(recipe, engine.encode(recipe), lambda *_: None)
    plan = make_plan(grids(*source.latents[0].shape[-2:])["blobs"], executor.depth)
    text = engine.encode(replace(recipe, prompt="a dog and a cake on a beach"))
    changed = torch.from_numpy(grids(*source.latents[0].shape[-2:])["blobs"])
    latents = source.latents[2] + changed * torch.randn_like(source.latents[2])
    step = torch.cat([latents] * len(text)), engine.sampler(recipe).timesteps[2]
    expected, _ = executor.replay(*step, text, {}, source.features[2], plan)
    errors = {}
    for coded in (False, True):
        edit = GraphExecutor(executor, coded=coded).begin([plan], {2: source.features[2]}, text)
        got = edit.step(2, *step)[:, : plan.rows[0]]
        errors[coded] = float((got - expected).norm() / expected.norm())
    sys.stdout.write(f"relative errors of a step's prediction: {errors}\n")
    assert errors[False] < 1e-5
    assert 10 * errors[False] < errors[True] < 1e-3  # measured: 6e-5
