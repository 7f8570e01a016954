"""Edits through captured graphs, by the CPU's stand-in: the same as eager ones, whatever an editor is asked for."""

from __future__ import annotations

import json
from functools import partial
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from fisedit import Cancelled, Editor
from fisedit.adapters.row_column.checkpoints import save_adapter
from fisedit.costs.model import Costs
from fisedit.costs.schedules import two_phase_dilation
from fisedit.decoder import tiles as boxing
from fisedit.errors import InputError, MaskError, NumericsError
from fisedit.machine import hardware as machine
from fisedit.masking import drift_check
from fisedit.values import EditMask, MaskSource
from tests.support.adapters import lively
from tests.support.edits import BIRD, CAT, DOG, pixels_outside
from tests.support.graph_edits import both, captured, check_alike, check_stories
from tests.support.grids import grids
from tests.support.lora import Lora
from tests.support.pipelines import SCHEDULERS, build_pipeline

SQUARE, BLOBS, CORNER = (grids(16, 16)[name] for name in ("square", "blobs", "corner"))
STEPS = 6
QUICK = {"seed": 7, "num_inference_steps": STEPS, "guidance_scale": 4.0}


@pytest.fixture(autouse=True)
def _alike(monkeypatch):
    """Boxes and rectangles see as much of the frame, so that decodes of both kinds are the same; and nobody runs dense
    steps in between, which are not captured."""
    dilations = Costs.choose_dilations
    monkeypatch.setattr(
        Costs,
        "choose_dilations",
        lambda costs, grid, start=0, **_: dilations(costs, grid, start, plain=True),
    )
    monkeypatch.setattr(boxing, "HALO", 512)
    monkeypatch.setattr(boxing, "DENSE_SHARE", float("inf"))
    monkeypatch.setattr(boxing, "DENSE_CELLS", 0)


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_edit_by_every_sampler(pipelines, scheduler, guidance):
    """Three cells of growth in the first steps, then one: two graphs."""

    def script(editor):
        editor.generate(CAT, scheduler=scheduler, **(QUICK | {"guidance_scale": guidance}))
        return editor.edit(DOG, mask=SQUARE, growth=two_phase_dilation(3, 1, STEPS))

    editors, (_, result) = both(pipelines["sd15"], script)
    check_alike(editors)
    assert len(set(result.run.growth)) == 2
    assert result.stats.unet_evaluations_sparse == result.stats.unet_evaluations_captured == STEPS
    assert result.stats.uncaptured == "" and captured(editors[0]) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["sd2", "shallow", "demo"])
def test_an_edit_of_every_model_and_frame(pipelines, shape):
    def script(editor):
        editor.generate(CAT, height=104, width=136, **QUICK)
        editor.edit(DOG, mask=grids(13, 17)["square"], growth=(2, 2, 1, 1, 0, 1))

    editors, _ = both(pipelines[shape], script)
    check_alike(editors)
    assert captured(editors[1]) == [0, STEPS]


@pytest.mark.slow
def test_a_chain_with_undo_and_branches(pipelines):
    """Edits on edits read overlays over overlays."""

    def script(editor):
        editor.generate(CAT, **QUICK)
        first = editor.edit(DOG, mask=SQUARE)
        editor.edit(BIRD, mask=BLOBS, growth=(1, 1, 1, 0, 0, 0))
        editor.edit(CAT, mask=CORNER, growth=(2, 2, 2, 1, 1, 1))
        editor.undo(), editor.undo(), editor.redo()
        editor.edit(DOG, mask=CORNER, growth=1)
        editor.checkout(first.id)
        editor.edit(BIRD, mask=CORNER)

    editors, _ = both(pipelines["sd15"], script)
    check_alike(editors)
    assert captured(editors[1]) == [0, *[STEPS] * 5]


WISHES = {
    "verified": {},
    "not verified": {"verify": False},
    "grown": {"grow": 1},
    "late": {"strength": 0.5},
    "last step alone": {"strength": 0.2},
    "one growth": {"growth": 1},
    "no growth": {"growth": 0},
}


def found(monkeypatch, grid):
    """Words say this, and are checked in mid-edit."""
    mask = EditMask(grid, MaskSource.ATTENTION)
    monkeypatch.setattr("fisedit.masking.edit_scope.predict_mask", lambda *_: mask)


QUICK_WISHES = ("verified", "grown", "last step alone", "no growth")


@pytest.mark.parametrize(
    "wish", [pytest.param(wish, marks=[pytest.mark.slow] * (wish not in QUICK_WISHES)) for wish in WISHES]
)
def test_every_wish(pipelines, monkeypatch, wish):
    found(monkeypatch, SQUARE)
    monkeypatch.setattr(drift_check, "MAX_DRIFT_RATIO", float("inf"))
    monkeypatch.setattr(drift_check, "GLOBAL_CHANGE_RATIO", float("inf"))

    def script(editor):
        editor.generate(CAT, **QUICK)
        return editor.edit(DOG, **WISHES[wish])

    editors, (_, result) = both(pipelines["sd15"], script)
    check_alike(editors)
    assert result.stats.unet_evaluations_captured == result.stats.unet_evaluations_sparse == STEPS - result.run.start
    assert result.run.checked is (wish not in ("not verified", "last step alone"))


@pytest.mark.parametrize("structure", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_steps_that_inject_attention_are_captured(pipelines, structure):
    def script(editor):
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE, structure=structure)
        return editor.edit(BIRD, mask=BLOBS, growth=1, structure=structure)

    editors, (_, result) = both(pipelines["sd15"], script)
    check_alike(editors)
    assert captured(editors[1]) == [0, STEPS, STEPS] and result.stats.uncaptured == ""
    plain = Editor(pipelines["sd15"], graphs=True)
    plain.generate(CAT, **QUICK)
    plain.edit(DOG, mask=SQUARE)
    first = [editor.history[1].image.tobytes() for editor in (editors[1], plain)]
    assert first[0] != first[1]


def test_a_leak_in_mid_edit_grows_the_mask(pipelines, monkeypatch):
    seen, look = [], drift_check.DriftCheck.compare
    found(monkeypatch, SQUARE)
    monkeypatch.setattr(drift_check, "MAX_DRIFT_RATIO", 0.0)
    monkeypatch.setattr(drift_check, "GLOBAL_CHANGE_RATIO", float("inf"))
    monkeypatch.setattr(drift_check.DriftCheck, "compare", lambda *args: (seen.append(args[1]), look(*args)))

    def script(editor):
        editor.generate(CAT, **QUICK)
        return editor.edit(DOG)

    editors, (_, result) = both(pipelines["sd15"], script)
    check_alike(editors)
    assert any("the mask was grown" in note for note in result.stats.notes)
    assert result.mask.grid.sum() > SQUARE.sum() and result.stats.unet_evaluations_captured == STEPS
    assert len(seen) == 2 and np.allclose(*seen, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_on_step_sees_previews_and_may_cancel(pipelines):
    def script(editor):
        seen = []
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE, on_step=lambda *step: seen.append(step))

        def cancel(i, *_):
            if i == 3:
                raise Cancelled("enough")

        with pytest.raises(Cancelled):
            editor.edit(BIRD, mask=SQUARE, on_step=cancel)
        editor.edit(BIRD, mask=SQUARE)
        return seen

    editors, (expected, got) = both(pipelines["sd15"], script)
    check_alike(editors)
    assert [step[:2] for step in got] == [(i, STEPS) for i in range(STEPS)]
    for theirs, mine in zip(expected, got, strict=True):
        assert np.abs(np.asarray(theirs[2], int) - np.asarray(mine[2], int)).max() <= 1


@pytest.mark.slow
def test_what_was_dropped_is_rebuilt_and_features_wait_in_host_memory(pipelines):
    def script(editor):
        editor.generate(CAT, **QUICK)
        first = editor.edit(DOG, mask=SQUARE)
        editor.edit(BIRD, mask=BLOBS, growth=1)
        editor.forget()
        editor.checkout(first.id)
        return editor.edit(CAT, mask=CORNER)

    editors, (_, result) = both(pipelines["sd15"], script, max_recorded_bytes=1000)
    check_alike(editors)
    assert result.stats.notes and result.stats.unet_evaluations_captured == STEPS
    rich = Editor(pipelines["sd15"], graphs=True)
    assert script(rich).image.tobytes() == result.image.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("inversion", ["ddim", "ddpm"])
def test_edits_of_an_opened_picture(pipelines, inversion):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (140, 120, 3), np.uint8))
    mask = Image.new("L", picture.size)
    mask.paste(255, (30, 40, 70, 90))

    def script(editor):
        editor.open(picture, CAT, inversion=inversion, num_inference_steps=STEPS, guidance_scale=2)
        return editor.edit(DOG, mask=mask)

    editors, (_, result) = both(pipelines["sd15"], script)
    check_alike(editors)
    assert result.stats.unet_evaluations_captured == STEPS


@pytest.mark.slow
def test_a_saved_session_goes_on(pipelines, tmp_path):
    def script(editor):
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE)
        editor.save(tmp_path / str(editor._engine.graphs.enabled))
        editor.load(tmp_path / str(editor._engine.graphs.enabled))
        return editor.edit(BIRD, mask=BLOBS, growth=1)

    editors, _ = both(pipelines["sd15"], script, model="tiny")
    check_alike(editors)
    assert captured(editors[1]) == [0, STEPS, STEPS]


def unusual(unet):
    unet.mid_block.resnets[1].output_scale_factor = 2.0


def injected(unet):
    unet.forward = partial(type(unet).forward, unet)


def hooked(unet):
    unet.register_forward_pre_hook(lambda *_: None)


class Mine:
    """An attention processor of the user's own."""

    def __call__(self, *args, **kwargs):
        from diffusers.models.attention_processor import AttnProcessor2_0

        return AttnProcessor2_0()(*args, **kwargs)


def processed(unet):
    unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(Mine())


REFUSED = {
    unusual: "the UNet's block mid_block.resnets.1 is unusual and cannot be captured; it runs eagerly",
    injected: "the UNet was injected; it runs eagerly",
    hooked: "the UNet has a hook; it runs eagerly",
    processed: "attn1.processor is a Mine and cannot be captured; it runs eagerly",
}


@pytest.mark.parametrize(
    "change", [unusual, *(pytest.param(change, marks=pytest.mark.slow) for change in (injected, hooked, processed))]
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(change):
    pipe = build_pipeline("sd15")
    change(pipe.unet)

    def script(editor):
        editor.generate(CAT, **QUICK)
        return editor.edit(DOG, mask=SQUARE)

    editors, (expected, got) = both(pipe, script)
    check_alike(editors)  # their decodes are captured, which rounds differently
    assert got.stats.unet_evaluations_captured == 0 and got.stats.unet_evaluations_sparse == STEPS
    assert got.stats.uncaptured.endswith(REFUSED[change])
    assert expected.stats.uncaptured == ""


@pytest.mark.slow
def test_a_new_mask_of_the_bucket_makes_no_new_capture(pipelines):
    """Neither does another prompt, nor an edit of an edit."""
    editor = Editor(pipelines["sd15"], graphs=True)
    source = editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, growth=1)
    graphs = editor._engine.graphs.executor_for(editor._engine.executor).graphs
    made, slots = graphs.misses, [id(slot.buffers) for slot in graphs._kept.values()]
    for shift in ((1, 0), (2, 3), (-2, 1)):
        editor.checkout(source.id)
        editor.edit(BIRD, mask=np.roll(SQUARE, shift, (0, 1)), growth=1)
        editor.edit(DOG, mask=SQUARE, growth=1)
    assert graphs.misses == made == 1
    assert [id(slot.buffers) for slot in graphs._kept.values()] == slots


@pytest.mark.slow
def test_a_unet_that_was_changed_gets_graphs_of_its_own():
    """Packed weights are copies: what is written later must be seen."""
    pipe = build_pipeline("sd15")

    def script(editor):
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE)
        with torch.no_grad():
            pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_k.weight.mul_(1.5)
            pipe.unet.down_blocks[1].resnets[0].time_emb_proj.weight.mul_(0.5)
        editor.edit(BIRD, mask=BLOBS, growth=1)

    weights = {name: value.clone() for name, value in pipe.unet.state_dict().items()}
    layers = Editor(pipe, graphs=False)
    script(layers)
    pipe.unet.load_state_dict(weights)
    graphs = Editor(pipe, graphs=True)
    script(graphs)
    check_alike((layers, graphs))
    assert captured(graphs) == [0, STEPS, STEPS]


@pytest.mark.slow
def test_a_reference_adapter_runs_eagerly(tmp_path):
    pipe = build_pipeline("demo")
    save_adapter(lively(pipe.unet, "v3"), tmp_path / "adapter")

    def script(editor):
        editor.load_adapter(tmp_path / "adapter", 0.5)
        editor.generate(CAT, **QUICK)
        look = Image.fromarray(np.random.default_rng(1).integers(0, 256, (128, 128, 3), np.uint8))
        editor.edit(DOG, mask=SQUARE, growth=1, reference=look)
        editor.undo()
        return editor.edit(DOG, mask=SQUARE, growth=1)

    editors, _ = both(pipe, script)
    check_alike(editors)
    assert captured(editors[1]) == [0, 0, STEPS]
    assert editors[1].history[1].stats.uncaptured == "a reference adapter is at work; it runs eagerly"


def test_a_lora_is_captured_and_so_is_what_follows_it(tmp_path):
    pytest.importorskip("peft", reason="the package peft is not installed")
    pipe = build_pipeline("demo")
    file = Lora(pipe).kohya(tmp_path / "style.safetensors")

    def script(editor):
        name = editor.load_lora(file, 0.5)
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE, growth=1)
        editor.unload_lora(name)
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE, growth=1)

    editors, _ = both(pipe, script)
    check_alike(editors)
    assert captured(editors[1]) == [0, STEPS, 0, STEPS]


@pytest.mark.slow
def test_editors_beside_one_another_share_graphs_and_take_turns_in_threads(pipelines):
    first = Editor(pipelines["shallow"], graphs=True)
    first.generate(CAT, **QUICK)
    expected = [first.edit(prompt, mask=SQUARE) for prompt in (DOG, BIRD)]
    results, made = {}, first._engine.graphs.executor_for(first._engine.executor).graphs.misses
    assert made > 0

    def work(name):
        editor = first.beside()
        editor.generate(CAT, **QUICK)
        results[name] = [editor.edit(prompt, mask=SQUARE) for prompt in (DOG, BIRD)]

    threads = [Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2]
    for edits in results.values():
        assert all(e.image.tobytes() == x.image.tobytes() for e, x in zip(edits, expected, strict=True))
        assert all(e.stats.unet_evaluations_captured == STEPS for e in edits)
    assert first._engine.graphs.executor_for(first._engine.executor).graphs.misses == made


def test_nan_is_found_at_the_end_and_nothing_is_kept(pipelines, monkeypatch):
    editor = Editor(pipelines["shallow"], graphs=True)
    source = editor.generate(CAT, **QUICK)
    unet = editor.pipe.unet
    monkeypatch.setattr(unet, "forward", partial(type(unet).forward, unet), raising=False)  # injected: eager
    assert "was injected" in editor.edit(DOG, mask=SQUARE).stats.uncaptured
    monkeypatch.undo()
    editor.checkout(source.id)
    assert editor.edit(DOG, mask=SQUARE).stats.unet_evaluations_captured == STEPS  # its graphs are verified now
    editor.checkout(source.id)
    monkeypatch.setattr("fisedit.runners.stepping.ops.composite", lambda base, *_: base * float("nan"))
    with pytest.raises(NumericsError, match="NaN or infinite at timestep"):
        editor.edit(BIRD, mask=SQUARE)
    assert len(editor.history) == 3 and editor.current is source


def wrong(base, *_):
    return base


def nan(base, *_):
    return base * float("nan")


def broken(*_):
    raise RuntimeError("the driver says no\nin detail")


@pytest.mark.parametrize("kernel", [wrong, pytest.param(nan, marks=pytest.mark.slow), broken])
def test_a_graph_that_fails_or_differs_is_given_up_and_the_edit_runs_eagerly(pipelines, monkeypatch, kernel):
    def script(editor):
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE, growth=2)
        return editor.edit(BIRD, mask=BLOBS, growth=1)

    eager = script(Editor(pipelines["shallow"], graphs=False))
    monkeypatch.setattr("fisedit.runners.stepping.ops.composite", kernel)
    editor = Editor(pipelines["shallow"], graphs=True)
    with pytest.warns(RuntimeWarning, match="a captured graph was given up") as warned:
        result = script(editor)
    assert len(warned) == 1 and captured(editor) == [0, 0, 0]
    levels = np.asarray(result.image, int) - np.asarray(eager.image, int)
    assert abs(levels).max() <= 1  # decoders are captured all the same
    told = "it failed (the driver says no); it runs eagerly" if kernel is broken else "its first replay differs"
    assert all(told in edited.stats.uncaptured for edited in list(editor.history)[1:])


def test_several_edits_whose_graph_differs_run_eagerly(pipelines, monkeypatch):
    monkeypatch.setattr("fisedit.runners.stepping.ops.composite", wrong)
    editor = Editor(pipelines["shallow"], graphs=True)
    source = editor.generate(CAT, **QUICK)
    with pytest.warns(RuntimeWarning, match="its first replay differs"):
        results = editor.edit_many([DOG, BIRD], [SQUARE, CORNER], growth=1)
    for result, mask in zip(results, (SQUARE, CORNER), strict=True):
        editor.checkout(source.id)
        alone = editor.edit(result.prompt, mask=mask, growth=1)
        assert np.abs(np.asarray(alone.image, int) - np.asarray(result.image, int)).max() <= 1
        assert "its first replay differs" in result.stats.uncaptured


def test_on_a_cpu_nobody_asked_for_graphs(pipelines):
    editor = Editor(pipelines["shallow"])
    editor.generate(CAT, **QUICK)
    stats = editor.edit(DOG, mask=SQUARE).stats
    assert (stats.unet_evaluations_captured, stats.uncaptured) == (0, "")


def test_the_environment_says_whether(pipelines, monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for said, expected in (("", (False, True)), ("0", (False, False)), ("1", (True, True))):
        monkeypatch.setenv("FISEDIT_GRAPHS", said)
        graphs = Editor(pipelines["shallow"])._engine.graphs
        assert (graphs.is_enabled(cpu), graphs.is_enabled(cuda)) == expected
        assert not Editor(pipelines["shallow"], graphs=False)._engine.graphs.is_enabled(cuda)
    monkeypatch.setenv("FISEDIT_GRAPHS", "yes")
    with pytest.raises(InputError, match="FISEDIT_GRAPHS must be 0 or 1, got 'yes'"):
        Editor(pipelines["shallow"])


@pytest.mark.slow
def test_the_command_line_through_graphs(fisedit, model, monkeypatch):
    monkeypatch.setenv("FISEDIT_GRAPHS", "1")
    edit = ["edit", "--model", model, "--source-prompt", CAT, "--prompt", DOG, "--num-inference-steps", STEPS]
    EditMask(SQUARE, MaskSource.GIVEN).image().save("mask.png")
    told = json.loads(fisedit(*edit, "--mask", "mask.png", "--output", "dog.png", "--json").out)
    assert told["stats"]["unet_evaluations_captured"] == STEPS and told["stats"]["uncaptured"] == ""


def test_features_may_take_half_of_what_is_free_beyond_a_steps_work_where_they_lie(pipelines, monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: machine.WORKING_BYTES + 1000)
    assert Editor(pipelines["shallow"]).max_recorded_bytes == 500
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (140, 200))
    assert machine.free_bytes(torch.device("cuda")) == 140
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=140))


MANY = [(DOG, SQUARE), (BIRD, CORNER), (CAT, SQUARE), (DOG, grids(16, 16)["one_cell"]), (BIRD, np.ones((16, 16), bool))]


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("scheduler", ["ddim", "dpmsolver++", "euler_a"])
@pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
def test_several_edits_in_one_batch_are_each_as_alone(pipelines, scheduler, guidance):
    """Among them one that says nothing new, and one that is better dense."""
    editor = Editor(pipelines["sd15"], graphs=True)
    source = editor.generate(CAT, scheduler=scheduler, **(QUICK | {"guidance_scale": guidance}))
    results = editor.edit_many(*zip(*MANY, strict=True), growth=(2, 2, 1, 1, 1, 0))
    assert editor.current is source and [result.parent for result in results] == [source.id] * len(MANY)
    assert [r.stats.unet_evaluations_captured for r in results] == [STEPS, STEPS, 0, STEPS, 0]
    alone = Editor(pipelines["sd15"], graphs=False)
    base = alone.generate(CAT, scheduler=scheduler, **(QUICK | {"guidance_scale": guidance}))
    for (prompt, mask), got in zip(MANY, results, strict=True):
        alone.checkout(base.id)
        expected = alone.edit(prompt, mask=mask, growth=(2, 2, 1, 1, 1, 0), verify=False)
        assert np.abs(np.asarray(expected.image, int) - np.asarray(got.image, int)).max() <= 1
        assert expected.mask.source is got.mask.source and pixels_outside(got, source)
        if got.stats.unet_evaluations_captured:
            trajectories = [e._trajectory_cache.get(r.id)[0] for e, r in ((alone, expected), (editor, got))]
            check_stories(*trajectories)
    for e in (editor, alone):  # an edit over one of them
        e.checkout(e.history[2].id)
        e.edit(CAT, mask=BLOBS, growth=0)
    check_stories(*(e._trajectory_cache.get(e.current.id)[0] for e in (alone, editor)))


def test_several_edits_share_memory_and_count_it_once(pipelines):
    editor = Editor(pipelines["sd15"], graphs=True)
    editor.generate(CAT, **QUICK)
    before = editor.recorded_bytes
    editor.edit_many([DOG] * 4, [SQUARE] * 4, growth=1)
    together = editor.recorded_bytes - before
    editor.edit(DOG, mask=SQUARE, growth=1)
    one = editor.recorded_bytes - before - together
    assert 2 * one < together < 5 * one


def test_several_edits_without_graphs_run_one_after_another(pipelines):
    editor = Editor(pipelines["sd15"])
    source = editor.generate(CAT, **QUICK)
    results = editor.edit_many([DOG, BIRD], [SQUARE, CORNER], growth=1)
    assert editor.current is source and len(editor.history) == 3
    for result, mask in zip(results, (SQUARE, CORNER), strict=True):
        editor.checkout(source.id)
        assert editor.edit(result.prompt, mask=mask, growth=1).image.tobytes() == result.image.tobytes()


def test_several_edits_need_as_many_masks(pipelines):
    editor = Editor(pipelines["sd15"])
    source = editor.generate(CAT, **QUICK)
    with pytest.raises(InputError, match="masks must be as many as prompts, 2, got 1"):
        editor.edit_many([DOG, BIRD], [SQUARE])
    with pytest.raises(MaskError):
        editor.edit_many([DOG, BIRD], [SQUARE, np.ones((3, 3), bool)])
    assert editor.current is source and len(editor.history) == 1


def test_a_batch_that_is_cancelled_leaves_nothing(pipelines):
    editor = Editor(pipelines["sd15"], graphs=True)
    source = editor.generate(CAT, **QUICK)

    def cancel(i, *_):
        if i == 2:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        editor.edit_many([DOG, BIRD], [SQUARE, CORNER], growth=1, on_step=cancel)
    assert editor.current is source and len(editor.history) == 1
