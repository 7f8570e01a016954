"""Models on disk that an app can offer beside the demo model."""

from __future__ import annotations

import json
import shutil

from safetensors.torch import load_file, save_file

from fisedit.models.loader import demo_folder


def derived(folder):
    shutil.copytree(demo_folder(), folder, ignore=shutil.ignore_patterns("log", "*.png", "judge*", "*.md"))
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"conv_out.weight": tensors["conv_out.weight"] * 0.8}, weights, {"format": "pt"})
    config = folder / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sample_size": 8}))
    return folder
