"""The oracle against arithmetic done by hand in float64: a resnet block in numpy, a transformer on its active rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from tests.support.oracle import Maps, mixing, recording

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M", bound=nn.Module)


def square(size: tuple[int, int]) -> Tensor:
    """A block of 5 x 4 cells off the centre: bool [h, w]."""
    active = torch.zeros(size, dtype=torch.bool)
    active[3:8, 6:10] = True
    return active


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def group_norm(x: np.ndarray, norm: nn.GroupNorm) -> np.ndarray:
    grouped = x.reshape(norm.num_groups, -1)
    mean, spread = grouped.mean(1, keepdims=True), grouped.std(1, keepdims=True)
    normed = ((grouped - mean) / np.sqrt(spread**2 + norm.eps)).reshape(x.shape)
    return normed * array(norm.weight)[:, None, None] + array(norm.bias)[:, None, None]


def conv(x: np.ndarray, layer: nn.Conv2d) -> np.ndarray:
    rim = layer.padding[0]
    padded = np.pad(x, ((0, 0), (rim, rim), (rim, rim)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, layer.kernel_size, axis=(1, 2))
    return np.einsum("ihwkl,oikl->ohw", windows, array(layer.weight)) + array(layer.bias)[:, None, None]


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def alive(module: M) -> M:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval()


def resnet_by_hand(
    block: ResnetBlock2D, x: np.ndarray, temb: Tensor, settle: Callable[[str, np.ndarray], np.ndarray]
) -> np.ndarray:
    """A resnet block [Cin, H, W] -> [Cout, H, W] in which `settle(name, map)` has the last word on every conv."""
    time = array(block.time_emb_proj(torch.nn.functional.silu(temb)))[0][:, None, None]
    h = settle("conv1", conv(silu(group_norm(x, block.norm1)), block.conv1))
    h = settle("conv2", conv(silu(group_norm(h + time, block.norm2)), block.conv2))
    return h + settle("conv_shortcut", conv(x, block.conv_shortcut))


def test_a_resnet_block_mixed_by_hand() -> None:
    block = alive(ResnetBlock2D(in_channels=6, out_channels=9, temb_channels=5, groups=3, eps=1e-5))
    active, temb = square((9, 11)), torch.randn(1, 5)
    source, new = torch.randn(1, 6, 9, 11), torch.randn(1, 6, 9, 11) * 2 + 1
    new = torch.where(active, new, source)

    kept: dict[str, np.ndarray] = {}
    resnet_by_hand(block, array(source[0]), temb, kept.setdefault)
    expected = resnet_by_hand(block, array(new[0]), temb, lambda name, x: np.where(active.numpy(), x, kept[name]))

    maps: Maps = {}
    with torch.no_grad(), recording(block, maps):
        block(source, temb)
    with torch.no_grad(), mixing(block, maps, active):
        mixed = block(new, temb)
    np.testing.assert_allclose(mixed[0].numpy(), expected, rtol=1e-4, atol=1e-4)


def transformer_by_rows(
    model: Transformer2DModel, x: Tensor, text: Tensor, active: Tensor, kept: dict[str, Tensor]
) -> Tensor:
    """A one-block, biased transformer on active rows only: `x` [C, H, W] mixed, text [T, D] -> rows [R, C], in float64.

    With an empty `kept` every row is active, and `kept` receives the keys and values; else theirs serve outside.
    """
    block = model.transformer_blocks[0]
    residual = x.flatten(1).T[active.flatten()]
    normed = torch.from_numpy(group_norm(x.numpy(), model.norm)).flatten(1).T[active.flatten()]
    rows = linear(normed, model.proj_in)

    h = layer_norm(rows, block.norm1)
    key, value = linear(h, block.attn1.to_k), linear(h, block.attn1.to_v)
    if kept:
        outside = ~active.flatten()
        key, value = torch.cat([key, kept["k"][outside]]), torch.cat([value, kept["v"][outside]])
    else:
        kept.update(k=key, v=value)
    rows = rows + attend(linear(h, block.attn1.to_q), key, value, block.attn1)

    h = linear(layer_norm(rows, block.norm2), block.attn2.to_q)
    rows = rows + attend(h, linear(text, block.attn2.to_k), linear(text, block.attn2.to_v), block.attn2)

    wide, gate = linear(layer_norm(rows, block.norm3), block.ff.net[0].proj).chunk(2, dim=-1)
    rows = rows + linear(wide * gate * (1 + torch.erf(gate / 2**0.5)) / 2, block.ff.net[2])
    return residual + linear(rows, model.proj_out)


def linear(x: Tensor, layer: nn.Linear | nn.Conv2d) -> Tensor:
    weight = layer.weight.double().flatten(1)
    return x @ weight.T + (0 if layer.bias is None else layer.bias.double())


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return normed * norm.weight.double() + norm.bias.double()


def attend(query: Tensor, key: Tensor, value: Tensor, attention: nn.Module) -> Tensor:
    q, k, v = (x.unflatten(-1, (attention.heads, -1)) for x in (query, key, value))
    weights = (torch.einsum("rhd,khd->hrk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return linear(torch.einsum("hrk,khd->rhd", weights, v).flatten(1), attention.to_out[0])


@pytest.mark.parametrize("linear_projection", [False, True], ids=["conv", "linear"])
def test_a_transformer_mixed_by_rows(linear_projection: bool) -> None:
    model = alive(
        Transformer2DModel(2, 4, 8, norm_num_groups=4, cross_attention_dim=5, use_linear_projection=linear_projection)
    )
    active = square((9, 11))
    source, fresh, texts = torch.randn(1, 8, 9, 11), torch.randn(1, 8, 9, 11) * 2 + 1, torch.randn(2, 1, 7, 5)
    new = torch.where(active, fresh, source)

    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        transformer_by_rows(model, source[0].double(), texts[0, 0].double(), torch.ones_like(active), kept)
        expected = transformer_by_rows(model, new[0].double(), texts[1, 0].double(), active, kept)

    maps: Maps = {}
    with torch.no_grad(), recording(model, maps):
        recorded = model(source, encoder_hidden_states=texts[0]).sample
    with torch.no_grad(), mixing(model, maps, active):
        mixed = model(new, encoder_hidden_states=texts[1]).sample
    torch.testing.assert_close(mixed[0, :, active].T.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(mixed[..., ~active], recorded[..., ~active])
