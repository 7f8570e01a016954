"""Loading: what is accepted loads exactly, and what is not is refused in one line, before weights and without code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file

from fisedit import Editor
from fisedit.errors import FisEditError, InputError, ModelError, NumericsError
from fisedit.machine.device import choose_device, choose_dtype
from fisedit.models import loader, paths
from fisedit.models.families import family
from fisedit.sampling.engine import Engine
from tests.support.edits import check_outside, config_of
from tests.support.inpainting import inpainting
from tests.support.pipelines import DISTILLED, build_pipeline
from tests.support.single_file import save_single_file

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """A copy of the good folder, to be spoilt."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path, keep: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * keep))


def same_weights(one: StableDiffusionPipeline, other: StableDiffusionPipeline) -> bool:
    parts = [part for part in one.components if part in family.SDXL.parts]
    pairs = [(one.components[part].state_dict(), other.components[part].state_dict()) for part in parts]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def refused(model: str | Path, *words: str, error: type[FisEditError] = ModelError, **options: object) -> None:
    with pytest.raises(error) as caught:
        loader.load(model, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    for word in words:
        assert word in message, message


@pytest.fixture
def no_weights(monkeypatch) -> None:
    """Fail if any component is built with weights."""

    def allocated(*_: object, **__: object) -> None:
        pytest.fail("weights were read before the refusal")

    monkeypatch.setattr(loader, "read_tensors", allocated)


def test_a_folder_loads_exactly_and_quietly(pipelines, model, capfd):
    pipe = loader.load(model, dtype="fp32")
    assert same_weights(pipe, pipelines["demo"])
    assert pipe.safety_checker is None
    assert not pipe.unet.training and not any(p.requires_grad for p in pipe.unet.parameters())
    assert pipe.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert capfd.readouterr() == ("", "")


LOADING = """
import gc, re, sys
from pathlib import Path
from fisedit.machine.malloc import return_freed_memory
from fisedit.models.loader import load
def status(name):
    return int(re.findall(rf"{name}:\\s*(\\d+)", Path("/proc/self/status").read_text())[0]) << 10
load(sys.argv[1])  # the libraries are imported
for dtype in ("bf16", "fp32"):
    pipe = None
    gc.collect()  # modules refer to one another
    return_freed_memory()  # what the last load left would serve this one
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    pipe = load(sys.argv[2], dtype=dtype)
    peak = status("VmHWM") - before
    print(peak, sum(t.nbytes for part in (pipe.unet, pipe.vae, pipe.text_encoder) for t in part.state_dict().values()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a process")
def test_loading_takes_no_second_copy_of_the_weights(pipelines, folder, model):
    """Not of the file's mapped pages, nor of weights before they were laid out or converted."""
    config = pipelines["demo"].unet.config
    with torch.device("meta"):
        wide = type(pipelines["demo"].unet).from_config(
            config, block_out_channels=[6 * width for width in config["block_out_channels"]]
        )
    save_file({name: torch.zeros(w.shape) for name, w in wide.state_dict().items()}, folder / UNET)
    edit_json(folder / "unet/config.json", block_out_channels=wide.config["block_out_channels"])
    done = subprocess.run([sys.executable, "-c", LOADING, model, folder], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        peak, weights = (int(number) >> 20 for number in line.split())
        assert weights > 50 and 0.7 * weights < peak < 1.25 * weights, (peak, weights)
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("name", ["sd15", "sd2", "shallow", "sdxl"])
def test_every_shape_loads(pipelines, name, tmp_path):
    pipelines[name].save_pretrained(tmp_path)
    assert same_weights(loader.load(str(tmp_path), dtype=torch.float32), pipelines[name])


@pytest.mark.parametrize("name", DISTILLED)
def test_distilled_relatives_load_and_edit(name, tmp_path):
    pipe = build_pipeline(name)
    pipe.save_pretrained(tmp_path)
    editor = Editor(loader.load(tmp_path, dtype="fp32"))
    assert same_weights(editor.pipe, pipe)
    source = editor.generate("a cat", num_inference_steps=2, width=128, height=128)
    check_outside(editor, editor.edit("a dog", mask=np.pad(np.ones((4, 4), bool), 6), growth=1), source)


def test_an_fp16_variant_loads(pipelines, tmp_path):
    half = build_pipeline("demo").to(torch.float16)
    half.save_pretrained(tmp_path, variant="fp16")
    assert same_weights(loader.load(tmp_path, dtype="fp32").to(torch.float16), half)


@pytest.mark.parametrize(
    ("saved", "asked"), [(None, None), ("non_ema", "non_ema"), ("non_ema", None), ("fp16", "fp16")]
)
def test_weights_in_parts_and_variants_of_any_name_load_as_diffusers_saves_them(pipelines, tmp_path, saved, asked):
    pipelines["demo"].save_pretrained(tmp_path, variant=saved, max_shard_size="200KB")
    assert len(list((tmp_path / "unet").glob("*.safetensors"))) > 2
    assert same_weights(loader.load(tmp_path, dtype="fp32", variant=asked), pipelines["demo"])
    next((tmp_path / "unet").glob("*-00002-of-*")).unlink()
    refused(tmp_path, "-00002-of-", "is not beside it")


def test_a_variant_that_is_not_there_or_not_named_is_refused(folder):
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model.a.safetensors")
    assert loader.load(folder, variant="a").notes == ()
    refused(folder, "(a), got 'b'", variant="b")
    shutil.copy(
        folder / "unet/diffusion_pytorch_model.a.safetensors", folder / "unet/diffusion_pytorch_model.b.SAFETENSORS"
    )
    refused(folder, "one of a, b")
    loader.load(folder, variant="b")
    for file in (folder / "unet").glob("*.[sS]*"):
        file.unlink()
    refused(folder, "unet/diffusion_pytorch_model.safetensors, got no weights")


def test_names_of_older_releases_load(pipelines, folder):
    vae, text = folder / "vae/diffusion_pytorch_model.safetensors", folder / "text_encoder/model.safetensors"
    for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
        save_file({name.replace(f".{new}.", f".{old}."): t for name, t in load_file(vae).items()}, vae)
    tensors = {f"text_model.{name.removeprefix('text_model.')}": t for name, t in load_file(text).items()}
    save_file(tensors | {"text_model.embeddings.position_ids": torch.arange(77)[None]}, text, {"format": "pt"})
    assert same_weights(loader.load(folder, dtype="fp32"), pipelines["demo"])


def test_one_file_loads_exactly(pipelines, tmp_path, monkeypatch):
    pipelines["sd15"].save_pretrained(tmp_path / "sd15")
    monkeypatch.setattr(family, "CONFIGS", tmp_path)
    path = save_single_file(pipelines["sd15"], tmp_path / "model.safetensors")
    assert same_weights(loader.load(path, dtype="fp32"), pipelines["sd15"])
    tensors = load_file(path)
    del tensors["model.diffusion_model.middle_block.1.norm.weight"]
    save_file(tensors, path)
    refused(path, "unet", "mid_block.attentions.0.norm.weight")


def test_one_file_of_the_1_family_predicts_what_its_yaml_says(pipelines, tmp_path, monkeypatch):
    pipelines["sd15"].save_pretrained(tmp_path / "sd15")
    monkeypatch.setattr(family, "CONFIGS", tmp_path)
    path = save_single_file(pipelines["sd15"], tmp_path / "model.safetensors")
    side = pipelines["sd15"].unet.config.sample_size
    path.with_suffix(".yaml").write_text('model:\n  params:\n    parameterization: "v"\n')
    loaded = loader.load(path, dtype="fp32")
    assert (loaded.scheduler.config.prediction_type, loaded.unet.config.sample_size) == ("v_prediction", side)
    path.with_suffix(".yaml").write_bytes(b"\xff\xfe\xff")
    refused(path, "model.yaml cannot be read as text")


@pytest.fixture
def one_file(pipelines, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Saves the tiny model as one file, whose tensors are changed."""
    pipelines["sd15"].save_pretrained(tmp_path / "sd15")
    monkeypatch.setattr(family, "CONFIGS", tmp_path)
    tensors = load_file(save_single_file(pipelines["sd15"], tmp_path / "whole.safetensors"))

    def save(change=lambda tensors: tensors, *, metadata=None, name="model.SafeTensors") -> Path:
        save_file(change(tensors), tmp_path / name, metadata)
        return tmp_path / name

    return save


def test_one_file_of_2022_loads_exactly(pipelines, one_file):
    path = one_file(lambda tensors: {name.replace("text_model.", ""): t for name, t in tensors.items()})
    assert same_weights(loader.load(path, dtype="fp32"), pipelines["sd15"])
    both = one_file(lambda tensors: tensors | {n.replace("text_model.", ""): t + 1 for n, t in tensors.items()})
    refused(both, "text_encoder", "under two names")


def test_one_file_without_its_autoencoder_takes_another(pipelines, one_file):
    def part(*, vae: bool) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        return lambda tensors: {n: t for n, t in tensors.items() if n.startswith("first_stage_model.") == vae}

    path, vae = one_file(part(vae=False)), one_file(part(vae=True), name="vae.safetensors")
    refused(path, "model.SafeTensors lacks its VAE", "give one as vae=")
    loaded = loader.load(path, vae=vae, dtype="fp32")
    assert same_weights(loaded, pipelines["sd15"]) and loaded.notes == ()
    shutil.rmtree(family.SD1.configs / "vae")
    refused(family.SD1.configs, "lacks vae/config.json")
    edit_json(family.SD1.configs / "model_index.json", vae=[None, None])
    refused(family.SD1.configs, "lacks its VAE", "give one as vae=")


TELLS_V = {"modelspec.prediction_type": "v"}


@pytest.mark.parametrize(
    ("markers", "metadata", "told"),
    [
        ((), None, ("epsilon", False, 16)),
        ((), TELLS_V, ("v_prediction", False, 16)),
        ((), {"modelspec.prediction_type": "epsilon", "modelspec.resolution": "768x768"}, ("epsilon", False, 96)),
        (("v_pred",), None, ("v_prediction", False, 16)),
        (("v_pred", "ztsnr"), TELLS_V, ("v_prediction", True, 16)),
        (("v_pred",), {"modelspec.prediction_type": "epsilon"}, "v_prediction by the tensor v_pred; correct"),
        ((), {"modelspec.architecture": "stable-diffusion-v2-768-v"}, ("v_prediction", False, 16)),
        ((), {"modelspec.prediction_type": "flow"}, "must be epsilon or v, got 'flow'"),
    ],
)
def test_one_file_predicts_what_it_says(one_file, markers, metadata, told):
    path = one_file(lambda tensors: tensors | {name: torch.tensor([]) for name in markers}, metadata=metadata)
    if isinstance(told, str):
        refused(path, told)
        return
    loaded = loader.load(path, dtype="fp32")
    config = loaded.scheduler.config
    found = config.prediction_type, config.rescale_betas_zero_snr, loaded.unet.config.sample_size
    assert found == told and loaded.notes == ()


def test_what_no_part_reads_of_a_file_is_told(one_file, model, folder):
    constants = {
        "betas": torch.ones(3),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.ones(1),
    }
    strange = {"model.diffusion_model.fuser.weight": torch.ones(1), "model_ema.a": torch.ones(1)}
    path = one_file(lambda tensors: tensors | constants | strange)
    (note,) = loader.load(path, dtype="fp32").notes
    assert note.startswith("model.SafeTensors holds 2 tensors, such as model")
    assert loader.load(one_file(lambda tensors: tensors | constants), dtype="fp32").notes == ()
    save_file(load_file(folder / UNET) | {"fuser.weight": torch.ones(1)}, folder / UNET)
    line = "diffusion_pytorch_model.safetensors holds a tensor fuser.weight, which no part of the model reads"
    pipe = loader.load(folder, dtype="fp32")
    assert pipe.notes == (line,) and loader.load(model).notes == ()
    editor = Editor(pipe)
    source = editor.generate("a cat", num_inference_steps=1)
    assert line in source.stats.notes


def test_a_noise_schedule_of_its_own_is_told(one_file, pipelines):
    own = pipelines["sd15"].scheduler.alphas_cumprod
    for schedule, told in ((own.half(), 0), (own * 0.9, 1)):
        path = one_file(lambda tensors, one=schedule: tensors | {"alphas_cumprod": one})
        notes = loader.load(path, dtype="fp32").notes
        assert len(notes) == told and all("noise schedule of its own" in note for note in notes)


def test_one_file_in_parts(pipelines, one_file, tmp_path):
    whole = load_file(one_file())
    names = [f"parts-0000{i}-of-00002.safetensors" for i in (1, 2)]
    listed = {name: names[i % 2] for i, name in enumerate(whole)}
    for part in names:
        save_file({name: tensor for name, tensor in whole.items() if listed[name] == part}, tmp_path / part)
    refused(tmp_path / names[0], "one of several parts, got no parts.safetensors.index.json")
    index = tmp_path / "parts.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    for given in (tmp_path / names[1], index):
        assert same_weights(loader.load(given, dtype="fp32"), pipelines["sd15"])
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    refused(index, "must name .safetensors files beside it")


def test_scaled_fp8_is_read_with_its_factors_and_other_quantised_files_are_refused(pipelines, one_file):
    scaled = "model.diffusion_model.middle_block.1.proj_in"
    eighth = torch.float8_e4m3fn

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights = (tensors[f"{scaled}.weight"] / 0.5).to(eighth)
        factor = {f"{scaled}.scale_weight": torch.tensor(0.5), "scaled_fp8": torch.zeros(2).to(eighth)}
        return tensors | {f"{scaled}.weight": weights} | factor

    loaded = loader.load(one_file(change), dtype="fp32")
    weight = pipelines["sd15"].unet.mid_block.attentions[0].proj_in.weight
    read = loaded.unet.mid_block.attentions[0].proj_in.weight
    assert torch.equal(read, (weight / 0.5).to(eighth).float() * 0.5) and loaded.notes == ()
    for name in ("comfy_quant", "absmax"):
        refused(one_file(lambda tensors, name=name: tensors | {f"{scaled}.{name}": torch.zeros(1)}), "quantised", name)
    whole = {f"{scaled}.weight": torch.zeros_like(weight, dtype=torch.int8)}
    refused(one_file(lambda tensors: tensors | whole), "must be floating point, got int8")


@pytest.mark.parametrize(("given", "side"), [([16, 16], 16), (None, None), ([16, 24], None), (0, None)])
def test_a_unets_size(folder, given, side):
    config = folder / "unet/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sample_size": given}))
    if side is None:
        refused(folder, "sample_size", "a positive number")
    else:
        assert loader.load(folder, dtype="fp32").unet.config.sample_size == side


def test_a_schedulers_configuration_that_cannot_be_used(folder):
    config = folder / "scheduler/scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"beta_schedule": "cosine-ish"}))
    with pytest.raises(ModelError, match=r"the configuration in .*scheduler cannot be used") as raised:
        loader.load(folder, dtype="fp32")
    assert "\n" not in str(raised.value)


def test_inpainting_models_load_exactly(pipelines, tmp_path, monkeypatch):
    pipe = inpainting(pipelines["sd15"])
    pipelines["sd15"].save_pretrained(tmp_path / "sd15")
    monkeypatch.setattr(family, "CONFIGS", tmp_path)
    assert same_weights(loader.load(save_single_file(pipe, tmp_path / "model.safetensors"), dtype="fp32"), pipe)
    pipe.save_pretrained(tmp_path / "folder")
    edit_json(tmp_path / "folder/model_index.json", _class_name="StableDiffusionInpaintPipeline")
    loaded = loader.load(tmp_path / "folder", dtype="fp32")
    assert same_weights(loaded, pipe) and loaded.unet.config.in_channels == 9


@pytest.mark.parametrize(
    ("text", "prediction", "side"),
    [('model:\n  params:\n    parameterization: "v"\n', "v_prediction", 96), ("model:\n  params: {}\n", "epsilon", 64)],
)
def test_one_file_of_the_2_family_loads_exactly_with_its_yaml(pipelines, tmp_path, monkeypatch, text, prediction, side):
    pipe = pipelines["sd2"]
    pipe.save_pretrained(tmp_path / "sd2")
    (tmp_path / "sd15").mkdir()
    (tmp_path / "sd2" / "tokenizer").rename(tmp_path / "sd15" / "tokenizer")
    monkeypatch.setattr(family, "CONFIGS", tmp_path)
    path = save_single_file(pipe, tmp_path / "model.safetensors", sd2=True)
    refused(path, "does not tell its prediction type; put its model.yaml beside it")
    path.with_suffix(".yaml").write_text(text)
    loaded = loader.load(path, dtype="fp32")
    assert same_weights(loaded, pipe) and loaded.tokenizer.pad_token == "!"
    assert (loaded.scheduler.config.prediction_type, loaded.unet.config.sample_size) == (prediction, side)
    assert loader.config_folder(path) == tmp_path / "sd2"


@pytest.fixture
def xl_file(pipelines, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Saves tiny Stable Diffusion XL as one file, with more tensors."""
    pipelines["sdxl"].save_pretrained(tmp_path / "sdxl")
    monkeypatch.setattr(family, "CONFIGS", tmp_path)
    tensors = load_file(save_single_file(pipelines["sdxl"], tmp_path / "whole.safetensors"))

    def save(*, metadata=None, **more: torch.Tensor) -> Path:
        save_file(tensors | more, tmp_path / "model.safetensors", metadata)
        return tmp_path / "model.safetensors"

    return save


def test_one_file_of_xl_loads_exactly(pipelines, xl_file, tmp_path):
    """Made with clip skip 2, as web UIs call what XL reads anyway; its conditions are those of the folder."""
    path = xl_file(metadata={"modelspec.encoder_layer": "2"})
    loaded, config = loader.load(path, dtype="fp32"), config_of(negative_prompt="a dog")
    assert same_weights(loaded, pipelines["sdxl"]) and loaded.notes == ()
    assert loader.config_folder(path) == tmp_path / "sdxl"
    with torch.no_grad():
        ours, theirs = (Engine(pipe).encode(config) for pipe in (loaded, pipelines["sdxl"]))
    assert torch.equal(ours.key, theirs.key)


def test_one_file_of_xl_that_is_marked_predicts_velocity_from_zero_terminal_snr(xl_file):
    scheduler = loader.load(xl_file(v_pred=torch.empty(0), ztsnr=torch.empty(0)), dtype="fp32").scheduler.config
    assert scheduler.prediction_type == "v_prediction" and scheduler.rescale_betas_zero_snr


def test_an_autoencoder_of_xl_is_in_fp32_where_fp16_overflows(pipelines, tmp_path, monkeypatch):
    """As its configuration says; of the others, and in bf16, it is in the model's own dtype."""
    monkeypatch.setattr(loader, "choose_dtype", lambda dtype, _: getattr(torch, dtype))
    for name, upcast, dtype, found in (
        ("sdxl", True, "float16", torch.float32),
        ("sdxl", False, "float16", torch.float16),
        ("sdxl", True, "bfloat16", torch.bfloat16),
        ("demo", True, "float16", torch.float16),
    ):
        folder = tmp_path / f"{name} {upcast}"
        if not folder.exists():
            pipelines[name].save_pretrained(folder)
        edit_json(folder / "vae/config.json", force_upcast=upcast)
        loaded = loader.load(folder, dtype=dtype)
        assert (loaded.unet.dtype, loaded.vae.dtype) == (getattr(torch, dtype), found)
        if dtype == "float16":
            assert loader.load(folder, dtype=dtype, vae=folder).vae.dtype == found


def test_xl_folders_that_are_others_are_named(pipelines, tmp_path):
    pipelines["sdxl"].save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    for changes, words in (
        ({"text_encoder": [None, None]}, "Stable Diffusion XL's refiner"),
        ({"scheduler": ["diffusers", "EDMDPMSolverMultistepScheduler"]}, "Playground v2.5"),
        ({"text_encoder_2": [None, None]}, "lacks its second text encoder"),
    ):
        (tmp_path / "model_index.json").write_text(json.dumps(index | changes))
        refused(tmp_path, words)
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"force_zeros_for_empty_prompt": False}))
    assert not loader.load(tmp_path, dtype="fp32").config.force_zeros_for_empty_prompt
    edit_json(tmp_path / "vae/config.json", scaling_factor=0.18215)
    refused(tmp_path, "the VAE scales latents by 0.18215, the model's by 0.13025")
    edit_json(tmp_path / "vae/config.json", scaling_factor=0.5, latents_mean=[0.0] * 4)
    refused(tmp_path, "latents_mean")
    edit_json(tmp_path / "vae/config.json", latents_mean=None)
    edit_json(tmp_path / "text_encoder_2/config.json", projection_dim=21)
    refused(tmp_path, "the UNet adds conditions of width 68, the second text encoder and 6 sizes have 69")
    edit_json(tmp_path / "text_encoder_2/config.json", hidden_size=40)
    refused(tmp_path, "the UNet reads text of width 56, the text encoders write 64")


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        (family.SD1, {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480}),
        (family.SD2, {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840}),
        (
            family.SDXL,
            {
                "unet": 2_567_463_684,
                "vae": 83_653_863,
                "text_encoder": 123_060_480,
                "text_encoder_2": 694_659_840,
            },
        ),
    ],
)
def test_the_shipped_configurations_are_stable_diffusions(kind, counts):
    for part, parameters in counts.items():
        shapes = loader._expected(part, kind.configs)
        assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters


def test_the_shipped_vocabulary_is_clips():
    tokenizer = loader._load_tokenizer(family.SD1.configs / "tokenizer")
    assert len(tokenizer) == 49408
    assert tokenizer("A cat, and a cake on a beach").input_ids == [
        *(49406, 320, 2368, 267, 537, 320, 2972, 525, 320, 2117, 49407)
    ]


class TestTheHub:
    @pytest.mark.parametrize("variant", ["", ".fp16"])
    def test_texts_come_before_weights_and_one_variant_of_them(self, model, folder, monkeypatch, variant):
        asked = []
        for file in folder.rglob("*.safetensors"):
            file.rename(file.with_suffix(f"{variant}.safetensors"))
        monkeypatch.setattr(
            paths, "download_files", lambda *told, local_files_only: asked.append((*told, local_files_only)) or folder
        )
        assert same_weights(loader.load("owner/model", local_files_only=True), loader.load(model))
        (first, texts, _), *later = asked
        assert first == "owner/model" and not any(pattern.endswith(".safetensors") for pattern in texts)
        assert len(later) == (1 if variant == "" else 2) and all(local for *_, local in asked)
        assert [name for name in later[-1][1] if name.endswith(f"{variant}.safetensors")]

    def test_a_hub_model_of_another_kind_or_pickled(self, folder, monkeypatch):
        monkeypatch.setattr(paths, "download_files", lambda *told, **_: asked.append(told) or folder)
        asked: list[tuple[object, ...]] = []
        (folder / UNET).unlink()
        refused("owner/model", "owner/model on the hub", ".safetensors", "pickled")
        edit_json(folder / "model_index.json", _class_name="KolorsPipeline")
        asked.clear()
        refused("owner/model", "Kolors")
        assert len(asked) == 1


@pytest.mark.usefixtures("no_weights")
class TestRefusedBeforeWeights:
    @pytest.mark.parametrize("name", ["nowhere", "./nowhere", "no/where/at/all", "x/nowhere.safetensors", "a\0b"])
    def test_nothing_there(self, name):
        refused(name, "nothing there", "hub id")

    def test_a_pipe_is_never_opened(self, tmp_path):
        os.mkfifo(tmp_path / "model.safetensors")
        refused(tmp_path / "model.safetensors", "no file or folder")

    def test_an_unknown_hub_id_offline(self):
        refused("someone/some-model", "someone/some-model", "not on this machine", local_files_only=True)

    @pytest.mark.sweep(1)
    @pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999])
    @pytest.mark.parametrize("part", ["unet", "vae"])
    def test_truncated_weights(self, folder, part, share):
        cut(folder / part / "diffusion_pytorch_model.safetensors", share)
        refused(folder, "truncated", "download")

    def test_truncated_texts(self, folder):
        for name in ("model_index.json", "unet/config.json", "scheduler/scheduler_config.json"):
            whole = (folder / name).read_bytes()
            cut(folder / name)
            refused(folder, name, "truncated")
            (folder / name).write_bytes(whole)

    def test_a_header_that_lies(self, folder):
        (folder / UNET).write_bytes((2**60).to_bytes(8, "little") + b"{}")
        refused(folder, "damaged")

    def test_a_git_lfs_pointer(self, folder):
        (folder / UNET).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        refused(folder, "LFS pointer", "git lfs pull")

    @pytest.mark.parametrize(
        ("name", "called"),
        [
            ("StableDiffusionXLInstructPix2PixPipeline", "InstructPix2Pix of Stable Diffusion XL"),
            ("KolorsPipeline", "Kolors"),
            ("StableDiffusion3Pipeline", "Stable Diffusion 3"),
            ("FluxPipeline", "Flux"),
            ("StableDiffusionDepth2ImgPipeline", "a depth model"),
            ("StableDiffusionControlNetPipeline", "ControlNet"),
            ("MyOwnPipeline", "MyOwnPipeline"),
        ],
    )
    def test_another_pipeline(self, folder, name, called):
        edit_json(folder / "model_index.json", _class_name=name)
        refused(folder, called, "Stable Diffusion 1.x, 2.x or XL")

    @pytest.mark.parametrize(
        ("part", "named"),
        [
            ("unet", ["my_module", "UNet2DConditionModel"]),
            ("scheduler", ["os", "system"]),
            ("tokenizer", ["transformers", "AutoTokenizer"]),
            ("vae", ["diffusers", "AutoencoderTiny"]),
            ("text_encoder", "pickle"),
        ],
    )
    def test_foreign_classes(self, folder, part, named):
        edit_json(folder / "model_index.json", **{part: named})
        refused(folder, part, "not supported")

    def test_a_missing_part(self, folder):
        edit_json(folder / "model_index.json", vae=[None, None])
        refused(folder, "lacks its VAE", "give one as vae=")

    @pytest.mark.parametrize(
        ("setting", "value", "called"),
        [
            ("in_channels", 9, "conv_in.weight"),
            ("in_channels", 7, "an upscaler"),
            ("in_channels", 8, "InstructPix2Pix"),
            ("class_embed_type", "timestep", "class_embed_type"),
            ("num_class_embeds", 1000, "num_class_embeds"),
            ("addition_embed_type", "text_time", "addition_embed_type"),
            ("resnet_time_scale_shift", "scale_shift", "resnet_time_scale_shift"),
            ("down_block_types", ["DownBlock2D", "AttnDownBlock2D"], "AttnDownBlock2D"),
            ("cross_attention_dim", 48, "width 48"),
            ("auto_map", {"AutoModel": "evil.Model"}, "auto_map"),
            ("block_out_channels", "many", "builds no model"),
            ("layers_per_block", 3, "weights lack"),
            ("attention_head_dim", 3, "do not match"),
            ("norm_num_groups", 5, "builds no model"),
        ],
    )
    def test_unet_settings(self, folder, setting, value, called):
        edit_json(folder / "unet/config.json", **{setting: value})
        refused(folder, called)

    def test_vae_settings(self, folder):
        edit_json(folder / "vae/config.json", latent_channels=16)
        refused(folder, "VAE", "latent_channels", "16")

    @pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
    def test_kernels_of_a_hub(self, folder, name):
        edit_json(folder / "text_encoder/config.json", **{name: "kernels-community/flash-attn3"})
        refused(folder, f"text_encoder setting {name}", "eager or sdpa")
        edit_json(folder / "text_encoder/config.json", **{name: {"": "kernels-community/flash-attn3"}})
        refused(folder, f"text_encoder setting {name}", "eager or sdpa")

    def test_missing_keys(self, folder):
        tensors = load_file(folder / UNET)
        del tensors["conv_in.weight"], tensors["conv_in.bias"]
        save_file(tensors, folder / UNET)
        refused(folder, "conv_in", "and 1 more")

    def test_other_shapes(self, folder):
        tensors = load_file(folder / UNET)
        save_file(tensors | {"conv_in.weight": torch.zeros(1)}, folder / UNET)
        refused(folder, "conv_in.weight", "must be", "(1,)")

    def test_missing_weights(self, folder):
        (folder / UNET).unlink()
        refused(folder, "lacks its weights", "unet")

    def test_one_part_or_an_empty_folder(self, folder, tmp_path):
        refused(folder / "unet", "one part of a model")
        edit_json(folder / "unet/config.json", _class_name="ControlNetModel")
        refused(folder / "unet", "a ControlNet")
        (tmp_path / "empty").mkdir()
        refused(tmp_path / "empty", "without model_index.json")

    @pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_lora_weights.safetensors"])
    def test_a_folder_with_a_lora(self, tmp_path, name):
        (tmp_path / name).write_text("{}")
        refused(tmp_path, "a LoRA; load the model that it was made for")

    @pytest.mark.parametrize(
        ("tensors", "called"),
        [
            ({"conditioner.embedders.0.model.ln_final.bias": ()}, "Stable Diffusion XL's refiner"),
            ({"edm_mean": (), "conditioner.embedders.0.transformer.a": ()}, "Playground v2.5"),
            ({"edm_vpred.sigma_max": (), "conditioner.embedders.0.transformer.a": ()}, "CosXL"),
            ({"model.diffusion_model.joint_blocks.0.x": ()}, "Stable Diffusion 3"),
            ({"model.diffusion_model.input_blocks.0.0.weight": (320, 5, 3, 3)}, "a depth model"),
            ({"lora_unet_down_blocks_0.lora_up.weight": ()}, "a LoRA"),
            ({"unet.down_blocks.0.to_q.lora_A.weight": ()}, "a LoRA"),
            ({"control_model.input_blocks.0.0.weight": ()}, "a ControlNet"),
            ({"controlnet_cond_embedding.conv_in.weight": ()}, "a ControlNet"),
            ({"first_stage_model.encoder.conv_in.weight": ()}, "a VAE alone"),
            ({"encoder.conv_in.weight": (), "decoder.conv_in.weight": ()}, "a VAE alone"),
            ({"model.diffusion_model.out.2.bias": ()}, "a UNet alone"),
            ({"emb_params": ()}, "no model known here"),
            (
                {
                    "model.diffusion_model.input_blocks.0.0.weight": (4, 8, 3, 3),
                    "first_stage_model.a": (),
                    "cond_stage_model.transformer.a": (),
                },
                "InstructPix2Pix",
            ),
            (
                {"model.diffusion_model.input_blocks.0.0.weight": (4, 7, 3, 3), "cond_stage_model.model.a": ()},
                "an upscaler",
            ),
            (
                {
                    "model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3),
                    "first_stage_model.a": (),
                    "cond_stage_model.transformer.a": (),
                },
                "unet",
            ),
        ],
    )
    def test_other_files(self, tmp_path, tensors, called):
        path = tmp_path / "model.safetensors"
        save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, path)
        refused(path, called)


class Bomb:
    """Leaves a canary file if anyone unpickles it."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.canary),)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin", ".CKPT", ".safetensors", ".model"])
def test_pickles_are_never_run(folder, tmp_path, write, suffix):
    canary, path = tmp_path / "canary", tmp_path / f"model{suffix}"
    write(Bomb(canary), path)
    refused(path, "safetensors", "run code")
    shutil.copy(path, folder / UNET)
    refused(folder, "run code")
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model.bin")
    refused(folder, "diffusion_pytorch_model.bin", "run code")
    assert not canary.exists()


def test_code_beside_a_model_is_never_run(folder, tmp_path):
    for name in ("pipeline.py", "unet/modeling.py", "__init__.py"):
        (folder / name).write_text(f"import os; os.mkdir({str(tmp_path / 'canary')!r})\n")
    loader.load(folder)
    assert not (tmp_path / "canary").exists()


def test_a_tokenizer_cut_short(folder, pipelines):
    cut(folder / "tokenizer/tokenizer.json")
    refused(folder, "tokenizer", "damaged")
    (folder / "tokenizer/tokenizer.json").unlink()
    refused(folder, "vocab.json")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(family.SD1.configs / "tokenizer" / name, folder / "tokenizer")
    cut(folder / "tokenizer/merges.txt")
    refused(folder, "merges.txt", "truncated")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(folder, value):
    tensors = load_file(folder / UNET)
    tensors["mid_block.resnets.0.conv1.weight"].view(-1)[7] = value
    save_file(tensors, folder / UNET)
    refused(folder, "unet", "mid_block.resnets.0.conv1.weight", "NaN", error=NumericsError)


def test_devices_and_dtypes():
    cpu = torch.device("cpu")
    assert choose_device("cpu") == choose_device("cpu:0") == cpu
    assert choose_dtype(None, torch.device("cuda")) is torch.float16
    assert choose_dtype("bf16", cpu) is choose_dtype(torch.bfloat16, cpu) is torch.bfloat16


@pytest.mark.parametrize("device", ["tpu9", "", "cuda:99", 3.5])
def test_unknown_devices(model, device):
    refused(model, "device", error=InputError, device=device)


@pytest.mark.parametrize("dtype", ["int8", "fp16", torch.float16, torch.float64, torch.int8, 16])
def test_unusable_dtypes(model, dtype):
    refused(model, "dtype", error=InputError, device="cpu", dtype=dtype)


def same(one, other) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class TestAnotherAutoencoder:
    def test_a_folder_a_models_folder_and_files_load_exactly(self, pipelines, tmp_path):
        pipe, other = pipelines["sd15"], build_pipeline("sd15", seed=1)
        build_pipeline("sd15").save_pretrained(tmp_path / "model")
        other.save_pretrained(tmp_path / "other")
        for vae in (tmp_path / "other", tmp_path / "other" / "vae"):
            loaded = loader.load(tmp_path / "model", vae=vae, dtype="fp32", device="cpu")
            assert same(loaded.vae, other.vae) and not same(loaded.vae, pipe.vae) and same(loaded.unet, pipe.unet)

    def test_one_file_of_either_kind(self, pipelines, tmp_path, monkeypatch):
        """The tiny shapes stand for Stable Diffusion's, whose configuration a file alone is read by."""
        other = build_pipeline("sd15", seed=1)
        monkeypatch.setattr(family, "CONFIGS", tmp_path)
        pipelines["sd15"].save_pretrained(tmp_path / "model")
        other.save_pretrained(tmp_path / "sd15")
        whole = save_single_file(other, tmp_path / "whole.safetensors")
        tensors = {n.removeprefix("first_stage_model."): t for n, t in load_file(whole).items() if "first_stage" in n}
        save_file(tensors, tmp_path / "ldm.safetensors")
        for file in (whole, tmp_path / "ldm.safetensors", tmp_path / "sd15/vae/diffusion_pytorch_model.safetensors"):
            assert same(loader.load(tmp_path / "model", vae=file, dtype="fp32", device="cpu").vae, other.vae)
        edit_json(tmp_path / "sd15/vae/config.json", scaling_factor=0.25)  # beside the last one
        loaded = loader.load(tmp_path / "model", vae=file, dtype="fp32", device="cpu")
        assert loaded.vae.config.scaling_factor == 0.25

    def test_what_is_wrong_is_one_line(self, folder, tmp_path):
        (tmp_path / "vae.pt").write_bytes(b"PK")
        save_file({"a": torch.zeros(1)}, tmp_path / "none.safetensors")
        for name, line in [
            ("vae.pt", "weights must be .safetensors"),
            ("gone.safetensors", "no such file"),
            ("none.safetensors", "holds no autoencoder"),
        ]:
            with pytest.raises(ModelError, match=line):
                loader.load(folder, vae=tmp_path / name)


def test_a_file_that_is_overwritten_in_place_changes_no_weight(pipelines, folder):
    loaded = loader.load(folder, dtype="fp32")
    for file in folder.rglob("*.safetensors"):
        size = file.stat().st_size
        with file.open("r+b") as opened:
            opened.seek(size // 2)
            opened.write(b"\x3f" * (size - size // 2))
    assert same_weights(loaded, pipelines["demo"])
