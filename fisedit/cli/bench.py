"""The measuring commands: `fisedit bench edit`, `workload`, `costs`, `fidelity`, `quality` and the others."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from fisedit.bench.settings import (
    DriveQualitySettings,
    EditQualitySettings,
    EvaluationSettings,
    FidelitySettings,
    ReferenceQualitySettings,
    SpeedSettings,
)
from fisedit.cli import options as opt
from fisedit.cli.bench_reports import measurement, show_report, write_report
from fisedit.cli.option_values import parse_areas, parse_seed, refuse_beside_adapter
from fisedit.storage import files

bench = typer.Typer(help="Measure fisedit against dense diffusers.")


@bench.command("edit")
def bench_edit(
    model: opt.BenchModel = None,
    areas: opt.Areas = "1,5,15,25,50,80",
    size: opt.Size = 512,
    num_inference_steps: opt.Steps = 20,
    guidance_scale: opt.Guidance = 7.5,
    scheduler: opt.Scheduler = "ddim",
    repeats: opt.Repeats = 5,
    compiled: opt.Compiled = True,
    profile: opt.Profiled = False,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure steps, decodes and whole edits of given areas beside the fastest dense run."""
    settings = SpeedSettings(
        model=model,
        areas=parse_areas(areas),
        size=size,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        scheduler=scheduler,
        repeats=repeats,
        compiled=compiled,
        profile=profile,
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    on_gpu = (device or "").startswith("cuda")  # graphs only on a GPU that was asked for
    module = import_module(f"fisedit.bench.{'cuda_speed' if on_gpu else 'speed'}")
    keep = {"on_report": partial(write_report, output=output)} if on_gpu and output is not None else {}
    with measurement(output) as on_step:
        report = module.measure_edit_speed(settings, on_step, **keep)
    show_report(report, output, json, "dense_summary", "summary", "batch_summary", *(["profile"] if profile else []))


@bench.command("workload")
def bench_workload(
    model: opt.BenchModel = None,
    size: opt.Size = 512,
    num_inference_steps: opt.Steps = 20,
    repeats: opt.Repeats = 5,
    compiled: opt.Compiled = True,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure edits with the mask areas of published traces beside the fastest dense run."""
    settings = SpeedSettings(
        model=model,
        size=size,
        num_inference_steps=num_inference_steps,
        repeats=repeats,
        compiled=compiled,
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.mask_traces").measure_workload(settings, on_step)
    show_report(report, output, json, "summary")


@bench.command("costs")
def bench_costs(
    model: opt.BenchModel = None,
    areas: opt.Areas = "5,15,25,50",
    size: opt.Size = 512,
    num_inference_steps: opt.Steps = 20,
    repeats: opt.Repeats = 3,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure this machine's cost table, and what it predicts beside what runs take."""
    settings = SpeedSettings(
        model=model,
        areas=parse_areas(areas),
        size=size,
        num_inference_steps=num_inference_steps,
        repeats=repeats,
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.cost_predictions").measure_predictions(settings, on_step)
    show_report(report, output, json, "summary")


@bench.command("adapters")
def bench_adapters(
    model: opt.BenchModel = None,
    families: opt.Families = "v1,v3,v5,v5b",
    areas: opt.Areas = "5",
    size: opt.Size = 512,
    repeats: opt.Repeats = 5,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure what reference adapters add to a sparse step."""
    settings = SpeedSettings(
        model=model,
        families=_names(families),
        areas=parse_areas(areas),
        size=size,
        repeats=repeats,
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.adapter_speed").measure_adapter_speed(settings, on_step)
    show_report(report, output, json, "summary")


@bench.command("fidelity")
def bench_fidelity(
    model: opt.Model = "demo",
    edits: opt.Edits = 40,
    num_inference_steps: opt.Steps = 25,
    compiled: opt.Compiled = True,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure how close sparse edits come to dense blended ones, and what they cost, by dilation."""
    settings = FidelitySettings(
        model=model,
        compiled=compiled,
        edits=edits,
        num_inference_steps=num_inference_steps,
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.fidelity").measure_fidelity(settings, on_step)
    show_report(report, output, json, "summary")


@bench.command("records")
def bench_records(
    edits: opt.Edits = 40,
    size: opt.Size = 512,
    repeats: opt.Repeats = 9,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure bytes, seconds and fidelity of recorded features by the dtype that they are kept in."""
    speed = SpeedSettings(size=size, repeats=repeats, device=device, dtype=dtype)
    fidelity = FidelitySettings(edits=edits, device=device, dtype=dtype)
    with measurement(output) as on_step:
        report = import_module("benchmarks.record_encodings").measure_record_encodings(speed, fidelity, on_step)
    show_report(report, output, json, "summary")


@bench.command("tiers")
def bench_tiers(
    model: opt.BenchModel = None,
    size: opt.Size = 512,
    num_inference_steps: opt.Steps = 20,
    repeats: opt.Repeats = 5,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure edits whose recorded features do not fit in memory, or come from a saved session."""
    settings = SpeedSettings(
        model=model,
        size=size,
        num_inference_steps=num_inference_steps,
        repeats=repeats,
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.record_tiers").measure_record_tiers(settings, on_step)
    show_report(report, output, json, "summary", "memory")


def _add_scene_benchmark(name: str, module: str, measure: str, count: int, tables: tuple[str, ...], text: str) -> None:
    """Add a command that measures on drawn scenes and has no other settings than `EvaluationSettings`."""

    @bench.command(name, help=text)
    def bench_scenes(
        model: opt.Model = "demo",
        edits: opt.QualityEdits = count,
        num_inference_steps: opt.Steps = 25,
        guidance_scale: opt.Guidance = 4.0,
        seed: opt.EditsSeed = "development",
        device: opt.Device = None,
        dtype: opt.Dtype = None,
        local_files_only: opt.LocalFilesOnly = False,
        output: opt.BenchOutput = None,
        json: opt.Json = False,
    ) -> None:
        settings = EvaluationSettings(
            model=model,
            edits=edits,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            seed=parse_seed(seed),
            device=device,
            dtype=dtype,
            local_files_only=local_files_only,
        )
        with measurement(output) as on_step:
            report = getattr(import_module(module), measure)(settings, on_step)
        show_report(report, output, json, *tables)


_add_scene_benchmark(
    "masks",
    "benchmarks.quality.mask_quality",
    "measure_mask_quality",
    120,
    ("summary", "classes", "calibration"),
    "Measure the masks that every method predicts from the prompts, beside the truth.",
)
_add_scene_benchmark(
    "picks",
    "benchmarks.picks",
    "measure_picks",
    100,
    ("summary",),
    "Measure how well one to three points pick things of drawn scenes.",
)
_add_scene_benchmark(
    "erase",
    "benchmarks.erasing",
    "measure_erasing",
    100,
    ("summary",),
    "Erase things of drawn scenes, beside inpainting: whether they are gone, and how near it comes to what is behind.",
)


def _measure_with_adapter(settings: ReferenceQualitySettings, output: Path | None) -> dict[str, Any]:
    """Edits with and without a reference."""
    measured = import_module("benchmarks.quality.reference_quality")
    with measurement(output) as on_step:
        report: dict[str, Any] = measured.measure_reference_quality(settings, on_step)
    return report


@bench.command("quality")
def bench_quality(
    model: opt.Model = "demo",
    edits: opt.QualityEdits = 200,
    kinds: opt.Kinds = "",
    methods: opt.Methods = "",
    adapter: opt.ReferenceAdapter = None,
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 4.0,
    seed: opt.EditsSeed = "development",
    judge: opt.Judge = None,
    pie_bench: opt.PieBench = None,
    html: opt.Html = None,
    journal: opt.BenchJournal = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    cache_dtype: opt.CacheDtype = "auto",
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure masks and edits whose truth is known, beside other methods; or with and without a reference."""
    if html is not None:
        files.check_output_folder(html)
    shared: dict[str, Any] = {
        "model": model,
        "edits": edits,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "seed": parse_seed(seed),
        "classifier": judge,
        "html": html,
        "device": device,
        "dtype": dtype,
        "local_files_only": local_files_only,
    }
    if adapter is not None:
        refuse_beside_adapter(kinds=kinds, methods=methods, pie_bench=pie_bench, journal=journal)
        report = _measure_with_adapter(ReferenceQualitySettings(adapter=adapter, **shared), output)
        show_report(report, output, json, "summary")
        return
    settings = EditQualitySettings(
        kinds=_names(kinds),
        methods=_names(methods),
        pie_bench=pie_bench,
        results_log=journal,
        cache_dtype=cache_dtype,
        **shared,
    )
    with measurement(output, journal) as on_step:
        report = import_module("benchmarks.quality.edit_quality").measure_edit_quality(settings, on_step)
    show_report(report, output, json, "summary", "classes", "whole")


@bench.command("drive")
def bench_drive(
    adapter: opt.PoseAdapter,
    model: opt.Model = "demo",
    edits: opt.QualityEdits = 60,
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 4.0,
    seed: opt.EditsSeed = "development",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure how well drawn heads follow a drive: their tilt and their place, beside the truth."""
    settings = DriveQualitySettings(
        model=model,
        adapter=adapter,
        edits=edits,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        seed=parse_seed(seed),
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.drive_quality").measure_drive_quality(settings, on_step)
    show_report(report, output, json, "summary")


def _names(listed: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name.strip() for name in listed.split(",") if name.strip())
