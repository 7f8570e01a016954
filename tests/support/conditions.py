"""Random conditions of a UNet, of the shapes that it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fisedit.models.families.conditioning import Conditioning

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

TOKENS = 11


def random_conditions(
    unet: UNet2DConditionModel, batch: int = 2, make: torch.Generator | None = None, device: str = "cpu"
) -> Conditioning:
    """Conditions of a batch."""
    text = torch.randn(batch, TOKENS, unet.config.cross_attention_dim, generator=make, device=device)
    if unet.config.addition_embed_type is None:
        return Conditioning(text)
    pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
    added = {
        "text_embeds": torch.randn(batch, pooled, generator=make, device=device),
        "time_ids": torch.randint(0, 1024, (batch, 6), generator=make, device=device).float(),
    }
    return Conditioning(text, added)
