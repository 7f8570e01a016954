"""Rows and tables by hand."""

from __future__ import annotations

from benchmarks.quality import metric_tables
from benchmarks.quality.scores import EditScore


def scored(kind: str, success: bool | None, *, drawn: bool = True, macs: int = 2 * 10**9) -> object:
    figures = ("truth_psnr", "background_psnr", "inside_psnr", "seam", "dense_psnr", "kept_psnr", "again_psnr")
    blank = dict.fromkeys(("area", "whole", "fit", "leftover", "exact", "gone", *figures))
    return EditScore(kind, drawn, 5, macs, "", success=success, published=None, **blank)


def test_rows_by_hand():
    ours = [scored("swap", True), scored("swap", False), scored("delete", True, drawn=False), scored("weather", None)]
    best = [scored("swap", True), scored("swap", True), None, scored("weather", None)]
    found = metric_tables.metric_rows({"fisedit": ours, "blended-true": best}, ("swap", "delete", "weather"))
    by = {(row["method"], row["source"], row["kind"]): row for row in found}
    assert by["fisedit", "drawn", "all"]["edits"] == 3 and by["fisedit", "drawn", "all"]["success"] == {
        "mean": 0.5,
        "interval": [0.0, 1.0],
        "edits": 2,
    }
    assert by["fisedit", "drawn", "all"]["relative success"] == {"mean": 0.5, "edits": 2}
    assert by["fisedit", "generated", "delete"]["relative success"] == {"mean": None, "edits": 0}
    assert by["fisedit", "drawn", "swap"]["GMACs"] == {"median": 2.0, "tail": 2.0, "interval": [2.0, 2.0], "edits": 2}
    assert by["fisedit", "drawn", "swap"]["IoU"] == {"median": None, "tail": None, "interval": None, "edits": 0}
    assert (by["fisedit", "drawn", "in a place"]["edits"], by["fisedit", "drawn", "everywhere"]["edits"]) == (2, 1)
    assert ("blended-true", "generated", "all") not in by
    told = metric_tables.format_table([by["fisedit", "drawn", "all"]], ("method",))
    assert told == [
        {"method": "fisedit", "success": "50% [0%, 100%] of 2", "relative success": "50% of 2", "fell back": "0%"}
        | {"GMACs": "2 (2)", "evaluations": "5 (5)"}
    ]
