"""LoRAs: as if the change lay in the weights, alone, several at once, and beside an adapter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fisedit import Editor
from fisedit.adapters.lora import SuggestedSampling, suggested_sampling
from fisedit.batch import runner
from fisedit.batch.manifest import plan_batch
from fisedit.batch.result_store import item_key
from fisedit.batch.values import BatchJob, BatchSettings
from fisedit.batch.worker import BatchWorker
from fisedit.errors import AdapterError, InputError, SessionError
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import SchedulerName
from tests.support import oracle
from tests.support.edits import CAT, DOG, pixels_outside
from tests.support.folders import pictures
from tests.support.grids import grids
from tests.support.lora import ALPHA, RANK, SCALE, Lora, parts_of
from tests.support.pipelines import build_pipeline
from tests.support.references import QUICK, check_guided, pixels
from tests.support.steps import StepEdit, rows

SQUARE = grids(16, 16)["square"]


@pytest.fixture
def pipe():
    return build_pipeline("sd15")


def written(lora, pipe, kind, folder):
    """A file or folder, and the factor that its format brings."""
    if kind == "kohya":
        return lora.kohya(folder / "style.safetensors"), ALPHA / RANK
    return lora.diffusers(folder / "style", pipe), 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kohya", "diffusers"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_lora_and_an_adapter(pipe, adapter, place, kind, order, tmp_path):
    """Whichever comes first, scales reach every layer: as if the change lay in the weights."""
    lora = Lora(pipe)
    file, factor = written(lora, pipe, kind, tmp_path)
    expected, editor = lora.merged(pipe, SCALE * factor), Editor(pipe)
    plain = editor.generate(CAT, width=128, height=128, **QUICK)
    if order == "before":
        editor.load_lora(file, SCALE), editor.load_adapter(place)
    else:
        editor.load_adapter(place), editor.load_lora(file, SCALE)
    source = check_guided(editor, expected, adapter)
    assert not np.array_equal(pixels(source), pixels(plain))
    edit = editor.edit(DOG, mask=SQUARE)
    assert pixels_outside(edit, source)


@pytest.mark.parametrize("kind", ["kohya", "diffusers"])
def test_a_sparse_step_with_a_lora_is_the_oracles(pipe, kind, tmp_path):
    """E4: every convolution and linear of rows works with the changed weight."""
    lora, grid = Lora(pipe), grids(13, 17)["blobs"]
    file, factor = written(lora, pipe, kind, tmp_path)
    merged = lora.merged(pipe, SCALE * factor).unet
    editor = Editor(pipe)
    editor.load_lora(file, SCALE)
    editor._engine.refresh()
    case, executor = StepEdit(merged, grid), editor._engine.executor
    with torch.inference_mode():
        got, _ = case.sparse(executor, make_row_plan(grid, executor.num_levels))
        expected = rows(case.oracle(merged), grid)
    assert torch.allclose(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["kohya", "diffusers"])
def test_a_lora_of_two_text_encoders_is_in_all_of_them(kind, tmp_path):
    """Of Stable Diffusion XL; unloaded, it leaves no trace."""
    pipe = build_pipeline("sdxl")
    lora, own = Lora(pipe), [pipe.components[part] for part in parts_of(pipe)]
    before = [{name: weight.clone() for name, weight in model.state_dict().items()} for model in own]
    file, factor = written(lora, pipe, kind, tmp_path)
    assert {part for part, _ in lora.parts} == {"unet", "text_encoder", "text_encoder_2"}
    merged, editor = Editor(lora.merged(pipe, SCALE * factor)).generate(CAT, **QUICK), Editor(pipe)
    plain = editor.generate(CAT, **QUICK)
    name = editor.load_lora(file, SCALE)
    source = editor.generate(CAT, **QUICK)
    assert np.abs(np.asarray(source.image, int) - np.asarray(merged.image, int)).max() <= 1
    assert not np.array_equal(pixels(source), pixels(plain))
    assert pixels_outside(editor.edit(DOG, mask=SQUARE), source)
    editor.unload_lora(name)
    for model, weights in zip(own, before, strict=True):
        assert list(model.state_dict()) == list(weights)
        assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


def test_loras_of_other_families_are_refused(pipe, tmp_path):
    xl = build_pipeline("sdxl")
    for own, other, words in ((pipe, xl, "it is for Stable Diffusion XL"), (xl, pipe, "does not fit this model")):
        with pytest.raises(AdapterError, match=words):
            Editor(own).load_lora(Lora(other).kohya(tmp_path / "style.safetensors"))


def test_scales_add_up_and_leave_no_trace(pipe, tmp_path):
    before = {k: v.clone() for k, v in pipe.unet.state_dict().items()}
    loras = [Lora(pipe, seed) for seed in (0, 1)]
    files = [lora.kohya(tmp_path / f"{i}.safetensors") for i, lora in enumerate(loras)]
    expected = loras[1].merged(loras[0].merged(pipe, 0.5 * ALPHA / RANK), -0.25 * ALPHA / RANK)
    editor = Editor(pipe)
    plain = editor.generate(CAT, width=128, height=128, **QUICK)
    names = [editor.load_lora(file, scale) for file, scale in zip(files, (0.5, -0.25), strict=True)]
    both = oracle.dense_generate(expected, oracle.GenerationConfig(CAT, seed=7, steps=2)).latents
    result = editor.generate(CAT, width=128, height=128, **QUICK)
    assert oracle.deviation(torch.cat(editor._trajectory_cache.get(result.id)[0].latents), both) <= 1e-4
    editor.unload_lora(names[0])
    alone = oracle.dense_generate(
        loras[1].merged(pipe_without(pipe, before), -0.25 * ALPHA / RANK), oracle.GenerationConfig(CAT, seed=7, steps=2)
    )
    result = editor.generate(CAT, width=128, height=128, **QUICK)
    assert oracle.deviation(torch.cat(editor._trajectory_cache.get(result.id)[0].latents), alone.latents) <= 1e-4
    editor.unload_lora(names[1])
    after = pipe.unet.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)
    assert np.array_equal(pixels(editor.generate(CAT, width=128, height=128, **QUICK)), pixels(plain))
    with pytest.raises(AdapterError, match="no LoRA"):
        editor.unload_lora(names[1])


def pipe_without(pipe, weights):
    """The pipeline as it was built."""
    plain = build_pipeline("sd15")
    assert all(torch.equal(plain.unet.state_dict()[k], weights[k]) for k in weights)
    return plain


def test_what_was_made_with_a_lora_is_rebuilt_with_it(pipe, tmp_path):
    """Or not at all: another model's features would not be the picture's."""
    editor, file = Editor(pipe, model="here"), Lora(pipe).kohya(tmp_path / "style.safetensors")
    plain = editor.generate(CAT, **QUICK)
    name = editor.load_lora(file, SCALE)
    source = editor.generate(CAT, **QUICK)
    edit = editor.edit(DOG, mask=SQUARE)
    editor.save(tmp_path / "session")
    editor.checkout(source.id), editor.forget()
    assert np.array_equal(pixels(editor.edit(DOG, mask=SQUARE)), pixels(edit))
    editor.checkout(source.id), editor.forget(), editor.unload_lora(name)
    with pytest.raises(SessionError, match=f"rebuilt with {name}, as it was made"):
        editor.edit(DOG, mask=SQUARE)
    editor.checkout(plain.id)
    assert pixels_outside(editor.edit(DOG, mask=SQUARE), plain)
    editor.load(tmp_path / "session")
    assert editor.current.config == edit.config
    with pytest.raises(AdapterError, match="is loaded already"):
        editor.load_lora(file), editor.load_lora(file, 0.1)
    with pytest.raises(InputError, match=rf"made with LoRAs \({name}\)"):
        Editor.remake(Image.open(next((tmp_path / "session").glob(f"{edit.id}-{'?' * 16}.png"))))


def test_a_dense_run_has_the_results_own_loras(pipe, tmp_path):
    """Or there is none: what other weights make is nothing to compare with."""
    editor, file = Editor(pipe), Lora(pipe).kohya(tmp_path / "style.safetensors")
    plain = editor.generate(CAT, **QUICK)
    name = editor.load_lora(file, SCALE)
    styled = editor.generate(CAT, **QUICK)
    assert np.array_equal(np.asarray(editor.dense(styled.id)[0]), pixels(styled))
    with pytest.raises(SessionError, match="rebuilt with no LoRA, as it was made"):
        editor.dense(plain.id)
    editor.scale_loras({name: 0.1})
    with pytest.raises(SessionError, match=f"rebuilt with {name}, as it was made, and with the same scales"):
        editor.dense(styled.id)
    editor.unload_lora(name)
    with pytest.raises(SessionError, match=f"rebuilt with {name}, as it was made"):
        editor.dense(styled.id)
    with pytest.raises(SessionError, match="LoRAs were loaded, scaled or unloaded while this ran"):
        editor.dense(plain.id, on_step=lambda i, *_: i or editor.load_lora(file, SCALE))
    editor.unload_lora(name)
    assert np.array_equal(np.asarray(editor.dense(plain.id)[0]), pixels(plain))


def test_an_edit_that_alone_has_a_lora_is_not_remade_without_it(pipe, tmp_path):
    editor, file = Editor(pipe, model="here"), Lora(pipe).kohya(tmp_path / "style.safetensors")
    editor.generate(CAT, **QUICK)
    name = editor.load_lora(file, SCALE)
    editor.edit(DOG, mask=SQUARE)
    editor.write(tmp_path / "edit.png")
    editor.unload_lora(name)
    with pytest.raises(InputError, match=rf"made with LoRAs \({name}\)"):
        Editor.remake(Image.open(tmp_path / "edit.png"))


def test_a_lora_that_changes_during_a_run_ends_it(pipe, tmp_path):
    editor, file = Editor(pipe), Lora(pipe).kohya(tmp_path / "style.safetensors")
    source = editor.generate(CAT, **QUICK)

    def on_step(step, *_):
        if step == 1:
            editor.load_lora(file, SCALE)

    with pytest.raises(SessionError, match="run it again"):
        editor.edit(DOG, mask=SQUARE, on_step=on_step)
    assert len(editor.history) == 1 and pixels_outside(editor.edit(DOG, mask=SQUARE), source)


def test_editors_of_one_pipeline_share_its_loras(pipe, tmp_path):
    first, second = Editor(pipe), Editor(pipe)
    files = [Lora(pipe, seed).kohya(tmp_path / f"{seed}.safetensors") for seed in (0, 1)]
    with torch.inference_mode():
        names = [editor.load_lora(file, SCALE) for editor, file in zip((first, second), files, strict=True)]
    assert dict(second.generate(CAT, **QUICK).config.loras) == dict.fromkeys(names, SCALE * ALPHA / RANK)
    first.scale_loras({names[1]: 0.5})
    assert dict(second.generate(CAT, **QUICK).config.loras) == {names[1]: 0.5 * ALPHA / RANK}
    for name in names:
        second.unload_lora(name)
    assert not first.generate(CAT, **QUICK).config.loras


def test_a_lora_that_diffusers_loaded_before_the_editor_began(pipe, tmp_path):
    lora = Lora(pipe)
    file = lora.kohya(tmp_path / "style.safetensors")
    expected = lora.merged(pipe, SCALE * ALPHA / RANK)
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="mine")
    pipe.set_adapters(["mine"], [SCALE])
    editor = Editor(pipe)
    result = editor.generate(CAT, width=128, height=128, **QUICK)
    dense = oracle.dense_generate(expected, oracle.GenerationConfig(CAT, seed=7, steps=2)).latents
    assert oracle.deviation(torch.cat(editor._trajectory_cache.get(result.id)[0].latents), dense) <= 1e-4
    assert Executor(pipe.unet).sites


def test_a_lora_of_which_a_part_alone_would_count_is_refused(pipe, tmp_path):
    """diffusers would leave out what it has no layer for, and say nothing."""
    from safetensors.torch import load_file

    keys, tensors = list(pipe.unet.state_dict()), load_file(Lora(pipe).kohya(tmp_path / "style.safetensors"))
    start = "lora_unet_down_blocks_0_attentions_7_proj_in"
    tensors |= {f"{start}.lora_{way}.weight": torch.ones(4, 4, 1, 1) for way in ("down", "up")}
    save_file(tensors, tmp_path / "style.safetensors")
    with pytest.raises(AdapterError, match=r"(of which \d+ are here|does not fit)"):
        Editor(pipe).load_lora(tmp_path / "style.safetensors")
    assert list(pipe.unet.state_dict()) == keys


def test_without_peft_the_extra_is_named(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr("fisedit.adapters.lora.find_spec", lambda name: None)
    with pytest.raises(AdapterError, match=r"pip install 'fisedit\[lora\]'"):
        Editor(pipe).load_lora(Lora(pipe).kohya(tmp_path / "style.safetensors"))


def test_a_file_may_suggest_how_it_is_sampled(pipe, tmp_path):
    lora, few = Lora(pipe), {"scheduler": "lcm", "num_inference_steps": "4", "guidance_scale": "1.5"}
    told = suggested_sampling(lora.kohya(tmp_path / "fast.safetensors", **few))
    assert told == SuggestedSampling(SchedulerName.LCM, 4, 1.5)
    for wrong in ({}, {"scheduler": "none"}, {"num_inference_steps": "four"}, {"guidance_scale": "inf"}):
        metadata = few | wrong if wrong else {}
        assert suggested_sampling(lora.kohya(tmp_path / "style.safetensors", **metadata)) is None


def test_what_is_no_lora_is_refused(pipe, place, tmp_path):
    editor = Editor(pipe)
    keys = list(pipe.unet.state_dict())
    torch.save({}, tmp_path / "style.bin")
    (tmp_path / "cut.safetensors").write_bytes(b"12345678")
    other = Lora(build_pipeline("demo")).kohya(tmp_path / "other.safetensors")
    for source, message in {
        tmp_path / "nothing.safetensors": r'LoRA must be "demo-fast", a \.safetensors file or a folder',
        tmp_path / "style.bin": "must be .safetensors",
        tmp_path / "cut.safetensors": "truncated or damaged",
        place / "diffusion_pytorch_model.safetensors": "holds no LoRA",
        other: "does not fit this model",
    }.items():
        with pytest.raises(AdapterError, match=message) as refused:
            editor.load_lora(source)
        assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="scale must be a number"):
        editor.load_lora(Lora(pipe).kohya(tmp_path / "style.safetensors"), float("inf"))
    assert list(pipe.unet.state_dict()) == keys


def test_the_command_line_generates_and_edits_with_loras(fisedit, model, tmp_path):
    own = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    places = [Lora(own.pipe, seed).kohya(tmp_path / f"{seed}.safetensors") for seed in (0, 1)]
    loras = [word for place in places for word in ("--lora", place, "--lora-scale", 0.6)]
    quick = ("--num-inference-steps", 3, "--model", model, "--device", "cpu", "--dtype", "fp32")
    assert fisedit("generate", CAT, *quick, *loras, "--session", "kept", "--output", "cat.png").status == 0
    edit = ("edit", "--session", "kept", "--device", "cpu", "--dtype", "fp32", "--prompt")
    assert fisedit(*edit, DOG, *loras).status == 0
    for place in places:
        own.load_lora(place, 0.6)
    made = own.generate(CAT, num_inference_steps=3)
    assert (pixels(made) == np.asarray(Image.open(tmp_path / "cat.png"))).all()
    assert (pixels(own.edit(DOG)) == np.asarray(Image.open(tmp_path / "edit.png"))).all()
    fisedit(*edit, CAT).refused("session", "rebuilt with")
    fisedit("edit", "--from", "cat.png", "--prompt", DOG, *loras).refused("input", "says itself how it was made")


def test_a_batch_paints_with_loras(model, tmp_path):
    """Another file or another scale is another batch."""
    lora = Lora(Editor.from_pretrained(model).pipe).kohya(tmp_path / "style.safetensors")
    pictures(tmp_path / "in", 1)
    job = BatchJob(tmp_path / "in", tmp_path / "out", "a dog on a beach", "a cat on a beach")
    plain = BatchSettings(str(model), num_inference_steps=2, device="cpu", dtype="fp32")
    styled = replace(plain, loras=((str(lora), 0.6),))
    item = plan_batch(job).items[0]
    outputs = [BatchWorker(settings).process(item).data for settings in (plain, styled, replace(styled, loras=()))]
    assert outputs[0] == outputs[2] != outputs[1]
    stronger = replace(styled, loras=((str(lora), 1.0),))
    assert len({item_key(settings, "", item, "", "") for settings in (plain, styled, stronger)}) == 3
    before = runner._model_identity(styled)
    Lora(Editor.from_pretrained(model).pipe, 1).kohya(lora)
    assert runner._model_identity(styled) != before
