"""Drawn scenes that several tests look at."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from benchmarks.scenes.drawing import CELLS, Mask
from benchmarks.scenes.layout import CHANGE_KINDS, SceneChange, sample_change, sample_scene
from benchmarks.scenes.prompts import ObjectRequest, SceneRequest
from benchmarks.scenes.scene import PlacedObject, Scene, render

SIDE = 64  # two pixels a cell: quick, and the same code
CAT, CAKE, MOON = PlacedObject("cat", 2, 28, 12), PlacedObject("cake", 18, 29, 12), PlacedObject("moon", 12, 9, 8)
CAT_AND_CAKE = Scene("beach", 17, (CAT, CAKE))


@lru_cache(maxsize=1)
def scenes() -> list[Scene]:
    return [sample_scene(np.random.default_rng(seed)) for seed in range(400)]


@lru_cache(maxsize=len(CHANGE_KINDS))
def edits(kind: str) -> list[SceneChange]:
    return [sample_change(np.random.default_rng(seed), kind) for seed in range(40)]


def box(placed: PlacedObject, side: int = SIDE) -> Mask:
    """The pixels of an object's box, accessory included."""
    cell, inside = side // CELLS, np.zeros((side, side), dtype=bool)
    inside[placed.top * cell : placed.bottom * cell, placed.left * cell : placed.right * cell] = True
    return inside


def differ(first: Scene, second: Scene, side: int = SIDE) -> Mask:
    return np.any(render(first, side).pixels != render(second, side).pixels, axis=-1)


def words(prompt: str) -> list[str]:
    return re.findall(r"[a-z]+", prompt)


def request_of(scene: Scene) -> SceneRequest:
    """What the prompt of a scene must ask for."""
    asked = tuple(ObjectRequest(p.word, p.colour, p.scale, p.accessory) for p in scene.objects)
    return SceneRequest(asked, scene.background, scene.weather, scene.relation)
