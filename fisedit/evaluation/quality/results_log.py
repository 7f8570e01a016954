"""What a long measurement has found so far, one JSON line an edit, so that it can be stopped and gone on with.

The first line is what was asked; the others are one edit's prompts and every method's scores. It is written whole after
every edit. Knows scores as plain values, no picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fisedit.errors import InputError
from fisedit.evaluation.quality.metrics import MaskFit, MaskOverlap
from fisedit.evaluation.quality.pie_bench import Background
from fisedit.evaluation.quality.scores import EditScore
from fisedit.storage import files

if TYPE_CHECKING:
    from pathlib import Path

Scores = Mapping[str, EditScore | None]
"""Every method's score of one edit; None where it could not be run."""


class ResultsLog:
    """Edits and their scores, in memory and, with a path, on disk.

    Args:
        path: of the file; None keeps nothing. asked: the settings, of JSON's own types.

    Raises:
        InputError: the file is of other settings, or is no journal.
    """

    def __init__(self, path: Path | None, asked: Mapping[str, Any]) -> None:
        self._path = path
        self._lines = [json.dumps(asked)]
        self.edits: list[dict[str, Any]] = []
        self.scores: list[Scores] = []
        if path is not None and path.exists():
            self._read(path)

    def add(self, edit: dict[str, Any], scores: Scores) -> None:
        """Keep one more."""
        self.edits.append(edit)
        self.scores.append(scores)
        self._lines.append(json.dumps([edit, {name: score and asdict(score) for name, score in scores.items()}]))
        if self._path is not None:
            files.write_text("\n".join(self._lines) + "\n", self._path)

    def _read(self, path: Path) -> None:
        head, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        if head != self._lines[0]:
            raise InputError(f"the journal {path} is of other settings than these; name another, or delete it")
        for edit, scores in map(json.loads, lines):
            self.edits.append(edit)
            self.scores.append(dict(_scores(scores)))
        self._lines += lines


def _scores(told: Mapping[str, Any]) -> Iterator[tuple[str, EditScore | None]]:
    for name, score in told.items():
        yield name, None if score is None else EditScore(**score | _parts(score["fit"], score["published"]))


def _parts(fit: Any, published: Any) -> dict[str, Any]:
    overlaps = fit and {part: MaskOverlap(**fit[part]) for part in ("cells", "pixels")}
    return {"fit": fit and MaskFit(**fit | overlaps), "published": published and Background(**published)}
