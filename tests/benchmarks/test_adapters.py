"""`python -m benchmarks.adapters` on the demo model: what is counted and how it is told; times are not checked."""

from __future__ import annotations

import json

import pytest

from benchmarks import adapters as adapter_speed
from fisedit.adapters.row_column.checkpoints import fresh_adapter
from fisedit.adapters.row_column.cost import dense_macs, sparse_macs
from fisedit.bench.settings import SpeedSettings
from fisedit.bench.workload import ragged_mask
from fisedit.errors import AdapterError
from fisedit.models.loader import load
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import make_row_plan


def test_what_is_told(study, tmp_path):
    output = tmp_path / "adapters.json"
    said = study(
        *"adapters --model demo --families v3,v5b --areas 5 --size 128 --repeats 1 --device cpu".split(),
        *("--output", str(output)),
    ).out
    report = json.loads(output.read_text())
    assert [(row["family"], row["mask"]) for row in report["rows"]] == [
        (family, mask) for family in ("v3", "v5b") for mask in ("square", "ragged")
    ]
    assert "guided source, macs" in said
    unet = load("demo", device="cpu").unet
    for family in ("v3", "v5b"):
        adapter, plan = (
            fresh_adapter(unet, family),
            make_row_plan(dilate(ragged_mask(0.05, 16), 1), len(unet.down_blocks)),
        )
        row = next(row for row in report["rows"] if (row["family"], row["mask"]) == (family, "ragged"))
        macs, added = row["macs"], {}
        for name, recorded in (("with", True), ("with_over_plain", False)):
            added[name] = 2 * sparse_macs(adapter, unet, plan, recorded=recorded)
            assert macs[name] == macs["without"] + added[name]
            assert row[f"{name}_share"]["macs"] == pytest.approx(added[name] / macs["without"])
            (with_it,), (without,) = row["turns"][name], row["turns"]["without"]
            assert row[f"{name}_share"]["seconds"] == pytest.approx(with_it / without - 1)
        assert report["dense"][family] == 2 * dense_macs(adapter, unet, [(16, 16), (8, 8), (4, 4)])


def test_it_is_an_adapters_family():
    with pytest.raises(AdapterError, match=r"family must be one of v1, v2, v3, v5, v5b, full, got 'v6'"):
        adapter_speed.measure_adapter_speed(SpeedSettings(model="demo", size=128, device="cpu"), ("v6",))
