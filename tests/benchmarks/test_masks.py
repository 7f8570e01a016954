"""Masks by every method: rows by hand, and a whole run."""

from __future__ import annotations

import json

import pytest

from benchmarks import masks as mask_quality
from fisedit.bench import metrics
from fisedit.bench.settings import EvaluationSettings


def test_recipes_rows_by_hand():
    def one(
        iou: float, gmacs: float, fell_back: bool = False, left: float | None = None, told: float = 1.0
    ) -> mask_quality.MaskResult:
        overlap = metrics.MaskOverlap(iou, 1.0, iou)
        return mask_quality.MaskResult(metrics.MaskFit(overlap, overlap, 2.0), left, gmacs, fell_back, told)

    found = [
        {"a": one(0.2, 1, left=0.021), "b": one(1, 1, left=0.0)},
        {"a": one(0.6, 3, left=0.019), "b": one(1, 1, left=0.0)},
        {"a": one(1, 9, True), "b": one(1, 1)},
    ]
    every = mask_quality.mask_rows(["swap", "swap", "insert"], found)
    assert [(row["kind"], row["recipe"], row["edits"]) for row in every] == [
        *(("all", "a", 3), ("all", "b", 3), ("swap", "a", 2), ("swap", "b", 2), ("insert", "a", 1), ("insert", "b", 1))
    ]
    assert every[0]["IoU"]["median"] == 0.6 and every[0]["GMACs"]["median"] == 3
    assert every[0]["leaves parts"] == {"mean": 0.5, "interval": [0.0, 1.0], "edits": 2}
    assert every[0]["fell back"]["mean"] == pytest.approx(1 / 3) and every[2]["IoU"]["median"] == pytest.approx(0.4)
    told = [one(0.5, 1, told=0.9), one(0.49, 1, told=0.92), one(0.9, 1, told=1.0), one(0.1, 1, told=0.2)]
    table = mask_quality.calibration_rows(told)
    assert [(row["confidence"], row["edits"], row["mean"]) for row in table] == [
        ("0% to 50%", "1", "20.0%"),
        ("90% to 95%", "2", "91.0%"),
        ("95% to 100%", "1", "100.0%"),
    ]
    assert [row["right"].split(" ")[0] for row in table] == ["0.0%", "50.0%", "100.0%"]


def test_every_recipe_is_measured_on_the_same_edits(monkeypatch, spoken_pipe):
    monkeypatch.setattr(mask_quality, "load", lambda *_, **__: spoken_pipe)
    report = mask_quality.measure_mask_quality(EvaluationSettings(edits=3, num_inference_steps=2, seed=3))
    assert {row["recipe"] for row in report["rows"]} == set(mask_quality.MASK_METHODS) and json.dumps(report)
    assert [edit["kind"] for edit in report["edits"]] == ["swap", "insert", "delete"]
    for row in report["rows"]:
        assert (
            all(0 <= row[name]["median"] <= 1 for name in ("IoU", "recall", "precision")) and row["GMACs"]["median"] > 0
        )
