"""Reads what programs other than AUTOMATIC1111's web UI write of a picture's making: JSON, and InvokeAI's old line.

What is not understood is refused, as a prompt of wrong words would be edited by. Knows texts alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fisedit.errors import InputError
from fisedit.metadata.comfy_graph import read_graph
from fisedit.metadata.making_texts import as_object, is_graph
from fisedit.values import SchedulerName

Parsed = tuple[str, dict[str, Any]]
"""A prompt, and settings in `Editor.generate`'s words."""

_PROMPT = ("positive_prompt", "prompt", "Prompt", "c")
_NEGATIVE = ("negative_prompt", "negativeprompt", "negativePrompt", "Negative Prompt", "uc")

_SETTINGS: tuple[tuple[str, tuple[str, ...], Callable[[Any], Any]], ...] = (
    ("num_inference_steps", ("steps", "num_inference_steps", "Steps"), lambda value: int(float(value))),
    (
        "guidance_scale",
        ("guidance_scale", "cfg_scale", "cfgscale", "cfgScale", "scale", "cfg", "Guidance Scale"),
        float,
    ),
    ("seed", ("seed", "Seed", "noise_seed"), lambda value: int(str(value))),
    ("width", ("width", "Width"), lambda value: int(str(value))),
    ("height", ("height", "Height"), lambda value: int(str(value))),
)
"""Argument of `Editor.generate`, its names in other programs, and what reads it."""

_SAMPLERS = ("sampler", "sampler_name", "samplerName", "Sampler")
_SCHEDULES = ("scheduler", "schedule", "noise_schedule")
_SCHEDULERS = {
    "ddim": SchedulerName.DDIM,
    "euler": SchedulerName.EULER,
    "k_euler": SchedulerName.EULER,
    "euler_a": SchedulerName.EULER_ANCESTRAL,
    "euler_ancestral": SchedulerName.EULER_ANCESTRAL,
    "k_euler_a": SchedulerName.EULER_ANCESTRAL,
    "k_euler_ancestral": SchedulerName.EULER_ANCESTRAL,
    "heun": SchedulerName.HEUN,
    "lcm": SchedulerName.LCM,
    "tcd": SchedulerName.TCD,
    "uni_pc": SchedulerName.UNIPC,
    "unipc": SchedulerName.UNIPC,
    "plms": SchedulerName.PNDM,
    "pndm": SchedulerName.PNDM,
    "dpmpp_2m": SchedulerName.DPM_SOLVER,
    "dpmpp_2m_sde": SchedulerName.DPM_SOLVER_SDE,
    "dpmpp_2m_sde_gpu": SchedulerName.DPM_SOLVER_SDE,
    "dpmpp_sde": SchedulerName.DPM_SDE,
    "dpmpp_sde_gpu": SchedulerName.DPM_SDE,
}
"""Names of k-diffusion and ComfyUI."""

_KARRAS = {
    SchedulerName.DPM_SOLVER: SchedulerName.DPM_SOLVER_KARRAS,
    SchedulerName.DPM_SOLVER_SDE: SchedulerName.DPM_SOLVER_SDE_KARRAS,
    SchedulerName.DPM_SDE: SchedulerName.DPM_SDE_KARRAS,
}
_DREAM = re.compile(r'"(.*?)"((?:\s+-\w+\s+\S+)*)', re.DOTALL)
_DREAM_KEYS = {"s": "steps", "S": "seed", "C": "cfg_scale", "W": "width", "H": "height", "A": "sampler"}
_MAX_NAMES = 4


def parse_texts(texts: Mapping[str, Any]) -> Parsed:
    """Prompt and settings of an object that says how a picture was made.

    Args:
        texts: JSON as one text held it, or several texts by their names.

    Raises:
        InputError: No known program's, or one that says its prompt in another way than is known.
    """
    data = {key: as_object(value) or value if isinstance(value, str) else value for key, value in texts.items()}
    reader = next((read for key, read in _READERS.items() if isinstance(data.get(key), dict)), None)
    if reader is not None:
        return reader(data)
    if isinstance(line := data.get("Dream"), str):
        return _read_dream(line)
    if is_graph(data):
        return _read_comfyui(data)
    program = "Fooocus" if "metadata_scheme" in data else "another program"
    return _read(data, program, _from_novelai if "uc" in data and "c" not in data else str)


def _read(data: Mapping[str, Any], program: str, words: Callable[[str], str] = str) -> Parsed:
    """Prompt and settings of an object with a name for each."""
    prompt, negative = (_first(data, names) for names in (_PROMPT, _NEGATIVE))
    if not isinstance(prompt, str) or not isinstance(negative or "", str):
        names = ", ".join(sorted(map(str, data))[:_MAX_NAMES]) or "nothing"
        raise InputError(
            f"what {program} says of the picture's making must name its prompt, got {names:.80}; edit it as --picture"
        )
    settings: dict[str, Any] = {"negative_prompt": words(negative or "").strip()}
    for name, keys, kind in _SETTINGS:
        with suppress(TypeError, ValueError, OverflowError):
            settings[name] = kind(_first(data, keys))
    size = re.fullmatch(r"\(?(\d+) ?[x,×] ?(\d+)\)?", str(_first(data, ("resolution", "size", "Size"))))
    if size and not {"width", "height"} & set(settings):
        settings |= {"width": int(size[1]), "height": int(size[2])}
    if (scheduler := _scheduler(data)) is not None:
        settings["scheduler"] = scheduler
    return words(prompt).strip(), settings


def _first(data: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((data[name] for name in names if data.get(name) is not None), None)


def _scheduler(data: Mapping[str, Any]) -> SchedulerName | None:
    sampler, schedule = (str(_first(data, names) or "").casefold() for names in (_SAMPLERS, _SCHEDULES))
    found = _SCHEDULERS.get(sampler or schedule)
    if found is None:
        with suppress(ValueError):
            return SchedulerName(sampler)
        return None
    return _KARRAS.get(found, found) if schedule == "karras" else found


def _read_comfyui(graph: Mapping[str, Any]) -> Parsed:
    prompt, negative, settings = read_graph(graph)
    literal = re.compile(r"(?<!\\)([\[\]])")  # square brackets are no syntax there
    words = (literal.sub(r"\\\1", text) for text in (prompt, negative))
    return _read({**settings, **dict(zip(("prompt", "negative_prompt"), words, strict=True))}, "ComfyUI")


def _read_old_invokeai(image: Any) -> Parsed:
    """The metadata of InvokeAI 2: prompts with weights, and the negative one in square brackets."""
    told = image.get("prompt") if isinstance(image, dict) else None
    if isinstance(told, list) and len(told) == 1 and isinstance(told[0], dict):
        told = told[0].get("prompt")
    if not isinstance(told, str):
        raise InputError("what InvokeAI says of the picture's making must name one prompt; edit it as --picture")
    return _read(image | _split_brackets(told), "InvokeAI", _from_compel)


def _read_dream(line: str) -> Parsed:
    match = _DREAM.match(line.strip())
    if match is None:
        raise InputError("what InvokeAI says of the picture's making must begin with its prompt; edit it as --picture")
    options = dict(re.findall(r"-(\w+)\s+(\S+)", match[2]))
    named = {name: options[key] for key, name in _DREAM_KEYS.items() if key in options}
    return _read(named | _split_brackets(match[1]), "InvokeAI", _from_compel)


def _split_brackets(prompt: str) -> dict[str, str]:
    negative = re.findall(r"\[([^\[\]]*)\]", prompt)
    positive = re.sub(r"\s*\[[^\[\]]*\]", "", prompt)
    return {"prompt": positive, "negative_prompt": ", ".join(negative)}


def _from_compel(prompt: str) -> str:
    """InvokeAI's weights, as in `(old)1.3 harbour++`, in the syntax of web UIs."""

    def weight(match: re.Match[str]) -> str:
        words, sign = match[1].removeprefix("(").removesuffix(")"), match[2]
        value = 1.1 ** len(sign) if sign[0] == "+" else 0.9 ** len(sign) if sign[0] == "-" else float(sign)
        return f"({words}:{value:.4g})"

    found = re.sub(r"(\([^()]*\))(\++|-+(?!\w)|\d+(?:\.\d+)?)", weight, prompt)
    return re.sub(r"(\w+)(\+++|\+(?!\w)|-{2,}(?!\w))", weight, found)


def _from_novelai(prompt: str) -> str:
    """NovelAI's weights, as in `{old} [port], 1.2::boats::`, in the syntax of web UIs; its round brackets are none."""
    escaped = re.sub(r"(?<!\\)([()])", r"\\\1", prompt)
    numbered = re.sub(r"(\d+(?:\.\d+)?)::(.*?)(?:::|$)", r"(\2:\1)", escaped)
    for pair, value in (("{}", "1.05"), ("[]", "0.9524")):
        if numbered.count(pair[0]) == numbered.count(pair[1]):
            numbered = numbered.replace(pair[0], "(").replace(pair[1], f":{value})")
    return numbered


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Parsed]] = {
    "sui_image_params": lambda data: _read(data["sui_image_params"], "SwarmUI"),
    "invokeai_metadata": lambda data: _read(data["invokeai_metadata"], "InvokeAI", _from_compel),
    "sd-metadata": lambda data: _read_old_invokeai(data["sd-metadata"].get("image")),
    "generation_data": lambda data: _read(data["generation_data"], "TensorArt"),
    "extraMetadata": lambda data: _read(data["extraMetadata"], "Civitai"),
    "Comment": lambda data: _read({"prompt": data.get("Description")} | data["Comment"], "NovelAI", _from_novelai),
    "prompt": lambda data: _read_comfyui(data["prompt"]),
}
"""Name of an object -> what reads it."""
