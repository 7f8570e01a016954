"""The commands for one picture: `generate`, `edit` and `show`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fisedit.adapters.control_pictures import CANNY, is_canny
from fisedit.cli import console
from fisedit.cli import options as opt
from fisedit.cli.diagnosis import profiling
from fisedit.cli.edit_checks import CONFIG, check_new, check_output_size, check_prompt, check_session, check_source
from fisedit.cli.inputs import check_settings, input_files, load_adapters, options_given, read_conditions, read_image
from fisedit.cli.places import edit_areas, parse_sides
from fisedit.errors import InputError
from fisedit.sessions import folder as session_folder
from fisedit.storage import files

if TYPE_CHECKING:
    from fisedit import Editor, Region
    from fisedit.editor import Preview
    from fisedit.storage.images import DecodedImage
    from fisedit.values import OnStep

_DIFFERENT = "made again, but not every pixel is the file's: another device or version made it, or it was changed since"


def generate(
    context: typer.Context,
    prompt: opt.Prompt,
    seed: opt.Seed = 0,
    negative_prompt: opt.NegativePrompt = "",
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 7.5,
    width: opt.Width = None,
    height: opt.Height = None,
    scheduler: opt.Scheduler = "ddim",
    clip_skip: opt.ClipSkip = 0,
    sizes: opt.Sizes = None,
    lora: opt.Lora = None,
    lora_scale: opt.LoraScale = None,
    adapter: opt.Adapter = None,
    adapter_scale: opt.AdapterScale = None,
    control_guidance_start: opt.ControlStart = 0.0,
    control_guidance_end: opt.ControlEnd = 1.0,
    guess_mode: opt.GuessMode = False,
    image_encoder: opt.ImageEncoder = None,
    reference: opt.Reference = None,
    control: opt.Control = None,
    drive: opt.DriveFile = None,
    model: opt.Model = "demo",
    vae: opt.Vae = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    cache_dtype: opt.CacheDtype = "auto",
    local_files_only: opt.LocalFilesOnly = False,
    session: opt.SaveSession = None,
    features: opt.Features = False,
    overwrite: opt.OverwriteSession = False,
    output: opt.Output = Path("source.png"),
    metadata: opt.Metadata = True,
    profile: opt.Profiled = False,
    trace: opt.Trace = None,
    json: opt.Json = False,
) -> None:
    """Generate a picture, and a --session to edit it in."""
    check_new(context)
    check_settings(context)
    _check_outputs(context, output, trace)
    if session is not None:
        session_folder.check_new(session, output, trace, overwrite=overwrite)
    conditions = read_conditions(context)
    from fisedit import Editor

    with console.progress("Generating") as on_step:
        editor = Editor.from_pretrained(
            model, vae=vae, device=device, dtype=dtype, local_files_only=local_files_only, cache_dtype=cache_dtype
        )
        load_adapters(context, editor)
        with profiling(editor, shown=profile, trace=trace) as layers:
            editor.generate(
                prompt,
                seed=seed,
                negative_prompt=negative_prompt,
                num_inference_steps=num_inference_steps,
                guidance_scale=guidance_scale,
                width=width,
                height=height,
                scheduler=scheduler,
                clip_skip=clip_skip,
                sizes=sizes,
                on_step=on_step,
                **conditions,
            )
    notes = editor.write(output, metadata=metadata)
    if session is not None:
        editor.save(session, metadata=metadata, features=features, overwrite=overwrite)
    _show_result(editor, output, notes, layers, json=json)


def edit(
    context: typer.Context,
    prompt: opt.NewPrompt = None,
    session: opt.Session = None,
    source_prompt: opt.SourcePrompt = None,
    picture: opt.Picture = None,
    origin: opt.From = None,
    caption_model: opt.CaptionModel = None,
    inversion: opt.Inversion = "ddim",
    mask: opt.Mask = None,
    soft: opt.Soft = False,
    box: opt.Boxes = None,
    point: opt.Points = None,
    point_outside: opt.PointsOutside = None,
    detect: opt.Detect = None,
    label: opt.Labels = None,
    threshold: opt.Threshold = 0.5,
    region: opt.RegionFile = None,
    regions: opt.RegionsFile = None,
    context_ratio: opt.Context = 0.5,
    erase: opt.Erase = False,
    extend: opt.Extend = None,
    protect: opt.Protect = None,
    grow: opt.Grow = 0,
    word: opt.Words = None,
    instance: opt.Instance = None,
    mask_method: opt.MaskMethod = "things",
    probe_steps: opt.ProbeSteps = None,
    lora: opt.Lora = None,
    lora_scale: opt.LoraScale = None,
    adapter: opt.Adapter = None,
    adapter_scale: opt.AdapterScale = None,
    control_guidance_start: opt.ControlStart = 0.0,
    control_guidance_end: opt.ControlEnd = 1.0,
    guess_mode: opt.GuessMode = False,
    image_encoder: opt.ImageEncoder = None,
    reference: opt.Reference = None,
    control: opt.Control = None,
    drive: opt.DriveFile = None,
    structure: opt.Structure = 0.0,
    strength: opt.Strength = 1.0,
    edit_seed: opt.EditSeed = None,
    quality: opt.Quality = "balanced",
    verify: opt.Verify = True,
    preview: opt.PreviewOnly = False,
    seed: opt.Seed = 0,
    negative_prompt: opt.NegativePrompt = "",
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 7.5,
    width: opt.Width = None,
    height: opt.Height = None,
    scheduler: opt.Scheduler = "ddim",
    clip_skip: opt.ClipSkip = 0,
    sizes: opt.Sizes = None,
    model: opt.Model = "demo",
    vae: opt.Vae = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    cache_dtype: opt.CacheDtype = "auto",
    local_files_only: opt.LocalFilesOnly = False,
    features: opt.Features = False,
    output: opt.Output = Path("edit.png"),
    metadata: opt.Metadata = True,
    profile: opt.Profiled = False,
    trace: opt.Trace = None,
    json: opt.Json = False,
) -> None:
    """Change a prompt and what it changes: of a saved --session, a --source-prompt, a --picture, or --from a file."""
    check_source(context)
    check_prompt(context)
    check_settings(context)
    if features and session is None:
        raise InputError("--features are saved with a --session, got none; give one")
    _check_outputs(context, output, trace)
    if session is not None:
        check_session(context)
        context.with_resource(session_folder.lock(session))
    opened = _read_source(context)
    place, areas = edit_areas(context, opened)
    areas |= read_conditions(context)
    from fisedit.integrations.mask_providers import ALPHA

    opened = _opaque(opened) if opened is not None and detect == ALPHA else opened
    with console.progress("Editing") as on_step:
        editor = _open_editor(context, opened, place, on_step)
        notes = _notes(context, editor, opened)
        with profiling(editor, shown=profile, trace=trace) as layers:
            _edit(context, editor, areas, on_step)
    if preview:
        _show_preview(editor, editor.preview(prompt, **areas), output, notes, json=json)
        return
    notes += editor.write(output, metadata=metadata)
    if session is not None:
        editor.save(session, metadata=metadata, features=features)
    _show_result(editor, output, notes, layers, json=json)


def _check_outputs(context: typer.Context, picture: Path, trace: Path | None) -> None:
    """Raise InputError for a picture or a trace that cannot be written, or that is a file to read."""
    files.check_image_path(picture, *input_files(context))
    files.check_trace_path(trace, *input_files(context))


def _read_source(context: typer.Context) -> DecodedImage | None:
    """The picture that is opened, which fits the output's format; None for a source of a session or a prompt."""
    if (opened := read_image(context.params["picture"] or context.params["origin"])) is not None:
        check_output_size(context, opened.image.size)
    return opened


def _opaque(opened: DecodedImage) -> DecodedImage:
    """The same without alpha, so that what is painted where it was clear is seen; how it was made stays with it."""
    from fisedit.storage.canvas import to_editable

    shown = to_editable(opened.image).convert("RGB")
    shown.info = {name: value for name, value in opened.image.info.items() if name != "transparency"}
    return replace(opened, image=shown)


def _edit(context: typer.Context, editor: Editor, areas: dict[str, Any], on_step: OnStep) -> None:
    """Edit the current image in the way that the options ask for; not at all for a preview or without words."""
    given = context.params
    prompt = given["prompt"]
    options: dict[str, Any] = {"prompt": prompt, "quality": given["quality"], "on_step": on_step}
    options |= {} if given["edit_seed"] is None else {"seed": given["edit_seed"]}
    if given["erase"]:
        editor.erase(areas["region"], **options)
    elif given["extend"] is not None:
        left, top, right, bottom = parse_sides("extend", given["extend"], int)
        editor.extend(left, top, right, bottom, **options)
    elif not given["preview"] and (prompt is not None or given["regions"] is not None):
        editor.edit(prompt, on_step=on_step, verify=given["verify"], structure=given["structure"], **areas)


def show(picture: opt.Shown, json: opt.Json = False) -> None:
    """Print how a picture was made, from its file."""
    opened = read_image(picture)
    assert opened is not None
    from fisedit.metadata import image_metadata, provenance

    metadata = image_metadata.read_metadata(opened.image)
    origin = provenance.parse_origin(metadata)
    console.show_metadata(provenance.complete_metadata(metadata, origin), origin, json=json)


def _show_result(
    editor: Editor, output: Path, notes: tuple[str, ...], layers: list[dict[str, Any]], *, json: bool
) -> None:
    """Print what the current image cost, by layers if that was asked for, and notes."""
    if json:
        profile = {"profile": layers} if layers else {}
        console.show_json(console.result_to_dict(editor.current) | {"output": output, "notes": notes} | profile)
    else:
        if layers:
            console.show_rows(layers)
        console.show_costs([editor.current])
        for note in notes:
            typer.echo(f"note: {note}")
        typer.echo(f"Written: {output}")


def _notes(context: typer.Context, editor: Editor, opened: DecodedImage | None) -> tuple[str, ...]:
    """Remarks for the user on a source that was opened or made again."""
    note = ""
    if opened and (context.params["caption_model"] or (context.params["origin"] and editor.history[0].config.opened)):
        note = f'taken for "{editor.history[0].prompt}"'
    elif opened and context.params["origin"] and not _changes(context):
        from fisedit.storage.images import is_written_form

        note = "made again: every pixel is the file's" if is_written_form(opened, editor.current.image) else _DIFFERENT
    return (*opened.notes, *filter(None, [note])) if opened else ()


def _open_editor(context: typer.Context, opened: DecodedImage | None, region: Region | None, on_step: OnStep) -> Editor:
    """An editor whose current result is the source; of a large picture, the part around a region."""
    from fisedit import Editor

    given = context.params
    place = {name: given[name] for name in ("device", "dtype", "local_files_only", "cache_dtype")}
    if given["session"] is not None and opened is None:
        editor = Editor.resume(Path(given["session"]), **place)
        check_output_size(context, editor.current.size)
        load_adapters(context, editor)
        return editor
    if given["origin"] is not None and opened is not None:
        model = given["model"] if "model" in options_given(context) else None
        editor = Editor.remake(opened.image, model=model, changes=_changes(context), on_step=on_step, **place)
        load_adapters(context, editor)
        return editor
    editor = Editor.from_pretrained(given["model"], vae=given["vae"], **place)
    load_adapters(context, editor)
    config = {name: given[name] for name in CONFIG}
    if opened is None:
        editor.generate(given["source_prompt"], on_step=on_step, **config)
        return editor
    del config["scheduler"]
    caption = given["source_prompt"]
    if given["caption_model"] is not None:
        from fisedit.models import captioning

        local = given["local_files_only"]
        caption = captioning.caption(opened.image, given["caption_model"], local_files_only=local)
    parts = {"region": region, "context": given["context_ratio"], "inversion": given["inversion"]}
    parts |= {"control": CANNY} if is_canny(given["control"]) else {}
    editor.open(opened.image, caption, on_step=on_step, **parts, **config)
    return editor


def _changes(context: typer.Context) -> dict[str, Any]:
    """The options that replace values of an image's origin."""
    return {name: context.params[name] for name in (*CONFIG, "inversion") if name in options_given(context)}


def _show_preview(editor: Editor, found: Preview, output: Path, notes: tuple[str, ...], *, json: bool) -> None:
    """Write the current image with the mask over it, and print the costs of the edit, and notes."""
    from PIL import Image

    from fisedit.storage.contact_sheet import overlay
    from fisedit.storage.images import write_image

    now = editor.current
    inside = found.mask.painted(now.size, now.config.crop)
    notes += found.notes + write_image(overlay(now.image, Image.fromarray(inside).convert("L")), output)
    values = {
        "change": str(found.diff),
        "area": float(inside.mean()),
        "confidence": found.confidence,
        "macs": found.macs,
        "macs_dense": found.macs_dense,
        "recorded_bytes": found.recorded_bytes,
        "fallback": found.fallback,
        "nothing": found.nothing,
    }
    if json:
        console.show_json(values | {"notes": notes, "output": output})
    else:
        console.show_rows([values])
        for note in notes:
            typer.echo(f"note: {note}")
        typer.echo(f"Written: {output}")
