"""The report with pictures: report.html and contact sheets in a folder. Knows a report by its keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as PIL

from fisedit.evaluation.quality.metrics import cells_to_pixels
from fisedit.storage import files, images
from fisedit.storage.contact_sheet import make_sheet, overlay

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

    from fisedit.evaluation.quality.edit_case import EditCase, MethodResult
    from fisedit.evaluation.quality.scores import EditScore
    from fisedit.values import BoolGrid


class HtmlReport:
    """A folder with report.html and a contact sheet of the first edits of every kind.

    Args:
        folder: created if it is missing.
    """

    EDITS_PER_KIND = 4

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shown: Counter[tuple[str, bool]] = Counter()
        self._figures: list[str] = []

    def add_edit(
        self, case: EditCase, results: Mapping[str, MethodResult | None], scores: Mapping[str, EditScore | None]
    ) -> None:
        """Write an edit's contact sheet, while there are too few of its kind.

        Args:
            case: the edit and its source.
            results: by method; None where one could not be run.
            scores: by method.
        """
        key = (case.edit.kind, case.edit.picture is None)
        if self._shown[key] == self.EDITS_PER_KIND:
            return
        self._shown[key] += 1
        name = f"sheets/{len(self._figures):03d}.jpg"
        images.write_image(_contact_sheet(case, results, scores), self.folder / name)
        caption = escape(f"{case.edit.kind}: {case.edit.source_prompt} → {case.edit.prompt}")
        self._figures.append(f'<figure><img src="{name}" alt="{caption}" /><figcaption>{caption}</figcaption></figure>')

    def write(self, report: Mapping[str, Any]) -> Path:
        """Write report.html.

        Args:
            report: that of `measure_edit_quality`.

        Returns:
            The file's path.
        """
        path = self.folder / "report.html"
        files.write_text(_PAGE.format(body="\n".join([*_sections(report), "<h2>Pictures</h2>", *self._figures])), path)
        return path


def _contact_sheet(
    case: EditCase, results: Mapping[str, MethodResult | None], scores: Mapping[str, EditScore | None]
) -> Image:
    """The source, the true mask, and every method's picture under its mask and beside it."""
    source = case.source.image
    columns = [("source", source)]
    if case.edit.true_mask is not None:
        columns.append(("true mask", overlay(source, _mask_image(case.edit.true_mask))))
    ours = case.ours.grid
    if ours is not None:
        columns.append(("our mask", overlay(source, _mask_image(cells_to_pixels(ours)))))
    for method, result in results.items():
        if result is not None:
            score = scores[method]
            success = score.success if score else None
            verdict = "" if success is None else " (done)" if success else " (not done)"
            columns.append((method + verdict, result.picture))
    return make_sheet(columns)


def _mask_image(inside: BoolGrid) -> Image:
    return PIL.fromarray(inside.astype(np.uint8) * 255, mode="L")


def _sections(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Methods</h2>"
    yield _html_table(report["summary"])
    yield "<h2>Ours by kind of edit</h2>"
    yield _html_table(report["classes"])
    yield "<h2>Detection of global edits</h2>"
    yield _html_table(report["whole"])
    yield "<h2>Notes</h2>"
    yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in report["notes"]) + "</ul>"
    yield "<h2>Settings</h2>"
    yield _html_table([{key: str(value) for key, value in report["settings"].items()}])


def _html_table(rows: Sequence[Mapping[str, object]]) -> str:
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row.values()) + "</tr>" for row in rows)
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
