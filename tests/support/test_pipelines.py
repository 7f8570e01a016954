"""The random pipelines: the same for the same seed, alive in every layer, and words that a test can rely on."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.support.conditions import random_conditions
from tests.support.oracle import GenerationConfig, dense_generate, record
from tests.support.pipelines import SHAPES, WORDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffusers import StableDiffusionPipeline

    Pipelines = Mapping[str, StableDiffusionPipeline]

every_shape = pytest.mark.parametrize("name", SHAPES)


@pytest.mark.slow
def test_pipelines_are_reproducible() -> None:
    """In a process of its own: here threads of other tests may draw from torch's generator meanwhile."""
    code = """
import torch
from tests.support.pipelines import SHAPES, build_pipeline
for name in SHAPES:
    weights = (build_pipeline(name).unet.parameters() for _ in range(2))
    print(name, all(torch.equal(a, b) for a, b in zip(*weights, strict=True)))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == [f"{name} True" for name in SHAPES]


@every_shape
def test_pipelines_are_alive(pipelines: Pipelines, name: str) -> None:
    pipe = pipelines[name]
    cat = dense_generate(pipe, GenerationConfig("a cat on a beach"))
    dog = dense_generate(pipe, GenerationConfig("a dog on a beach"))
    assert (cat.latents - dog.latents)[-1].std() > 0.1
    assert 0.1 < np.asarray(cat.image).std() / 255 < 0.4


def test_known_words_are_single_tokens(pipelines: Pipelines) -> None:
    tokenizer = pipelines["demo"].tokenizer
    assert all(len(tokenizer(word).input_ids) == 3 for word in WORDS)
    assert tokenizer.tokenize("a castle") == ["a</w>", "ca", "s", "t", "l", "e</w>"]


@every_shape
def test_every_layer_is_alive(pipelines: Pipelines, name: str) -> None:
    unet = pipelines[name].unet
    maps = record(unet, torch.randn(2, 4, 16, 16), 500, random_conditions(unet).unet_inputs).maps
    spreads = {layer: output.std().item() for layer, output in maps.items()}
    assert min(spreads.values()) > 0.1, min(spreads, key=spreads.get)
    assert max(spreads.values()) < 5, max(spreads, key=spreads.get)
