"""Plans: the placement is brute force's, and a plan says what does not fit and what to change."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fisedit import Editor
from fisedit.cli.diagnosis import _parse_bytes
from fisedit.diagnosis.plan import PlanSettings, as_rows, plan_edits
from fisedit.diagnosis.record_placement import RecordPlacement, place_records
from fisedit.errors import InputError


def test_placement_is_that_of_brute_force():
    rng = np.random.default_rng(0)
    infeasible = 0
    for _ in range(200):
        steps = [
            [
                RecordPlacement(f"{i}", int(rng.integers(0, 9)), float(rng.integers(1, 9)))
                for i in range(rng.integers(1, 4))
            ]
            for _ in range(rng.integers(1, 6))
        ]
        limit = int(rng.integers(0, 25))
        fitting = [ways for ways in product(*steps) if sum(one.bytes for one in ways) <= limit]
        found = place_records(steps, limit)
        if not fitting:
            assert found is None
            infeasible += 1
            continue
        best = min((sum(one.seconds for one in ways), sum(one.bytes for one in ways)) for ways in fitting)
        assert found is not None and all(one in choices for one, choices in zip(found, steps, strict=True))
        assert (sum(one.seconds for one in found), sum(one.bytes for one in found)) == best
    assert 0 < infeasible < 100
    page = [RecordPlacement("memory", 3, 1.0), RecordPlacement("disk", 0, 2.0)]
    assert [one.name for one in place_records([page] * 5, 10)].count("memory") == 3, "the whole budget is spent"


def test_a_plan_fits_or_says_what_to_change(pipelines, tmp_path, monkeypatch):
    monkeypatch.setenv("FISEDIT_COSTS", str(tmp_path))
    pipe, settings = pipelines["demo"], PlanSettings(size=128, num_inference_steps=10, areas=(0.05, 1.0))
    with pytest.raises(InputError, match="run fisedit calibrate first"):
        plan_edits(pipe, settings, 1 << 30)
    editor = Editor(pipe, model="demo")
    editor.calibrate(0, size=128)
    roomy = plan_edits(pipe, settings, 1 << 30)
    assert roomy["changes"] == [] and roomy["choice"]["steps_in_memory"] == 10 and not roomy["choice"]["steps_on_disk"]
    assert roomy["edits"][1]["fallback"] and roomy["edits"][1]["dense_steps"] == 10
    made = editor.generate("a cat", num_inference_steps=10, width=128, height=128)
    assert roomy["source"]["bytes"] == pytest.approx(made.stats.recorded_bytes, rel=0.1)
    weights, every = roomy["choice"]["weights_bytes"], roomy["source"]["bytes"]

    def plan(memory):
        found = plan_edits(pipe, PlanSettings(size=128, num_inference_steps=10, memory=weights + memory), 1 << 30)
        return found["choice"] | {"changes": found["changes"], "bytes": found["source"]["bytes"]}

    coded = plan(every // 2)
    assert coded["cache_dtype"] == "int4" and coded["changes"] == [] and coded["bytes"] < every // 2
    tight = plan(coded["bytes"] // 2)
    assert any("--num-inference-steps 5" in line for line in tight["changes"]) and not tight["steps_on_disk"]
    monkeypatch.setenv("FISEDIT_PAGES", str(tmp_path))
    paged = plan(coded["bytes"] // 2)
    assert (paged["cache_dtype"], paged["steps_in_memory"], paged["steps_on_disk"]) == ("int4", 5, 5)
    assert paged["changes"] == []
    assert [row["run"] for row in as_rows(roomy)] == ["source", "edit of 5%", "edit of 100%"]


def test_memory_is_read_with_its_unit():
    assert (_parse_bytes("4G"), _parse_bytes("900mb"), _parse_bytes("1.5k")) == (4 << 30, 900 << 20, 1536)
    with pytest.raises(InputError, match="memory must be bytes such as 900M or 4G, got 'much'"):
        _parse_bytes("much")
