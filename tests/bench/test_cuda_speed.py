"""The benchmark of captured graphs: refused without a GPU, and everything in it that a CPU can run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.bench import cuda_speed, dense_pipelines, dense_search, workload
from fisedit.bench.dense_pipelines import DensePipelines
from fisedit.bench.dense_search import DEEPCACHE, DEFAULT_VARIANT, DenseSearch, DenseVariant
from fisedit.bench.settings import SpeedSettings
from fisedit.bench.workload import PROMPTS
from fisedit.decoder import tiles as boxing
from fisedit.values import GenerationConfig, SchedulerName
from tests.support import runtimes
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline

CONFIG = GenerationConfig(PROMPTS[0], 7, "", 4, 7.5, 128, 128, SchedulerName.DDIM)

OVER_BOTH = ("eager", "compiled")

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is refused")


@pytest.fixture(scope="module")
def bench():
    with torch.inference_mode():
        pipe = build_pipeline("sd15")
        measured = workload.Workload(pipe, CONFIG, torch.device("cpu"), torch.float32)
        dense, eager = DensePipelines(pipe, CONFIG, compiled=False), DenseVariant("fp32", True, False)
        yield cuda_speed.GraphBenchmark(measured, dense, DenseSearch(eager, {eager: [1.0]}, {}), repeats=1)


@without_gpu
def test_it_is_refused_in_one_line_where_there_is_no_gpu(fisedit):
    fisedit("bench", "edit", "--device", "cuda").refused("input", "cuda", "not on this machine")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(cuda_speed, "MANY_STEPS", 1.25)
    monkeypatch.setattr(cuda_speed, "STEP_REPEATS", 2)
    runtimes.install(monkeypatch)


@pytest.mark.slow
def test_a_row_of_the_table(bench, monkeypatch):
    monkeypatch.setattr(bench, "backends", ("reference", "fast"))
    monkeypatch.setattr(bench, "rows", [])
    monkeypatch.setattr(bench, "shallow", [])
    masks = [("square", 0.05, grids(16, 16)["square"])]
    bench.measure_step(*masks[0])
    (row,) = bench.rows
    assert row["area"] == 16 / 256
    assert row["reference_error"] < 1e-5 and row["fast_error"] < 1e-5
    assert row["backend"] in {"reference", "fast"} and row["feature_bytes"] > 0
    assert bench.backend == row["backend"]
    (shallow,) = bench.shallow
    assert shallow["area"] == 16 / 256 and shallow["backend"] == row["backend"]
    assert shallow["reference_error"] < 1e-5 and shallow["fast_error"] < 1e-5
    full = row["step_seconds"]["median"] / shallow["step_seconds"]["median"]
    assert shallow["full_step_ratio_to_shallow"]["median"] == full
    assert shallow["feature_bytes"] < row["feature_bytes"]
    assert cuda_speed._shallow_row(shallow)["shallow steps of"] == "square"
    step = row["step_seconds"]["median"]
    assert row["step_seconds"] == row[f"{row['backend']}_step_seconds"]
    assert row["step_ratio_to_dense"]["median"] == row["dense_step_seconds"]["median"] / step
    assert row["step_ratio_to_plain"]["median"] == row["plain_step_seconds"]["median"] / step
    for steps in (4, 5):
        bench.measure_whole(masks, steps, ["dense", "deepcache_eager"])
        for name in ("dense", "deepcache_eager"):
            whole, dense = row[f"whole_{steps}_seconds"]["median"], row[f"{name}_whole_{steps}_seconds"]["median"]
            assert row[f"whole_{steps}_ratio_to_{name}"]["median"] == dense / whole
        assert row[f"whole_{steps}_captured"] == steps and row[f"whole_{steps}_fallback"] == ""
        assert {"text", "denoise", "decode", "total"} <= row[f"whole_{steps}_stations"].keys()
    shown = cuda_speed._summary_row(row)
    assert float(shown["step"].split()[0]) == pytest.approx(step * 1000, rel=0.01)
    titles = ("step", "whole, steps: 4", "whole, steps: 5")
    assert {f"{title}, over the fastest" for title in titles} | {"step, over plain", "error"} <= shown.keys()
    assert {f"{title}, over DeepCache" for title in titles[1:]} <= shown.keys()
    assert "roofline" not in shown  # unknown for a CPU
    known = cuda_speed._summary_row({**row, "step_roofline_seconds": 0.00036})
    assert known["roofline"] == "0.36 ms"


def test_the_fastest_run_is_compared_with_eager_and_compiled_ones_and_deepcache_over_both():
    eager, compiled = DenseVariant("fp16", True, False), DenseVariant("fp16", True, True)
    by_name = {"dense": compiled, "eager": eager}
    by_name |= {f"deepcache_{name}": DenseVariant("fp16", True, name == "compiled", DEEPCACHE) for name in OVER_BOTH}
    assert cuda_speed.baselines_of(DenseSearch(compiled, {eager: [2.0], compiled: [1.0]}, {})) == by_name
    turned = cuda_speed.baselines_of(DenseSearch(eager, {eager: [1.0], compiled: [2.0]}, {}))
    assert turned["dense"] == eager and turned["compiled"] == compiled and "eager" not in turned
    alone = cuda_speed.baselines_of(DenseSearch(eager, {eager: [1.0]}, {}))
    assert alone == {"dense": eager, "deepcache_eager": by_name["deepcache_eager"]}
    assert set(by_name) | set(turned) | {"plain"} == set(cuda_speed.OVER)


@pytest.mark.slow
def test_a_report_from_end_to_end(monkeypatch):
    """All that a GPU would run but its kernels, its clock and its name; ready for JSON."""
    monkeypatch.setattr(cuda_speed, "BATCHES", (1, 2))
    monkeypatch.setattr(workload, "random_pipeline", lambda *_, **__: build_pipeline("sd15"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a stand-in")
    monkeypatch.setattr(torch, "compile", lambda part, mode: part)
    monkeypatch.setattr(dense_search, "NUM_ROUNDS", 1)
    monkeypatch.setattr(dense_search, "MAX_SLOWDOWN", float("inf"))
    monkeypatch.setattr(dense_search, "MAX_COMPILE_SLOWDOWN", float("inf"))
    monkeypatch.setattr(dense_pipelines, "vector_extension", lambda: "avx2")
    seen, kept = [], []
    settings = SpeedSettings(areas=(0.05, 0.15), size=128, num_inference_steps=4, device="cpu", repeats=1)
    report = cuda_speed.measure_edit_speed(
        settings, lambda i, n, _: seen.append((i, n)), lambda report: kept.append(json.dumps(report))
    )
    early = [json.loads(text) for text in kept]
    assert [len(each["rows"]) for each in early] == [0, 1, 2, 2, 2, 2, 2, 2, 2, 3, 4, 4]  # what ends a run loses one
    assert [len(each["batches"]) for each in early] == [0, 0, 0, 0, 0, 1] + [2] * 6
    assert ["whole_4_seconds" in each["rows"][0] for each in early[1:]] == [False] * 2 + [True] * 9
    assert "stopped after 11 of 12 measurements" in early[-1]["notes"]
    assert not any(note.startswith("stopped") for note in report["notes"])
    assert json.loads(json.dumps(report))["settings"]["whole_steps"] == [4, 5]
    assert seen == [(0, 1), *((i, 13) for i in range(1, 13))]
    assert {"dense_baseline", "versions", "dtype", "cache", "whole", "whole_backend"} <= report["settings"].keys()
    assert [row["asked_area"] for row in report["rows"]] == [0.05, 0.15] * 2
    exact, cached = {"dense", "plain"}, {"deepcache_eager", "deepcache_compiled"}
    for row in report["rows"]:
        assert {"step_roofline_seconds", "fast_step_seconds", "kernels", "fast_error"} <= row.keys()
        assert {f"step_ratio_to_{name}" for name in exact} <= row.keys()
        assert {f"whole_{n}_ratio_to_{name}" for n in (4, 5) for name in ("dense", "deepcache_eager")} <= row.keys()
    for row in report["rows"][:2]:
        assert {f"whole_{n}_ratio_to_{name}" for n in (4, 5) for name in cached} <= row.keys()
    assert [row["asked_area"] for row in report["shallow"]] == [0.05, 0.15] * 2
    assert [row["kernels by"] for row in report["shallow_summary"]] == [row["backend"] for row in report["shallow"]]
    assert [row["edits"] for row in report["batches"]] == [1, 2]
    assert all(row["whole_5_rate_ratio"]["low"] > 0 for row in report["batches"])
    assert report["batches"][0]["step_rate_ratio"]["median"] == 1
    assert [row["edits"] for row in report["batch_summary"]] == [1, 2]


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured(monkeypatch):
    monkeypatch.setattr(cuda_speed, "BATCHES", (1,))
    monkeypatch.setattr(workload, "random_pipeline", lambda *_, **__: build_pipeline("sd15"))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda_speed.GraphBenchmark, "measure_whole", interrupt)
    settings = SpeedSettings(
        areas=(0.05,), size=128, num_inference_steps=4, device="cpu", repeats=1, compiled=False, baseline=False
    )
    report = cuda_speed.measure_edit_speed(settings)
    assert [row["mask"] for row in report["rows"]] == ["square"]
    assert "stopped after 1 of 7 measurements" in report["notes"]


def test_a_run_that_cannot_be_is_left_out_with_a_note(bench, monkeypatch):
    runtimes.uninstall(monkeypatch)
    monkeypatch.setattr(bench, "_refused", {})
    monkeypatch.setattr(bench, "notes", [])
    bench.dense.release(bench.baselines["deepcache_eager"])
    bench.measure_whole([], 4, ["deepcache_eager"])
    (note,) = bench.notes
    assert note.endswith("was left out: the package DeepCache is not installed")


def test_a_whole_edit_is_the_editors_and_leaves_its_source_where_it_was(bench, monkeypatch):
    monkeypatch.setattr(boxing, "HALO", 512)  # as much for boxes as for rectangles
    monkeypatch.setattr(boxing, "DENSE_SHARE", float("inf"))
    monkeypatch.setattr(boxing, "DENSE_CELLS", 0)
    editor = bench._editor(3)
    source, grid = editor.current, grids(16, 16)["one_cell"]
    first = bench._edit(editor, grid)
    assert list(editor.history) == [source] and editor.current is source
    again = bench._edit(editor, grid)
    assert first.stats.unet_evaluations_captured == again.stats.unet_evaluations_captured == 3
    plain = Editor(bench.pipe)
    plain.generate(PROMPTS[0], seed=7, num_inference_steps=3, guidance_scale=7.5, width=128, height=128)
    expected = np.asarray(plain.edit(PROMPTS[1], mask=grid, growth=first.run.growth).image, int)
    assert all(np.abs(np.asarray(result.image, int) - expected).max() <= 1 for result in (first, again))
    assert bench._editor(4)._engine.graphs is editor._engine.graphs


def test_an_edit_that_is_better_dense_says_so(bench, monkeypatch):
    mask = "square", 1.0, grids(16, 16)["all_but_one"]
    monkeypatch.setattr(bench, "rows", [])
    bench.measure_step(*mask)
    bench.measure_whole([mask], 3, ["dense"])
    assert bench.rows[0]["whole_3_captured"] == 0
    assert "the region alone takes" in bench.rows[0]["whole_3_fallback"]


def test_plain_diffusers_is_a_pipeline_of_its_own(bench):
    unet = bench.dense.get(DEFAULT_VARIANT).unet
    assert unet is not bench.pipe.unet and unet.conv_in.weight.is_contiguous()


def test_the_roofline_is_the_slower_of_arithmetic_and_weights(bench, monkeypatch):
    assert bench.roofline(10**9) is None  # a CPU
    monkeypatch.setattr(bench, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    weights = sum(p.nbytes for p in bench.pipe.unet.parameters()) / 4.8e12
    assert bench.roofline(1) == weights
    assert bench.roofline(10**15) == 2e15 / 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    assert bench.roofline(1) is None
