"""The drawn truth of an edit, with the new thing where and as large as the edited picture has it.

A prompt does not say where a new thing stands, so that a truth in another place would call every insertion wrong. Knows
scenes and pictures, no measure and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from benchmarks.quality.scene_edits import DELETE, GLOBAL_KINDS
from benchmarks.scenes.drawing import CELLS
from benchmarks.scenes.scene import Scene, SceneError, render

if TYPE_CHECKING:
    from benchmarks.scenes.drawing import Bytes, Mask
    from benchmarks.scenes.layout import SceneChange

MOVABLE = ("insert", "resize", "swap")
"""Kinds of change whose new thing may stand elsewhere, and be a little larger or smaller, than it was drawn."""

_SIZES = (0, -1, -2, 1)
_COARSE = 64  # pixels of the side at which places are compared


@dataclass(frozen=True, eq=False)
class DrawnTruth:
    """The picture that an edit should give.

    Args:
        pixels: uint8 [S, S, 3].
        thing: visible pixels of what is new or changed, bool [S, S].
    """

    pixels: Bytes
    thing: Mask


def drawn_truth(change: SceneChange, edited: Image.Image) -> DrawnTruth:
    """Draw the scene after a change, as near to an edited picture as its prompt leaves open.

    Args:
        change: the scenes before and after, which differ in one object.
        edited: the edited picture, S x S pixels.
    """
    assert change.kind not in GLOBAL_KINDS
    scene = _fitted(change, edited) if change.kind in MOVABLE else change.after
    rendered = render(scene, edited.width)
    if change.kind == DELETE:
        return DrawnTruth(rendered.pixels, np.zeros(rendered.pixels.shape[:2], bool))
    placed = scene.objects[change.index]
    words = (placed.accessory,) if change.kind == "dress" else (placed.word, placed.accessory)
    parts = [mask for mask, part in zip(rendered.masks, scene.parts, strict=True) if part[1] in words]
    return DrawnTruth(rendered.pixels, np.any(parts, axis=0))


def _fitted(change: SceneChange, edited: Image.Image) -> Scene:
    """The scene with the thing in the place, then there of the size, that differs least from a picture."""
    levels = np.asarray(edited.convert("RGB").resize((_COARSE, _COARSE), Image.Resampling.BOX), int)

    def difference(scene: Scene) -> float:
        return float(np.abs(render(scene, _COARSE).pixels - levels).mean())

    scene = min(_places(change.after, change.index), key=difference)
    size = scene.objects[change.index].size
    sizes = filter(None, (_moved(scene, change.index, size=size + more) for more in _SIZES))
    return min((place for sized in sizes for place in _places(sized, change.index, reach=2)), key=difference)


def _places(scene: Scene, index: int, reach: int = CELLS) -> Iterator[Scene]:
    """The scene as it is, and with a thing up to `reach` cells away, wherever its box is in the picture."""
    placed, steps = scene.objects[index], range(-reach, reach + 1)
    yield scene
    for x, y in product(steps, steps):
        if moved := _moved(scene, index, left=placed.left + x, bottom=placed.bottom + y):
            yield moved


def _moved(scene: Scene, index: int, **changes: int) -> Scene | None:
    try:
        return scene.change(index, **changes)
    except SceneError:
        return None
