"""What every test shares: one thread, no network, a fixed seed, and the random pipelines, each built on first use.

Heavy libraries are imported by the fixtures that need them, so that a test of plain values starts at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffusers import StableDiffusionPipeline

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tiny tensors lose more to thread hand-over than they gain
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class LazyPipelines(Mapping[str, "StableDiffusionPipeline"]):
    """The pipelines of `SHAPES`, each built on first use. They are shared: leave them as you found them."""

    def __init__(self) -> None:
        from tests.pipelines import SHAPES, build_pipeline

        self._names = tuple(SHAPES)
        self._build = cache(build_pipeline)

    def __getitem__(self, name: str) -> StableDiffusionPipeline:
        return self._build(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@pytest.fixture(scope="session")
def pipelines() -> LazyPipelines:
    """Name of a shape -> its random pipeline, seed 0."""
    return LazyPipelines()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test that has torch from the same random state."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
