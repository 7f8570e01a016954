"""`benchmarks.drive`: tilts and places are read off pictures as they were drawn, and a run says what it measured."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import save_file

from benchmarks import drive as drive_quality
from benchmarks.scenes.posed import render_posed, sample_posed
from benchmarks.scenes.scene import render
from fisedit import Drive
from fisedit.adapters.hellomeme.drive_networks import DriveNetwork
from tests.support.adapters import filled
from tests.support.quality import needs_font

pytestmark = needs_font


@pytest.mark.parametrize("seed", range(4))
def test_a_drawn_tilt_is_found(seed):
    posed = sample_posed(np.random.default_rng(seed))
    *_, x, y, scale = posed.drive.pose
    for tilt in (-31, 0, 24):
        own = replace(posed, drive=Drive((0, 0, tilt, x, y, scale), posed.drive.expression))
        pixels, head = render_posed(own, 128)
        noisy = np.clip(pixels + np.random.default_rng(seed).normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)
        assert abs(drive_quality._tilt(noisy, own, head) - tilt) <= 2
        behind = render(own.scene.without(own.index), 128).pixels
        assert drive_quality._iou(drive_quality._shown(pixels, behind), head) > 0.7


def test_a_run(study, pipelines, tmp_path):
    unet = pipelines["demo"].unet
    channels = [block.resnets[-1].out_channels for block in unet.down_blocks if block.downsamplers]
    network = filled(DriveNetwork((16, *channels), 32, points=[f"down_{i}" for i in range(len(channels))]))
    (tmp_path / "control").mkdir()
    save_file(network.state_dict(), tmp_path / "control/diffusion_pytorch_model.safetensors")
    pipelines["demo"].save_pretrained(tmp_path / "model")
    given = ("--model", "model", "--adapter", "control", "--edits", "2", "--num-inference-steps", "2", "--json")
    run = study("drive", *given)
    assert run.status == 0
    report = json.loads(run.out)
    assert [row["edit"] for row in report["summary"]] == ["driven", "at rest"]
    assert len(report["rows"]) == 2 and all(row["identical_outside"] for row in report["rows"])
    assert all(0 < row["area"] < 1 and row["seconds"] > 0 for row in report["rows"])
