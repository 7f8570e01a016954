"""A CPU's default precision: the one whose products are clearly faster, by a clock that is given."""

import pytest
import torch

from fisedit.errors import InputError
from fisedit.machine import device
from fisedit.machine.device import choose_dtype


class Clock:
    """Goes on by the seconds of a call, one for each, the last one again and again."""

    def __init__(self, fp32, bf16):
        self.now, self.calls, self.seconds = 0.0, {"fp32": 0, "bf16": 0}, {"fp32": fp32, "bf16": bf16}

    def products(self, dtype):
        def run():
            seconds = self.seconds[dtype]
            self.now += seconds[min(self.calls[dtype], len(seconds) - 1)]
            self.calls[dtype] += 1

        return run

    def faster(self):
        return device._faster_dtype(self.products("fp32"), self.products("bf16"), lambda: self.now)


def test_bf16_must_be_clearly_faster():
    for fp32, expected in ((2.0, torch.bfloat16), (1.2, torch.bfloat16), (1.1, torch.float32), (0.6, torch.float32)):
        assert Clock([fp32], [1.0]).faster() is expected


def test_noise_in_some_turns_decides_nothing():
    assert Clock([9.0, 9.0, 1.0], [9.0, 8.0, 1.0]).faster() is torch.float32
    assert Clock([2.0], [9.0, 5.0, 9.0, 1.0, 9.0]).faster() is torch.bfloat16


def test_bf16_that_is_hopeless_is_tried_twice_alone():
    clock = Clock([1.0], [50.0])
    assert clock.faster() is torch.float32 and clock.calls["bf16"] == 2


def test_it_is_measured_once_a_process(monkeypatch):
    measured = []
    monkeypatch.delenv("FISEDIT_CPU_DTYPE", raising=False)
    monkeypatch.setattr(device, "_faster_dtype", lambda *_: measured.append(1) or torch.bfloat16)
    device.faster_cpu_dtype.cache_clear()
    try:
        assert [choose_dtype(None, torch.device("cpu")) for _ in range(2)] == [torch.bfloat16] * 2
        assert measured == [1]
    finally:
        device.faster_cpu_dtype.cache_clear()


def test_the_environment_names_it_instead(monkeypatch):
    try:
        for name, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            monkeypatch.setenv("FISEDIT_CPU_DTYPE", name)
            device.faster_cpu_dtype.cache_clear()
            assert choose_dtype(None, torch.device("cpu")) is expected
        device.faster_cpu_dtype.cache_clear()
        monkeypatch.setenv("FISEDIT_CPU_DTYPE", "fp16")
        with pytest.raises(InputError, match="FISEDIT_CPU_DTYPE must be fp32 or bf16, got 'fp16'"):
            choose_dtype(None, torch.device("cpu"))
    finally:
        device.faster_cpu_dtype.cache_clear()


def test_a_device_without_float64_is_refused():
    with pytest.raises(InputError, match="mps has no float64"):
        device.choose_device("mps")


@pytest.mark.parametrize(("dtype", "advice"), [(torch.bfloat16, "use dtype fp32"), (torch.float32, "guidance_scale")])
def test_nobody_is_told_to_use_the_precision_that_is_in_use(dtype, advice):
    told = device.advice_on_overflow(dtype)
    assert advice in told and ("fp32" in told) == (dtype is not torch.float32)
