"""Prompt pairs without pictures, for the detection of global edits.

Global: a scene gets a style, medium, time or weather, or its objects change places. Local: an object is added whose
modifier resembles one of those. The words were chosen independently of the detector's lists.

Two files hold written pairs: `development` for choosing the detector's rules, `reported` for figures alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.scenes.layout import sample_scene
from benchmarks.scenes.prompts import describe_scene

if TYPE_CHECKING:
    from benchmarks.scenes.scene import Scene

GLOBAL_TEMPLATES = (
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
"""Global edits; "{}" is the scene's prompt."""

LOCAL_TEMPLATES = (
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
"""Local edits whose words sound like a place, a time or a style."""


def prompt_pairs(count: int, seed: int = 0) -> Iterator[tuple[str, str, bool]]:
    """Sample prompt pairs: of four two get a style, one is reordered and one adds an object.

    Args:
        count: number of pairs.
        seed: The seed of all of them.

    Returns:
        (source prompt, new prompt, whether the edit is global).
    """
    for i in range(count):
        rng = np.random.default_rng((seed, i))
        scene = replace(sample_scene(rng, count=2, sky=False), wording=0)
        prompt = describe_scene(scene).text
        if i % 4 == 1:
            yield prompt, describe_scene(_reordered(scene)).text, True
        elif i % 4 == 3:
            yield prompt, LOCAL_TEMPLATES[i // 4 % len(LOCAL_TEMPLATES)].format(prompt), False
        else:
            yield prompt, GLOBAL_TEMPLATES[i // 2 % len(GLOBAL_TEMPLATES)].format(prompt), True


GLOBAL_PAIR_KINDS = ("place", "style", "weather", "time", "medium")
"""Kinds of written pairs that concern the whole picture."""

PAIR_FILES = ("development", "reported")
"""Names of the files of written pairs."""


def written_pairs(name: str) -> Iterator[tuple[str, str, bool]]:
    """Written prompt pairs.

    Args:
        name: A name of `PAIR_FILES`.

    Returns:
        (source prompt, new prompt, whether the edit is global).
    """
    kind = ""
    for line in files("benchmarks.quality").joinpath("prompts", f"{name}.txt").read_text("utf-8").splitlines():
        if line.startswith("# "):
            kind = line[2:]
        elif not line.startswith(";"):
            old, new = line.split("|")
            yield old, new, kind in GLOBAL_PAIR_KINDS


def _reordered(scene: Scene) -> Scene:
    """The same objects in another order."""
    return replace(scene, objects=scene.objects[::-1])
