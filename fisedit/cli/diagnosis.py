"""The commands about this machine, `calibrate` and `doctor`; and profiles of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fisedit.cli import console
from fisedit.cli import options as opt

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
    typer.echo(f"{len(table['curves'])} curves of {table['about']['cpu']} are kept.")


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


@contextmanager
def profiling(editor: Editor, *, shown: bool, trace: Path | None) -> Iterator[list[dict[str, Any]]]:
    """Profile the enclosed runs of an editor if that was asked for.

    Args:
        editor: whose model runs.
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
