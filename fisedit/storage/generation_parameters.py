"""The text that web UIs write into pictures: prompts, and the settings they were made with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fisedit.values import GenerationConfig, SchedulerName

MAX_CHARACTERS = 100_000
"""Of the line of settings that is read; more of it is left."""

FOREIGN_DEFAULTS: Mapping[str, Any] = {
    "seed": 0,
    "num_inference_steps": 25,
    "guidance_scale": 7.5,
    "width": 512,
    "height": 512,
    "scheduler": "ddim",
    "inversion": "ddim",
}
"""Arguments with which an image of another program is opened, where it names no others."""

_SETTING = re.compile(r'(?:^|, *+)([A-Za-z][\w /-]{0,40}+): *+("(?:\\.|[^"\\])*+"|[^,]*+)')

_SETTINGS: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("num_inference_steps", "steps", int),
    ("guidance_scale", "cfg scale", float),
    ("seed", "seed", int),
    ("clip_skip", "clip skip", lambda value: int(value) - 1),
)
"""Argument of `Editor.generate`, its name in web UIs in lower case, and what reads it."""


def parse_parameters(parameters: str) -> tuple[str, dict[str, Any]]:
    """Prompt and settings of the text that web UIs write, in `Editor.generate`'s words.

    Settings that are missing, no numbers, or of a sampler that is not known here are left out.

    Args:
        parameters: The text.
    """
    text, _, last = f"\n{parameters.strip()}".rpartition("\n")
    has_settings = last.startswith("Steps: ")
    prompt, _, negative = (text if has_settings else f"{text}\n{last}").partition("\nNegative prompt:")
    found = _SETTING.findall(last[:MAX_CHARACTERS]) if has_settings else []
    values = {name.casefold(): value for name, value in found}
    settings: dict[str, Any] = {"negative_prompt": negative.strip()}
    for name, key, kind in _SETTINGS:
        with suppress(KeyError, ValueError):
            settings[name] = kind(values[key])
    with suppress(KeyError, ValueError):
        settings["width"], settings["height"] = map(int, values["size"].split("x"))
    sampler, schedule = values.get("sampler", ""), values.get("schedule type", "")
    for name in (f"{sampler} {schedule}", sampler):  # "DPM++ 2M" and "Karras" are one scheduler here
        with suppress(ValueError):
            settings.setdefault("scheduler", SchedulerName(name.strip()))
    return prompt.strip(), settings


def format_parameters(prompt: str, config: GenerationConfig, model: str, start: int, version: str) -> str:
    """Write a picture's prompts, then one line of settings, in the format of AUTOMATIC1111's web UI.

    Args:
        prompt: of the picture, which may be an edit.
        config: of its source.
        model: that made it, a path or a name.
        start: the first step that was run.
        version: of fisedit.
    """
    settings = {
        "Steps": config.num_inference_steps,
        "Sampler": config.scheduler.label,
        "CFG scale": f"{config.guidance_scale:g}",
        "Seed": config.seed,
        "Size": f"{config.width}x{config.height}",
        "Model": Path(model).name.removesuffix(".safetensors"),
        "Clip skip": config.clip_skip + 1 if config.clip_skip else "",
        "Denoising strength": f"{1 - start / config.num_timesteps:.4g}" if start else "",
        "Version": f"fisedit {version}",
    }
    line = ", ".join(f"{name}: {_quote_if_needed(str(value))}" for name, value in settings.items() if value != "")
    negative = [f"Negative prompt: {config.negative_prompt}"] if config.negative_prompt else []
    return "\n".join([prompt, *negative, line])


def _quote_if_needed(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if set(value) & set(',:\n"') else value
