"""The report with pictures: report.html and contact sheets in a folder. Knows a report by its keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as PIL

from fisedit.bench.html_page import figure, html_page, html_table
from fisedit.bench.metrics import cells_to_pixels
from fisedit.storage import files, images
from fisedit.storage.contact_sheet import make_sheet, overlay

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

    from benchmarks.quality.scores import EditScore
    from fisedit.bench.edit_case import EditCase, MethodResult
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
        self._figures.append(figure(name, f"{case.edit.kind}: {case.edit.source_prompt} → {case.edit.prompt}"))

    def write(self, report: Mapping[str, Any]) -> Path:
        """Write report.html.

        Args:
            report: The report of `measure_edit_quality`.

        Returns:
            The file's path.
        """
        path = self.folder / "report.html"
        sections = [*_sections(report), ("Pictures", "\n".join(self._figures))]
        files.write_text(html_page("python -m benchmarks.quality", sections), path)
        return path


def _contact_sheet(
    case: EditCase, results: Mapping[str, MethodResult | None], scores: Mapping[str, EditScore | None]
) -> Image:
    """The source, the true mask, and every method's picture under its mask and beside it."""
    source = case.source.image
    columns = [("source", source)]
    if case.edit.true_mask is not None:
        columns.append(("true mask", overlay(source, _mask_image(case.edit.true_mask))))
    found = case.plain.painted
    if found is not None:
        columns.append(("fisedit's mask", overlay(source, _mask_image(cells_to_pixels(found)))))
    for method, result in results.items():
        if result is not None:
            score = scores[method]
            success = score.success if score else None
            verdict = "" if success is None else " (done)" if success else " (not done)"
            columns.append((method + verdict, result.picture))
    return make_sheet(columns)


def _mask_image(inside: BoolGrid) -> Image:
    return PIL.fromarray(inside.astype(np.uint8) * 255, mode="L")


def _sections(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Methods", html_table(report["summary"])),
        ("Ours by kind of edit", html_table(report["classes"])),
        ("Artefacts by kind of edit", html_table(report["artefacts"])),
        ("Detection of global edits", html_table(report["whole"])),
        ("Notes", "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in report["notes"]) + "</ul>"),
        ("Settings", html_table([{key: str(value) for key, value in report["settings"].items()}])),
    ]
