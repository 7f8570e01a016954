"""Drawn scenes as values: what stands where, the prompt that says so, and the same scene with one thing changed.

A scene is frozen and has no pixels; `render` draws it at any size. Positions are in cells, 1/16 of the side, so that
objects sit on the latent grid of a factor-8 autoencoder at 128 px: a very small autoencoder then meets each glyph in
few phases and can be sharp. Nothing here imports torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from training.drawing import Bytes, Mask, draw_background, glyph_pixels, paste
from training.vocabulary import BACKGROUND, BACKGROUNDS, GROUND_WORDS, SKY_WORDS, THING

CELLS = 16
_SIZES = {1: (7, 8), 2: (6, 7), 3: (5,)}
_SKY_SIZE = 5


class SceneError(ValueError):
    """A scene was asked for something that it can't show."""


@dataclass(frozen=True)
class Placed:
    """One object in its square box; `left`, `bottom` and `size` in cells."""

    word: str
    left: int
    bottom: int
    size: int

    def __post_init__(self) -> None:
        if self.word not in THING:
            raise SceneError(f"object must be one of {', '.join(THING)}, got {self.word!r}")
        inside = 0 <= self.left <= CELLS - self.size and self.size <= self.bottom <= CELLS
        if self.size < 1 or not inside:
            raise SceneError(f"object box must lie in the {CELLS}x{CELLS} cells, got {self}")

    def pixel_box(self, side: int) -> tuple[int, int, int]:
        """Left, top and side of the box in pixels of a picture of `side` pixels."""
        cell = side // CELLS
        return self.left * cell, (self.bottom - self.size) * cell, self.size * cell


@dataclass(frozen=True)
class Span:
    """Where one object's word stands in the prompt: characters [start, stop)."""

    start: int
    stop: int


@dataclass(frozen=True)
class Scene:
    """Objects from left to right (one in the sky comes last) before a background whose horizon is in cells."""

    background: str
    horizon: int
    objects: tuple[Placed, ...]

    def __post_init__(self) -> None:
        if self.background not in BACKGROUND:
            raise SceneError(f"background must be one of {', '.join(BACKGROUND)}, got {self.background!r}")
        words = [placed.word for placed in self.objects]
        if len(set(words)) != len(words):
            raise SceneError(f"objects must differ from each other, got {', '.join(words)}")

    @property
    def prompt(self) -> str:
        """The sentence that describes this scene."""
        return "".join(text for text, _ in self._phrases())

    @property
    def spans(self) -> tuple[Span, ...]:
        """The span of each object's word in the prompt, in the order of `objects`."""
        found: dict[int, Span] = {}
        position = 0
        for text, index in self._phrases():
            if index is not None:
                found[index] = Span(position, position + len(text))
            position += len(text)
        return tuple(found[index] for index in range(len(self.objects)))

    @property
    def words(self) -> tuple[str, ...]:
        """The objects' words, in the order of `objects`."""
        return tuple(placed.word for placed in self.objects)

    def replace_object(self, index: int, word: str) -> "Scene":
        """The same scene with another object in the same box."""
        changed = list(self.objects)
        changed[index] = replace(changed[index], word=word)
        return replace(self, objects=tuple(changed))

    def without_object(self, index: int) -> "Scene":
        """The same scene, one object gone."""
        return replace(self, objects=self.objects[:index] + self.objects[index + 1 :])

    def with_background(self, word: str) -> "Scene":
        """The same objects somewhere else."""
        return replace(self, background=word)

    def _phrases(self) -> Iterable[tuple[str, int | None]]:
        """The prompt in pieces, each with the index of the object that it names."""
        ground = [i for i, placed in enumerate(self.objects) if not THING[placed.word].in_sky]
        sky = [i for i in range(len(self.objects)) if i not in ground]
        for rank, index in enumerate(ground):
            joint = "" if rank == 0 else " and " if rank == len(ground) - 1 else ", "
            yield f"{joint}{THING[self.objects[index].word].article} ", None
            yield self.objects[index].word, index
        yield f"{' ' if ground else ''}{BACKGROUND[self.background].phrase}", None
        for rank, index in enumerate(sky):
            joint = " under" if rank == 0 else " and"
            yield f"{joint} {THING[self.objects[index].word].article} ", None
            yield self.objects[index].word, index


@dataclass(frozen=True)
class Drawing:
    """A rendered scene: `pixels` uint8 [S, S, 3], `masks` bool [objects, S, S], what of each object can be seen."""

    pixels: Bytes
    masks: Mask


def render(scene: Scene, side: int = 128) -> Drawing:
    """Draws a scene at `side` x `side` pixels (a multiple of 16).

    Raises:
        SceneError: `side` is not a multiple of 16.
        FontMissing: the emoji font is not installed.
    """
    if side < CELLS or side % CELLS:
        raise SceneError(f"side must be a positive multiple of {CELLS} pixels, got {side}")
    pixels = draw_background(BACKGROUND[scene.background], scene.horizon, side, CELLS)
    masks = np.zeros((len(scene.objects), side, side), dtype=bool)
    for index, placed in enumerate(scene.objects):
        left, top, size = placed.pixel_box(side)
        covered = paste(pixels, glyph_pixels(THING[placed.word].glyph, size), left, top)
        masks[:index] &= ~covered
        masks[index] = covered
    return Drawing(pixels, masks)


def sample_scene(rng: np.random.Generator, count: int | None = None, sky: bool | None = None) -> Scene:
    """Draws a scene at random.

    Args:
        rng: the only source of randomness; the same state gives the same scene.
        count: how many objects stand on the ground, 1 to 3; drawn when None.
        sky: whether one more object is in the sky; one time in four when None.
    """
    chosen = int(rng.choice((1, 2, 3), p=(0.35, 0.45, 0.2))) if count is None else count
    words = [str(word) for word in rng.choice(GROUND_WORDS, size=chosen, replace=False)]
    objects = [_place(rng, word, slot, chosen) for slot, word in enumerate(words)]
    if rng.random() < 0.25 if sky is None else sky:
        left = int(rng.integers(0, CELLS - _SKY_SIZE + 1))
        objects.append(Placed(str(rng.choice(SKY_WORDS)), left, _SKY_SIZE + int(rng.integers(0, 2)), _SKY_SIZE))
    background = BACKGROUNDS[int(rng.integers(len(BACKGROUNDS)))].word
    return Scene(background, int(rng.integers(8, 10)), tuple(objects))


def _place(rng: np.random.Generator, word: str, slot: int, count: int) -> Placed:
    """Puts an object somewhere in its own column of the ground, so that no two overlap."""
    size = int(rng.choice(_SIZES[count]))
    start, stop = slot * CELLS // count, (slot + 1) * CELLS // count
    left = int(rng.integers(start, stop - size + 1))
    return Placed(word, left, int(rng.integers(14, 16)), size)
