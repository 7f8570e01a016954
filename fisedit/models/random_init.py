"""Builds Stable Diffusion 1.5's architecture with random weights, for measurements of speed without a download.

Knows configurations and initial scales; its images are noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fisedit.models.loader import quiet_loaders

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

_SD15 = Path(__file__).parent / "configs" / "sd15"


def random_pipeline(device: torch.device, dtype: torch.dtype, layers_per_block: int = 2) -> StableDiffusionPipeline:
    """The pipeline in channels-last layout, with activations of order one.

    Args:
        device: Torch device.
        dtype: Precision.
        layers_per_block: The number of layers in a block of the UNet; Stable Diffusion has 2.
    """
    with quiet_loaders():  # their imports warn too
        from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

        with torch.device("meta"):
            unet = UNet2DConditionModel.from_config(
                UNet2DConditionModel.load_config(_SD15 / "unet"), layers_per_block=layers_per_block
            )
            vae = AutoencoderKL.from_config(AutoencoderKL.load_config(_SD15 / "vae"))
        text_encoder = CLIPTextModel(CLIPTextConfig.from_pretrained(_SD15 / "text_encoder")).eval()
        pipe = StableDiffusionPipeline(
            unet=_filled(unet, device, dtype),
            vae=_filled(vae, device, dtype),
            text_encoder=text_encoder.to(device, dtype),
            tokenizer=CLIPTokenizer.from_pretrained(str(_SD15 / "tokenizer")),
            scheduler=DDIMScheduler.from_pretrained(str(_SD15 / "scheduler")),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def _filled(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    module = module.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    generator = torch.Generator(device).manual_seed(0)
    for name, weights in module.named_parameters():
        if weights.ndim > 1:
            bound = (3 / weights[0].numel()) ** 0.5  # uniform numbers of the same deviation are drawn six times faster
            weights.uniform_(-bound, bound, generator=generator)
        else:
            weights.fill_(name.endswith("weight"))
    return module
