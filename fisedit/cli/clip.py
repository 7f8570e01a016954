"""The command `drive`: a clip of one picture and a sequence of poses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fisedit.cli import console
from fisedit.cli import options as opt
from fisedit.cli.inputs import check_settings, input_files, load_adapters, options_given, read_image
from fisedit.cli.places import check_marks, chosen_region, marked_region
from fisedit.errors import InputError
from fisedit.storage.files import is_among

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit import Editor
    from fisedit.clips.render import ClipFrames
    from fisedit.values import OnStep


def drive(
    context: typer.Context,
    source: opt.DrivenPicture,
    poses: opt.Poses,
    adapter: opt.Adapter = None,
    adapter_scale: opt.AdapterScale = None,
    control_guidance_start: opt.ControlStart = 0.0,
    control_guidance_end: opt.ControlEnd = 1.0,
    guess_mode: opt.GuessMode = False,
    image_encoder: opt.ImageEncoder = None,
    reference: opt.Reference = None,
    source_prompt: opt.ShownWords = None,
    prompt: opt.FramePrompt = None,
    mask: opt.Mask = None,
    soft: opt.Soft = False,
    box: opt.Boxes = None,
    point: opt.Points = None,
    point_outside: opt.PointsOutside = None,
    region: opt.RegionFile = None,
    protect: opt.Protect = None,
    grow: opt.Grow = 0,
    word: opt.Words = None,
    instance: opt.Instance = None,
    mask_method: opt.MaskMethod = "things",
    probe_steps: opt.ProbeSteps = None,
    quality: opt.Quality = "balanced",
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 7.5,
    seed: opt.Seed = 0,
    fps: opt.FramesPerSecond = 12.0,
    model: opt.Model = "demo",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.ClipOutput = Path("clip.webp"),
    json: opt.Json = False,
) -> None:
    """Move a head: one edit of SOURCE for every pose, in one region; a run that was stopped continues."""
    _check(context)
    from fisedit.clips.drives import read_drives
    from fisedit.clips.render import render_frames, rendering, write_clip

    opened, drives, look = read_image(source), read_drives(poses), read_image(reference, "reference")
    place = chosen_region(context, marked_region(context))
    assert opened is not None
    with rendering(output):
        with console.progress("Opening") as on_step:
            editor = _open(context, opened.image, on_step)
        with console.progress("Rendering") as on_step:
            options: dict[str, Any] = {"prompt": prompt, "quality": quality, "on_step": on_step}
            options["reference"] = None if look is None else look.image
            frames = render_frames(editor, drives, place, output, **options)
        notes = write_clip(frames, output, frames_per_second=fps)
    _show(frames, output, (*opened.notes, *notes), json=json)


def _check(context: typer.Context) -> None:
    """Check the options before anything is read."""
    from fisedit.clips.render import check_clip_path

    given = context.params
    check_clip_path(given["output"], given["fps"])
    check_marks(context)
    check_settings(context)
    if not given["adapter"]:
        raise InputError("give an --adapter that reads poses, one of HelloMeme's control networks, got none")
    if not any(given[name] for name in ("mask", "box", "point", "region", "word")):
        raise InputError("give a --mask, --box, --point, --word or --region, got none; it says what moves")
    if is_among(given["output"], input_files(context)):
        raise InputError(f"output must not be an input, got {given['output']} for both; choose another name")


def _show(frames: ClipFrames, output: Path, notes: tuple[str, ...], *, json: bool) -> None:
    """Print what a clip took, and what its format could not hold."""
    values = {
        "frames": len(frames.paths),
        "rendered": frames.rendered,
        "area": frames.area,
        "seconds": frames.seconds,
        "frames_per_second": frames.rendered / frames.seconds if frames.rendered else 0.0,
    }
    if json:
        console.show_json(values | {"notes": notes, "output": output})
        return
    console.show_rows([values])
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(f"Written: {output}")


def _open(context: typer.Context, picture: Image, on_step: OnStep) -> Editor:
    """An editor whose current picture is the source, with its adapters."""
    from fisedit import Editor
    from fisedit.metadata.image_metadata import read_metadata

    given = context.params
    place = {name: given[name] for name in ("device", "dtype", "local_files_only")}
    config = {name: given[name] for name in ("num_inference_steps", "guidance_scale", "seed")}
    metadata = read_metadata(picture)
    if given["source_prompt"] is None and (metadata.origin or metadata.parameters):
        model = given["model"] if "model" in options_given(context) else None
        changes = {name: value for name, value in config.items() if name in options_given(context)}
        editor = Editor.remake(picture, model=model, changes=changes, on_step=on_step, **place)
        load_adapters(context, editor)
        return editor
    if not given["source_prompt"]:
        raise InputError("the picture says nothing of how it was made; say with --source-prompt what it shows")
    editor = Editor.from_pretrained(given["model"], **place)
    load_adapters(context, editor)
    editor.open(picture, given["source_prompt"], on_step=on_step, **config)
    return editor
