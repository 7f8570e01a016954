"""Random conditions of a UNet, of the shapes that it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fisedit.models.families.conditioning import Conditioning, example

if TYPE_CHECKING:
    import torch
    from diffusers import UNet2DConditionModel

TOKENS = 11


def random_conditions(unet: UNet2DConditionModel, batch: int = 2, make: torch.Generator | None = None) -> Conditioning:
    """Conditions of a batch."""
    return example(unet, batch, TOKENS, make)
