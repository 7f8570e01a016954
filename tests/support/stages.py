"""Stages of a training run, small enough to take a step at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from diffusers import AutoencoderKL
from torch import nn

from training.autoencoder import AutoencoderStage, DecoderStage, HeldOutPictures, build_autoencoder
from training.config import Autoencoder, CloseUps, Config, Decoder, Denoiser, Plan, Scenes
from training.denoiser import DenoiserStage
from training.latents import encode_scenes
from training.loop import Stage
from training.pictures import Pictures

CPU = torch.device("cpu")
PLAN = Plan(batch=2, seconds=1e9, steps=3, learning_rate=1e-3, warmup=1, log_every=1, report_every=100)
CONFIG = Config(
    seed=1,
    start="",
    scenes=Scenes(side=128, count=4, held_out=2),
    autoencoder=Autoencoder(PLAN, channels=(8, 8, 8, 8)),
    decoder=Decoder(PLAN),
    closeups=CloseUps(PLAN, pictures=4),
    denoiser=Denoiser(
        PLAN, channels=(8, 8, 16), groups=4, heads=2, text_width=16, text_heads=2, text_layers=1, pictures=4
    ),
)


def small_autoencoder() -> AutoencoderKL:
    torch.manual_seed(0)
    return build_autoencoder(CONFIG.autoencoder, 128)


def held_out(pictures: Pictures) -> HeldOutPictures:
    return HeldOutPictures(pictures.pixels, pictures.pixels)


def autoencoder_stage(pictures: Pictures) -> Stage:
    return AutoencoderStage(CONFIG, pictures, held_out(pictures), CPU)


def decoder_stage(pictures: Pictures) -> Stage:
    return DecoderStage(CONFIG, small_autoencoder(), pictures, held_out(pictures), CPU)


def denoiser_stage(pictures: Pictures) -> Stage:
    model = small_autoencoder()
    scenes = encode_scenes(model, 1, len(pictures.scenes), close=True)
    stage = DenoiserStage(CONFIG, PLAN, model, scenes, scenes, CPU)
    stage.report = lambda averaged, sheet: {}  # type: ignore[method-assign]  # sampling has its own test below
    return stage


def descend(stage: Stage, weights: Iterable[nn.Parameter], learning_rate: float, steps: int) -> torch.Tensor:
    """The loss of a stage's first batch, before the last of some steps on that batch alone."""
    optimizer = torch.optim.Adam(weights, learning_rate)
    for _ in range(steps):
        loss = stage.losses(0)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss
