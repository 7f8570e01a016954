#!/usr/bin/env bash
# diffusers 0.42.1: `clip_skip` of Stable Diffusion XL's pipeline skips layers for the prompt alone.
# Guess: as in web UIs, where the setting came from, both prompts are read at the same layer of the text encoders.
# Seen: the prompt's embeddings change, the negative prompt's stay the same to the bit: guidance compares two layers.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.23.0
"$trial/env/bin/python" - <<'PYTHON'
import diffusers
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

torch.manual_seed(0)
signs = [f"{mark}{end}" for end in ("", "</w>") for mark in "abcdefghijklmnopqrstuvwxyz"] + ["<|startoftext|>", "<|endoftext|>"]
tokenizer = CLIPTokenizer(vocab={sign: i for i, sign in enumerate(signs)}, merges=[], model_max_length=20)
reads = CLIPTextConfig(vocab_size=len(signs), hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
                       max_position_embeddings=20, projection_dim=16, bos_token_id=len(signs) - 2, eos_token_id=len(signs) - 1)
unet = UNet2DConditionModel(
    block_out_channels=(16, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=32, attention_head_dim=4,
    sample_size=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), addition_embed_type="text_time",
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), addition_time_embed_dim=4, projection_class_embeddings_input_dim=40,
)
pipe = StableDiffusionXLPipeline(
    AutoencoderKL(block_out_channels=(8,), norm_num_groups=4), CLIPTextModel(reads), CLIPTextModelWithProjection(reads),
    tokenizer, tokenizer, unet, EulerDiscreteScheduler(), add_watermarker=False,
)
asked = {"prompt": "a cat", "negative_prompt": "rain", "device": torch.device("cpu")}
plain, skipped = (pipe.encode_prompt(**asked, clip_skip=layers) for layers in (None, 1))
changes = [float((old - new).detach().abs().max()) for old, new in zip(plain[:2], skipped[:2], strict=True)]
print(f"diffusers {diffusers.__version__}, clip_skip=1: the prompt changes by {changes[0]:.3g}, the negative one by {changes[1]:.3g}")
assert changes[0] > 1e-3 and changes[1] == 0, "this has changed"
PYTHON
