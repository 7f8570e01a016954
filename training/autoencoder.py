"""The autoencoder: its shape, its loss and its two training stages. Knows nothing of text or diffusion."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.scenes.appearance import Appearance
from benchmarks.scenes.drawing import Bytes
from fisedit.adapters.training.draws import generator_for
from training.config import Autoencoder, Config
from training.gamut import HUES, colour_error, drawn_objects
from training.models import adopt
from training.pictures import FreshPictures, Supply, draw_pictures, sample_crops, save_sheet, to_bytes, to_tensor
from training.quick import skip_divisions

_SHOWN = 8
_PAINTED = 16  # held-out pictures whose objects take random looks
_HUED = 6  # objects whose mean colour is followed, in every other hue
_SATURATION = 0.9


def build_autoencoder(settings: Autoencoder, side: int) -> AutoencoderKL:
    """Stable Diffusion's autoencoder, factor 8 and four latent channels, only narrower."""
    levels = len(settings.channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=settings.channels,
        layers_per_block=settings.layers,
        latent_channels=4,
        norm_num_groups=settings.groups,
        sample_size=side,
    ).to(memory_format=torch.channels_last)


def picture_loss(drawn: Tensor, truth: Tensor, gradient_weight: float, colour_weight: float = 0.0) -> Tensor:
    """Absolute error at four scales, of the differences between neighbours, and of hues.

    The coarse scales settle colours early, while a blurred picture gives the fine one no direction; the differences
    keep flat areas flat and edges sharp. Four channels for 64 pixels rather keep shapes than hues, so that a pink pig
    comes back beige: the differences between red, green and blue, over 4 pixels each way, count by themselves.
    """
    error = drawn - truth
    scales = [error, *(F.avg_pool2d(error, side) for side in (2, 4, 8))]
    across = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    loss = torch.stack([scale.abs().mean() for scale in scales]).sum() + gradient_weight * (across + down)
    if not colour_weight:
        return loss
    red, green, blue = scales[2].unbind(1)
    return loss + colour_weight * ((red - green).abs().mean() + (0.5 * (red + green) - blue).abs().mean())


def psnr(drawn: Bytes, truth: Bytes) -> float:
    """Mean over pictures of the peak signal-to-noise ratio in dB; uint8 [B, S, S, 3] both."""
    error = np.square(drawn.astype(np.float64) - truth).mean(axis=(1, 2, 3))
    return float(np.mean(10 * np.log10(255**2 / np.maximum(error, 1e-12))))


@torch.no_grad()
def reconstruct(autoencoder: AutoencoderKL, pixels: Bytes, batch: int = 16) -> Bytes:
    """Pictures through encoder and decoder, without sampling noise: uint8 [B, S, S, 3]."""
    device = autoencoder.device
    drawn = []
    for start in range(0, len(pixels), batch):
        truth = to_tensor(pixels[start : start + batch], device)
        drawn.append(to_bytes(autoencoder.decode(autoencoder.encode(truth).latent_dist.mode()).sample))
    return np.concatenate(drawn)


@dataclass(frozen=True)
class HeldOutPictures:
    """Pictures that no stage trains on: scenes as they are said, and scenes with painted objects."""

    plain: Bytes
    painted: Bytes

    def report(self, autoencoder: AutoencoderKL, sheet: Path) -> dict[str, float]:
        """PSNR of both, and how far the worst hue is off; the sheet has truth above, reconstruction below."""
        drawn, painted = reconstruct(autoencoder, self.plain), reconstruct(autoencoder, self.painted)
        rows = (self.plain[:_SHOWN], drawn[:_SHOWN], self.painted[:_SHOWN], painted[:_SHOWN])
        save_sheet(sheet, [row for row in rows if len(row) == len(rows[0])])
        objects = drawn_objects(_HUED, self.plain.shape[1])
        hues = [colour_error(autoencoder, objects, Appearance((hue, hue), _SATURATION)) for hue in HUES[::2]]
        return {
            "psnr": psnr(drawn, self.plain),
            "psnr_painted": psnr(painted, self.painted),
            "worst_hue": max(hues),
        }


def held_out_pictures(config: Config) -> HeldOutPictures:
    """The scenes that a run is measured on while it goes."""
    scenes = config.scenes
    plain = draw_pictures(scenes.held_out_seed, scenes.held_out, scenes.side, scenes.objects)
    painted = draw_pictures(
        scenes.held_out_seed + 1, min(_PAINTED, scenes.held_out), scenes.side, scenes.objects, painted=1.0
    )
    return HeldOutPictures(plain.pixels, painted.pixels)


def training_pictures(config: Config) -> Supply:
    """The scenes that the autoencoder sees."""
    scenes = config.scenes
    if not scenes.count:
        return FreshPictures(scenes.side, scenes.painted, scenes.objects)
    return draw_pictures(scenes.seed, scenes.count, scenes.side, scenes.objects, scenes.painted)


class AutoencoderStage:
    """Encoder and decoder together, on crops."""

    name = "autoencoder"

    def __init__(self, config: Config, pictures: Supply, held_out: HeldOutPictures, device: torch.device) -> None:
        torch.manual_seed(config.seed)
        self.settings, self.seed, self.device = config.autoencoder, config.seed, device
        self.pictures, self.held_out = pictures, held_out
        model = build_autoencoder(config.autoencoder, config.scenes.side)
        if config.start:
            adopt(model, AutoencoderKL.from_pretrained(config.start, subfolder="vae").state_dict())
        skip_divisions(model)
        self.model: nn.Module = model.to(device)

    def losses(self, step: int) -> dict[str, Tensor]:
        """Picture loss of sampled latents, and a faint pull of the latents towards a unit normal."""
        settings, noise = self.settings, generator_for(self.seed, step, self.device)
        truth = to_tensor(self._batch(step), self.device)
        model = cast(AutoencoderKL, self.model)
        posterior = model.encode(truth).latent_dist
        drawn = model.decode(posterior.sample(generator=noise)).sample
        picture = picture_loss(drawn, truth, settings.gradient_weight, settings.colour_weight)
        divergence = posterior.kl().mean() / math.prod(posterior.mean.shape[1:])
        return {
            "loss": picture + settings.divergence_weight * divergence,
            "picture": picture.detach(),
            "divergence": divergence.detach(),
            "spread": posterior.std.detach().mean() / posterior.mean.detach().std(),
        }

    def _batch(self, step: int) -> Bytes:
        """Crops, or every so often as many pixels of whole pictures, whose group norms see more flat sky."""
        settings, rng = self.settings, np.random.default_rng((self.seed, step))
        whole = step % settings.whole_every == settings.whole_every - 1
        side = self.pictures.side if whole else settings.crop
        batch = max(1, settings.plan.batch * settings.crop**2 // side**2)
        return sample_crops(self.pictures, rng, batch, side, settings.on_objects)

    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """How well held-out pictures come back."""
        return self.held_out.report(cast(AutoencoderKL, averaged), sheet)


class DecoderStage:
    """The decoder alone, on whole pictures; the latents stay where the denoiser learnt them."""

    name = "decoder"

    def __init__(
        self,
        config: Config,
        autoencoder: AutoencoderKL,
        pictures: Supply,
        held_out: HeldOutPictures,
        device: torch.device,
    ) -> None:
        self.config, self.device = config, device
        self.pictures, self.held_out = pictures, held_out
        for part in (autoencoder.encoder, autoencoder.quant_conv):
            cast(nn.Module, part).requires_grad_(False)
        skip_divisions(autoencoder)
        self.model: nn.Module = autoencoder.to(device)

    def losses(self, step: int) -> dict[str, Tensor]:
        """Picture loss of latents with the faint noise that a denoiser leaves."""
        settings, noise = self.config.decoder, generator_for(self.config.seed, step, self.device)
        rng = np.random.default_rng((self.config.seed, step))
        taken = [self.pictures.take(rng).pixels for _ in range(settings.plan.batch)]
        truth = to_tensor(np.stack(taken), self.device)
        model = cast(AutoencoderKL, self.model)
        with torch.no_grad():
            latents = model.encode(truth).latent_dist.mode()
        scale = settings.noise / float(model.config["scaling_factor"])
        latents = latents + scale * torch.randn(latents.shape, generator=noise, device=self.device)
        weights = self.config.autoencoder
        loss = picture_loss(model.decode(latents).sample, truth, weights.gradient_weight, weights.colour_weight)
        return {"loss": loss}

    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """As the autoencoder's."""
        return self.held_out.report(cast(AutoencoderKL, averaged), sheet)
