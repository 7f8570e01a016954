"""Scores to rows of metrics, and rows to short tables. Knows scores by their fields; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.quality.artefacts import Artefacts
from benchmarks.quality.methods import REFERENCE
from benchmarks.quality.scene_edits import GLOBAL_KINDS
from fisedit.bench.metrics import bootstrap_interval, median_and_tail

if TYPE_CHECKING:
    from benchmarks.quality.scores import EditScore

Row = dict[str, Any]
Scores = Mapping[str, Sequence["EditScore | None"]]
"""Method -> its score of every edit, None where it could not be run."""

METRICS: dict[str, tuple[str, bool]] = {
    "IoU": ("fit.cells.iou", True),
    "precision": ("fit.cells.precision", True),
    "recall": ("fit.cells.recall", True),
    "pixel IoU": ("fit.pixels.iou", True),
    "pixel precision": ("fit.pixels.precision", True),
    "pixel recall": ("fit.pixels.recall", True),
    "coverage": ("fit.coverage", False),
    "area": ("area", False),
    "background dB": ("background_psnr", True),
    "truth dB": ("truth_psnr", True),
    "inside dB": ("inside_psnr", True),
    "seam": ("seam", False),
    "dense dB": ("dense_psnr", True),
    "kept dB": ("kept_psnr", True),
    "again dB": ("again_psnr", True),
    "PIE PSNR": ("published.psnr", True),
    "PIE MSE": ("published.mse", False),
    "PIE SSIM": ("published.ssim", True),
    "GMACs": ("gmacs", False),
    "evaluations": ("evaluations", False),
}
"""Metric -> the score's field, and whether high is good. IoU, precision and recall are by latent cells."""

SHARES = {
    "success": "success",
    "gone": "gone",
    "leaves parts": "leaves_parts",
    "artefacts": "flawed",
    "exact outside": "exact",
    "fell back": "fell_back",
}
"""Share of edits -> the score's field."""

TABLE_METRICS = (
    *("IoU", "recall", "coverage", "leaves parts", "success", "relative success", "gone", "artefacts"),
    "truth dB",
    *("background dB", "exact outside", "inside dB"),
    *("seam", "dense dB", "kept dB", "again dB", "PIE PSNR", "PIE MSE", "PIE SSIM"),
    *("fell back", "GMACs", "evaluations"),
)
"""Columns of the short tables, where there are values."""

ALL, LOCAL, EVERYWHERE = "all", "in a place", "everywhere"
"""Names in place of a kind: all edits together, those that concern a part of the picture, and those of all of it."""


def metric_rows(scores: Scores, kinds: Sequence[str]) -> list[Row]:
    """Every metric of every method: of drawn and of generated sources, over all edits and over those of every kind.

    Args:
        scores: The scores of every edit, by method.
        kinds: the edits' different kinds.

    Returns:
        {"method", "source", "kind", "edits"} and for every metric {"median", "tail", "interval", "edits"}, for every
        share {"mean", "interval", "edits"}; `tail` is the 10th percentile, or the 90th where low is good, and
        `interval` is the median's or the mean's of 95 %.
    """
    rows = []
    for source, method, kind in product(("drawn", "generated"), scores, (ALL, LOCAL, EVERYWHERE, *kinds)):
        drawn = source == "drawn"
        chosen = [i for i, s in enumerate(scores[method]) if s and s.drawn is drawn and kind in groups_of(s.kind)]
        if chosen:
            method_scores = [s for i in chosen if (s := scores[method][i])]
            row = {"method": method, "source": source, "kind": kind, "edits": len(chosen)} | _metrics(method_scores)
            reference = [scores[REFERENCE][i] for i in chosen] if REFERENCE in scores else []
            rows.append(row | {"relative success": _relative_success(method_scores, reference)})
    return rows


def artefact_rows(scores: Scores, kinds: Sequence[str]) -> list[Row]:
    """Shares of edits in which a person sees an artefact, any and of every name: of edits whose truth is drawn.

    Args:
        scores: The scores of every edit, by method.
        kinds: the edits' different kinds.

    Returns:
        {"method", "kind", "edits", "any"} and a share, 0 to 1, for every name.
    """
    rows = []
    for method, kind in product(scores, (LOCAL, *kinds)):
        found = [s.artefacts for s in scores[method] if s and s.drawn and s.artefacts and kind in groups_of(s.kind)]
        if found and kind not in GLOBAL_KINDS:
            seen = [Artefacts(strengths).seen for strengths in found]
            shares = {name: fmean(name in names for names in seen) for name in found[0]}
            rows.append({"method": method, "kind": kind, "edits": len(found), "any": fmean(map(bool, seen))} | shares)
    return rows


def groups_of(kind: str) -> tuple[str, ...]:
    """The rows in which an edit of a kind counts."""
    return (ALL, EVERYWHERE if kind in GLOBAL_KINDS else LOCAL, kind)


def _metrics(scores: Sequence[EditScore]) -> Row:
    row: Row = {}
    for name, (path, high_is_good) in METRICS.items():
        row[name] = median_row(_values(scores, path), high_is_good=high_is_good)
    for name, path in SHARES.items():
        row[name] = share_row(_values(scores, path))
    return row


def median_row(values: Sequence[float], *, high_is_good: bool) -> Row:
    """A metric's {"median", "tail", "interval", "edits"}; None where there are no values.

    Args:
        values: one an edit.
        high_is_good: whether the tail is the 10th percentile; else it is the 90th.
    """
    middle, tail = median_and_tail(values, high_is_good=high_is_good) if values else (None, None)
    interval = list(bootstrap_interval(values, np.median)) if values else None
    return {"median": middle, "tail": tail, "interval": interval, "edits": len(values)}


def share_row(votes: Sequence[float]) -> Row:
    """A share's {"mean", "interval", "edits"}; None where there are no votes."""
    interval = list(bootstrap_interval(votes, np.mean)) if votes else None
    return {"mean": fmean(votes) if votes else None, "interval": interval, "edits": len(votes)}


def _values(scores: Sequence[EditScore], path: str) -> list[float]:
    """A field of every score that has it, through fields of fields."""
    values: list[Any] = list(scores)
    for name in path.split("."):
        values = [value for parent in values if (value := getattr(parent, name)) is not None]
    return values


def _relative_success(method_scores: Sequence[EditScore], reference: Sequence[EditScore | None]) -> Row:
    """Successes over the reference method's, on edits whose success is known for both."""
    pairs = [(a.success, b.success) for a, b in zip(method_scores, reference, strict=False) if b is not None]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    successes = sum(b for _, b in known)
    return {"mean": sum(a for a, _ in known) / successes if successes else None, "edits": len(known)}


def format_table(
    rows: Sequence[Row], columns: Sequence[str], names: Sequence[str] = TABLE_METRICS
) -> list[dict[str, str]]:
    """Rows as text: metrics as "median [interval] (tail)", shares in percent, with "of n" where not of all edits.

    Args:
        rows: those of `metric_rows`.
        columns: keys that are shown as they are.
        names: metrics and shares, left out where no row has a value.
    """
    texts = [{name: _as_text(row[name], row["edits"]) for name in names} for row in rows]
    shown = [name for name in names if any(text[name] != "-" for text in texts)]
    return [
        {c: str(row[c]) for c in columns} | {n: text[n] for n in shown} for row, text in zip(rows, texts, strict=True)
    ]


def _as_text(metric: Row, edits: int) -> str:
    value = metric.get("median", metric.get("mean"))
    if value is None:
        return "-"
    if "median" in metric:
        low, high = metric["interval"]
        spread = "" if low == high else f" [{low:.3g}, {high:.3g}]"
        return f"{value:.3g}{spread} ({metric['tail']:.3g})"
    low, high = metric.get("interval") or (value, value)
    spread = "" if low == high else f" [{low:.0%}, {high:.0%}]"
    return f"{value:.0%}{spread}" if metric["edits"] == edits else f"{value:.0%}{spread} of {metric['edits']}"
