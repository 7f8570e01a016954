"""Control pictures that are made of a picture itself, as ControlNets were trained to read them.

Knows pictures; no adapters. What needs a network of its own, such as depth, is for the user's tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fisedit.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

CANNY = "canny"
"""The name that stands for a control picture of the edges of the picture that is opened, as large as its canvas."""

_MAX_GRADIENT = 1024
"""The largest threshold: a gradient of 8-bit levels by Sobel's filter."""


def is_canny(path: str | Path | None) -> bool:
    """Return whether a command's control is the edges of the picture that is opened, and no file."""
    return path is not None and str(path) == CANNY and not Path(path).exists()


def canny(picture: Image, low_threshold: float = 100, high_threshold: float = 200) -> Image:
    """The edges of a picture, white on black, by Canny's detector with a blur of one pixel.

    Args:
        picture: A picture of any mode and size; turned upright as its EXIF says.
        low_threshold: gradient, of 8-bit levels, from which what touches an edge is one too, 0 to 1024.
        high_threshold: gradient from which a pixel is an edge, at least `low_threshold`.

    Returns:
        Mode RGB, of the picture's size.

    Raises:
        InputError: thresholds out of range.
    """
    import numpy as np
    from PIL import Image
    from skimage.feature import canny as find_edges

    from fisedit.storage.canvas import to_canvas, to_editable

    if not 0 <= low_threshold <= high_threshold <= _MAX_GRADIENT:
        got = f"{low_threshold!r:.20} and {high_threshold!r:.20}"
        raise InputError(f"canny's thresholds must be in [0, {_MAX_GRADIENT}], the lower one first, got {got}")
    upright = to_editable(picture)
    levels = np.asarray(to_canvas(upright, upright.size).convert("L"), np.float32)
    edges = find_edges(levels, sigma=1, low_threshold=low_threshold, high_threshold=high_threshold)
    return Image.fromarray(edges.astype(np.uint8) * 255).convert("RGB")
