"""What is descended: the denoising error of a frozen UNet with an adapter that is being trained.

Follows HelloMeme (arXiv 2410.22901) for what runs: the reference is read by the same UNet at t = 0 without words, and
the adapter is all that learns. A branch without prompt reads zeros for its reference, as
`fisedit.adapters.references` lets it. Knows tensors; neither files nor optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from diffusers.training_utils import compute_snr
from torch import Tensor, nn

from fisedit.adapters.base import inject_adapters
from fisedit.adapters.insertion_points import tap_maps
from fisedit.adapters.references import ReferenceCondition

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    from fisedit.adapters.row_column import RowColumnAdapter
    from fisedit.adapters.training.examples import Batch
    from fisedit.adapters.training.settings import Settings


class Guided(nn.Module):
    """A UNet as an adapter guides it. Its weights, as a module, are the adapter's alone."""

    def __init__(self, unet: UNet2DConditionModel, adapter: RowColumnAdapter) -> None:
        super().__init__()
        self.adapter, self._frozen = adapter, (unet,)  # a tuple, so that the UNet is no part of this module

    def forward(
        self,
        noised: Tensor,
        steps: Tensor,
        text: Tensor,
        references: Tensor,
        silence: Tensor,
        controls: Mapping[str, Tensor] | None = None,
        seen: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """What the UNet predicts, [B, 4, h, w].

        Args:
            noised: latents [B, 4, h, w] at int64 `steps` [B]. text: [B, T, D]. references: clean latents [B, 4, h, w].
            silence: the text of no words, [1, T, D]. controls: place -> [B, C, h', w'].
            seen: the references' maps by place, where they are known; see `look`.
        """
        unet = self._frozen[0]
        condition = (
            ReferenceCondition(self.adapter, self.adapter.read(seen)) if seen else self.condition(references, silence)
        )
        with inject_adapters(unet, [condition], controls):
            guess: Tensor = unet(noised, steps, text, return_dict=False)[0]
        return guess

    def condition(self, references: Tensor, silence: Tensor) -> ReferenceCondition:
        """The adapter and what it reads of references [B, 4, h, w]."""
        return ReferenceCondition(self.adapter, self.adapter.read(self.look(references, silence)))

    def look(self, references: Tensor, silence: Tensor) -> dict[str, Tensor]:
        """The frozen UNet's maps of references [B, 4, h, w] at the adapter's places: place -> [B, C, h', w']."""
        return tap_maps(
            self._frozen[0], references, silence.expand(len(references), -1, -1), tuple(self.adapter.channels)
        )


def denoising_loss(
    model: nn.Module,
    scheduler: DDPMScheduler,
    batch: Batch,
    silence: Tensor,
    settings: Settings,
    noise: torch.Generator,
) -> Tensor:
    """The weighted squared error of one batch; noise levels are spread evenly over it.

    Args:
        model: a `Guided`, or what accelerate wraps it in. noise: the only source of randomness.
    """
    count, device = len(batch.targets), batch.targets.device
    added = torch.randn(batch.targets.shape, generator=noise, device=device)
    shares = (torch.arange(count, device=device) + torch.rand(1, generator=noise, device=device)) / count
    total = int(scheduler.config.num_train_timesteps)
    steps = (shares * total).long().clamp_max(total - 1)
    dropped = (torch.rand(count, generator=noise, device=device) < settings.dropout)[:, None, None]
    text = torch.where(dropped, silence, batch.text)
    references = batch.references.masked_fill(dropped[..., None], 0)
    noised = scheduler.add_noise(batch.targets, added, steps)
    seen = {name: torch.where(dropped[..., None], x[:1], x[1:]) for name, x in batch.seen.items()}
    guess = model(noised, steps, text, references, silence, batch.controls, seen)
    velocity = scheduler.config.prediction_type == "v_prediction"
    wanted = scheduler.get_velocity(batch.targets, added, steps) if velocity else added
    weights = level_weights(scheduler, steps, settings.snr_cap) * region_weights(batch.regions, settings.region_weight)
    loss: Tensor = (weights * (guess.float() - wanted).square()).mean()
    return loss


def level_weights(scheduler: DDPMScheduler, steps: Tensor, cap: float) -> Tensor:
    """What noise levels [B] count, [B, 1, 1, 1]: min-SNR (Hang et al., arXiv 2303.09556); all alike without a cap."""
    if not cap:
        return torch.ones_like(steps, dtype=torch.float32)[:, None, None, None]
    ratio: Tensor = compute_snr(scheduler, steps)
    velocity = scheduler.config.prediction_type == "v_prediction"
    return (ratio.clamp_max(cap) / (ratio + 1 if velocity else ratio))[:, None, None, None]


def region_weights(regions: Tensor, weight: float) -> Tensor:
    """What errors count: `weight` within regions [B, 1, h, w], 1 outside, between them at their rims."""
    return 1 + (weight - 1) * regions
