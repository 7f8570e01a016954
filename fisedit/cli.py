"""The command line: `fisedit generate`, `edit`, `show`, `batch`, `demo` and `bench`.

Verbs hold no torch, and import what needs it only once their arguments are checked.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fisedit import console, files
from fisedit import options as opt
from fisedit.batch.values import Executor, Format, Job, OnError, Settings
from fisedit.errors import InputError
from fisedit.heap import keep_freed_memory

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit import Editor
    from fisedit.batch.pictures import Picture
    from fisedit.editor import Preview
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
_INTERRUPTED = 130  # what typer makes of a KeyboardInterrupt

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(help="Measure fisedit against dense diffusers.")
app.add_typer(bench, name="bench")


@app.callback()
def fisedit(
    version: opt.Version = False,
    debug: opt.Debug = False,
) -> None:
    """Edit a generated picture by changing words, and compute only what changes."""


@app.command()
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
    files.image_output(output, reference)
    if session is not None:
        files.writable(session)
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


@app.command()
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
    files.image_output(output, mask, protect, picture, origin, reference)
    if session is not None:
        files.writable(session)
    opened = _read_picture(picture or origin)
    areas: dict[str, Any] = {"mask": files.read_mask(mask), "protect": files.read_mask(protect), "grow": grow}
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


@app.command()
def show(picture: opt.Shown, json: opt.Json = False) -> None:
    """Print what a picture's file tells of how it was made."""
    opened = _read_picture(picture)
    assert opened is not None
    from fisedit import metadata, origin

    made = metadata.read(opened.image)
    past = origin.of(made)
    console.show_making(made if made.parameters else origin.metadata(past), past, json=json)


@app.command()
def demo(
    seed: opt.Seed = 7,
    num_inference_steps: opt.Steps = 25,
    model: opt.Model = "demo",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.Folder = Path("fisedit-demo"),
    metadata: opt.Metadata = True,
    json: opt.Json = False,
) -> None:
    """Draw, edit twice by changing words, prove that nothing else moved."""
    files.writable(output)
    from fisedit import Editor
    from fisedit import demo as story

    with console.progress("Demo") as on_step:
        editor = Editor.from_pretrained(model, device=device, dtype=dtype, local_files_only=local_files_only)
        told = story.tell(editor, on_step, seed=seed, num_inference_steps=num_inference_steps)
    written = story.write(told, output, editor.metadata if metadata else lambda _: None)
    if json:
        console.show_json(told.as_dict() | {"files": written})
    else:
        console.show_costs(told.results)
        typer.echo(f"Side by side: {written[0]}\nAll files:    {output}")
    if not told.passed:
        status = console.complain_line("moved", f"pixels outside the masks changed: {told.moved}; report this", 1)
        raise typer.Exit(status)
    if not json:
        typer.echo("Every pixel outside the masks is byte-identical.")


@app.command()
def batch(
    folder: opt.BatchIn,
    output: opt.BatchOut,
    prompt: opt.BatchPrompt = None,
    source_prompt: opt.BatchSourcePrompt = None,
    captions: opt.Captions = None,
    masks: opt.Masks = None,
    edits: opt.EditRows = None,
    recursive: opt.Recursive = False,
    image_format: opt.BatchFormat = Format.KEEP,
    workers: opt.Workers = 1,
    executor: opt.Executors = Executor.LOCAL,
    on_error: opt.OnFailure = OnError.SKIP,
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    report: opt.Report = None,
    timeout: opt.Timeout = 3600,
    negative_prompt: opt.NegativePrompt = "",
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 7.5,
    metadata: opt.Metadata = True,
    model: opt.Model = "demo",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    json: opt.Json = False,
) -> None:
    """Edit a folder of pictures; stop it anywhere, run it again, and it goes on."""
    job = Job(folder, output, prompt, source_prompt, captions, masks, edits, recursive, image_format, overwrite)
    place = (model, device, dtype, local_files_only)
    settings = Settings(*place, negative_prompt, num_inference_steps, guidance_scale, timeout, metadata)
    files.page_output(report)
    from fisedit.batch import page, run

    if dry_run:
        console.show_plan(run.look(job, settings), json=json)
        return
    with console.progress("Editing") as on_step:
        outcome = run.run(job, settings, workers=workers, on_error=on_error, on_step=on_step, executor=executor)
    console.show_outcome(outcome, json=json)
    if report is not None:
        page.write(outcome, report)
    raise typer.Exit(outcome.status)


@app.command("train-adapter")
def train_adapter(
    context: typer.Context,
    folder: opt.Triples,
    output: opt.RunFolder,
    model: opt.Model = "demo",
    family: opt.Family = "v5b",
    heads: opt.Heads = 8,
    start: opt.StartAdapter = "",
    size: opt.TrainSize = 0,
    steps: opt.TrainSteps = 10_000,
    batch: opt.TrainBatch = 4,
    accumulate: opt.Accumulate = 1,
    learning_rate: opt.LearningRate = 1e-4,
    warmup: opt.Warmup = 100,
    region_weight: opt.RegionWeight = 1.0,
    dropout: opt.Dropout = 0.1,
    snr_cap: opt.SnrCap = 5.0,
    ema: opt.Ema = 0.999,
    seed: opt.TrainSeed = 0,
    held_out: opt.HeldOut = 4,
    log_every: opt.LogEvery = 50,
    save_every: opt.SaveEvery = 500,
    mixed_precision: opt.MixedPrecision = "no",
    gradient_checkpointing: opt.GradientCheckpointing = False,
    device: opt.Device = None,
    local_files_only: opt.LocalFilesOnly = False,
    json: opt.Json = False,
) -> None:
    """Train a reference adapter; stop it anywhere, run it again, and it goes on from its last checkpoint."""
    settings = import_module("fisedit.train_adapter.settings").Settings.chosen(context.params)
    triples = import_module("fisedit.train_adapter.triples").read_triples(folder, held_out)
    files.writable(output)
    place = {"device": device, "local_files_only": local_files_only}
    with console.progress("Training") as on_step:
        report = import_module("fisedit.train_adapter.run").run(triples, output, settings, on_step=on_step, **place)
    if report:
        console.show_json(report) if json else console.show_rows([report])


@app.command("app")
def browse(
    model: opt.Model = "demo",
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 7860,
    token: opt.Token = "",
    allowed_host: opt.AllowedHosts = None,
    sessions: opt.Sessions = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
) -> None:
    """Edit pictures in a browser."""
    if sessions is not None:
        files.writable(sessions)
    from app import server

    address = server.listen(host, port, token, allowed_host or ())
    offline = local_files_only or model == "demo" or Path(model).expanduser().exists()
    with server.surroundings(offline=offline) as uploads:
        page, studios = import_module("app.main"), import_module("app.sessions")
        with closing(studios.Studio(model, device=device, dtype=dtype, folder=sessions)) as studio:
            running = server.prepared(page.build(studio), address, uploads, page.looks())
            typer.echo(f"The app is at {address.url} (Ctrl+C ends it)")
            with suppress(KeyboardInterrupt):
                running.run([address.listener])


@bench.command("edit")
def bench_edit(
    model: opt.BenchModel = None,
    areas: opt.Areas = "1,5,15,25,50,80",
    size: opt.Size = 512,
    num_inference_steps: opt.Steps = 20,
    repeats: opt.Repeats = 5,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure steps, decodes and whole edits of given areas."""
    shares = _shares(areas)
    if output is not None:
        files.writable(output.parent)
    with console.progress("Measuring") as on_step:
        report = _edit_benchmark(device).run(
            model=model,
            areas=shares,
            size=size,
            num_inference_steps=num_inference_steps,
            repeats=repeats,
            device=device,
            dtype=dtype,
            on_step=on_step,
        )
    _report(report, output, json, "summary")


@bench.command("fidelity")
def bench_fidelity(
    model: opt.Model = "demo",
    edits: opt.Edits = 40,
    num_inference_steps: opt.Steps = 25,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure how close sparse edits come to dense blended ones, by growth."""
    if output is not None:
        files.writable(output.parent)
    with console.progress("Measuring") as on_step:
        report = import_module("fisedit.fidelity").run(
            model=model,
            edits=edits,
            num_inference_steps=num_inference_steps,
            device=device,
            dtype=dtype,
            on_step=on_step,
        )
    _report(report, output, json, "rows")


@bench.command("masks")
def bench_masks(
    model: opt.Model = "demo",
    edits: opt.QualityEdits = 120,
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 4.0,
    seed: opt.EditsSeed = 0,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure the masks that every recipe makes of words, beside the truth."""
    if output is not None:
        files.writable(output.parent)
    with console.progress("Measuring") as on_step:
        report = import_module("fisedit.quality.finding").run(
            model=model,
            edits=edits,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            seed=seed,
            device=device,
            dtype=dtype,
            on_step=on_step,
        )
    _report(report, output, json, "summary", "classes")


@bench.command("quality")
def bench_quality(
    model: opt.Model = "demo",
    edits: opt.QualityEdits = 200,
    methods: opt.Methods = "",
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 4.0,
    seed: opt.EditsSeed = 0,
    judge: opt.Judge = None,
    pie_bench: opt.PieBench = None,
    html: opt.Html = None,
    journal: opt.BenchJournal = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure masks and edits whose truth is known, beside other methods."""
    for folder in (html, journal and journal.parent, output and output.parent):
        if folder is not None:
            files.writable(folder)
    with console.progress("Measuring") as on_step:
        report = import_module("fisedit.quality.run").run(
            model=model,
            edits=edits,
            methods=[name.strip() for name in methods.split(",") if name.strip()],
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            seed=seed,
            judge=judge,
            pie_bench=pie_bench,
            html=html,
            journal=journal,
            device=device,
            dtype=dtype,
            on_step=on_step,
        )
    _report(report, output, json, "summary", "classes", "whole")


def main() -> None:
    """Run the command line. Every error is one line on stderr; a traceback only with --debug."""
    keep_freed_memory()
    arguments = sys.argv[1:] or ["--help"]
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    sys.exit(_run(arguments, debug=debug))


def _run(arguments: list[str], *, debug: bool) -> int:
    try:
        status = int(app(arguments, prog_name="fisedit", standalone_mode=False) or 0)
        return console.complain(KeyboardInterrupt()) if status == _INTERRUPTED else status
    except typer.TyperException as error:
        return console.complain_line("usage", f"{error.format_message().rstrip('.')}; see fisedit --help", 2)
    except Exception as error:  # noqa: BLE001 (the process's border: whatever it is, say it in one line)
        if debug:
            traceback.print_exception(error)
        return console.complain(error)


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


def _read_picture(path: Path | None) -> Picture | None:
    """A picture of the user's; None stays None."""
    if path is None:
        return None
    from fisedit.batch.pictures import decode, read_bytes

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


def _notes(context: typer.Context, editor: Editor, opened: Picture | None) -> tuple[str, ...]:
    """What there is to know of a picture that was opened, or made again."""
    said = ""
    if opened and (context.params["caption_model"] or (context.params["origin"] and editor.history[0].recipe.opened)):
        said = f'taken for "{editor.history[0].prompt}"'
    elif opened and context.params["origin"] and not _changes(context):
        from fisedit.batch.pictures import shows

        said = "made again: every pixel is the file's" if shows(opened, editor.current.image) else _DIFFERENT
    return (*opened.notes, *filter(None, [said])) if opened else ()


def _begun(context: typer.Context, opened: Picture | None, on_step: OnStep) -> Editor:
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
    recipe = {name: given[name] for name in _RECIPE}
    if opened is None:
        editor.generate(given["source_prompt"], on_step=on_step, **recipe)
        return editor
    del recipe["scheduler"]
    caption = given["source_prompt"]
    if given["caption_model"] is not None:
        from fisedit import captions

        local = given["local_files_only"]
        caption = captions.caption(opened.image, given["caption_model"], local_files_only=local)
    editor.open(opened.image, caption, inversion=given["inversion"], on_step=on_step, **recipe)
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
    from fisedit.sheet import overlay

    files.write_image(overlay(editor.current.canvas, seen.mask.image()), output)
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


def _report(report: dict[str, Any], output: Path | None, json: bool, *tables: str) -> None:
    """Write a benchmark's report, and print all of it or its short tables and what there is to know of them."""
    if output is not None:
        files.write_json(report, output)
    if json:
        console.show_json(report)
        return
    for name in tables:
        if report[name]:
            console.show_rows(report[name])
    for note in report.get("notes", ()):
        typer.echo(f"note: {note}")


def _edit_benchmark(device: str | None) -> Any:
    """On a GPU that was asked for, captured graphs are measured; elsewhere the engine as it runs."""
    return import_module("fisedit.bench_cuda" if (device or "").startswith("cuda") else "fisedit.benchmark")


def _shares(areas: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(area) / 100 for area in areas.split(","))
    except ValueError as error:
        raise InputError(f"areas must be percentages such as 1,5,15, got {areas!r}") from error
    if not all(0 < share <= 1 for share in shares):
        raise InputError(f"areas must lie above 0 and up to 100 percent, got {areas!r}")
    return shares


if __name__ == "__main__":
    main()
