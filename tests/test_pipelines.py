"""The random pipelines: the same for the same seed, alive in every layer, and words that a test can rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.oracle import Recipe, dense_generate, record
from tests.pipelines import SHAPES, WORDS, build_pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffusers import StableDiffusionPipeline

    Pipelines = Mapping[str, StableDiffusionPipeline]

every_shape = pytest.mark.parametrize("name", SHAPES)


@every_shape
def test_pipelines_are_alive_and_reproducible(pipelines: Pipelines, name: str) -> None:
    pipe, again = pipelines[name], build_pipeline(name)
    assert all(torch.equal(a, b) for a, b in zip(pipe.unet.parameters(), again.unet.parameters(), strict=True))
    cat = dense_generate(pipe, Recipe("a cat on a beach"))
    dog = dense_generate(pipe, Recipe("a dog on a beach"))
    assert (cat.latents - dog.latents)[-1].std() > 0.1
    assert 0.1 < np.asarray(cat.image).std() / 255 < 0.4


def test_known_words_are_single_tokens(pipelines: Pipelines) -> None:
    tokenizer = pipelines["demo"].tokenizer
    assert all(len(tokenizer(word).input_ids) == 3 for word in WORDS)
    assert tokenizer.tokenize("a castle") == ["a</w>", "ca", "s", "t", "l", "e</w>"]


@every_shape
def test_every_layer_is_alive(pipelines: Pipelines, name: str) -> None:
    unet = pipelines[name].unet
    maps = record(unet, torch.randn(2, 4, 16, 16), 500, torch.randn(2, 9, unet.config.cross_attention_dim)).maps
    spreads = {layer: output.std().item() for layer, output in maps.items()}
    assert min(spreads.values()) > 0.1, min(spreads, key=spreads.get)
    assert max(spreads.values()) < 5, max(spreads, key=spreads.get)
