#!/usr/bin/env bash
# DeepCache 0.1.1 with diffusers 0.42.1: where timesteps repeat, as Heun's and PNDM's do, it reuses other steps.
# Guess: with `cache_interval=2` every second evaluation of the UNet is a full one, whatever the scheduler.
# Seen: DDIM 4 full ones of 8, but PNDM 4 of 9 (not 5), and Heun 1 of 15. A step's index is looked up by the first
# timestep that equals its own, so that the second of two equal ones counts as the first. With Heun all others are odd.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check DeepCache==0.1.1 diffusers==0.42.1 \
  transformers==5.23.0 torch==2.13.0 numpy==2.4.6
"$trial/env/bin/python" - <<'PYTHON'
import diffusers
import torch
from DeepCache import DeepCacheSDHelper
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)


def full_evaluations(scheduler) -> tuple[int, int]:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=2, norm_num_groups=8, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, latent_channels=4)
    pipe = StableDiffusionPipeline(vae, None, None, unet, scheduler, None, None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    middle, calls = unet.mid_block.forward, []
    unet.mid_block.forward = lambda *args, **named: calls.append(1) or middle(*args, **named)
    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    pipe(
        prompt_embeds=torch.randn(1, 77, 32), guidance_scale=1.0, num_inference_steps=8, height=32, width=32,
        output_type="latent", generator=torch.Generator().manual_seed(1),
    )
    return len(calls), len(pipe.scheduler.timesteps)


seen = {}
for kind in (DDIMScheduler, PNDMScheduler, HeunDiscreteScheduler):
    options = {"steps_offset": 1} | ({"skip_prk_steps": True} if kind is PNDMScheduler else {})
    seen[kind.__name__] = full_evaluations(kind(beta_schedule="scaled_linear", **options))
    print(diffusers.__version__, kind.__name__, "full evaluations:", *seen[kind.__name__])
expected = {"DDIMScheduler": (4, 8), "PNDMScheduler": (4, 9), "HeunDiscreteScheduler": (1, 15)}
assert seen == expected, "this has changed"
PYTHON
