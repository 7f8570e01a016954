"""The commands `demo`, `batch`, `train-adapter`, `app` and `serve`."""

from __future__ import annotations

from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from fisedit.batch.values import BatchAdapters, BatchJob, BatchSettings, ExecutorKind, ItemStatus, OnError, OutputFormat
from fisedit.cli import console
from fisedit.cli import options as opt
from fisedit.cli.app_package import load_app
from fisedit.cli.inputs import check_config
from fisedit.cli.option_values import parse_adapters, parse_loras
from fisedit.errors import InputError
from fisedit.models.paths import DEMO_ADAPTERS, expand_home
from fisedit.storage import files


def demo(
    context: typer.Context,
    seed: opt.Seed = 4,
    num_inference_steps: opt.Steps = 25,
    model: opt.Model = "demo",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.Folder = Path("fisedit-demo"),
    metadata: opt.Metadata = True,
    json: opt.Json = False,
) -> None:
    """Generate, edit twice by changing words, check that nothing else changed."""
    files.check_output_folder(output)
    check_config(context.params)
    from fisedit import Editor
    from fisedit.cli.demo import run_demo, write_demo
    from fisedit.models.vocabulary import vocabulary_of

    with console.progress("Demo") as on_step:
        editor = Editor.from_pretrained(model, device=device, dtype=dtype, local_files_only=local_files_only)
        result = run_demo(editor, on_step, seed=seed, num_inference_steps=num_inference_steps)
    written = write_demo(result, output, editor.metadata if metadata else lambda _: None)
    if json:
        console.show_json(result.as_dict() | {"files": written})
    else:
        console.show_costs(result.results)
        typer.echo(f"Side by side: {written[0]}\nAll files:    {output}")
    if not result.passed:
        changed = f"pixels outside the masks changed: {result.changed_outside}; report this"
        status = console.print_error_line("moved", changed, 1)
        raise typer.Exit(status)
    if not json:
        typer.echo("Every pixel outside the masks is byte-identical.")
        vocabulary = vocabulary_of(editor.pipe)
        for i, prompt in enumerate(vocabulary.examples if vocabulary else ()):
            typer.echo(f'{"Prompts to try:" if i == 0 else "":<15} "{prompt}"')


def batch(
    context: typer.Context,
    folder: opt.BatchIn,
    output: opt.BatchOut,
    prompt: opt.BatchPrompt = None,
    source_prompt: opt.BatchSourcePrompt = None,
    captions: opt.Captions = None,
    masks: opt.Masks = None,
    edits: opt.EditRows = None,
    detect: opt.Detect = None,
    label: opt.Labels = None,
    threshold: opt.Threshold = 0.5,
    instance: opt.Detected = "all",
    recursive: opt.Recursive = False,
    image_format: opt.BatchFormat = OutputFormat.KEEP,
    workers: opt.Workers = 1,
    executor: opt.Executors = ExecutorKind.LOCAL,
    on_error: opt.OnFailure = OnError.SKIP,
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    report: opt.Report = None,
    timeout: opt.Timeout = 3600,
    negative_prompt: opt.NegativePrompt = "",
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 7.5,
    quality: opt.Quality = "balanced",
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
    metadata: opt.Metadata = True,
    model: opt.Model = "demo",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    json: opt.Json = False,
) -> None:
    """Edit a folder of pictures; a run that was stopped at any time continues."""
    job = BatchJob(folder, output, prompt, source_prompt, captions, masks, edits, recursive, image_format, overwrite)
    detection = _detection(masks, detect, label, threshold, instance)
    loading = (model, device, dtype, local_files_only)
    settings = BatchSettings(
        *loading,
        negative_prompt,
        num_inference_steps,
        guidance_scale,
        timeout,
        metadata,
        quality,
        **detection,
        adapters=_adapters(context),
        loras=tuple(parse_loras(context.params)),
    )
    files.check_page_path(report)
    from fisedit.batch.report import write_report
    from fisedit.batch.runner import preview_batch, run_batch

    if dry_run:
        plan = preview_batch(job, settings)
        console.show_plan(plan, json=json)
        raise typer.Exit(int(plan.counts[ItemStatus.FAILED] > 0))
    with console.progress("Editing") as on_step:
        outcome = run_batch(job, settings, workers=workers, on_error=on_error, on_step=on_step, executor=executor)
    try:
        if report is not None:
            write_report(outcome, report)
    finally:  # the summary is printed even if the report cannot be written
        console.show_outcome(outcome, json=json)
    raise typer.Exit(outcome.exit_status)


def _adapters(context: typer.Context) -> BatchAdapters | None:
    """The adapters of a batch, and the pictures that they read."""
    given = context.params
    pictures = {name: "" if given[name] is None else str(given[name]) for name in ("reference", "control")}
    adapters = parse_adapters(given)
    if not adapters:
        if named := [name for name, path in pictures.items() if path]:
            raise InputError(f"--{named[0]} needs an --adapter that reads it, got none; give one")
        return None
    if not any(pictures.values()):
        raise InputError("an --adapter needs a --reference or a --control to read, got none; give one")
    sources, uses = zip(*adapters, strict=True)
    return BatchAdapters(sources, uses, str(given["image_encoder"] or ""), **pictures)


def _detection(
    masks: Path | None, detect: str | None, label: list[str] | None, threshold: float, instance: str
) -> dict[str, Any]:
    """The fields of `BatchSettings` that say what a detector is to find."""
    if detect is None and (label or instance != "all" or threshold != 0.5):
        raise InputError("--label, --threshold and --instance are of --detect, got none; give one")
    if detect is not None and masks is not None:
        raise InputError("give either --detect or --masks, got both; a mask says where things are")
    return {"detect": detect or "", "labels": tuple(label or ()), "threshold": threshold, "instance": instance}


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
    keep_maps: opt.KeepMaps = False,
    device: opt.Device = None,
    local_files_only: opt.LocalFilesOnly = False,
    json: opt.Json = False,
) -> None:
    """Train a reference adapter; a run that was stopped continues from its last checkpoint."""
    settings = import_module("fisedit.adapters.training.training_settings").TrainingSettings.from_options(
        context.params
    )
    triples = import_module("fisedit.adapters.training.triples").read_triples(folder, held_out)
    files.check_output_folder(output)
    loading = {"device": device, "local_files_only": local_files_only}
    with console.progress("Training") as on_step:
        report = import_module("fisedit.adapters.training.run").train_adapter(
            triples, output, settings, on_step=on_step, **loading
        )
    if report:
        console.show_json(report) if json else console.show_rows([report])


def serve(
    model: opt.Models = None,
    loaded: opt.Loaded = 2,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 7860,
    token: opt.Token = "",
    allowed_host: opt.AllowedHosts = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
) -> None:
    """Serve Automatic1111's and OpenAI's routes, without the page."""
    load_app()
    server = import_module("app.server")
    server.check_packages("fastapi", "uvicorn", "python_multipart")
    address = server.listen(host, port, token, allowed_host or ())
    state = import_module("app.sessions").AppState
    options = {"device": device, "dtype": dtype, "local_files_only": local_files_only}
    with (
        server.pixel_limit(),
        closing(state.open(*model or (), max_loaded=loaded, **options)) as opened,
    ):
        running = server.make_server(opened, address)
        typer.echo(f"The routes are at {address.url} (Ctrl+C ends them); docs/app.md says which")
        with suppress(KeyboardInterrupt):
            running.run([address.listener])


def browse(
    model: opt.Models = None,
    loaded: opt.Loaded = 2,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 7860,
    token: opt.Token = "",
    allowed_host: opt.AllowedHosts = None,
    sessions: opt.Sessions = None,
    lora: opt.Loras = None,
    adapter: opt.PageAdapters = None,
    detector: opt.PageDetector = None,
    preview_vae: opt.PreviewVae = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
) -> None:
    """Edit pictures in a browser."""
    if sessions is not None:
        files.check_writable(sessions)
    load_app()
    server = import_module("app.server")
    address = server.listen(host, port, token, allowed_host or ())
    named = {*(model or ()), *(adapter or ()), *filter(None, [detector])} - {"demo", *DEMO_ADAPTERS}
    offline = local_files_only or all(expand_home(str(place)).exists() for place in named)
    with server.environment(offline=offline) as uploads:
        page, state = import_module("app.main"), import_module("app.sessions").AppState
        pool_options = {
            "loras": lora if lora or model else import_module("app.lora_catalog").shipped(),
            "adapters": adapter or (),
            "detector": detector,
            "max_loaded": loaded,
            "preview_vae": preview_vae,
        }
        with closing(
            state.open(*model or (), device=device, dtype=dtype, folder=sessions, **pool_options)
        ) as app_state:
            served = server.ServedPage(page.build(app_state), page.theme(), uploads)
            running = server.make_server(app_state, address, served)
            typer.echo(f"The app is at {address.url} (Ctrl+C ends it)")
            with suppress(KeyboardInterrupt):
                running.run([address.listener])
