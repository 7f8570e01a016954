"""The commands about a machine and a model on it, `calibrate`, `plan`, `doctor` and `validate`; profiles of others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fisedit.bench.settings import ValidationSettings
from fisedit.cli import console
from fisedit.cli import options as opt
from fisedit.cli.inputs import check_config
from fisedit.cli.option_values import parse_areas
from fisedit.errors import InputError
from fisedit.storage import files

if TYPE_CHECKING:
    from fisedit import Editor


def calibrate(
    model: opt.Model = "demo",
    seconds: opt.CalibrationSeconds = 20.0,
    size: opt.CalibrationSize = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    json: opt.Json = False,
) -> None:
    """Measure what this machine takes for a model's layers; later edits are planned by that."""
    from fisedit import Editor

    with console.progress("Calibrating") as on_step:
        editor = Editor.from_pretrained(model, device=device, dtype=dtype, local_files_only=local_files_only)
        table = editor.calibrate(seconds, size=size, on_step=on_step)
    if json:
        console.show_json(table)
        return
    console.show_rows(table["predicted"])
    kept = "not kept (FISEDIT_COSTS=0)" if editor.calibrated is None else "kept"
    typer.echo(f"{len(table['curves'])} curves of {table['about']['cpu']} are {kept}.")


def doctor(
    model: opt.Model = "demo",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    json: opt.Json = False,
) -> None:
    """Check this machine: versions, kernels, memory, and its times against its own cost table."""
    from fisedit import Editor
    from fisedit.diagnosis.doctor import examine

    with console.progress("Examining") as on_step:
        editor = Editor.from_pretrained(model, device=device, dtype=dtype, local_files_only=local_files_only)
        report = examine(editor.pipe, on_step=on_step)
    if json:
        console.show_json(report)
        return
    for name in ("versions", "machine", "gpu", "memory", "threads"):
        for key, value in report[name].items():
            typer.echo(f"{name}: {key} {value}")
    for name in ("packages", "disk", "rates", "kernels", "layers"):
        if report[name]:
            console.show_rows(report[name])
    for line in report["findings"] or ("nothing is wrong",):
        typer.echo(f"finding: {line}")


def validate(
    model: opt.ValidatedModel,
    output: opt.Folder = Path("fisedit-validation"),
    quick: opt.Quick = False,
    size: opt.PlanSize = None,
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 7.5,
    compiled: opt.Compiled = True,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    json: opt.Json = False,
) -> None:
    """Check and measure edits of your own model, and write a page to look at and to attach."""
    settings = ValidationSettings(
        model=model,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        size=size,
        quick=quick,
        compiled=compiled and not quick,
        device=device,
        dtype=dtype,
        local_files_only=local_files_only,
    )
    files.check_output_folder(output)
    from fisedit.bench.validation import PAGE, validate_model

    with console.progress("Validating") as on_step:
        report = validate_model(settings, output, on_step)
    if json:
        console.show_json(report)
    else:
        for name in ("checks", "summary", "speed"):
            console.show_rows(report[name])
        typer.echo(f"Page: {output / PAGE}")
    if not report["passed"]:
        raise typer.Exit(console.print_error_line("check", f"a check failed; attach {output / PAGE} to a report", 1))


def plan(
    context: typer.Context,
    model: opt.Model = "demo",
    size: opt.PlanSize = None,
    num_inference_steps: opt.Steps = 25,
    guidance_scale: opt.Guidance = 7.5,
    memory: opt.PlanMemory = None,
    areas: opt.Areas = "5,25",
    device: opt.Device = None,
    dtype: opt.PlanDtype = None,
    local_files_only: opt.LocalFilesOnly = False,
    json: opt.Json = False,
) -> None:
    """Print what a source and edits would take here by the cost table, and what to change where it does not fit."""
    limit, shares = _parse_bytes(memory), parse_areas(areas)
    check_config(context.params)
    from fisedit import Editor
    from fisedit.diagnosis import plan as planning
    from fisedit.machine.device import choose_device
    from fisedit.machine.hardware import free_bytes

    free = free_bytes(choose_device(device))  # without the model, whose weights are counted
    settings = planning.PlanSettings(
        size=size,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        memory=limit,
        areas=shares,
        dtype=dtype,
    )
    editor = Editor.from_pretrained(model, device=device, dtype=dtype, local_files_only=local_files_only)
    found = planning.plan_edits(editor.pipe, settings, free)
    if json:
        console.show_json(found)
        return
    console.show_rows([found["choice"]])
    console.show_rows(planning.as_rows(found))
    for line in found["changes"]:
        typer.echo(f"change: {line}")


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _parse_bytes(text: str | None) -> int | None:
    """Bytes from a number with a unit; None stays None."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([KMGT]?)B?", text.strip().upper(), re.ASCII)
    if found is None:
        raise InputError(f"memory must be bytes such as 900M or 4G, got {text!r:.40}")
    return round(float(found[1]) * _UNITS[found[2]])


@contextmanager
def profiling(editor: Editor, *, shown: bool, trace: Path | None) -> Iterator[list[dict[str, Any]]]:
    """Profile the enclosed runs of an editor if that was asked for.

    Args:
        editor: the editor whose model runs.
        shown: whether what is yielded gets the table of layers.
        trace: file that gets the trace, or None.

    Yields:
        The table's rows, filled at the end; empty without `shown`.
    """
    rows: list[dict[str, Any]] = []
    if not (shown or trace):
        yield rows
        return
    from fisedit.diagnosis.profile import profiled

    with profiled(editor.pipe) as profile:
        yield rows
    rows += profile.rows() if shown else []
    if trace is not None:
        profile.write_trace(trace)
