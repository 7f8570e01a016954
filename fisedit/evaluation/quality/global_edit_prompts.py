"""Prompt pairs without pictures, for the detector of edits that concern the whole picture.

Whole: a style, medium, time or weather is said of a scene, or its things change places. Not whole: a thing is added
whose modifier could pass for one of those. The words were chosen without a look at the detector's lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fisedit.evaluation.scenes.layout import sample_scene
from fisedit.evaluation.scenes.prompts import describe_scene

if TYPE_CHECKING:
    from fisedit.evaluation.scenes.scene import Scene

STYLED = (
    "{}, in the style of van gogh",
    "a watercolor painting of {}",
    "{} as pixel art",
    "{}, black and white",
    "a pencil sketch of {}",
    "{} at dawn",
    "an oil painting of {}",
    "{} during a thunderstorm",
    "{}, comic book style",
    "{} in winter",
    "a stained glass window of {}",
    "{} under a cloudy sky",
    "{}, dramatic lighting",
    "a claymation scene of {}",
    "{}, low poly",
    "an aerial view of {}",
    "{} by candlelight",
    "a faded polaroid of {}",
    "{} in autumn",
    "{}, ukiyo-e print",
    "a child's drawing of {}",
    "{}, overexposed",
    "{} on a misty morning",
    "{} made of lego",
)
"""What makes a whole picture another; "{}" is its prompt."""

PLACED = (
    "{} and a vintage car",
    "{} and a snow globe",
    "{} and a traffic light",
    "{} and a beach ball",
    "{} and a rain coat",
    "{} and a night lamp",
    "{} and an oil lamp",
    "{} and a painting on an easel",
    "{} and a winter jacket",
    "{} and a street sign",
    "{} and a sun hat",
    "{} and a garden gnome",
)
"""What adds a thing in one place, though its words sound like a place, a time or a style."""


def prompt_pairs(count: int, seed: int = 0) -> Iterator[tuple[str, str, bool]]:
    """Source prompt, new prompt, and whether the edit concerns the whole picture.

    Of four pairs two are styled, one is reordered and one adds a thing.
    """
    for i in range(count):
        rng = np.random.default_rng((seed, i))
        scene = replace(sample_scene(rng, count=2, sky=False), wording=0)
        prompt = describe_scene(scene).text
        if i % 4 == 1:
            yield prompt, describe_scene(_reordered(scene)).text, True
        elif i % 4 == 3:
            yield prompt, PLACED[i // 4 % len(PLACED)].format(prompt), False
        else:
            yield prompt, STYLED[i // 2 % len(STYLED)].format(prompt), True


def _reordered(scene: Scene) -> Scene:
    """The same words, the things in another order."""
    return replace(scene, objects=scene.objects[::-1])
