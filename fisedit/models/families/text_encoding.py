"""Chunks of prompts as a model's text encoders read them. Knows prompts and pipelines; neither configs nor edits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fisedit.errors import InputError
from fisedit.models.families.conditioning import Conditioning
from fisedit.prompts.embeddings import embeddings

if TYPE_CHECKING:
    from fisedit.machine.model import Model
    from fisedit.prompts.weighting import WeightedPrompt
    from fisedit.values.sizes import Sizes


@dataclass(frozen=True)
class PromptChunk:
    """A chunk of a prompt, and the one of the negative prompt beside it.

    Args:
        prompt: At most 75 tokens.
        negative: Likewise; None where no unconditional branch runs.
        clip_skip: Layers that are left out at the end of the text encoder.
        negative_clip_skip: The same for the negative prompt.
        size: Height and width of the picture in pixels.
        sizes: Those that are told in their place, if any.
        is_unprompted: Whether the whole negative prompt is empty.
    """

    prompt: WeightedPrompt
    negative: WeightedPrompt | None
    clip_skip: int
    negative_clip_skip: int
    size: tuple[int, int]
    sizes: Sizes | None
    is_unprompted: bool


ChunkEncoder = Callable[[PromptChunk], Conditioning]


def chunk_encoder(pipe: Model) -> ChunkEncoder:
    """Return the encoder of a model's chunks: its own `encode_chunk`, or else that of Stable Diffusion 1.x and 2.x."""
    own: ChunkEncoder | None = getattr(pipe, "encode_chunk", None)
    return own or (lambda chunk: _encode_chunk(pipe, chunk))


def _encode_chunk(pipe: Model, chunk: PromptChunk) -> Conditioning:
    """Embeddings [B, 77, D] by one text encoder; diffusers' own where nothing is weighted."""
    prompt, negative = chunk.prompt, chunk.negative
    if chunk.sizes is not None:
        told = ", ".join(chunk.sizes.as_dict())
        raise InputError(f"sizes are read by Stable Diffusion XL alone, got {told} and another model; leave them out")
    found, unconditional = pipe.encode_prompt(
        prompt.text,
        pipe.unet.device,
        1,
        negative is not None,
        negative.text if negative else None,
        prompt_embeds=embeddings(prompt, pipe, chunk.clip_skip),
        negative_prompt_embeds=embeddings(negative, pipe, chunk.negative_clip_skip) if negative else None,
    )
    return Conditioning(torch.cat([unconditional, found]) if negative is not None else found)
