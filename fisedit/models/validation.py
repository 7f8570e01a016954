"""Refusals: which models this engine does not run, found in configurations and headers before a weight is allocated.

Knows the architectures by their settings and tensor names; loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fisedit.errors import ModelError
from fisedit.models.weight_files import PICKLES, Shapes, pickle_error, read_json

WANTED = "a Stable Diffusion 1.x or 2.x text-to-image model"
MODULES: Mapping[str, tuple[str, str]] = {
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "text_encoder": ("transformers", "CLIPTextModel"),
}
"""The pipeline's parts that hold weights -> (library, class)."""

_SCHEDULERS = (
    "DDIM DDPM DEISMultistep DPMSolverMultistep DPMSolverSinglestep EulerAncestralDiscrete EulerDiscrete "
    "HeunDiscrete KDPM2AncestralDiscrete KDPM2Discrete LCM LMSDiscrete PNDM UniPCMultistep"
)
_CLASSES: Mapping[str, tuple[str, ...]] = {
    **{part: (".".join(names),) for part, names in MODULES.items()},
    "tokenizer": ("transformers.CLIPTokenizer", "transformers.CLIPTokenizerFast"),
    "scheduler": tuple(f"diffusers.{name}Scheduler" for name in _SCHEDULERS.split()),
}
"""The pipeline's part -> the classes that it may name."""

_OTHER_PIPELINES: Mapping[str, str] = {
    "StableDiffusionXL": "Stable Diffusion XL",
    "StableDiffusion3": "Stable Diffusion 3",
    "Flux": "Flux",
    "StableDiffusionInpaint": "an inpainting model",
    "StableDiffusionInstructPix2Pix": "InstructPix2Pix",
    "StableDiffusionDepth": "a depth model",
    "StableDiffusionUpscale": "an upscaler",
    "StableDiffusionLatentUpscale": "an upscaler",
    "StableDiffusionControlNet": "a ControlNet pipeline",
    "LatentConsistencyModel": "a guidance-distilled latent consistency model",
}
"""Start of a foreign pipeline's class name -> what people call it."""

_OTHER_FILES: tuple[tuple[str, str], ...] = (
    ("conditioner.embedders.", "Stable Diffusion XL"),
    ("model.diffusion_model.joint_blocks.", "Stable Diffusion 3"),
    ("joint_blocks.", "Stable Diffusion 3"),
    ("model.diffusion_model.double_blocks.", "Flux"),
    ("double_blocks.", "Flux"),
    ("control_model.", "a ControlNet"),
    ("controlnet_", "a ControlNet"),
    ("cond_stage_model.model.", "Stable Diffusion 2 as one file; convert it to a diffusers folder"),
)
"""Start of a tensor's name -> what a file with such tensors is."""

_PARTS: Mapping[str, tuple[str, ...]] = {
    "a VAE alone": ("first_stage_model.", "encoder.", "decoder.", "quant_conv.", "post_quant_conv."),
    "a UNet alone": ("down_blocks.", "model.diffusion_model."),
    "a text encoder alone": ("text_model.", "embeddings.", "cond_stage_model."),
}
SINGLE_FILE: Mapping[str, str] = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "cond_stage_model.transformer.",
}
"""Component -> start of its tensors' names in a single-file checkpoint of Stable Diffusion 1.x."""

_UNKNOWN = "tensors of no model known here"
_CONV_IN = "model.diffusion_model.input_blocks.0.0.weight"
_INPUTS = {8: "InstructPix2Pix (8 input channels)", 9: "an inpainting model (9 input channels)"}
_DOWN, _UP = {"CrossAttnDownBlock2D", "DownBlock2D"}, {"CrossAttnUpBlock2D", "UpBlock2D"}
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "in_channels": (4,),
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
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "num_class_embeds": (None,),
    "only_cross_attention": (False,),
    "resnet_out_scale_factor": (1, 1.0),
    "resnet_skip_time_act": (False,),
    "resnet_time_scale_shift": ("default",),
    "reverse_transformer_layers_per_block": (None,),
    "time_embedding_act_fn": (None,),
    "time_embedding_type": ("positional",),
    "timestep_post_act": (None,),
}
"""UNet setting -> the values that the sparse engine is exact for; a setting that is absent has its default."""

Config = Mapping[str, Any]


def check_pipeline(folder: Path) -> None:
    """Check that a diffusers folder is a Stable Diffusion pipeline made of the classes we load, and of no others.

    Raises:
        ModelError: it is another pipeline, names foreign classes, or lacks a part.
    """
    if not (folder / "model_index.json").is_file():
        raise _no_pipeline(folder)
    index = read_json(folder / "model_index.json")
    name = str(index.get("_class_name"))
    if name != "StableDiffusionPipeline":
        raise _refusal(_called(name), folder)
    for part, classes in _CLASSES.items():
        _check_class(part, index.get(part), classes)


def check_single_file(path: Path, shapes: Shapes) -> None:
    """Check that a single file holds the three models of Stable Diffusion 1.x.

    Raises:
        ModelError: it is something else, named if it is known.
    """
    channels = shapes.get(_CONV_IN, ())[1:2]
    found = next((what for count, what in _INPUTS.items() if channels == (count,)), None)
    found = found or next((what for start, what in _OTHER_FILES if _any(shapes, start)), None)
    if _any(shapes, "lora_") or any(".lora" in name for name in shapes):
        found = "a LoRA; load the model that it was made for"
    if found is None and not all(_any(shapes, start) for start in SINGLE_FILE.values()):
        found = next((what for what, starts in _PARTS.items() if all(n.startswith(starts) for n in shapes)), _UNKNOWN)
    if found is not None:
        raise _refusal(found, path)


def check_unet(config: Config) -> None:
    """Check a UNet's settings against what the sparse engine computes exactly.

    Raises:
        ModelError: names the first setting that it does not.
    """
    for inputs, what in _INPUTS.items():
        if config.get("in_channels") == inputs:
            raise ModelError(f"model must be {WANTED}, got {what}; load the model that it was made from")
    for name, plain in _PLAIN.items():
        if config.get(name, plain[0]) not in plain:
            raise _setting("UNet", name, config[name], " or ".join(map(repr, plain)))
    for name, plain_blocks in (("down_block_types", _DOWN), ("up_block_types", _UP)):
        for block in config.get(name, ()):
            if block not in plain_blocks:
                raise _setting("UNet", name, block, " or ".join(sorted(plain_blocks)))


def check_vae(config: Config) -> None:
    """Check that an autoencoder has 4 latent channels and shrinks images by 8.

    Raises:
        ModelError: names the setting that differs.
    """
    if config.get("latent_channels", 4) != 4:
        raise _setting("VAE", "latent_channels", config["latent_channels"], "4")
    levels = config.get("down_block_types")
    if levels != ["DownEncoderBlock2D"] * 4:
        raise _setting("VAE", "down_block_types", levels, "4 DownEncoderBlock2D")


def check_fit(unet: Config, text_encoder: Config) -> None:
    """Check that the UNet reads what the text encoder writes.

    Raises:
        ModelError: their widths differ.
    """
    reads, writes = unet.get("cross_attention_dim"), text_encoder.get("hidden_size")
    if reads != writes:
        raise ModelError(
            f"the UNet reads text of width {reads}, the text encoder writes {writes}; take both from one model"
        )


def check_config(part: str, config: Config) -> None:
    """Check that a component's configuration names its own class and asks for no code or quantisation.

    Raises:
        ModelError: it does not.
    """
    named = {str(name) for name in (config.get("_class_name"), *(config.get("architectures") or ())) if name}
    foreign = named - {MODULES[part][1]} or {key for key in ("auto_map", "quantization_config") if config.get(key)}
    if foreign:
        raise _setting(part, "class", ", ".join(sorted(foreign)), MODULES[part][1])


def check_shapes(part: str, expected: Shapes, got: Shapes) -> None:
    """Compare a component's tensors with what its configuration asks for.

    Raises:
        ModelError: tensors are missing or have other shapes; names the first.
    """
    missing = [name for name in expected if name not in got]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the {part}'s weights lack {missing[0]}{more}; download the model again")
    for name, shape in expected.items():
        if got[name] != shape:
            raise ModelError(f"the {part}'s {name} must be {shape}, got {got[name]}; config and weights do not match")


def pickled(path: Path) -> ModelError | None:
    """The refusal that a file's name alone calls for, or None."""
    return pickle_error(path) if path.suffix.lower() in PICKLES else None


def _check_class(part: str, named: Any, classes: tuple[str, ...]) -> None:
    if named is None or named == [None, None]:
        raise ModelError(f"the model lacks its {part}; copy or download the whole folder")
    got = ".".join(map(str, named)) if isinstance(named, list) else str(named)
    if got not in classes:
        raise _setting(
            "model", part, got, classes[0] if len(classes) == 1 else f"one of diffusers' own, as {classes[0]}"
        )


def _no_pipeline(folder: Path) -> ModelError:
    kinds = (
        ("adapter_config.json", "a LoRA; load the model that it was made for"),
        ("pytorch_lora_weights.safetensors", "a LoRA; load the model that it was made for"),
        ("config.json", "one part of a model; give the folder above"),
    )
    found = next((what for name, what in kinds if (folder / name).is_file()), "a folder without model_index.json")
    if found.startswith("one part") and "ControlNet" in str(read_json(folder / "config.json").get("_class_name")):
        found = "a ControlNet"
    return _refusal(found, folder)


def _called(name: str) -> str:
    matches = (label for start, label in _OTHER_PIPELINES.items() if name.startswith(start))
    return next(matches, f"a {name}")


def _refusal(what: str, path: Path) -> ModelError:
    return ModelError(f"model must be {WANTED}, got {what} ({path})")


def _setting(owner: str, name: str, got: object, wanted: str) -> ModelError:
    return ModelError(f"{owner} setting {name} must be {wanted}, got {got!r}; this architecture is not supported")


def _any(shapes: Shapes, start: str) -> bool:
    return any(name.startswith(start) for name in shapes)
