"""Scores to rows of metrics, and rows to short tables. Knows scores by their fields; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fisedit.evaluation.quality.methods import REFERENCE
from fisedit.evaluation.quality.metrics import median_and_tail

if TYPE_CHECKING:
    from fisedit.evaluation.quality.scores import EditScore

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

SHARES = {"success": "success", "exact outside": "exact", "fell back": "fell_back"}
"""Share of edits -> the score's field."""

TABLE_METRICS = (
    *("IoU", "recall", "coverage", "success", "relative success", "background dB", "exact outside", "inside dB"),
    *("seam", "dense dB", "kept dB", "again dB", "PIE PSNR", "PIE MSE", "PIE SSIM"),
    *("fell back", "GMACs", "evaluations"),
)
"""Columns of the short tables, where there are values."""

ALL = "all"
"""In place of a kind: all edits together."""


def metric_rows(scores: Scores, kinds: Sequence[str]) -> list[Row]:
    """Every metric of every method: of drawn and of generated sources, over all edits and over those of every kind.

    Args:
        scores: of every edit, by method.
        kinds: the edits' different kinds.

    Returns:
        {"method", "source", "kind", "edits"} and for every metric {"median", "tail", "edits"}, for every share
        {"mean", "edits"}; `tail` is the 10th percentile, or the 90th where low is good.
    """
    rows = []
    for source, method, kind in product(("drawn", "generated"), scores, (ALL, *kinds)):
        drawn = source == "drawn"
        chosen = [i for i, s in enumerate(scores[method]) if s and s.drawn is drawn and kind in (ALL, s.kind)]
        if chosen:
            method_scores = [s for i in chosen if (s := scores[method][i])]
            row = {"method": method, "source": source, "kind": kind, "edits": len(chosen)} | _metrics(method_scores)
            reference = [scores[REFERENCE][i] for i in chosen] if REFERENCE in scores else []
            rows.append(row | {"relative success": _relative_success(method_scores, reference)})
    return rows


def _metrics(scores: Sequence[EditScore]) -> Row:
    row: Row = {}
    for name, (path, high_is_good) in METRICS.items():
        values = _values(scores, path)
        middle = median_and_tail(values, high_is_good=high_is_good) if values else (None, None)
        row[name] = {"median": middle[0], "tail": middle[1], "edits": len(values)}
    for name, path in SHARES.items():
        votes = _values(scores, path)
        row[name] = {"mean": fmean(votes) if votes else None, "edits": len(votes)}
    return row


def _values(scores: Sequence[EditScore], path: str) -> list[float]:
    """A field of every score that has it, through fields of fields."""
    values: list[Any] = list(scores)
    for name in path.split("."):
        values = [value for owner in values if (value := getattr(owner, name)) is not None]
    return values


def _relative_success(method_scores: Sequence[EditScore], reference: Sequence[EditScore | None]) -> Row:
    """Successes over the reference method's, on edits whose success is known for both."""
    pairs = [(a.success, b.success) for a, b in zip(method_scores, reference, strict=False) if b is not None]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    done = sum(b for _, b in known)
    return {"mean": sum(a for a, _ in known) / done if done else None, "edits": len(known)}


def format_table(
    rows: Sequence[Row], columns: Sequence[str], names: Sequence[str] = TABLE_METRICS
) -> list[dict[str, str]]:
    """Rows as text: metrics as "median (tail)", shares in percent, with "of n" where not of all edits.

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
        return f"{value:.3g} ({metric['tail']:.3g})"
    return f"{value:.0%}" if metric["edits"] == edits else f"{value:.0%} of {metric['edits']}"
