"""Reading sequences of drives from files of face trackers: JSON and CSV. Knows files and values, no pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fisedit.errors import InputError
from fisedit.storage.csv_tables import separated
from fisedit.storage.files import check_plain_file
from fisedit.values.drive import EXPRESSIONS, POSE, Drive

MAX_FRAMES = 2_000
_MAX_BYTES = 100_000_000
_COLUMNS = frozenset(name.casefold() for name in (*POSE, *EXPRESSIONS))


def read_drives(path: Path) -> tuple[Drive, ...]:
    """Read a sequence of drives.

    Args:
        path: a .json file, a list of objects as `Drive.as_dict` makes them or just one; or a .csv file with a drive
            in each line. Its columns are pitch, yaw, roll, x, y, scale and ARKit's coefficients by name, in any order,
            each as in `Drive`. Columns that are missing are as they are for a face at rest.

    Raises:
        InputError: another file, or a drive that is none; names its line or number.
    """
    if path.suffix.lower() not in (".json", ".csv"):
        raise InputError(f"poses must be a .json or .csv file, got {path}")
    try:
        text = _read_text(path)
        drives = _of_json(text) if path.suffix.lower() == ".json" else _of_csv(text)
    except InputError:
        raise
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"poses must be JSON or CSV, got {path} ({why:.120})") from error
    if not 1 <= len(drives) <= MAX_FRAMES:
        raise InputError(f"poses must be 1 to {MAX_FRAMES}, got {len(drives)} in {path}")
    return tuple(drives)


def _read_text(path: Path) -> str:
    check_plain_file("poses", path)
    if path.stat().st_size > _MAX_BYTES:
        raise InputError(f"poses must have at most {_MAX_BYTES // 1_000_000} MB, got {path}")
    return path.read_text(encoding="utf-8-sig")


def _of_json(text: str) -> list[Drive]:
    given = json.loads(text)
    given = given if isinstance(given, list) else [given]
    return [_named(f"drive {i}", Drive.from_dict, each) for i, each in enumerate(given, 1)]


def _of_csv(text: str) -> list[Drive]:
    table = separated(text, _COLUMNS)
    rows = csv.DictReader(table.text.splitlines(), delimiter=table.separator)
    names = [name.strip() for name in rows.fieldnames or ()]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"columns of poses must have names of their own, got {twice[0]!r:.40} twice")
    return [_named(f"line {rows.line_num + table.lines_before}", _of_row, row) for row in rows]


def _of_row(row: Mapping[str | None, Any]) -> Drive:
    if None in row or None in row.values():
        raise InputError("it has more or fewer fields than the first line")
    fields = {str(name).strip(): value for name, value in row.items()}
    pose = [fields.pop(name, usual) for name, usual in zip(POSE, Drive().pose, strict=True)]
    return Drive(pose, {name: _number(value) for name, value in fields.items()} or ())


def _number(text: Any) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"a coefficient must be a number, got {text!r:.40}") from error


def _named(which: str, make: Any, given: Any) -> Drive:
    try:
        drive: Drive = make(given)
    except InputError as error:
        raise InputError(f"{which} of the poses: {error}") from error
    return drive
