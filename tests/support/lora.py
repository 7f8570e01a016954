"""LoRAs with random weights: as files of either format, and merged into a pipeline."""

from __future__ import annotations

import copy

import torch
from safetensors.torch import save_file

from tests.support.pipelines import assembled

SCALE, ALPHA, RANK = 0.6, 2.0, 4
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "conv1", "downsamplers.0.conv")


_KOHYA = {
    ("text_encoder", False): "lora_te",
    ("text_encoder", True): "lora_te1",
    ("text_encoder_2", True): "lora_te2",
}
"""Part, and whether there are two text encoders -> kohya's prefix."""


def parts_of(pipe):
    """Names of a pipeline's parts that LoRAs change."""
    return [part for part in ("unet", "text_encoder", "text_encoder_2") if part in pipe.components]


def _copy(pipe):
    return assembled(pipe, **copy.deepcopy(pipe.components))


class Lora:
    """Random low-rank changes of a model's layers: as files, and merged into it."""

    def __init__(self, pipe, seed=0):
        make = torch.Generator().manual_seed(seed)
        self.parts = {}
        for part in parts_of(pipe):
            ends = LAYERS if part == "unet" else ("q_proj", "v_proj", "out_proj", "fc1")
            for name, layer in pipe.components[part].named_modules():
                if name.endswith(ends) and hasattr(layer, "weight"):
                    shape = layer.weight.shape
                    down = torch.randn(RANK, *shape[1:], generator=make) / shape[1:].numel() ** 0.5
                    up = torch.randn(shape[0], RANK, *[1] * (len(shape) - 2), generator=make) / RANK**0.5
                    self.parts[part, name] = down, up

    def kohya(self, path, **metadata):
        tensors, has_two = {}, "text_encoder_2" in {part for part, _ in self.parts}
        for (part, name), (down, up) in self.parts.items():
            prefix = f"{_KOHYA[part, has_two]}_text_model" if part != "unet" else "lora_unet"
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

        copied = _copy(pipe)
        layers = {}
        for part in parts_of(pipe):
            names = [name for (of, name) in self.parts if of == part]
            model = getattr(copied, part)
            model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
            for name in names:
                layer = model.get_submodule(name)
                layer.lora_A["default"].weight.data.copy_(self.parts[part, name][0])
                layer.lora_B["default"].weight.data.copy_(self.parts[part, name][1])
            layers[f"{part}_lora_layers"] = get_peft_model_state_dict(model)
        type(copied).save_lora_weights(folder, **layers)
        return folder

    def merged(self, pipe, scale):
        """Another pipeline with the change in its weights."""
        copied = _copy(pipe)
        for (part, name), (down, up) in self.parts.items():
            weight = getattr(copied, part).get_submodule(name).weight.data
            weight += scale * (up.flatten(1) @ down.flatten(1)).view(weight.shape)
        return copied
