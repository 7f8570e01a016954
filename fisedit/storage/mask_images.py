"""The one reader of masks that are pictures: what marks, in levels of 8 bits, as it is seen.

Every face reads masks by it. Knows Pillow and files; nothing of what is edited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from fisedit.errors import MaskError
from fisedit.storage.canvas import LEVELS_16_BIT, MAX_PIXELS, to_editable_mode, upright
from fisedit.storage.files import why_no_file
from fisedit.storage.images import decode, read_bytes

if TYPE_CHECKING:
    from pathlib import Path

LEAST_INSIDE = 128
"""Least level, of 255, of what is inside a mask."""


def read_mask(path: Path | None) -> Image.Image | None:
    """Read a mask file; None stays None.

    Args:
        path: An image file.

    Returns:
        Mode "L", levels 0 to 255, of the file's own size.

    Raises:
        MaskError: No image, one too large to be a mask, or one without levels of 8 or 16 bits.
    """
    if path is None:
        return None
    if not path.is_file():
        raise MaskError(f"mask must be an image file, got {path}: {why_no_file(path)}")
    return decode_mask(read_bytes(path), f"mask {path}")


def decode_mask(data: bytes, what: str = "mask", size: tuple[int, int] | None = None) -> Image.Image:
    """Decode a mask file.

    Args:
        data: The file's bytes.
        what: The name of the mask in errors.
        size: Width and height in pixels to scale it to; None for its own.

    Returns:
        Mode "L", levels 0 to 255.

    Raises:
        MaskError: As in `read_mask`.
    """
    levels = mask_levels(decode(data, what, MaskError).image, what)
    return levels if size is None else scaled(levels, size)


def scaled(levels: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Levels of a mask at another size: what is black or white over all of a new pixel stays so.

    Args:
        levels: Mode "L".
        size: Width and height in pixels.
    """
    return levels if levels.size == size else levels.resize(size, Image.Resampling.BOX)


def marks(levels: Image.Image) -> bool:
    """Return whether any pixel of a mask is at least half inside.

    Args:
        levels: Mode "L".
    """
    return bool((np.asarray(levels) >= LEAST_INSIDE).any())


def mask_levels(mask: Image.Image, what: str = "mask") -> Image.Image:
    """Return how much a mask marks of every pixel.

    It is turned as its EXIF says. Its alpha marks where that differs from pixel to pixel, whatever the colours are, as
    in web UIs; else its brightness does. Levels of 16 bits are scaled. Those of 32 bits are taken for 8 bits if none is
    above 255, else for 16. Floats are from 0 to 1.

    Args:
        mask: Any PIL image.
        what: The name of the mask in errors.

    Returns:
        Mode "L", levels 0 to 255.

    Raises:
        MaskError: Too many pixels, or values that are no levels.
    """
    if mask.width * mask.height > MAX_PIXELS:
        limit = f"at most {MAX_PIXELS // 10**6} million pixels"
        raise MaskError(f"{what} must have {limit}, got {mask.width}x{mask.height}; make it smaller")
    shown = upright(mask)
    if shown.mode == "F" or shown.mode.startswith("I"):
        return _to_8_bit(shown, what)
    shown = to_editable_mode(shown)  # Pillow converts some to no grey, such as LAB
    if not shown.has_transparency_data:
        return shown.convert("L")
    colour = shown.convert("RGBA")
    alpha = colour.getchannel("A")
    least, most = alpha.getextrema()
    return alpha if least != most or most == 0 else colour.convert("L")


def _to_8_bit(mask: Image.Image, what: str) -> Image.Image:
    """Floats and levels of more than 8 bits, which Pillow would clip, in 8 bits."""
    levels = np.asarray(mask)
    low, high = levels.min(), levels.max()
    if mask.mode == "F":
        if not (low >= 0 and high <= 1):  # so written, NaN is refused as well
            raise MaskError(f"{what} of floats must have levels from 0 to 1, got {low:g} to {high:g}; scale them")
        return Image.fromarray(np.rint(levels * 255).astype(np.uint8))
    if low < 0 or high >= 2**16:
        raise MaskError(f"{what} must have levels from 0 to 65535, got {low} to {high}; scale them")
    is_8_bit = mask.mode == "I" and high < 2**8
    scaled_levels = levels if is_8_bit else np.rint(levels / LEVELS_16_BIT)
    return Image.fromarray(scaled_levels.astype(np.uint8))
