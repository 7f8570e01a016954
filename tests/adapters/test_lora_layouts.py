"""LoRAs' files in every layout: each layer changes as by hand, or the file is refused by what it is."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from peft import LoHaConfig, LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from fisedit import Editor
from fisedit.adapters import lora
from fisedit.adapters.lora_layouts import layer_names, read_changes
from fisedit.errors import AdapterError, NumericsError, SessionError, UnsupportedModuleError
from fisedit.features.sites import base_layer, loras, weight_of
from tests.support.edits import CAT, DOG
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline
from tests.support.references import QUICK

UNET = ("conv_in", "to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "conv1")
ENDS = {"unet": (*UNET, "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv")}
ENDS |= {"text_encoder": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")}
SQUARE = grids(16, 16)["square"]
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


def early(part, name):
    """Names of diffusers before 0.18."""
    if part == "unet":
        return f"unet.{processors(part, name)}" if name.endswith(PROCESSORS) else f"unet.{name}.lora"
    old = re.sub("(q|k|v|out)_proj$", r"to_\1_lora", name)
    return f"text_encoder.text_model.{old}" if old != name else f"text_encoder.text_model.{name}.lora"


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
        "diffusers, early 2023": (early, ("down.weight", "up.weight", "alpha")),
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
        tensors |= {
            f"{name_of(part, name)}.{end}": each for end, each in zip(ends, own, strict=True) if each is not None
        }
    return tensors


def check_changes(found, made):
    """What was read is each layer's change, by hand."""
    assert {(part, name.removeprefix("text_model.")) for part, name in found} == made.keys()
    for (part, name), change in found.items():
        down, up, alpha = made[part, name.removeprefix("text_model.")]
        assert torch.equal(change.down.flatten(1), down.flatten(1)) and torch.equal(change.up.flatten(1), up.flatten(1))
        assert change.alpha == (len(down) if alpha is None else alpha)


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


def parts(pipe):
    return {"unet": pipe.unet, "text_encoder": pipe.text_encoder}


@pytest.mark.parametrize("layout", layouts())
def test_a_layout_is_read_whole(pipe, layout, tmp_path):
    name_of, ends = layouts(original_names(pipe.unet).__getitem__)[layout]
    made = changes(pipe, {"unet": PROCESSORS} if layout == "save_attn_procs" else ENDS)
    save_file(tensors_of(made, name_of, ends), tmp_path / "style.safetensors")
    check_changes(read_changes(tmp_path / "style.safetensors", parts(pipe)), made)


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_every_layer_has_the_factor_of_its_file(pipe, layout, tmp_path):
    made = changes(pipe)
    save_file(tensors_of(made, *layouts()[layout]), tmp_path / "style.safetensors")
    name = lora.load(pipe, tmp_path / "style.safetensors", 1.0)
    check_layers(pipe, name, made)
    lora.set_scales(pipe, {name: -0.5})
    check_layers(pipe, name, made, -0.5)


SHAPES = ("as linear", torch.float16), ("as 1x1", torch.bfloat16), ("alpha [1]", torch.float8_e4m3fn)
SHAPES = (*SHAPES, ("rank 0", torch.float64))


@pytest.mark.parametrize(("shaped", "dtype"), SHAPES)
def test_tensors_as_files_have_them(pipe, shaped, dtype, tmp_path):
    """Any precision, 1x1 convolutions as linear layers and the other way, alphas of one dimension, empty layers."""
    made = changes(pipe)
    rounded = {k: (down.to(dtype), up.to(dtype), alpha) for k, (down, up, alpha) in made.items()}
    tensors = tensors_of(rounded, *layouts()["kohya"])
    more = {
        "as linear": {k: t.flatten(1) for k, t in tensors.items() if t.ndim == 4 and t.shape[2:] == (1, 1)},
        "as 1x1": {k: t[..., None, None] for k, t in tensors.items() if t.ndim == 2},
        "alpha [1]": {k: t[None].to(dtype) for k, t in tensors.items() if not t.ndim},
    }
    if shaped == "rank 0":
        start, (down, up, _) = "lora_te_text_model_encoder_layers_0_mlp_fc1", made.pop(EMPTIED)
        more["rank 0"] = {f"{start}.lora_down.weight": down[:0], f"{start}.lora_up.weight": up[:, :0]}
    save_file({k: t.contiguous() for k, t in (tensors | more[shaped]).items()}, tmp_path / "style.safetensors")
    name = lora.load(pipe, tmp_path / "style.safetensors", 1.0)
    check_layers(pipe, name, {k: (rounded[k][0].float(), rounded[k][1].float(), made[k][2]) for k in made})


PEFT = {"r": 4, "lora_alpha": 6, "rank_pattern": {"attn1.to_q": 2}, "alpha_pattern": {"attn1.to_q": 5}}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("written", ["peft's folder", "peft's file", "diffusers' metadata", "diffusers' adapter"])
def test_alphas_beside_the_tensors(pipe, written, rslora, tmp_path):
    """As peft itself scales them: by patterns, and by the root of the rank."""
    ends = ["to_q", "to_v", "conv1"]
    config = LoraConfig(**PEFT, target_modules=ends, use_rslora=rslora, init_lora_weights=False)
    unet, folder = copy.deepcopy(pipe.unet), tmp_path / "style"
    if written.startswith("peft"):
        get_peft_model(unet, config).save_pretrained(folder)
    else:
        unet.add_adapter(config)
        about = {"unet_lora_adapter_metadata": unet.peft_config["default"].to_dict()}
        if written.endswith("adapter"):
            unet.save_lora_adapter(folder)
        else:
            StableDiffusionPipeline.save_lora_weights(folder, get_peft_model_state_dict(unet), **about)
    source = folder / "adapter_model.safetensors" if written == "peft's file" else folder
    name, by_peft = lora.load(pipe, source, 1.0), {n: m for n, m in unet.named_modules() if hasattr(m, "lora_A")}
    found = {n: m for n, m in pipe.unet.named_modules() if hasattr(m, "lora_A")}
    assert found.keys() == by_peft.keys() and len({m.scaling[name] for m in found.values()}) == 2
    for layer, own in by_peft.items():
        assert found[layer].scaling[name] == pytest.approx(own.scaling["default"])
        assert torch.equal(found[layer].lora_B[name].weight, own.lora_B["default"].weight)


@pytest.mark.parametrize("kind", ["peft's", "kohya's", "by input"])
def test_a_dora_is_what_peft_makes_of_it(pipe, kind, tmp_path):
    """Each layer's magnitudes are those of its file, and its factor is alpha / rank."""
    unet, ends = copy.deepcopy(pipe.unet), ["to_q", "conv1", "proj_in"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=ends, use_dora=True, init_lora_weights=False)
    wrapped = get_peft_model(unet, config)
    layers = {n: m for n, m in unet.named_modules() if hasattr(m, "lora_A")}
    draw = torch.Generator().manual_seed(1)
    for layer in layers.values():
        magnitude = layer.lora_magnitude_vector["default"].weight
        magnitude.data *= torch.rand(magnitude.shape, generator=draw) + 0.5
    wrapped.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    if kind != "peft's":
        file, tensors = tmp_path / "style.safetensors", {}
        for name, layer in layers.items():
            own, base = layer.lora_magnitude_vector["default"].weight.detach(), layer.get_base_layer().weight
            scale = torch.rand(1, base.shape[1], *[1] * (base.ndim - 2), generator=draw) + 0.5
            scale = scale if kind == "by input" else own.reshape(-1, *[1] * (base.ndim - 1))
            halves = layer.lora_A["default"].weight, layer.lora_B["default"].weight, torch.tensor(6.0), scale
            ends = ("lora_down.weight", "lora_up.weight", "alpha", "dora_scale")
            tensors |= {
                f"lora_unet_{name.replace('.', '_')}.{e}": t.detach() for e, t in zip(ends, halves, strict=True)
            }
        save_file({k: t.clone() for k, t in tensors.items()}, file)
    loaded = lora.load(pipe, file, 1.0)
    for name, by_peft in layers.items():
        layer, base = pipe.unet.get_submodule(name), by_peft.get_base_layer().weight
        assert layer.scaling[loaded] == 1.5
        if kind == "by input":  # LyCORIS's own formula
            expected = base + by_peft.get_delta_weight("default")
            norm = expected.transpose(0, 1).flatten(1).norm(dim=1).view(1, -1, *[1] * (base.ndim - 2))
            expected = expected * tensors[f"lora_unet_{name.replace('.', '_')}.dora_scale"] / norm
        else:
            by_peft.merge(safe_merge=True)
            expected = by_peft.get_base_layer().weight
        assert (weight_of(layer) - expected).abs().max() < 1e-5


QUERY = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
REFUSED = {
    ".hada_w1_a": "a LoHa of LyCORIS",
    ".lokr_w1": "a LoKr of LyCORIS",
    ".oft_blocks": "an OFT or BOFT of LyCORIS",
    ".a1.weight": "a GLoRA of LyCORIS",
    ".on_input": "an IA3 of LyCORIS",
    ".lora_mid.weight": "has lora_mid",
    ".w_norm": "changes norms",
    ".diff": "has full differences",
    ".diff_b": "changes biases",
    ".lora_B.bias": "has biases",
    ".lora_A.style.bias": "has biases",
    ".lora_E": "is an AdaLoRA",
}


@pytest.mark.parametrize("end", REFUSED)
@pytest.mark.parametrize("alone", [False, True])
def test_what_is_no_plain_lora_is_refused_by_what_it_is(pipe, end, alone, tmp_path):
    tensors = {} if alone else tensors_of(changes(pipe, {"unet": ("to_q",)}), *layouts()["kohya"])
    save_file(tensors | {QUERY + end: torch.ones(4, 4)}, tmp_path / "style.safetensors")
    with pytest.raises(AdapterError, match=REFUSED[end]) as refused:
        lora.load(pipe, tmp_path / "style.safetensors", 1.0)
    assert "\n" not in str(refused.value) and not loras(pipe.unet)


WRONG = {
    "lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": "it is for Stable Diffusion XL",
    "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": "it is for Flux",
    f"{QUERY}.reshape_weight": r"tensors that are no LoRA's, .*reshape_weight'; take them out",
    f"{QUERY}.lora.up.weight": "changes .*to_q twice",
    "lora_unet_conv_in.lora_up.weight": "is incomplete: it has no down for conv_in",
    f"{QUERY}.alpha": "one number as alpha of mid_block.*got 15",
    f"{QUERY}.lora_up.weight": "to_q is .*, got",
    "unet:0:up": "cloneofsimo's",
    "bundle_emb.someone.string_to_param.*": "load_textual_inversion",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(pipe, name, tmp_path):
    tensors = tensors_of(changes(pipe, {"unet": ("to_q",)}), *layouts()["kohya"])
    save_file(tensors | {name: torch.ones(3, 5)}, tmp_path / "style.safetensors")
    with pytest.raises(AdapterError, match=WRONG[name]):
        lora.load(pipe, tmp_path / "style.safetensors", 1.0)


def test_files_whose_numbers_are_none(pipe, tmp_path):
    tensors, file = tensors_of(changes(pipe, {"unet": ("to_q",)}), *layouts()["kohya"]), tmp_path / "style.safetensors"
    save_file(tensors | {f"{QUERY}.lora_up.weight": tensors[f"{QUERY}.lora_up.weight"] / 0}, file)
    with pytest.raises(NumericsError, match="to_q holds NaN or infinity"):
        lora.load(pipe, file, 1.0)
    assert not lora.loaded_scales(pipe) and not any(hasattr(m, "lora_A") for m in pipe.unet.modules())
    save_file(tensors | {k: t * 0 for k, t in tensors.items() if not t.ndim}, file)
    lora.load(pipe, file, 1.0)  # some layers tell no alpha
    save_file(tensors | {f"{QUERY}.alpha": torch.tensor(float("nan"))}, file)
    with pytest.raises(AdapterError, match="alphas up to 1e\\+06, got nan for mid_block"):
        lora.load(pipe, file, 1.0)
    zeros = {f"{k.rpartition('.lora_up')[0]}.alpha": torch.tensor(0.0) for k in tensors if "lora_up" in k}
    save_file(tensors | zeros, file)
    with pytest.raises(AdapterError, match="changes nothing"):
        lora.load(pipe, file, 1.0)


BROKEN = {
    "not JSON": ("{", "is damaged"),
    "a list": ("[1]", "is damaged"),
    "another method": ('{"peft_type": "LOHA"}', "is peft's 'LOHA'"),
    "another base": ('{"init_lora_weights": "pissa_niter_4"}', "that 'pissa_niter_4' changed"),
    "no number": ('{"lora_alpha": "much"}', "must be numbers by layer"),
    "a slow pattern": ('{"lora_alpha": 1, "alpha_pattern": {"(a+)+b": 1}}', "by name, got the pattern"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_peft_configurations_that_are_none(pipe, kind, tmp_path):
    text, why = BROKEN[kind]
    tensors = tensors_of(changes(pipe, {"unet": ("to_q",)}, (None,)), *dotted("base_model.model.", "", AB))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"adapter_config\.json says; put that file beside it"):
        lora.load(pipe, tmp_path, 1.0)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match=why):
        lora.load(pipe, tmp_path, 1.0)


@pytest.mark.parametrize("config", [LoraConfig(use_dora=True), LoraConfig(lora_bias=True), LoHaConfig()])
def test_what_diffusers_loaded_is_refused_where_sparse_steps_do_not_know_it(pipe, config):
    config.target_modules = ["mid_block.resnets.0.conv1"]
    pipe.unet.add_adapter(config)
    with pytest.raises(UnsupportedModuleError, match=r"mid_block\.resnets\.0\.conv1 must have LoRAs without"):
        Editor(pipe)


@pytest.mark.parametrize("part", ENDS)
def test_a_lora_of_one_part_is_recorded_and_missed(pipe, part, tmp_path):
    """One of the text encoder alone as one of the UNet; an edit of a picture that was made with it needs it."""
    file, editor = tmp_path / "style.safetensors", Editor(pipe)
    save_file(tensors_of(changes(pipe, {part: ENDS[part][:2]}, (3.0,)), *layouts()["kohya"]), file)
    name = editor.load_lora(file, 0.5)
    source = editor.generate(CAT, **QUICK)
    assert dict(source.config.loras).keys() == {name}
    assert {scaling for _, scaling in source.config.loras} == {1.5 / rank for rank in RANKS}
    editor.scale_loras({}), editor.edit(DOG, mask=SQUARE)
    editor.checkout(source.id), editor.unload_lora(name)
    with pytest.raises(SessionError, match=f"with {name}, as it was made, got a model without {name}"):
        editor.edit(DOG, mask=SQUARE)
    with pytest.raises(SessionError, match="rebuilt with"):
        editor.dense(source.id)
