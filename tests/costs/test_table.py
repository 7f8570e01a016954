"""The cost table: curves through measured points, its file, and what the planner decides by it."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.costs import store as cost_store
from fisedit.costs.pace import Pace
from fisedit.costs.table import CostTable, Curve, Measurements, fit, from_dict
from fisedit.machine.stopwatch import Stopwatch
from fisedit.sampling.engine import Engine
from fisedit.values import Quality, Step, make_generation_config
from tests.support.edits import CAT, DOG


def table(dense: float, sparse: float, shifted: float = 0.0) -> CostTable:
    """Every step takes the same: dense ones, sparse ones, and those behind a dense one."""
    steps = {"dense": dense, "sparse": sparse, "shifted": shifted or sparse}
    curves = {(run, "other", -1): Curve((1.0, 1e9), (seconds, seconds)) for run, seconds in steps.items()}
    return CostTable(curves | {("edit", "once", -1): Curve((1.0,), (0.5,))})


SURE = Pace(dense=(1.0,), sparse=(1.0, 1.0))
"""Runs that took what the table says."""


def costs(pipe, found: CostTable | None, steps: int = 10, pace: Pace = SURE):
    engine = Engine(pipe)
    engine.table, engine.pace = found, pace if found else Pace()
    config = make_generation_config(
        "a cat",
        seed=0,
        negative_prompt="",
        num_inference_steps=steps,
        guidance_scale=7.5,
        width=128,
        height=128,
        scheduler="ddim",
    )
    return engine.costs(config)


CORNER = np.zeros((16, 16), bool)
CORNER[:5, :5] = True


def test_a_curve_goes_through_its_points_and_on_beyond_them():
    curve = fit([(10, 1.0), (30, 3.0), (10.4, 5.0), (10.2, 2.0), (20, 2.5)])
    assert curve.works == pytest.approx((10.2, 20, 30)) and curve.seconds == (2.0, 2.5, 3.0)
    assert curve.at(25) == pytest.approx(2.75) and curve.at(40) == pytest.approx(3.5)
    assert Curve((10, 20), (1.0, 2.0)).at(5) == pytest.approx(0.5) and Curve((10, 20), (2.0, 1.0)).at(5) == 2.0
    assert Curve((10.0,), (1.0,)).at(5) == 1.0 and Curve((10.0,), (1.0,)).at(20) == 2.0
    assert Curve((10, 20), (2.0, 1.0)).at(200) > 1.0, "no machine is faster for more work without end"


def test_a_table_survives_its_file_and_a_damaged_one_counts_for_none(pipelines, tmp_path, monkeypatch):
    monkeypatch.setenv("FISEDIT_COSTS", str(tmp_path))
    pipe, measured = pipelines["demo"], Measurements()
    for run in ("dense", "sparse"):
        measured.add((run, "conv", 0), 64.0, 0.25)
    about = cost_store.describe(pipe) | {"date": "today", "record_bytes": 9.5, "pixels": 64}
    path = cost_store.save_table(pipe, measured.table(about, {"memory": 1e9}))
    assert path is not None
    again = cost_store.load_table(pipe)
    curve = Curve((64.0,), (0.25,))
    assert again is not None and again.curves == {("dense", "conv", 0): curve, ("sparse", "conv", 0): curve}
    assert dict(again.rates) == {"memory": 1e9} and again.about["date"] == "today"
    text = path.read_text()
    spoilt = [
        ("64.0", '"x"'),
        ('"version": 2', '"version": 0'),
        ("0.25", "NaN"),
        ("0.25", "-1"),
        ('"level": 0', '"level": 9'),
    ]
    spoilt += [
        ('"level": 0', '"level": 1e999'),
        ('"level": 0', '"level": 0.9'),
        ("0.25", "0"),
        ("0.25", "1e308"),
        ("0.25", "true"),
        ("64.0", "5e-324"),
        ('"pixels": 64', '"pixels": 1e300'),
        ('"pixels": 64', '"pixels": 1'),
        (about["architecture"], "another"),
        ("9.5", '"x"'),
        ('"sparse"', '"dense"'),
        ('"rates": {', '"rates": [], "x": {'),
    ]
    for broken in (text[:-9], "[]", "[" * 100_000, *(text.replace(*change) for change in spoilt)):
        assert broken != text
        path.write_text(broken)
        assert cost_store.load_table(pipe) is None, broken
    path.unlink()
    os.mkfifo(path)  # opening it would never end
    assert cost_store.load_table(pipe) is None
    path.unlink()
    path.write_text(text)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert cost_store.load_table(pipe) is None, "the table of other threads is not read"
    monkeypatch.setenv("FISEDIT_COSTS", "x" * 6000)
    assert cost_store.load_table(pipe) is None, "no folder has such a name"
    monkeypatch.setenv("FISEDIT_COSTS", "0")
    assert cost_store.save_table(pipe, again) is None
    row = {"run": "dense", "kind": "a", "level": 0, "works": [2, 1], "seconds": [1, 1]}
    with pytest.raises(ValueError, match="works must ascend"):
        from_dict(json.loads(text) | {"curves": [row]})


def test_a_table_decides_between_dense_and_sparse_and_tells_seconds(pipelines):
    pipe = pipelines["demo"]
    fast, slow = costs(pipe, table(2.0, 1.0)), costs(pipe, table(2.0, 1.95))
    growth = fast.choose_dilations(CORNER, quality=Quality.FAST)
    assert fast.seconds(CORNER, growth) == pytest.approx(10.5) and fast.seconds(None, ()) == pytest.approx(20.5)
    assert fast.seconds(CORNER, growth, start=4, probes=1) == pytest.approx(8.5)
    assert not fast.dense_is_cheaper(CORNER, growth)
    assert "the region alone takes" in slow.dense_is_cheaper(CORNER, growth)
    mixed = (Step.DENSE, 1, 1, Step.DENSE, *[1] * 6)
    assert costs(pipe, table(2.0, 1.0, 1.5)).seconds(CORNER, mixed) == pytest.approx(2 * 2 + 8 * 1.5 + 0.5)
    assert costs(pipe, table(1.2, 1.0)).choose_dilations(CORNER).count(Step.DENSE), (
        "dense steps that cost hardly more are taken"
    )
    assert costs(pipe, None).seconds(CORNER, growth) is None


def test_the_steps_that_run_alone_are_weighed(pipelines):
    """A sparse run's fixed part pays in many steps, and what the first ones would compute counts for those alone."""
    planned = CostTable(table(2.0, 1.0).curves | {("edit", "plan", -1): Curve((1.0,), (3.0,))})
    measured = costs(pipelines["demo"], planned)
    assert not measured.dense_is_cheaper(CORNER, (1,) * 10)
    assert measured.dense_is_cheaper(CORNER, (1,) * 10, start=7)
    wide_at_first = (12,) * 5 + (1,) * 5
    counted = costs(pipelines["demo"], None)
    assert counted.dense_is_cheaper(CORNER, wide_at_first)
    assert not counted.dense_is_cheaper(CORNER, wide_at_first, start=5)
    editor = Editor(pipelines["demo"])
    editor.generate(CAT, num_inference_steps=10)
    editor._engine.table, editor._engine.pace = planned, SURE
    fallbacks = [editor.preview(DOG, mask=CORNER, strength=strength).fallback for strength in (1.0, 0.3)]
    assert not fallbacks[0] and fallbacks[1]


def test_a_table_switches_sparse_runs_off_only_where_real_ones_agree(pipelines):
    """One of a busy hour said 129 % for good: it is tried, and what the tries took corrects it."""
    growth = (1,) * 10
    busy = table(2.0, 2.6)
    assert "takes 129% of the seconds" in costs(pipelines["demo"], busy).dense_is_cheaper(CORNER, growth)
    for runs in (Pace(), Pace(dense=(1.0,), sparse=(1.0,)), Pace(dense=(1.0,), sparse=(0.1, 0.1))):
        assert not costs(pipelines["demo"], busy, pace=runs).dense_is_cheaper(CORNER, growth)
    quick = table(2.0, 0.2)
    assert not costs(pipelines["demo"], quick).dense_is_cheaper(CORNER, growth)
    slower = Pace(dense=(1.0,), sparse=(9.0, 12.0))
    assert costs(pipelines["demo"], quick, pace=slower).dense_is_cheaper(CORNER, growth)
    everywhere = np.ones((16, 16), bool)
    everywhere[0, 0] = False
    assert costs(pipelines["demo"], busy, pace=Pace()).dense_is_cheaper(everywhere, growth), "arithmetic agrees"


@pytest.mark.parametrize(("sparse", "fallbacks"), [(16.5, [False, False, True, True]), (2.0, [False] * 4)])
def test_what_edits_take_decides_whether_a_table_is_right(pipelines, monkeypatch, sparse, fallbacks):
    """It says 16.5 seconds for a sparse edit and 8.5 for a dense one."""
    editor = Editor(pipelines["demo"])
    source = editor.generate(CAT, num_inference_steps=4)
    editor._engine.table, editor._engine.pace = table(2.0, 4.0), Pace()
    ran = []
    for taken in (sparse, sparse, 8.5, 8.5):
        monkeypatch.setattr(Stopwatch, "done", lambda _, taken=taken: {"total": taken})
        ran.append(bool(editor.edit(DOG, mask=CORNER).stats.fallback))
        editor.checkout(source.id)
    assert ran == fallbacks and editor._engine.pace.dense_edits == sum(fallbacks)


def test_a_table_that_was_measured_again_is_read_again(pipelines, tmp_path, monkeypatch):
    monkeypatch.setenv("FISEDIT_COSTS", str(tmp_path))
    pipe = pipelines["demo"]
    about = cost_store.describe(pipe) | {"date": "today", "record_bytes": 9.5, "pixels": 64}
    editor = Editor(pipe)
    editor.generate(CAT, num_inference_steps=4)
    assert editor._engine.table is None
    for seconds in (0.25, 0.5):
        measured = Measurements()
        for run in ("dense", "sparse"):
            measured.add((run, "conv", 0), 64.0, seconds)
        path = cost_store.save_table(pipe, measured.table(about, {}))
        os.utime(path, ns=(0, int(seconds * 1e9)))
        editor.generate(CAT, num_inference_steps=4)
        assert editor._engine.table.curves["dense", "conv", 0].seconds == (seconds,)
