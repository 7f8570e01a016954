"""The parts that the commands of `fisedit bench` share: progress, and reports as files, tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fisedit.cli import console
from fisedit.storage import files

if TYPE_CHECKING:
    from fisedit.values import OnStep


@contextmanager
def measurement(*outputs: Path | None) -> Iterator[OnStep]:
    """Progress of a measurement, once its output files are known to be writable."""
    for output in outputs:
        files.check_file_path(output)
    import_module("fisedit.bench.environment").code_state()  # of the code as it is when the run begins
    with console.progress("Measuring", lines=True) as on_step:
        yield on_step


def write_report(report: dict[str, Any], output: Path | None) -> dict[str, Any]:
    """Write a benchmark's report with its environment, which is returned."""
    report = import_module("fisedit.bench.environment").with_environment(report)
    if output is not None:
        files.write_json(report, output)
    return report


def show_report(report: dict[str, Any], output: Path | None, json: bool, *tables: str) -> None:
    """Write a benchmark's report with its environment; print all of it as JSON, or its short tables and notes."""
    report = write_report(report, output)
    if json:
        console.show_json(report)
        return
    for name in tables:
        if report.get(name):
            console.show_rows(report[name])
    for note in report.get("notes", ()):
        typer.echo(f"note: {note}")
