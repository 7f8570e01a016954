"""Tells which texts in a file say how the picture was made, by whatever program. Knows their names and forms."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

PARAMETERS = "parameters"

PROGRAMS = ("AUTOMATIC1111", "ComfyUI", "Draw Things", "Fooocus", "InvokeAI", "NovelAI", "SD.Next", "SwarmUI")
"""Beginnings of the texts in which programs name themselves."""

_ALWAYS = {
    *(PARAMETERS, "prompt", "workflow", "invokeai_metadata", "invokeai_graph", "invokeai_workflow", "sd-metadata"),
    *("Dream", "generation_data", "postprocessing", "extras", "fooocus_scheme", "sui_image_params", "Negative Prompt"),
    "negative_prompt",
}
"""Names under which programs write nothing else: web UIs, ComfyUI, InvokeAI, Fooocus, SwarmUI, TensorArt."""

_EASY_DIFFUSION = {
    *("prompt", "negative_prompt", "seed", "num_inference_steps", "guidance_scale", "sampler_name", "width", "height"),
    *("use_stable_diffusion_model", "use_vae_model", "clip_skip", "Prompt", "Negative Prompt", "Seed", "Steps"),
    *("Guidance Scale", "Sampler", "Stable Diffusion model", "VAE model", "Clip Skip", "Width", "Height"),
    *("use_lora_model", "lora_alpha", "use_hypernetwork_model", "hypernetwork_strength", "tiling", "num_outputs"),
    *("prompt_strength", "Prompt Strength", "use_upscale", "use_face_correction", "LoRA model", "LoRA Strength"),
}
_NOVELAI = {"Title", "Description", "Software", "Source", "Comment", "Generation time"}
_MIDJOURNEY = re.compile(r"\bJob ID: [0-9a-f]{8}-")

_BEFORE_STEPS = r"(?:(?:Seed|Sampler|Schedule type|CFG scale|Size|Model|Model hash|Version): [^,\n]*+, ?)*+"
_INFOTEXT = re.compile(rf"^[ \t]*+{_BEFORE_STEPS}Steps: \d+\s*(?:,|$)", re.MULTILINE)
"""A line of a web UI's settings; programs order them differently."""

_ROOTS = {
    "sui_image_params",
    "metadata_scheme",
    "invokeai_metadata",
    "sd-metadata",
    "generation_data",
    "workflow",
    "extraMetadata",
}
_PROMPTS, _SETTINGS = (
    {"prompt", "positive_prompt", "c", "Prompt", "Comment"},
    {"seed", "Seed", "steps", "sampler", "uc"},
)
_LENGTH = 4_000_000


def making_texts(texts: Mapping[str, str]) -> dict[str, str]:
    """Those of a PNG's texts that say how the picture was made.

    Args:
        texts: Keyword -> text.
    """
    names = set(_ALWAYS)
    if texts.get("Software", "").startswith("NovelAI"):
        names |= _NOVELAI
    if {"prompt", "Prompt"} & set(texts) and {"seed", "Seed"} & set(texts):
        names |= _EASY_DIFFUSION
    if _MIDJOURNEY.search(texts.get("Description", "")):
        names.add("Description")
    return {key: text for key, text in texts.items() if key in names or is_making(text) or _names_program(key, text)}


def _names_program(key: str, text: str) -> bool:
    return key == "Software" and text.startswith(PROGRAMS)


def is_settings(text: str) -> bool:
    """Return whether a text has a line of a web UI's settings."""
    return bool(_INFOTEXT.search(text))


def is_making(text: str) -> bool:
    """Return whether a text without a telling name, such as a comment, says how a picture was made."""
    if is_settings(text):
        return True
    data = as_object(text)
    return bool(data) and (
        bool(_ROOTS & set(data)) or is_graph(data) or bool(_PROMPTS & set(data) and _says_more(data))
    )


def is_graph(data: Mapping[str, Any]) -> bool:
    """Return whether an object is ComfyUI's graph of nodes."""
    return any(isinstance(node, dict) and "class_type" in node for node in data.values())


def as_object(text: str) -> dict[str, Any]:
    """A text as a JSON object; {} if it is none."""
    if text.lstrip()[:1] != "{" or len(text) > _LENGTH:
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def join_texts(texts: Mapping[str, str]) -> str:
    """Texts that say how a picture was made as one: that of web UIs as it is, others as a JSON object of them."""
    if set(texts) <= {PARAMETERS}:
        return texts.get(PARAMETERS, "")
    return json.dumps(dict(texts), ensure_ascii=False)


def _says_more(data: Mapping[str, Any]) -> bool:
    return bool(_SETTINGS & set(data)) or "num_inference_steps" in data
