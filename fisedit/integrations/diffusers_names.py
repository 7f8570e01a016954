"""The names of diffusers' pipelines that `FisEditPipeline` passes on, does without, or refuses with a counterpart.

Knows names alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fisedit.errors import InputError

PASSED = frozenset(
    {
        *("unet", "vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor", "image_encoder"),
        *("config", "device", "dtype", "hf_device_map", "vae_scale_factor", "image_processor", "numpy_to_pil"),
        *("maybe_free_model_hooks", "remove_all_hooks"),
    }
)
"""Names that are read from diffusers' pipeline."""

PARTS: Mapping[str, tuple[str, ...]] = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
}
"""Part that may be exchanged -> classes that it may have."""

ABSENT = frozenset({"safety_checker", "feature_extractor", "image_encoder"})
"""Parts that may be set to None alone."""

IDLE = frozenset(
    {
        *("enable_attention_slicing", "disable_attention_slicing", "set_attention_slice"),
        *("enable_vae_slicing", "disable_vae_slicing", "enable_vae_tiling", "disable_vae_tiling"),
        *("enable_xformers_memory_efficient_attention", "disable_xformers_memory_efficient_attention"),
        "set_use_memory_efficient_attention_xformers",
    }
)
"""Methods that change no picture, and do nothing here."""

_LORA = "a LoRA counts beside the model's weights, at the scale that set_adapters gives it"
_MEMORY = "bound memory by max_recorded_bytes and max_host_bytes of from_pretrained, or give device='cpu'"

_COUNTERPARTS: Mapping[str, str] = {
    "fuse_lora": _LORA,
    "unfuse_lora": _LORA,
    "set_lora_device": "to moves the model with its LoRAs",
    "enable_lora_hotswap": "unload_lora_weights and load_lora_weights exchange a LoRA",
    "save_lora_weights": "a LoRA's file stays as it is",
    "lora_state_dict": "load_lora_weights reads a file",
    "enable_model_cpu_offload": _MEMORY,
    "enable_sequential_cpu_offload": _MEMORY,
    "enable_group_offload": _MEMORY,
    "encode_prompt": "give the prompt itself; brackets weigh its words",
    "prepare_ip_adapter_image_embeds": "give the picture as ip_adapter_image",
    "push_to_hub": "save_pretrained writes a folder",
    "progress_bar": "editor.generate and editor.edit call on_step before every step",
    "interrupt": "an on_step of editor.generate or editor.edit may raise Cancelled",
}
"""Name that is not available -> what to do instead; others of diffusers' are to be left out."""


def counterpart(name: str) -> InputError:
    """Return the error for a name of diffusers' that is not available.

    Args:
        name: The name of an attribute or a method.
    """
    do = _COUNTERPARTS.get(name, "it has no counterpart, leave it out")
    return InputError(f"FisEditPipeline has no {name} of diffusers' pipelines; {do}")


def find_missing(name: str) -> Callable[..., Any]:
    """Return the method that refuses a call to a method of diffusers' pipelines.

    Args:
        name: The name of an attribute that `FisEditPipeline` does not have.

    Raises:
        InputError: It is a value in diffusers. AttributeError: Neither has it.
    """
    from diffusers import StableDiffusionPipeline

    if name not in _COUNTERPARTS and not hasattr(StableDiffusionPipeline, name):
        raise AttributeError(f"FisEditPipeline has no attribute {name!r}")
    if isinstance(getattr(StableDiffusionPipeline, name, None), property):
        raise counterpart(name)

    def refuse(*_: Any, **__: Any) -> None:
        raise counterpart(name)

    return refuse
