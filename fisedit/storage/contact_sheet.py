"""Images for reports: a mask over an image, and a captioned row of images. Knows Pillow and canvases, no files."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont
from PIL.Image import Resampling

from fisedit.storage.canvas import to_editable, to_srgb

_TINT = (255, 64, 96)
_BACKGROUND, _TEXT = (252, 252, 250), (32, 32, 36)
_SIDE, _GAP, _LINE = 288, 16, 20


def overlay(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Draw a mask over an image as a screen shows it: the area inside is tinted and outlined.

    Args:
        image: The image before the edit, upright, of any mode.
        mask: Mode "L", of the same size, 255 inside and 0 outside.

    Returns:
        RGB in sRGB; what is clear is white.
    """
    colours = to_srgb(to_editable(image), alpha=False)
    tinted = Image.blend(colours, Image.new("RGB", image.size, _TINT), 0.4)
    shown = Image.composite(tinted, colours, mask)
    outline = ImageChops.subtract(mask, mask.filter(ImageFilter.MinFilter(3)))
    shown.paste(_TINT, mask=outline)
    return shown


def make_sheet(columns: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Draw captioned images side by side, all of one size.

    Args:
        columns: Caption and image, from left to right.
    """
    font = ImageFont.load_default(15)
    captions = [_wrap(caption, font) for caption, _ in columns]
    pictures = [_resize(picture) for _, picture in columns]
    top = max(picture.height for picture in pictures) + 2 * _GAP
    size = (
        sum(picture.width + _GAP for picture in pictures) + _GAP,
        top + _LINE * max(len(lines) for lines in captions) + _GAP,
    )
    page = Image.new("RGB", size, _BACKGROUND)
    draw = ImageDraw.Draw(page)
    left = _GAP
    for lines, picture in zip(captions, pictures, strict=True):
        page.paste(picture, (left, _GAP))
        draw.multiline_text((left, top), "\n".join(lines), _TEXT, font, spacing=4)
        left += picture.width + _GAP
    return page


def _resize(picture: Image.Image) -> Image.Image:
    factor = _SIDE / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    return picture.convert("RGB").resize(size, Resampling.LANCZOS)


def _wrap(caption: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if font.getlength(longer) <= _SIDE else [*lines, word]
    return lines
