"""The commands about this machine: what they print as tables and as JSON, and what they leave on disk."""

from __future__ import annotations

import json

import pytest
import torch

from fisedit.diagnosis import calibration, doctor
from fisedit.diagnosis import plan as planning

SMALL = ("--num-inference-steps", "2", "--width", "64", "--height", "64")


@pytest.mark.parametrize("shape", ["demo", "sdxl"])
def test_a_machine_is_measured_and_planned_for(fisedit, pipelines, shape, tmp_path, monkeypatch):
    model = tmp_path / "model"
    pipelines[shape].save_pretrained(model)
    monkeypatch.setenv("FISEDIT_COSTS", str(tmp_path / "costs"))
    monkeypatch.setattr(calibration, "FEWEST", 1)
    words = ("calibrate", "--model", model, "--seconds", 0, "--size", 64)
    run = fisedit(*words)
    assert run.status == 0 and "source" in run.out and "edit of" in run.out
    assert run.out.splitlines()[-1].endswith("are kept.") and list((tmp_path / "costs").iterdir())

    words = ("plan", "--model", model, "--size", 64, "--num-inference-steps", 4, "--areas", "10")
    told = json.loads(fisedit(*words, "--json").out)
    assert told["changes"] == [] and told["choice"]["steps_in_memory"] == 4 and len(told["edits"]) == 1
    need = told["choice"]["weights_bytes"] + told["source"]["bytes"] // 16
    tight = fisedit(*words, "--memory", f"{need}B").out
    assert "edit of 10%" in tight and "change: " in tight and "or a smaller --size" in tight


def test_a_plan_has_the_free_memory_of_its_device_and_the_dtype_that_was_asked_for(fisedit, model, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "fisedit.machine.device.choose_device", lambda device: asked.append(device) or torch.device("cpu")
    )
    monkeypatch.setattr("fisedit.machine.hardware.free_bytes", lambda device: 1234 if asked else 0)
    plan = {"choice": {"a": 1}, "source": {}, "edits": [], "changes": []}
    monkeypatch.setattr(
        planning, "plan_edits", lambda pipe, settings, free: plan | {"free": free, "dtype": settings.dtype}
    )
    told = json.loads(fisedit("plan", "--model", model, "--device", "cpu", "--dtype", "fp32", "--json").out)
    assert (told["free"], told["dtype"], asked[0]) == (1234, "fp32", "cpu")


def test_a_table_that_is_not_kept_is_told_so(fisedit, model, monkeypatch):
    monkeypatch.setenv("FISEDIT_COSTS", "0")
    monkeypatch.setattr(calibration, "FEWEST", 1)
    run = fisedit("calibrate", "--model", model, "--seconds", 0, "--size", 64)
    assert run.status == 0 and run.out.splitlines()[-1].endswith(" are not kept (FISEDIT_COSTS=0).")


def test_the_doctor_says_what_it_found_or_that_nothing_is_wrong(fisedit, model, monkeypatch):
    parts = ("versions", "machine", "gpu", "memory", "threads")
    report = {part: {} for part in parts} | {name: [] for name in ("packages", "disk", "rates", "kernels", "layers")}
    monkeypatch.setattr(doctor, "examine", lambda pipe, on_step: report | {"findings": []})
    assert fisedit("doctor", "--model", model).out == "finding: nothing is wrong\n"
    packages = [{"package": "ray", "for": "batches on many machines", "version": ""}]
    found = report | {
        "memory": {"available": 5},
        "packages": packages,
        "findings": ["5 bytes are left", "a layer is slow"],
    }
    monkeypatch.setattr(doctor, "examine", lambda pipe, on_step: found)
    said = fisedit("doctor", "--model", model).out
    assert said.startswith("memory: available 5\n") and "batches on many machines" in said
    assert said.splitlines()[-2:] == ["finding: 5 bytes are left", "finding: a layer is slow"]
    assert json.loads(fisedit("doctor", "--model", model, "--json").out) == found


def test_a_run_is_profiled_into_a_table_and_a_trace(fisedit, model, tmp_path):
    words = ("generate", "a cat", "--model", model, *SMALL)
    both = fisedit(*words, "--profile", "--trace", "trace.json", "--json")
    rows = json.loads(both.out)["profile"]
    assert {"conv", "attention"} <= {row["layers"] for row in rows}
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events].count("step dense") == 2
    (tmp_path / "trace.json").unlink()
    table = fisedit(*words, "--profile").out
    assert "layers" in table and not (tmp_path / "trace.json").exists()
    alone = fisedit(*words, "--trace", "trace.json").out
    assert "layers" not in alone and (tmp_path / "trace.json").exists()
