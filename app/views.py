"""Pictures as data URLs for the page, and the strokes that it sends. Knows Pillow; neither gradio nor sessions."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from PIL import Image, ImageChops, ImageFilter

from fisedit.errors import InputError, MaskError, as_text
from fisedit.masking.masks import SURE
from fisedit.storage import images
from fisedit.values import LATENT_FACTOR, MaskSource, cell_pixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.history import EditResult
    from fisedit.values import Box, EditMask

TINT = (255, 64, 96)
MAX_STROKES_CHARACTERS = 1 << 20
"""Greatest length of painted strokes as a data URL."""

_COLOURS = {"add": (255, 64, 96), "protect": (48, 112, 255), "pick": (0, 176, 80), "unpick": (255, 170, 0)}
"""Colours of strokes, as the page's script has them."""

_BORDER = 0.008
"""Width of a soft border, as a share of the picture's longer side: four pixels of 512."""

_MAX_DOTS = 64
_LINE_BREAK = re.compile(r"[ \t]*[\r\n]+[ \t]*")
_URL_SAFE = str.maketrans("-_", "+/")

_THUMBNAIL, _SCREEN = 112, 1280
"""Greatest side in pixels of a picture in the history, and of one on the stage."""

_thumbnails: WeakKeyDictionary[EditResult, str] = WeakKeyDictionary()


def thumbnail_url(result: EditResult) -> str:
    """A small picture of a result, as a data URL."""
    if result not in _thumbnails:
        small = _rgb(result.image)
        small.thumbnail((_THUMBNAIL, _THUMBNAIL))
        _thumbnails[result] = _url(small, "JPEG", quality=88)
    return _thumbnails[result]


def screen_url(image: Image.Image) -> str:
    """A picture for the screen, as a data URL; larger ones are made smaller."""
    small = _rgb(image)
    if max(small.size) > _SCREEN:
        small.thumbnail((_SCREEN, _SCREEN))
        return _url(small, "JPEG", quality=90)
    return _url(small, "PNG", compress_level=3)


def mask_image(mask: EditMask, size: tuple[int, int], crop: Box | None) -> Image.Image:
    """A mask as grey levels: of the canvas, or where that shows a part of a picture alone, of the picture.

    Args:
        mask: mask of an edit.
        size: width and height of the picture in pixels.
        crop: the part of it that is on the canvas; None for all of it.
    """
    return mask.image() if crop is None else _placed(mask.image(), size, crop)


def area_of(mask: EditMask, size: tuple[int, int], crop: Box | None) -> float:
    """A mask's share of a picture, 0 to 1; arguments as in `mask_image`."""
    left, top, right, bottom = crop or (0, 0, *size)
    return mask.area * (right - left) * (bottom - top) / (size[0] * size[1])


def is_unsure(mask: EditMask) -> bool:
    """Return whether words found a mask with little confidence: it is hatched, and the page asks for a mark."""
    return mask.source is MaskSource.ATTENTION and mask.confidence < SURE


def region(mask: EditMask, size: tuple[int, int], crop: Box | None) -> str:
    """A mask to lay over its picture, as a data URL: tinted inside, with an outline; clear outside; "" for none.

    One of little confidence is hatched.

    Args:
        mask: mask of an edit.
        size: width and height of the picture in pixels.
        crop: the part of it that is on the canvas, as in `mask_image`.
    """
    if not mask.grid.any():
        return ""
    place = (size, (0, 0, *size)) if crop is None else _on_screen(size, crop)
    inside = mask.image() if crop is None else _placed(mask.image(), *place)
    cell = LATENT_FACTOR if crop is None else (place[1][2] - place[1][0]) / mask.grid.shape[1]
    shares = np.asarray(inside.filter(ImageFilter.GaussianBlur(0.6 * cell)), np.float32) / 255  # no steps of cells
    fill, outline = np.clip((shares - 0.3) / 0.1, 0, 1), np.clip(1 - np.abs(shares - 0.35) / 0.12, 0, 1)
    levels = np.maximum(np.maximum(84 * fill, 230 * outline).astype(np.uint8), np.asarray(inside) > 0)  # all of it
    if is_unsure(mask):
        levels = np.where(np.add.outer(*map(np.arange, levels.shape)) % 9 < 4, levels, (levels + 2) // 3)
    picture = Image.new("RGBA", inside.size, TINT)
    picture.putalpha(Image.fromarray(levels.astype(np.uint8)))
    return _url(picture, "PNG")


def part(size: tuple[int, int], box: Box) -> str:
    """A part to lay over its picture, as a data URL: clear inside, with an outline; dark outside.

    Args:
        size: width and height of the picture in pixels.
        box: the part of it.
    """
    shown, (left, top, right, bottom) = _on_screen(size, box)
    picture = Image.new("RGBA", shown, (0, 0, 0, 120))
    picture.paste((*TINT, 255), (left, top, right, bottom))
    picture.paste((0, 0, 0, 0), (left + 2, top + 2, max(left + 2, right - 2), max(top + 2, bottom - 2)))
    return _url(picture, "PNG")


def border(mask: EditMask | None, size: tuple[int, int], crop: Box | None) -> float:
    """Return where before and after meet at first, in percent from the left: half of the mask lies on either side.

    Args:
        mask: mask of an edit, or None.
        size: width and height of the picture in pixels.
        crop: the part of it that is on the canvas, as in `mask_image`.
    """
    if mask is None or not mask.grid.any():
        return 50.0
    left, _, right, _ = crop or (0, 0, *size)
    middle = float((np.median(np.nonzero(mask.grid)[1]) + 0.5) / mask.grid.shape[1])
    return (left + middle * (right - left)) / size[0] * 100


def preview_overlay(
    preview: Image.Image, mask: EditMask | None, size: tuple[int, int] | None = None, crop: Box | None = None
) -> str:
    """A preview, or a picture of the canvas, as a data URL; inside the mask alone where there is one of its shape.

    Args:
        preview: a picture of one pixel per cell, or larger.
        mask: mask of the edit, or None.
        size: width and height of the picture in pixels; needed with a crop.
        crop: the part of it that is on the canvas, as in `mask_image`.
    """
    if crop is not None and size is not None:
        if mask is not None and mask.grid.any():
            alpha = mask.image().resize(preview.size, Image.Resampling.NEAREST)
            preview = preview.convert("RGBA")
            preview.putalpha(alpha.point(lambda level: 255 if level else 0))
        return _url(_placed(preview.convert("RGBA"), *_on_screen(size, crop)), "PNG")
    if (
        mask is None
        or not mask.grid.any()
        or any(n % m for n, m in zip(preview.size, mask.grid.shape[::-1], strict=True))
    ):
        return _url(preview, "PNG")
    picture = preview.convert("RGBA")
    picture.putalpha(Image.fromarray(cell_pixels(mask.grid, preview.size).astype(np.uint8) * 255))
    if picture.width == mask.grid.shape[1]:
        picture = picture.resize((preview.width * 4, preview.height * 4), Image.Resampling.BILINEAR)
    return _url(picture, "PNG")


def _placed(part: Image.Image, size: tuple[int, int], box: Box) -> Image.Image:
    """A picture of a size that shows another one in a box, and nothing elsewhere."""
    whole = Image.new(part.mode, size)
    left, top, right, bottom = box
    whole.paste(part.resize((right - left, bottom - top), Image.Resampling.NEAREST), (left, top))
    return whole


def _on_screen(size: tuple[int, int], box: Box) -> tuple[tuple[int, int], Box]:
    """A picture's size and a box of it, made smaller to fit the stage."""
    scale = min(1.0, _SCREEN / max(size))
    left, top, right, bottom = (round(side * scale) for side in box)
    width, height = (max(1, round(side * scale)) for side in size)
    return (width, height), (left, top, max(left + 1, right), max(top + 1, bottom))


@dataclass(frozen=True, eq=False)
class Strokes:
    """The marks on the stage.

    Args:
        add: a picture of a size, white where an edit may go; None for nowhere.
        protect: likewise, where it never may.
        inside: (x, y) in pixels of that size, of things that an edit may paint.
        outside: those of things that it may not.
    """

    add: Image.Image | None = None
    protect: Image.Image | None = None
    inside: tuple[tuple[float, float], ...] = ()
    outside: tuple[tuple[float, float], ...] = ()


def decode_strokes(data_url: str, size: tuple[int, int], *, soft: bool = False) -> Strokes:
    """Read what was marked from the stage's picture of it.

    Args:
        data_url: a PNG as a data URL, in the colours of `_COLOURS`, clear elsewhere; "" for none.
        size: width and height in pixels.
        soft: whether where an edit may go has a border within which less of it is taken, the nearer to the outside.

    Raises:
        MaskError: another URL, or one or a picture that is too large. InputError: no base64, or no picture.
    """
    if not data_url:
        return Strokes()
    kind, _, data = data_url.partition(",") if isinstance(data_url, str) else ("", "", "")
    if kind != "data:image/png;base64" or len(data_url) > MAX_STROKES_CHARACTERS:
        raise MaskError(f"strokes must be a PNG as a data URL of at most {MAX_STROKES_CHARACTERS} letters; paint again")
    painted = images.decode(decode_base64(data, "strokes"), "strokes").image
    if max(painted.size) > 2048:
        raise MaskError(f"strokes must have sides of at most 2048 pixels, got {painted.width}x{painted.height}")
    levels = np.asarray(painted.convert("RGBA")).astype(int)
    nearest = np.abs(levels[..., None, :3] - np.array(list(_COLOURS.values()))).sum(-1).argmin(-1)
    add, protect, inside, outside = ((levels[..., 3] > 127) & (nearest == i) for i in range(len(_COLOURS)))
    border = _BORDER * max(painted.size) if soft else 0
    return Strokes(_area(add, size, border), _area(protect, size), _points(inside, size), _points(outside, size))


def png_base64(image: Image.Image) -> str:
    """A picture as a PNG in base64."""
    file = BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def decode_base64(text: str, what: str) -> bytes:
    """Return the bytes of base64: with line breaks, URL-safe, without padding, or behind a data URL's head.

    Args:
        text: what was sent.
        what: its name, for the message.

    Raises:
        InputError: anything else. A space inside is no base64: a form makes it of a "+".
    """
    head, comma, data = text.rpartition(",") if isinstance(text, str) else ("", ",", "")
    try:
        plain = _LINE_BREAK.sub("", data.strip()).translate(_URL_SAFE)
        found = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError as error:
        raise InputError(f"{what} must be base64, got {as_text(text, 40)}") from error
    if comma and not head.casefold().endswith(";base64"):
        raise InputError(f"{what} must be base64, got {as_text(text, 40)}")
    return found


def _area(inside: NDArray[np.bool_], size: tuple[int, int], border: float = 0) -> Image.Image | None:
    """An area as white of a size, grey within its border; one too thin for a border has none."""
    from scipy.ndimage import distance_transform_edt

    if not inside.any():
        return None
    hard = Image.fromarray(inside.astype(np.uint8) * 255).resize(size, 0)
    if not border or inside.all():
        return hard
    depth = distance_transform_edt(np.pad(inside, 1, "edge"))[1:-1, 1:-1]
    soft = Image.fromarray((255 * np.minimum(1, depth / border)).astype(np.uint8)).resize(
        size, Image.Resampling.BILINEAR
    )
    return ImageChops.darker(soft, hard) if depth.max() >= 2 * border else hard


def _points(dots: NDArray[np.bool_], size: tuple[int, int]) -> tuple[tuple[float, float], ...]:
    """Middles of dots on a canvas, in pixels of a size, rims left behind by an eraser or by other strokes apart."""
    from scipy.ndimage import center_of_mass, label

    found, count = label(dots)
    height, width = dots.shape
    middles = center_of_mass(dots, found, range(1, count + 1))
    return tuple(
        (float((x + 0.5) * size[0] / width), float((y + 0.5) * size[1] / height)) for y, x in middles[:_MAX_DOTS]
    )


def _rgb(image: Image.Image) -> Image.Image:
    from fisedit.storage.canvas import to_srgb

    return to_srgb(image, alpha=False) if image.mode != "RGB" or image.info.get("icc_profile") else image.copy()


def _url(image: Image.Image, kind: str, **options: int) -> str:
    file = BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
