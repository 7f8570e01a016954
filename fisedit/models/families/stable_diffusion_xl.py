"""Stable Diffusion XL (arXiv 2307.01952) as one `Model`: two text encoders in place of one, and pooled conditions.

Knows diffusers' pipeline; everything behind it sees a UNet, an autoencoder and `Conditioning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fisedit.models.families.conditioning import Conditioning, concatenated
from fisedit.prompts.embeddings import ShortenedEncoder, token_ids, weighted_embeddings
from fisedit.values.sizes import Sizes

if TYPE_CHECKING:
    from fisedit.machine.model import Model
    from fisedit.models.families.text_encoding import PromptChunk
    from fisedit.prompts.weighting import WeightedPrompt

_MODEL = "fisedit_model"


class TextEncoders(nn.ModuleList):
    """Both text encoders as one module, for locks, LoRAs and fingerprints."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first one's weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device of the first one's weights."""
        return next(self.parameters()).device


class _PenultimateEncoder(ShortenedEncoder):
    """A text encoder without one or more of its last layers, and without the norm behind them."""

    def read(self, output: Any) -> Tensor:
        """The embeddings [B, T, D] of an output with all hidden states."""
        found: Tensor = output.hidden_states[-1 - self._skipped]
        return found


class StableDiffusionXL:
    """A diffusers pipeline of Stable Diffusion XL.

    What is not here is the pipeline's own.

    Args:
        pipe: A `StableDiffusionXLPipeline`.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self._encoders = TextEncoders([pipe.text_encoder, pipe.text_encoder_2])

    def __getattr__(self, name: str) -> Any:
        """Return what the pipeline has by this name."""
        if name in ("pipe", "_encoders"):  # before they are set
            raise AttributeError(name)
        return getattr(self.pipe, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate densely, as the pipeline does."""
        return self.pipe(*args, **kwargs)

    @property
    def text_encoder(self) -> TextEncoders:
        """Both text encoders, as long as they are the pipeline's."""
        own = [self.pipe.text_encoder, self.pipe.text_encoder_2]
        if any(one is not other for one, other in zip(own, self._encoders, strict=True)):
            self._encoders = TextEncoders(own)
        return self._encoders

    @property
    def scheduler(self) -> Any:
        """The scheduler of the pipeline."""
        return self.pipe.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self.pipe.scheduler = scheduler

    def encode_chunk(self, chunk: PromptChunk) -> Conditioning:
        """Encode a chunk of prompts as diffusers' pipeline does; a weight moves embeddings, and not the pooled ones.

        An empty negative prompt is all zeros where the model was trained so.
        """
        unprompted, prompted = (chunk.sizes or Sizes()).numbers(chunk.size)
        text, pooled = self._encode(chunk.prompt, chunk.clip_skip)
        positive = _conditioning(text, pooled, prompted)
        if chunk.negative is None:
            return positive
        if chunk.is_unprompted and self.pipe.config.force_zeros_for_empty_prompt:
            text, pooled = torch.zeros_like(text), torch.zeros_like(pooled)
        else:
            text, pooled = self._encode(chunk.negative, chunk.negative_clip_skip)
        return concatenated([_conditioning(text, pooled, unprompted), positive])

    def _encode(self, prompt: WeightedPrompt, clip_skip: int) -> tuple[Tensor, Tensor]:
        """Both encoders' embeddings side by side [1, 77, D1 + D2], and the second one's pooled ones [1, D]."""
        pipe, found, pooled = self.pipe, list[Tensor](), torch.empty(0)
        for tokenizer, encoder in (
            (pipe.tokenizer, pipe.text_encoder),
            (pipe.tokenizer_2, pipe.text_encoder_2),
        ):
            shortened = _PenultimateEncoder(encoder, clip_skip + 1)
            output = encoder(token_ids(prompt.text, tokenizer).to(encoder.device), output_hidden_states=True)
            weighted = weighted_embeddings(prompt, tokenizer, shortened)
            found.append(shortened.read(output) if weighted is None else weighted)
            pooled = output[0]
        return torch.cat(found, -1).to(pooled.dtype), pooled


def _conditioning(text: Tensor, pooled: Tensor, sizes: Sequence[int]) -> Conditioning:
    """The conditions [1, ...] of a prompt, with the sizes of the original, the crop and the target."""
    return Conditioning(text, {"text_embeds": pooled, "time_ids": torch.tensor([sizes]).to(text)})


def as_model(pipe: Any) -> Model:
    """Return a diffusers pipeline as the engine reads it: of Stable Diffusion 1.x and 2.x it is that itself.

    Args:
        pipe: The pipeline, or a model.
    """
    if isinstance(pipe, StableDiffusionXL) or not hasattr(pipe, "text_encoder_2"):
        model: Model = pipe
        return model
    found: Model = vars(pipe).setdefault(_MODEL, StableDiffusionXL(pipe))
    return found
