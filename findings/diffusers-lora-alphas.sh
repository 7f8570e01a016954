#!/usr/bin/env bash
# diffusers 0.42.1: of a kohya LoRA, alphas of attention layers that differ from the most frequent one are dropped.
# Guess: every layer counts by alpha / rank, as its file says.
# Seen: three layers of rank 4 with alphas 4, 4 and 1 are all scaled by 1; the third should be scaled by .25.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 peft==0.21.2
"$trial/env/bin/python" - <<'PYTHON'
import diffusers
import peft
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel

unet = UNet2DConditionModel(
    block_out_channels=(32, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32, attention_head_dim=4, sample_size=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
block = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
alphas = {"to_q": 4.0, "to_k": 4.0, "to_v": 1.0}
file = {}
for name, alpha in alphas.items():
    key = f"lora_unet_{block}.{name}".replace(".", "_")
    file |= {
        f"{key}.lora_down.weight": torch.ones(4, 32), f"{key}.lora_up.weight": torch.ones(32, 4), f"{key}.alpha": torch.tensor(alpha)
    }
state, network_alphas = StableDiffusionPipeline.lora_state_dict(file, unet_config=unet.config)[:2]
StableDiffusionPipeline.load_lora_into_unet(state, network_alphas, unet, adapter_name="x")
scales = {name: unet.get_submodule(f"{block}.{name}").scaling["x"] for name in alphas}
print(diffusers.__version__, peft.__version__, "asked:", {name: alpha / 4 for name, alpha in alphas.items()}, "got:", scales)
assert scales == {"to_q": 1.0, "to_k": 1.0, "to_v": 1.0}, "this has changed"
PYTHON
