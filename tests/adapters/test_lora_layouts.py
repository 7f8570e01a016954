"""LoRAs' files in every layout that programs write: each layer changes as by hand, or the file is refused by its kind."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from peft import LoHaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from fisedit import Editor
from fisedit.adapters import lora
from fisedit.adapters.lora_layouts import layer_names
from fisedit.errors import AdapterError, NumericsError, UnsupportedModuleError
from fisedit.sparse.modules import base_layer, loras
from tests.support.edits import CAT, DOG
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline
from tests.support.references import QUICK

UNET = ("conv_in", "to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "conv1")
ENDS = {"unet": (*UNET, "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv")}
ENDS |= {"text_encoder": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")}
RANKS, ALPHAS = (1, 2, 3, 4), (None, 0.5, 2.0, 8.0, 1.0)
EMPTIED = "text_encoder", "encoder.layers.0.mlp.fc1"
PROCESSORS = ("to_q", "to_k", "to_v", "to_out.0")


@pytest.fixture(scope="module")
def built():
    return build_pipeline("sd15")


@pytest.fixture
def pipe(built):
    yield built
    built.unload_lora_weights()
    lora._scales.pop(built.unet, None)


def layers_of(pipe, ends=ENDS):
    """(part, the layer's name in diffusers' files, its weight) of all layers with such ends."""
    for part in ends:
        for name, layer in getattr(pipe, part).named_modules():
            if name.endswith(ends[part]) and hasattr(layer, "weight"):
                yield part, name.removeprefix("text_model."), layer.weight.detach()


def changes(pipe, ends=ENDS, alphas=ALPHAS):
    """Random factors and alphas by part and layer; ranks and alphas are mixed."""
    draw, made = torch.Generator().manual_seed(0), {}
    for i, (part, name, weight) in enumerate(layers_of(pipe, ends)):
        rank, shape = RANKS[i % len(RANKS)], weight.shape
        down = torch.randn(rank, *shape[1:], generator=draw) / shape[1:].numel() ** 0.5
        up = torch.randn(shape[0], rank, *[1] * (len(shape) - 2), generator=draw)
        made[part, name] = down, up, alphas[i % len(alphas)]
    return made


def original_names(unet):
    """Our name of a layer -> its name in Stable Diffusion's own code, as diffusers converts the latter."""
    spelled = [name for name in layer_names("unet", unet) if "." in name]
    ends = ("weight", "bias")
    marks = {f"model.diffusion_model.{name}.{end}": torch.tensor(i) for i, name in enumerate(spelled) for end in ends}
    found = convert_ldm_unet_checkpoint(marks, dict(unet.config))
    return {k.removesuffix(".weight"): spelled[int(v)] for k, v in found.items()}


def kohya(start, spell=lambda name: name, text="lora_te_text_model_"):
    def name_of(part, name):
        return f"{start}{spell(name)}".replace(".", "_") if part == "unet" else text + name.replace(".", "_")

    return name_of, ("lora_down.weight", "lora_up.weight", "alpha")


def dotted(unet, text, ends, spell=lambda name: name):
    return (lambda part, name: f"{unet}{spell(name)}" if part == "unet" else f"{text}{name}"), ends


def processors(part, name):
    """Names of `UNet.save_attn_procs`."""
    block, _, layer = name.removesuffix(".0").rpartition(".")
    return f"{block}.processor.{layer}_lora"


AB, WAYS = ("lora_A.weight", "lora_B.weight", "alpha"), ("lora_down.weight", "lora_up.weight", "alpha")
TEXT = "text_encoder.text_model."


def layouts(old=str):
    """Name of a layout -> the layer's name there, and its tensors' ends; `old` makes names of 2022."""
    return {
        "kohya": kohya("lora_unet_"),
        "kohya, no text_model": kohya("lora_unet_", text="lora_te_"),
        "kohya, SDXL's prefix": kohya("lora_unet_", text="lora_te1_text_model_"),
        "kohya, names of 2022": kohya("lora_unet_", old),
        "LyCORIS's wrapper": kohya("lycoris_", text="lycoris_text_model_"),
        "diffusers": dotted("unet.", TEXT, AB),
        "diffusers, no text_model": dotted("unet.", "text_encoder.", AB),
        "diffusers, 2023": dotted("unet.", TEXT, ("lora.down.weight", "lora.up.weight", "lora.alpha")),
        "peft's module": dotted("unet.", TEXT, ("lora_A.style.weight", "lora_B.style.weight", "alpha")),
        "no prefix": dotted("", "text_model.", AB),
        "ComfyUI": dotted("diffusion_model.", "text_encoders.clip_l.transformer.text_model.", WAYS, old),
        "ComfyUI, peft's ends": dotted("diffusion_model.", "clip_l.transformer.text_model.", AB, old),
        "one file's names": dotted("model.diffusion_model.", "cond_stage_model.transformer.text_model.", WAYS, old),
        "save_attn_procs": (processors, ("down.weight", "up.weight", "alpha")),
    }



def tensors_of(made, name_of, ends):
    tensors = {}
    for (part, name), (down, up, alpha) in made.items():
        own = (down, up, None if alpha is None else torch.tensor(alpha))
        tensors |= {f"{name_of(part, name)}.{end}": each for end, each in zip(ends, own, strict=True) if each is not None}
    return tensors


def check_layers(pipe, name, made, scale=1.0):
    """Every layer has its own factor, its weight is the one by hand, and no other layer is changed."""
    found = {}
    for part in ENDS:
        for path, layer in getattr(pipe, part).named_modules():
            if name in getattr(layer, "lora_A", ()):
                found[part, path.removeprefix("text_model.")] = layer
    assert found.keys() == made.keys()
    for place, (down, up, alpha) in made.items():
        factor = scale * (1.0 if alpha is None else alpha / len(down))
        assert found[place].scaling[name] == pytest.approx(factor, rel=1e-6), place
        weight = base_layer(found[place]).weight
        by_hand = factor * (up.flatten(1).double() @ down.flatten(1).double()).view(weight.shape)
        assert (found[place].get_delta_weight(name).double() - by_hand).abs().max() < 1e-5, place


@pytest.mark.parametrize("layout", layouts())
def test_every_layer_has_the_factor_of_its_file(pipe, layout, tmp_path):
    name_of, ends = layouts(original_names(pipe.unet).__getitem__)[layout]
    made = changes(pipe, {"unet": PROCESSORS} if layout == "save_attn_procs" else ENDS)
    save_file(tensors_of(made, name_of, ends), tmp_path / "style.safetensors")
    name = lora.load(pipe, tmp_path / "style.safetensors", 1.0)
    check_layers(pipe, name, made)
    lora.set_scales(pipe, {name: -0.5})
    check_layers(pipe, name, made, -0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shaped", ["as linear", "as 1x1", "alpha [1]", "rank 0"])
def test_tensors_as_files_have_them(pipe, dtype, shaped, tmp_path):
    """Any precision, 1x1 convolutions as linear layers and the other way, alphas of one dimension, empty layers."""
    made = changes(pipe)
    rounded = {k: (down.to(dtype), up.to(dtype), alpha) for k, (down, up, alpha) in made.items()}
    tensors = tensors_of(rounded, *layouts()["kohya"])
    flat = {k: t for k, t in tensors.items() if t.ndim == 4 and t.shape[2:] == (1, 1)}
    more = {
        "as linear": {k: t.flatten(1) for k, t in flat.items()},
        "as 1x1": {k: t[..., None, None] for k, t in tensors.items() if t.ndim == 2},
        "alpha [1]": {k: t[None].to(dtype) for k, t in tensors.items() if not t.ndim},
    }
    if shaped == "rank 0":
        start, (down, up, _) = "lora_te_text_model_encoder_layers_0_mlp_fc1", made.pop(EMPTIED)
        more["rank 0"] = {f"{start}.lora_down.weight": down[:0], f"{start}.lora_up.weight": up[:, :0]}
    save_file({k: t.contiguous() for k, t in (tensors | more[shaped]).items()}, tmp_path / "style.safetensors")
    name = lora.load(pipe, tmp_path / "style.safetensors", 1.0)
    check_layers(pipe, name, {k: (rounded[k][0].float(), rounded[k][1].float(), made[k][2]) for k in made})
