"""Refusals: which models this engine does not run, found in configurations and headers before a weight is allocated.

Knows the architectures by their settings and tensor names; loads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fisedit.errors import ModelError
from fisedit.models.families.family import FAMILIES, SD1, SDXL, SIZES, Family
from fisedit.models.weight_files import PICKLES, Shapes, is_safetensors, pickle_error, read_json

SUPPORTED_MODELS = "a Stable Diffusion 1.x, 2.x or XL text-to-image model"
CLASSES = {part: name for part, (_, name) in SDXL.parts.items()} | {"preview_vae": "AutoencoderTiny"}
"""Part with weights -> class."""

_SCHEDULERS = (
    "DDIM DDPM DEISMultistep DPMSolverMultistep DPMSolverSinglestep EulerAncestralDiscrete EulerDiscrete "
    "HeunDiscrete KDPM2AncestralDiscrete KDPM2Discrete LCM LMSDiscrete PNDM TCD UniPCMultistep"
)
_TOKENIZERS = ("transformers.CLIPTokenizer", "transformers.CLIPTokenizerFast")
_SCHEDULER_CLASSES = tuple(f"diffusers.{name}Scheduler" for name in _SCHEDULERS.split())

_OTHER_PIPELINES: Mapping[str, str] = {
    "StableDiffusionXLInstructPix2Pix": "InstructPix2Pix of Stable Diffusion XL",
    "StableDiffusionXLControlNet": "a ControlNet pipeline",
    "Kolors": "Kolors",
    "StableDiffusion3": "Stable Diffusion 3",
    "Flux": "Flux",
    "StableDiffusionInstructPix2Pix": "InstructPix2Pix",
    "StableDiffusionDepth": "a depth model",
    "StableDiffusionUpscale": "an upscaler",
    "StableDiffusionLatentUpscale": "an upscaler",
    "StableDiffusionControlNet": "a ControlNet pipeline",
    "LatentConsistencyModel": "a guidance-distilled latent consistency model",
}
"""Prefix of an unsupported pipeline's class name -> its usual name."""

_REFINER = "Stable Diffusion XL's refiner, which has one text encoder; load a base model"
_EDM = "Playground v2.5, which is made for EDM's noise schedule"
_OTHER_FILES: tuple[tuple[str, str], ...] = (
    ("conditioner.embedders.0.model.", _REFINER),
    ("edm_mean", _EDM),
    ("edm_vpred.", "CosXL, which is made for EDM's noise schedule"),
    ("model.diffusion_model.joint_blocks.", "Stable Diffusion 3"),
    ("joint_blocks.", "Stable Diffusion 3"),
    ("model.diffusion_model.double_blocks.", "Flux"),
    ("double_blocks.", "Flux"),
    ("control_model.", "a ControlNet"),
    ("controlnet_", "a ControlNet"),
)
"""Prefix of a tensor's name -> the kind of a file with such tensors."""

_PARTS: Mapping[str, tuple[str, ...]] = {
    "a VAE alone": ("first_stage_model.", "encoder.", "decoder.", "quant_conv.", "post_quant_conv."),
    "a UNet alone": ("down_blocks.", "model.diffusion_model."),
    "a text encoder alone": ("text_model.", "embeddings.", "cond_stage_model."),
}
WHOLE_MODEL = tuple(start for family in FAMILIES for starts in family.prefixes.values() for start in starts)
"""Prefixes of the names of tensors in single files with whole models."""

_UNKNOWN = "tensors of no model known here"
_LACKS: Mapping[str, str] = {
    "unet": "UNet; get the whole model",
    "vae": "VAE, its autoencoder; give one as vae=, a file or a folder",
    "text_encoder": "text encoder; get the whole model",
    "text_encoder_2": "second text encoder; get the whole model",
}
"""Part that a single file may lack -> its name, and what to do."""

_IDLE = re.compile(
    r"position_ids$|logit_scale$|text_projection$|\.attn_mask$|^cond_stage_model\.model\.transformer\.resblocks\.23\."
    r"|^(betas|(sqrt_|log_)?(one_minus_|recip_|recipm1_)?alphas_cumprod(_prev)?|sqrt_recip(m1)?_alphas_cumprod"
    r"|posterior_\w+|lvlb_weights|logvar|scale_factor)$|^denoiser\.sigmas$|^model_ema\.(decay|num_updates)$"
    r"|^((first_stage_model|vae)\.)?loss\.|^(first_stage_model|vae)\.model_ema\.|(^|\.)scaled_fp8$"
)
"""Names of tensors that make no picture: constants, what training alone needs, and layers after the one that counts."""

_QUANTISED = re.compile(
    r"\.(comfy_quant|weight_scale(_2)?|SCB|absmax|quant_map|nested_absmax|quant_state\..+|qweight|qzeros|g_idx)$"
)
_CONV_IN = "model.diffusion_model.input_blocks.0.0.weight"
_INPUTS = {5: "a depth model (5 input channels)", 7: "an upscaler (7 input channels)"} | {
    8: "InstructPix2Pix (8 input channels)",
}
INPAINTING_CHANNELS = 9
"""The channels of an inpainting UNet's input: latents, a mask, and the latents of a masked picture."""

_DOWN, _UP = {"CrossAttnDownBlock2D", "DownBlock2D"}, {"CrossAttnUpBlock2D", "UpBlock2D"}
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "in_channels": (4, INPAINTING_CHANNELS),
    "out_channels": (4,),
    "act_fn": ("silu",),
    "addition_embed_type": (None,),
    "attention_type": ("default",),
    "center_input_sample": (False,),
    "class_embed_type": (None,),
    "class_embeddings_concat": (False,),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "cross_attention_norm": (None,),
    "downsample_padding": (1,),
    "dual_cross_attention": (False,),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "mid_block_only_cross_attention": (None, False),
    "mid_block_type": ("UNetMidBlock2DCrossAttn", "UNetMidBlock2D", None),
    "num_class_embeds": (None,),
    "only_cross_attention": (False,),
    "resnet_out_scale_factor": (1, 1.0),
    "resnet_skip_time_act": (False,),
    "resnet_time_scale_shift": ("default",),
    "time_embedding_act_fn": (None,),
    "time_embedding_type": ("positional",),
    "timestep_post_act": (None,),
}
"""UNet setting -> values for which the sparse engine is exact; a missing setting has its default."""

Config = Mapping[str, Any]


def check_pipeline(folder: Path, without: Collection[str] = ()) -> Family:
    """Return the family of a diffusers folder that is a Stable Diffusion pipeline of allowed classes.

    Args:
        folder: The folder.
        without: Parts that come from elsewhere.

    Raises:
        ModelError: It is another pipeline, names other classes, or lacks a part.
    """
    if not (folder / "model_index.json").is_file():
        raise _no_pipeline_error(folder)
    index = read_json(folder / "model_index.json")
    name = str(index.get("_class_name"))
    family = next((family for family in FAMILIES if name in family.pipelines), None)
    if family is None:
        raise _model_error(_describe_class(name), folder)
    if family.open_clip and index.get("text_encoder") in (None, [None, None]) and index.get(family.open_clip):
        raise _model_error(_REFINER, folder)
    if "EDM" in str(index.get("scheduler")):
        raise _model_error(_EDM, folder)
    classes: dict[str, tuple[str, ...]] = {part: (".".join(names),) for part, names in family.parts.items()}
    classes |= dict.fromkeys(family.tokenizers, _TOKENIZERS) | {"scheduler": _SCHEDULER_CLASSES}
    for part in classes.keys() - set(without):
        _check_class(part, index.get(part), classes[part])
    return family


def check_single_file(path: Path, shapes: Shapes, without: Collection[str] = ()) -> Family:
    """Return the family of a single file that contains all parts of Stable Diffusion 1.x, 2.x or XL.

    Args:
        path: The file, for the message.
        shapes: Its tensors.
        without: Parts that come from elsewhere.

    Raises:
        ModelError: It is another kind of file, named if it is known.
    """
    channels = shapes.get(_CONV_IN, ())[1:2]
    found = next((what for count, what in _INPUTS.items() if channels == (count,)), None)
    found = found or next((what for start, what in _OTHER_FILES if _any(shapes, start)), None)
    if _any(shapes, "lora_") or any(".lora" in name for name in shapes):
        found = "a LoRA; load the model that it was made for"
    family = _file_family(shapes)
    lacks = [part for part, starts in family.prefixes.items() if not any(_any(shapes, start) for start in starts)]
    if found is None and len(lacks) > 1:
        found = next((what for what, starts in _PARTS.items() if all(n.startswith(starts) for n in shapes)), _UNKNOWN)
    if found is not None:
        raise _model_error(found, path)
    if missing := next((part for part in lacks if part not in without), None):
        raise ModelError(f"{path} lacks its {_LACKS[missing]}")
    if quantised := next((name for name in shapes if _QUANTISED.search(name)), None):
        raise ModelError(
            f"{path} holds quantised weights (it has {quantised}), which are not read; get an fp16 or fp32 file"
        )
    return family


def _file_family(shapes: Shapes) -> Family:
    """The family whose text encoders a single file holds, or else the first."""

    def holds(family: Family) -> bool:
        return any(_any(shapes, start) for part in family.encoders for start in family.prefixes[part])

    return next(filter(holds, FAMILIES), FAMILIES[0])


def unread(shapes: Shapes, read: Collection[str]) -> list[str]:
    """Return the names of tensors that no part reads and whose content would count.

    Args:
        shapes: Tensors of a file.
        read: Names of those that are read.
    """
    return [name for name in shapes if name not in read and not _IDLE.search(name)]


def unread_note(file: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return the note for the user on tensors that no part reads.

    Args:
        file: The file.
        names: From `unread`.
    """
    if not names:
        return ()
    count = "a tensor" if len(names) == 1 else f"{len(names)} tensors, such as"
    return (f"{file.name} holds {count} {names[0]:.80}, which no part of the model reads",)


def check_vae_file(path: Path, shapes: Shapes) -> None:
    """Check that a single file holds an autoencoder of Stable Diffusion's kind.

    Args:
        path: The file, for the message.
        shapes: Its tensors.

    Raises:
        ModelError: It does not.
    """
    if any(name.startswith(("encoder.layers.", "decoder.layers.", "decoder.1.")) for name in shapes):
        raise ModelError(f"{path} holds a tiny autoencoder (TAESD); give its folder as preview_vae=")
    if not any(name.endswith("encoder.conv_in.weight") for name in shapes):
        raise ModelError(f"{path} holds no autoencoder; give another file, or a model's folder")


def is_converted_vae(shapes: Shapes) -> bool:
    """Return whether a single file that passed `check_vae_file` has diffusers' names."""
    return "encoder.down_blocks.0.resnets.0.conv1.weight" in shapes


def file_inputs(shapes: Shapes) -> int:
    """The input channels of the UNet of a single file that passed `check_single_file`: 4, or 9 of an inpainting model.

    Args:
        shapes: Its tensors.
    """
    inputs = shapes.get(_CONV_IN, ())[1:2]
    return INPAINTING_CHANNELS if inputs == (INPAINTING_CHANNELS,) else 4


def check_unet(config: Config, family: Family = SD1) -> None:
    """Check that the sparse engine is exact for a UNet's settings.

    Args:
        config: The UNet's configuration.
        family: The family of its pipeline.

    Raises:
        ModelError: Names the first unsupported setting.
    """
    for inputs, what in _INPUTS.items():
        if config.get("in_channels") == inputs:
            raise ModelError(f"model must be {SUPPORTED_MODELS}, got {what}; load the model that it was made from")
    sample_size(config)
    for name, supported in {**_SUPPORTED, **family.settings}.items():
        if config.get(name, supported[0]) not in supported:
            raise _setting("UNet", name, config[name], " or ".join(map(repr, supported)))
    for name, supported_blocks in (("down_block_types", _DOWN), ("up_block_types", _UP)):
        for block in config.get(name, ()):
            if block not in supported_blocks:
                raise _setting("UNet", name, block, " or ".join(sorted(supported_blocks)))


def sample_size(config: Config) -> int:
    """The side in latent cells of the square that a UNet was made for, which may be given for both sides.

    Args:
        config: The UNet's configuration.

    Raises:
        ModelError: It tells none.
    """
    given = config.get("sample_size")
    sides = set(given) if isinstance(given, list | tuple) else {given}
    if len(sides) != 1 or not isinstance(side := sides.pop(), int) or side < 1:
        raise _setting("UNet", "sample_size", given, "a positive number")
    return side


def reads_sizes(config: Config) -> bool:
    """Return whether a UNet reads the sizes of the original, the crop and the target beside a prompt.

    Args:
        config: The UNet's configuration.
    """
    return config.get("addition_embed_type") == "text_time"


def check_vae(config: Config, family: Family = SD1) -> None:
    """Check that an autoencoder has 4 latent channels, a downsampling factor of 8, and no other family's scale.

    Args:
        config: The autoencoder's configuration.
        family: The family of its pipeline.

    Raises:
        ModelError: Names the setting that differs.
    """
    if config.get("latent_channels", 4) != 4:
        raise _setting("VAE", "latent_channels", config["latent_channels"], "4")
    if config.get("latents_mean") is not None:
        raise _setting("VAE", "latents_mean", config["latents_mean"], "None")
    own, factor = family.latent_scale, config.get("scaling_factor", SD1.latent_scale)
    if factor != own and factor in {other.latent_scale for other in FAMILIES}:
        raise ModelError(f"the VAE scales latents by {factor}, the model's by {own}; take both from one model family")
    levels = config.get("down_block_types")
    if levels != ["DownEncoderBlock2D"] * 4:
        raise _setting("VAE", "down_block_types", levels, "4 DownEncoderBlock2D")


def check_tiny_vae(config: Config) -> None:
    """Check that a preview's autoencoder is an `AutoencoderTiny` with 4 latent channels and a factor of 8.

    Args:
        config: The autoencoder's configuration.

    Raises:
        ModelError: Names the setting that differs.
    """
    check_config("preview_vae", config)
    for name, expected, default in (("latent_channels", 4, 4), ("upsampling_scaling_factor", 2, 2)):
        if config.get(name, default) != expected:
            raise _setting("preview VAE", name, config[name], str(expected))
    levels = config.get("decoder_block_out_channels", (64,) * 4)
    if len(levels) != 4:
        raise _setting("preview VAE", "decoder_block_out_channels", levels, "4 numbers")


def check_fit(unet: Config, encoders: Sequence[Config]) -> None:
    """Check that the UNet's cross-attention has the text encoders' width, and its added conditions theirs.

    Args:
        unet: The UNet's configuration.
        encoders: The text encoders' configurations.

    Raises:
        ModelError: The widths differ.
    """
    reads, writes = unet.get("cross_attention_dim"), sum(int(config.get("hidden_size", 0)) for config in encoders)
    if reads != writes:
        plural = "text encoder writes" if len(encoders) == 1 else "text encoders write"
        raise ModelError(f"the UNet reads text of width {reads}, the {plural} {writes}; take both from one model")
    if unet.get("addition_embed_type") is not None:
        pooled, sizes = int(encoders[-1].get("projection_dim", 0)), SIZES * int(unet.get("addition_time_embed_dim", 0))
        reads = unet.get("projection_class_embeddings_input_dim")
        if reads != pooled + sizes:
            raise ModelError(
                f"the UNet adds conditions of width {reads}, the second text encoder and {SIZES} sizes have "
                f"{pooled + sizes}; take both from one model"
            )


def check_config(part: str, config: Config) -> None:
    """Check that a component's configuration names its own class, no code, no quantisation and no kernels of a hub.

    Args:
        part: The component.
        config: Its configuration.

    Raises:
        ModelError: It does not.
    """
    named = {str(name) for name in (config.get("_class_name"), *(config.get("architectures") or ())) if name}
    foreign = named - {CLASSES[part]} or {key for key in ("auto_map", "quantization_config") if config.get(key)}
    if foreign:
        raise _setting(part, "class", ", ".join(sorted(foreign)), CLASSES[part])
    for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        if config.get(name) not in (None, "eager", "sdpa"):  # transformers would fetch such a kernel and run it
            raise _setting(part, name, config[name], "eager or sdpa")


def check_shapes(
    part: str,
    expected: Shapes,
    actual: Shapes,
    advice: str = "config and weights do not match",
    again: str = "download them again",
) -> None:
    """Compare a component's tensors with those of its configuration.

    Args:
        part: The component.
        expected: Tensors of the configuration.
        actual: Tensors of the file.
        advice: Last words of the message on another shape.
        again: Last words of the message on a tensor that is missing.

    Raises:
        ModelError: Tensors are missing or have other shapes; names the first.
    """
    missing = [name for name in expected if name not in actual]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the {part}'s weights lack {missing[0]}{more}; {again}")
    for name, shape in expected.items():
        if actual[name] != shape:
            raise ModelError(f"the {part}'s {name} must be {shape}, got {actual[name]}; {advice}")


def pickled(path: Path) -> ModelError | None:
    """The error for a file whose suffix is that of a pickle, or None."""
    return pickle_error(path) if path.suffix.lower() in PICKLES else None


def _check_class(part: str, named: Any, classes: tuple[str, ...]) -> None:
    if named is None or named == [None, None]:
        raise ModelError(f"the model lacks its {_LACKS.get(part, f'{part}; get the whole model')}")
    got = ".".join(map(str, named)) if isinstance(named, list) else str(named)
    if got not in classes:
        raise _setting(
            "model", part, got, classes[0] if len(classes) == 1 else f"one of diffusers' own, as {classes[0]}"
        )


def _no_pipeline_error(folder: Path) -> ModelError:
    kinds = (
        ("adapter_config.json", "a LoRA; load the model that it was made for"),
        ("pytorch_lora_weights.safetensors", "a LoRA; load the model that it was made for"),
        ("config.json", "one part of a model; give the folder above"),
    )
    files = sorted(path.name for path in folder.glob("*") if is_safetensors(path))
    plain = f"a folder without model_index.json{f', give its file {files[0]}' if files else ''}"
    found = next((what for name, what in kinds if (folder / name).is_file()), plain)
    if found.startswith("one part") and "ControlNet" in str(read_json(folder / "config.json").get("_class_name")):
        found = "a ControlNet"
    return _model_error(found, folder)


def _describe_class(name: str) -> str:
    matches = (label for start, label in _OTHER_PIPELINES.items() if name.startswith(start))
    return next(matches, f"a {name}")


def _model_error(what: str, path: Path) -> ModelError:
    return ModelError(f"model must be {SUPPORTED_MODELS}, got {what} ({path})")


def _setting(owner: str, name: str, actual: object, expected: str) -> ModelError:
    return ModelError(f"{owner} setting {name} must be {expected}, got {actual!r}; this architecture is not supported")


def _any(shapes: Shapes, start: str) -> bool:
    return any(name.startswith(start) for name in shapes)
