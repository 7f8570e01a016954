"""The denoiser's stage: text encoder (unless frozen) and UNet, objective and grounding. Knows nothing of drawing."""

from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor, nn
from transformers import CLIPTextModel

from fisedit.adapters.training.draws import generator_for
from training.config import Config, Plan
from training.grounding import grounding_losses, record_cross_attention
from training.latents import LatentScenes
from training.linear import convolve_linears
from training.models import adopt, adopt_words, build_pipeline, build_scheduler, build_text_encoder, build_unet
from training.pictures import save_sheet
from training.tokens import encode

SHOWN = (
    "a cat and a cake on a beach",
    "a dog and a cake on a beach",
    "a fox wearing a hat at night under the moon",
    "a castle next to a tree in the snow",
    "a red car in the desert under a rocket",
    "a panda, a gift and a pumpkin on the grass",
    "a small robot and a big owl by the sea",
    "a frog on top of a green mushroom in the forest",
)
_HELD_OUT_BATCH = 64


class DenoiserStage:
    """Predicts noise or velocity from noised latents and text, its words taught to attend to their objects."""

    name = "denoiser"

    def __init__(
        self,
        config: Config,
        plan: Plan,
        autoencoder: AutoencoderKL,
        scenes: LatentScenes,
        held_out: LatentScenes,
        device: torch.device,
    ) -> None:
        torch.manual_seed(config.seed)
        self.settings, self.plan, self.seed, self.device = config.denoiser, plan, config.seed, device
        self.autoencoder, self.scenes, self.held_out = autoencoder, scenes.to(device), held_out.to(device)
        unet = build_unet(config.denoiser, scenes.means.shape[-1])
        self.maps = record_cross_attention(unet)
        if config.start:
            known = UNet2DConditionModel.from_pretrained(config.start, subfolder="unet").float().state_dict()
            excluded = {name for name in known for part in config.start_without if part in name}
            adopt(unet, {name: known[name] for name in known.keys() - excluded})
        text_encoder = build_text_encoder(config.denoiser)
        if "text_encoder" not in config.start_without and (Path(config.start) / "text_encoder").is_dir():
            adopt_words(text_encoder, Path(config.start))
        parts: dict[str, nn.Module] = {"text_encoder": text_encoder, "unet": unet}
        for name in config.frozen:
            parts[name].requires_grad_(False)
        self.model: nn.Module = nn.ModuleDict(parts).to(device)
        if device.type == "cpu":
            convolve_linears(self.model)
        self.kept = build_scheduler(config.denoiser.prediction).alphas_cumprod.to(device)
        self.no_text = torch.tensor(encode([""]), device=device)

    def losses(self, step: int) -> dict[str, Tensor]:
        """The weighted denoising loss of one batch, and TokenCompose's two."""
        settings, noise = self.settings, generator_for(self.seed, step, self.device)
        batch = self.plan.batch
        rows = torch.randint(len(self.scenes), (batch,), generator=noise, device=self.device)
        dropped = torch.rand(batch, generator=noise, device=self.device) < settings.text_dropout
        scenes = self.scenes.pick(rows)
        tokens = torch.where(dropped[:, None], self.no_text, scenes.tokens)
        denoising = self._denoising(self.model, scenes, tokens, noise)
        positions = scenes.positions.masked_fill(dropped[:, None], -1)
        least = scenes.means.shape[-1] // 2
        token, pixel = grounding_losses(self.maps.take(), positions, scenes.masks, least)
        loss = denoising + settings.token_weight * token + settings.pixel_weight * pixel
        return {"loss": loss, "denoising": denoising.detach(), "token": token.detach(), "pixel": pixel.detach()}

    def _denoising(self, model: nn.Module, scenes: LatentScenes, tokens: Tensor, noise: torch.Generator) -> Tensor:
        """Min-SNR weighted squared error (Hang et al., arXiv 2303.09556); steps spread evenly over the batch."""
        means = scenes.means
        clean = means + scenes.spreads * torch.randn(means.shape, generator=noise, device=self.device)
        added = torch.randn(means.shape, generator=noise, device=self.device)
        shares = (
            torch.arange(len(scenes), device=self.device) + torch.rand(1, generator=noise, device=self.device)
        ) / len(scenes)
        steps = (shares * len(self.kept)).long().clamp_max(len(self.kept) - 1)
        kept = self.kept[steps][:, None, None, None]
        noised = kept.sqrt() * clean + (1 - kept).sqrt() * added
        text = model.get_submodule("text_encoder")(tokens).last_hidden_state
        guess = model.get_submodule("unet")(noised.contiguous(memory_format=torch.channels_last), steps, text).sample
        velocity = self.settings.prediction == "v_prediction"
        target = kept.sqrt() * added - (1 - kept).sqrt() * clean if velocity else added
        ratio = kept / (1 - kept)
        weight = ratio.clamp_max(self.settings.snr_cap) / (ratio + 1 if velocity else ratio)
        loss: Tensor = (weight * (guess.float() - target).square()).mean()
        return loss

    @torch.no_grad()
    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """Denoising loss on held-out scenes with fixed noise; the sheet shows SHOWN from fixed seeds."""
        text_encoder = cast(CLIPTextModel, averaged.get_submodule("text_encoder"))
        unet = cast(UNet2DConditionModel, averaged.get_submodule("unet"))
        unet.set_attn_processor(AttnProcessor2_0())
        rows = torch.arange(min(_HELD_OUT_BATCH, len(self.held_out)), device=self.device)
        noise = generator_for(self.seed, 0, self.device)
        scenes = self.held_out.pick(rows)
        loss = self._denoising(averaged, scenes, scenes.tokens, noise)
        pipeline = build_pipeline(self.autoencoder, text_encoder, unet, self.settings.prediction)
        pipeline.set_progress_bar_config(disable=True)
        seeds = [generator_for(self.seed, index, self.device) for index in range(len(SHOWN))]
        drawn = pipeline(list(SHOWN), num_inference_steps=20, guidance_scale=4.0, generator=seeds, output_type="np")
        pictures = np.round(drawn.images * 255).astype(np.uint8)
        save_sheet(sheet, (pictures[:4], pictures[4:]))
        return {"loss": float(loss)}
