"""Features of a step on their way to the kernels: copied, read where they lie, fetched ahead, in a byte a number."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from weakref import ref

import numpy as np
import pytest
import torch
from PIL import Image

from fisedit import Cancelled, Editor
from fisedit.decoder import tiles as boxing
from fisedit.errors import InputError
from fisedit.features.cache import FeatureOverlay, StepFeatures
from fisedit.features.sites import Role
from fisedit.models.families.conditioning import interleaved
from fisedit.models.loader import load
from fisedit.runners import prefetch
from fisedit.runners.cuda_graphs import GraphExecutor
from fisedit.runners.prefetch import Prefetcher
from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels import ops, tuning
from fisedit.sparse_kernels.buckets import choose_bucket
from fisedit.sparse_kernels.operands import QUANTISED_DTYPES, DevicePointer
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.sparse_kernels.triton import launch
from fisedit.values import GenerationConfig, SchedulerName
from tests.support.edits import BIRD, CAT, DOG
from tests.support.graph_steps import TIME, TOLERANCE, Case
from tests.support.grids import grids

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0)])
def test_a_feed_says_where_the_others_lie(budget, order):
    """They are the step's, also while the next one's are fetched; resident ones are not moved at all."""
    steps = {i: [torch.full((5,), float(i)), *(torch.full((2, 3), 10.0 * i + k) for k in range(2))] for i in range(3)}
    target, addresses = torch.empty(5), torch.zeros(2, dtype=torch.int64)
    feed = Prefetcher(steps, steps.get, [target], budget, addresses)
    assert feed.bytes == 3 * (5 + 2 * 6) * 4
    for i in order:
        feed.load(i, i + 1 if i < 2 else None)
        there = [DevicePointer(at, (2, 3), torch.float32).to_tensor() for at in addresses.split(1)]
        assert (target == i).all()
        assert all((t == 10 * i + k).all() for k, t in enumerate(there))
        if budget is None:
            assert addresses.tolist() == [t.data_ptr() for t in steps[i][1:]]


def test_what_does_not_fit_is_asked_for_one_step_at_a_time():
    """And goes to the host before the next one's is made."""
    alive = []

    def made(_):
        assert sum(tensor() is not None for tensor in alive) <= 1  # the one that is being handed over
        tensor = torch.ones(2, 3).T  # of another layout, so that what is kept is a copy
        alive.append(ref(tensor))
        return [tensor]

    assert Prefetcher(range(5), made, [torch.empty(6)], budget=5 * 24 - 1).bytes == 5 * 24
    assert len(alive) == 6


@pytest.mark.parametrize("inversion", [None, "ddim", "ddpm"])
@pytest.mark.slow
def test_a_source_that_does_not_fit_waits_in_host_memory(pipelines, monkeypatch, inversion):
    """From the step on that is too much; whatever reads it sees the same, by graphs and layer by layer."""
    monkeypatch.setattr(boxing, "HALO", 512)  # as much for boxes as for rectangles
    monkeypatch.setattr(boxing, "DENSE_SHARE", np.inf)
    monkeypatch.setattr(boxing, "DENSE_CELLS", 0)
    config, editors = {"num_inference_steps": 4, "guidance_scale": 2.0}, []
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8))

    def begin(editor):
        return editor.open(picture, CAT, inversion=inversion, **config) if inversion else editor.generate(CAT, **config)

    rich = Editor(pipelines["shallow"], graphs=True)
    begin(rich)
    each = rich._trajectory_cache.get(rich.current.id)[0].features[-1].own_bytes
    for graphs in (False, True):
        editors.append(Editor(pipelines["shallow"], graphs=graphs, max_recorded_bytes=int(2.5 * each)))
        begin(editors[-1])
        steps = editors[-1]._trajectory_cache.get(editors[-1].current.id)[0].features
        assert sum(step.offloaded_from is not None for step in steps) == 2
    mask = grids(16, 16)["square"]
    expected = [rich.edit(prompt, mask=mask, growth=1) for prompt in (DOG, CAT)]
    for editor in editors:
        for prompt, result in zip((DOG, CAT), expected, strict=True):
            got = editor.edit(prompt, mask=mask, growth=1)
            assert np.abs(np.asarray(got.image, int) - np.asarray(result.image, int)).max() <= 1
        assert np.allclose(editor.attention(BIRD), rich.attention(BIRD), atol=1e-4)


class Late:
    """A copy stream that copies as late as it may, and holds nothing of what it copies."""

    def __init__(self, _):
        self.under_way, self.waits = [], 0
        LATE.append(self)

    def copy(self, there, here):
        self.under_way += [(ref(to), ref(of)) for to, of in zip(there, here, strict=True)]

    def wait(self):
        for to, of in self.under_way:
            assert to() is not None and of() is not None, "a buffer went while it was copied"
            to().copy_(of())
        self.under_way = []

    def synchronize(self):
        self.waits += 1
        self.wait()


LATE = []


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(prefetch, "CopyStream", Late)
    LATE.clear()
    yield LATE
    LATE.clear()


@pytest.mark.parametrize("cyclic", [False, True])
def test_buffers_stay_until_the_copy_that_nobody_waits_for_is_done(late, cyclic):
    """An edit was cancelled while its next step was fetched; somebody's traceback may hold it for a while."""
    streamed = Prefetcher(range(3), lambda i: [torch.full((5,), float(i))], [torch.empty(5)], budget=0)
    streamed.load(0, 1)
    (lane,) = late
    there, here = lane.under_way[0]
    if cyclic:
        streamed.itself = streamed
    del streamed
    if cyclic:
        assert lane.waits == 0 and lane.under_way
        gc.collect()
    assert lane.waits == 1 and not lane.under_way
    assert there() is None and here() is None


def test_a_cancelled_edit_waits_for_what_was_fetched_ahead(late, pipelines):
    """And the next edits of the picture are as if it had not been."""
    mask, quick = grids(16, 16)["square"], {"seed": 7, "num_inference_steps": 4}

    def cancel(i, *_):
        if i == 2:
            raise Cancelled("enough")

    editor = Editor(pipelines["sd15"], graphs=True, max_recorded_bytes=1000)
    editor.generate(CAT, **quick)
    with pytest.raises(Cancelled):
        editor.edit(DOG, mask=mask, growth=1, on_step=cancel)
    gc.collect()
    assert [lane.waits for lane in late] == [1] and not late[0].under_way
    got = editor.edit(DOG, mask=mask, growth=1).image
    expected = Editor(pipelines["sd15"], graphs=True)
    expected.generate(CAT, **quick)
    assert got.tobytes() == expected.edit(DOG, mask=mask, growth=1).image.tobytes()


class Steps:
    """Two recorded steps of a small UNet, and an edit of them."""

    def __init__(self, unet):
        self.case, self.features = Case(unet, [grids(8, 9)["one_cell"]], branches=1), {}
        for i in range(2):
            noise = torch.randn_like(self.case.latents[0])
            _, self.features[i] = self.case.executor.run_dense(noise, TIME, self.case.texts[0], {})

    def predicted(self, quantised, budget):
        """Predictions of both steps, in order, and whether their features are resident."""
        graphs, text = (
            GraphExecutor(self.case.executor, quantised=quantised),
            interleaved(self.case.texts),
        )
        edit = graphs.begin(self.case.plans, self.features, text, budget)
        return [edit.step(i, self.case.batch(), TIME).clone() for i in (0, 1)], edit.prefetcher.resident


@pytest.mark.parametrize("quantised", ["", "int8", "fp8"])
def test_kept_or_fetched(pipelines, quantised):
    steps = Steps(pipelines["shallow"].unet)
    (kept, here), (fetched, far) = (steps.predicted(quantised, budget) for budget in (None, 1000))
    assert here and not far
    for i in (0, 1):
        assert torch.equal(kept[i], fetched[i])
        if not quantised:
            steps.case.check(kept[i], steps.features[i])


@pytest.mark.slow
def test_copied_or_read_where_they_lie(pipelines, monkeypatch):
    """Triton's kernels by addresses, of numbers and scales in stages that take turns; torch's by copies."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setattr(launch, "PROGRAMS", 1)  # fewer programs are interpreted sooner
    steps = Steps(pipelines["shallow"].unet)
    copied, _ = steps.predicted("fp8", None)
    with ops.use("triton"):
        lying, _ = steps.predicted("fp8", 1000)
    count = steps.case.plans[0].rows[0]
    for expected, got in zip(copied, lying, strict=True):
        assert torch.allclose(got[:, :count], expected[:, :count], atol=TOLERANCE, rtol=0)


def test_bytes_of_keys_and_values_in_a_byte_a_number(pipelines):
    """One instead of the model's own, and the scales, which are few where heads are wide."""
    case = Case(pipelines["sd15"].unet, [grids(16, 16)["blobs"]])
    feeds = {
        name: case.begin(GraphExecutor(case.executor, quantised=name)).prefetcher.bytes
        for name in ("", *QUANTISED_DTYPES)
    }
    tokens = [case.maps.maps[site.name] for site in case.executor.sites if site.role is Role.TOKENS]
    numbers, scales = sum(t.numel() for t in tokens), sum(8 * t[..., 0].numel() for t in tokens)  # eight heads
    assert feeds["fp8"] == feeds["int8"]
    assert feeds[""] - feeds["int8"] == 4 * numbers - (numbers + 4 * scales)


def test_a_byte_a_number_by_a_word_in_the_environment(pipelines, monkeypatch):
    executor = Executor(pipelines["shallow"].unet)
    monkeypatch.delenv("FISEDIT_CODED", raising=False)
    assert not GraphExecutor(executor).static_unet.heads
    for word, kind in {"1": torch.int8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}.items():
        monkeypatch.setenv("FISEDIT_CODED", word)
        graphs = GraphExecutor(executor)
        assert set(graphs.static_unet.heads.values()) == {4} and graphs.static_unet._quantised is kind
    assert not GraphExecutor(executor, quantised="").static_unet.heads
    monkeypatch.setenv("FISEDIT_CODED", "int4")
    with pytest.raises(InputError, match="FISEDIT_CODED must be 0, int8 or fp8, got 'int4'"):
        GraphExecutor(executor)


def test_what_a_byte_a_number_costs_on_the_demo_model():
    """A recorded source of the shipped model; the error of a step's prediction beside the edit that it makes."""
    config = GenerationConfig("a cat and a cake on a beach", 7, "", 4, 4.0, 256, 256, SchedulerName.DDIM)
    engine = Engine(load("demo", dtype=torch.float32))
    executor, source = engine.executor, denoise.run_dense(engine, config, engine.encode(config), lambda *_: None)
    plan = make_row_plan(grids(*source.latents[0].shape[-2:])["blobs"], executor.num_levels)
    text = engine.encode(replace(config, prompt="a dog and a cake on a beach"))
    changed = torch.from_numpy(grids(*source.latents[0].shape[-2:])["blobs"])
    latents = source.latents[2] + changed * torch.randn_like(source.latents[2])
    step = torch.cat([latents] * len(text)), engine.sampler(config).timesteps[2]
    expected, _ = executor.run_sparse(*step, text, {}, FeatureOverlay(source.features[2], plan))
    errors = {}
    for quantised in ("", *QUANTISED_DTYPES):
        edit = GraphExecutor(executor, quantised=quantised).begin([plan], {2: source.features[2]}, text)
        got = edit.step(2, *step)[:, : plan.rows[0]]
        errors[quantised] = float((got - expected).norm() / expected.norm())
    sys.stdout.write(f"relative errors of a step's prediction: {errors}\n")
    assert errors[""] < 1e-5
    assert 10 * errors[""] < errors["int8"] < errors["fp8"] < 2e-3  # measured: 6e-5 and 3e-4


@pytest.mark.parametrize("quantised", ["", *QUANTISED_DTYPES])
def test_of_edits_on_edits_only_what_they_changed_is_put_together(pipelines, monkeypatch, quantised):
    """The source's pack serves all edits over it and over its edits; whole maps are made of keys and values alone."""
    monkeypatch.setattr(tuning, "SMALL_MAP", 0)  # on a GPU no map is so small that its statistics are not kept
    asked, whole = [], StepFeatures.whole
    monkeypatch.setattr(StepFeatures, "whole", lambda *args: (asked.append(args[1]), whole(*args))[1])
    source = Case(pipelines["shallow"].unet, [grids(8, 9)["square"]])
    graphs = GraphExecutor(source.executor, quantised=quantised)
    levels, step = {site.name: site.level for site in source.executor.sites}, source.maps
    pack = graphs.feature_packer.flat_rows(step)
    for name in ("square", "blobs", "corner", "noise"):
        case = Case(source.executor.unet, [grids(8, 9)[name]])
        sizes = [(level.height, level.width) for level in case.plans[0].levels]
        buffers = graphs.static_unet.buffers(choose_bucket(case.plans), sizes, 1, 2, case.texts[0])
        gather_index = graphs.feature_packer.gather_index(buffers, case.plans, 2, step)
        asked.clear()
        got = gather_index.gather(step)
        assert all(not quantised and name.endswith(("to_k", "to_v")) for name in asked)
        mixed = StepFeatures({name: step.whole(name, levels[name]) for name in step.maps}, dict(step.statistics))
        unjoined = graphs.feature_packer.gather_index(buffers, case.plans, 2, mixed)
        for mine, theirs in zip(got, unjoined.gather(mixed), strict=True):
            assert torch.equal(mine.double(), theirs.double())
        _, step = case.executor.run_sparse(
            case.latents[0], TIME, case.texts[0], {}, FeatureOverlay(step, case.plans[0])
        )
    assert graphs.feature_packer.flat_rows(source.maps) is pack


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0)])
def test_features_in_host_memory_are_fetched_ahead(pipelines, order):
    """A budget too small for them changes nothing, in whatever order the steps come."""
    case = Case(pipelines["sd15"].unet, [grids(16, 16)["blobs"]])
    steps, text = {}, interleaved(case.texts)
    for i in range(3):
        _, steps[i] = case.executor.run_dense(torch.randn_like(case.latents[0]), TIME, case.texts[0], {})
    graphs = GraphExecutor(case.executor)
    rich, poor = (graphs.begin(case.plans, steps, text, budget) for budget in (None, 1000))
    assert rich.prefetcher.resident and not poor.prefetcher.resident
    assert rich.prefetcher.bytes == poor.prefetcher.bytes > 1000
    for i in order:
        got, expected = (edit.step(i, case.batch(), TIME).clone() for edit in (poor, rich))
        assert torch.equal(got, expected)
        case.check(got, steps[i])


def test_a_feed_fetches_one_step_ahead(monkeypatch):
    steps = {i: [torch.full((2, 3), float(i)), torch.full((4,), i, dtype=torch.float64)] for i in range(4)}
    targets = [torch.empty(2, 3), torch.empty(4, dtype=torch.float64)]
    feed, fetched = Prefetcher(steps, steps.get, targets, budget=0), []
    fetch = feed._fetch
    monkeypatch.setattr(feed, "_fetch", lambda i: (fetched.append(i), fetch(i)))
    for i, following in ((0, 1), (1, 2), (3, None)):
        feed.load(i, following)
        assert all((target == i).all() for target in targets)
    assert fetched == [0, 1, 2, 3]  # 2 was fetched for nothing: another step was asked for
