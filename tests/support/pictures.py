"""Pictures to open: smooth ones, and noise of any mode."""

from __future__ import annotations

import numpy as np
from PIL import Image


def noise(mode, width=128, height=128):
    """Every value of every band, at random."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    levels = np.random.default_rng(0).integers(0, 256, (height, width, bands), np.uint8)
    return Image.fromarray(levels[..., 0] if bands == 1 else levels, mode)


def scene(width=128, height=128):
    """Smooth colours, as photographs have."""
    return noise("RGB", 8, 8).resize((width, height), Image.Resampling.BICUBIC)
