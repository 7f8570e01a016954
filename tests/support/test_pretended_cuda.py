"""The pretended GPU refuses what a real one refuses, so that what passes there says something."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.pretended_cuda import pretended_cuda


def test_tensors_and_modules_move_and_stay_apart():
    layer = nn.Linear(4, 3)
    with pretended_cuda():
        host, there = torch.ones(2, 4), torch.ones(2, 4, device="cuda")
        assert (host.device.type, there.device.type) == ("cpu", "cuda") and there.is_cuda and not host.is_cuda
        layer.to("cuda")
        assert layer.weight.device == layer(there).device == (there + 1)[0].split(2)[1].device == there.device
        assert there.cpu().device == host.device and host.to(there).device == there.device
        for mix in (lambda: layer(host), lambda: there + host, lambda: torch.cat([there, host])):
            with pytest.raises(RuntimeError, match="to be on the same device"):
                mix()
        assert torch.equal(there + torch.tensor(1), torch.full((2, 4), 2.0, device="cuda"))


def test_numbers_come_to_the_host_when_asked_alone():
    with pretended_cuda():
        there = torch.ones(2, 4).to("cuda")
        assert float(there.sum()) == 8 and there.tolist() == [[1.0] * 4] * 2
        with pytest.raises(TypeError, match="can't convert cuda"):
            there.numpy()
        assert there.cpu().numpy().sum() == 8


@pytest.mark.parametrize("fault", ["layout", "dtype"])
def test_group_norm_has_cudas_rules(fault):
    maps, weight = torch.ones(2, 8, 3, 3), torch.ones(8)
    maps = maps.to(memory_format=torch.channels_last) if fault == "layout" else maps.bfloat16()
    torch.native_group_norm(maps, weight, weight, 2, 8, 9, 4, 1e-5)  # a CPU takes both
    with pretended_cuda(), pytest.raises(RuntimeError, match=r"is_contiguous|expected scalar type"):
        torch.native_group_norm(maps.to("cuda"), weight.to("cuda"), weight.to("cuda"), 2, 8, 9, 4, 1e-5)
