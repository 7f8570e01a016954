"""Stand-ins of the packages that run diffusers in other ways, with the parts of them that `bench.runtimes` calls."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import ClassVar

import torch


class Helper:
    """DeepCache's helper, which changes nothing."""

    made: ClassVar[list[Helper]] = []

    def __init__(self, pipe):
        self.pipe, self.parameters, self.enabled = pipe, {}, False
        self.made.append(self)

    def set_params(self, **parameters):
        self.parameters = parameters

    def enable(self):
        self.enabled = True


class OpenVino(ModuleType):
    """OpenVINO, whose models are torch's modules."""

    def __init__(self, fault: Exception | None = None):
        super().__init__("openvino")
        self.fault, self.settings = fault, []

    def convert_model(self, module, example_input, input):  # noqa: A002 (its name there)
        if self.fault is not None:
            raise self.fault
        assert [tuple(example.shape) for example in example_input] == input
        return module

    def compile_model(self, model, device, settings):
        self.settings.append((device, settings))

        def call(arrays):
            with torch.no_grad():
                return [model(*map(torch.from_numpy, arrays)).numpy()]

        return call


def install(monkeypatch, openvino: Exception | None = None) -> OpenVino:
    """Put both into the place of the packages; OpenVINO's converter may have a fault."""
    deepcache, stand_in = ModuleType("DeepCache"), OpenVino(openvino)
    deepcache.DeepCacheSDHelper = Helper
    monkeypatch.setattr(Helper, "made", [])
    monkeypatch.setitem(sys.modules, "DeepCache", deepcache)
    monkeypatch.setitem(sys.modules, "openvino", stand_in)
    return stand_in


def uninstall(monkeypatch) -> None:
    """Let their imports fail as where they are not installed."""
    for name in ("DeepCache", "openvino"):
        monkeypatch.setitem(sys.modules, name, None)
