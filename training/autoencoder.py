"""The autoencoder: its shape, its loss and its two training stages. Knows nothing of text or diffusion."""

import math
from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional as F

from fisedit.adapters.training.draws import generator_for
from fisedit.evaluation.scenes.drawing import Bytes
from training.config import Autoencoder, Config
from training.pictures import Pictures, sample_crops, save_sheet, to_bytes, to_tensor

_SHOWN = 8


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


def picture_loss(drawn: Tensor, truth: Tensor, gradient_weight: float) -> Tensor:
    """Absolute error at four scales and of the differences between neighbours.

    The coarse scales settle colours early, while a blurred picture gives the fine one no direction; the differences
    keep flat areas flat and edges sharp.
    """
    error = drawn - truth
    scales = [error, *(F.avg_pool2d(error, side) for side in (2, 4, 8))]
    across = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    return torch.stack([scale.abs().mean() for scale in scales]).sum() + gradient_weight * (across + down)


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
        truth = to_tensor(pixels[start : start + batch]).to(device)
        drawn.append(to_bytes(autoencoder.decode(autoencoder.encode(truth).latent_dist.mode()).sample))
    return np.concatenate(drawn)


def _report(autoencoder: AutoencoderKL, held_out: Bytes, sheet: Path) -> dict[str, float]:
    drawn = reconstruct(autoencoder, held_out)
    save_sheet(sheet, (held_out[:_SHOWN], drawn[:_SHOWN]))
    return {"psnr": psnr(drawn, held_out)}


class AutoencoderStage:
    """Encoder and decoder together, on crops."""

    name = "autoencoder"

    def __init__(self, config: Config, pictures: Pictures, held_out: Pictures, device: torch.device) -> None:
        torch.manual_seed(config.seed)
        self.settings, self.seed, self.device = config.autoencoder, config.seed, device
        self.pictures, self.held_out = pictures, held_out
        model = build_autoencoder(config.autoencoder, config.scenes.side)
        if config.start:
            known = AutoencoderKL.from_pretrained(config.start, subfolder="vae")
            model.load_state_dict(known.state_dict())
        self.model: nn.Module = model.to(device)

    def losses(self, step: int) -> dict[str, Tensor]:
        """Picture loss of sampled latents, and a faint pull of the latents towards a unit normal."""
        settings, noise = self.settings, generator_for(self.seed, step, self.device)
        truth = to_tensor(self._batch(step)).to(self.device)
        model = cast(AutoencoderKL, self.model)
        posterior = model.encode(truth).latent_dist
        drawn = model.decode(posterior.sample(generator=noise)).sample
        picture = picture_loss(drawn, truth, settings.gradient_weight)
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
        """PSNR on held-out pictures; the sheet has truth above, reconstruction below."""
        return _report(cast(AutoencoderKL, averaged), self.held_out.pixels, sheet)


class DecoderStage:
    """The decoder alone, on whole pictures; the latents stay where the denoiser learnt them."""

    name = "decoder"

    def __init__(
        self, config: Config, autoencoder: AutoencoderKL, pictures: Pictures, held_out: Pictures, device: torch.device
    ) -> None:
        self.config, self.device = config, device
        self.pictures, self.held_out = pictures, held_out
        for part in (autoencoder.encoder, autoencoder.quant_conv):
            cast(nn.Module, part).requires_grad_(False)
        self.model: nn.Module = autoencoder.to(device)

    def losses(self, step: int) -> dict[str, Tensor]:
        """Picture loss of latents with the faint noise that a denoiser leaves."""
        settings, noise = self.config.decoder, generator_for(self.config.seed, step, self.device)
        rng = np.random.default_rng((self.config.seed, step))
        rows = rng.integers(len(self.pictures.scenes), size=settings.plan.batch)
        truth = to_tensor(self.pictures.pixels[rows]).to(self.device)
        model = cast(AutoencoderKL, self.model)
        with torch.no_grad():
            latents = model.encode(truth).latent_dist.mode()
        scale = settings.noise / float(model.config["scaling_factor"])
        latents = latents + scale * torch.randn(latents.shape, generator=noise, device=self.device)
        loss = picture_loss(model.decode(latents).sample, truth, self.config.autoencoder.gradient_weight)
        return {"loss": loss}

    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """As the autoencoder's."""
        return _report(cast(AutoencoderKL, averaged), self.held_out.pixels, sheet)
