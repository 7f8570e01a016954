"""Norms of flat maps are float64's; those of ordinary maps are torch's own, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fisedit.models.group_norm import StableGroupNorm, apply, group_norm, stabilise
from fisedit.sparse_kernels import ops

GROUPS, EPS = 4, 1e-6
torch_weights = torch.linspace(-1, 2, 8), torch.linspace(1, -1, 8)


def flat_map(size, spread, mean, batch=1):
    """Channels of their own constants, with a small square on them."""
    x = mean + spread * torch.linspace(-1, 1, 8)[None, :, None, None].repeat(batch, 1, size, size)
    x[..., : size // 8, : size // 8] += spread / 2
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "mean", "batch"), [(64, 40, 2), (256, 3, 1), (400, 0.1, 1), (100, 1000, 1)])
def test_flat_maps(size, mean, batch, dtype):
    x = flat_map(size, 1.0, mean, batch).to(dtype)
    expected = F.group_norm(x.double(), GROUPS, *(w.double() for w in torch_weights), EPS)
    out, means, variances = group_norm(x, GROUPS, *torch_weights, EPS)
    assert out.dtype is dtype and out.is_contiguous(memory_format=torch.channels_last)
    largest = float(expected.abs().max())
    assert (out - expected).abs().max() <= largest * (2e-4 if dtype is torch.float32 else 2**-7)
    grouped = x.double().unflatten(1, (GROUPS, -1))
    assert torch.allclose(means, grouped.mean((2, 3, 4)), rtol=1e-6)
    assert torch.allclose(variances, grouped.var((2, 3, 4), correction=0), rtol=3e-3)
    _, statistics = ops.dense_group_norm(x, GROUPS, *torch_weights, EPS)
    mean, square = (statistics / grouped[0, 0].numel()).unbind(-1)
    assert torch.allclose(square - mean.square(), variances, rtol=1e-6)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_ordinary_maps_are_torchs_own(layout):
    x = (torch.randn(2, 8, 96, 96) + 1.5).to(memory_format=layout)
    assert torch.equal(group_norm(x, GROUPS, *torch_weights, EPS)[0], F.group_norm(x, GROUPS, *torch_weights, EPS))


def test_a_single_picture_whose_stride_is_short_is_torchs_own():
    """As of attention's output that became a map."""
    x = torch.randn(16, 16, 1, 128).permute(2, 3, 0, 1)
    norm, plain = StableGroupNorm(8, 128), torch.nn.GroupNorm(8, 128)
    assert x.stride(0) < x[0].numel() and torch.equal(norm(x), plain(x))
    assert torch.equal(group_norm(x, 8, norm.weight, norm.bias, norm.eps)[0], plain(x))


def test_a_models_norms_are_exchanged_and_nothing_else():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(GROUPS, 8)).requires_grad_(False)
    weights, x = model.state_dict(), torch.full((1, 3, 512, 512), 0.7).contiguous(memory_format=torch.channels_last)
    expected = copy.deepcopy(model).double()(x.double())
    assert torch.allclose(apply(model[1], model[0](x)).double(), expected, atol=1e-3)
    stabilise(model)
    assert type(model[1]) is StableGroupNorm and model.state_dict().keys() == weights.keys()
    assert torch.allclose(copy.deepcopy(model)(x).double(), expected, atol=1e-3)
    assert torch.allclose(model.double()(x.double()), expected)
