"""Pixels: glyphs of Noto Color Emoji, backgrounds and weather. Knows nothing of scenes, prompts or models."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fisedit.errors import FisEditError

if TYPE_CHECKING:
    from benchmarks.scenes.vocabulary import Background, Hill, Rgb, Weather

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]

CELLS = 32
"""Cells on a side of the picture; positions and sizes are in cells."""

FONT_PATHS = (
    Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"),
    Path("/usr/share/fonts/noto/NotoColorEmoji.ttf"),
    Path("/usr/share/fonts/google-noto-emoji/NotoColorEmoji.ttf"),
)
_STRIKE = 109  # the one size at which the font holds its bitmaps
_MIN_ALPHA = 8  # alpha below this (of 255) is dropped, so that a mask has no invisible boundary
_MIN_SATURATION = 0.25  # saturation from which a pixel of a glyph has a colour to change
_HUE_TOLERANCE = 45.0  # degrees around a glyph's own hue that change with it
_SATURATION_FACTORS = {"pink": 0.55}  # saturation kept, where a colour's name asks for less of it
_STARS = ((2, 2), (6, 9), (12, 5), (18, 11), (22, 2), (28, 7), (16, 1), (26, 13), (3, 13))  # column, row
_PRECIPITATION_SPACING = 4  # cells between two drops or flakes


class FontMissing(FisEditError):
    """The emoji font is not installed."""


@lru_cache(maxsize=1)
def emoji_font() -> ImageFont.FreeTypeFont:
    """Noto Color Emoji, from one of `FONT_PATHS`.

    Raises:
        FontMissing: none of them exists.
    """
    for path in FONT_PATHS:
        if path.is_file():
            return ImageFont.truetype(str(path), _STRIKE)
    raise FontMissing(
        "Noto Color Emoji is needed to draw scenes, found none: run apt-get install fonts-noto-color-emoji"
    )


@lru_cache(maxsize=2048)
def glyph_pixels(glyph: str, size: int, colour: str = "", hue: float = 0.0) -> Bytes:
    """A glyph scaled into a square, on its lower edge.

    Args:
        glyph: the emoji.
        size: side of the square, in pixels.
        colour: one of `COLOURS`; "" for the glyph's own.
        hue: The hue of that colour, in degrees.

    Returns:
        uint8 [size, size, 4], straight alpha.
    """
    glyph_image = _glyph_image(glyph)
    if colour:
        glyph_image = _change_hue(glyph_image, hue, _SATURATION_FACTORS.get(colour, 1.0))
    scale = size / max(glyph_image.size)
    fitted = glyph_image.resize(
        (max(1, round(glyph_image.width * scale)), max(1, round(glyph_image.height * scale))), Image.Resampling.BOX
    )
    box = Image.new("RGBA", (size, size))
    box.paste(fitted, ((size - fitted.width) // 2, size - fitted.height))
    pixels = np.array(box)
    pixels[pixels[..., 3] < _MIN_ALPHA] = 0
    return pixels


@lru_cache(maxsize=128)
def headroom(glyph: str) -> float:
    """The share of its square above a scaled glyph that is empty, as some are wider than tall.

    Args:
        glyph: the emoji.
    """
    glyph_image = _glyph_image(glyph)
    return 1 - glyph_image.height / max(glyph_image.size)


def paste(pixels: Bytes, glyph: Bytes, left: int, top: int) -> Mask:
    """Blend a glyph into a picture, in place.

    Args:
        pixels: uint8 [S, S, 3].
        glyph: uint8 [n, n, 4].
        left: first column.
        top: first row.

    Returns:
        The pixels that it covers, bool [S, S].
    """
    size = glyph.shape[0]
    region = pixels[top : top + size, left : left + size]
    alpha = glyph[..., 3:].astype(np.float32) / 255
    region[:] = np.round(region * (1 - alpha) + glyph[..., :3] * alpha).astype(np.uint8)
    covered = np.zeros(pixels.shape[:2], dtype=bool)
    covered[top : top + size, left : left + size] = glyph[..., 3] > 0
    return covered


@lru_cache(maxsize=256)
def draw_background(background: Background, weather: Weather | None, horizon: int, side: int) -> Bytes:
    """Sky, stars, hills and weather.

    Args:
        background: colours and hills.
        weather: None for clear weather.
        horizon: in cells from the top.
        side: The side of the picture, in pixels.

    Returns:
        uint8 [side, side, 3], cached: not to be written to.
    """
    cell = side / CELLS
    depth = np.arange(side, dtype=np.float32)[:, None] + 0.5
    pixels = np.broadcast_to(
        _gradient(background.sky_top, background.sky_bottom, depth / (horizon * cell)), (side, side, 3)
    )
    if background.stars:
        pixels = _draw_dots(pixels, _STARS, cell, (255, 250, 225), 0.35)
    for hill in background.hills:
        edge = _hill_edge(hill, horizon, side, cell)
        coverage = np.clip(depth - edge + 0.5, 0, 1)[..., None]
        start = (horizon + hill.drop) * cell
        colours = _gradient(hill.top, hill.bottom, (depth - start) / (side - start))
        pixels = pixels * (1 - coverage) + colours * coverage
    if weather is not None:
        pixels = _apply_weather(pixels, weather, horizon * cell, cell)
    return np.round(pixels).astype(np.uint8)


def _glyph_image(glyph: str) -> Image.Image:
    """A glyph at the font's own size, without empty rows and columns around it."""
    canvas = Image.new("RGBA", (_STRIKE * 2, _STRIKE * 2))
    ImageDraw.Draw(canvas).text((_STRIKE // 2, _STRIKE // 2), glyph, font=emoji_font(), embedded_color=True)
    return canvas.crop(canvas.getbbox())


def _change_hue(glyph_image: Image.Image, hue: float, saturation: float) -> Image.Image:
    """A glyph with its most frequent hue turned to another."""
    alpha = glyph_image.getchannel("A")
    h, s, v = (np.array(band, np.float32) for band in glyph_image.convert("RGB").convert("HSV").split())
    degrees = h * (360 / 256)
    coloured = (s > _MIN_SATURATION * 255) & (np.array(alpha) > 0)
    histogram = np.histogram(degrees[coloured], bins=36, range=(0, 360), weights=s[coloured])[0]
    main_hue = 10 * int(np.argmax(histogram + np.roll(histogram, 1) + np.roll(histogram, -1))) + 5
    hue_difference = (degrees - main_hue + 180) % 360 - 180
    changed = coloured & (np.abs(hue_difference) < _HUE_TOLERANCE)
    h = np.where(changed, ((hue + 0.3 * hue_difference) % 360) * (256 / 360), h)
    s = np.where(changed, s * saturation, s)
    bands = [Image.fromarray(band.astype(np.uint8)) for band in (h % 256, s, v)]
    recoloured = Image.merge("HSV", bands).convert("RGB")
    recoloured.putalpha(alpha)
    return recoloured


def _gradient(top: Rgb, bottom: Rgb, share: Floats) -> Floats:
    """Colours from `top` to `bottom` for shares [S, 1] of the way: [S, 1, 3]."""
    ends = np.array([top, bottom], dtype=np.float32)
    part = np.clip(share, 0, 1)[..., None]
    gradient: Floats = ends[0] * (1 - part) + ends[1] * part
    return gradient


def _hill_edge(hill: Hill, horizon: int, side: int, cell: float) -> Floats:
    """The height of a hill's edge in pixels from the top, for every column: [S]."""
    phases = (hill.waves * (np.arange(side) + 0.5) / side + hill.phase).astype(np.float32)
    edge: Floats = ((horizon + hill.drop) * cell - hill.amplitude * cell * _SHAPES[hill.shape](phases)).astype(
        np.float32
    )
    return edge


def _wave(turns: Floats) -> Floats:
    wave: Floats = np.sin(2 * np.pi * turns)
    return wave


def _peaks(turns: Floats) -> Floats:
    """Points of alternating height."""
    high = 0.75 + 0.25 * np.cos(np.pi * np.floor(turns))
    peaks: Floats = (high * (1 - 3 * np.abs(turns % 1 - 0.5))).astype(np.float32)
    return peaks


def _blocks(turns: Floats) -> Floats:
    """Roofs: flat pieces of uneven height, two to a turn."""
    heights = np.array((0.4, 1.0, 0.2, 0.8, 0.5, 0.9, 0.1, 0.6), np.float32)
    blocks: Floats = heights[np.floor(2 * turns).astype(int) % len(heights)]
    return blocks


_SHAPES = {"wave": _wave, "peaks": _peaks, "blocks": _blocks}


def _apply_weather(pixels: Floats, weather: Weather, horizon: float, cell: float) -> Floats:
    """The whole background tinted, most at the horizon, and on it what falls."""
    depth = np.arange(len(pixels), dtype=np.float32) + 0.5
    opacity = 0.45 + (0.4 if weather.word == "fog" else 0.0) * np.exp(-(((depth - horizon) / (7 * cell)) ** 2))
    tint = np.array(weather.tint, np.float32)
    pixels = pixels * (1 - opacity[:, None, None]) + tint * opacity[:, None, None]
    if weather.word == "fog":
        return pixels
    rows = range(1, CELLS, _PRECIPITATION_SPACING)
    positions = [(column, row) for row in rows for column in range(1 + row % 8 // 2, CELLS, _PRECIPITATION_SPACING)]
    rain = weather.word == "rain"
    return _draw_dots(
        pixels, positions, cell, (60, 110, 190) if rain else (255, 255, 255), 0.45, stretch=2.2 if rain else 1.0
    )


def _draw_dots(
    pixels: Floats, positions: Iterable[tuple[int, int]], cell: float, colour: Rgb, radius: float, stretch: float = 1.0
) -> Floats:
    """Soft dots of a radius in cells, stretched upright by `stretch`, in the middle of cells (column, row)."""
    y, x = np.mgrid[0 : pixels.shape[0], 0 : pixels.shape[1]].astype(np.float32) + 0.5
    intensity = np.zeros(pixels.shape[:2], dtype=np.float32)
    squared_radius = (radius * cell) ** 2
    for column, row in positions:
        intensity += np.exp(
            -((x - (column + 0.5) * cell) ** 2 + ((y - (row + 0.5) * cell) / stretch) ** 2) / squared_radius
        )
    part = np.clip(intensity, 0, 1)[..., None]
    result: Floats = pixels * (1 - part) + np.array(colour, dtype=np.float32) * part
    return result
