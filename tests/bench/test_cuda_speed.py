"""The benchmark of captured graphs: refused without a GPU, and everything in it that a CPU can run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.bench import cuda_speed, dense_pipelines, dense_search, workload
from fisedit.bench.dense_pipelines import DensePipelines
from fisedit.bench.dense_search import DEFAULT_VARIANT, DenseVariant
from fisedit.bench.settings import SpeedSettings
from fisedit.bench.workload import PROMPTS
from fisedit.decoder import tiles as boxing
from fisedit.values import GenerationConfig, SchedulerName
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline

CONFIG = GenerationConfig(PROMPTS[0], 7, "", 4, 7.5, 128, 128, SchedulerName.DDIM)

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is refused")


@pytest.fixture(scope="module")
def bench():
    with torch.inference_mode():
        pipe = build_pipeline("sd15")
        measured = workload.Workload(pipe, CONFIG, torch.device("cpu"), torch.float32)
        dense = DensePipelines(pipe, CONFIG, compiled=False)
        yield cuda_speed.GraphBenchmark(measured, dense, DenseVariant("fp32", True, False), repeats=1)


@without_gpu
def test_it_is_refused_in_one_line_where_there_is_no_gpu(fisedit):
    fisedit("bench", "edit", "--device", "cuda").refused("input", "cuda", "not on this machine")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(cuda_speed, "EDIT_STEPS", (3, 4))
    monkeypatch.setattr(cuda_speed, "STEP_REPEATS", 2)
    monkeypatch.setattr(cuda_speed, "BACKENDS", ("fast",))  # Triton's interpreter takes minutes


@pytest.mark.slow
def test_a_row_of_the_table(bench, monkeypatch):
    monkeypatch.setattr(cuda_speed, "BACKENDS", ("reference", "fast"))
    row = bench.measure_mask(grids(16, 16)["square"])
    assert row["area"] == 16 / 256
    assert row["reference_error"] < 1e-5 and row["fast_error"] < 1e-5
    assert row["backend"] in {"reference", "fast"} and row["feature_bytes"] > 0
    step = row["step_seconds"]["median"]
    assert row["step_seconds"] == row[f"{row['backend']}_step_seconds"]
    assert row["step_ratio_to_dense"]["median"] == row["dense_step_seconds"]["median"] / step
    for steps in (3, 4):
        whole, dense = row[f"whole_{steps}_seconds"]["median"], row[f"dense_whole_{steps}_seconds"]["median"]
        assert row[f"whole_{steps}_ratio_to_dense"]["median"] == dense / whole
        plain = steps * row["plain_step_seconds"]["median"] + row["plain_decode_seconds"]["median"]
        assert row[f"whole_{steps}_ratio_to_plain"]["median"] == pytest.approx(plain / whole)
        assert row[f"whole_{steps}_captured"] == steps and row[f"whole_{steps}_fallback"] == ""
        assert {"text", "denoise", "decode", "total"} <= row[f"whole_{steps}_stations"].keys()
    shown = cuda_speed._summary_row({"mask": "square", **row})
    assert float(shown["step"].split()[0]) == pytest.approx(step * 1000, rel=0.01)
    titles = ("step", "whole, steps: 3", "whole, steps: 4")
    assert {f"{a}, over {b}" for a in titles for b in ("the fastest", "plain")} | {"error"} <= shown.keys()
    assert "roofline" not in shown  # unknown for a CPU
    known = cuda_speed._summary_row({"mask": "square", **row, "step_roofline_seconds": 0.00036})
    assert known["roofline"] == "0.36 ms"


@pytest.mark.slow
def test_a_report_from_end_to_end(monkeypatch):
    """All that a GPU would run but its kernels, its clock and its name; ready for JSON."""
    monkeypatch.setattr(cuda_speed, "BATCHES", (1, 2))
    monkeypatch.setattr(workload, "random_pipeline", lambda *_, **__: build_pipeline("sd15"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a stand-in")
    monkeypatch.setattr(torch, "compile", lambda part, mode: part)
    monkeypatch.setattr(dense_search, "NUM_ROUNDS", 1)
    monkeypatch.setattr(dense_pipelines, "vector_extension", lambda: "avx2")
    seen, kept = [], []
    settings = SpeedSettings(areas=(0.05, 0.15), size=128, num_inference_steps=4, device="cpu", repeats=1)
    report = cuda_speed.measure_edit_speed(
        settings, lambda i, n, _: seen.append((i, n)), lambda report: kept.append(json.dumps(report))
    )
    assert [len(json.loads(early)["rows"]) for early in kept] == [0, 1, 2, 3]  # a run that is ended loses one mask
    assert "stopped after 3 of 4 masks" in json.loads(kept[-1])["notes"]
    assert not any(note.startswith("stopped") for note in report["notes"])
    assert json.loads(json.dumps(report))["settings"]["whole_steps"] == [3, 4]
    assert seen == [(i, 6) for i in range(6)]
    assert {"dense_baseline", "versions", "dtype", "cache", "whole"} <= report["settings"].keys()
    assert [row["asked_area"] for row in report["rows"]] == [0.05, 0.15] * 2
    for row in report["rows"]:
        assert {"step_roofline_seconds", "fast_step_seconds", "kernels", "fast_error"} <= row.keys()
        assert {f"whole_{n}_ratio_to_{name}" for n in (3, 4) for name in ("dense", "plain")} <= row.keys()
    assert [row["edits"] for row in report["batches"]] == [1, 2]
    assert all(row["whole_4_rate_ratio"]["low"] > 0 for row in report["batches"])
    assert report["batches"][0]["step_rate_ratio"]["median"] == 1
    assert [row["edits"] for row in report["batch_summary"]] == [1, 2]


@pytest.mark.slow
def test_an_interrupt_keeps_the_masks_that_were_measured(monkeypatch):
    monkeypatch.setattr(cuda_speed, "BATCHES", (1,))
    monkeypatch.setattr(workload, "random_pipeline", lambda *_, **__: build_pipeline("sd15"))
    measure = cuda_speed.GraphBenchmark.measure_mask
    masks = iter([measure])

    def once(*arguments):
        try:
            return next(masks)(*arguments)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(cuda_speed.GraphBenchmark, "measure_mask", once)
    settings = SpeedSettings(
        areas=(0.05,), size=128, num_inference_steps=4, device="cpu", repeats=1, compiled=False, baseline=False
    )
    report = cuda_speed.measure_edit_speed(settings)
    assert [row["mask"] for row in report["rows"]] == ["square"] and "stopped after 1 of 2 masks" in report["notes"]


def test_a_whole_edit_is_the_editors_and_leaves_its_source_where_it_was(bench, monkeypatch):
    monkeypatch.setattr(boxing, "HALO", 512)  # as much for boxes as for rectangles
    monkeypatch.setattr(boxing, "DENSE_SHARE", float("inf"))
    monkeypatch.setattr(boxing, "DENSE_CELLS", 0)
    editor = bench._editor("fast", 3)
    source, grid = editor.current, grids(16, 16)["one_cell"]
    first = bench._edit(editor, grid)
    assert list(editor.history) == [source] and editor.current is source
    again = bench._edit(editor, grid)
    assert first.stats.unet_evaluations_captured == again.stats.unet_evaluations_captured == 3
    plain = Editor(bench.pipe)
    plain.generate(PROMPTS[0], seed=7, num_inference_steps=3, guidance_scale=7.5, width=128, height=128)
    expected = np.asarray(plain.edit(PROMPTS[1], mask=grid, growth=first.run.growth).image, int)
    assert all(np.abs(np.asarray(result.image, int) - expected).max() <= 1 for result in (first, again))
    assert bench._editor("fast", 4)._engine.graphs is editor._engine.graphs


def test_an_edit_that_is_better_dense_says_so(bench):
    row = bench.measure_mask(grids(16, 16)["all_but_one"])
    assert row["whole_3_captured"] == 0 and "the region alone takes" in row["whole_3_fallback"]


def test_plain_diffusers_is_a_pipeline_of_its_own(bench):
    assert {
        f"{name}_{kind}" for name in ("dense", "plain") for kind in ("step", "decode")
    } <= bench.dense_calls().keys()
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
