"""Edits with a reference picture: an object is swapped, and another picture shows the new one's appearance.

Everything is sampled from a seed. Appearances that the autoencoder cannot reproduce, or too close to the object's own,
are left out. Knows scenes and pixels; nothing of models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.quality.scene_edits import true_mask
from benchmarks.scenes.appearance import Palette, sample_appearance
from benchmarks.scenes.layout import SceneChange, sample_scene
from benchmarks.scenes.prompts import describe_scene
from benchmarks.scenes.scene import Scene, render

if TYPE_CHECKING:
    from benchmarks.quality.scene_edits import WordFilter
    from benchmarks.scenes.drawing import Bytes, Mask

    Roundtrip = Callable[[Bytes], Bytes]

PALETTE = Palette(hues=(15, 45), saturations=(0, 0.9), patterns=("plain",))
"""Warm hues, and greys: most of what the demo model's autoencoder reproduces (`python -m training.gamut`)."""

MAX_ROUNDTRIP_ERROR, MIN_COLOUR_CHANGE = 15.0, 25.0
"""The bounds on an appearance's mean colour, in levels of 255, mean over red, green and blue. They are the largest
error after encoding and decoding, and the least distance from the object's own."""


@dataclass(frozen=True, eq=False)
class ReferenceEdit:
    """An edit with a reference picture.

    Args:
        change: the scenes before and after, each of one object.
        same: whether the reference shows that object, too.
        picture: to open, uint8 [S, S, 3].
        inside: the pixels that may change, bool [S, S].
        object_mask: the pixels of the new object, bool [S, S].
        target: the new scene with the appearance, as the autoencoder decodes it, uint8 [S, S, 3]; no method sees it.
        reference: the other picture, uint8 [S, S, 3].
        reference_mask: the pixels of the object in it, bool [S, S].
    """

    change: SceneChange
    same: bool
    picture: Bytes
    inside: Mask
    object_mask: Mask
    target: Bytes
    reference: Bytes
    reference_mask: Mask


def sample_reference_edit(
    rng: np.random.Generator, side: int, words: WordFilter, roundtrip: Roundtrip, *, same: bool
) -> ReferenceEdit:
    """Sample an edit.

    Args:
        rng: the only source of randomness.
        side: The side of the pictures in pixels, a multiple of 32.
        words: whether a word may be used.
        roundtrip: encodes and decodes a picture, uint8 [S, S, 3].
        same: whether the reference shows the new object, and not another one.
    """
    while True:
        before, target, other = (_plain_scene(rng, words) for _ in range(3))
        old, new, other_word = (scene.objects[0].word for scene in (before, target, other))
        appearance = sample_appearance(rng, PALETTE)
        if old == new or other_word in (old, new):
            continue
        change = SceneChange("swap", before, before.change(0, word=new), 0)
        drawing = render(change.after, side)
        object_mask = drawing.masks[0]
        target_pixels = appearance.paint(drawing.pixels, object_mask)
        painted = roundtrip(target_pixels)
        if _colour_distance(target_pixels, drawing.pixels, object_mask) < MIN_COLOUR_CHANGE:
            continue
        if _colour_distance(target_pixels, painted, object_mask) > MAX_ROUNDTRIP_ERROR:
            continue
        reference_drawing = render(other.change(0, word=new if same else other_word), side)
        region = true_mask(change, side)
        assert region is not None, "a swap has a place"
        picture, reference = (
            render(before, side).pixels,
            appearance.paint(reference_drawing.pixels, reference_drawing.masks[0]),
        )
        return ReferenceEdit(change, same, picture, region, object_mask, painted, reference, reference_drawing.masks[0])


def _plain_scene(rng: np.random.Generator, words: WordFilter) -> Scene:
    """One object without attributes, in known words."""
    while True:
        scene = sample_scene(rng, 1, sky=False)
        placed = scene.objects[0]
        plain = not (scene.weather or placed.colour or placed.accessory or placed.scale)
        if plain and all(map(words, re.findall("[a-z]+", describe_scene(scene).text))):
            return scene


def _colour_distance(one: Bytes, other: Bytes, mask: Mask) -> float:
    return float(np.abs(one[mask].mean(0) - other[mask].mean(0)).mean())
