"""Tables of a run's figures, a line at a time; what a killed run wrote past its last checkpoint is taken back."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from fisedit.storage.files import write_text


def append_row(path: Path, row: Mapping[str, float]) -> None:
    """Add one line to a CSV file, and its header when the file is new."""
    fresh = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if fresh:
            writer.writeheader()
        writer.writerow({name: f"{value:.6g}" for name, value in row.items()})


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of later steps, and one that was not finished; the first column is the step."""
    if path.is_file():
        head, *lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and float(line.partition(",")[0]) <= step]
        write_text("".join([head, *kept]), path)
