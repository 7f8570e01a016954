"""What IP-Adapters and ControlNets add to steps of Stable Diffusion 1.5's shapes, in multiply-accumulates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel

from fisedit.adapters.control_net import ControlNetCondition, ControlNetReader
from fisedit.adapters.ip_adapter import IPAdapterCondition, cross_attention_names
from fisedit.evaluation.workload import square_mask
from fisedit.models import random_init
from fisedit.sparse.executor import Executor
from fisedit.sparse.macs import unet_macs
from fisedit.sparse.modules import Role, unet_sites
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import AdapterUse

GRIDS = [(64 // 2**level,) * 2 for level in range(4)]
SIZES = [height * width for height, width in GRIDS]


@pytest.fixture(scope="module")
def executor():
    """Without weights."""
    config = UNet2DConditionModel.load_config(random_init._SD15 / "unet")
    with torch.device("meta"):
        return Executor(UNet2DConditionModel.from_config(config))


@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_a_control_net_adds_at_most_half_to_a_step_of_5_percent(executor, monkeypatch, dilation):
    monkeypatch.setattr("fisedit.adapters.control_net.identity_of", lambda *_: "network")  # no weights to hash
    with torch.device("meta"):
        network = ControlNetModel.from_unet(executor.unet, load_weights_from_unet=False)
    plan = make_row_plan(dilate(square_mask(0.05, 64), dilation), executor.num_levels)
    condition = ControlNetReader(network).condition(None, AdapterUse(), 2)
    assert isinstance(condition, ControlNetCondition)
    without = unet_macs(executor.sites, plan.rows, SIZES, 1, 77)
    assert 0.3 < condition.macs(executor.unet, GRIDS, plan, recorded=True) / without < 0.4


@pytest.mark.parametrize("tokens", [4, 16], ids=["plain", "plus"])
def test_an_ip_adapter_adds_at_most_a_five_hundredth_to_a_dense_step(executor, tokens):
    levels = {site.name: site.level for site in unet_sites(executor.unet) if site.role is Role.QUERY}
    places = {
        name: (levels[f"{name}.to_q"], executor.unet.get_submodule(name).to_q.out_features)
        for name in cross_attention_names(executor.unet)
    }
    adapter = SimpleNamespace(num_tokens=tokens, places=places)
    added = IPAdapterCondition(adapter, None, 1.0).macs(executor.unet, GRIDS, None, recorded=False)
    assert 0 < added / unet_macs(executor.sites, SIZES, SIZES, 1, 77) <= 0.002
