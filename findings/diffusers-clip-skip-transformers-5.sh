#!/usr/bin/env bash
# diffusers 0.42.1 with transformers 5.23: Stable Diffusion's pipeline with `clip_skip` ends in an AttributeError.
# Guess: `clip_skip=1`, which the pipeline documents, takes the hidden states of the layer before the last.
# Seen: "'CLIPTextModel' object has no attribute 'text_model'": transformers 5 has no such part any more.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.23.0
"$trial/env/bin/python" - <<'PYTHON'
import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

letters = [*"abcdefghijklmnopqrstuvwxyz"]
words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=16)
text_encoder = CLIPTextModel(
    CLIPTextConfig(vocab_size=len(words), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                   max_position_embeddings=16, bos_token_id=len(words) - 2, eos_token_id=len(words) - 1)
)
unet = UNet2DConditionModel(
    block_out_channels=(32, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32, attention_head_dim=4, sample_size=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
pipe = StableDiffusionPipeline(
    vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet, scheduler=DDIMScheduler(), safety_checker=None,
    feature_extractor=None, requires_safety_checker=False,
)
pipe.set_progress_bar_config(disable=True)
asked = {"prompt": "a cat", "num_inference_steps": 1, "height": 8, "width": 8, "output_type": "latent"}
print(diffusers.__version__, transformers.__version__, "without clip_skip:", tuple(pipe(**asked).images.shape))
try:
    pipe(**asked, clip_skip=1)
except AttributeError as error:
    print("with clip_skip=1:", error)
    assert "text_model" in str(error), "this has changed"
else:
    raise SystemExit("this has changed: clip_skip is read")
PYTHON
