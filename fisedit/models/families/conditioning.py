"""Conditions of a UNet, one value: embeddings for cross-attention, and what is added to the embedding of the time.

Knows diffusers' names of a UNet's inputs; knows neither prompts nor encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fisedit.errors import AdapterError
from fisedit.models.families.family import SIZES

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel
    from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Conditioning:
    """The conditions of a UNet for B items.

    Args:
        text: Embeddings [B, T, D].
        added: Conditions [B, C] that are added to the time's embedding, by diffusers' names in `added_cond_kwargs`.
    """

    text: Tensor
    added: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.text.shape[1])

    @property
    def unet_inputs(self) -> dict[str, Any]:
        """The arguments of a diffusers UNet's forward."""
        return {"encoder_hidden_states": self.text, "added_cond_kwargs": dict(self.added) or None}

    @property
    def key(self) -> Tensor:
        """One tensor [B, ...] that is another one for other conditions."""
        if not self.added:
            return self.text
        parts = (self.text, *(self.added[name] for name in sorted(self.added)))
        return torch.cat([part.flatten(1).to(self.text) for part in parts], 1)

    def __len__(self) -> int:
        """B."""
        return len(self.text)

    def __getitem__(self, items: slice) -> Conditioning:
        """The conditions of some items."""
        return self._changed(lambda tensor: tensor[items])

    def to(self, dtype: torch.dtype) -> Conditioning:
        """The same in another dtype."""
        return self._changed(lambda tensor: tensor.to(dtype))

    def repeated(self, count: int) -> Conditioning:
        """Every item as often as given, one after another."""
        return self._changed(lambda tensor: tensor.repeat_interleave(count, 0))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Conditioning:
        return Conditioning(change(self.text), {name: change(tensor) for name, tensor in self.added.items()})


def reads_text_alone(unet: UNet2DConditionModel) -> bool:
    """Return whether a UNet reads nothing of prompts but embeddings, and so adds nothing to the time's.

    Args:
        unet: The UNet.
    """
    return unet.config.addition_embed_type is None


def added_embedding(
    unet: UNet2DConditionModel, latents: Tensor, added: Mapping[str, Tensor]
) -> tuple[Tensor | None, list[nn.Module]]:
    """Return what is added to the embedding of the time [B, E], or None, and the layers that make it.

    Args:
        unet: The UNet.
        latents: Latents [B, C, h, w].
        added: The conditions that are added.
    """
    if reads_text_alone(unet):
        return None, []
    found: Tensor = unet.get_aug_embed(latents, None, added)
    return found, [unet.add_embedding]


def check_reads_text_alone(unet: UNet2DConditionModel, what: str) -> None:
    """Check that a UNet reads nothing of prompts but embeddings.

    Args:
        unet: The UNet.
        what: An adapter that gives it nothing else, for the message.

    Raises:
        AdapterError: It reads more.
    """
    if not reads_text_alone(unet):
        raise AdapterError(
            f"{what} is for Stable Diffusion 1.x and 2.x, got Stable Diffusion XL, whose UNet reads pooled text and "
            "sizes as well; load a model that it was trained for"
        )


def example(unet: UNet2DConditionModel, batch: int, tokens: int, make: torch.Generator | None = None) -> Conditioning:
    """Random conditions of the shapes that a UNet reads, on its device, in its dtype.

    Args:
        unet: The UNet.
        batch: B.
        tokens: T.
        make: A generator of a CPU; None for torch's own.
    """

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make).to(unet.device, unet.dtype)

    config = unet.config
    text = drawn(batch, tokens, config.cross_attention_dim)
    if reads_text_alone(unet):
        return Conditioning(text)
    pooled = config.projection_class_embeddings_input_dim - SIZES * config.addition_time_embed_dim
    sizes = torch.randint(0, 1024, (batch, SIZES), generator=make).to(text)
    return Conditioning(text, {"text_embeds": drawn(batch, pooled), "time_ids": sizes})


def concatenated(parts: Sequence[Conditioning]) -> Conditioning:
    """Conditions of the items of all parts, one part after another."""
    return _combined(parts, torch.cat)


def interleaved(parts: Sequence[Conditioning]) -> Conditioning:
    """Conditions of E edits with B branches each, as B * E items, branch by branch."""
    return _combined(parts, lambda tensors: torch.stack(tensors, 1).flatten(0, 1))


def joined(parts: Sequence[Conditioning]) -> Conditioning:
    """Conditions whose tokens are those of all parts, one part after another; what is added is the first part's."""
    return Conditioning(torch.cat([part.text for part in parts], 1), parts[0].added)


def _combined(parts: Sequence[Conditioning], combine: Callable[[list[Tensor]], Tensor]) -> Conditioning:
    names = parts[0].added
    added = {name: combine([part.added[name] for part in parts]) for name in names}
    return Conditioning(combine([part.text for part in parts]), added)
