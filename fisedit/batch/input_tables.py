"""Reads tables of captions and of edits: CSV with a header, or one JSON object per line. Knows text, no image."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fisedit.errors import InputError
from fisedit.storage.csv_tables import separated
from fisedit.values import is_unicode

_IMAGE, _CAPTION = ("image", "file_name", "file"), ("caption", "text", "prompt")
"""Names that a column may have: ours, then those of Hugging Face's image folders."""

_EDIT = ("image", "prompt", "source_prompt", "mask", "output")
_KNOWN = frozenset((*_IMAGE, *_CAPTION, *_EDIT))
_MAX_BYTES = 1 << 30
_MAX_PATH_BYTES = 1000


@dataclass(frozen=True)
class EditRow:
    """One row of a table of edits; paths are relative, with slashes.

    Args:
        image: The input's name in the input folder.
        prompt: Prompt of the output.
        source_prompt: Prompt of the input.
        mask: The mask's name in the folder of masks, or else in the input folder.
        output: The output's name in the output folder.
        line: Number of the line in the file, from 1.
    """

    image: str
    prompt: str
    source_prompt: str | None = None
    mask: str | None = None
    output: str | None = None
    line: int = 0


def read_captions(path: Path) -> dict[str, str]:
    """Image -> caption, from .csv (columns image, caption) or .jsonl (one object per line with those keys).

    Args:
        path: The table. Equal rows count once.

    Raises:
        InputError: No such file, another suffix, no text, a bad line (with its number), or two captions of an image.
    """
    captions: dict[str, tuple[int, str]] = {}
    for line, row in _read_rows(path, "captions"):
        image, caption = (_field(row, names, path, line) for names in (_IMAGE, _CAPTION))
        name = _relative_path(image, "image", path, line)
        first, earlier = captions.setdefault(name, (line, caption))
        if earlier != caption:
            raise _line_error(path, line, f"must not caption {name} again: line {first} says something else; keep one")
    return {name: caption for name, (_, caption) in captions.items()}


def read_edits(path: Path) -> list[EditRow]:
    """Edits in the order of a .csv or .jsonl file.

    Args:
        path: The table, with "image" and "prompt", and if wanted "source_prompt", "mask" and "output". Equal rows count
            once.

    Raises:
        InputError: As in `read_captions`; also for an unknown key.
    """
    rows: dict[tuple[object, ...], EditRow] = {}
    for line, row in _read_rows(path, "edits"):
        filled = {key: value for key, value in row.items() if value not in (None, "")}
        if unknown := sorted(set(filled) - set(_EDIT)):
            raise _line_error(path, line, f"must hold {', '.join(_EDIT)} only, got {unknown[0]!a}")
        texts = {key: _field(filled, (key,), path, line) for key in ("image", "prompt", *filled)}
        for key in {"image", "mask", "output"} & set(texts):
            texts[key] = _relative_path(texts[key], key, path, line)
        rows.setdefault(tuple(texts.get(key) for key in _EDIT), EditRow(**texts, line=line))
    if not rows:
        raise InputError(f"edits must hold at least one line, got the empty {path}")
    return list(rows.values())


def _read_rows(path: Path, what: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, row) for every row of a table."""
    readers = {".csv": _csv_rows, ".jsonl": _json_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{what} must be a .csv or .jsonl file, got {path}")
    yield from reader(path, _read_text(path, what))


def _read_text(path: Path, what: str) -> str:
    if not path.is_file():
        raise InputError(f"{what} must be a file, got {path}: {'not one' if path.exists() else 'nothing there'}")
    if path.stat().st_size > _MAX_BYTES:
        raise InputError(f"{what} must be a text of at most 1 GiB, got {path}")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{what} must be readable, got {path} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise _line_error(path, line, "must be UTF-8 text; save the file as UTF-8") from error


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    table = separated(text, _KNOWN)
    first, rows = table.lines_before, io.StringIO(table.text, newline="")
    reader = csv.reader(rows, delimiter=table.separator, skipinitialspace=True, strict=True)
    try:
        header = [name.strip().casefold() for name in next(filter(None, reader), [])]
        if twice := [name for name in header if name in _KNOWN and header.count(name) > 1]:
            raise _line_error(
                path, reader.line_num + first, f"must name each column once, got {_shorten(repr(twice[0]))} twice"
            )
        for values in reader:
            line = reader.line_num + first
            if values and len(values) != len(header):
                wanted = f"{len(header)} columns, separated by {table.separator!r}, as the header has"
                raise _line_error(path, line, f"must have {wanted}, got {len(values)}")
            if any(map(str.strip, values)):
                yield line, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise _line_error(path, reader.line_num + first, f"must be CSV ({error})") from error


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, source in enumerate(text.split("\n"), 1):  # str.splitlines would split inside JSON strings as well
        if not source.strip():
            continue
        try:
            row = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise _line_error(path, line, f"must be a JSON object, got {_shorten(source)}") from error
        if not isinstance(row, dict):
            raise _line_error(path, line, f"must be a JSON object, got {_shorten(source)}")
        yield line, row


def _field(row: Mapping[str, Any], names: tuple[str, ...], path: Path, line: int) -> str:
    value = next((row[name] for name in names if name in row), None)
    if not isinstance(value, str) or not value.strip():
        beside = "" if set(names) & set(row) else f" of that name beside {_shorten(', '.join(map(str, row)))}"
        shown_value = f"nothing{beside}" if value is None or value == "" else _shorten(repr(value))
        raise _line_error(path, line, f"must say {names[0]!r} as text, got {shown_value}")
    if not is_unicode(value):
        raise _line_error(path, line, f"must say {names[0]!r} as Unicode text, got {_shorten(ascii(value))}")
    return value.strip()


def _relative_path(name: str, key: str, path: Path, line: int) -> str:
    """A normalised relative path that does not leave its folder."""
    parts = PurePosixPath(name)
    if "\\" in name:
        raise _line_error(path, line, f"must name its {key} with / between folders, got {_shorten(name)!r}")
    if len(name.encode()) > _MAX_PATH_BYTES:
        raise _line_error(path, line, f"must name its {key} by at most {_MAX_PATH_BYTES} bytes, got {_shorten(name)!r}")
    if parts.is_absolute() or ".." in parts.parts or "\0" in name or not parts.name:
        raise _line_error(path, line, f"must name its {key} by a path inside its folder, got {_shorten(repr(name))}")
    return str(parts)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line_error(path: Path, line: int, what: str) -> InputError:
    return InputError(f"{path} line {line} {what}")
