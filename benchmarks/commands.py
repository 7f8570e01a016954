"""The studies' commands: `python -m benchmarks.NAME`, with the options and errors of `fisedit`'s own commands."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from benchmarks import options as own
from benchmarks.settings import (
    DriveQualitySettings,
    EditQualitySettings,
    FidelitySettings,
    ReferenceQualitySettings,
)
from fisedit.bench.settings import EvaluationSettings, SpeedSettings
from fisedit.cli import main
from fisedit.cli import options as opt
from fisedit.cli.bench_reports import measurement, show_report
from fisedit.cli.option_values import parse_areas
from fisedit.errors import InputError
from fisedit.storage import files

STUDIES: dict[str, typer.Typer] = {}
"""Name of a study -> its command."""


def run(name: str) -> None:
    """Run a study's command with this process's arguments, and end the process."""
    main(STUDIES[name], f"python -m benchmarks.{name}")


def _study(command: Callable[..., None]) -> Callable[..., None]:
    """Add a function's command to the studies, by the function's name."""
    study = STUDIES[command.__name__] = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    return study.command()(command)


@_study
def workload(
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
        report = import_module("benchmarks.workload").measure_workload(settings, on_step)
    show_report(report, output, json, "summary")


@_study
def costs(
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
        report = import_module("benchmarks.costs").measure_predictions(settings, on_step)
    show_report(report, output, json, "summary")


@_study
def adapters(
    model: opt.BenchModel = None,
    families: own.Families = "v1,v3,v5,v5b",
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
        areas=parse_areas(areas),
        size=size,
        repeats=repeats,
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.adapters").measure_adapter_speed(settings, _names(families), on_step)
    show_report(report, output, json, "summary")


@_study
def fidelity(
    model: opt.Model = "demo",
    edits: own.Edits = 40,
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


@_study
def records(
    edits: own.Edits = 40,
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
        report = import_module("benchmarks.records").measure_record_encodings(speed, fidelity, on_step)
    show_report(report, output, json, "summary")


@_study
def edit_bytes(
    model: opt.BenchModel = None,
    areas: opt.Areas = "5,25",
    size: opt.Size = 512,
    num_inference_steps: opt.Steps = 20,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Count the bytes that edits keep beside their source, by the dtype of recorded features."""
    settings = SpeedSettings(
        model=model,
        areas=parse_areas(areas),
        size=size,
        num_inference_steps=num_inference_steps,
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.edit_bytes").count_edit_bytes(settings, on_step)
    show_report(report, output, json, "summary")


@_study
def peak_memory(
    model: opt.BenchModel = None,
    area: own.EditArea = 25,
    size: opt.Size = 512,
    num_inference_steps: opt.Steps = 20,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Measure the memory that a source and an edit take at most on a CPU, beside plain diffusers."""
    settings = SpeedSettings(
        model=model,
        areas=(area / 100,),
        size=size,
        num_inference_steps=num_inference_steps,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.peak_memory").measure_peak_memory(settings, on_step)
    show_report(report, output, json, "summary")


@_study
def tiers(
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
        report = import_module("benchmarks.tiers").measure_record_tiers(settings, on_step)
    show_report(report, output, json, "summary", "memory")


def _add_scene_study(name: str, measure: str, count: int, tables: tuple[str, ...], text: str) -> None:
    """Add a study that measures on drawn scenes and has no other settings than `EvaluationSettings`."""

    def measured(
        model: opt.Model = "demo",
        edits: own.QualityEdits = count,
        num_inference_steps: opt.Steps = 25,
        guidance_scale: opt.Guidance = 4.0,
        seed: own.EditsSeed = "development",
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
            report = getattr(import_module(f"benchmarks.{name}"), measure)(settings, on_step)
        show_report(report, output, json, *tables)

    measured.__name__, measured.__doc__ = name, text
    _study(measured)


_add_scene_study(
    "masks",
    "measure_mask_quality",
    120,
    ("summary", "classes", "calibration"),
    "Measure the masks that every method predicts from the prompts, beside the truth.",
)
_add_scene_study(
    "picks",
    "measure_picks",
    100,
    ("summary",),
    "Measure how well one to three points pick things of drawn scenes.",
)
_add_scene_study(
    "erase",
    "measure_erasing",
    100,
    ("summary",),
    "Erase things of drawn scenes, beside inpainting: whether they are gone, and how near it comes to what is behind.",
)


@_study
def agreement(
    model: opt.Model = "demo",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    output: opt.BenchOutput = None,
    json: opt.Json = False,
) -> None:
    """Compare the measure of artefacts with a person's verdicts on the same edits."""
    settings = EvaluationSettings(
        model=model, num_inference_steps=20, device=device, dtype=dtype, local_files_only=local_files_only
    )
    with measurement(output) as on_step:
        report = import_module("benchmarks.agreement").measure_agreement(settings, on_step)
    show_report(report, output, json, "summary")


def _measure_with_adapter(settings: ReferenceQualitySettings, output: Path | None) -> dict[str, Any]:
    """Edits with and without a reference."""
    measured = import_module("benchmarks.quality.reference_quality")
    with measurement(output) as on_step:
        report: dict[str, Any] = measured.measure_reference_quality(settings, on_step)
    return report


@_study
def quality(
    model: opt.Model = "demo",
    edits: own.QualityEdits = 200,
    kinds: own.Kinds = "",
    methods: own.Methods = "",
    adapter: own.ReferenceAdapter = None,
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 4.0,
    seed: own.EditsSeed = "development",
    judge: own.Judge = None,
    pie_bench: own.PieBench = None,
    html: own.Html = None,
    journal: own.BenchJournal = None,
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
    show_report(report, output, json, "summary", "classes", "artefacts", "whole")


@_study
def drive(
    adapter: own.PoseAdapter,
    model: opt.Model = "demo",
    edits: own.QualityEdits = 60,
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 4.0,
    seed: own.EditsSeed = "development",
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
        report = import_module("benchmarks.drive").measure_drive_quality(settings, on_step)
    show_report(report, output, json, "summary")


def _names(listed: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def parse_seed(given: str) -> int:
    """The seed of drawn edits: a whole number from 0, or the name of a split of `held_out.json`.

    Args:
        given: by the option.

    Raises:
        InputError: neither.
    """
    from benchmarks.scenes.held_out import held_out

    seeds = held_out().seeds
    if given not in seeds and not (given.isascii() and given.isdigit()):
        raise InputError(f"--seed must be {', '.join(seeds)} or a whole number from 0, got {given!r}")
    return seeds[given] if given in seeds else int(given)


def refuse_beside_adapter(**given: object) -> None:
    """Raise InputError for an option of edits without an adapter that is given."""
    if unused := [name for name, value in given.items() if value]:
        raise InputError(f"--{unused[0].replace('_', '-')} is of edits without --adapter; leave one of them out")
