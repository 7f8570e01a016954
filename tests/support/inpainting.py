"""Inpainting models: a UNet that reads a mask and a masked picture after its latents, with random weights there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn

from tests.support.pipelines import assembled


def inpainting(pipe: StableDiffusionPipeline) -> StableDiffusionPipeline:
    """A pipeline like another one, but for the first layer of its UNet."""
    config = {name: value for name, value in pipe.unet.config.items() if name != "_use_default_values"}
    unet = UNet2DConditionModel.from_config({**config, "in_channels": 9})
    weights = pipe.unet.state_dict()
    extra = torch.randn(weights["conv_in.weight"][:, :1].shape, generator=torch.Generator().manual_seed(0))
    weights["conv_in.weight"] = torch.cat([weights["conv_in.weight"], *[extra * 0.05] * 5], 1)
    unet.load_state_dict(weights)
    return assembled(pipe, unet=unet.requires_grad_(False).eval(), scheduler=deepcopy(pipe.scheduler))


@contextmanager
def reading(unet: nn.Module, inputs: Tensor) -> Iterator[None]:
    """While open, a UNet called with latents alone reads inputs [1, 5, h, w] after them."""

    def add(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = args
        return torch.cat([x, inputs.expand(len(x), -1, -1, -1)], 1), *others

    handle = unet.register_forward_pre_hook(add)
    try:
        yield
    finally:
        handle.remove()
