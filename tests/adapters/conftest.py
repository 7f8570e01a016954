"""A UNet, an adapter for it, and the adapter's folder. A module whose adapter is another one names it `adapter` too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fisedit.adapters.checkpoints import save_adapter
from tests.support.adapters import lively

if TYPE_CHECKING:
    from pathlib import Path

    from diffusers import UNet2DConditionModel

    from fisedit.adapters.row_column import RowColumnAdapter


@pytest.fixture
def unet(pipelines) -> UNet2DConditionModel:
    """The first base's; it is shared."""
    return pipelines["sd15"].unet


@pytest.fixture
def adapter(unet) -> RowColumnAdapter:
    """Trained, if it were trained, on the first base."""
    return lively(unet, "v3")


@pytest.fixture
def place(adapter, tmp_path) -> Path:
    """Where the adapter is saved."""
    save_adapter(adapter, tmp_path / "adapter")
    return tmp_path / "adapter"
