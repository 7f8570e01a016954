"""Pictures of any size and kind, the canvas a model paints on, and the way back.

A canvas is RGB, its sides divisible by 8, about as large as the model likes. What was painted returns at the picture's
own size, mode and alpha; every pixel outside the mask keeps its value. Knows Pillow and numpy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from fisedit.errors import InputError
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.values import BoolGrid

SMALLEST, LARGEST = 64, 2048
"""Sides of a canvas in pixels."""

NEAR = 1.5
"""How many times more or fewer pixels than its own size a model takes before a picture is resized for it."""

_KEPT = {"L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I", "F"}
_BECOME = {"1": "L", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB"}
_DEEP = {"I;16": 257, "I": 257}
"""Modes deeper than 8 bits, and what one of 256 levels is in them."""


def upright(picture: Image.Image) -> Image.Image:
    """A picture that may be edited: turned as its EXIF says, in a mode that can hold any colour.

    A palette, or black and white alone, could not hold what is painted: those become RGB, RGBA or grey, with the same
    colours. Everything else keeps its mode, alpha and colour profile.

    Raises:
        InputError: not a picture, one of no size, or in a mode without colours that a screen shows.
    """
    if not isinstance(picture, Image.Image):
        raise InputError(f"picture must be a PIL image, got {type(picture).__name__}; open files with PIL.Image.open")
    if not picture.width or not picture.height:
        raise InputError(f"picture must have pixels, got {picture.width}x{picture.height}")
    turned = ImageOps.exif_transpose(picture)
    if turned.mode.startswith("I;16"):
        return _with_profile(Image.fromarray(np.asarray(turned).astype(np.uint16)), turned)
    if turned.mode in _KEPT:
        return turned.copy() if turned is picture else turned
    try:
        clear = turned.mode == "P" and "transparency" in turned.info
        return _with_profile(turned.convert("RGBA" if clear else _BECOME.get(turned.mode, "RGB")), turned)
    except ValueError as error:
        raise InputError(f"picture must have colours that a screen shows, got mode {turned.mode}") from error


def canvas_size(size: tuple[int, int], native: int) -> tuple[int, int]:
    """Width and height that a model of `native` x `native` pixels paints a picture of this size on."""
    width, height = size
    fits = not (width % LATENT_FACTOR or height % LATENT_FACTOR) and min(size) >= SMALLEST and max(size) <= LARGEST
    if fits and 1 / NEAR <= width * height / native**2 <= NEAR:
        return size
    scale = native / math.sqrt(width * height)
    return _side(width * scale), _side(height * scale)


def canvas(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """What a model sees of a picture: RGB at a canvas' size, the colours of clear pixels included."""
    levels = _DEEP.get(picture.mode)
    colours = (_grey(picture, levels) if levels else picture).convert("RGB")
    return colours if colours.size == size else colours.resize(size, Image.Resampling.LANCZOS)


def returned(picture: Image.Image, painted: Image.Image, grid: BoolGrid) -> Image.Image:
    """The picture with what was painted inside the mask.

    Args:
        picture: from `upright`, of any size. painted: the canvas after the edit. grid: booleans [h, w] of its cells.

    Returns:
        A picture of the same size, mode and profile; alpha, and every pixel outside the mask, as they were.
    """
    if picture.mode == "RGB" and picture.size == painted.size:
        return painted
    inside = _inside(grid, picture.size)
    new = painted if painted.size == picture.size else painted.resize(picture.size, Image.Resampling.LANCZOS)
    pixels, paint = np.array(picture), _as(new, picture)
    pixels[inside] = paint[inside]
    result = Image.fromarray(pixels, picture.mode)
    result.info = dict(picture.info)
    return result


def _as(new: Image.Image, picture: Image.Image) -> NDArray[np.generic]:
    """Painted pixels [H, W(, bands)] in a picture's mode, with its alpha."""
    levels = _DEEP.get(picture.mode)
    if levels:
        return (np.asarray(new.convert("L"), np.int64) * levels).astype(np.asarray(picture).dtype)
    if picture.mode == "F":
        return np.asarray(new.convert("L"), np.float32)
    bands = picture.getbands()
    if bands[-1] not in ("A", "a"):
        return np.asarray(new.convert(picture.mode))
    colours = np.asarray(new.convert("L" if len(bands) == 2 else "RGB"))
    alpha = np.asarray(picture.getchannel(bands[-1]))[..., None]
    return np.concatenate([colours.reshape(*alpha.shape[:2], -1), alpha], axis=-1)


def _grey(picture: Image.Image, levels: int) -> Image.Image:
    return Image.fromarray((np.asarray(picture).astype(np.int64) // levels).clip(0, 255).astype(np.uint8))


def _inside(grid: BoolGrid, size: tuple[int, int]) -> NDArray[np.bool_]:
    """The pixels of a picture [H, W] whose middle lies in a cell of the mask."""
    columns, rows = (
        ((np.arange(n) + 0.5) * cells / n).astype(int) for n, cells in zip(size, reversed(grid.shape), strict=True)
    )
    return np.asarray(grid[np.ix_(rows, columns)], bool)


def _side(pixels: float) -> int:
    return min(LARGEST, max(SMALLEST, round(pixels / LATENT_FACTOR) * LATENT_FACTOR))


def _with_profile(picture: Image.Image, source: Image.Image) -> Image.Image:
    if "icc_profile" in source.info:
        picture.info["icc_profile"] = source.info["icc_profile"]
    return picture
