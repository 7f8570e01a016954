"""Prompts as the UNet reads them: weights, chunks of long prompts, both branches; and what cannot be read of them.

Knows a pipeline and configs; no masks, no history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from fisedit.adapters import textual_inversion
from fisedit.models.families.conditioning import Conditioning, joined
from fisedit.models.families.text_encoding import PromptChunk, chunk_encoder
from fisedit.models.injection import exclusive
from fisedit.models.vocabulary import vocabulary_of
from fisedit.prompts.chunks import MAX_CHUNKS, context_length, is_cut_off, split_chunks
from fisedit.prompts.syntax import syntax_notes
from fisedit.prompts.weighting import WeightedPrompt, clamped_notes, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fisedit.machine.model import Model
    from fisedit.runners.stepping import Graphs
    from fisedit.values import GenerationConfig


_MAX_PROMPTS = 64  # whose numbers of chunks are remembered


class PromptEncoder:
    """A pipeline's text encoder.

    Args:
        pipe: the model.
        graphs: The graphs of the pipeline, which may hold the encoder's.
    """

    def __init__(self, pipe: Model, graphs: Graphs) -> None:
        self._pipe, self._graphs = pipe, graphs
        self._lengths: dict[object, int] = {}  # chunks of the prompts of recent configs

    def encode(self, config: GenerationConfig, *, guided: bool) -> Conditioning:
        """The conditions of both prompts, the negative one's first; diffusers' own where nothing is weighted.

        There are 77 tokens for every chunk of the longer prompt.

        Args:
            config: The config of the picture.
            guided: whether both branches run.
        """
        encode, skipped = chunk_encoder(self._pipe), (config.clip_skip, config.negative_clip_skip)
        sizes = (config.height, config.width), config.sizes
        is_unprompted = not parse(config.negative_prompt).text.strip()
        with self._graphs.cache.captured_encoder(self._pipe.text_encoder):
            chunks = self._chunks(config, guided=guided)
            return joined([encode(PromptChunk(*each, *skipped, *sizes, is_unprompted)) for each in chunks])

    def _chunks(self, config: GenerationConfig, *, guided: bool) -> list[tuple[WeightedPrompt, WeightedPrompt | None]]:
        """The chunks of both prompts side by side, the negative one's None where it is not used."""
        prompts = (config.prompt, config.negative_prompt if guided else "")
        chunks = (split_chunks(parse(prompt), self._pipe.tokenizer)[:MAX_CHUNKS] for prompt in prompts)
        pairs = zip_longest(*chunks, fillvalue=parse(""))
        return [(prompt, negative if guided else None) for prompt, negative in pairs]

    def length(self, config: GenerationConfig, *, guided: bool) -> int:
        """T, the tokens of a config's embeddings; arguments as in `encode`."""
        tokenizer = self._pipe.tokenizer
        key = config.prompt, config.negative_prompt, config.textual_inversions, guided
        with exclusive(tokenizer):
            if key not in self._lengths:
                if len(self._lengths) >= _MAX_PROMPTS:
                    self._lengths.clear()
                self._lengths[key] = len(self._chunks(config, guided=guided))
            return self._lengths[key] * context_length(tokenizer)


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt as the UNet reads it.

    Args:
        embeddings: Its conditions.
        keys: keys and values by projection, filled as they are needed.
        notes: what the encoder could not read.
        regional: The conditions of the prompts of regions.
        read: The conditions that are read instead, where an edit erases; None for `embeddings`.
    """

    embeddings: Conditioning
    keys: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    regional: tuple[Conditioning, ...] = ()
    read: Conditioning | None = None


def encode_prompts(
    pipe: Model,
    encode: Callable[[GenerationConfig], Conditioning],
    config: GenerationConfig,
    regional: Sequence[str],
    *,
    read: str | None = None,
) -> EncodedPrompt:
    """Encode a config's prompt and those of regions; says so where the encoder cannot read all of them.

    Args:
        pipe: The pipeline whose words are read.
        encode: The encoder of its engine: maps a config's prompt to conditions.
        config: The config of the picture.
        regional: prompts of regions.
        read: A prompt that the edit reads instead, though later edits are made from the config's; or None.

    Raises:
        SessionError: words that the prompt was made with are not loaded now, or others that it holds are.
    """
    prompts = {"prompt": config.prompt} | {f"prompt {prompt!r:.40}": prompt for prompt in regional}
    prompts |= {"negative prompt": config.negative_prompt} if config.guided else {}
    notes = list(_guidance_notes(pipe, config))
    with torch.inference_mode(), exclusive(pipe.text_encoder, pipe.tokenizer):
        textual_inversion.check_words(pipe, config, regional)
        encoded = encode(config)
        own_read = None if read is None else encode(replace(config, prompt=read))
        own = tuple(encode(replace(config, prompt=prompt)) for prompt in regional)
        for name, prompt in prompts.items():
            parsed = parse(prompt)
            notes += [*syntax_notes(prompt, name), *clamped_notes(parsed, name)]
            chunks = split_chunks(parsed, pipe.tokenizer)
            if len(chunks) > MAX_CHUNKS:
                length = f"{MAX_CHUNKS} chunks of 75 tokens"
                notes.append(f"the {name} is longer than {length}, and the rest is not read; shorten it")
            if any(is_cut_off(chunk, pipe.tokenizer) for chunk in chunks[:MAX_CHUNKS]):
                notes.append(f"a word of the {name} has more than 75 tokens, and its end is not read; shorten it")
        vocabulary, known = vocabulary_of(pipe), textual_inversion.loaded(pipe)
        read_prompts = [config.prompt if read is None else read, *regional]
        if vocabulary:
            notes += filter(None, (vocabulary.note(parse(prompt).text, known) for prompt in read_prompts))
    return EncodedPrompt(encoded, notes=tuple(notes), regional=own, read=own_read)


def _guidance_notes(pipe: Model, config: GenerationConfig) -> tuple[str, ...]:
    """A note on guidance between 0 and 1, which is none, as in diffusers; distilled models read it."""
    if not 0 < config.guidance_scale < 1 or pipe.unet.config.time_cond_proj_dim is not None:
        return ()
    return (f"guidance_scale {config.guidance_scale:g} is no guidance, as 1 is; 7.5 is usual",)
