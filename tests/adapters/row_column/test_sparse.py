"""E4 with adapters: a sparse step equals a mixed dense forward in which the block's output is the source's outside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel

from fisedit.adapters.base import AdapterStack
from fisedit.adapters.insertion_points import inject_maps, insertion_points, record_maps
from fisedit.adapters.row_column.checkpoints import fresh_adapter
from fisedit.adapters.row_column.cost import dense_macs, reference_macs, sparse_macs
from fisedit.adapters.row_column.reader import ReferenceCondition
from fisedit.adapters.row_column.variants import FAMILIES
from fisedit.bench.workload import square_mask
from fisedit.costs.macs import text_macs, unet_macs
from fisedit.features.cache import FeatureOverlay
from fisedit.features.sites import unet_sites
from fisedit.models.families.conditioning import Conditioning
from fisedit.models.families.family import SD1
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support import oracle
from tests.support.adapters import lively, naive
from tests.support.grids import grids
from tests.support.macs import counted, time_macs

pytestmark = pytest.mark.usefixtures("no_grad")

TOLERANCE = 1e-4
SHAPES = ["sd15", "demo"]
T = torch.tensor(500)


class Case:
    """A source, an edit of it, adapters and references, on one UNet."""

    def __init__(self, unet, grid, families, scales=(0.7, -0.4), batch=2):
        self.unet, self.grid, self.inside = unet, grid, torch.from_numpy(grid)
        make = torch.Generator().manual_seed(0)
        self.source = torch.randn(batch, 4, *grid.shape, generator=make)
        self.texts = torch.randn(2, batch, 11, unet.config.cross_attention_dim, generator=make)
        self.edited = torch.where(self.inside, torch.randn(self.source.shape, generator=make), self.source)
        reference = torch.randn(batch, 4, *grid.shape, generator=make)
        adapters = [lively(unet, family, str(i)) for i, family in enumerate(families)]
        self.seen = record_maps(unet, reference, self.texts[0], tuple(insertion_points(unet)))
        self.conditions = [
            ReferenceCondition(a, a.read(self.seen), s, str(i))
            for i, (a, s) in enumerate(zip(adapters, scales, strict=False))
        ]
        self.executor = Executor(unet)
        self.plan = make_row_plan(grid, self.executor.num_levels)

    def record(self, conditions):
        return self.executor.run_dense(
            self.source, T, Conditioning(self.texts[0]), {}, extra_layers=AdapterStack(conditions)
        )[1]

    def replay(self, maps, conditions=None, edited=None, plan=None):
        conditions = self.conditions if conditions is None else conditions
        latents = self.edited if edited is None else edited
        return self.executor.run_sparse(
            latents,
            T,
            Conditioning(self.texts[1]),
            {},
            FeatureOverlay(maps, plan or self.plan),
            extra_layers=AdapterStack(conditions),
        )

    def expected(self, *, recorded):
        """The oracle's prediction: a source with the adapters or without, an edit with them."""
        outs = {}

        def source(name):
            def change(x):
                outs[name] = x + self.gain(name, x) if recorded else x
                return outs[name]

            return change

        def mixed(name):
            def change(x):
                mask = oracle.levels(self.inside)[oracle.grid_of(x)]
                seen = None if recorded else boxes(mask)
                return torch.where(mask, x + self.gain(name, x, seen), outs[name])

            return change

        changed = {name for condition in self.conditions for name in condition.adapter.channels}
        with inject_maps(self.unet, {name: source(name) for name in changed}):
            recording = oracle.record(self.unet, self.source, T, self.texts[0])
        with inject_maps(self.unet, {name: mixed(name) for name in changed}):
            return oracle.mixed_forward(self.unet, recording, self.edited, T, self.texts[1], self.inside)

    def gain(self, name, x, seen=None):
        blocks = [(g.adapter.blocks[name], g.scale) for g in self.conditions if name in g.adapter.channels]
        return sum(scale * naive(block, x, self.seen[name], seen) for block, scale in blocks)

    def rows(self, full):
        return full.flatten(2).transpose(1, 2)[:, self.inside.flatten()]


def boxes(mask):
    """The boxes around the blobs of the mask: cells of one blob touch, also at corners."""
    left = {tuple(cell) for cell in mask.nonzero().tolist()}
    inside = torch.zeros_like(mask)
    while left:
        blob, todo = [], [left.pop()]
        while todo:
            y, x = todo.pop()
            blob.append((y, x))
            near = left & {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)}
            left -= near
            todo += near
        ys, xs = zip(*blob, strict=True)
        inside[min(ys) : max(ys) + 1, min(xs) : max(xs) + 1] = True
    return inside


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recorded", [True, False], ids=["over a guided source", "over a plain source"])
@pytest.mark.parametrize("name", ["square", "blobs", "one_cell", "border", "checkerboard"])
def test_sparse_equals_the_oracle(pipelines, family, shape, recorded, name):
    case = Case(pipelines[shape].unet, grids(16, 24)[name], [family])
    got, _ = case.replay(case.record(case.conditions if recorded else []))
    assert torch.allclose(got, case.rows(case.expected(recorded=recorded)), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("size", [(13, 17), (16, 16)], ids=str)
def test_several_adapters_equal_the_oracle(pipelines, recorded, size):
    case = Case(pipelines["sd15"].unet, grids(*size)["blobs"], ["v1", "v5b"])
    got, _ = case.replay(case.record(case.conditions if recorded else []))
    assert torch.allclose(got, case.rows(case.expected(recorded=recorded)), atol=TOLERANCE, rtol=0)


def test_the_comparison_can_fail(pipelines):
    """The adapter counts, and so does whether the source had it."""
    case = Case(pipelines["demo"].unet, grids(16, 16)["square"], ["v3"])
    inject_adapters, plain = (case.rows(case.expected(recorded=recorded)) for recorded in (True, False))
    got, _ = case.replay(case.record(case.conditions))
    without, _ = case.replay(case.record([]), conditions=[])
    for other in (plain, without):
        assert not torch.allclose(got, other, atol=100 * TOLERANCE, rtol=0)
    assert torch.allclose(got, inject_adapters, atol=TOLERANCE, rtol=0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_replay_of_everything_is_the_guided_forward(pipelines, family, recorded):
    """E1: whatever the source was."""
    unet = pipelines["sd15"].unet
    case = Case(unet, np.ones((13, 17), bool), [family])
    got, _ = case.replay(case.record(case.conditions if recorded else []))
    with inject_maps(unet, {n: lambda x, n=n: x + case.gain(n, x) for n in case.conditions[0].adapter.channels}):
        dense = unet(case.edited, T, case.texts[1])[0]
    assert torch.allclose(got, case.rows(dense), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_recording_is_the_guided_forward_itself(pipelines, family):
    unet = pipelines["sd15"].unet
    case = Case(unet, grids(13, 17)["square"], [family])
    got, maps = case.executor.run_dense(
        case.source, T, Conditioning(case.texts[0]), {}, extra_layers=AdapterStack(case.conditions)
    )
    with inject_maps(unet, {n: lambda x, n=n: x + case.gain(n, x) for n in case.conditions[0].adapter.channels}):
        dense = unet(case.source, T, case.texts[0])[0]
    assert torch.allclose(got, dense, atol=TOLERANCE, rtol=0)
    kept = {key.rpartition(".")[2] for key in maps.maps if key.startswith("0.")}
    lines = {f"{line}_{what}" for line in ("row", "column") for what in "qkv"}
    assert kept == lines | ({"x"} if family == "v5b" else set())


def test_an_edit_of_an_edit(pipelines):
    """What an overlay keeps is the block's queries and keys at its active rows. Where the first edit computed
    everything, that is a recording."""
    case = Case(pipelines["demo"].unet, np.ones((16, 16), bool), ["v3"])
    _, overlay = case.replay(case.record(case.conditions))
    again = case.executor.run_dense(
        case.edited, T, Conditioning(case.texts[1]), {}, extra_layers=AdapterStack(case.conditions)
    )[1]
    second = grids(16, 16)["blobs"]
    edited = torch.where(torch.from_numpy(second), torch.randn_like(case.edited), case.edited)
    plan = make_row_plan(second, case.executor.num_levels)
    over, fresh = (case.replay(maps, edited=edited, plan=plan)[0] for maps in (overlay, again))
    assert torch.allclose(over, fresh, atol=TOLERANCE, rtol=0)


def test_an_edit_over_an_edit_without_the_adapter(pipelines):
    """Its overlay has no keys, so an edit over it looks at its closure alone; none that reads what is not there."""
    case = Case(pipelines["demo"].unet, grids(16, 16)["square"], ["v3"])
    _, overlay = case.replay(case.record(case.conditions), conditions=[])
    got, second = case.replay(overlay, plan=make_row_plan(grids(16, 16)["blobs"], case.executor.num_levels))
    assert got.isfinite().all()
    assert not any(key.startswith("0.") for key in second.maps)


def test_the_branch_with_the_prompt_alone(pipelines):
    """A look at one branch uses the reference of that branch."""
    case = Case(pipelines["demo"].unet, grids(16, 16)["square"], ["v5"])
    both, _ = case.executor.run_dense(
        case.source, T, Conditioning(case.texts[0]), {}, extra_layers=AdapterStack(case.conditions)
    )
    one, _ = case.executor.run_dense(
        case.source[-1:], T, Conditioning(case.texts[0][-1:]), {}, extra_layers=AdapterStack(case.conditions)
    )
    assert torch.allclose(one, both[-1:], atol=TOLERANCE, rtol=0)


def test_the_model_is_left_as_it_was(pipelines):
    """E8, with adapters, also after an exception in the middle of a step."""
    case = Case(pipelines["demo"].unet, grids(16, 16)["square"], ["v3"])
    dense = case.unet(case.source, T, case.texts[0])[0]
    handle = case.unet.conv_out.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        case.record(case.conditions)
    handle.remove()
    modules = [*case.unet.modules(), *case.conditions[0].adapter.modules()]
    assert not any("forward" in vars(module) for module in modules)
    assert torch.equal(case.unet(case.source, T, case.texts[0])[0], dense)


@pytest.mark.parametrize("name", [pytest.param("one_cell", marks=pytest.mark.slow), "blobs"])
@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.slow] * (name != "v5")) for name in FAMILIES])
def test_multiply_accumulates_are_what_torch_counts(pipelines, family, name):
    case = Case(pipelines["sd15"].unet, grids(13, 17)[name], [family])
    unet, sites, adapter = case.unet, case.executor.sites, case.conditions[0].adapter
    levels = [(level.height, level.width) for level in case.plan.levels]
    sizes = [height * width for height, width in levels]
    rest = time_macs(unet, 2) + text_macs(sites, 2, 11)
    own = unet_macs(sites, sizes, sizes, 2, 11) + 2 * dense_macs(adapter, unet, levels)
    assert counted(lambda: case.record(case.conditions)) == own + rest
    for conditions in (case.conditions, []):
        maps = case.record(conditions)
        step = unet_macs(sites, case.plan.rows, sizes, 2, 11)
        step += 2 * sparse_macs(adapter, unet, case.plan, recorded=bool(conditions))
        case.replay(maps)  # blocks' ends are folded once
        assert counted(lambda maps=maps: case.replay(maps)) == step + rest
    assert counted(lambda: adapter.read(case.seen)) == 2 * reference_macs(adapter, unet, levels)


@pytest.fixture(scope="module")
def full_size():
    """SD 1.5's UNet without weights."""
    with torch.device("meta"):
        return UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(SD1.configs / "unet"))


@pytest.mark.parametrize("family", ["v1", "v2", "v3", "v5"])
def test_at_most_15_percent_of_a_sparse_step(full_size, family):
    """The aim, on a square of 5 % of 512x512, grown by one, wherever it lies; both branches of guidance are alike."""
    with torch.device("meta"):
        adapter = fresh_adapter(full_size, family)
    sites, sizes = unet_sites(full_size), [4096, 1024, 256, 64]
    for place in range(8):
        grid = dilate(np.roll(square_mask(0.05, 64), (place, 3 * place), (0, 1)), 1)
        plan = make_row_plan(grid, len(sizes))
        without = unet_macs(sites, plan.rows, sizes, 1, 77)
        assert 0.1 < sparse_macs(adapter, full_size, plan, recorded=True) / without <= 0.15
