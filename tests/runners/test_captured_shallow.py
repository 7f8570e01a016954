"""Shallow steps by captured graphs, by the CPU's stand-in: the same as the engine's own, alone and in whole edits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.costs.model import Costs
from fisedit.decoder import tiles as boxing
from fisedit.features.cache import FeatureOverlay, is_shallow, recorded_statistics
from fisedit.models.families.conditioning import interleaved
from fisedit.runners.cuda_graphs import GraphEdit, GraphExecutor
from fisedit.runners.deep_maps import SOURCE_SHARE
from fisedit.runners.static_rows import NORMS
from fisedit.sparse_kernels import ops
from fisedit.values import with_shallow
from tests.support.edits import BIRD, CAT, DOG
from tests.support.graph_edits import both, captured, check_alike
from tests.support.graph_steps import TIME, Case
from tests.support.grids import grids
from tests.support.pipelines import SHAPES, build_pipeline

SQUARE, BLOBS, CORNER = (grids(16, 16)[name] for name in ("square", "blobs", "corner"))
SIZES = {"sd15": (16, 16), "sd2": (13, 17), "shallow": (13, 17), "demo": (16, 24), "sdxl": (13, 17)}
STEPS, SHALLOW, OTHER = 8, (3, 5, 7), (2, 4, 5)
QUICK = {"seed": 7, "num_inference_steps": STEPS, "guidance_scale": 4.0}
GROWTH = (2,) * 3 + (1,) * 5


class ShallowCase(Case):
    """Shallow steps over a recorded source, each over a map of its own."""

    def __init__(self, unet, masks, **options):
        super().__init__(unet, masks, **options)
        entry = self.executor.shallow
        sizes = [(len(self.latents[0]), plan.levels[0].rows, entry.channels) for plan in self.plans]
        self.changes = [torch.randn(size) for size in sizes]

    def alone(self, e, features=None):
        features, entry = features or self.maps, self.executor.shallow
        overlay = FeatureOverlay(features, self.plans[e], shallow=True)
        recorded = features.rows(entry.entry, 0, self.plans[e].levels[0].active)[..., : entry.channels]
        overlay.maps[entry.entry] = self.changes[e] + SOURCE_SHARE * recorded
        return self.executor.run_sparse(self.latents[e], TIME, self.texts[e], {}, overlay)

    def begin(self, graphs, features=None):
        return graphs.begin(self.plans, {0: features or self.maps}, interleaved(self.texts), shallow=True)

    def compare(self, graphs, features=None):
        """One captured step beside the engine's own: predictions, and what overlays hold."""
        edit = self.begin(graphs, features)
        self.check(edit.step(0, self.batch(), TIME, self.changes), features)
        norms = {s.name: s for s in self.executor.sites if s.role in NORMS and self.executor.shallow.runs(s.name)}
        for e, got in enumerate(edit.overlays(0)):
            _, expected = self.alone(e, features)
            sums = {name: recorded_statistics(expected, site) for name, site in norms.items()}
            assert is_shallow(got)
            for mine, theirs in ((got.all_rows(), expected.all_rows()), (got.statistics, sums)):
                assert mine.keys() == theirs.keys()
                for name, tensor in theirs.items():
                    assert torch.allclose(mine[name], tensor, atol=1e-3, rtol=1e-4), name


@pytest.mark.usefixtures("no_grad")
@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("name", ["one_cell", "blobs", "noise", "everything"])
def test_a_captured_step_is_the_engines_own(pipelines, shape, name):
    case = ShallowCase(pipelines[shape].unet, [grids(*SIZES[shape])[name]])
    case.compare(GraphExecutor(case.executor))


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("shape", ["sd15", "sdxl"])
def test_edits_of_several_masks_in_one_batch(pipelines, shape):
    masks = [grids(16, 16)[name] for name in ("one_cell", "everything", "blobs")]
    case = ShallowCase(pipelines[shape].unet, masks)
    case.compare(GraphExecutor(case.executor))


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("shape", ["shallow", "sdxl"])
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_by_every_backend(pipelines, backend, shape):
    """Of Stable Diffusion XL the last layer has no attention, whose keys would be read in place."""
    if backend == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed")
    case = ShallowCase(pipelines[shape].unet, [grids(8, 9)["blobs"]], branches=1)
    with ops.use(backend):
        case.compare(GraphExecutor(case.executor))


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("quantised", ["", "int8"])
def test_over_edits_whether_they_were_shallow_or_not(pipelines, quantised):
    """Over an edit's full step, over a shallow one of it, and over both."""
    unet, full = pipelines["sd15"].unet, Case(pipelines["sd15"].unet, [SQUARE])
    _, features = full.alone(0)
    for mask in (BLOBS, CORNER, SQUARE):
        case = ShallowCase(unet, [mask])
        graphs = GraphExecutor(case.executor, quantised=quantised)
        if quantised:
            edit, (expected, _) = case.begin(graphs, features), case.alone(0, features)
            got = edit.step(0, case.batch(), TIME, case.changes)[:, : expected.shape[1]]
            assert 0 < (got - expected).norm() < 2e-3 * expected.norm()
        else:
            case.compare(graphs, features)
        _, features = case.alone(0, features)
    assert is_shallow(features) and not is_shallow(full.maps)


@pytest.mark.usefixtures("no_grad")
def test_the_last_layers_features_alone_are_copied_and_nothing_is_packed_twice(pipelines):
    case = ShallowCase(pipelines["sd15"].unet, [SQUARE])
    graphs = GraphExecutor(case.executor)
    edits = [case.begin(graphs), Case.begin(case, graphs)]
    assert edits[0].prefetcher.bytes < edits[1].prefetcher.bytes / 3
    assert graphs.graphs.misses == 2 and list(graphs.feature_packer._packed) == [case.maps]
    buffers = next(iter(graphs.graphs._kept.values())).buffers
    read = {name.partition(" ")[2] for name in buffers.rows.shapes}
    assert read and all(case.executor.shallow.runs(name) for name in read | {*buffers.statistics.shapes})


@pytest.mark.usefixtures("no_grad")
def test_edits_that_share_a_graph_take_turns(pipelines):
    """Whoever steps next finds its own map, and reads nothing of what another left in the padding."""
    unet, smaller = pipelines["sd15"].unet, SQUARE.copy()
    smaller[tuple(np.argwhere(SQUARE)[0])] = False
    cases = [ShallowCase(unet, [mask]) for mask in (SQUARE, smaller)]
    cases[0].changes[0][:] = float("nan")
    graphs = GraphExecutor(cases[0].executor)
    edits = [case.begin(graphs) for case in cases]
    for e in (0, 1):
        got = edits[e].step(0, cases[e].batch(), TIME, cases[e].changes)
    cases[1].check(got)
    cases[0].changes[0][:] = 1.0
    cases[0].check(edits[0].step(0, cases[0].batch(), TIME, cases[0].changes))
    assert graphs.graphs.misses == 1


@pytest.fixture
def shallow(monkeypatch):
    """Gives the steps that are shallow in the edits that follow, whatever they cost."""
    monkeypatch.setattr(boxing, "HALO", 512)  # as much for boxes as for rectangles
    monkeypatch.setattr(boxing, "DENSE_SHARE", float("inf"))
    monkeypatch.setattr(boxing, "DENSE_CELLS", 0)

    def use(*steps):
        monkeypatch.setattr(Costs, "choose_dilations", lambda *_, **__: with_shallow(GROWTH, steps))

    use(*SHALLOW)
    return use


def graphs_of(editor):
    return editor._engine.graphs.executor_for(editor._engine.executor).graphs


@pytest.mark.parametrize("shape", ["sd15", *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES)])
def test_edits_and_edits_of_them_are_the_eager_ones(pipelines, shallow, shape):
    """Of one shape and of another, with other steps shallow, over full and over shallow steps."""

    def script(editor):
        source = editor.generate(CAT, height=104, width=136, **QUICK)
        masks = [grids(13, 17)[name] for name in ("square", "blobs", "corner")]
        shallow(*SHALLOW)
        editor.edit(DOG, mask=masks[0])
        editor.edit(BIRD, mask=masks[1])  # over shallow steps, deep where they were
        shallow(*OTHER)
        editor.edit(CAT, mask=masks[2])  # full steps of which were shallow
        editor.checkout(source.id)
        return editor.edit(DOG, mask=masks[0])

    editors, (_, result) = both(pipelines[shape], script)
    check_alike(editors)
    assert [each.run.shallow for each in editors[1].history] == [(), SHALLOW, SHALLOW, OTHER, OTHER]
    assert captured(editors[1]) == [0, *[STEPS] * 4] and captured(editors[0]) == [0] * 5
    assert result.stats.uncaptured == ""


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["euler_a", "dpmsolver++"])
@pytest.mark.parametrize("guidance", [4.0, 1.0], ids=["guided", "unguided"])
def test_by_other_samplers(pipelines, shallow, scheduler, guidance):
    def script(editor):
        editor.generate(CAT, scheduler=scheduler, **QUICK | {"guidance_scale": guidance})
        editor.edit(DOG, mask=SQUARE)

    editors, _ = both(pipelines["demo"], script)
    check_alike(editors)
    assert captured(editors[1]) == [0, STEPS]


def test_another_schedule_and_another_mask_of_the_bucket_find_their_graphs(pipelines, shallow):
    """A shallow graph serves whatever steps are shallow; a full one all the others."""
    editor = Editor(pipelines["shallow"], graphs=True)
    source = editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE)
    made = graphs_of(editor).misses
    for steps, mask in ((SHALLOW, np.roll(SQUARE, 2, 1)), ((4, 6), SQUARE), ((5,), SQUARE), ((), SQUARE)):
        shallow(*steps)
        editor.checkout(source.id)
        result = editor.edit(BIRD, mask=mask)
        assert result.run.shallow == steps and result.stats.unet_evaluations_captured == STEPS
    assert graphs_of(editor).misses == made == 3  # of two dilations, and of the shallow steps of one
    shallow(2, 5)
    editor.edit(DOG, mask=SQUARE)
    assert graphs_of(editor).misses == made + 1  # a shallow one of the other dilation


def test_several_edits_in_one_batch_are_each_as_alone(pipelines, shallow):
    editor = Editor(pipelines["sd15"], graphs=True)
    source = editor.generate(CAT, **QUICK)
    results = editor.edit_many([DOG, BIRD], [SQUARE, CORNER])
    alone = Editor(pipelines["sd15"], graphs=False)
    base = alone.generate(CAT, **QUICK)
    for result, prompt, mask in zip(results, (DOG, BIRD), (SQUARE, CORNER), strict=True):
        alone.checkout(base.id)
        alone.edit(prompt, mask=mask, verify=False)
        assert result.parent == source.id and result.run.shallow == SHALLOW
    check_alike((alone, editor))
    assert captured(editor) == [0, STEPS, STEPS]
    assert {key[2] for key in graphs_of(editor)._kept} == {2}


def test_edits_whose_shallow_steps_differ_are_no_batch(pipelines, monkeypatch, shallow):
    dilations = iter([with_shallow(GROWTH, SHALLOW), with_shallow(GROWTH, OTHER)] * 2)
    monkeypatch.setattr(Costs, "choose_dilations", lambda *_, **__: next(dilations))
    editor = Editor(pipelines["shallow"], graphs=True)
    editor.generate(CAT, **QUICK)
    results = editor.edit_many([DOG, BIRD], [SQUARE, CORNER])
    assert [result.run.shallow for result in results] == [SHALLOW, OTHER]
    for result in results:
        steps = editor._trajectory_cache.get(result.id)[0].features
        assert tuple(i for i, step in enumerate(steps) if is_shallow(step)) == result.run.shallow


def test_what_cannot_be_captured_runs_eagerly_and_says_why(shallow):
    pipe = build_pipeline("shallow")
    pipe.unet.register_forward_pre_hook(lambda *_: None)

    def script(editor):
        editor.generate(CAT, **QUICK)
        return editor.edit(DOG, mask=SQUARE)

    editors, (_, result) = both(pipe, script)
    check_alike(editors)
    assert result.run.shallow == SHALLOW and captured(editors[1]) == [0, 0]
    assert result.stats.uncaptured == "the UNet has a hook; it runs eagerly"


def test_a_shallow_graph_that_differs_is_given_up_and_the_edit_goes_on_eagerly(pipelines, monkeypatch, shallow):
    """The full steps before it were captured."""
    step = GraphEdit.step

    def stepped(edit, i, latents, timestep, changes):
        return step(edit, i, latents, timestep, changes) * (2.0 if changes else 1.0)

    monkeypatch.setattr(GraphEdit, "step", stepped)

    def script(editor):
        editor.generate(CAT, **QUICK)
        return editor.edit(DOG, mask=SQUARE)

    with pytest.warns(RuntimeWarning, match="a captured graph was given up"):
        editors, (_, result) = both(pipelines["shallow"], script)
    check_alike(editors)
    assert captured(editors[1]) == [0, 3] and "its first replay differs" in result.stats.uncaptured


def test_features_in_host_memory_are_fetched_ahead(pipelines, shallow):
    def script(editor):
        editor.generate(CAT, **QUICK)
        first = editor.edit(DOG, mask=SQUARE)
        editor.forget()
        editor.checkout(first.id)
        return editor.edit(CAT, mask=CORNER)

    editors, (_, result) = both(pipelines["shallow"], script, max_recorded_bytes=1000)
    check_alike(editors)
    rich = Editor(pipelines["shallow"], graphs=True)
    assert script(rich).image.tobytes() == result.image.tobytes()
    assert captured(editors[1]) == [0, STEPS, STEPS]
