"""Pixels: glyphs of Noto Color Emoji and backgrounds. Knows nothing of scenes, prompts or models."""

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from training.vocabulary import Background, Hill, Rgb

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]

FONT_PATHS = (
    Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"),
    Path("/usr/share/fonts/noto/NotoColorEmoji.ttf"),
    Path("/usr/share/fonts/google-noto-emoji/NotoColorEmoji.ttf"),
)
_STRIKE = 109  # the one size at which the font holds its bitmaps
_FAINTEST = 8  # alpha below this (of 255) is dropped, so that a mask has no invisible rim
_STARS = ((1, 1), (3, 4), (6, 2), (9, 5), (11, 1), (14, 3), (8, 0), (13, 6), (1, 6))  # column, row in cells


class FontMissing(RuntimeError):
    """The emoji font is not installed."""


@lru_cache(maxsize=1)
def emoji_font() -> ImageFont.FreeTypeFont:
    """Noto Color Emoji, from wherever the system keeps it.

    Raises:
        FontMissing: none of the known places has it.
    """
    for path in FONT_PATHS:
        if path.is_file():
            return ImageFont.truetype(str(path), _STRIKE)
    raise FontMissing(
        "Noto Color Emoji is needed to draw scenes, found none: run apt-get install fonts-noto-color-emoji"
    )


@lru_cache(maxsize=512)
def glyph_pixels(glyph: str, size: int) -> Bytes:
    """A glyph fitted into a square and standing on its lower edge: uint8 [size, size, 4], straight alpha."""
    font = emoji_font()
    canvas = Image.new("RGBA", (_STRIKE * 2, _STRIKE * 2))
    ImageDraw.Draw(canvas).text((_STRIKE // 2, _STRIKE // 2), glyph, font=font, embedded_color=True)
    ink = canvas.crop(canvas.getbbox())
    scale = size / max(ink.size)
    fitted = ink.resize((max(1, round(ink.width * scale)), max(1, round(ink.height * scale))), Image.Resampling.BOX)
    box = Image.new("RGBA", (size, size))
    box.paste(fitted, ((size - fitted.width) // 2, size - fitted.height))
    pixels = np.array(box)
    pixels[pixels[..., 3] < _FAINTEST] = 0
    return pixels


def paste(pixels: Bytes, glyph: Bytes, left: int, top: int) -> Mask:
    """Blends a glyph into `pixels` [S, S, 3] in place and returns the pixels that it covers, bool [S, S]."""
    size = glyph.shape[0]
    region = pixels[top : top + size, left : left + size]
    alpha = glyph[..., 3:].astype(np.float32) / 255
    region[:] = np.round(region * (1 - alpha) + glyph[..., :3] * alpha).astype(np.uint8)
    covered = np.zeros(pixels.shape[:2], dtype=bool)
    covered[top : top + size, left : left + size] = glyph[..., 3] > 0
    return covered


def draw_background(background: Background, horizon: int, side: int, cells: int) -> Bytes:
    """Sky, stars and hills at `side` pixels: uint8 [side, side, 3], a fresh array; `horizon` in cells."""
    return _background_pixels(background, horizon, side, cells).copy()


@lru_cache(maxsize=64)
def _background_pixels(background: Background, horizon: int, side: int, cells: int) -> Bytes:
    cell = side / cells
    depth = np.arange(side, dtype=np.float32)[:, None] + 0.5
    pixels = np.broadcast_to(
        _gradient(background.sky_top, background.sky_bottom, depth / (horizon * cell)), (side, side, 3)
    )
    if background.stars:
        pixels = _with_stars(pixels, cell)
    for hill in background.hills:
        edge = _hill_edge(hill, horizon, side, cell)
        cover = np.clip(depth - edge + 0.5, 0, 1)[..., None]
        start = (horizon + hill.drop) * cell
        paint = _gradient(hill.top, hill.bottom, (depth - start) / (side - start))
        pixels = pixels * (1 - cover) + paint * cover
    return np.round(pixels).astype(np.uint8)


def _gradient(top: Rgb, bottom: Rgb, share: Floats) -> Floats:
    """Colours from `top` to `bottom` for shares [S, 1] of the way: [S, 1, 3]."""
    ends = np.array([top, bottom], dtype=np.float32)
    part = np.clip(share, 0, 1)[..., None]
    mixed: Floats = ends[0] * (1 - part) + ends[1] * part
    return mixed


def _hill_edge(hill: Hill, horizon: int, side: int, cell: float) -> Floats:
    """The height of a hill's edge in pixels from the top, for every column: [S]."""
    across = (np.arange(side, dtype=np.float32) + 0.5) / side
    wave = np.sin(2 * np.pi * (hill.waves * across + hill.turn))
    edge: Floats = ((horizon + hill.drop) * cell - hill.swell * cell * wave).astype(np.float32)
    return edge


def _with_stars(sky: Floats, cell: float) -> Floats:
    """Soft stars in the middle of some cells of the sky [S, S, 3]."""
    y, x = np.mgrid[0 : sky.shape[0], 0 : sky.shape[1]].astype(np.float32) + 0.5
    light = np.zeros(sky.shape[:2], dtype=np.float32)
    for column, row in _STARS:
        away = (x - (column + 0.5) * cell) ** 2 + (y - (row + 0.5) * cell) ** 2
        light += np.exp(-away / (0.03 * cell * cell))
    part = np.clip(light, 0, 1)[..., None]
    lit: Floats = sky * (1 - part) + np.array((255, 250, 225), dtype=np.float32) * part
    return lit
