"""Pictures that serve as references, and their maps as a plain pipeline computes them."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from fisedit.adapters.insertion_points import inject_maps, insertion_points, record_maps
from tests.support import oracle
from tests.support.adapters import naive
from tests.support.edits import CAT


def picture(seed, size=(128, 128)):
    drawn = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(drawn).resize(size, Image.Resampling.BICUBIC)


RED, BLUE = picture(1), picture(2)
QUICK = {"seed": 7, "num_inference_steps": 2}


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
    return record_maps(pipe.unet, latents, text, tuple(insertion_points(pipe.unet)))


def check_guided(editor, pipe, adapter):
    """A guided source of the editor's is what diffusers makes with `pipe` and the blocks written out in it."""
    maps = seen(pipe, RED)
    changes = {
        name: lambda x, name=name, block=block: x + naive(block, x, maps[name])
        for name, block in adapter.blocks.items()
    }
    with inject_maps(pipe.unet, changes):
        dense = oracle.dense_generate(pipe, oracle.GenerationConfig(CAT, seed=7, steps=2))
    result = editor.generate(CAT, reference=RED, width=128, height=128, **QUICK)
    assert oracle.deviation(torch.cat(editor._trajectory_cache.get(result.id)[0].latents), dense.latents) <= 1e-4
    assert np.abs(pixels(result).astype(int) - np.asarray(dense.image)).max() <= 1
    return result
