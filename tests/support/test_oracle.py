"""The oracle proves itself: at its two ends, where it must not change anything, and against arithmetic done by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn

from tests.support.conditions import random_conditions
from tests.support.oracle import (
    GenerationConfig,
    Text,
    coarser,
    dense_blended,
    dense_decode,
    dense_generate,
    levels,
    mix,
    mixed_edit,
    mixed_forward,
    record,
)
from tests.support.pipelines import SCHEDULERS, SHAPES, with_scheduler

SIZES = [(16, 16), (16, 24), (13, 17)]
M = TypeVar("M", bound=nn.Module)
TIME = torch.tensor(500)
every_shape = pytest.mark.parametrize("name", SHAPES)
every_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")

Pipelines = Mapping[str, StableDiffusionPipeline]
Inputs = tuple[Tensor, Tensor, Text, Text]


def edit_inputs(unet: UNet2DConditionModel, active: Tensor) -> Inputs:
    """Draw source latents [2, 4, h, w], the same but new where `active`, and two texts."""
    source = torch.randn(2, 4, *active.shape)
    new = torch.where(active, torch.randn_like(source), source)
    text, new_text = (random_conditions(unet).unet_inputs for _ in range(2))
    return source, new, text, new_text


def square(size: tuple[int, int]) -> Tensor:
    """A block of 5 x 4 cells off the centre: bool [h, w]."""
    active = torch.zeros(size, dtype=torch.bool)
    active[3:8, 6:10] = True
    return active


@torch.no_grad()
def dense(unet: UNet2DConditionModel, latents: Tensor, text: Text) -> Tensor:
    return unet(latents, TIME, **text).sample


@pytest.mark.sweep(1)
@every_shape
@every_size
def test_all_active_is_the_dense_forward(pipelines: Pipelines, name: str, size: tuple[int, int]) -> None:
    unet = pipelines[name].unet
    everywhere = torch.ones(size, dtype=torch.bool)
    source, new, text, new_text = edit_inputs(unet, everywhere)
    mixed = mixed_forward(unet, record(unet, source, TIME, text), new, TIME, new_text, everywhere)
    assert torch.equal(mixed, dense(unet, new, new_text))


@pytest.mark.sweep(1)
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


@pytest.mark.sweep(1)
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


@every_shape
def test_every_layer_keeps_the_recording_outside(pipelines: Pipelines, name: str) -> None:
    unet, active = pipelines[name].unet, square((13, 17))
    source, new, text, new_text = edit_inputs(unet, active)
    recorded = record(unet, source, TIME, text)
    mixed = mix(unet, recorded, new, TIME, new_text, active)
    outside = {mask.numel(): ~mask.flatten() for mask in levels(active).values()}  # all of different sizes
    assert mixed.maps.keys() == recorded.maps.keys()
    for layer in recorded.maps:
        was, now = (tokens(run.maps[layer]) for run in (recorded, mixed))
        assert torch.equal(was[:, outside[was.shape[1]]], now[:, outside[was.shape[1]]]), layer
        assert not torch.equal(was, now), layer


def tokens(output: Tensor) -> Tensor:
    """A layer's output as [B, HW, C]."""
    return output.flatten(2).transpose(1, 2) if output.ndim == 4 else output


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


@pytest.mark.sweep(1)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_blended_and_mixed_edits_keep_the_source_outside(pipelines: Pipelines, scheduler: str, guidance: float) -> None:
    pipe = with_scheduler(pipelines["shallow"], scheduler)
    source = GenerationConfig("a cat on a beach", seed=3, steps=3, guidance=guidance, height=104, width=136)
    mask, trajectory = square((13, 17)), dense_generate(pipe, source).latents
    assert trajectory.shape == (4, 4, 13, 17)
    for edit in (dense_blended, mixed_edit):
        latents = edit(pipe, source, "a dog on a beach", mask).latents
        assert torch.equal(latents[..., ~mask], trajectory[..., ~mask])
        assert (latents - trajectory)[1:, :, mask].std(dim=(1, 2)).min() > 1e-3


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_edit_everywhere_is_the_dense_pipeline(pipelines: Pipelines, scheduler: str) -> None:
    pipe = with_scheduler(pipelines["demo"], scheduler)
    source = GenerationConfig("a cat on a beach", seed=3, steps=3)
    dense_run = dense_generate(pipe, replace(source, prompt="a dog on a beach"))
    for edit in (dense_blended, mixed_edit):
        run = edit(pipe, source, "a dog on a beach", torch.ones(16, 16, dtype=torch.bool))
        assert torch.equal(run.latents, dense_run.latents)
        assert run.image.tobytes() == dense_run.image.tobytes()
    assert not hooks_of(pipe.unet)
    assert "forward" not in vars(pipe.unet)


def test_first_latents_and_decode_are_the_pipelines_own(pipelines: Pipelines) -> None:
    pipe = with_scheduler(pipelines["shallow"], "euler_a")
    config = GenerationConfig("a cat on a beach", seed=3, steps=3)
    run = dense_generate(pipe, config)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 4, 16, 16, generator=generator)
    images = pipe(config.prompt, 128, 128, 3, latents=noise, generator=generator, output_type="np").images
    decoded = (dense_decode(pipe, run.latents[-1:]) / 2 + 0.5).clamp(0, 1)
    np.testing.assert_array_equal(decoded.permute(0, 2, 3, 1).numpy(), images)
    np.testing.assert_array_equal((images[0] * 255).round().astype("uint8"), np.asarray(run.image))
