"""The benchmark of captured graphs: refused without a GPU, and everything in it that a CPU can run."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
import torch

from fisedit import bench_cuda, bench_plot
from fisedit.benchmark import GUIDANCE, PROMPTS
from fisedit.captured import GraphExecutor
from fisedit.costs import default_growth
from fisedit.values import Recipe, SchedulerName
from tests.grids import grids
from tests.pipelines import build_pipeline

RECIPE = Recipe(PROMPTS[0], 7, "", 4, GUIDANCE, 128, 128, SchedulerName.DDIM)

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is refused")


@pytest.fixture(scope="module")
def bench():
    with torch.inference_mode():
        yield bench_cuda.Bench(build_pipeline("sd15"), RECIPE, repeats=1)


@without_gpu
def test_it_is_refused_in_one_line_where_there_is_no_gpu(fisedit):
    fisedit("bench", "edit", "--device", "cuda").refused("input", "cuda", "not on this machine")


def test_an_edit_by_graphs_is_the_engines_edit(bench):
    """A whole run: DDIM from its own coefficients, growth that changes, latents pinned."""
    grid = grids(16, 16)["blobs"]
    path = bench.edited(GraphExecutor(bench.engine.executor), grid)
    growth = default_growth(RECIPE.num_inference_steps)
    expected = bench.engine.replay(bench.source, RECIPE, bench.text, {}, grid, growth, lambda *_: None)
    assert len(path) == len(expected.latents)
    for mine, theirs in zip(path, expected.latents, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3, rtol=0)
    inside = torch.from_numpy(grid)
    assert all(torch.equal(a[..., ~inside], b[..., ~inside]) for a, b in zip(path, bench.source.latents, strict=True))


def test_a_row_of_the_table(bench, monkeypatch):
    monkeypatch.setattr(bench_cuda, "BACKENDS", ("reference", "fast"))
    dense = bench.dense(compiled=False)
    row = bench.row(grids(16, 16)["square"], dense)
    assert row["area"] == 16 / 256
    assert row["reference_error"] < 1e-5 and row["fast_error"] < 1e-5
    assert row["backend"] in {"reference", "fast"}
    step = row[f"{row['backend']}_step_seconds"]
    assert row["step_ratio_to_eager"] == dense["eager_step_seconds"] / step
    assert row["whole_ratio_to_eager"] == dense["eager_whole_seconds"] / row["whole_seconds"]
    shown = bench_cuda._summary({"mask": "square", **row})
    assert shown["step"] == f"{step * 1000:.2f} ms"
    assert {"step over eager", "whole over eager", "error"} <= shown.keys()


def test_a_plot_of_a_report():
    areas = (0.25, 0.01, 0.05)
    none = {"mask": "square", "step_roofline_seconds": None}
    rows = [none | {"area": a, "fast_step_seconds": a, "triton_step_seconds": a / 2} for a in areas]
    report = {
        "settings": {"pixels": 512, "dtype": "float16", "device": "A < B"},
        "dense": {"eager_step_seconds": 0.02},
        "rows": [*rows, {"mask": "ragged", "area": 0.5, "fast_step_seconds": 9.0}],
    }
    assert bench_plot.series(report) == {
        "eager": [(1, 20), (5, 20), (25, 20)],
        "fast": [(1, 10), (5, 50), (25, 250)],
        "triton": [(1, 5), (5, 25), (25, 125)],
    }
    svg = ET.fromstring(bench_plot.drawn(report))
    lines = {line.get("id"): line.get("points").split() for line in svg.iter("{http://www.w3.org/2000/svg}polyline")}
    assert lines.keys() == {"eager", "fast", "triton"}
    heights = {name: [float(point.split(",")[1]) for point in points] for name, points in lines.items()}
    assert len(set(heights["eager"])) == 1
    assert heights["fast"] == sorted(heights["fast"], reverse=True)  # higher up is slower
    assert all(fast < triton for fast, triton in zip(heights["fast"], heights["triton"], strict=True))


def test_a_batch_of_edits(bench, monkeypatch):
    monkeypatch.setattr(bench_cuda, "BACKENDS", ("fast",))
    row = bench.batch(3)
    assert row["edits"] == 3
    assert row["fast_edit_steps_a_second"] == 3 / row["fast_step_seconds"]


def test_the_roofline_is_the_slower_of_arithmetic_and_weights(bench, monkeypatch):
    assert bench._roofline(10**9) is None  # a CPU
    monkeypatch.setattr(bench, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    weights = sum(p.nbytes for p in bench.pipe.unet.parameters()) / 4.8e12
    assert bench._roofline(1) == weights
    assert bench._roofline(10**15) == 2e15 / 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    assert bench._roofline(1) is None
