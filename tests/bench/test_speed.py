"""What `fisedit bench edit` says of its own figures."""

import json

import pytest

from benchmarks import fidelity
from benchmarks.schedules import CLOSE, FAST, SCHEDULES, SHALLOW
from benchmarks.settings import FidelitySettings
from fisedit.bench import dense_pipelines, dense_search, speed
from fisedit.bench.settings import SpeedSettings
from fisedit.models.families import family
from fisedit.values import Quality
from tests.support import runtimes

SMALL = {"model": "demo", "areas": (0.15,), "size": 128, "num_inference_steps": 2, "repeats": 1, "compiled": False}


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_torch_counts_the_same_multiply_accumulates(dtype):
    """Whichever kernels a step takes; torch counts the time's embedding besides, which is little."""
    report = speed.measure_edit_speed(SpeedSettings(dtype=dtype, baseline=False, **SMALL))
    for row in (report["dense"], *report["rows"]):
        assert row["step_macs_counted_by_torch"] == pytest.approx(row["step_macs"], rel=0.005)


def test_a_family_with_random_weights_is_measured_by_its_name(pipelines, tmp_path, monkeypatch):
    """Tiny configurations stand for Stable Diffusion XL's."""
    pipelines["sdxl"].save_pretrained(tmp_path / "sdxl")
    monkeypatch.setattr(family, "CONFIGS", tmp_path)
    report = speed.measure_edit_speed(SpeedSettings(dtype="fp32", baseline=False, **SMALL | {"model": "sdxl"}))
    for row in (report["dense"], *report["rows"]):
        assert row["step_macs_counted_by_torch"] == pytest.approx(row["step_macs"], rel=0.01)
    assert report["settings"]["model"] == "SDXL architecture, random weights" and speed.RANDOM_NOTE in report["notes"]


def test_what_does_not_fit_into_memory_is_left_out_and_told(monkeypatch):
    monkeypatch.setattr(dense_pipelines, "free_bytes", lambda _: 0)
    report = speed.measure_edit_speed(SpeedSettings(dtype="bf16", **SMALL))
    left_out = report["search"]["left_out"]
    assert "GB more, and 0.0 GB are free" in left_out["fp32, channels_last, eager"]
    assert "plain" not in report["dense"] and report["dense"]["recorded_bytes"] and report["dense"]["peak_memory_bytes"]
    assert any(note.startswith("plain diffusers was not timed: its weights take") for note in report["notes"])


def test_the_verb_writes_what_it_prints(fisedit, tmp_path, monkeypatch):
    runtimes.install(monkeypatch)
    asked = ("--model", "demo", "--areas", "15", "--size", "128", "--num-inference-steps", "2", "--repeats", "2")
    printed = fisedit(
        "bench", "edit", *asked, "--no-compiled", "--profile", "--local-files-only", "--output", "speed.json"
    )
    assert printed.status == 0
    written = json.loads((tmp_path / "speed.json").read_text())
    assert [(row["mask"], row["quality"]) for row in written["summary"]] == [
        *(("square", quality) for quality in Quality),
        ("ragged", Quality.BALANCED),
    ]
    for row in written["summary"]:
        assert all(
            row[name] in printed.out
            for name in ("MACs", "step", "whole edit", speed.OVER_ANY, "end-to-end speedup over stock diffusers")
        )
    best = written["search"]["best"]
    assert best in printed.out and best in written["settings"]["dense_baseline"]
    assert best not in written["search"]["left_out"]
    assert all(row["run"] in printed.out and not row["reason"] for row in written["baselines"])
    assert {row["run"].split(",")[0] for row in written["baselines"]} >= {"OpenVINO", "DeepCache"}
    (fastest,) = (row for row in written["baselines"] if "any" in row["fastest"])
    assert written["settings"]["any_baseline"] == f"diffusers, {fastest['run']}"
    assert "fastest exact run" in printed.out and "fastest run of any kind" in printed.out
    assert "torch.compile was not tried: --no-compiled left it out" in printed.out
    assert written["dense"]["recorded_bytes"] > 0
    assert {row["run"] for row in written["profile"]} == {"source", "square 15%", "ragged 15%"}
    assert {"conv", "attention"} <= {row["layers"] for row in written["profile"]}
    assert written["environment"]["command"].startswith("fisedit bench edit --model demo")
    assert written["environment"]["dtype"] == written["settings"]["dtype"]


def test_ratios_are_of_the_same_turn_and_over_the_fastest_dense_run():
    samples = {"dense": [8.0, 10.0, 30.0], "plain": [16.0, 30.0, 60.0], "edit": [2.0, 2.0, 3.0]}
    samples |= {"dense step": [1.0] * 3, "dense decode": [1.0] * 3, "step": [0.5] * 3, "decode": [0.25] * 3}
    samples["deep"] = [4.0, 5.0, 15.0]
    row = speed.ratios({"call": "edit", "step_call": "step", "decode_call": "decode"}, samples, "deep")
    assert row["whole_ratio_to_any"] == {"median": 2.5, "low": 2, "high": 5}
    assert row["whole_ratio"] == {"median": 5, "low": 4, "high": 10}
    assert row["whole_ratio_to_plain"] == {"median": 15, "low": 8, "high": 20}
    assert row["whole_seconds"] == {"median": 2, "low": 2, "high": 3}
    assert (row["step_ratio"]["median"], row["decode_ratio"]["median"]) == (2, 4)
    assert "step_ratio_to_plain" not in row


def test_a_whole_run_of_plain_diffusers_is_its_steps_and_its_decode():
    samples = {"plain step": [2.0, 3.0], "plain decode": [1.0, 4.0]}
    assert speed.plain_runs(samples, 20) == {"plain": [41, 64]}
    assert speed.plain_runs({"dense step": [1.0]}, 20) == {}


@pytest.mark.slow
def test_default_edits_are_near_to_dense_blended_ones(monkeypatch):
    """One of the forty of the table, of which the worst is 13 dB from its dense one."""
    names = ("default", "0", "1", FAST, CLOSE)
    monkeypatch.setattr(fidelity, "SCHEDULES", {name: SCHEDULES[name] for name in names})
    monkeypatch.setattr(fidelity._Samples, "warm_up", lambda *_: None)  # no time is checked
    monkeypatch.setattr(dense_search, "NUM_ROUNDS", 0)
    report = fidelity.measure_fidelity(FidelitySettings(edits=1, dtype="fp32", compiled=False))
    rows = {row["growth"]: row for row in report["rows"]}
    shallow = {f"{name}{SHALLOW}" for name in (FAST, CLOSE)}
    assert set(rows) >= {*names, *shallow} and len(rows) == len(report["summary"])
    assert [row["quality"] for row in report["shipped"]] == ["fast", "fast", "close", "close"]
    assert report["values"][0] == rows["default"]["psnr_median"]
    assert min(row["psnr_median"] for row in rows.values()) > 13
    assert rows["default"]["macs_ratio"] > 1.8
    turns = report["turns"]
    assert rows["1"]["whole_ratio"]["median"] == turns["dense"][0] / turns["1"][0]


def test_fidelity_is_measured_after_a_warm_up(study, model, tmp_path, monkeypatch):
    names = ("default", FAST)
    monkeypatch.setattr(fidelity, "SCHEDULES", {name: SCHEDULES[name] for name in names})
    monkeypatch.setattr(fidelity, "SHIPPED", {FAST: SCHEDULES[FAST]})
    monkeypatch.setattr(dense_search, "NUM_ROUNDS", 0)
    words = ("--edits", 1, "--num-inference-steps", 2, "--no-compiled", "--dtype", "fp32", "--output", "fidelity.json")
    run = study("fidelity", "--model", model, *words)
    assert run.status == 0, run.err
    report = json.loads((tmp_path / "fidelity.json").read_text())
    assert [row["growth"] for row in report["rows"]] == list(names) == [row["growth"] for row in report["summary"]]
    assert report["settings"]["num_inference_steps"] == 2 and set(report["turns"]) >= {"dense", *names}
    assert all(name in run.out for name in names)


def test_what_ships_is_measured_with_shallow_steps_and_without(study, model, tmp_path, monkeypatch):
    runtimes.install(monkeypatch)
    monkeypatch.setattr(fidelity, "SCHEDULES", {name: SCHEDULES[name] for name in ("default", "5", FAST, CLOSE)})
    monkeypatch.setattr(dense_search, "NUM_ROUNDS", 0)
    words = ("--edits", 1, "--num-inference-steps", 15, "--no-compiled", "--dtype", "fp32", "--output", "fidelity.json")
    run = study("fidelity", "--model", model, *words)
    assert run.status == 0, run.err
    report = json.loads((tmp_path / "fidelity.json").read_text())
    rows = {row["growth"]: row for row in report["rows"]}
    openvino, cached = list(rows)[-2:]
    assert openvino.startswith("OpenVINO") and cached.startswith("DeepCache, interval 3")
    assert list(rows)[:-2] == ["default", "5", FAST, FAST + SHALLOW, CLOSE, CLOSE + SHALLOW]
    for name in (FAST, CLOSE):
        plain, shallow = rows[name], rows[name + SHALLOW]
        assert plain["shallow_steps"] == 0 < shallow["shallow_steps"] < 15 / 2
        assert shallow["macs_ratio"] > plain["macs_ratio"] and shallow["psnr_median"] != plain["psnr_median"]
    assert rows[cached]["macs_ratio"] is None and rows[cached]["psnr_min"] > 40  # the stand-in leaves nothing out
    assert [row["shallow steps"] for row in report["shipped"]][::2] == [0, 0]
    assert {row["run"] for row in report["baselines"]} >= {openvino, cached}
    assert all(row["whole_ratio_to_any"]["median"] > 0 for row in rows.values())
