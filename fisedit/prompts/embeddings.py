"""Embeddings of a prompt that diffusers' pipeline cannot make: weighted, without the last layers, or of added words.

compel applies weights. Knows a pipeline's tokenizer and text encoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fisedit.errors import InputError
from fisedit.prompts.chunks import added_tokens, is_cut_off

if TYPE_CHECKING:
    from torch import Tensor

    from fisedit.prompts.weighting import WeightedPrompt


class TextModel(Protocol):
    """A pipeline's tokenizer and text encoder."""

    tokenizer: Any
    text_encoder: Any


class ShortenedEncoder:
    """A text encoder without some of its last layers, as compel and diffusers call it; the final norm stays.

    Args:
        encoder: A CLIPTextModel.
        skipped: Number of layers that are left out.

    Raises:
        InputError: It has too few layers.
    """

    def __init__(self, encoder: Any, skipped: int) -> None:
        layers = int(encoder.config.num_hidden_layers)
        if skipped >= layers:
            raise InputError(f"clip_skip must leave a layer of the text encoder's {layers}, got {skipped}")
        self._encoder, self._skipped, self.device, self.dtype = encoder, skipped, encoder.device, encoder.dtype

    def __call__(self, ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        """An output with `last_hidden_state` [B, T, D] alone."""
        from transformers.modeling_outputs import BaseModelOutput

        output = self._encoder(ids, attention_mask, output_hidden_states=True, return_dict=True)
        return BaseModelOutput(last_hidden_state=self.read(output))

    def read(self, output: Any) -> Tensor:
        """The embeddings [B, T, D] of an output with all hidden states."""
        text_model = getattr(self._encoder, "text_model", self._encoder)
        found: Tensor = text_model.final_layer_norm(output.hidden_states[-1 - self._skipped])
        return found

    def encode(self, text: str, tokenizer: Any) -> Tensor:
        """Embeddings [1, T, D] of a text, padded or truncated as diffusers' pipeline does."""
        found: Tensor = self(token_ids(text, tokenizer).to(self.device)).last_hidden_state
        return found


def token_ids(text: str, tokenizer: Any) -> Tensor:
    """The tokens [1, T] of a text, padded or truncated as diffusers' pipelines do."""
    length = tokenizer.model_max_length
    encoded = tokenizer(text, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    ids: Tensor = encoded.input_ids
    return ids


def embeddings(prompt: WeightedPrompt, pipe: TextModel, clip_skip: int = 0) -> Tensor | None:
    """Weighted prompt embeddings by compel.

    With a weight above 1, a token's embedding is moved away from the empty prompt's. With a weight below 1, the whole
    prompt's is also moved towards that of the prompt with the token masked.

    Args:
        prompt: The parsed prompt.
        pipe: The pipeline, whose tokenizer and text encoder are used.
        clip_skip: Layers of the text encoder that are left out at its end.

    Returns:
        [1, T, D] as the pipeline's own embeddings; None where those are exact. They are where all weights are 1, no
        layer is left out, no word was added to the tokenizer, and none is cut off. Diffusers warns of words that are
        cut off.

    Raises:
        InputError: The text encoder has too few layers.
    """
    encoder = ShortenedEncoder(pipe.text_encoder, clip_skip)
    weighted = weighted_embeddings(prompt, pipe.tokenizer, encoder)
    if weighted is not None:
        return weighted
    is_plain = not (clip_skip or added_tokens(pipe.tokenizer) or is_cut_off(prompt, pipe.tokenizer))
    return None if is_plain else encoder.encode(prompt.text, pipe.tokenizer)


def weighted_embeddings(prompt: WeightedPrompt, tokenizer: Any, encoder: ShortenedEncoder) -> Tensor | None:
    """Embeddings [1, T, D] of a prompt with weights, as in `embeddings`; None where all weights are 1.

    Args:
        prompt: The parsed prompt.
        tokenizer: The tokenizer of the encoder.
        encoder: The text encoder.
    """
    fragments = prompt.fragments(tokenizer)
    if all(weight == 1 for _, weight in fragments):
        return None
    from compel import EmbeddingsProvider

    texts, weights = (list(column) for column in zip(*fragments, strict=True))
    provider = EmbeddingsProvider(tokenizer, encoder)
    found: Tensor = provider.get_embeddings_for_weighted_prompt_fragments([texts], [weights], device=encoder.device)
    return found
