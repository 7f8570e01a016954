"""Shallow steps: diffusers' forward with another map before its last layer, and edits over such edits.

Deviations are in units of the expected latents' spread.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from fisedit import Editor, Region
from fisedit.features.cache import FeatureOverlay, is_shallow
from fisedit.runners import deep_maps
from fisedit.sampling.engine import Engine
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import Shallow, Step, with_shallow
from tests.support import oracle
from tests.support.edits import CAT, DOG, FP32, as_oracle, config_of, latents, record, replay, same, trajectory
from tests.support.grids import grids
from tests.support.pipelines import SHAPES, build_pipeline, with_scheduler
from tests.support.steps import StepEdit, rows

SQUARE, EVERYWHERE = grids(16, 16)["square"], np.ones((16, 16), bool)
STEPS, SHALLOW = 8, (2, 3, 5, 7)
LONG = {"seed": 7, "num_inference_steps": 15, "width": 128, "height": 128}


@contextmanager
def entering(unet, change):
    """While open, the map before the last layer, without what skipped the middle, is what `change` makes of it."""
    channels = Executor(unet).shallow.channels

    def before(_, inputs):
        return torch.cat([change(inputs[0][:, :channels]), inputs[0][:, channels:]], 1), *inputs[1:]

    handle = unet.up_blocks[-1].resnets[-1].register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("shape", [*SHAPES, "BK-SDM-Small"])
@pytest.mark.parametrize("name", ["square", "noise", "everything"])
def test_a_step_is_the_mixed_forward_over_a_given_map(pipelines, shape, name):
    """Whatever that map is: what lies before it is not computed."""
    unet, grid = (pipelines[shape] if shape in SHAPES else build_pipeline(shape)).unet, grids(16, 16)[name]
    case, executor = StepEdit(unet, grid), Executor(unet)
    plan = make_row_plan(grid, executor.num_levels)
    _, source = executor.run_dense(case.source, case.timestep, case.texts[0], {})
    overlay, entry = FeatureOverlay(source, plan, shallow=True), executor.shallow
    recorded = source.whole(entry.entry, 0)[..., : entry.channels]
    deep = torch.randn(recorded.shape, generator=torch.Generator().manual_seed(1))
    overlay.maps[entry.entry] = deep[:, plan.levels[0].active]
    got, overlay = executor.run_sparse(case.edited, case.timestep, case.texts[1], {}, overlay)
    maps = oracle.record(unet, case.source, case.timestep, case.texts[0].unet_inputs)

    def given(feature_map):
        as_map = deep.transpose(1, 2).unflatten(2, grid.shape)
        return torch.where(case.inside, as_map, feature_map)

    with entering(unet, given):
        expected = oracle.mixed_forward(unet, maps, case.edited, case.timestep, case.texts[1].unet_inputs, case.inside)
    assert oracle.deviation(got, rows(expected, grid)) <= 1e-4
    assert is_shallow(overlay) and not is_shallow(source)
    assert set(overlay.maps) == {site.name for site in executor.sites if site.name in source and entry.runs(site.name)}


@pytest.mark.parametrize("scheduler", ["ddim", "euler_a"])
@pytest.mark.parametrize("dense", [(), (0, 4)], ids=["sparse", "with dense steps"])
def test_an_edit_is_diffusers_pipeline_with_maps_told_so(pipelines, scheduler, dense):
    """All of the picture, so that nothing else is approximated."""
    pipe = pipelines["shallow"]
    engine, config = Engine(pipe), config_of(scheduler=scheduler, num_inference_steps=STEPS)
    growth = tuple(Step.DENSE if i in dense else 0 for i in range(STEPS))
    source = record(engine, config)
    got = replay(engine, source, DOG, EVERYWHERE, with_shallow(growth, SHALLOW))
    before, now = {}, {}

    def told(i, computed):
        full = sorted(j for j in range(i) if j not in SHALLOW)[-2:]
        if i not in SHALLOW:
            now[i] = computed
            return computed
        change = [now[j] - deep_maps.SOURCE_SHARE * before[j] for j in full]
        trend = (change[-1] - change[0]) * (i - full[-1]) / (full[-1] - full[0])
        return change[-1] + deep_maps.SOURCE_SHARE * before[i] + deep_maps.TREND_SHARE * trend

    own = with_scheduler(pipe, scheduler)
    with oracle._around_calls(own.unet, lambda i: entering(own.unet, lambda x: before.setdefault(i, x.clone()))):
        oracle.dense_generate(own, as_oracle(config))
    with oracle._around_calls(own.unet, lambda i: entering(own.unet, lambda x: told(i, x.clone()))):
        expected = oracle.dense_generate(own, as_oracle(replace(config, prompt=DOG)))
    assert oracle.deviation(latents(got), expected.latents) <= FP32
    plain = replay(engine, source, DOG, EVERYWHERE, growth)
    assert oracle.deviation(latents(plain), expected.latents) > 10 * FP32


@pytest.fixture
def editor(pipelines, monkeypatch):
    """An editor whose fast edits take the first schedule, whatever others cost."""
    monkeypatch.setattr("fisedit.costs.model.MAX_TIME_RATIO", 0)
    editor = Editor(pipelines["demo"], model="demo")
    editor.generate(CAT, **LONG)
    return editor


def shallow_of(editor, result):
    return tuple(i for i, step in enumerate(trajectory(editor, result).features) if is_shallow(step))


def test_the_steps_are_those_that_costs_chose_and_files_keep(editor, tmp_path):
    result = editor.edit(DOG, mask=SQUARE, quality="fast")
    assert result.run.shallow == shallow_of(editor, result) != ()
    assert all(type(cells) is int for cells in result.stats.growth) and result.stats.growth == result.run.growth
    over = editor.edit(CAT, mask=SQUARE, quality="fast")
    assert set(result.run.shallow) <= set(over.run.shallow) and shallow_of(editor, result) == result.run.shallow
    editor.save(tmp_path / "session")
    again = Editor(editor.pipe, model="demo")
    again.load(tmp_path / "session")
    assert [each.run.dilation for each in again.history] == [each.run.dilation for each in editor.history]
    assert any(isinstance(cells, Shallow) for cells in again.current.run.dilation)
    editor.forget()
    for each in (editor, again):  # recorded again, from the results' own runs
        each.checkout(result.id)
        assert same(each.edit(CAT, mask=SQUARE, quality="fast"), over)


@pytest.mark.parametrize("how", ["erase", "growth", "structure", "close"])
def test_an_edit_that_reads_deep_maps_has_them_recorded_first(editor, how):
    """For itself, and counts it: the same edit, and others, are the same afterwards."""
    parent = editor.edit(DOG, mask=SQUARE, quality="fast")
    shallow = shallow_of(editor, parent)
    likewise = editor.edit(CAT, mask=SQUARE, quality="fast")
    edits = {
        "erase": lambda: editor.erase(Region.mask(SQUARE)),
        "growth": lambda: editor.edit(CAT, mask=SQUARE, growth=2),
        "structure": lambda: editor.edit(CAT, mask=SQUARE, structure=1.0),
        "close": lambda: editor.edit(CAT, mask=SQUARE, quality="close"),
    }
    editor.checkout(parent.id)
    result, seen = edits[how](), trajectory(editor, editor.current)
    full = [i for i in range(LONG["num_inference_steps"]) if i not in result.run.shallow]
    assert shallow and not any(is_shallow(seen.features[i]) for i in full)
    assert shallow_of(editor, parent) == shallow
    costs = editor._engine.costs(result.config)
    assert result.stats.macs > len(set(shallow) & set(full)) * costs.dense_step() > 0
    editor.checkout(parent.id)
    assert same(edits[how](), result) and editor.current.stats.macs == result.stats.macs
    editor.checkout(parent.id)
    assert same(editor.edit(CAT, mask=SQUARE, quality="fast"), likewise)


def test_short_runs_and_others_have_none(editor, pipelines):
    assert editor.edit(DOG, mask=SQUARE, growth=1).run.shallow == ()
    assert editor.edit(CAT, mask=SQUARE, structure=0.5).run.shallow == ()
    short = Editor(pipelines["demo"])
    short.generate(CAT, **(LONG | {"num_inference_steps": 14}))
    assert short.edit(DOG, mask=SQUARE, quality="fast").run.shallow == ()


def test_frames_of_a_clip_over_such_an_edit(editor):
    """Each is the edit alone that computes all layers."""
    editor.edit(DOG, mask=SQUARE, quality="fast")
    pipeline, parent = editor._pipeline, editor.current
    requests = [pipeline.requests.edit(CAT, Region.mask(SQUARE)) for _ in range(2)]
    frames = pipeline.render_clip(requests)
    plan = pipeline.plan(replace(requests[0], is_frame=True))
    alone = pipeline.run(requests[0], plan)
    assert parent.run.shallow and plan.mode.shallow == ()
    for frame in frames:
        assert np.abs(np.asarray(frame, int) - np.asarray(alone.image, int)).max() <= 1
