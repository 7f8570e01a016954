"""The scores that a long measurement has so far, one JSON line an edit, so that a stopped run can be resumed.

The first line holds the settings; each other line one edit's prompts and every method's scores. The file is replaced
as a whole after every edit. Knows scores as plain values, no picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.quality.pie_bench import BackgroundMetrics
from benchmarks.quality.scores import EditScore
from fisedit.bench.metrics import MaskFit, MaskOverlap
from fisedit.errors import InputError
from fisedit.storage import files

if TYPE_CHECKING:
    from pathlib import Path

ScoresByMethod = Mapping[str, EditScore | None]
"""Every method's score of one edit; None where it could not be run."""


class ResultsLog:
    """Edits and their scores, in memory and, with a path, on disk.

    Args:
        path: the file; None to keep them in memory only.
        settings: The settings of the measurement, in JSON's own types.

    Raises:
        InputError: the file is of other settings, or is no results log.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._lines = [json.dumps(settings)]
        self.edits: list[dict[str, Any]] = []
        self.scores: list[ScoresByMethod] = []
        if path is not None and path.exists():
            self._load(path)

    def append(self, edit: dict[str, Any], scores: ScoresByMethod) -> None:
        """Add an edit and write the file.

        Args:
            edit: its kind and prompts, in JSON's own types.
            scores: by method.
        """
        self.edits.append(edit)
        self.scores.append(scores)
        self._lines.append(json.dumps([edit, {name: score and asdict(score) for name, score in scores.items()}]))
        if self._path is not None:
            files.write_text("\n".join(self._lines) + "\n", self._path)

    def _load(self, path: Path) -> None:
        head, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        if head != self._lines[0]:
            raise InputError(f"the journal {path} is of other settings than these; name another, or delete it")
        for edit, scores in map(json.loads, lines):
            self.edits.append(edit)
            self.scores.append(dict(_parse_scores(scores)))
        self._lines += lines


def _parse_scores(scores: Mapping[str, Any]) -> Iterator[tuple[str, EditScore | None]]:
    for name, score in scores.items():
        parts = score and _parse_parts(score["fit"], score["published"])
        yield name, None if score is None else EditScore(**score | parts)


def _parse_parts(fit: Any, published: Any) -> dict[str, Any]:
    overlaps = fit and {part: MaskOverlap(**fit[part]) for part in ("cells", "pixels")}
    return {"fit": fit and MaskFit(**fit | overlaps), "published": published and BackgroundMetrics(**published)}
