"""Combinations of words, and layouts, that no training run sees: the truth that edits are measured on.

`held_out.json` lists them. Every word occurs in training; some of its combinations do not. A combination is two
objects, an object and a background, colour or accessory, or a background and a weather. A layout is the horizon with
the boxes of all objects. It is held out by its checksum: one in `layout_share`. A scene with any of them is held out,
in every wording.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from benchmarks.scenes.scene import Scene

SPLITS = ("development", "reported")
"""Thresholds are chosen on edits of the first seed, and figures are reported on those of the second."""

_FILE = Path(__file__).with_name("held_out.json")


@dataclass(frozen=True)
class HeldOut:
    """The combinations and layouts that are held out.

    Args:
        combinations: The combinations of two words each.
        layout_share: one layout in this many.
        seeds: The seeds of `SPLITS`, by name.
    """

    combinations: frozenset[frozenset[str]]
    layout_share: int
    seeds: dict[str, int]


@cache
def held_out() -> HeldOut:
    """The contents of `held_out.json`."""
    table: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    words = [pair for name in ("backgrounds", "colours", "accessories", "weathers") for pair in table[name].items()]
    pairs = frozenset(frozenset(pair) for pair in [*words, *table["pairs"]])
    return HeldOut(pairs, table["layout_share"], table["seeds"])


def word_pairs(scene: Scene) -> frozenset[frozenset[str]]:
    """Every combination of two words that a scene shows.

    Args:
        scene: with any objects.
    """
    attribute_pairs = [
        (placed.word, word)
        for placed in scene.objects
        for word in (scene.background, placed.colour, placed.accessory)
        if word
    ]
    object_pairs = combinations([placed.word for placed in scene.objects], 2)
    weather = [(scene.background, scene.weather)] if scene.weather else []
    return frozenset(frozenset(pair) for pair in [*attribute_pairs, *object_pairs, *weather])


def has_unseen_words(scene: Scene) -> bool:
    """Return whether a combination of words is held out, so that training saw no prompt of this content.

    Args:
        scene: The scene with any objects.
    """
    return not held_out().combinations.isdisjoint(word_pairs(scene))


def has_unseen_layout(scene: Scene) -> bool:
    """Return whether the horizon with the boxes of all objects is held out.

    Args:
        scene: The scene with any objects.
    """
    boxes = [(placed.left, placed.bottom, placed.size) for placed in scene.objects]
    return crc32(repr((scene.horizon, boxes)).encode()) % held_out().layout_share == 0


def is_unseen(scene: Scene) -> bool:
    """Return whether training must pass a scene over: for its words or for its layout.

    Args:
        scene: The scene with any objects.
    """
    return has_unseen_words(scene) or has_unseen_layout(scene)
