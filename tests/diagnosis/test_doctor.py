"""The doctor names what is wrong and nothing else: kernels, layers, threads, memory."""

from __future__ import annotations

import json
import time

import pytest
import torch

from fisedit import Cancelled, Editor
from fisedit.diagnosis import doctor, kernel_checks, layer_times
from fisedit.diagnosis.layer_times import delays
from fisedit.features.sites import unet_sites
from fisedit.sparse_kernels import ops, torch_backend

LAYERS = {f"block.{i}": 1e-3 * (i + 1) for i in range(12)}
KINDS = {name: ("conv" if i < 6 else "linear", 0) for i, name in enumerate(LAYERS)}


def slow(before: dict[str, float], now: dict[str, float]) -> set[str]:
    return {one.layer for one in delays(before, now, KINDS) if one.slowdown > 1.2}


def test_a_slow_layer_is_named_and_a_slow_machine_or_kind_is_not():
    assert slow(LAYERS, LAYERS) == set()
    assert slow(LAYERS, {name: 3 * seconds for name, seconds in LAYERS.items()}) == set()
    assert slow(LAYERS, LAYERS | {"block.4": 1.3 * LAYERS["block.4"]}) == {"block.4"}
    slower = {name: (1.5 if KINDS[name][0] == "conv" else 1.0) * seconds for name, seconds in LAYERS.items()}
    assert slow(LAYERS, slower) == set(), "a whole kind: memory or cores that others use"
    assert slow(LAYERS, slower | {"block.2": 1.3 * slower["block.2"]}) == {"block.2"}
    assert slow({"tiny": 1e-6}, {"tiny": 1e-5}) == set() == slow({}, LAYERS)


def test_every_kernel_is_right_here_and_a_broken_one_is_named(monkeypatch):
    device = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        assert all(one.right for one in kernel_checks.check_kernels(device, dtype))
    whole = torch_backend.norm_geglu
    monkeypatch.setattr(torch_backend, "norm_geglu", lambda *args: whole(*args) * 1.01)
    wrong = [one.kernel for one in kernel_checks.check_kernels(device, torch.float32) if not one.right]
    assert wrong == ["norm_geglu"] and ops.BACKENDS["fast"] is torch_backend

    def fail(*_: object) -> None:
        raise RuntimeError("could not create a primitive\nat line 3")

    monkeypatch.setattr(torch_backend, "norm_geglu", fail)
    (broken,) = [one for one in kernel_checks.check_kernels(device, torch.float32) if not one.right]
    assert broken.failure == "RuntimeError: could not create a primitive"


def test_examine_reports_a_machine_with_its_table(pipelines, tmp_path, monkeypatch):
    monkeypatch.setenv("FISEDIT_COSTS", str(tmp_path))
    pipe = pipelines["demo"]
    report = doctor.examine(pipe, seconds=0)
    assert any("run fisedit calibrate" in line for line in report["findings"])
    Editor(pipe, model="demo").calibrate(0, size=64)
    report = json.loads(json.dumps(doctor.examine(pipe, seconds=0), default=str))
    assert report["table"]["pixels"] == 64 and not any("calibrate" in line for line in report["findings"])
    assert report["versions"]["torch"] and report["machine"]["cpu"] and report["memory"]["available"] > 0
    assert {one["package"] for one in report["packages"]} == set(doctor.OPTIONAL)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"threads": {"threads": 9, "cores": 2}}, "9 threads for 2 cores"),
        ({"memory": {"available": 1 << 20}}, "1 MiB of memory are left"),
        ({"disk": [{"place": "home", "free": 5 << 20}]}, "5 MiB are left for home"),
        (
            {"rates": [{"rate": "memory", "now": 1e9, "calibrated": 4e9}]},
            "1.00 GB a second, 4.00 at calibration",
        ),
        ({}, None),
    ],
)
def test_findings_are_lines(change, line):
    healthy = {"kernels": [], "layers": [], "rates": [], "disk": [], "table": {"pixels": 64}}
    healthy |= {"threads": {"threads": 1, "cores": 2}, "memory": {"available": 8 << 30}}
    found = doctor.findings(healthy | change)
    assert found == [] if line is None else len(found) == 1 and line in found[0]


def test_a_layer_is_named_where_every_round_says_so(pipelines, monkeypatch):
    pipe, seen = pipelines["shallow"], []
    names = [site.name for site in unet_sites(pipe.unet) if site.weights]
    before = dict.fromkeys(names, 1e-3)
    rounds = [before | {names[0]: 2e-3, names[3]: 3e-3, names[5]: odd} for odd in (5e-3, 1e-3, 5e-3)]
    monkeypatch.setattr(layer_times, "layer_seconds", lambda *_: seen.append(1) or rounds[len(seen) - 1])
    found = layer_times.slow_layers(pipe, before, 64, 0)
    assert [delay.layer for delay in found] == [names[3], names[0]] and len(seen) == layer_times.ROUNDS
    assert [round(delay.slowdown, 3) for delay in found] == [3, 2]


def test_a_slowed_layer_takes_that_much_longer(pipelines, monkeypatch):
    monkeypatch.setattr(layer_times, "FEWEST", 1)
    pipe, layer = pipelines["shallow"], "mid_block.resnets.0.conv1"
    handle = pipe.unet.get_submodule(layer).register_forward_hook(lambda *_: time.sleep(0.02))
    try:
        assert layer_times.layer_seconds(pipe, 64, 0)[layer] >= 0.02
    finally:
        handle.remove()


def test_measuring_layers_can_be_stopped(pipelines):
    def stop(*_):
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        layer_times.layer_seconds(pipelines["shallow"], 64, 0, stop)
