"""The measuring command: `fisedit bench edit`."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module

import typer

from fisedit.bench.settings import SpeedSettings
from fisedit.cli import options as opt
from fisedit.cli.bench_reports import measurement, show_report, write_report
from fisedit.cli.option_values import parse_areas

bench = typer.Typer(help="Measure fisedit against dense diffusers.")


@bench.callback()
def measure() -> None:
    """Measure fisedit against dense diffusers."""


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
    captured = (device or "").startswith("cuda") or os.environ.get("FISEDIT_GRAPHS") == "1"  # 1 is a CPU's rehearsal
    module = import_module(f"fisedit.bench.{'cuda_speed' if captured else 'speed'}")
    keep = {"on_report": partial(write_report, output=output)} if captured and output is not None else {}
    with measurement(output) as on_step:
        report = module.measure_edit_speed(settings, on_step, **keep)
    tables = "dense_summary", "summary", "shallow_summary", "batch_summary", *(["profile"] if profile else [])
    show_report(report, output, json, *tables)
