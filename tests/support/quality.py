"""Edits, cases and pictures for the tests of the quality benchmark."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from benchmarks.quality import pie_bench
from benchmarks.scenes.drawing import FontMissing, emoji_font
from benchmarks.scenes.layout import SceneChange
from benchmarks.scenes.scene import PlacedObject, Scene
from fisedit.bench.edit_case import EditCase
from tests.support.grids import grids

HOW = {"num_inference_steps": 7, "guidance_scale": 4.0}
SIDE = 128
SQUARE = grids(16, 16)["square"]


def font_is_there() -> bool:
    try:
        emoji_font()
    except FontMissing:
        return False
    return True


needs_font = pytest.mark.skipif(not font_is_there(), reason="the font Noto Color Emoji is not installed")


def grey(level: int, side: int = 16) -> np.ndarray:
    return np.full((side, side, 3), level, np.uint8)


def picture(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels)


ENTRY = {
    "image_path": "1_change_object/one.png",
    "original_prompt": "a [cat] and a cake on a beach",
    "editing_prompt": "a [dog] and a cake on a beach",
    "editing_instruction": "turn the cat into a dog",
    "editing_type_id": "1",
    "blended_word": "cat dog",
    "mask": [n for row in range(128, 256) for n in (pie_bench.SIDE * row + 128, 128)],
}
"""An entry of PIE-Bench whose mask is a square."""


def fresh(case: EditCase, **changes: object) -> EditCase:
    """The same source without what was kept of earlier methods."""
    return EditCase(case.editor, replace(case.edit, **changes), case.source, case.trajectory)


def levels(one: Image.Image, other: Image.Image) -> int:
    """Largest difference of two pictures, of 255."""
    return int(np.abs(np.asarray(one, int) - np.asarray(other, int)).max())


TWO = Scene("beach", 16, (PlacedObject("cat", 0, 30, 12), PlacedObject("car", 16, 30, 12, colour="red")))
SWAP = SceneChange("swap", TWO, TWO.change(0, word="dog"), 0)
