"""Converts images of any size and mode to the canvas that a model edits, and the edit back into the image.

A canvas is RGB in sRGB, its sides divisible by 8, with about as many pixels as the model was trained on. The edit
returns at the image's own size, mode and alpha, in the colours of its profile; every pixel outside the mask keeps its
value. Knows Pillow and numpy, no files.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageCms, ImageOps

from fisedit.errors import InputError
from fisedit.metadata.file_form import FORM, FileForm
from fisedit.metadata.image_metadata import owner_info
from fisedit.metadata.jpeg_form import upright_form
from fisedit.values import LATENT_FACTOR, cell_pixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.values import BoolGrid, Box

    Weights = NDArray[np.floating[Any]]
    Shares = NDArray[np.uint8]

MIN_SIDE, MAX_SIDE = 64, 2048
"""Limits of a canvas' sides in pixels."""

MAX_PIXELS = 64_000_000
"""Greatest number of pixels of a picture, whether it comes from a file or from a program."""

MAX_AREA_RATIO = 1.5
"""Greatest ratio, or its inverse, of an image's pixels to the model's, above which the image is resized."""

CONTEXT, MAX_CONTEXT = 0.5, 8.0
"""The context of a crop on every side of a region, as a ratio of its longer side, and the most of it."""

MAX_ASPECT = 2.0
"""Greatest ratio of the sides of a crop, unless its picture is longer."""

MAX_UPSCALE = 2.0
"""Greatest ratio of an image's side to its canvas' side without a note for the user."""

_MODE_16_BIT, LEVELS_16_BIT = "I;16", 257
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
    info, result = owner_info(picture), to_editable_mode(upright(picture))
    result.info = info
    return result


def upright(picture: Image.Image) -> Image.Image:
    """Rotated as its EXIF orientation says, if that can be read, and with it the form of its file."""
    try:
        turned = ImageOps.exif_transpose(picture)
    except (SyntaxError, ValueError, LookupError, TypeError, OSError, struct.error):
        return picture.copy()
    form = turned.info.get(FORM)
    if isinstance(form, FileForm) and form.jpeg:
        turned.info[FORM] = replace(form, jpeg=upright_form(form.jpeg, picture))
    return turned


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


def upscale_note(size: tuple[int, int], canvas: tuple[int, int], *, is_part: bool = False) -> str:
    """A note for the user if the edit is visibly enlarged, else "".

    Args:
        size: Width and height of the image, or of the part that is on the canvas, in pixels.
        canvas: Width and height of its canvas in pixels.
        is_part: Whether a part of the image alone is on the canvas.
    """
    times = math.sqrt(math.prod(size) / math.prod(canvas))
    note = f"painted on {canvas[0]}x{canvas[1]} pixels and enlarged {times:.1f} times"
    advice = "" if is_part else "; paint or box a part of the picture, or open it alone, for finer detail"
    return f"{note}{advice}" if times > MAX_UPSCALE else ""


def is_canvas(picture: Image.Image, size: tuple[int, int]) -> bool:
    """Return whether an image from `to_editable` is a canvas of this size without conversion."""
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


def extended(picture: Image.Image, widths: Box) -> Image.Image:
    """A larger image with the given one inside, every pixel as it was; around it what is mirrored at its sides.

    Args:
        picture: From `to_editable`.
        widths: Pixels that are added at the left, top, right and bottom.

    Raises:
        InputError: more than `MAX_PIXELS`, or more at a side than the image has.
    """
    left, top, right, bottom = widths
    width, height = picture.width + left + right, picture.height + top + bottom
    if max(left, right) > picture.width or max(top, bottom) > picture.height:
        raise InputError(
            f"a picture of {picture.width}x{picture.height} pixels can be extended by as many, got {widths}"
        )
    if width * height > MAX_PIXELS:
        raise InputError(f"picture must have at most {MAX_PIXELS // 10**6} million pixels, got {width}x{height}")
    pixels = np.asarray(picture)
    padding = [(top, bottom), (left, right), (0, 0)][: pixels.ndim]
    result = Image.fromarray(np.pad(pixels, padding, "symmetric"), "CMYK" if picture.mode == "CMYK" else None)
    result.info = dict(picture.info)
    return result


def needs_crop(size: tuple[int, int], native: int) -> bool:
    """Return whether an image has so many more pixels than the model's that a region is edited on a part of it.

    Args:
        size: Width and height of the image in pixels.
        native: Side of the square images that the model was trained on, in pixels.
    """
    return math.prod(size) > MAX_AREA_RATIO * native**2


def crop_around(grid: BoolGrid, size: tuple[int, int], native: int, context: float = CONTEXT) -> Box:
    """The part of a picture to edit a region on.

    It is large enough for a model to see what is around the region. No part of it is resized if it fits a canvas as it
    is.

    Args:
        grid: Booleans [h, w] over the whole picture, the region; not empty.
        size: Width and height of the picture in pixels.
        native: Side of the square images that the model was trained on, in pixels.
        context: What is taken along on every side, as a ratio of the region's longer side, 0 or more.
    """
    spans = [np.flatnonzero(grid.any(axis)) / n for axis, n in zip((0, 1), grid.shape[::-1], strict=True)]
    low = [span[0] * n for span, n in zip(spans, size, strict=True)]
    high = [(span[-1] + 1 / m) * n for span, m, n in zip(spans, grid.shape[::-1], size, strict=True)]
    lengths = [b - a for a, b in zip(low, high, strict=True)]
    least = max(lengths) * (1 + 2 * context) / MAX_ASPECT
    wanted = [max(length + 2 * context * max(lengths), least) for length in lengths]
    scale = max(1.0, native / math.sqrt(math.prod(wanted)))
    shares = [min(n, side * scale) for side, n in zip(wanted, size, strict=True)]
    shares = [max(side, native**2 / other) for side, other in zip(shares, shares[::-1], strict=True)]
    sides = [min(n, math.ceil(side / LATENT_FACTOR) * LATENT_FACTOR) for side, n in zip(shares, size, strict=True)]
    starts = [
        min(max(0, round((a + b - side) / 2)), n - side) for a, b, side, n in zip(low, high, sides, size, strict=True)
    ]
    return starts[0], starts[1], starts[0] + sides[0], starts[1] + sides[1]


def paste_edit(
    picture: Image.Image,
    painted: Image.Image,
    grid: BoolGrid,
    crop: Box | None = None,
    shares: Shares | None = None,
    *,
    fills: bool = False,
) -> Image.Image:
    """Paste the pixels inside the mask from the edited canvas into an image. Where the canvas is resized, the border of
    the mask is blended on its inside.

    Args:
        picture: From `to_editable`, of any size.
        painted: The canvas after the edit.
        grid: The mask, booleans [h, w], one per latent cell.
        crop: The part of the picture that the canvas shows; None for all of it.
        shares: How much of every pixel of that part is taken, uint8 [H, W]: 255 for all; None for all of the mask's.
        fills: Whether clear pixels become as opaque as they are painted; else alpha stays.

    Returns:
        An image of the same size, mode and profile; the pixels outside the mask are unchanged.
    """
    left, top, right, bottom = crop or (0, 0, *picture.size)
    size, pixels = (right - left, bottom - top), np.array(picture)
    paint = _convert_profile(painted, None, picture.info.get("icc_profile"), _opaque_mode(picture))
    new = np.asarray(paint if paint.size == size else paint.resize(size, Image.Resampling.LANCZOS))
    if picture.mode == _MODE_16_BIT:
        new = new.astype(np.uint16) * LEVELS_16_BIT
    part = np.atleast_3d(pixels)[top:bottom, left:right]
    new, inside = np.atleast_3d(new), cell_pixels(grid, size)
    taken: Weights = np.ones(inside.shape)
    if shares is not None:
        inside &= shares > 0
        taken = shares / 255
    border = 1.0 if paint.size == size and crop is None else _border_shares(inside, grid, _goes_on(picture, crop))
    old, alpha = (part[..., :-1], part[..., -1]) if picture.mode in ("LA", "RGBA") else (part, None)
    if fills and alpha is not None:
        taken, opaque = _over(alpha / 255, taken, border)
        alpha[inside] = np.rint(255 * opaque)[inside]
    else:
        taken = taken * border
    new = np.rint(old + (new.astype(np.float64) - old) * taken[..., None]).astype(old.dtype)
    old[inside] = new[inside]
    result = Image.fromarray(pixels, "CMYK" if picture.mode == "CMYK" else None)
    result.info = dict(picture.info)
    return result


def _over(alpha: Weights, taken: Weights, border: Weights | float) -> tuple[Weights, Weights]:
    """Lay paint over pixels that may be clear: what is clear has no colour that the paint could be led to.

    Args:
        alpha: The alpha of the pixels, 0 for clear ones to 1, floats [H, W].
        taken: how much of the paint is taken.
        border: how much of that inside the border of the mask.

    Returns:
        The share of the paint's colour, and the alpha of what comes out.
    """
    laid = taken * (1 - alpha * (1 - border))
    opaque = laid + alpha * (1 - laid)
    return np.divide(laid, opaque, out=np.zeros_like(laid), where=opaque > 0), opaque


def _goes_on(picture: Image.Image, crop: Box | None) -> tuple[bool, bool, bool, bool]:
    """Return whether there is more of a picture at the left, top, right and bottom of a part."""
    left, top, right, bottom = crop or (0, 0, *picture.size)
    return left > 0, top > 0, right < picture.width, bottom < picture.height


def _border_shares(inside: BoolGrid, grid: BoolGrid, goes_on: tuple[bool, bool, bool, bool]) -> Weights:
    """Return the share of every pixel that is taken: floats [H, W], 1 for all.

    Inside the border of a mask it is less; the border is wider the more the paint was enlarged. It is less, too, where
    the mask reaches an edge behind which the picture goes on.

    Args:
        inside: booleans [H, W], the mask.
        grid: booleans [h, w], its latent cells.
        goes_on: whether there is more of the picture at the left, top, right and bottom.
    """
    from scipy.ndimage import distance_transform_edt

    width, share = int((math.sqrt(inside.size / grid.size) - LATENT_FACTOR) / 2), np.ones(inside.shape)
    if width >= 1 and not inside.all():
        depth = distance_transform_edt(inside)
        share = np.clip(depth / (min(width, depth.max() // 2) + 1), 0, 1)  # a narrow mask is painted in its middle
    from_edges = [
        np.arange(1.0, n + 1)[:: 1 if first else -1] if there_is_more else np.full(n, np.inf)
        for there_is_more, n, first in zip(goes_on, inside.shape[::-1] * 2, (True, True, False, False), strict=True)
    ]
    across, down = (np.minimum(from_edges[i], from_edges[i + 2]) for i in (0, 1))
    shares: Weights = np.minimum(share, np.minimum.outer(down, across) / (max(width, LATENT_FACTOR) + 1))
    return shares


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


def to_editable_mode(picture: Image.Image) -> Image.Image:
    """Convert an image to the modes that `to_editable` names.

    Args:
        picture: An upright PIL image with pixels.

    Raises:
        InputError: Its values are not 8 or 16-bit levels.
    """
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
        return Image.fromarray((np.asarray(picture) / LEVELS_16_BIT).round().astype(np.uint8))
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
