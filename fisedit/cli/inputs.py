"""The files that a command's options name: pictures, drives and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisedit.adapters.control_pictures import is_canny
from fisedit.cli.option_values import parse_adapters, parse_loras
from fisedit.errors import InputError
from fisedit.storage.files import check_plain_file, why_no_file

if TYPE_CHECKING:
    import typer

    from fisedit import Editor
    from fisedit.storage.images import DecodedImage
    from fisedit.values import GenerationConfig


_SETTINGS = {
    "seed": 0,
    "negative_prompt": "",
    "num_inference_steps": 25,
    "guidance_scale": 7.5,
    "scheduler": "ddim",
    "clip_skip": 0,
    "sizes": None,
}
"""Settings of a picture, and what counts for commands without such an option."""

_SIDE = 512
_REGIONS = ("region", "regions")
"""Options that name a file of JSON, which may name masks."""

_FILES = ("source", "poses", "picture", "origin", "mask", "protect", "detect", "reference", "control", "drive")
"""Options and arguments that name other files to read."""


def read_image(path: Path | None, what: str = "picture") -> DecodedImage | None:
    """Decode an image file; None stays None. Errors name the image as it is given."""
    if path is None:
        return None
    from fisedit.storage.images import decode, read_bytes

    if not path.is_file():
        raise InputError(f"{what} must be an image file, got {path}: {why_no_file(path)}")
    return decode(read_bytes(path), f"{what} {path}")


def read_json(option: str, path: Path) -> object:
    """The value of an option's file of JSON. Raises InputError, which names the option."""
    try:
        check_plain_file(f"--{option}", path)
        return loads(path.read_bytes())
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"--{option} must be a file of JSON, got {path} ({why:.120})") from error


def input_files(context: typer.Context) -> list[Path]:
    """The files that a command reads, and must not write: those that options name, and the masks in files of regions.

    Raises:
        InputError: as `read_json`.
    """
    given = {name: Path(value) for name, value in context.params.items() if value and name in (*_FILES, *_REGIONS)}
    found = list(given.values())
    for option in filter(given.get, _REGIONS):
        found += [given[option].parent / name for name in _masks_named(read_json(option, given[option]))]
    return found


def _masks_named(value: object) -> list[str]:
    """Return the values of `mask` in all objects of a JSON value."""
    found, left = list[str](), [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            found += [text for name, text in each.items() if name == "mask" and isinstance(text, str)]
            left += each.values()
        elif isinstance(each, list):
            left += each
    return found


def check_settings(context: typer.Context) -> None:
    """Check what a picture is made and edited with before a model is loaded.

    Raises:
        PromptError: a prompt that cannot be used. InputError: another value out of range.
    """
    from fisedit.prompts.syntax import check_syntax
    from fisedit.values import check_prompt

    given = context.params
    config = check_config(given, given["inversion"] if given.get("picture") else None)
    check_syntax(config.negative_prompt, "negative_prompt")
    if given["prompt"] is not None:
        check_syntax(check_prompt(given["prompt"]))
    parse_adapters(given)
    parse_loras(given)
    _check_edit(context, config.num_timesteps)


def check_config(given: Mapping[str, Any], inversion: str | None = None) -> GenerationConfig:
    """Check what a source is made with before a model is loaded; usual values where a command has no such option.

    Args:
        given: values of options by name.
        inversion: by which a picture is opened, or None.

    Raises:
        InputError: a value out of range.
    """
    from fisedit.values import make_generation_config

    settings = {name: given.get(name, usual) for name, usual in _SETTINGS.items()}
    size = {name: given.get(name) or given.get("size") or _SIDE for name in ("width", "height")}
    return make_generation_config("-", **settings, **size, inversion=inversion)


def _check_edit(context: typer.Context, timesteps: int) -> None:
    """Check the options of an edit that a command has. Raises InputError.

    Args:
        context: context of the command.
        timesteps: timesteps of its source, if that is made with the command's own settings.
    """
    from fisedit.storage.canvas import MAX_CONTEXT
    from fisedit.values import STEPS, check_quality, check_seed, check_structure, first_step

    given = context.params
    if "quality" in given:
        check_quality(given["quality"])
    if "strength" not in given:
        return
    has_own = "num_inference_steps" in options_given(context) or given["picture"] or given["source_prompt"]
    first_step(given["strength"], timesteps if has_own else 2 * STEPS[1])
    check_structure(given["structure"])
    if given["edit_seed"] is not None:
        check_seed(given["edit_seed"])
    if not 0 <= given["context_ratio"] <= MAX_CONTEXT:
        raise InputError(f"--context must be in [0, {MAX_CONTEXT:g}], got {given['context_ratio']:g}")


def load_adapters(context: typer.Context, editor: Editor) -> None:
    """Load the LoRAs and the adapters that are given."""
    from fisedit.values import MOTION

    for lora, scale in parse_loras(context.params):
        editor.load_lora(lora, scale)
    own = {name: context.params[name] for name in ("image_encoder", "local_files_only")}
    for source, use in parse_adapters(context.params):
        editor.load_adapter(source, **use.as_dict(), **own)
        if editor.adapters[-1].adapter.argument == MOTION and context.info_name != "drive":
            raise InputError(f"motion modules are for clips, got {source} as an --adapter; see fisedit drive")


def read_conditions(context: typer.Context) -> dict[str, Any]:
    """Read what adapters read, if given; edges are those of the source, which was opened with them."""
    from fisedit.clips.drives import read_drives

    given = context.params
    paths = {name: None if is_canny(given[name]) else given[name] for name in ("reference", "control")}
    pictures = {name: read_image(path, name) for name, path in paths.items()}
    found: dict[str, Any] = {name: picture.image if picture else None for name, picture in pictures.items()}
    if given["drive"] is None:
        return found
    drives = read_drives(given["drive"])
    if len(drives) != 1:
        raise InputError(f"--drive must hold one pose, got {len(drives)} in {given['drive']}; see fisedit drive")
    return found | {"drive": drives[0]}


def options_given(context: typer.Context) -> set[str]:
    """Names of the parameters given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
