"""Rows and tables by hand."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.quality import metric_tables
from benchmarks.quality.scores import EditScore


def scored(kind: str, success: bool | None, *, drawn: bool = True, macs: int = 2 * 10**9) -> object:
    figures = (
        "truth_psnr",
        "background_psnr",
        "inside_psnr",
        "seam",
        "dense_psnr",
        "kept_psnr",
        "again_psnr",
        "artefacts",
    )
    blank = dict.fromkeys(("area", "whole", "fit", "leftover", "exact", "gone", "artefacts", *figures))
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


def test_artefacts_by_kind():
    found = [{"smear": 1.2, "cut": 0.0}, {"smear": 0.4, "cut": 0.9}, {"smear": 3.0, "cut": 1.0}]
    drawn = [replace(scored("swap", None), artefacts=strengths) for strengths in found]
    others = [replace(scored("swap", None, drawn=False), artefacts=found[2]), scored("weather", None), None]
    rows = metric_tables.artefact_rows({"fisedit": [*drawn, *others]}, ("swap", "weather"))
    shares = {"edits": 3, "any": 2 / 3, "smear": 2 / 3, "cut": 1 / 3}
    assert rows == [{"method": "fisedit", "kind": kind} | shares for kind in ("in a place", "swap")]
    assert [score.flawed for score in drawn] == [True, False, True] and others[1].flawed is None
