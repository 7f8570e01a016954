"""The report as a page with pictures: report.html and contact sheets in a folder. Knows a report by its keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as PIL

from fisedit.evaluation.quality.metrics import pixels
from fisedit.storage import files, images
from fisedit.storage.contact_sheet import make_sheet, overlay

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

    from fisedit.evaluation.quality.edit_case import EditCase, MethodResult
    from fisedit.evaluation.quality.scores import EditScore
    from fisedit.values import BoolGrid


class HtmlReport:
    """A folder with report.html and a contact sheet of the first edits of every kind, chosen by nobody.

    Args:
        folder: is made if need be.
    """

    FIRST = 4

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shown: Counter[tuple[str, bool]] = Counter()
        self._figures: list[str] = []

    def show(
        self, case: EditCase, outcomes: Mapping[str, MethodResult | None], scores: Mapping[str, EditScore | None]
    ) -> None:
        """Keep an edit's pictures, if there are not enough of its kind."""
        key = (case.edit.kind, case.edit.picture is None)
        if self._shown[key] == self.FIRST:
            return
        self._shown[key] += 1
        name = f"sheets/{len(self._figures):03d}.jpg"
        images.write_image(_sheet(case, outcomes, scores), self.folder / name)
        said = escape(f"{case.edit.kind}: {case.edit.source_prompt} → {case.edit.prompt}")
        self._figures.append(f'<figure><img src="{name}" alt="{said}" /><figcaption>{said}</figcaption></figure>')

    def write(self, report: Mapping[str, Any]) -> Path:
        """Write the page; returns its path."""
        path = self.folder / "report.html"
        files.write_text(_PAGE.format(body="\n".join([*_sections(report), "<h2>Pictures</h2>", *self._figures])), path)
        return path


def _sheet(
    case: EditCase, outcomes: Mapping[str, MethodResult | None], scores: Mapping[str, EditScore | None]
) -> Image:
    """The source, the true mask, and every method's picture under its mask and beside it."""
    source = case.source.image
    columns = [("source", source)]
    if case.edit.true_mask is not None:
        columns.append(("true mask", overlay(source, _mask(case.edit.true_mask))))
    ours = case.ours.grid
    if ours is not None:
        columns.append(("our mask", overlay(source, _mask(pixels(ours)))))
    for method, outcome in outcomes.items():
        if outcome is not None:
            score = scores[method]
            success = score.success if score else None
            verdict = "" if success is None else " (done)" if success else " (not done)"
            columns.append((method + verdict, outcome.picture))
    return make_sheet(columns)


def _mask(inside: BoolGrid) -> Image:
    return PIL.fromarray(inside.astype(np.uint8) * 255, mode="L")


def _sections(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Methods</h2>"
    yield _html(report["summary"])
    yield "<h2>Ours by kind of edit</h2>"
    yield _html(report["classes"])
    yield "<h2>Edits of the whole picture, detected</h2>"
    yield _html(report["whole"])
    yield "<h2>Notes</h2>"
    yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in report["notes"]) + "</ul>"
    yield "<h2>Settings</h2>"
    yield _html([{key: str(value) for key, value in report["settings"].items()}])


def _html(found: Sequence[Mapping[str, object]]) -> str:
    if not found:
        return "<p>none</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in found[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row.values()) + "</tr>" for row in found)
    return f"<table><tr>{head}</tr>{body}</table>"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<title>fisedit bench quality</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #202024; background: #fcfcfa; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
figure {{ margin: 1.5rem 0; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
<h1>fisedit bench quality</h1>
{body}
</body>
</html>
"""
