"""What every test shares: one thread, fixed seeds, and the random pipelines, each built once and only when asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tiny tensors lose more to thread hand-over than they gain
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `from tests.pipelines import ...`, however pytest starts

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

from tests.pipelines import SHAPES, build_pipeline


class LazyPipelines(Mapping[str, StableDiffusionPipeline]):
    """The pipelines of `SHAPES`, each built on first use. They are shared: leave them as you found them."""

    def __init__(self) -> None:
        self._build = cache(build_pipeline)

    def __getitem__(self, name: str) -> StableDiffusionPipeline:
        return self._build(name)

    def __iter__(self) -> Iterator[str]:
        return iter(SHAPES)

    def __len__(self) -> int:
        return len(SHAPES)


@pytest.fixture(scope="session")
def pipelines() -> LazyPipelines:
    """Name of a shape -> its random pipeline, seed 0."""
    return LazyPipelines()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same global random state."""
    np.random.seed(0)
    torch.manual_seed(0)
