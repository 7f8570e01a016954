"""Tables of a run's figures in CSV, a line at a time. Knows files only."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from fisedit.storage.files import write_text


def append_row(path: Path, row: Mapping[str, float]) -> None:
    """Append one line to a CSV file, and its header to a new file.

    Args:
        path: The path of the file.
        row: value by column.
    """
    fresh = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if fresh:
            writer.writeheader()
        writer.writerow({name: f"{value:.6g}" for name, value in row.items()})


def truncate_after(path: Path, step: int) -> None:
    """Drop the lines of later steps, and an unfinished one, which a killed run wrote after its last checkpoint.

    Args:
        path: The path of a CSV file whose first column is the step; it may be missing.
        step: the last to keep.
    """
    if path.is_file():
        header, *lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and float(line.partition(",")[0]) <= step]
        write_text("".join([header, *kept]), path)
