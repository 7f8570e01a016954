"""`python -m benchmarks.document_tables README.md ...`: fill the tables of documents from benchmarks' JSON.

A table stands between `<!-- table PATH KEY -->` and `<!-- end -->`: PATH is a report, from the repository's root, and
KEY one of its lists of rows, such as `summary`. `where kind=swap|delete, source=drawn` and `columns method, IoU` after
KEY select rows and columns. Below it stands where and when it was measured. Knows Markdown, and measures nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fisedit.storage.files import write_text

ROOT = Path(__file__).resolve().parents[1]

_TABLE = re.compile(
    r"(<!-- table (\S+) (\w+)(?: where ([^\n]+?))?(?: columns ([^\n]+?))? -->\n).*?(<!-- end -->)", re.DOTALL
)

_RENAMED = {"whole edit, to plain": "end-to-end speedup over stock diffusers"}
"""Columns that recorded reports, which stay as they were written, have by an earlier name."""

MISSING = "This was not measured yet.\n"


def main() -> None:
    """Rewrite the documents that the command line names."""
    for name in sys.argv[1:]:
        path = Path(name)
        write_text(fill_tables(path.read_text(encoding="utf-8")), path)


def fill_tables(text: str, root: Path = ROOT) -> str:
    """A document with its tables as the reports are now.

    Args:
        text: The text of the document.
        root: The folder that paths of reports begin at.
    """

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{_render_table(root / match[2], *match.group(3, 4, 5))}{match[6]}"

    return _TABLE.sub(fill, text)


def reports(text: str) -> list[str]:
    """Paths of the reports whose tables a document has.

    Args:
        text: The text of the document.
    """
    return [match[2] for match in _TABLE.finditer(text)]


def _render_table(path: Path, key: str, where: str | None, columns: str | None) -> str:
    if not path.is_file():
        return MISSING
    report = json.loads(path.read_text(encoding="utf-8"))
    values = dict(condition.split("=", 1) for condition in where.split(", ")) if where else {}
    named = [{_RENAMED.get(name, name): value for name, value in row.items()} for row in report[key]]
    rows = [row for row in named if all(str(row[name]) in value.split("|") for name, value in values.items())]
    if not rows:
        raise ValueError(f"{path.name} must have rows in {key!r} where {where}, got none; correct the mark")
    names = _columns(columns, rows[0]) if columns else list(rows[0])
    table = markdown([{name: row[name] for name in names} for row in rows])
    return f"{table}\n{_measurement_line(report['environment'])}\n"


def _columns(text: str, row: dict[str, Any]) -> list[str]:
    """Names of a row's columns, with commas between them, which a name may hold too.

    Raises:
        ValueError: there is no such column.
    """
    names, rest = [], f"{text}, "
    while rest:
        name = max((name for name in row if rest.startswith(f"{name}, ")), key=len, default=None)
        if name is None:
            raise ValueError(f"columns must be of {', '.join(row)}, got {rest!r}; correct the mark")
        names.append(name)
        rest = rest.removeprefix(f"{name}, ")
    return names


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table of rows that share their keys.

    Args:
        rows: at least one.
    """
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _measurement_line(environment: dict[str, Any]) -> str:
    """Return one line that tells where, when and by what a report was measured."""
    e = environment
    features = f" ({', '.join(e['cpu_features'])})" if e["cpu_features"] else ""
    machine = e["gpu"] or f"{e['cpu']}{features}, {e['threads']} of {e['cores']} cores"
    uncommitted = "" if e["clean"] else " with changes that are not committed"
    return f"`{e['command']}`, {e['date'][:10]}, commit `{e['commit'][:7]}`{uncommitted}, {machine}, {e['dtype']}."


if __name__ == "__main__":
    main()
