"""A whole run of `benchmarks.erase`."""

from __future__ import annotations

import json

from benchmarks import erase
from fisedit.bench.settings import EvaluationSettings
from tests.support.quality import needs_font


@needs_font
def test_every_method_is_measured(monkeypatch, spoken_pipe, judge):
    monkeypatch.setattr(erase, "load", lambda *_, **__: spoken_pipe)
    monkeypatch.setattr(erase, "find_classifier", lambda *_: (judge, ()))
    told = erase.measure_erasing(EvaluationSettings(edits=1, num_inference_steps=2))
    assert [row["method"] for row in told["summary"]] == [row["method"] for row in told["rows"]] == list(erase.METHODS)
    assert json.loads(json.dumps(told["rows"], allow_nan=False)) == told["rows"]
    for row, summary in zip(told["rows"], told["summary"], strict=True):
        assert {"smear", "trace", "outline", "cut", "old thing"} <= set(row["artefacts"])
        assert summary["artefacts"] == float(max(row["artefacts"].values()) >= 1)
