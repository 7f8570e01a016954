"""Prompts as the UNet reads them, and what the text encoder cannot read of them.

Knows the engine and configs; no masks, no history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from fisedit.adapters import textual_inversion
from fisedit.models.injection import exclusive
from fisedit.models.prompt_chunks import MAX_CHUNKS, is_cut_off, split_chunks
from fisedit.models.prompt_weighting import parse
from fisedit.models.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from torch import Tensor

    from fisedit.sampling.denoise import Engine
    from fisedit.values import GenerationConfig


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt as the UNet reads it.

    Args:
        embeddings: [B, T, D].
        keys: keys and values by projection, filled as they are needed.
        notes: what the encoder could not read.
        regional: embeddings [B, T, D] of the prompts of regions.
        read: embeddings [B, T, D] that are read instead, where an edit erases; None for `embeddings`.
    """

    embeddings: Tensor
    keys: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    regional: tuple[Tensor, ...] = ()
    read: Tensor | None = None


def encode_prompts(
    engine: Engine, config: GenerationConfig, regional: Sequence[str], *, reads_nothing: bool = False
) -> EncodedPrompt:
    """Encode a config's prompt and those of regions; says so where the encoder cannot read all of them.

    Args:
        engine: that encodes.
        config: of the picture.
        regional: prompts of regions.
        reads_nothing: the edit reads no words, though later edits are made from the prompt's.

    Raises:
        SessionError: words that the prompt was made with are not loaded now, or others that it holds are.
    """
    pipe = engine.pipe
    prompts = {"prompt": config.prompt} | {f"prompt {prompt!r:.40}": prompt for prompt in regional}
    prompts |= {"negative prompt": config.negative_prompt} if config.guided else {}
    notes: list[str] = []
    with torch.inference_mode(), exclusive(pipe.text_encoder, pipe.tokenizer):
        textual_inversion.check_words(pipe, config, regional)
        embeddings = engine.encode(config)
        read = engine.encode(replace(config, prompt="")) if reads_nothing else None
        own = tuple(engine.encode(replace(config, prompt=prompt)) for prompt in regional)
        for name, prompt in prompts.items():
            chunks = split_chunks(parse(prompt), pipe.tokenizer)
            if len(chunks) > MAX_CHUNKS:
                length = f"{MAX_CHUNKS} chunks of 75 tokens"
                notes.append(f"the {name} is longer than {length}, and the rest is not read; shorten it")
            if any(is_cut_off(chunk, pipe.tokenizer) for chunk in chunks[:MAX_CHUNKS]):
                notes.append(f"a word of the {name} has more than 75 tokens, and its end is not read; shorten it")
        vocabulary, known = vocabulary_of(pipe), textual_inversion.loaded(pipe)
        read_prompts = [] if reads_nothing else [config.prompt, *regional]
        if vocabulary:
            notes += filter(None, (vocabulary.note(parse(prompt).text, known) for prompt in read_prompts))
    return EncodedPrompt(embeddings, notes=tuple(notes), regional=own, read=read)
