"""Pictures that serve as references, and their maps as a plain pipeline computes them."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from fisedit.adapters.insertion_points import insertion_points, tap_maps


def picture(seed, size=(128, 128)):
    drawn = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(drawn).resize(size, Image.Resampling.BICUBIC)


RED, BLUE = picture(1), picture(2)


def pixels(result):
    return np.asarray(result.image)


@torch.no_grad()
def seen(pipe, reference, branches=2, size=(128, 128)):
    """A reference's maps: clean latents at t = 0, zeros for the branch without a prompt, no words."""
    pixels = torch.from_numpy(np.asarray(reference.resize(size, Image.Resampling.LANCZOS), np.float32) / 127.5 - 1)
    latents = pipe.vae.encode(pixels.permute(2, 0, 1)[None]).latent_dist.mode() * pipe.vae.config.scaling_factor
    latents = torch.cat([torch.zeros_like(latents), latents])[-branches:]
    ids = pipe.tokenizer("", padding="max_length", max_length=77, return_tensors="pt").input_ids
    text = pipe.text_encoder(ids)[0].expand(branches, -1, -1)
    return tap_maps(pipe.unet, latents, text, tuple(insertion_points(pipe.unet)))
