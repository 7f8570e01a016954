"""Drawn heads that tilt, shift, grow and blink: the truth of a drive.

A head stands for what a tracker follows: its box, drawn upright, is the square of a pose that faces the viewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.scenes.drawing import CELLS, Bytes, Mask, glyph_pixels
from benchmarks.scenes.layout import sample_scene
from benchmarks.scenes.scene import Scene, SceneError, render
from benchmarks.scenes.vocabulary import FULL_VOCABULARY, OBJECT, SceneVocabulary
from fisedit.values.drive import EXPRESSIONS, Drive

EYES: Mapping[str, tuple[float, float, float, float, float]] = {
    "cat": (0.309, 0.606, 0.711, 0.597, 0.138),
    "dog": (0.347, 0.616, 0.667, 0.616, 0.100),
    "fox": (0.370, 0.605, 0.637, 0.605, 0.109),
    "panda": (0.314, 0.562, 0.686, 0.562, 0.150),
    "frog": (0.250, 0.344, 0.758, 0.347, 0.156),
    "lion": (0.384, 0.380, 0.633, 0.384, 0.075),
    "bear": (0.312, 0.500, 0.688, 0.497, 0.131),
    "rabbit": (0.369, 0.600, 0.636, 0.605, 0.109),
    "pig": (0.273, 0.577, 0.713, 0.577, 0.122),
    "tiger": (0.312, 0.325, 0.709, 0.325, 0.106),
    "owl": (0.377, 0.297, 0.625, 0.305, 0.109),
}
"""Word -> x and y of the two eyes, the picture's left one first, and their size, as shares of the glyph's square."""

TILT, SHIFT, GROWTH = 35.0, 3.0, 1.2
"""Degrees either way, cells either way, and the factor either way, that poses are sampled within."""

_BLINKS = EXPRESSIONS.index("eyeBlinkRight"), EXPRESSIONS.index("eyeBlinkLeft")
"""Coefficients of the eyes in the order of `EYES`: a face's own left is on the right."""

_CLOSED = 0.5
_OVERSAMPLING = 2


@dataclass(frozen=True)
class PosedScene:
    """A scene whose one head is held as a drive says.

    Args:
        scene: The scene with the head at rest.
        index: The index of the head among its objects.
        drive: The drive, with no pitch and no yaw; of the expression the eyes' blinking counts.
    """

    scene: Scene
    index: int
    drive: Drive

    def __post_init__(self) -> None:
        if self.scene.objects[self.index].word not in EYES:
            raise SceneError(f"a head must be one of {', '.join(EYES)}, got {self.scene.objects[self.index].word!r}")

    @property
    def at_rest(self) -> PosedScene:
        """The scene as it is without a drive."""
        return replace(self, drive=rest(self.scene, self.index))


def rest(scene: Scene, index: int) -> Drive:
    """The drive of an object as it is drawn: upright, in its box, with its eyes open."""
    placed = scene.objects[index]
    middle = np.array([placed.left + placed.size / 2, placed.bottom - placed.size / 2]) / CELLS
    x, y = (float(each) for each in 2 * middle - 1)
    return Drive((0, 0, 0, x, y, placed.size / CELLS))


def sample_posed(rng: np.random.Generator, vocabulary: SceneVocabulary = FULL_VOCABULARY) -> PosedScene:
    """Sample a scene with a head, alone or beside one more thing, and a drive of it.

    Args:
        rng: the only source of randomness.
        vocabulary: The vocabulary of its words.
    """
    while True:
        scene = sample_scene(rng, int(rng.integers(1, 3)), False, vocabulary)
        heads = [i for i, placed in enumerate(scene.objects) if placed.word in EYES and not placed.accessory]
        if heads and scene.relation == "and":
            return PosedScene(scene, heads[0], sample_drive(rng, scene, heads[0]))


def sample_drive(rng: np.random.Generator, scene: Scene, index: int) -> Drive:
    """Sample how a head of a scene is held, near to where it is drawn."""
    _, _, _, x, y, scale = rest(scene, index).pose
    across, down = (float(each) * 2 / CELLS for each in rng.uniform(-SHIFT, SHIFT, 2))
    scale = min(scale * GROWTH ** float(rng.uniform(-1, 1)), 0.65)
    reach = 1 - scale  # it stays on the picture
    x, y = (min(max(at, -reach), reach) for at in (x + across, y + down))
    closed = [float(each) for each in rng.random(2) < 0.3]
    expression = [0.0] * len(EXPRESSIONS)
    for i, blink in zip(_BLINKS, closed, strict=True):
        expression[i] = blink
    return Drive((0, 0, float(rng.uniform(-TILT, TILT)), x, y, scale), expression)


def render_posed(posed: PosedScene, side: int = 256) -> tuple[Bytes, Mask]:
    """Draw a posed scene.

    Args:
        posed: what is drawn.
        side: The side of the picture in pixels, a multiple of 32.

    Returns:
        uint8 [side, side, 3], and the head's pixels, bool [side, side].
    """
    behind = render(posed.scene.without(posed.index), side).pixels
    head = _head(posed, side)
    alpha = head[..., 3:].astype(np.float32) / 255
    pixels = np.round(behind * (1 - alpha) + head[..., :3] * alpha).astype(np.uint8)
    return pixels, head[..., 3] > 0


def _head(posed: PosedScene, side: int) -> Bytes:
    """The head alone, on an empty picture: uint8 [side, side, 4], straight alpha."""
    word, large = posed.scene.objects[posed.index].word, side * _OVERSAMPLING
    _, _, roll, x, y, scale = posed.drive.pose
    expression = posed.drive.expression or [0.0] * len(EXPRESSIONS)
    closed = tuple(float(np.asarray(expression)[i]) > _CLOSED for i in _BLINKS)
    glyph = Image.fromarray(_glyph(word, max(8, round(scale * large)), closed)).convert("RGBa")  # premultiplied
    turned = glyph.rotate(roll, Image.Resampling.BICUBIC, expand=True)
    canvas = Image.new("RGBa", (large, large))
    left, top = (round(((1 + at) * large - length) / 2) for at, length in zip((x, y), turned.size, strict=True))
    canvas.paste(turned, (left, top))
    return np.array(canvas.resize((side, side), Image.Resampling.BOX).convert("RGBA"))


@lru_cache(maxsize=1024)
def _glyph(word: str, size: int, closed: tuple[bool, bool]) -> Bytes:
    """A head's glyph with its eyes open or closed: uint8 [size, size, 4]."""
    glyph = Image.fromarray(glyph_pixels(OBJECT[word].glyph, size))
    draw, (*places, width) = ImageDraw.Draw(glyph), EYES[word]
    for shut, (x, y) in zip(closed, (places[:2], places[2:]), strict=True):
        if shut:
            middle_x, middle_y, half = x * size, y * size, width * size / 2
            box = (middle_x - half, middle_y - half, middle_x + half, middle_y + half)
            wider = tuple(at + 0.25 * half * (-1 if i < 2 else 1) for i, at in enumerate(box))
            skin = glyph.getpixel((round(middle_x), max(0, round(middle_y - 1.45 * half))))
            draw.ellipse(wider, skin)
            draw.arc(box, 20, 160, (40, 30, 25, 255), max(1, round(0.28 * half)))
    return np.array(glyph)
