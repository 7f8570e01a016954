"""Plans: the placement is brute force's, and a plan says what does not fit and what to change."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from fisedit import Editor
from fisedit.cli.diagnosis import _parse_bytes
from fisedit.costs import store as cost_store
from fisedit.costs.model import Costs
from fisedit.diagnosis.calibration import shape_mask
from fisedit.diagnosis.plan import PlanSettings, as_rows, plan_edits
from fisedit.diagnosis.record_placement import RecordPlacement, place_records
from fisedit.errors import InputError
from fisedit.values import Step, as_growth


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


@pytest.fixture
def calibrated(pipelines, tmp_path, monkeypatch):
    """A calibrated pipeline in fp32."""
    monkeypatch.setenv("FISEDIT_COSTS", str(tmp_path))
    Editor(pipelines["demo"]).calibrate(0, size=128)
    return pipelines["demo"]


def save_faster_table(pipe, dtype):
    """Write the pipeline's table as another dtype's, with half of its seconds."""
    about = cost_store.describe(pipe)
    table = json.loads(cost_store.table_path(about).read_text())
    table["about"]["dtype"] = dtype
    for row in table["curves"]:
        row["seconds"] = [seconds / 2 for seconds in row["seconds"]]
    cost_store.table_path(about | {"dtype": dtype}).write_text(json.dumps(table))


def test_edits_take_the_bytes_of_the_cache_dtype_that_was_chosen(calibrated, monkeypatch):
    growth = (Step.DENSE, 1, 1, 1, Step.DENSE, 1, 1, 1, 1, 1)
    monkeypatch.setattr(Costs, "choose_dilations", lambda *_, **__: growth)
    monkeypatch.setattr(
        Costs, "dense_is_cheaper", lambda _, grid, *__: "everything" if np.all(getattr(grid, "grid", grid)) else ""
    )
    settings = {"size": 128, "num_inference_steps": 10, "areas": (0.1, 1.0)}
    roomy = plan_edits(calibrated, PlanSettings(**settings), 1 << 30)
    half = roomy["choice"]["weights_bytes"] + roomy["source"]["bytes"] // 2
    found = plan_edits(calibrated, PlanSettings(**settings, memory=half), 1 << 30)
    assert found["choice"]["cache_dtype"] == "int4" and not found["changes"]
    assert found["edits"][1]["fallback"] and found["edits"][1]["bytes"] == found["source"]["bytes"]
    editor = Editor(calibrated, cache_dtype="int4")
    editor.generate("a cat", num_inference_steps=10)
    made = editor.edit("a dog", mask=shape_mask(0.1, 16, discs=False), growth=as_growth(growth))
    assert not made.stats.fallback and not found["edits"][0]["fallback"]
    trajectory = editor._trajectory_cache.get(made.id)[0]
    kept = sum(step.own_bytes for step in (*trajectory.features, *trajectory.feature_deltas))
    assert found["edits"][0]["bytes"] == pytest.approx(kept, rel=0.25)


def test_an_edit_takes_the_bytes_of_the_dtype_that_is_planned(calibrated):
    settings = {"size": 128, "num_inference_steps": 10, "areas": (0.1, 1.0)}
    full = plan_edits(calibrated, PlanSettings(**settings), 1 << 30)
    save_faster_table(calibrated, "bfloat16")
    half = plan_edits(calibrated, PlanSettings(**settings), 1 << 30)
    assert (full["choice"]["dtype"], half["choice"]["dtype"]) == ("float32", "bfloat16")
    assert half["edits"][1]["bytes"] == half["source"]["bytes"] < full["source"]["bytes"]
    assert half["edits"][0]["bytes"] < 0.6 * full["edits"][0]["bytes"]


def test_a_dtype_that_is_asked_for_is_planned(calibrated):
    save_faster_table(calibrated, "bfloat16")
    for dtype, planned in (("fp32", "float32"), ("bf16", "bfloat16"), (None, "bfloat16")):
        settings = PlanSettings(size=128, num_inference_steps=10, dtype=dtype)
        assert plan_edits(calibrated, settings, 1 << 30)["choice"]["dtype"] == planned
    cost_store.table_path(cost_store.describe(calibrated)).unlink()
    with pytest.raises(InputError, match=r"table of the model in float32, got none; run fisedit calibrate first"):
        plan_edits(calibrated, PlanSettings(dtype="fp32"), 1 << 30)


def test_memory_is_read_with_its_unit():
    assert (_parse_bytes("4G"), _parse_bytes("900mb"), _parse_bytes("1.5k")) == (4 << 30, 900 << 20, 1536)
    with pytest.raises(InputError, match="memory must be bytes such as 900M or 4G, got 'much'"):
        _parse_bytes("much")
