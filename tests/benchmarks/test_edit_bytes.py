"""`benchmarks.edit_bytes`: what it counts is what sources and edits keep."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.edit_bytes import count_edit_bytes
from fisedit import Editor
from fisedit.bench.settings import SpeedSettings
from fisedit.bench.workload import PROMPTS, square_mask
from fisedit.values import Quality


def test_the_bytes_of_edits_are_those_that_are_kept(pipelines, model):
    settings = SpeedSettings(
        model=model, areas=(0.25,), size=128, num_inference_steps=4, device="cpu", dtype="fp32", guidance_scale=4.0
    )
    report = count_edit_bytes(settings)
    rows = {row["quality"]: row for row in report["rows"] if row["cache_dtype"] == "int8"}
    assert len(report["rows"]) == 12 == len(report["summary"])
    editor = Editor(pipelines["demo"], cache_dtype="int8")
    source = editor.generate(PROMPTS[0], num_inference_steps=4, width=128, height=128, guidance_scale=4.0)
    for quality in (Quality.FAST, Quality.CLOSE):
        editor.checkout(source.id)
        result = editor.edit(PROMPTS[1], mask=square_mask(0.25, 16), quality=quality)
        trajectory = editor._trajectory_cache.get(result.id)[0]
        kept = sum(step.own_bytes for step in (*trajectory.features, *trajectory.feature_deltas))
        assert rows[quality.value]["edit_bytes"] == pytest.approx(kept, rel=0.15), quality
    features = editor._trajectory_cache.get(source.id)[0].features
    assert rows["fast"]["source_bytes"] == pytest.approx(np.sum([step.own_bytes for step in features]))
