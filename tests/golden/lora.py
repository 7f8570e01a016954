"""A small LoRA of random low-rank changes, written as a kohya file; the same bytes from the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor, nn

RANK, ALPHA = 2, 2.0
_ENDS = {
    "unet": ("to_q", "to_v", "to_out.0", "ff.net.0.proj", "conv1"),
    "te_text_model": ("q_proj", "v_proj", "out_proj"),
}


def write(pipe: StableDiffusionPipeline, path: Path, seed: int = 0) -> Path:
    """Write a LoRA for a pipeline's UNet and text encoder."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for part, model in (("unet", pipe.unet), ("te_text_model", pipe.text_encoder)):
        for name, layer in model.named_modules():
            if name.endswith(_ENDS[part]) and hasattr(layer, "weight"):
                key = f"lora_{part}_{name.removeprefix('text_model.').replace('.', '_')}"
                tensors |= {f"{key}.{end}": tensor for end, tensor in _change(layer, draw).items()}
    save_file(tensors, path)
    return path


def _change(layer: nn.Module, draw: torch.Generator) -> dict[str, Tensor]:
    """The tensors of one layer: down [r, ...], up [out, r, 1...], and alpha."""
    shape = layer.weight.shape
    down = torch.randn(RANK, *shape[1:], generator=draw) / shape[1:].numel() ** 0.5
    up = torch.randn(shape[0], RANK, *[1] * (len(shape) - 2), generator=draw) / (4 * RANK**0.5)
    return {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(ALPHA)}
