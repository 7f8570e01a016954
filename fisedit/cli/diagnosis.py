"""The commands about this machine: `calibrate`."""

from __future__ import annotations

import typer

from fisedit.cli import console
from fisedit.cli import options as opt


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
    typer.echo(f"{len(table['layers'])} curves of {table['about']['cpu']} are kept.")
