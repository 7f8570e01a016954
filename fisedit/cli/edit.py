"""The verbs of one picture: `generate`, `edit` and `show`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fisedit.cli import console
from fisedit.cli import options as opt
from fisedit.errors import InputError
from fisedit.storage import files

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit import Editor
    from fisedit.editor import Preview
    from fisedit.storage.images import DecodedImage
    from fisedit.values import OnStep

_RECIPE = (
    "seed",
    "negative_prompt",
    "num_inference_steps",
    "guidance_scale",
    "width",
    "height",
    "scheduler",
)
_TOGETHER = (
    {"session", "picture"},
    {"source_prompt", "picture"},
    {"session", "source_prompt", "picture"},
    {"session", "origin"},
)
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
    adapter: opt.Adapter = None,
    adapter_scale: opt.AdapterScale = 1.0,
    reference: opt.Reference = None,
    model: opt.Model = "demo",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    session: opt.SaveSession = None,
    output: opt.Output = Path("source.png"),
    metadata: opt.Metadata = True,
    json: opt.Json = False,
) -> None:
    """Generate a picture, and a --session to edit it in."""
    files.check_image_path(output, reference)
    if session is not None:
        files.check_writable(session)
    from fisedit import Editor

    with console.progress("Generating") as on_step:
        editor = Editor.from_pretrained(model, device=device, dtype=dtype, local_files_only=local_files_only)
        editor.generate(
            prompt,
            seed=seed,
            negative_prompt=negative_prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            width=width,
            height=height,
            scheduler=scheduler,
            reference=_referred(context, editor),
            on_step=on_step,
        )
    if session is not None:
        editor.save(session, metadata=metadata)
    _deliver(editor, output, metadata=metadata, json=json)


def edit(
    context: typer.Context,
    prompt: opt.NewPrompt,
    session: opt.Session = None,
    source_prompt: opt.SourcePrompt = None,
    picture: opt.Picture = None,
    origin: opt.From = None,
    caption_model: opt.CaptionModel = None,
    inversion: opt.Inversion = "ddim",
    mask: opt.Mask = None,
    protect: opt.Protect = None,
    grow: opt.Grow = 0,
    word: opt.Words = None,
    instance: opt.Instance = None,
    mask_method: opt.MaskMethod = "things",
    probe_steps: opt.ProbeSteps = None,
    adapter: opt.Adapter = None,
    adapter_scale: opt.AdapterScale = 1.0,
    reference: opt.Reference = None,
    structure: opt.Structure = 0.0,
    strength: opt.Strength = 1.0,
    verify: opt.Verify = True,
    preview: opt.PreviewOnly = False,
    seed: opt.Seed = 0,
    negative_prompt: opt.NegativePrompt = "",
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 7.5,
    width: opt.Width = None,
    height: opt.Height = None,
    scheduler: opt.Scheduler = "ddim",
    model: opt.Model = "demo",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.Output = Path("edit.png"),
    metadata: opt.Metadata = True,
    json: opt.Json = False,
) -> None:
    """Change a prompt and what it changes: of a saved --session, a --source-prompt, a --picture, or --from a file."""
    _check_source(context)
    files.check_image_path(output, mask, protect, picture, origin, reference)
    if session is not None:
        files.check_writable(session)
    opened = _read_picture(picture or origin)
    from fisedit.storage.images import read_mask

    areas: dict[str, Any] = {"mask": read_mask(mask), "protect": read_mask(protect), "grow": grow}
    areas |= {"words": word or (), "instance": instance, "mask_method": mask_method, "probe_steps": probe_steps}
    areas |= {"strength": strength}
    with console.progress("Editing") as on_step:
        editor = _begun(context, opened, on_step)
        notes = _notes(context, editor, opened)
        areas |= {"reference": _referred(context, editor)}
        if not preview:
            editor.edit(prompt, on_step=on_step, verify=verify, structure=structure, **areas)
    if preview:
        _show_preview(editor, editor.preview(prompt, **areas), output, json=json)
        return
    if session is not None:
        editor.save(session, metadata=metadata)
    _deliver(editor, output, notes, metadata=metadata, json=json)


def show(picture: opt.Shown, json: opt.Json = False) -> None:
    """Print what a picture's file tells of how it was made."""
    opened = _read_picture(picture)
    assert opened is not None
    from fisedit.storage import image_metadata, provenance

    made = image_metadata.read_metadata(opened.image)
    past = provenance.parse_origin(made)
    console.show_making(made if made.parameters else provenance.to_metadata(past), past, json=json)


def _deliver(editor: Editor, output: Path, notes: tuple[str, ...] = (), *, metadata: bool, json: bool) -> None:
    """Write the current picture and tell the user, with what there is to know of its file."""
    notes += editor.write(output, metadata=metadata)
    if json:
        console.show_json(console.as_json(editor.current) | {"output": output, "notes": notes})
    else:
        console.show_costs([editor.current])
        for note in notes:
            typer.echo(f"note: {note}")
        typer.echo(f"Written: {output}")


def _check_source(context: typer.Context) -> None:
    """Whether one source is given, and nothing that it would not listen to."""
    typed = _typed(context)
    given = {"session", "source_prompt", "picture", "origin"} & typed
    if len(given) != 1 and given not in _TOGETHER:
        raise InputError(
            "give one of --session, --source-prompt, --picture and --from, got several or none; see fisedit edit --help"
        )
    told = [name for name in (*_RECIPE, "model") if name in typed]
    if "origin" in typed:
        if "caption_model" in typed:
            raise InputError("a picture says itself what it shows; leave --caption-model out, or give it as --picture")
    elif "picture" not in typed:
        if "session" in typed and told:
            raise InputError(f"a session has its own {', '.join(told)}; leave that out, or start from --source-prompt")
        told = [name for name in ("caption_model", "inversion") if name in typed]
        if told:
            raise InputError(f"{', '.join(told)} is for a --picture; give one, or leave that out")
    elif {"source_prompt", "caption_model"} <= typed:
        raise InputError("give --source-prompt or --caption-model, got both; the first says what the picture shows")
    elif "scheduler" in typed:
        raise InputError("a picture is opened with the scheduler ddim; leave --scheduler out")
    if {"session"} < given and (Path(context.params["session"]) / "session.json").exists():
        raise InputError(f"{context.params['session']} holds a session; give it alone to go on with it")


def _read_picture(path: Path | None) -> DecodedImage | None:
    """A picture of the user's; None stays None."""
    if path is None:
        return None
    from fisedit.storage.images import decode, read_bytes

    if not path.is_file():
        raise InputError(f"picture must be an image file, got {path}: no such file")
    return decode(read_bytes(path), f"picture {path}")


def _referred(context: typer.Context, editor: Editor) -> Image | None:
    """The picture whose look is taken; its adapter is loaded first."""
    given = context.params
    if given["adapter"] is not None:
        editor.load_adapter(given["adapter"], given["adapter_scale"], local_files_only=given["local_files_only"])
    picture = _read_picture(given["reference"])
    return picture.image if picture else None


def _notes(context: typer.Context, editor: Editor, opened: DecodedImage | None) -> tuple[str, ...]:
    """What there is to know of a picture that was opened, or made again."""
    said = ""
    if opened and (context.params["caption_model"] or (context.params["origin"] and editor.history[0].config.opened)):
        said = f'taken for "{editor.history[0].prompt}"'
    elif opened and context.params["origin"] and not _changes(context):
        from fisedit.storage.images import is_written_form

        said = "made again: every pixel is the file's" if is_written_form(opened, editor.current.image) else _DIFFERENT
    return (*opened.notes, *filter(None, [said])) if opened else ()


def _begun(context: typer.Context, opened: DecodedImage | None, on_step: OnStep) -> Editor:
    """An editor that stands on the source that was asked for."""
    from fisedit import Editor

    given = context.params
    place = {name: given[name] for name in ("device", "dtype", "local_files_only")}
    if given["session"] is not None and opened is None:
        return Editor.resume(Path(given["session"]), **place)
    if given["origin"] is not None and opened is not None:
        model = given["model"] if "model" in _typed(context) else None
        return Editor.remake(opened.image, model=model, changes=_changes(context), on_step=on_step, **place)
    editor = Editor.from_pretrained(given["model"], **place)
    config = {name: given[name] for name in _RECIPE}
    if opened is None:
        editor.generate(given["source_prompt"], on_step=on_step, **config)
        return editor
    del config["scheduler"]
    caption = given["source_prompt"]
    if given["caption_model"] is not None:
        from fisedit.models import captioning

        local = given["local_files_only"]
        caption = captioning.caption(opened.image, given["caption_model"], local_files_only=local)
    editor.open(opened.image, caption, inversion=given["inversion"], on_step=on_step, **config)
    return editor


def _changes(context: typer.Context) -> dict[str, Any]:
    """What the user wants otherwise than a picture's file tells it."""
    return {name: context.params[name] for name in (*_RECIPE, "inversion") if name in _typed(context)}


def _typed(context: typer.Context) -> set[str]:
    """Parameters that stood on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _show_preview(editor: Editor, seen: Preview, output: Path, *, json: bool) -> None:
    """Write the current picture with a mask over it, and tell what the edit would cost."""
    from fisedit.storage.contact_sheet import overlay
    from fisedit.storage.images import write_image

    write_image(overlay(editor.current.canvas, seen.mask.image()), output)
    told = {
        "change": str(seen.diff),
        "area": seen.mask.area,
        "confidence": seen.confidence,
        "macs": seen.macs,
        "macs_dense": seen.macs_dense,
        "fallback": seen.fallback or seen.nothing,
    }
    if json:
        console.show_json(told | {"output": output})
    else:
        console.show_rows([told])
        typer.echo(f"Written: {output}")
