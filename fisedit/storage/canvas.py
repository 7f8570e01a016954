"""Converts images of any size and mode to the canvas that a model edits, and the edit back into the image.

A canvas is RGB in sRGB, its sides divisible by 8, with about as many pixels as the model was trained on. The edit
returns at the image's own size, mode and alpha, in the colours of its profile; every pixel outside the mask keeps its
value. Knows Pillow and numpy, no files.
"""

from __future__ import annotations

import math
import struct
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageCms, ImageOps

from fisedit.errors import InputError
from fisedit.storage.image_metadata import owner_info
from fisedit.values import LATENT_FACTOR, cell_pixels

if TYPE_CHECKING:
    from fisedit.values import BoolGrid

MIN_SIDE, MAX_SIDE = 64, 2048
"""Limits of a canvas' sides in pixels."""

MAX_PIXELS = 64_000_000
"""Greatest number of pixels of a picture, whether it comes from a file or from a program."""

MAX_AREA_RATIO = 1.5
"""Greatest ratio, or its inverse, of an image's pixels to the model's, above which the image is resized."""

MAX_UPSCALE = 2.0
"""Greatest ratio of an image's side to its canvas' side without a note for the user."""

_MODE_16_BIT, _LEVELS_16_BIT = "I;16", 257
"""The mode with 16 bits, and the 16-bit levels per 8-bit level."""


def to_editable(picture: Image.Image) -> Image.Image:
    """Rotate an image as its EXIF orientation says, and convert it to a mode that can hold any colour.

    L, LA, RGB, RGBA, CMYK and 16-bit grey are kept. Palettes and 1-bit images become RGB or grey of the same colours,
    and a transparent palette colour becomes alpha.

    Args:
        picture: Any PIL image.

    Returns:
        A copy, whose `info` is the one of `image_metadata.owner_info`.

    Raises:
        InputError: Not an image, one without pixels or with more than `MAX_PIXELS`, or one whose values are not 8 or
            16-bit levels.
    """
    if not isinstance(picture, Image.Image):
        raise InputError(f"picture must be a PIL image, got {type(picture).__name__}; open files with PIL.Image.open")
    if not picture.width or not picture.height:
        raise InputError(f"picture must have pixels, got {picture.width}x{picture.height}")
    if picture.width * picture.height > MAX_PIXELS:
        limit = f"at most {MAX_PIXELS // 10**6} million pixels"
        raise InputError(f"picture must have {limit}, got {picture.width}x{picture.height}; make it smaller")
    info, result = owner_info(picture), _to_editable_mode(_rotate(picture))
    result.info = info
    return result


def _rotate(picture: Image.Image) -> Image.Image:
    """Rotated as its EXIF orientation says, if that can be read."""
    try:
        return ImageOps.exif_transpose(picture)
    except (SyntaxError, ValueError, LookupError, TypeError, OSError, struct.error):
        return picture.copy()


def canvas_size(size: tuple[int, int], native: int) -> tuple[int, int]:
    """The size of an image's canvas. An image of about the model's size is not resized; no image is tiled.

    Args:
        size: Width and height of the image in pixels.
        native: Side of the square images that the model was trained on, in pixels.

    Returns:
        Width and height in pixels, divisible by 8, from `MIN_SIDE` to `MAX_SIDE`.
    """
    width, height = size
    fits = not (width % LATENT_FACTOR or height % LATENT_FACTOR) and min(size) >= MIN_SIDE and max(size) <= MAX_SIDE
    if fits and 1 / MAX_AREA_RATIO <= width * height / native**2 <= MAX_AREA_RATIO:
        return size
    scale = native / math.sqrt(width * height)
    return _side(width * scale), _side(height * scale)


def upscale_note(size: tuple[int, int], canvas: tuple[int, int]) -> str:
    """A note for the user if the edit is visibly enlarged, else "".

    Args:
        size: Width and height of the image in pixels.
        canvas: Width and height of its canvas in pixels.
    """
    times = math.sqrt(math.prod(size) / math.prod(canvas))
    note = f"painted on {canvas[0]}x{canvas[1]} pixels and enlarged {times:.1f} times"
    return (
        f"{note}; open a part of the picture, or give width and height, for finer paint" if times > MAX_UPSCALE else ""
    )


def is_canvas(picture: Image.Image, size: tuple[int, int]) -> bool:
    """Whether an image from `to_editable` is a canvas of this size without conversion."""
    return picture.mode == "RGB" and picture.size == size and not picture.info


def to_canvas(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Convert an image to the model's input; transparent pixels keep their colours.

    Args:
        picture: From `to_editable`.
        size: Width and height of the canvas in pixels.

    Returns:
        RGB in sRGB.
    """
    colours = _opaque_8_bit(picture)
    if colours.size != size:
        colours = colours.resize(size, Image.Resampling.LANCZOS)
    return _convert_profile(colours, picture.info.get("icc_profile"), None, "RGB")


def paste_edit(picture: Image.Image, painted: Image.Image, grid: BoolGrid) -> Image.Image:
    """Paste the pixels inside the mask from the edited canvas into an image.

    Args:
        picture: From `to_editable`, of any size.
        painted: The canvas after the edit.
        grid: The mask, booleans [h, w], one per latent cell.

    Returns:
        An image of the same size, mode and profile; alpha and the pixels outside the mask are unchanged.
    """
    inside = cell_pixels(grid, picture.size)
    paint = _convert_profile(painted, None, picture.info.get("icc_profile"), _opaque_mode(picture))
    if paint.size != picture.size:
        paint = paint.resize(picture.size, Image.Resampling.LANCZOS)
    pixels, new = np.array(picture), np.asarray(paint)
    if picture.mode == _MODE_16_BIT:
        pixels[inside] = new[inside].astype(np.uint16) * _LEVELS_16_BIT
    elif picture.mode in ("LA", "RGBA"):
        pixels[..., :-1][inside] = new.reshape(*inside.shape, -1)[inside]
    else:
        pixels[inside] = new[inside]
    result = Image.fromarray(pixels, "CMYK" if picture.mode == "CMYK" else None)
    result.info = dict(picture.info)
    return result


def to_srgb(picture: Image.Image, *, alpha: bool) -> Image.Image:
    """Convert an image to 8-bit sRGB without a profile, as a screen shows it.

    Args:
        picture: From `to_editable`.
        alpha: Whether transparency is kept as RGBA; else it is blended with white.
    """
    shown = to_canvas(picture, picture.size)
    if not picture.has_transparency_data:
        return shown
    clear = picture.getchannel("A")
    if alpha:
        shown.putalpha(clear)
        return shown
    return Image.composite(shown, Image.new("RGB", shown.size, "white"), clear)


def _to_editable_mode(picture: Image.Image) -> Image.Image:
    mode = picture.mode
    if mode == "I" or mode.startswith(_MODE_16_BIT):
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
    if mode.endswith("a"):  # premultiplied alpha
        picture = picture.convert("LA" if mode == "La" else "RGBA")
    grey, clear = mode in ("1", "L", "LA", "La"), picture.has_transparency_data
    return picture.convert("CMYK" if mode == "CMYK" else ("L" if grey else "RGB") + "A" * clear)


def _opaque_mode(picture: Image.Image) -> str:
    """The 8-bit mode of an image's colours without alpha."""
    return "L" if picture.mode == _MODE_16_BIT else picture.mode.removesuffix("A")


def _opaque_8_bit(picture: Image.Image) -> Image.Image:
    """An image's colours in 8 bits without alpha."""
    if picture.mode == _MODE_16_BIT:
        return Image.fromarray((np.asarray(picture) / _LEVELS_16_BIT).round().astype(np.uint8))
    return picture.convert(_opaque_mode(picture))


def _convert_profile(picture: Image.Image, before: bytes | None, after: bytes | None, mode: str) -> Image.Image:
    """Convert colours from one profile to another (None is sRGB); unchanged if a profile is damaged or does not fit."""
    result = _apply_profiles(picture, before, after, mode) if before or after else None
    result = result or picture.convert(mode)
    result.info = {}
    return result


def _apply_profiles(picture: Image.Image, before: bytes | None, after: bytes | None, mode: str) -> Image.Image | None:
    try:
        source_profile, target_profile = (
            ImageCms.ImageCmsProfile(BytesIO(p)) if p else ImageCms.createProfile("sRGB") for p in (before, after)
        )
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        return ImageCms.profileToProfile(
            picture, source_profile, target_profile, renderingIntent=intent, outputMode=mode
        )
    except (OSError, ImageCms.PyCMSError):
        return None


def _side(pixels: float) -> int:
    return min(MAX_SIDE, max(MIN_SIDE, round(pixels / LATENT_FACTOR) * LATENT_FACTOR))
