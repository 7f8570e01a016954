"""A UNet, an adapter for it, and the adapter's folder. A module whose adapter is another one names it `adapter` too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from diffusers import UNet2DConditionModel

from fisedit.adapters.row_column.checkpoints import save_adapter
from fisedit.models.families.family import SD1
from fisedit.sparse.executor import Executor
from tests.support.adapters import lively

if TYPE_CHECKING:
    from pathlib import Path

    from fisedit.adapters.row_column.attention import RowColumnAdapter


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


@pytest.fixture(scope="session")
def sd15_executor() -> Executor:
    """Of Stable Diffusion 1.5's UNet, without weights."""
    config = UNet2DConditionModel.load_config(SD1.configs / "unet")
    with torch.device("meta"):
        return Executor(UNet2DConditionModel.from_config(config))
