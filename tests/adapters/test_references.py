"""Pictures that take a look from a reference, through the editor: as diffusers' pipeline with the adapter in it."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fisedit import Editor
from fisedit.adapters.base import inject_adapters
from fisedit.adapters.insertion_points import inject_maps
from fisedit.adapters.references import References
from fisedit.adapters.row_column.checkpoints import save_adapter
from fisedit.adapters.row_column.reader import ReferenceCondition
from fisedit.errors import AdapterError, InputError, MaskError, ModelError
from fisedit.values import AdapterUse, MaskSource
from tests.support import oracle
from tests.support.adapters import lively, naive
from tests.support.edits import CAT, DOG, Calls, pixels_outside
from tests.support.grids import grids
from tests.support.macs import counted
from tests.support.pipelines import build_pipeline
from tests.support.references import BLUE, RED, picture, pixels, seen

SQUARE = grids(16, 16)["square"]
QUICK = {"seed": 7, "num_inference_steps": 3}


@pytest.fixture
def pipe(pipelines):
    return pipelines["demo"]


@pytest.fixture
def adapter(pipe):
    return lively(pipe.unet, "v3")


@pytest.fixture
def editor(pipe, place):
    editor = Editor(pipe, model="demo")
    editor.load_adapter(place, 0.5)
    return editor


@pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
def test_a_guided_source_is_the_pipelines_own(pipe, adapter, editor, guidance):
    """E1: diffusers' pipeline, with the blocks written out where they belong."""
    maps = seen(pipe, RED, 2 if guidance > 1 else 1)
    changes = {
        name: lambda x, name=name, block=block: x + 0.5 * naive(block, x, maps[name])
        for name, block in adapter.blocks.items()
    }
    config = oracle.GenerationConfig(CAT, seed=7, steps=3, guidance=guidance)
    with inject_maps(pipe.unet, changes):
        dense = oracle.dense_generate(pipe, config)
    plain = oracle.dense_generate(pipe, config)
    result = editor.generate(CAT, reference=RED, guidance_scale=guidance, **QUICK)
    trajectory = editor._trajectory_cache.get(result.id)[0]
    assert oracle.deviation(torch.cat(trajectory.latents), dense.latents) <= 1e-4
    assert oracle.deviation(plain.latents, dense.latents) > 0.1
    assert np.abs(pixels(result).astype(int) - np.asarray(dense.image)).max() <= 1


def test_an_edit_of_everything_is_the_dense_one(pipe, adapter, editor):
    """E1: over a source that has another look."""
    editor.generate(CAT, reference=BLUE, **QUICK)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), reference=RED)
    with inject_adapters(pipe.unet, [ReferenceCondition(adapter, adapter.read(seen(pipe, RED)), 0.5)]):
        dense = oracle.dense_generate(pipe, oracle.GenerationConfig(DOG, seed=7, steps=3))
    assert oracle.deviation(torch.cat(editor._trajectory_cache.get(result.id)[0].latents), dense.latents) <= 1e-4


def test_an_edit_takes_the_look_inside_its_mask_alone(editor):
    source = editor.generate(CAT, **QUICK)
    results = [editor.checkout(source.id) and editor.edit(DOG, mask=SQUARE, reference=r) for r in (None, RED, BLUE)]
    assert all(pixels_outside(result, source) for result in results)
    assert not any(np.array_equal(pixels(a), pixels(b)) for a, b in pairwise(results))
    assert [len(result.config.like) for result in results] == [0, 1, 1]


@pytest.mark.parametrize("inversion", ["ddim", "ddpm"])
def test_an_opened_picture_takes_the_look_too(editor, inversion):
    source = editor.open(picture(3), CAT, inversion=inversion, num_inference_steps=3)
    results = [editor.checkout(source.id) and editor.edit(DOG, mask=SQUARE, reference=r) for r in (None, RED)]
    assert all(pixels_outside(result, source) for result in results)
    assert not np.array_equal(pixels(results[0]), pixels(results[1]))


@pytest.mark.parametrize("wish", [{"strength": 0.7}, {"structure": 1.0}, {"words": ["cat"]}, {"growth": 0}], ids=str)
def test_a_reference_goes_with_every_wish(editor, wish):
    """Where the words say where, too: with the look that notices leaks, and perhaps densely."""
    source = editor.generate(CAT, **QUICK)
    place = {} if "words" in wish else {"mask": SQUARE}
    results = [editor.checkout(source.id) and editor.edit(DOG, reference=r, **place, **wish) for r in (None, RED)]
    assert all(pixels_outside(result, source) for result in results)
    assert not np.array_equal(pixels(results[0]), pixels(results[1]))


def test_adapters_go_where_the_model_goes(place):
    """Before the first picture, and after it."""
    pipe = build_pipeline("demo")
    editor = Editor(pipe, model="demo")
    editor.load_adapter(place, 0.5)
    for dtype in (torch.bfloat16, torch.float32):
        pipe.to(dtype)
        source = editor.generate(CAT, **QUICK)
        result = editor.edit(DOG, mask=SQUARE, reference=RED)
        assert pixels_outside(result, source)


def test_a_reference_is_read_once(pipe, editor):
    editor.generate(CAT, **QUICK)
    for prompt, reads in ((DOG, 1), (CAT, 0)):
        with Calls(pipe.unet) as calls:
            editor.edit(prompt, mask=SQUARE, reference=RED.copy())
        assert (calls.dense, calls.sparse) == (reads, 3)


def test_an_edits_reference_is_its_own_and_a_sources_stays(editor):
    source = editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, reference=RED)
    assert editor.edit(CAT, mask=SQUARE).config.like == ()
    guided_source = editor.generate(CAT, reference=RED, **QUICK)
    edit = editor.edit(DOG, mask=SQUARE)
    assert edit.config.like == guided_source.config.like != ()
    assert not np.array_equal(pixels(source), pixels(guided_source))


def test_the_same_words_may_take_another_look(editor):
    source = editor.generate(CAT, **QUICK)
    assert editor.edit(CAT, reference=RED).mask.source is MaskSource.NOWHERE  # nobody said where
    editor.checkout(source.id)
    edit = editor.edit(CAT, mask=SQUARE, reference=RED)
    assert pixels_outside(edit, source) and not np.array_equal(pixels(edit), pixels(source))


def test_a_dense_run_has_the_results_own_adapter(editor):
    source = editor.generate(CAT, reference=RED, **QUICK)
    assert np.array_equal(np.asarray(editor.dense(source.id)[0]), pixels(source))
    editor.unload_adapter()
    with pytest.raises(AdapterError, match=r"was made with the adapter .*, which is not loaded; load it"):
        editor.dense(source.id)


def test_several_adapters_add_up(pipe, editor, tmp_path):
    source = editor.generate(CAT, **QUICK)
    one = editor.edit(DOG, mask=SQUARE, reference=RED)
    save_adapter(lively(pipe.unet, "v5", "other"), tmp_path / "other.safetensors")
    editor.load_adapter(tmp_path / "other.safetensors", -0.3)
    editor.checkout(source.id)
    both = editor.edit(DOG, mask=SQUARE, reference=RED)
    assert [like.use.scale for like in both.config.like] == [0.5, -0.3]
    assert not np.array_equal(pixels(one), pixels(both))
    editor.unload_adapter(tmp_path / "other.safetensors")
    editor.checkout(source.id)
    assert np.array_equal(pixels(editor.edit(DOG, mask=SQUARE, reference=RED)), pixels(one))


def test_a_picture_that_no_result_names_any_more_is_let_go(editor):
    references = editor._engine.references
    editor.generate(CAT, **QUICK)
    edited = editor.edit(DOG, mask=SQUARE, reference=RED)
    with pytest.raises(MaskError):
        editor.edit(CAT, mask=np.ones((3, 3), bool), reference=BLUE)
    assert {like.reference for like in edited.config.like} == references.pictures.keys()
    assert len(references._kept) == 1
    editor.preview(CAT, mask=SQUARE, reference=BLUE)
    editor.delete(edited.id)
    assert not references.pictures and not references._kept


def test_a_picture_stays_while_it_is_read(editor):
    """Whatever is deleted in the meantime; afterwards the result names it."""
    editor.generate(CAT, **QUICK)
    other = editor.edit(DOG, mask=SQUARE, reference=BLUE)
    editor.undo()
    wanted = editor.beside()
    wanted.generate(CAT, **QUICK)
    told = [lambda: editor.delete(other.id), editor._engine.references._kept.clear]
    ours = editor.edit(DOG, mask=SQUARE, reference=RED, on_step=lambda *_: told and told.pop(0)())
    assert np.array_equal(pixels(ours), pixels(wanted.edit(DOG, mask=SQUARE, reference=RED)))
    assert {like.reference for like in ours.config.like} == editor._engine.references.pictures.keys()


def test_a_picture_of_another_session_is_let_go(editor, tmp_path):
    editor.generate(CAT, **QUICK)
    editor.save(tmp_path / "session")
    editor.generate(CAT, reference=RED, **QUICK)
    editor.load(tmp_path / "session")
    assert not editor._engine.references.pictures


def test_an_unloaded_adapter_leaves_no_trace(pipe, editor):
    editor.generate(CAT, reference=RED, **QUICK)
    editor.unload_adapter()
    plain, own = Editor(pipe).generate(CAT, **QUICK), editor.generate(CAT, **QUICK)
    assert np.array_equal(pixels(plain), pixels(own))


def test_an_adapter_that_rests_in_all_steps_that_run_is_told(editor, place):
    editor.unload_adapter()
    editor.load_adapter(place, control_guidance_end=0.4)
    editor.generate(CAT, **QUICK)
    late = editor.edit(DOG, mask=SQUARE, reference=RED, strength=0.4)
    assert any("takes part in none of the steps that run, from step 2 on" in note for note in late.stats.notes)
    editor.undo()
    assert not any("none of the steps" in note for note in editor.edit(DOG, mask=SQUARE, reference=RED).stats.notes)


def test_a_source_whose_adapter_is_gone_is_edited_without(editor):
    source = editor.generate(CAT, reference=RED, **QUICK)
    (adapter,) = {like.adapter for like in source.config.like}
    editor.unload_adapter()
    note = f"made without the adapter {adapter} of the edited picture, which is not loaded now"
    assert note in editor.preview(DOG, mask=SQUARE).notes
    edit = editor.edit(DOG, mask=SQUARE)
    assert edit.config.like == () and pixels_outside(edit, source)
    editor.forget()
    with pytest.raises(AdapterError, match="is not loaded; load it"):
        editor.edit(CAT, mask=SQUARE)


@pytest.mark.parametrize("reference", [None, RED], ids=["plain source", "guided source"])
def test_what_was_dropped_is_rebuilt(editor, reference):
    editor.generate(CAT, reference=reference, **QUICK)
    first = editor.edit(DOG, mask=SQUARE, reference=BLUE)
    once = editor.edit(CAT, mask=grids(16, 16)["corner"], reference=RED)
    editor.checkout(first.id)
    editor.forget()
    again = editor.edit(CAT, mask=grids(16, 16)["corner"], reference=RED)
    assert np.array_equal(pixels(once), pixels(again))
    assert any("rebuilt" in note for note in again.stats.notes)


@pytest.mark.slow
@pytest.mark.parametrize("reference", [None, RED], ids=["plain source", "guided source"])
def test_an_edit_costs_what_torch_counts(pipe, editor, reference):
    """Its steps, its decode and, the first time, reading its reference; the time embedding aside."""
    source = editor.generate(CAT, reference=reference, **QUICK)
    linears = [m for n, m in pipe.unet.named_modules() if "time_emb" in n and isinstance(m, torch.nn.Linear)]
    up = [m for n, m in pipe.unet.named_modules() if n.startswith("up_blocks.2") and "time_emb" in n and m in linears]
    time = 2 * sum(linear.weight.numel() for linear in linears)
    for reads in (1, 0):
        editor.checkout(source.id)
        made = []
        torchs = counted(lambda made=made: made.append(editor.edit(DOG, mask=SQUARE, reference=BLUE)))
        ours = made[0].stats.macs + 3 * time + reads * (time - 2 * sum(m.weight.numel() for m in up))
        outside_taps = torchs - ours - encoding(pipe) * reads - text(pipe) * (1 + reads / 2)
        assert outside_taps == 0


def encoding(pipe):
    return counted(lambda: pipe.vae.encode(torch.zeros(1, 3, 128, 128)))


def text(pipe):
    """Of encoding both prompts of an edit."""
    return counted(lambda: pipe.text_encoder(torch.zeros(2, 77, dtype=torch.long)))


def test_a_preview_tells_the_cost(editor):
    editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, reference=RED)
    editor.undo()
    seen = editor.preview(DOG, mask=SQUARE, reference=RED)
    assert seen.macs == editor.edit(DOG, mask=SQUARE, reference=RED).stats.macs
    editor.undo()
    assert seen.macs > editor.preview(DOG, mask=SQUARE).macs


def test_a_session_keeps_adapters_and_references(editor, place, tmp_path, monkeypatch):
    editor.generate(CAT, reference=RED, **QUICK)
    first = editor.edit(DOG, mask=SQUARE, reference=BLUE)
    editor.save(tmp_path / "session")
    pipe = editor.pipe
    monkeypatch.setattr(Editor, "from_pretrained", classmethod(lambda cls, model, **_: cls(pipe, model=model)))
    resumed = Editor.resume(tmp_path / "session")
    assert resumed.current.config == first.config
    corner = grids(16, 16)["corner"]
    assert np.array_equal(pixels(resumed.edit(CAT, mask=corner)), pixels(editor.edit(CAT, mask=corner)))


def test_a_picture_that_took_anothers_look_cannot_be_made_of_words(editor, tmp_path):
    editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, reference=RED)
    editor.write(tmp_path / "dog.png")
    with Image.open(tmp_path / "dog.png") as made, pytest.raises(InputError, match="was made with an adapter"):
        Editor.remake(made)


def test_editors_beside_one_another_share_adapters(editor):
    other = editor.beside()
    assert np.array_equal(
        pixels(editor.generate(CAT, reference=RED, **QUICK)), pixels(other.generate(CAT, reference=RED, **QUICK))
    )


@pytest.mark.parametrize("reference", ["red.png", np.zeros((8, 8, 3)), b"", 7], ids=type)
def test_a_reference_must_be_a_picture(editor, reference):
    editor.generate(CAT, **QUICK)
    with pytest.raises(InputError, match="reference must be a PIL image, got"):
        editor.edit(DOG, mask=SQUARE, reference=reference)
    with pytest.raises(InputError, match="reference must be a PIL image, got"):
        editor.generate(DOG, reference=reference)
    assert len(editor.history) == 1


def test_a_reference_needs_an_adapter(pipe):
    with pytest.raises(AdapterError, match="call load_adapter first"):
        Editor(pipe).generate(CAT, reference=RED, **QUICK)


def test_loading_and_unloading_twice_are_errors(editor, place):
    with pytest.raises(AdapterError, match="is loaded already"):
        editor.load_adapter(place)
    editor.unload_adapter(place)
    with pytest.raises(AdapterError, match="no adapter"):
        editor.unload_adapter(place)
    editor.load_adapter(place)


@pytest.mark.parametrize("scale", [float("nan"), 11, "much", True])
def test_a_scale_is_a_number(pipe, place, scale):
    with pytest.raises(InputError, match="scale must be a number in"):
        Editor(pipe).load_adapter(place, scale)


def test_an_adapter_of_another_model_is_refused(pipelines, place):
    with pytest.raises(AdapterError, match="UNet of 4 levels, got one for 3"):
        Editor(pipelines["sd15"]).load_adapter(place)


def test_old_families_end_at_512_pixels(pipe, editor, tmp_path):
    wide = {"width": 520, "height": 64, "num_inference_steps": 1}
    with pytest.raises(InputError, match="up to 512 pixels a side"):
        editor.generate(CAT, reference=RED, **wide)
    editor.unload_adapter()
    save_adapter(lively(pipe.unet, "v5"), tmp_path / "v5")
    editor.load_adapter(tmp_path / "v5")
    assert editor.generate(CAT, reference=RED, **wide).image.size == (520, 64)


def test_a_reference_of_any_size_and_mode(editor):
    """It is seen at the picture's size."""
    source = editor.generate(CAT, **QUICK)
    for reference in (RED.resize((37, 200)), RED.convert("L"), RED.convert("RGBA"), RED.convert("P")):
        editor.checkout(source.id)
        assert pixels_outside(editor.edit(DOG, mask=SQUARE, reference=reference), source)


class TestCommands:
    @pytest.fixture
    def given(self, tmp_path, place):
        RED.save(tmp_path / "red.png")
        return ["--adapter", place, "--adapter-scale", 0.5, "--reference", tmp_path / "red.png"]

    def test_an_edit_with_a_reference(self, fisedit, model, given, tmp_path, place):
        """As in Python."""
        common = ["--model", model, "--seed", 7, "--num-inference-steps", 3, "--dtype", "fp32", "--device", "cpu"]
        done = fisedit("edit", "--source-prompt", CAT, "--prompt", DOG, *common, *given, "--output", "dog.png")
        assert done.status == 0, done.err
        editor = Editor.from_pretrained(model, dtype="fp32", device="cpu")
        editor.load_adapter(place, 0.5)
        editor.generate(CAT, **QUICK)
        expected = editor.edit(DOG, reference=RED)
        with Image.open(tmp_path / "dog.png") as made:
            assert np.array_equal(np.asarray(made), pixels(expected))

    def test_a_session_of_a_guided_source(self, fisedit, model, given, tmp_path):
        common = ["--model", model, "--num-inference-steps", 2, "--dtype", "fp32", "--device", "cpu"]
        done = fisedit("generate", CAT, *common, *given, "--session", "s", "--output", "cat.png")
        assert done.status == 0, done.err
        done = fisedit("edit", "--session", "s", "--prompt", DOG, "--output", "dog.png")
        assert done.status == 0, done.err

    def test_refusals(self, fisedit, model, tmp_path):
        RED.save(tmp_path / "red.png")
        common = ["edit", "--model", model, "--source-prompt", CAT, "--prompt", DOG, "--num-inference-steps", 1]
        fisedit(*common, "--reference", "red.png").refused("adapter", "call load_adapter first")
        fisedit(*common, "--adapter", "nowhere/at/all").refused(
            "adapter", 'adapter must be "demo-look", "demo-pose", a folder'
        )
        (tmp_path / "text.png").write_text("no picture")
        fisedit(*common, "--reference", "text.png").refused("input")


def test_a_larger_picture_keeps_the_look(editor):
    source = editor.generate(CAT, reference=RED, **QUICK)
    larger = editor.extend(right=32, seed=3)
    assert larger.config.like == source.config.like != ()


class Mapped:
    """An adapter whose network is mapped from a file."""

    identity, check_use, check_fit, match = "one", print, print, print

    def __init__(self, file):
        self.network = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
        save_file(self.network.state_dict(), file)
        self.network.load_state_dict(load_file(file), assign=True)


def test_an_adapters_file_that_is_written_to_in_place_is_refused(tmp_path):
    file = tmp_path / "adapter.safetensors"
    references = References(SimpleNamespace(unet=None), None)
    references.load(Mapped(file), str(file), AdapterUse())
    references.check_files()
    with file.open("r+b") as opened:
        opened.seek(-8, 2)
        opened.write(b"12345678")
    with pytest.raises(ModelError, match=r"adapter\.safetensors was written to while its model is open"):
        references.check_files()
