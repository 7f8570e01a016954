"""Pictures of any size and kind, the canvas a model paints on, and the way back.

A canvas is RGB in sRGB, its sides divisible by 8, about as large as the model likes. What was painted returns at the
picture's own size, mode and alpha, in the colours of its profile; every pixel outside the mask keeps its value. Knows
Pillow and numpy.
"""

from __future__ import annotations

import math
import struct
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageCms, ImageOps

from fisedit.errors import InputError
from fisedit.storage.image_metadata import kept
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.values import BoolGrid

SMALLEST, LARGEST = 64, 2048
"""Sides of a canvas in pixels."""

NEAR = 1.5
"""How many times more or fewer pixels than its own size a model takes before a picture is resized for it."""

COARSE = 2.0
"""How many times larger than its canvas a picture is before its user is told."""

_DEEP, _LEVEL = "I;16", 257
"""The mode with 16 bits, and what one of 256 levels is in it."""


def upright(picture: Image.Image) -> Image.Image:
    """A picture that may be edited: turned as its EXIF says, in a mode that can hold any colour.

    L, LA, RGB, RGBA, CMYK and 16-bit grey stay what they are. A palette, or black and white alone, could not hold what
    is painted: those become RGB or grey of the same colours, and a colour that counts as transparent becomes alpha.
    Its `info` is what `metadata.kept` keeps.

    Raises:
        InputError: not a picture, one of no size, or of numbers that are not 8 or 16-bit levels.
    """
    if not isinstance(picture, Image.Image):
        raise InputError(f"picture must be a PIL image, got {type(picture).__name__}; open files with PIL.Image.open")
    if not picture.width or not picture.height:
        raise InputError(f"picture must have pixels, got {picture.width}x{picture.height}")
    info, result = kept(picture), _editable(_turned(picture))
    result.info = info
    return result


def _turned(picture: Image.Image) -> Image.Image:
    """Turned as its EXIF says, where that can be read."""
    try:
        return ImageOps.exif_transpose(picture)
    except (SyntaxError, ValueError, LookupError, TypeError, OSError, struct.error):
        return picture.copy()


def canvas_size(size: tuple[int, int], native: int) -> tuple[int, int]:
    """Width and height that a model of `native` x `native` pixels paints a picture of this size on.

    A picture of about as many pixels is painted as it is; any other is resized as a whole, never tiled, to as many.
    """
    width, height = size
    fits = not (width % LATENT_FACTOR or height % LATENT_FACTOR) and min(size) >= SMALLEST and max(size) <= LARGEST
    if fits and 1 / NEAR <= width * height / native**2 <= NEAR:
        return size
    scale = native / math.sqrt(width * height)
    return _side(width * scale), _side(height * scale)


def coarseness(size: tuple[int, int], canvas: tuple[int, int]) -> str:
    """What to tell where paint from a canvas is enlarged so much that it shows, or ""."""
    times = math.sqrt(math.prod(size) / math.prod(canvas))
    told = f"painted on {canvas[0]}x{canvas[1]} pixels and enlarged {times:.1f} times"
    return f"{told}; open a part of the picture, or give width and height, for finer paint" if times > COARSE else ""


def is_canvas(picture: Image.Image, size: tuple[int, int]) -> bool:
    """Whether a picture from `upright` is a canvas of this size as it stands."""
    return picture.mode == "RGB" and picture.size == size and not picture.info


def canvas(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """What a model sees of a picture from `upright`: its colours at a canvas' size, those of clear pixels included."""
    colours = _shallow(picture)
    if colours.size != size:
        colours = colours.resize(size, Image.Resampling.LANCZOS)
    return _recoloured(colours, picture.info.get("icc_profile"), None, "RGB")


def returned(picture: Image.Image, painted: Image.Image, grid: BoolGrid) -> Image.Image:
    """The picture with what was painted inside the mask.

    Args:
        picture: from `upright`, of any size. painted: the canvas after the edit. grid: booleans [h, w] of its cells.

    Returns:
        A picture of the same size, mode and profile; alpha, and every pixel outside the mask, as they were.
    """
    inside = _inside(grid, picture.size)
    paint = _recoloured(painted, None, picture.info.get("icc_profile"), _opaque(picture))
    if paint.size != picture.size:
        paint = paint.resize(picture.size, Image.Resampling.LANCZOS)
    pixels, new = np.array(picture), np.asarray(paint)
    if picture.mode == _DEEP:
        pixels[inside] = new[inside].astype(np.uint16) * _LEVEL
    elif picture.mode in ("LA", "RGBA"):
        pixels[..., :-1][inside] = new.reshape(*inside.shape, -1)[inside]
    else:
        pixels[inside] = new[inside]
    result = Image.fromarray(pixels, "CMYK" if picture.mode == "CMYK" else None)
    result.info = dict(picture.info)
    return result


def on_screen(picture: Image.Image, *, alpha: bool) -> Image.Image:
    """A picture as a screen shows it: 8-bit sRGB, without a profile; RGBA where it has alpha that may stay, or over
    white."""
    shown = canvas(picture, picture.size)
    if not picture.has_transparency_data:
        return shown
    clear = picture.getchannel("A")
    if alpha:
        shown.putalpha(clear)
        return shown
    return Image.composite(shown, Image.new("RGB", shown.size, "white"), clear)


def _editable(picture: Image.Image) -> Image.Image:
    mode = picture.mode
    if mode == "I" or mode.startswith(_DEEP):
        levels = np.asarray(picture)
        low, high = levels.min(), levels.max()
        if low < 0 or high >= 2**16:
            raise InputError(f"picture must have levels from 0 to 65535, got {low} to {high}; scale them")
        return Image.fromarray(levels.astype(np.uint16))
    if mode == "F":
        raise InputError("picture must have levels of 8 or 16 bits, got floats (mode F); convert it")
    if mode == "LAB":
        to_rgb = ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), mode, "RGB")
        return to_rgb.apply(picture)
    if mode.endswith("a"):  # colours multiplied by their alpha
        picture = picture.convert("LA" if mode == "La" else "RGBA")
    grey, clear = mode in ("1", "L", "LA", "La"), picture.has_transparency_data
    return picture.convert("CMYK" if mode == "CMYK" else ("L" if grey else "RGB") + "A" * clear)


def _opaque(picture: Image.Image) -> str:
    """The mode of a picture's colours alone, in 8 bits."""
    return "L" if picture.mode == _DEEP else picture.mode.removesuffix("A")


def _shallow(picture: Image.Image) -> Image.Image:
    """A picture's colours alone, in 8 bits."""
    if picture.mode == _DEEP:
        return Image.fromarray((np.asarray(picture) / _LEVEL).round().astype(np.uint8))
    return picture.convert(_opaque(picture))


def _recoloured(picture: Image.Image, before: bytes | None, after: bytes | None, mode: str) -> Image.Image:
    """A picture's colours of one profile in another, None being sRGB; taken as they stand where a profile is damaged or
    of another kind of colours."""
    result = _translated(picture, before, after, mode) if before or after else None
    result = result or picture.convert(mode)
    result.info = {}
    return result


def _translated(picture: Image.Image, before: bytes | None, after: bytes | None, mode: str) -> Image.Image | None:
    try:
        old, new = (
            ImageCms.ImageCmsProfile(BytesIO(p)) if p else ImageCms.createProfile("sRGB") for p in (before, after)
        )
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        return ImageCms.profileToProfile(picture, old, new, renderingIntent=intent, outputMode=mode)
    except (OSError, ImageCms.PyCMSError):
        return None


def _inside(grid: BoolGrid, size: tuple[int, int]) -> NDArray[np.bool_]:
    """The pixels of a picture [H, W] whose middle lies in a cell of the mask."""
    columns, rows = (
        ((np.arange(n) + 0.5) * cells / n).astype(int) for n, cells in zip(size, reversed(grid.shape), strict=True)
    )
    return np.asarray(grid[np.ix_(rows, columns)], bool)


def _side(pixels: float) -> int:
    return min(LARGEST, max(SMALLEST, round(pixels / LATENT_FACTOR) * LATENT_FACTOR))
