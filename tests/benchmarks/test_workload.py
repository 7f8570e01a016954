"""`python -m benchmarks.workload`: areas have the traces' mean and median, and a trace is timed as a whole."""

from __future__ import annotations

import json
from statistics import fmean, median

import pytest

from benchmarks.workload import EDITS, TRACES


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.use)
def test_areas_have_the_traces_median_and_nearly_its_mean(trace):
    """What lies beyond the picture is cut off, which inpainting's mean shows."""
    areas = trace.areas(2001)
    assert median(areas) == pytest.approx(trace.median) and areas == tuple(sorted(areas)) and areas[-1] <= 1
    assert fmean(areas) == pytest.approx(trace.mean, rel=0.12)


def test_the_study_times_every_trace(study, tmp_path):
    asked = ("--model", "demo", "--size", "128", "--num-inference-steps", "2", "--repeats", "1", "--no-compiled")
    done = study("workload", *asked, "--local-files-only", "--output", "workload.json")
    assert done.status == 0
    written = json.loads((tmp_path / "workload.json").read_text())
    assert [row["use"] for row in written["summary"]] == [trace.use for trace in TRACES]
    for row in written["rows"]:
        assert len(row["areas"]) == EDITS and 0 < row["macs"] < row["macs_dense"]
        assert row["dense_seconds"]["median"] == pytest.approx(EDITS * written["turns"]["dense"][0])
        assert row["ratio"]["median"] == pytest.approx(row["dense_seconds"]["median"] / row["seconds"]["median"])
