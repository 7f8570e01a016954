"""What `fisedit bench edit` says of its own figures."""

import json

import pytest

from fisedit.evaluation import fidelity, speed
from fisedit.evaluation.settings import EvaluationSettings, SpeedSettings


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_counts_the_same_multiply_accumulates(dtype):
    """Whichever kernels a step takes; torch counts the time's embedding besides, which is little."""
    sizes = {"areas": (0.15,), "size": 128, "num_inference_steps": 3, "repeats": 1}
    told = speed.measure_edit_speed(SpeedSettings(model="demo", dtype=dtype, baseline=False, **sizes))
    for row in (told["dense"], *told["rows"]):
        assert row["step_macs_counted_by_torch"] == pytest.approx(row["step_macs"], rel=0.005)


def test_the_verb_writes_what_it_prints(fisedit, tmp_path):
    asked = ("--model", "demo", "--areas", "15", "--size", "128", "--num-inference-steps", "3", "--repeats", "1")
    told = fisedit("bench", "edit", *asked, "--local-files-only", "--output", "speed.json")
    assert told.status == 0
    written = json.loads((tmp_path / "speed.json").read_text())
    assert [row["mask"] for row in written["summary"]] == ["square", "ragged"]
    for row in written["summary"]:
        assert all(ratio in told.out for ratio in (row["MACs"], row["step, to plain"], row["whole edit"]))
    assert written["dense"]["recorded_bytes"] > 0


def test_default_edits_are_near_to_dense_blended_ones():
    """One of the forty of the table, of which the worst is 33 dB from its dense one; all cost 1 / 2.2 of dense."""
    told = fidelity.measure_fidelity(EvaluationSettings(edits=1, dtype="fp32"))
    rows = {row["growth"]: row for row in told["rows"]}
    assert set(rows) == set(fidelity.SCHEDULES)
    assert told["values"][0] > max(30, rows["0"]["psnr_median"])
    assert rows["default"]["macs_ratio"] > 1.8
