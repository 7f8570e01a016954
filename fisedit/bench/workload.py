"""The workload of the speed benchmarks: a model, one source's generation config, and given masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fisedit.machine.device import choose_device, choose_dtype
from fisedit.masking import masks
from fisedit.models.families.family import FAMILIES
from fisedit.models.loader import load
from fisedit.models.random_init import random_pipeline
from fisedit.values import LATENT_FACTOR, make_generation_config

if TYPE_CHECKING:
    import torch

    from fisedit.bench.settings import SpeedSettings
    from fisedit.machine.model import Model
    from fisedit.values import BoolGrid, GenerationConfig

PROMPTS = ("a cat and a cake on a beach", "a dog and a cake on a beach")
"""The prompts of the source and of the edit."""

RANDOM = {family.name: family for family in FAMILIES}
"""Names that are given as a model for random weights -> the family; the first without a name."""

STEP_DILATION = 1
"""Dilation at which single steps are compared, in latent cells; whole edits use the default settings."""


@dataclass(frozen=True, eq=False)
class Workload:
    """A model and the source whose edits are timed.

    Args:
        pipe: the model.
        config: The settings of the source.
        device: where the model is.
        dtype: the model's.
        random: The title of the architecture whose weights are random, or "".
    """

    pipe: Model
    config: GenerationConfig
    device: torch.device
    dtype: torch.dtype
    random: str = ""

    def model_name(self, settings: SpeedSettings) -> str:
        """The model's name in reports.

        Args:
            settings: The settings that it was loaded by.
        """
        return f"{self.random} architecture, random weights" if self.random else str(settings.model)


def load_workload(settings: SpeedSettings) -> Workload:
    """The model that is measured, with random weights of SD 1.5's shapes if none is named, or of a family that is.

    Args:
        settings: The settings of the benchmark.

    Raises:
        InputError: the device is not on this machine, or a setting is out of range.
        ModelError: the model cannot be loaded.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    model, random = settings.model or next(iter(RANDOM)), ""
    if model in RANDOM and not Path(model).exists():
        random, pipe = RANDOM[model].title, random_pipeline(device, dtype, family=RANDOM[model])
    else:
        pipe = load(model, device=device, dtype=dtype, local_files_only=settings.local_files_only)
    config = make_generation_config(
        PROMPTS[0],
        seed=7,
        negative_prompt="",
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        width=settings.size,
        height=settings.size,
        scheduler=settings.scheduler,
    )
    return Workload(pipe, config, device, dtype, random)


def square_mask(area: float, side: int) -> BoolGrid:
    """A centred square.

    Args:
        area: approximate share of the cells, in (0, 1].
        side: The side of the grid, in latent cells.

    Returns:
        Booleans [side, side].
    """
    edge = max(1, round(area**0.5 * side))
    grid, start = np.zeros((side, side), bool), (side - edge) // 2
    grid[start : start + edge, start : start + edge] = True
    return grid


def ragged_mask(area: float, side: int) -> BoolGrid:
    """Three or four uneven blobs, as published automatic masks have once specks under 1 % are dropped.

    Args:
        area: approximate share of the cells, in (0, 1].
        side: The side of the grid, in latent cells.

    Returns:
        Booleans [side, side].
    """
    from scipy.ndimage import gaussian_filter

    field = gaussian_filter(np.random.default_rng(3).normal(size=(side, side)), side / 11)
    return masks.clean_mask(field > np.quantile(field, 1 - area), dilation=0)


MASKS: dict[str, Callable[[float, int], BoolGrid]] = {"square": square_mask, "ragged": ragged_mask}


def masks_of_areas(areas: tuple[float, ...], size: int) -> list[tuple[str, float, BoolGrid]]:
    """(kind, asked area, booleans [h, w]) of every kind of mask and area.

    Args:
        areas: shares of the picture.
        size: side of the picture, in pixels.
    """
    return [(kind, area, make(area, size // LATENT_FACTOR)) for kind, make in MASKS.items() for area in areas]
