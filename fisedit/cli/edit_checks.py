"""Checks of the options of `generate` and `edit` that concern one another."""

from __future__ import annotations

from pathlib import Path

import typer

from fisedit.adapters.control_pictures import is_canny
from fisedit.cli.inputs import options_given
from fisedit.cli.places import check_marks, parse_sides
from fisedit.errors import InputError, SessionError
from fisedit.sessions import folder as session_folder

CONFIG = (
    "seed",
    "negative_prompt",
    "num_inference_steps",
    "guidance_scale",
    "width",
    "height",
    "scheduler",
    "clip_skip",
    "sizes",
)
"""Options of a run, which a session or a file has of its own."""

_COMBINATIONS = (
    {"session", "picture"},
    {"source_prompt", "picture"},
    {"session", "source_prompt", "picture"},
    {"session", "origin"},
)
"""Sources that may be given at once."""

_MARKS = ("mask", "box", "point", "detect", "word", "region")
"""Options that say where."""

_NO_USE = {
    "erase": (
        "preview",
        "structure",
        "strength",
        "reference",
        "control",
        "drive",
        "adapter",
        "regions",
        "extend",
        "verify",
    ),
    "extend": (
        *("preview", "structure", "strength", "reference", "control", "drive", "adapter", "inversion", "context_ratio"),
        *("verify", "regions", "protect", "grow", "instance", "mask_method", "probe_steps", *_MARKS),
    ),
    "regions": ("protect", "grow", "instance", "mask_method", "probe_steps", *_MARKS),
    "preview": ("profile", "trace", "features", "verify", "structure"),
}
"""Options -> those that they have no use for."""

_WAYS = {"prompt", "erase", "extend", "regions"}
"""Options of which one says how to edit."""


def check_new(context: typer.Context) -> None:
    """Check options of a picture that is generated."""
    if is_canny(context.params["control"]):
        raise InputError("--control canny is of a picture that is opened, got none; give a control picture's file")
    if context.params["features"] and context.params["session"] is None:
        raise InputError("--features are saved with a --session, got none; give one")


def check_session(context: typer.Context) -> None:
    """Check that a session that is the only source is there, and that nothing is written into one."""
    given = context.params
    session_folder.check_outputs(given["session"], given["output"], given["trace"])
    if not {"source_prompt", "picture", "origin"} & options_given(context) and not given["session"].is_dir():
        raise SessionError(f"there is no session in {given['session']}; make one by fisedit generate --session")


def check_source(context: typer.Context) -> None:
    """Check that exactly one source is given, and no option that does not apply to it."""
    explicit = options_given(context)
    given = {"session", "source_prompt", "picture", "origin"} & explicit
    if len(given) != 1 and given not in _COMBINATIONS:
        raise InputError(
            "give one of --session, --source-prompt, --picture and --from, got several or none; see fisedit edit --help"
        )
    inapplicable = [name for name in (*CONFIG, "model", "vae") if name in explicit]
    if "origin" in explicit:
        if inapplicable := [name for name in ("caption_model", "vae", "context_ratio", "lora") if name in explicit]:
            option = _option(inapplicable[0])
            raise InputError(f"a picture says itself how it was made; leave {option} out, or give it as --picture")
    elif "picture" not in explicit:
        if "session" in explicit and inapplicable:
            raise InputError(
                f"a session has its own {', '.join(inapplicable)}; leave that out, or start from --source-prompt"
            )
        inapplicable = [name for name in ("caption_model", "inversion", "context_ratio") if name in explicit]
        if inapplicable:
            raise InputError(f"{_option(inapplicable[0])} is for a --picture; give one, or leave that out")
    elif {"source_prompt", "caption_model"} <= explicit:
        raise InputError("give --source-prompt or --caption-model, got both; the first says what the picture shows")
    elif "scheduler" in explicit:
        raise InputError("a picture is opened with the scheduler ddim; leave --scheduler out")
    if {"session"} < given and (Path(context.params["session"]) / "session.json").exists():
        raise InputError(f"{context.params['session']} holds a session; give it alone to go on with it")


def check_prompt(context: typer.Context) -> None:
    """Check that there are words, or another way to edit and nothing that it has no use for."""
    explicit = options_given(context)
    if not _WAYS & explicit:
        raise InputError(
            "give a --prompt, or --erase what a --mask, --box, --point, --detect, --word or --region marks; got none"
        )
    for option, without in _NO_USE.items():
        if option in explicit and (inapplicable := [name for name in without if name in explicit]):
            raise InputError(f"--{option} has no use for {_option(inapplicable[0])}; leave it out")
    if "erase" in explicit and not set(_MARKS) & explicit:
        raise InputError("--erase needs a --mask, --box, --point, --detect, --word or --region, got none; give one")
    if is_canny(context.params["control"]) and "picture" not in explicit:
        raise InputError("--control canny is of a --picture, got none; give a control picture's file")
    check_marks(context)
    if context.params["extend"] is not None:
        from fisedit import Region

        Region.border(*parse_sides("extend", context.params["extend"], int))


def _option(name: str) -> str:
    """A parameter's option as it is typed."""
    return "--no-verify" if name == "verify" else f"--{name.removesuffix('_ratio').replace('_', '-')}"


def check_output_size(context: typer.Context, size: tuple[int, int]) -> None:
    """Check that the output's format can store a picture of a size with what --extend adds. Raises InputError."""
    from fisedit.storage.images import check_size

    extend = context.params["extend"]
    left, top, right, bottom = (0, 0, 0, 0) if extend is None else parse_sides("extend", extend, int)
    check_size(context.params["output"].suffix, (size[0] + left + right, size[1] + top + bottom))
