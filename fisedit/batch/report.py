"""Writes a run's outcome as one HTML page: before, after, mask, prompt, seconds and error of every item.

Images are linked by relative paths, so the page can be moved with its folders; masks are embedded. Text is escaped.
Knows records only.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from pathlib import Path
from urllib.parse import quote

from fisedit.batch.values import BatchOutcome, ItemRecord, ItemStatus, one_line
from fisedit.storage import files


def write_report(outcome: BatchOutcome, path: Path) -> None:
    """Write the page; it is complete or absent.

    Args:
        outcome: The result of a run.
        path: An .html file; its folder is created if missing.
    """
    folder = path.absolute().parent
    counts = ", ".join(f"{count} {status}" for status, count in outcome.counts.items() if count)
    notes = "".join(f"<li>{_text(note)}</li>" for note in outcome.notes)
    rows = "\n".join(_row(record, folder) for record in outcome.records)
    files.write_text(_PAGE.format(counts=counts, seconds=outcome.seconds, notes=notes, rows=rows), path)


def _row(record: ItemRecord, folder: Path) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in _cells(record, folder))
    return f'<tr class="{record.status.replace(" ", "-")}">{cells}</tr>'


def _cells(record: ItemRecord, folder: Path) -> Iterator[str]:
    item, done = record.item, record.status in (ItemStatus.DONE, ItemStatus.BEFORE)
    area = b64encode(record.area).decode()
    yield f"{_text(item.name)}<br><b>{record.status}</b>"
    yield _image_link(item.picture, folder, "before")
    yield _image_link(item.target, folder, "after") if done else ""
    yield f'<img class="mask" alt="mask" src="data:image/png;base64,{area}">' if area else ""
    yield f"{_text(item.prompt)}<br><small>{_text(item.source_prompt or '')}</small>"
    yield f"{record.seconds:.1f}" if record.seconds else ""
    yield "<br>".join(map(_text, filter(None, (record.reason, record.change, *record.notes))))


def _image_link(path: Path, folder: Path, what: str) -> str:
    """An image that the browser loads when it scrolls into view; its address is quoted byte by byte."""
    link = escape(quote(os.fsencode(os.path.relpath(path.absolute(), folder))))
    return f'<a href="{link}"><img loading="lazy" alt="{what}" src="{link}"></a>'


def _text(text: str) -> str:
    return escape(one_line(text))


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>fisedit batch</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #202024; background: #fcfcfa; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }}
img {{ width: 12rem; max-height: 18rem; object-fit: contain; object-position: top left; }}
.mask {{ image-rendering: pixelated; border: 1px solid #ddd; }}
.failed b {{ color: #b00020; }}
</style>
</head>
<body>
<h1>fisedit batch</h1>
<p>{counts}; {seconds:.1f} s</p>
<ul>{notes}</ul>
<table>
<thead><tr><th>picture</th><th>before</th><th>after</th><th>mask</th><th>prompt</th><th>seconds</th><th>remarks</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""
