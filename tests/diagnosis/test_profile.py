"""Profiles: every second of a run is some layer's, MACs are the cost model's, and nothing of the run changes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fisedit import Editor
from fisedit.diagnosis.profile import profiled

CONFIG = {"num_inference_steps": 3, "width": 64, "height": 64}


def test_a_profile_counts_what_the_cost_model_counts_and_changes_nothing(pipelines, tmp_path):
    editor, mask = Editor(pipelines["demo"]), np.zeros((64, 64), bool)
    mask[:16, :16] = True
    editor.generate("a cat", **CONFIG)
    plain = editor.edit("a dog", mask=mask, growth=1)
    editor.undo()
    with profiled(editor.pipe) as profile:
        again = editor.edit("a dog", mask=mask, growth=1)
    assert np.array_equal(plain.image, again.image)
    rows, spans = profile.rows(), profile.spans
    costs = editor._pipeline.planner.costs(again.config)
    assert sum(row["MACs"] for row in rows) == 3 * costs.sparse_step(again.mask.grid, 1)
    outer = {"text", "mask", "plan", "denoise", "decode"}
    whole = sum(span.seconds for span in spans if span.kind in outer)
    assert sum(row["seconds"] for row in rows) == pytest.approx(whole)
    assert sum(row["share"] for row in rows) == pytest.approx(1) and min(row["seconds"] for row in rows) >= 0
    assert {row["level"] for row in rows if row["layers"] == "conv"} == {0, 1, 2}
    assert [span.kind for span in spans].count("step sparse") == 3
    profile.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == len(spans) and all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
    before = len(spans)
    editor.undo()
    editor.edit("a bird", mask=mask)
    assert len(profile.spans) == before, "nothing is recorded behind the profile"
