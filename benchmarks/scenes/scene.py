"""Drawn scenes as values: which object is where, and the same scene with one property changed.

A scene is frozen and has no pixels; `render` draws it at any size. Positions are in cells, 1/32 of the side. At 256 px
they are the latent grid of a factor-8 autoencoder. So a very small autoencoder sees each glyph at few offsets and
can be sharp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.scenes.drawing import CELLS, Bytes, Mask, draw_background, glyph_pixels, headroom, paste
from benchmarks.scenes.vocabulary import ACCESSORIES, BACKGROUND, COLOURS, OBJECT, SCALES, WEATHER
from fisedit.errors import InputError

_ACCESSORY_RATIOS = 0.55, 0.18
"""An accessory's share of its wearer's size, and the share of itself that overlaps the wearer."""


class SceneError(InputError):
    """A scene was requested that cannot be drawn."""


@dataclass(frozen=True)
class PlacedObject:
    """One object in its square box.

    Args:
        word: its noun.
        left: first column of its box, in cells.
        bottom: first row below its box, in cells.
        size: side of its box, in cells.
        colour: one of `COLOURS`, or "".
        scale: "big", "small" or "", the word for `size`.
        accessory: one of `ACCESSORIES`, or "".
    """

    word: str
    left: int
    bottom: int
    size: int
    colour: str = ""
    scale: str = ""
    accessory: str = ""

    def __post_init__(self) -> None:
        object_kind = OBJECT.get(self.word)
        if object_kind is None:
            raise SceneError(f"object must be one of {', '.join(OBJECT)}, got {self.word!r}")
        if self.colour and (self.colour not in COLOURS or not object_kind.colours):
            raise SceneError(
                f"no {self.word} comes in {self.colour!r}: use one of {', '.join(COLOURS)} where it has one"
            )
        if self.scale and self.scale not in SCALES:
            raise SceneError(f"scale must be one of {', '.join(SCALES)} or empty, got {self.scale!r}")
        if self.accessory and (self.accessory not in ACCESSORIES or not object_kind.wears):
            raise SceneError(f"a {self.word} can't wear {self.accessory!r}")
        inside = 0 <= self.left <= CELLS - self.size and self.size <= self.bottom <= CELLS
        if self.size < 1 or not inside:
            raise SceneError(f"object box must lie in the {CELLS}x{CELLS} cells, got {self}")

    @property
    def right(self) -> int:
        """The first column right of the box."""
        return self.left + self.size

    @property
    def accessory_size(self) -> int:
        """The size of its accessory, in cells."""
        return round(self.size * _ACCESSORY_RATIOS[0])

    @property
    def top(self) -> int:
        """The first row that it may cover, accessory included; one too tall for the picture is pulled down."""
        worn = self.accessory_size - round(self.accessory_size * _ACCESSORY_RATIOS[1]) if self.accessory else 0
        return max(0, self.bottom - self.size - worn)


@dataclass(frozen=True)
class Scene:
    """The content of a picture.

    Args:
        background: a word of `BACKGROUND`.
        horizon: in cells from the top.
        objects: different from one another; those on the ground from left to right, then those in the sky.
        weather: a word of `WEATHER`, or "".
        relation: how the first object stands to the second: "and", "next to" or "on top of".
        wording: selects the prompt's phrases; 0 is the plainest.
    """

    background: str
    horizon: int
    objects: tuple[PlacedObject, ...]
    weather: str = ""
    relation: str = "and"
    wording: int = 0

    def __post_init__(self) -> None:
        if self.background not in BACKGROUND:
            raise SceneError(f"background must be one of {', '.join(BACKGROUND)}, got {self.background!r}")
        if self.weather and self.weather not in WEATHER:
            raise SceneError(f"weather must be one of {', '.join(WEATHER)} or empty, got {self.weather!r}")
        words = [placed.word for placed in self.objects]
        if len(set(words)) != len(words):
            raise SceneError(f"objects must differ from each other, got {', '.join(words)}")

    @property
    def parts(self) -> tuple[tuple[int, str], ...]:
        """Everything that has a mask: (object's index, word), an accessory after its wearer."""
        return tuple(
            (index, word)
            for index, placed in enumerate(self.objects)
            for word in (placed.word, placed.accessory)
            if word
        )

    @property
    def words(self) -> tuple[str, ...]:
        """The nouns of `parts`."""
        return tuple(word for _, word in self.parts)

    def change(self, index: int, **changes: object) -> Scene:
        """The same scene with some fields of one object changed.

        Args:
            index: The index of the object.
            **changes: fields of `PlacedObject`.
        """
        objects = list(self.objects)
        objects[index] = replace(objects[index], **changes)  # type: ignore[arg-type]
        return replace(self, objects=tuple(objects))

    def without(self, index: int) -> Scene:
        """The same scene without one object.

        Args:
            index: The index of the object.
        """
        relation = "and" if index < 2 else self.relation
        return replace(self, objects=self.objects[:index] + self.objects[index + 1 :], relation=relation)


@dataclass(frozen=True)
class RenderedScene:
    """A rendered scene.

    Args:
        pixels: uint8 [S, S, 3].
        masks: the visible pixels of each part, bool [parts, S, S].
    """

    pixels: Bytes
    masks: Mask


def render(scene: Scene, side: int = 256) -> RenderedScene:
    """Draw a scene.

    Args:
        scene: what is drawn.
        side: The side of the picture in pixels, a multiple of 32.

    Raises:
        SceneError: `side` is not a multiple of 32.
        FontMissing: the emoji font is not installed.
    """
    if side < CELLS or side % CELLS:
        raise SceneError(f"side must be a positive multiple of {CELLS} pixels, got {side}")
    cell = side // CELLS
    pixels = draw_background(BACKGROUND[scene.background], WEATHER.get(scene.weather), scene.horizon, side).copy()
    masks = np.zeros((len(scene.parts), side, side), dtype=bool)
    order = sorted(range(len(scene.parts)), key=lambda k: not OBJECT[scene.objects[scene.parts[k][0]].word].in_sky)
    for drawn, k in enumerate(order):  # the sky is behind the ground
        index, word = scene.parts[k]
        placed = scene.objects[index]
        if word == placed.accessory:
            covered = _paste_accessory(pixels, placed, cell)
        else:
            glyph = glyph_pixels(OBJECT[word].glyph, placed.size * cell, placed.colour, COLOURS.get(placed.colour, 0.0))
            covered = paste(pixels, glyph, placed.left * cell, (placed.bottom - placed.size) * cell)
        masks[order[:drawn]] &= ~covered
        masks[k] = covered
    return RenderedScene(pixels, masks)


def _paste_accessory(pixels: Bytes, placed: PlacedObject, cell: int) -> Mask:
    size = placed.accessory_size
    left = (2 * placed.left + placed.size - size) * cell // 2
    top = (placed.top + int(placed.size * headroom(OBJECT[placed.word].glyph))) * cell
    return paste(pixels, glyph_pixels(ACCESSORIES[placed.accessory], size * cell), left, top)
