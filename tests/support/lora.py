"""LoRAs with random weights: as files of either format, and merged into a pipeline."""

from __future__ import annotations

import copy

import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file

SCALE, ALPHA, RANK = 0.6, 2.0, 4
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "conv1", "downsamplers.0.conv")


class Lora:
    """Random low-rank changes of a model's layers: as files, and merged into it."""

    def __init__(self, pipe, seed=0):
        make = torch.Generator().manual_seed(seed)
        named = {"unet": pipe.unet, "text_encoder": pipe.text_encoder}
        ends = {"unet": LAYERS, "text_encoder": ("q_proj", "v_proj", "out_proj", "fc1")}
        self.parts = {}
        for part, model in named.items():
            for name, layer in model.named_modules():
                if name.endswith(ends[part]) and hasattr(layer, "weight"):
                    shape = layer.weight.shape
                    down = torch.randn(RANK, *shape[1:], generator=make) / shape[1:].numel() ** 0.5
                    up = torch.randn(shape[0], RANK, *[1] * (len(shape) - 2), generator=make) / RANK**0.5
                    self.parts[part, name] = down, up

    def kohya(self, path, **metadata):
        tensors = {}
        for (part, name), (down, up) in self.parts.items():
            prefix = "lora_unet" if part == "unet" else "lora_te_text_model"
            key = f"{prefix}_{name.removeprefix('text_model.').replace('.', '_')}"
            tensors |= {
                f"{key}.lora_down.weight": down,
                f"{key}.lora_up.weight": up,
                f"{key}.alpha": torch.tensor(ALPHA),
            }
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata)
        return path

    def diffusers(self, folder, pipe):
        from peft import LoraConfig
        from peft.utils import get_peft_model_state_dict

        copied = StableDiffusionPipeline(**copy.deepcopy(pipe.components), requires_safety_checker=False)
        layers = {}
        for part in ("unet", "text_encoder"):
            names = [name for (of, name) in self.parts if of == part]
            model = getattr(copied, part)
            model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
            for name in names:
                layer = model.get_submodule(name)
                layer.lora_A["default"].weight.data.copy_(self.parts[part, name][0])
                layer.lora_B["default"].weight.data.copy_(self.parts[part, name][1])
            layers[f"{part}_lora_layers"] = get_peft_model_state_dict(model)
        StableDiffusionPipeline.save_lora_weights(folder, **layers)
        return folder

    def merged(self, pipe, scale):
        """Another pipeline with the change in its weights."""
        copied = StableDiffusionPipeline(**copy.deepcopy(pipe.components), requires_safety_checker=False)
        copied.set_progress_bar_config(disable=True)
        for (part, name), (down, up) in self.parts.items():
            weight = getattr(copied, part).get_submodule(name).weight.data
            weight += scale * (up.flatten(1) @ down.flatten(1)).view(weight.shape)
        return copied
