"""Edits that take a look: a thing of a drawn scene becomes another, and another picture shows how it shall look.

Everything comes from a seed. Looks that an autoencoder cannot paint are not asked for, nor those that nobody would see.
Knows scenes and pixels; nothing of models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fisedit.evaluation.quality.scene_edits import true_mask
from fisedit.evaluation.scenes.appearance import Palette, sample_appearance
from fisedit.evaluation.scenes.layout import SceneChange, sample_scene
from fisedit.evaluation.scenes.prompts import describe_scene
from fisedit.evaluation.scenes.scene import Scene, render

if TYPE_CHECKING:
    from fisedit.evaluation.quality.scene_edits import WordFilter
    from fisedit.evaluation.scenes.drawing import Bytes, Mask

    Painter = Callable[[Bytes], Bytes]

PALETTE = Palette(hues=(15, 45), saturations=(0, 0.9), patterns=("plain",))
"""Warm hues, and greys: most of what the demo model's autoencoder can paint (`python -m training.gamut`)."""

PAINTABLE, VISIBLE = 15.0, 25.0
"""How far a look's mean colour may be off after encoding and decoding, and must be from the thing's own: of 255, mean
over red, green and blue."""


@dataclass(frozen=True, eq=False)
class ReferenceEdit:
    """One edit to make.

    Args:
        change: the scenes before and after, of one thing. same: whether the reference shows that thing too.
        picture: to open, uint8 [S, S, 3]. inside, thing: the pixels that may change, and those of the new thing [S, S].
        painted: the new scene in the look, as the autoencoder paints it: what nobody is shown.
        reference: the other picture. shown: the pixels of the thing there.
    """

    change: SceneChange
    same: bool
    picture: Bytes
    inside: Mask
    thing: Mask
    painted: Bytes
    reference: Bytes
    shown: Mask


def sample_reference_edit(
    rng: np.random.Generator, side: int, words: WordFilter, again: Painter, *, same: bool
) -> ReferenceEdit:
    """An edit at random.

    Args:
        side: of the pictures in pixels, a multiple of 32. words: which words may be used.
        again: a picture, uint8 [S, S, 3], as the autoencoder decodes it.
        same: the reference shows the new thing, and not another one.
    """
    while True:
        before, target, other = (_plain_scene(rng, words) for _ in range(3))
        old, new, third = (scene.objects[0].word for scene in (before, target, other))
        look = sample_appearance(rng, PALETTE)
        if old == new or third in (old, new):
            continue
        change = SceneChange("swap", before, before.change(0, word=new), 0)
        drawing = render(change.after, side)
        thing = drawing.masks[0]
        wanted = look.paint(drawing.pixels, thing)
        painted = again(wanted)
        if _off(wanted, drawing.pixels, thing) < VISIBLE or _off(wanted, painted, thing) > PAINTABLE:
            continue
        shown = render(other.change(0, word=new if same else third), side)
        region = true_mask(change, side)
        assert region is not None, "a swap has a place"
        picture, reference = render(before, side).pixels, look.paint(shown.pixels, shown.masks[0])
        return ReferenceEdit(change, same, picture, region, thing, painted, reference, shown.masks[0])


def _plain_scene(rng: np.random.Generator, words: WordFilter) -> Scene:
    """One thing as it is, in known words."""
    while True:
        scene = sample_scene(rng, 1, sky=False)
        thing = scene.objects[0]
        plain = not (scene.weather or thing.colour or thing.accessory or thing.scale)
        if plain and all(map(words, re.findall("[a-z]+", describe_scene(scene).text))):
            return scene


def _off(one: Bytes, other: Bytes, thing: Mask) -> float:
    return float(np.abs(one[thing].mean(0) - other[thing].mean(0)).mean())
