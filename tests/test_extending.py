"""CONTRIBUTING's code for each thing that may be added runs as it stands there, and takes part in pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from PIL import Image

from fisedit import Editor
from fisedit.cli import app
from fisedit.machine.model import Model
from fisedit.sampling import step_runners
from fisedit.sampling.engine import Engine
from fisedit.sampling.scheduler import SCHEDULERS
from fisedit.sampling.step import DenoisingState, denoise
from fisedit.sampling.trajectory import Trajectory
from fisedit.sparse_kernels import ops
from fisedit.values import AdapterUse, SchedulerName
from tests.support import oracle
from tests.support.documents import ROOT, blocks
from tests.support.edits import CAT, DOG, config_of, same, unwatched
from tests.support.grids import grids
from tests.support.references import BLUE

SQUARE = grids(16, 16)["square"]
QUICK = {"seed": 7, "num_inference_steps": 3, "width": 128, "height": 128}


@pytest.fixture
def toy(monkeypatch):
    """Run the block of CONTRIBUTING that defines a name; return that."""
    monkeypatch.setattr(ops, "BACKENDS", dict(ops.BACKENDS))
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))
    tables = [(table, dict(table)) for table in (SCHEDULERS, SchedulerName._value2member_map_)]
    texts = blocks("python", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))

    def run(name: str) -> object:
        (text,) = [text for text in texts if name in text]
        scope: dict[str, object] = {"__name__": "toy"}
        exec(compile(text, "CONTRIBUTING.md", "exec", dont_inherit=True), scope)
        return scope.get(name)

    yield run
    for table, before in tables:
        table.clear()
        table.update(before)


def drawn(pipe, scheduler="ddim"):
    return Editor(pipe, model="demo").generate(CAT, scheduler=scheduler, **QUICK)


def test_a_sampler(toy, pipelines):
    member = str.__new__(SchedulerName, "toy")  # as the enumeration's new line makes it
    member._name_, member._value_ = "TOY", "toy"
    SchedulerName._value2member_map_["toy"] = member
    toy("SCHEDULERS")
    assert SCHEDULERS[member][0] is DDPMScheduler
    pipe = pipelines["demo"]
    parts = pipe.components | {"scheduler": DDPMScheduler.from_config(pipe.scheduler.config)}
    own = StableDiffusionPipeline(**parts, requires_safety_checker=False)
    own.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    expected = own(CAT, num_inference_steps=3, generator=generator, height=128, width=128).images[0]
    assert np.array_equal(np.asarray(drawn(pipe, "toy").image), np.asarray(expected))


def test_a_kernel(toy, pipelines):
    plain = edited(pipelines["demo"])
    toy("def norm_geglu")
    calls, module = [], ops.BACKENDS["toy"]
    own = module.norm_geglu
    module.norm_geglu = lambda *given: (calls.append(1), own(*given))[1]
    with ops.use("toy"):
        found = edited(pipelines["demo"])
    assert calls and np.abs(np.asarray(found, np.int16) - np.asarray(plain, np.int16)).max() <= 1


def edited(pipe):
    editor = Editor(pipe, model="demo")
    editor.generate(CAT, **QUICK)
    return editor.edit(DOG, mask=SQUARE, growth=1).image


def test_an_adapter(toy, pipelines):
    editor = Editor(pipelines["demo"], model="demo")
    plain = editor.generate(CAT, **QUICK)
    reader = toy("BrightnessReader")("0123456789abcdef")
    editor._engine.references.load(reader, "toy", AdapterUse(0.5))
    with_one, without = (editor.generate(CAT, reference=given, **QUICK) for given in (BLUE, None))
    assert not same(with_one, plain) and same(without, plain)
    edit = editor.checkout(with_one.id) and editor.edit(DOG, mask=SQUARE)
    assert edit.config.like == with_one.config.like


def test_a_kind_of_step_and_a_runner(toy, pipelines):
    engine, config = Engine(pipelines["demo"]), config_of(num_inference_steps=4)
    plain, calls = toy("Plain")(engine), []

    def counted(states):
        calls.append(states[0].i)
        return plain(states)

    def latents(runner):
        sampler = engine.sampler(config)
        state = DenoisingState(Trajectory(config, [sampler.latents]), sampler, engine.encode(config))
        denoise([state], runner, unwatched)
        return torch.cat(state.trajectory.latents)

    with torch.inference_mode():
        expected = latents(step_runners.UnrecordedRunner(engine))
        assert oracle.deviation(latents(plain), expected) <= 1e-5
        repeated = latents(toy("EverySecond")(counted))
    assert calls == [0, 2] and torch.equal(repeated[1], expected[1]) and not torch.equal(repeated, expected)


def test_a_model_family(toy, pipelines):
    family: Model = toy("Family")(pipelines["demo"])
    assert not isinstance(family, StableDiffusionPipeline)
    editor, own = (Editor(pipe, model="demo") for pipe in (family, pipelines["demo"]))
    sources = [each.generate(CAT, **QUICK) for each in (editor, own)]
    assert same(*sources) and same(*(each.edit(DOG) for each in (editor, own)))


def test_a_command(toy, fisedit, tmp_path):
    toy("def sides")
    Image.new("RGB", (40, 24)).save(tmp_path / "a.png")
    assert fisedit("sides", str(tmp_path / "a.png")).out == "40x24\n"
    assert "no-such.png" in fisedit("sides", "no-such.png").err
