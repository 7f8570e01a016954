"""The command of a training that adds a network to a finished model: its options, and the model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import StableDiffusionPipeline

from training.config import Config, load_config
from training.quick import prepare_cpu


class CompanionRun(NamedTuple):
    """What a command was asked for.

    Args:
        config: of the model's own run.
        pipeline: the model, on its device, in float32.
        device: of the training.
        pictures: how many scenes are drawn.
        folder: of checkpoints, logs and sample sheets.
        output: folder that gets the network.
    """

    config: Config
    pipeline: StableDiffusionPipeline
    device: torch.device
    pictures: int
    folder: Path
    output: Path


def parse_run(module: str, description: str | None, network: str, pictures: int) -> CompanionRun:
    """Read the command line, and load the model.

    Args:
        module: that is run.
        description: of the command.
        network: what is trained, such as "LoRA".
        pictures: how many scenes are drawn by default.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("output", type=Path, help=f"folder that gets the {network}")
    parser.add_argument(
        "--config", type=Path, default=Path(__file__).parent / "demo-cpu.toml", help="of the model's own run"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="checkpoints, logs and sample sheets")
    parser.add_argument("--pictures", type=int, default=pictures, help="scenes whose latents are used")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads to use")
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    config = load_config(chosen.config)
    prepare_cpu(config.products)
    pipeline = StableDiffusionPipeline.from_pretrained(chosen.model, torch_dtype=torch.float32, local_files_only=True)
    device = torch.device(chosen.device)
    pipeline.to(device)
    return CompanionRun(config, pipeline, device, chosen.pictures, chosen.folder, chosen.output)
