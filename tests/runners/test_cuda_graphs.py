"""The captured path: padded, fused, over static buffers, the same as the engine's own replay, whatever the mask."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from fisedit.errors import UnsupportedModuleError
from fisedit.features.cache import FeatureOverlay, recorded_statistics
from fisedit.features.sites import Role
from fisedit.models.families.conditioning import interleaved
from fisedit.runners import cuda_graphs
from fisedit.runners.cuda_graphs import GraphExecutor
from fisedit.runners.static_rows import NORMS
from fisedit.sparse import packed_weights
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support.conditions import random_conditions
from tests.support.graph_steps import TIME, Case
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline

pytestmark = pytest.mark.usefixtures("no_grad")


SIZES = {"sd15": (16, 16), "sd2": (13, 17), "shallow": (13, 17), "demo": (16, 24), "sdxl": (13, 17)}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("shape", "size"), SIZES.items())
@pytest.mark.parametrize("name", grids(8, 8))
def test_a_captured_step_is_the_engines_own(pipelines, shape, size, name):
    case = Case(pipelines[shape].unet, [grids(*size)[name]])
    case.check(case.begin(GraphExecutor(case.executor)).step(0, case.batch(), TIME))


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["one_cell", "blobs"])
def test_by_every_backend(pipelines, backend, name):
    if backend == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed")
    case = Case(pipelines["shallow"].unet, [grids(8, 9)[name]], branches=1)
    with ops.use(backend):
        case.check(case.begin(GraphExecutor(case.executor)).step(0, case.batch(), TIME))


@pytest.mark.parametrize("shape", ["sd15", "sdxl"])
def test_edits_of_several_masks_in_one_batch(pipelines, shape):
    """E7: each as it would be alone, however much the others pad it."""
    names = ("one_cell", "everything", "blobs", "checkerboard")
    case = Case(pipelines[shape].unet, [grids(16, 16)[name] for name in names])
    case.check(case.begin(GraphExecutor(case.executor)).step(0, case.batch(), TIME))


def test_an_edit_on_an_edit(pipelines):
    first, second = grids(16, 16)["square"], grids(16, 16)["blobs"]
    case = Case(pipelines["sd15"].unet, [first])
    _, overlay = case.alone(0)
    again = Case(pipelines["sd15"].unet, [second])
    again.check(again.begin(GraphExecutor(again.executor), overlay).step(0, again.batch(), TIME), overlay)


def test_its_overlay_is_the_engines_own(pipelines):
    unet = pipelines["sd15"].unet
    queries = frozenset(n for n, _ in unet.named_modules() if n.startswith("mid_block") and n.endswith("to_q"))
    case = Case(unet, [grids(16, 16)["blobs"]], queries=queries)
    edit = case.begin(GraphExecutor(case.executor))
    edit.step(0, case.batch(), TIME)
    (got,), (_, expected) = edit.overlays(0), case.alone(0)
    norms = {s.name: s for s in case.executor.sites if s.role in NORMS}
    sums = {name: recorded_statistics(expected, site) for name, site in norms.items()}
    for mine, theirs in ((got.maps, expected.maps), (got.statistics, sums)):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.allclose(mine[name], tensor, atol=1e-3, rtol=1e-4), name
    before = {name: tensor.clone() for name, tensor in got.maps.items()}
    edit.step(0, torch.zeros_like(case.batch()), TIME)
    assert all(torch.equal(got.maps[name], tensor) for name, tensor in before.items())


def test_a_new_mask_needs_neither_buffers_nor_a_graph(pipelines):
    """Another mask of the bucket: the same addresses and shapes, one capture, and the right result."""
    graphs, masks = None, [grids(16, 16)[name] for name in ("square", "row")]
    where = []
    for mask in masks:
        case = Case(pipelines["sd15"].unet, [mask])
        graphs = graphs or GraphExecutor(case.executor)
        case.check(case.begin(graphs).step(0, case.batch(), TIME))
        (slot,) = graphs.graphs._kept.values()
        tensors = [slot.captured.outputs["prediction"], *(level.same for level in slot.buffers.tables.levels)]
        where.append([(tensor.data_ptr(), tensor.shape) for tensor in tensors])
    assert where[0] == where[1]
    assert graphs.graphs.misses == 1


def test_edits_that_share_a_graph_take_turns(pipelines):
    """E5: whoever steps next finds its own tables and text."""
    unet = pipelines["sd15"].unet
    cases = [Case(unet, [grids(16, 16)[name]]) for name in ("square", "row")]
    graphs = GraphExecutor(cases[0].executor)
    edits = [case.begin(graphs) for case in cases]
    for e in (0, 1, 0, 0, 1):
        cases[e].check(edits[e].step(0, cases[e].batch(), TIME))
    assert graphs.graphs.misses == 1


def test_a_model_that_was_captured_is_left_as_it_was():
    unet = build_pipeline("sd15").unet
    keys, weights = list(unet.state_dict()), {k: v.clone() for k, v in unet.state_dict().items()}
    case = Case(unet, [grids(16, 16)["square"]])
    case.begin(GraphExecutor(case.executor)).step(0, case.batch(), TIME)
    assert not any("forward" in vars(module) for module in unet.modules())
    assert list(unet.state_dict()) == keys
    assert all(torch.equal(unet.state_dict()[k], v) for k, v in weights.items())


def test_an_unusual_block_is_refused_by_name():
    unet = build_pipeline("sd15").unet
    unet.mid_block.resnets[1].output_scale_factor = 2.0
    with pytest.raises(UnsupportedModuleError, match=r"mid_block\.resnets\.1 is unusual and cannot be captured"):
        GraphExecutor(Executor(unet))


def test_an_edit_that_is_over_holds_no_features(pipelines):
    """A graph knows whose tables lie in its buffers, and keeps nothing else of an edit."""
    case = Case(pipelines["sd15"].unet, [grids(16, 16)["blobs"]])
    graphs = GraphExecutor(case.executor)
    edit = case.begin(graphs)
    edit.step(0, case.batch(), TIME)
    gone = weakref.ref(edit.prefetcher)
    del edit
    gc.collect()
    assert gone() is None


def test_weights_that_a_graph_reads_live_as_long_as_it(pipelines, monkeypatch):
    """A CUDA graph holds addresses alone, not the function that was captured."""
    monkeypatch.setattr(cuda_graphs, "capture", lambda function, device: SimpleNamespace(outputs=function()))
    case = Case(pipelines["sd15"].unet, [grids(16, 16)["blobs"]])
    graphs = GraphExecutor(case.executor)
    edit, packed = case.begin(graphs), weakref.ref(graphs.static_unet)
    del graphs
    gc.collect()
    assert packed() is not None
    del edit
    gc.collect()
    assert packed() is None


def test_packing_takes_no_more_memory(pipelines):
    """A recorded step's maps lie in its packed form; an edit's step is not kept packed."""
    case = Case(pipelines["sd15"].unet, [grids(16, 16)["blobs"]])
    maps, before = {name: t.clone() for name, t in case.maps.maps.items()}, case.maps.own_bytes
    graphs = GraphExecutor(case.executor)
    edit = case.begin(graphs)
    assert case.maps.own_bytes <= before and all(torch.equal(case.maps.maps[name], t) for name, t in maps.items())
    case.check(edit.step(0, case.batch(), TIME))
    (overlay,) = edit.overlays(0)
    case.begin(graphs, overlay)
    assert list(graphs.feature_packer._packed) == [case.maps]


def test_text_that_is_known_is_projected_once(pipelines):
    case = Case(pipelines["sd15"].unet, [grids(16, 16)["blobs"]])
    graphs, known, text = GraphExecutor(case.executor), {}, interleaved(case.texts)
    edits = [graphs.begin(case.plans, {0: case.maps}, text, None, known) for _ in range(2)]
    assert len(known) == sum(site.role is Role.TEXT for site in case.executor.sites)
    before = dict(known)
    case.check(edits[1].step(0, case.batch(), TIME))
    assert all(known[name] is tensor for name, tensor in before.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: torch.cuda.is_available() is False")
@pytest.mark.parametrize("backend", ["fast", "triton"])
def test_a_cuda_graph_is_the_engines_own_and_never_waits(backend):
    from contextlib import contextmanager

    @contextmanager
    def no_waiting():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    unet = build_pipeline("sd15").unet.to("cuda")
    make = torch.Generator("cuda").manual_seed(0)
    with ops.use(backend):
        executor, time = Executor(unet), torch.tensor(500, device="cuda")
        source, other = torch.randn(2, 2, 4, 16, 16, generator=make, device="cuda")
        texts = [random_conditions(unet, 2) for _ in range(2)]
        _, maps = executor.run_dense(source, time, texts[0], {})
        graphs, allocated = GraphExecutor(executor), []
        for mask in (grids(16, 16)[name] for name in ("square", "row")):
            plan = make_row_plan(mask, executor.num_levels, "cuda")
            latents = torch.where(torch.from_numpy(mask).cuda(), other, source)
            edit = graphs.begin([plan], {0: maps}, texts[1])
            edit.step(0, latents, time)
            allocated.append(torch.cuda.memory_allocated())
            with no_waiting():
                rows = edit.step(0, latents, time)
            assert torch.cuda.memory_allocated() == allocated[-1]
            expected, _ = executor.run_sparse(latents, time, texts[1], {}, FeatureOverlay(maps, plan))
            assert torch.allclose(rows[:, : plan.rows[0]], expected, atol=2e-3, rtol=0)
        assert graphs.graphs.misses == 1


def test_an_unusual_time_or_attention_is_refused():
    unet = build_pipeline("shallow").unet
    block = unet.mid_block.attentions[0].transformer_blocks[0]
    unet.time_embed_act = torch.nn.SiLU()
    with pytest.raises(UnsupportedModuleError, match="time embedding is unusual and cannot be captured"):
        packed_weights.check_capturable(unet)
    kept, block.attn1 = block.attn1, None
    with pytest.raises(UnsupportedModuleError, match=r"block mid_block\.attentions\.0 is unusual"):
        packed_weights.check_capturable(unet)
    block.attn1 = kept
    unet.register_to_config(time_cond_proj_dim=8)
    with pytest.raises(UnsupportedModuleError, match="time embedding takes the guidance scale"):
        packed_weights.check_capturable(unet)
