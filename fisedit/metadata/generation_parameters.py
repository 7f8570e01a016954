"""The text that web UIs write into pictures: prompts, and the settings they were made with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fisedit.errors import InputError
from fisedit.metadata.foreign_parameters import parse_texts
from fisedit.metadata.making_texts import PARAMETERS, as_object, is_settings
from fisedit.values import GenerationConfig, SchedulerName

MAX_CHARACTERS = 100_000
"""The limit of the line of settings that is read; more of it is left."""

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

_NAMES, _LEAST_SETTINGS = {"sampler", "size", "model", *(key for _, key, _ in _SETTINGS)}, 3
"""Names of which a last line of settings has one, and the fewest settings of such a line in AUTOMATIC1111's web UI."""

_SIDES = re.compile(r"(\d+)x(\d+)")
"""Width and height, which web UIs' API tells apart."""

_NEGATIVE = re.compile(r"^[ \t]*+Negative prompt:", re.MULTILINE)


def parse_parameters(parameters: str) -> tuple[str, dict[str, Any]]:
    """Prompt and settings of the text that web UIs write, or of another program's JSON, in `Editor.generate`'s words.

    Settings that are missing, no numbers, or of a sampler that is not known here are left out. So are lines that an
    extension writes behind the settings.

    Args:
        parameters: The text.

    Raises:
        InputError: JSON of no known program, or one whose prompt is told in another way than is known.
    """
    text, last = _split_settings(parameters.strip())
    if not last and text.lstrip().startswith(("{", "[")):
        texts = _checked_object(text)
        told = texts.get(PARAMETERS)
        return parse_parameters(told) if isinstance(told, str) else parse_texts(texts)
    prompt, *negative = _NEGATIVE.split(text, maxsplit=1)
    values = _read_settings(last)
    settings: dict[str, Any] = {"negative_prompt": "".join(negative).strip()}
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


def parse_fields(parameters: str) -> dict[str, str]:
    """Prompts and settings of the text that web UIs write, by the names in it, as their API tells them.

    Args:
        parameters: The text; another program's JSON has no such fields.
    """
    text, last = _split_settings(parameters.strip())
    if not text or (not last and as_object(text)):
        return {}
    prompt, *negative = _NEGATIVE.split(text, maxsplit=1)
    fields = {"Prompt": prompt.strip(), "Negative prompt": "".join(negative).strip()}
    for name, value in _SETTING.findall(last[:MAX_CHARACTERS]):
        sides = _SIDES.fullmatch(value.strip())
        told = {f"{name}-{i}": side for i, side in enumerate(sides.groups(), 1)} if sides else {name: _unquoted(value)}
        fields |= told
    return fields


def _unquoted(value: str) -> str:
    """Return a setting's value without the quotes that it has where it holds a comma or the like."""
    try:
        return str(json.loads(value)) if value.startswith('"') else value.strip()
    except ValueError:
        return value.strip()


def _split_settings(text: str) -> tuple[str, str]:
    """Prompts, and the last line of settings; "" without one."""
    lines = text.split("\n")
    last = next((number for number in reversed(range(len(lines))) if is_settings(lines[number])), len(lines) - 1)
    if is_settings(lines[last]) or _are_settings(lines[last]):
        return "\n".join(lines[:last]), lines[last].strip()
    return text, ""


def _are_settings(line: str) -> bool:
    """Return whether a last line is one of settings without a number of steps."""
    values = {} if line.lstrip().startswith(("{", "[")) else _read_settings(line)
    return len(values) >= _LEAST_SETTINGS and bool(_NAMES & set(values))


def _read_settings(line: str) -> dict[str, str]:
    """Name in lower case -> value."""
    return {name.casefold(): value.strip() for name, value in _SETTING.findall(line.strip()[:MAX_CHARACTERS])}


def _checked_object(text: str) -> dict[str, Any]:
    if data := as_object(text):
        return data
    raise InputError(f"what the picture says of its making must be whole JSON, got {text[:40]!r}; edit it as --picture")


def format_parameters(prompt: str, config: GenerationConfig, model: str, start: int, version: str) -> str:
    """Write a picture's prompts, then one line of settings, in the format of AUTOMATIC1111's web UI.

    Args:
        prompt: The prompt of the picture, which may be an edit.
        config: The config of its source.
        model: The model that made it, a path or a name.
        start: the first step that was run.
        version: The version of fisedit.
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
