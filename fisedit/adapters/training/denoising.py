"""The training objective: the denoising error of a frozen UNet with an adapter.

Follows HelloMeme (arXiv 2410.22901): the same UNet reads the reference at t = 0 without words, and only the adapter
learns. A branch without prompt reads zeros for its reference, as in `adapters.row_column.reader`. Knows tensors;
neither files nor optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from diffusers.training_utils import compute_snr
from torch import Tensor, nn

from fisedit.adapters.base import inject_adapters
from fisedit.adapters.insertion_points import record_maps
from fisedit.adapters.row_column.reader import ReferenceCondition

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    from fisedit.adapters.row_column.attention import RowColumnAdapter
    from fisedit.adapters.training.examples import TrainingBatch
    from fisedit.adapters.training.training_settings import TrainingSettings


class ConditionedUNet(nn.Module):
    """A UNet with an adapter. Its parameters, as a module, are the adapter's only.

    Args:
        unet: frozen.
        adapter: The adapter that is trained.
    """

    def __init__(self, unet: UNet2DConditionModel, adapter: RowColumnAdapter) -> None:
        super().__init__()
        self.adapter, self._frozen = adapter, (unet,)  # a tuple, so that the UNet is no part of this module

    def forward(
        self,
        noised: Tensor,
        steps: Tensor,
        text: Tensor,
        references: Tensor,
        empty_prompt: Tensor,
        controls: Mapping[str, Tensor] | None = None,
        reference_maps: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Predict the noise.

        Args:
            noised: latents [B, 4, h, w].
            steps: int64 [B], timesteps of the latents.
            text: [B, T, D].
            references: clean latents [B, 4, h, w].
            empty_prompt: embedding of the empty prompt, [1, T, D].
            controls: [B, C, h', w'] by insertion point.
            reference_maps: the references' maps by insertion point where they are cached (see `read_maps`).

        Returns:
            [B, 4, h, w].
        """
        unet = self._frozen[0]
        condition = (
            ReferenceCondition(self.adapter, self.adapter.read(reference_maps))
            if reference_maps
            else self.condition(references, empty_prompt)
        )
        with inject_adapters(unet, [condition], controls):
            prediction: Tensor = unet(noised, steps, text, return_dict=False)[0]
        return prediction

    def condition(self, references: Tensor, empty_prompt: Tensor) -> ReferenceCondition:
        """The adapter with what it reads of references.

        Args:
            references: clean latents [B, 4, h, w].
            empty_prompt: embedding of the empty prompt, [1, T, D].
        """
        return ReferenceCondition(self.adapter, self.adapter.read(self.read_maps(references, empty_prompt)))

    def read_maps(self, references: Tensor, empty_prompt: Tensor) -> dict[str, Tensor]:
        """The frozen UNet's maps of references.

        Args:
            references: clean latents [B, 4, h, w].
            empty_prompt: embedding of the empty prompt, [1, T, D].

        Returns:
            [B, C, h', w'] by insertion point of the adapter.
        """
        return record_maps(
            self._frozen[0], references, empty_prompt.expand(len(references), -1, -1), tuple(self.adapter.channels)
        )


def denoising_loss(
    model: nn.Module,
    scheduler: DDPMScheduler,
    batch: TrainingBatch,
    empty_prompt: Tensor,
    settings: TrainingSettings,
    noise: torch.Generator,
) -> Tensor:
    """The weighted squared error of one batch, whose noise levels are spread evenly.

    Args:
        model: a `ConditionedUNet`, or accelerate's wrapper of it.
        scheduler: The scheduler that adds the noise.
        batch: A batch of examples.
        empty_prompt: embedding of the empty prompt, [1, T, D].
        settings: dropout and weights.
        noise: the only source of randomness.

    Returns:
        A scalar.
    """
    count, device = len(batch.targets), batch.targets.device
    added = torch.randn(batch.targets.shape, generator=noise, device=device)
    shares = (torch.arange(count, device=device) + torch.rand(1, generator=noise, device=device)) / count
    total = int(scheduler.config.num_train_timesteps)
    steps = (shares * total).long().clamp_max(total - 1)
    dropped = (torch.rand(count, generator=noise, device=device) < settings.dropout)[:, None, None]
    text = torch.where(dropped, empty_prompt, batch.text)
    references = batch.references.masked_fill(dropped[..., None], 0)
    noised = scheduler.add_noise(batch.targets, added, steps)
    reference_maps = {name: torch.where(dropped[..., None], x[:1], x[1:]) for name, x in batch.reference_maps.items()}
    prediction = model(noised, steps, text, references, empty_prompt, batch.controls, reference_maps)
    velocity = scheduler.config.prediction_type == "v_prediction"
    target = scheduler.get_velocity(batch.targets, added, steps) if velocity else added
    weights = level_weights(scheduler, steps, settings.snr_cap) * region_weights(batch.regions, settings.region_weight)
    loss: Tensor = (weights * (prediction.float() - target).square()).mean()
    return loss


def level_weights(scheduler: DDPMScheduler, steps: Tensor, cap: float) -> Tensor:
    """Weights of noise levels: min-SNR (Hang et al., arXiv 2303.09556).

    Args:
        scheduler: The scheduler of the noise.
        steps: int64 [B].
        cap: on the signal-to-noise ratio; 0 weighs all levels alike.

    Returns:
        [B, 1, 1, 1].
    """
    if not cap:
        return torch.ones_like(steps, dtype=torch.float32)[:, None, None, None]
    ratio: Tensor = compute_snr(scheduler, steps)
    velocity = scheduler.config.prediction_type == "v_prediction"
    return (ratio.clamp_max(cap) / (ratio + 1 if velocity else ratio))[:, None, None, None]


def region_weights(regions: Tensor, weight: float) -> Tensor:
    """Weights of errors: `weight` within regions, 1 outside, between them at their boundaries.

    Args:
        regions: [B, 1, h, w], in [0, 1].
        weight: 0 or more.
    """
    return 1 + (weight - 1) * regions
