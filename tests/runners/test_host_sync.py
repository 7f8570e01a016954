"""The host never waits inside the loop: on torch's meta device there is nothing to read, and whoever asks is refused.

Reading a number, finding nonzero positions or copying to the host are errors there; tensors of the host that come in
are found by watching every operation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fisedit.decoder.decode import DecoderCache, coarse_plan, decode
from fisedit.decoder.tiles import boxes
from fisedit.features.cache import StepFeatures
from fisedit.models.families.conditioning import Conditioning, interleaved
from fisedit.runners import captured_decode, graph_cache
from fisedit.runners.captured_decode import CapturedDecoder
from fisedit.runners.cuda_graphs import GraphEdit, GraphExecutor
from fisedit.runners.graph_capture import EagerGraph
from fisedit.runners.stepping import Graphs
from fisedit.sampling import denoise
from fisedit.sampling import scheduler as scheduling
from fisedit.sampling.engine import Engine
from fisedit.sampling.linear_scheduler import LinearSampler
from fisedit.sampling.trajectory import LatentEdit, Trajectory
from fisedit.values import ActiveCells, EditMode, with_shallow
from tests.support.edits import CAT, DOG, config_of, record
from tests.support.graph_steps import TIME, Case
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline

META = torch.device("meta")
SQUARE = grids(16, 16)["square"]
WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


class Watched(TorchDispatchMode):
    """While `on`, notes every operation that makes the host wait, or moves tensors of the host."""

    def __init__(self):
        super().__init__()
        self.on, self.seen, self.count = False, [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if self.on:
            self.count += 1
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            if function._schema.name in WAITS or any(t.device != META and t.ndim for t in tensors):
                self.seen.append(function._schema.name)
        return out


def on_meta(trajectory, *, waiting=False):
    """A trajectory whose tensors have shapes alone, but for maps that wait in the host's memory."""
    steps = [
        StepFeatures(*({n: t.to(META) for n, t in d.items()} for d in (s.maps, s.statistics)), s.joined)
        for s in trajectory.features
    ]
    if waiting:
        steps = [
            StepFeatures(old.maps, new.statistics, old.joined, META)
            for old, new in zip(trajectory.features, steps, strict=True)
        ]
    paths = [[t.to(META) for t in tensors] for tensors in (trajectory.latents, trajectory.predictions)]
    return Trajectory(trajectory.config, *paths, steps)


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [False, True], ids=["resident", "waiting"])
@pytest.mark.parametrize(("scheduler", "growth"), [("ddim", "one"), ("dpmsolver++", "two"), ("ddim", "shallow")])
def test_the_loop_of_steps(monkeypatch, scheduler, growth, waiting):
    """From the first step to the check at the end, with overlays made, tables written anew and the plans changing."""
    pipe = build_pipeline("sd15")
    config = config_of(CAT, scheduler=scheduler, num_inference_steps=4)
    engine = Engine(pipe, Graphs(True))
    source, edit = on_meta(record(engine, config), waiting=waiting), replace(config, prompt=DOG)
    with torch.inference_mode():
        text = Conditioning(engine.encode(edit).text.to(META))
    pipe.unet.to(META)
    watched = Watched()
    monkeypatch.setattr(LinearSampler, "raise_if_not_finite", lambda _: setattr(watched, "on", False))
    engine = Engine(pipe, Graphs(True))
    monkeypatch.setattr(GraphEdit, "verified", True)  # what has no numbers cannot be compared
    monkeypatch.setattr(scheduling, "_check_first", lambda *_: None)  # which waits, before the loop
    steps = {"one": (1,) * 4, "two": (2, 2, 1, 1), "shallow": with_shallow((1,) * 4, (2, 3))}[growth]
    with torch.inference_mode(), watched:
        told = LatentEdit(edit, text, {}, ActiveCells(SQUARE), EditMode(steps))
        (trajectory,) = denoise.run_sparse(engine, source, [told], lambda *_: setattr(watched, "on", True))
    assert trajectory.captured == 4 and len(trajectory.latents) == 5 and not watched.on
    assert watched.count > 400 and watched.seen == []


def test_the_watch_sees_who_waits():
    watched = Watched()
    watched.on, on_device = True, torch.zeros(3, device=META)
    with watched:
        on_device + torch.zeros(3).to(META)
        with pytest.raises((RuntimeError, NotImplementedError)):
            on_device.sum().item()
        with pytest.raises((RuntimeError, NotImplementedError)):
            on_device.cpu()
    assert watched.seen


class Memory(TorchDispatchMode):
    """Notes what lies in memory that was not there before."""

    def __init__(self):
        super().__init__()
        self.new = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = {t.untyped_storage().data_ptr() for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        self.new += [function._schema.name for where in made - given]
        return out


@pytest.mark.parametrize("shallow", [False, True], ids=["full", "shallow"])
@pytest.mark.parametrize("budget", [None, 1000], ids=["resident", "streamed"])
def test_a_step_takes_no_memory(pipelines, monkeypatch, budget, shallow):
    """What is beside the replay, from the second step on: features, latents and the time go into what is there."""
    with torch.inference_mode():
        case = Case(pipelines["shallow"].unet, [grids(8, 9)["square"]])
        graphs, steps = GraphExecutor(case.executor), dict.fromkeys(range(3), case.maps)
        edit = graphs.begin(case.plans, steps, text_of(case), budget, shallow=shallow)
        size = len(case.latents[0]), case.plans[0].levels[0].rows, case.executor.shallow.channels
        changes = [torch.randn(size)] if shallow else []
        edit.step(0, case.batch(), TIME, changes)
        monkeypatch.setattr(EagerGraph, "replay", lambda _: None)  # a graph's memory is its own
        batch, memory = case.batch(), Memory()
        with memory:
            for i in (1, 2):
                edit.step(i, batch, TIME, changes)
            assert memory.new == []
            torch.zeros(3) + 1
    assert memory.new


def text_of(case):
    return interleaved(case.texts)


@pytest.fixture
def _unverified(monkeypatch):
    """What has no numbers cannot be compared, as first replays are: those wait."""
    for module in (graph_cache, captured_decode):
        monkeypatch.setattr(module, "check_replay", lambda *_: None)


@pytest.mark.usefixtures("_unverified")
def test_the_text_encoder():
    encoder = build_pipeline("sd15").text_encoder.to(META)
    watched = Watched()
    with torch.inference_mode(), watched:
        reader = graph_cache._CapturedEncoder(encoder, torch.zeros(1, 77, dtype=torch.long, device=META))
        watched.on = True
        (out,) = reader.read(torch.ones(1, 77, dtype=torch.long, device=META))
    assert out.shape == (1, 77, 32) and watched.count > 20 and watched.seen == []


@pytest.mark.usefixtures("_unverified")
@pytest.mark.parametrize("name", ["square", "blobs"])
def test_a_sparse_decode(name):
    """From a record to the pixels of its rectangles and the record to be, tables and statistics written in between."""
    vae, grid = build_pipeline("sd15").vae, grids(16, 16)[name]
    with torch.inference_mode():
        picture, record = decode(vae, torch.randn(1, 4, 16, 16))
        maps = StepFeatures(
            *({n: t.to(META) for n, t in d.items()} for d in (record.features.maps, record.features.statistics))
        )
        fine = ({n: t.to(META) for n, t in d.items()} for d in (record.sums, record.statistics))
        vae, moved = vae.to(META), DecoderCache(maps, picture, *fine)
        plan, latents, watched = coarse_plan(vae, grid), torch.zeros(1, 4, 16, 16, device=META), Watched()
        decoder = CapturedDecoder(vae, (16, 16))
        for watched.on in (False, True):
            with watched:
                done, kept = decoder.decode(latents, plan, grid, boxes(grid), moved)
    assert len(done) >= 1 and kept.features.maps.keys() == maps.maps.keys()
    assert watched.count > 100 and watched.seen == []
