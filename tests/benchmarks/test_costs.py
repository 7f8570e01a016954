"""`python -m benchmarks.costs`: what it compares, and how it judges a choice; times are not checked."""

from __future__ import annotations

import json

import pytest

from benchmarks import costs as cost_predictions
from benchmarks.costs import is_faster_choice, summary
from fisedit.diagnosis import calibration
from fisedit.diagnosis.calibration import CalibrationSettings

WORDS = "costs --areas 25 --size 64 --num-inference-steps 1 --repeats 1 --device cpu --dtype fp32 --json"


def test_every_run_is_predicted_measured_and_judged(study, model, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "FEWEST", 1)
    monkeypatch.setattr(cost_predictions, "CalibrationSettings", lambda: CalibrationSettings(0, 64))
    run = study(*WORDS.split(), "--model", model, "--output", "costs.json")
    assert run.status == 0, run.err
    report = json.loads(run.out)
    assert report == json.loads((tmp_path / "costs.json").read_text()) and report["notes"] == []
    assert report["settings"]["num_inference_steps"] == 1 and report["table"]["curves"]
    source, dense, *edits = report["rows"]
    assert (source["run"], dense["run"]) == ("source", "dense")
    assert {(row["run"], row["area"]) for row in edits} == {("square", 0.25), ("ragged", 0.25)}
    for row in report["rows"]:
        assert row["predicted"] > 0
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"]["median"] - 1)
    for row in edits:
        assert row["chosen"] in {"dense", "sparse"}
        assert row["right"] == is_faster_choice(row["chosen"], row["measured"]["median"], dense["measured"]["median"])
    assert report["summary"] == [summary(report["rows"])]


def test_a_choice_counts_where_the_runs_differ():
    assert is_faster_choice("sparse", 1.0, 2.0) is True and is_faster_choice("dense", 1.0, 2.0) is False
    assert is_faster_choice("dense", 2.0, 1.0) is True and is_faster_choice("sparse", 2.0, 1.0) is False
    assert is_faster_choice("sparse", 1.0, 1.1) is None is is_faster_choice("dense", 1.1, 1.0)


def test_the_summary_leaves_out_what_is_not_judged():
    rows = [{"error": -0.5}, {"error": 0.1, "right": True}, {"error": 0.2, "right": False}, {"error": 0, "right": None}]
    assert summary(rows) == {
        "runs": 4,
        "median error": "15.0%",
        "largest error": "50.0%",
        "chosen right": "1 of 2",
    }
