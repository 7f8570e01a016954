"""Hues and patterns of drawn objects that no prompt describes. Knows pixels and masks alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from benchmarks.scenes.drawing import Bytes, Floats, Mask

PATTERNS = ("plain", "stripes", "dots")


@dataclass(frozen=True)
class Appearance:
    """One hue, or two in a pattern.

    Args:
        hues: The hues in degrees.
        saturation: 0 to 1.
        pattern: one of `PATTERNS`.
        period: The period of the pattern, as a share of the picture's side.
        angle: the pattern's direction, in radians.
    """

    hues: tuple[float, float]
    saturation: float
    pattern: str = "plain"
    period: float = 0.08
    angle: float = 0.0

    def paint(self, pixels: Bytes, mask: Mask) -> Bytes:
        """Recolour the pixels of a mask; their brightness is kept, in a smaller range.

        Args:
            pixels: uint8 [S, S, 3].
            mask: bool [S, S].

        Returns:
            uint8 [S, S, 3].
        """
        hsv = np.array(Image.fromarray(pixels).convert("HSV"))
        second_hue_mask = self._second_hue_mask(*mask.shape)
        hues = np.where(second_hue_mask, self.hues[1], self.hues[0]) % 360 * (256 / 360)
        hsv[..., 0] = hues.astype(np.uint8)
        hsv[..., 1] = round(255 * self.saturation)
        hsv[..., 2] = 70 + (hsv[..., 2].astype(np.float32) * (185 / 255)).astype(np.uint8)
        painted = np.array(Image.fromarray(hsv, "HSV").convert("RGB"))
        result: Bytes = np.where(mask[..., None], painted, pixels)
        return result

    def _second_hue_mask(self, height: int, width: int) -> Mask:
        """Mask of the second hue, bool [height, width]."""
        y, x = np.mgrid[:height, :width].astype(np.float32)
        along: Floats = (x * np.cos(self.angle) + y * np.sin(self.angle)) / (self.period * width)
        across: Floats = (y * np.cos(self.angle) - x * np.sin(self.angle)) / (self.period * width)
        if self.pattern == "plain":
            return np.zeros((height, width), dtype=bool)
        if self.pattern == "stripes":
            stripes: Mask = along % 1 < 0.5
            return stripes
        dots: Mask = (along % 1 - 0.5) ** 2 + (across % 1 - 0.5) ** 2 < 0.1
        return dots


@dataclass(frozen=True)
class Palette:
    """Ranges that appearances are sampled from.

    A small autoencoder reproduces only colours of its training data, and no adapter can add others.

    Args:
        hues: from and to, in degrees.
        saturations: from and to, 0 to 1.
        patterns: some of `PATTERNS`.
    """

    hues: tuple[float, float] = (0, 360)
    saturations: tuple[float, float] = (0.5, 0.95)
    patterns: tuple[str, ...] = PATTERNS


def sample_appearance(rng: np.random.Generator, palette: Palette) -> Appearance:
    """Sample an appearance; every other one is plain if the palette allows it.

    Args:
        rng: the only source of randomness.
        palette: the ranges.
    """
    first, second = rng.uniform(*palette.hues, size=2)
    plain = "plain" in palette.patterns and bool(rng.random() < 0.5)
    return Appearance(
        (float(first), float(second)),
        float(rng.uniform(*palette.saturations)),
        "plain" if plain else str(rng.choice(palette.patterns)),
        period=float(rng.uniform(0.07, 0.13)),
        angle=float(rng.uniform(0, np.pi)),
    )
