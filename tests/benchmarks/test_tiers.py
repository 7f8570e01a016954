"""`benchmarks.tiers`: every run gives the same picture, and what was asked for lies on disk."""

from __future__ import annotations

from benchmarks import tiers as record_tiers
from fisedit.bench.settings import SpeedSettings
from fisedit.features import tiers as feature_tiers


def test_every_run_is_measured_and_gives_the_same_picture(model, monkeypatch):
    monkeypatch.setattr(record_tiers, "LONG_RUN", 6)
    monkeypatch.setitem(record_tiers.BUDGETS, "1 GB", 200_000)
    read = []
    load = feature_tiers.FeatureTiers.load
    monkeypatch.setattr(feature_tiers.FeatureTiers, "load", lambda tiers, step: read.append(step) or load(tiers, step))
    settings = SpeedSettings(model=model, size=64, num_inference_steps=2, repeats=2, device="cpu", dtype="fp32")
    report = record_tiers.measure_record_tiers(settings)
    assert report["settings"]["identical"] and report["notes"] == [] and read
    runs = {(row["run"], row["area"]) for row in report["rows"]}
    on_disk = {(f"{what}, {state}", 0.05) for what in ("1 GB", "nothing") for state in ("warm", "cold")}
    resumed = {(f"resumed, {state}", area) for state in ("warm", "cold") for area in (0.05, 0.01)}
    assert runs == {("in memory", 0.05), ("in memory", 0.01)} | on_disk | resumed
    assert all(row["seconds"]["low"] > 0 for row in report["rows"])
    (long_run,) = report["memory"]
    assert long_run["steps"] == 6 and long_run["recorded_bytes"] > 0 and long_run["beside_weights_bytes"] > 0
    assert len(report["summary"]) == len(report["rows"])
