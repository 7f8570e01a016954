"""The oracle proves itself: at its two ends, where it must not change anything, and against arithmetic done by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from tests.oracle import (
    Maps,
    Recipe,
    coarser,
    dense_blended,
    dense_decode,
    dense_generate,
    levels,
    mix,
    mixed_edit,
    mixed_forward,
    mixing,
    record,
    recording,
)
from tests.pipelines import SCHEDULERS, SHAPES, WORDS, build_pipeline, with_scheduler

SIZES = [(16, 16), (16, 24), (13, 17)]
M = TypeVar("M", bound=nn.Module)
TIME = torch.tensor(500)
every_shape = pytest.mark.parametrize("name", SHAPES)
every_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")

Pipelines = Mapping[str, StableDiffusionPipeline]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def edit_inputs(unet: UNet2DConditionModel, active: Tensor) -> Inputs:
    """Draw source latents [2, 4, h, w], the same but new where `active`, and two texts [2, 9, D]."""
    source = torch.randn(2, 4, *active.shape)
    new = torch.where(active, torch.randn_like(source), source)
    text, new_text = torch.randn(2, 2, 9, unet.config.cross_attention_dim)
    return source, new, text, new_text


def square(size: tuple[int, int]) -> Tensor:
    """A block of 5 x 4 cells off the centre: bool [h, w]."""
    active = torch.zeros(size, dtype=torch.bool)
    active[3:8, 6:10] = True
    return active


@torch.no_grad()
def dense(unet: UNet2DConditionModel, latents: Tensor, text: Tensor) -> Tensor:
    return unet(latents, TIME, encoder_hidden_states=text).sample


@every_shape
@every_size
def test_all_active_is_the_dense_forward(pipelines: Pipelines, name: str, size: tuple[int, int]) -> None:
    unet = pipelines[name].unet
    everywhere = torch.ones(size, dtype=torch.bool)
    source, new, text, new_text = edit_inputs(unet, everywhere)
    mixed = mixed_forward(unet, record(unet, source, TIME, text), new, TIME, new_text, everywhere)
    assert torch.equal(mixed, dense(unet, new, new_text))


@every_shape
@every_size
def test_none_active_is_the_recording_in_every_layer(pipelines: Pipelines, name: str, size: tuple[int, int]) -> None:
    unet = pipelines[name].unet
    nowhere = torch.zeros(size, dtype=torch.bool)
    source, _, text, new_text = edit_inputs(unet, nowhere)
    recorded = record(unet, source, TIME, text)
    mixed = mix(unet, recorded, source, TIME, new_text, nowhere)
    assert torch.equal(mixed.output, recorded.output)
    assert all(torch.equal(mixed.maps[layer], recorded.maps[layer]) for layer in recorded.maps)


@every_shape
@every_size
def test_changes_stay_inside_and_the_rim_matters(pipelines: Pipelines, name: str, size: tuple[int, int]) -> None:
    unet, active = pipelines[name].unet, square(size)
    source, new, text, new_text = edit_inputs(unet, active)
    recorded = record(unet, source, TIME, text)
    mixed = mixed_forward(unet, recorded, new, TIME, new_text, active)
    assert torch.equal(mixed[..., ~active], recorded.output[..., ~active])
    assert (mixed - recorded.output)[..., active].std() > 0.1
    assert (mixed - dense(unet, new, new_text))[..., active].std() > 0.01, "mixing must differ from running dense"


def test_same_inputs_in_a_mixed_forward_are_the_recording(pipelines: Pipelines) -> None:
    unet, active = pipelines["sd15"].unet, square((16, 16))
    source, _, text, _ = edit_inputs(unet, active)
    recorded = record(unet, source, TIME, text)
    assert torch.equal(mixed_forward(unet, recorded, source, TIME, text, active), recorded.output)


def test_a_mixed_forward_is_a_recording_for_the_next(pipelines: Pipelines) -> None:
    unet, active = pipelines["demo"].unet, square((16, 16))
    source, new, text, new_text = edit_inputs(unet, active)
    recorded = record(unet, source, TIME, text)
    once = mix(unet, recorded, new, TIME, new_text, active)
    assert torch.equal(mix(unet, once, new, TIME, new_text, active).output, once.output)
    assert torch.equal(mix(unet, once, new, TIME, new_text, ~active).output[..., active], once.output[..., active])


def test_recorded_layers_are_those_with_positions(pipelines: Pipelines) -> None:
    unet = pipelines["sd2"].unet
    source, _, text, _ = edit_inputs(unet, square((13, 17)))
    maps = record(unet, source, TIME, text).maps
    block = "mid_block.attentions.0.transformer_blocks.0"
    assert {f"{block}.attn1.to_k", f"{block}.attn2.to_q", f"{block}.attn2", f"{block}.ff.net.2"} <= maps.keys()
    assert not {f"{block}.attn2.to_k", f"{block}.attn2.to_v", "time_embedding.linear_1"} & maps.keys()
    assert not any("time_emb_proj" in layer for layer in maps)
    grids = [(13, 17), (7, 9), (4, 5), (2, 3)]
    assert {m.shape[2:] for m in maps.values() if m.ndim == 4} == set(grids)
    assert {m.shape[1] for m in maps.values() if m.ndim == 3} == {h * w for h, w in grids}


def test_coarser_levels_hold_every_active_cell() -> None:
    active = torch.rand(65, 63) < 0.02
    grids = levels(active)
    assert list(grids)[:4] == [(65, 63), (33, 32), (17, 16), (9, 8)]
    for fine, coarse in zip(list(grids.values())[:-1], list(grids.values())[1:], strict=True):
        expected = torch.zeros_like(coarse)
        for i, j in fine.nonzero().tolist():
            expected[i // 2, j // 2] = True
        assert torch.equal(coarse, expected)


def test_coarser_keeps_the_last_odd_row_and_column() -> None:
    active = torch.zeros(3, 5, dtype=torch.bool)
    active[2, 4] = True
    assert coarser(active).tolist() == [[False, False, False], [False, False, True]]


@every_shape
def test_the_unet_is_left_as_found(pipelines: Pipelines, name: str) -> None:
    unet, active = pipelines[name].unet, square((16, 16))
    source, new, text, new_text = edit_inputs(unet, active)
    before, keys = dense(unet, source, text), list(unet.state_dict())
    recorded = record(unet, source, TIME, text)
    mixed_forward(unet, recorded, new, TIME, new_text, active)
    with pytest.raises(ValueError, match="level of the active set, got"):
        mixed_forward(unet, recorded, new, TIME, new_text, square((16, 32)))
    assert not hooks_of(unet)
    assert torch.equal(dense(unet, source, text), before)
    assert list(unet.state_dict()) == keys


def hooks_of(model: nn.Module) -> list[object]:
    return [h for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks) for h in hooks.values()]


# By hand, in float64 numpy: maps are [C, H, W].


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


# Whole trajectories.


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_blended_and_mixed_edits_keep_the_source_outside(pipelines: Pipelines, scheduler: str, guidance: float) -> None:
    pipe = with_scheduler(pipelines["shallow"], scheduler)
    source = Recipe("a cat on a beach", seed=3, steps=3, guidance=guidance, height=104, width=136)
    mask, story = square((13, 17)), dense_generate(pipe, source).latents
    assert story.shape == (4, 4, 13, 17)
    for edit in (dense_blended, mixed_edit):
        latents = edit(pipe, source, "a dog on a beach", mask).latents
        assert torch.equal(latents[..., ~mask], story[..., ~mask])
        assert (latents - story)[1:, :, mask].std(dim=(1, 2)).min() > 1e-3


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_edit_everywhere_is_the_dense_pipeline(pipelines: Pipelines, scheduler: str) -> None:
    pipe = with_scheduler(pipelines["demo"], scheduler)
    source = Recipe("a cat on a beach", seed=3, steps=3)
    dense_run = dense_generate(pipe, replace(source, prompt="a dog on a beach"))
    for edit in (dense_blended, mixed_edit):
        run = edit(pipe, source, "a dog on a beach", torch.ones(16, 16, dtype=torch.bool))
        assert torch.equal(run.latents, dense_run.latents)
        assert run.image.tobytes() == dense_run.image.tobytes()
    assert not hooks_of(pipe.unet)
    assert "forward" not in vars(pipe.unet)


def test_first_latents_and_decode_are_the_pipelines_own(pipelines: Pipelines) -> None:
    pipe = with_scheduler(pipelines["shallow"], "euler_a")
    recipe = Recipe("a cat on a beach", seed=3, steps=3)
    run = dense_generate(pipe, recipe)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 4, 16, 16, generator=generator)
    images = pipe(recipe.prompt, 128, 128, 3, latents=noise, generator=generator, output_type="np").images
    decoded = (dense_decode(pipe, run.latents[-1:]) / 2 + 0.5).clamp(0, 1)
    np.testing.assert_array_equal(decoded.permute(0, 2, 3, 1).numpy(), images)
    np.testing.assert_array_equal((images[0] * 255).round().astype("uint8"), np.asarray(run.image))


# The pipelines themselves.


@every_shape
def test_pipelines_are_alive_and_reproducible(pipelines: Pipelines, name: str) -> None:
    pipe, again = pipelines[name], build_pipeline(name)
    assert all(torch.equal(a, b) for a, b in zip(pipe.unet.parameters(), again.unet.parameters(), strict=True))
    cat = dense_generate(pipe, Recipe("a cat on a beach"))
    dog = dense_generate(pipe, Recipe("a dog on a beach"))
    assert (cat.latents - dog.latents)[-1].std() > 0.1
    assert 0.1 < np.asarray(cat.image).std() / 255 < 0.4


def test_known_words_are_single_tokens(pipelines: Pipelines) -> None:
    tokenizer = pipelines["demo"].tokenizer
    assert all(len(tokenizer(word).input_ids) == 3 for word in WORDS)
    assert tokenizer.tokenize("a castle") == ["a</w>", "ca", "s", "t", "l", "e</w>"]
