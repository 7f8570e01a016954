"""How often the doctor names a layer: one layer is slowed, the model is left as it was, one line is printed."""

from __future__ import annotations

import re

import pytest

from benchmarks import doctor_rates
from benchmarks.doctor_rates import slow_down
from fisedit.diagnosis import layer_times

LAYER = "mid_block.resnets.0.conv1"


def test_a_slowed_layer_takes_that_much_longer(pipelines, monkeypatch):
    monkeypatch.setattr(layer_times, "FEWEST", 1)
    pipe = pipelines["shallow"]
    with slow_down(pipe, LAYER, 0.02):
        assert layer_times.layer_seconds(pipe, 64, 0)[LAYER] >= 0.02
    assert not pipe.unet.get_submodule(LAYER)._forward_hooks


def test_a_layer_is_not_left_slow_by_an_error(pipelines):
    pipe = pipelines["shallow"]
    with pytest.raises(RuntimeError, match="stopped"), slow_down(pipe, LAYER, 1.0):
        raise RuntimeError("stopped")
    assert not pipe.unet.get_submodule(LAYER)._forward_hooks


def test_runs_are_counted(pipelines, monkeypatch, capsys):
    monkeypatch.setattr(layer_times, "FEWEST", 1)
    monkeypatch.setattr(layer_times, "SHORTEST", 0.0)
    monkeypatch.setattr(doctor_rates, "SHORTEST", 0.0)
    monkeypatch.setattr(doctor_rates, "SIZE", 64)
    monkeypatch.setattr(doctor_rates, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(doctor_rates, "load", lambda _: pipelines["shallow"])
    monkeypatch.setattr("sys.argv", ["doctor_rates", "2"])
    doctor_rates.main()
    about, line = capsys.readouterr().out.splitlines()
    assert "'layers':" in about
    found = re.fullmatch(r"a layer slowed by 30% is named in (\d) of 2 runs, a healthy one in (\d) of 4", line)
    assert found and int(found[1]) <= 2 and int(found[2]) <= 4
