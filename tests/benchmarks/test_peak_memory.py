"""`benchmarks.peak_memory`: what a stage takes shows in its peak and in no other's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import peak_memory
from fisedit.bench.settings import SpeedSettings

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells peaks")

TAKEN = 300 << 20


def test_the_peak_of_a_stage_is_its_own():
    """In a process whose allocator returns what is freed; the tests' own may keep it."""
    before, taken, after = peak_memory._in_a_process(_three_stages).values()
    for kind in ("peak", "anonymous"):
        assert taken[kind] - before[kind] == pytest.approx(TAKEN, rel=0.2), kind
        assert after[kind] < taken[kind] - TAKEN / 2, kind


def _three_stages() -> dict[str, dict[str, int]]:
    peaks = peak_memory._Peaks()
    with peaks.stage("before"):
        pass
    with peaks.stage("taken"):
        for _ in range(3):  # long enough to be sampled
            torch.ones(TAKEN, dtype=torch.uint8)
    with peaks.stage("after"):
        pass
    return peaks.bytes


def test_runs_are_told_as_shares_of_plain_diffusers(model, monkeypatch):
    monkeypatch.setattr(peak_memory, "RUNS", {"as installed": {}, "on disk": {"max_recorded_bytes": 0}})
    monkeypatch.setattr(peak_memory, "_in_a_process", lambda run: run())
    settings = SpeedSettings(model=str(model), areas=(0.25,), size=128, num_inference_steps=2, dtype="fp32")
    report = peak_memory.measure_peak_memory(settings)
    plain, ours, on_disk = report["rows"]
    assert list(plain["stages"]) == ["load", "source"] and list(ours["stages"]) == ["load", "source", "edit"]
    assert ours["recorded_bytes"] == on_disk["recorded_bytes"] > 0
    assert report["summary"][0]["peak, to plain"] == "1.00"
    assert report["summary"][1]["peak, to plain"] == f"{ours['peak'] / plain['peak']:.2f}"
    assert all(row["peak"] == max(stage["peak"] for stage in row["stages"].values()) for row in report["rows"])
