"""`python -m training.references FOLDER --count N`: drawn triples to train a reference adapter of the demo model on.

An object is painted in colours and patterns that no word names; a reference shows the same look on another picture of
that object, or on another object. The prompt does not speak of it, so only the reference tells. Knows no models.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.scenes.appearance import PATTERNS, Appearance, Palette, sample_appearance
from benchmarks.scenes.drawing import Bytes, Mask
from benchmarks.scenes.held_out import has_unseen_words
from benchmarks.scenes.layout import sample_scene
from benchmarks.scenes.prompts import describe_scene
from benchmarks.scenes.scene import Scene, render

_SAME = 0.5  # share of references that show the target's own kind of object
_TWO = 0.3  # and of those targets, the share with another object beside it


@dataclass(frozen=True)
class Example:
    """A drawn triple: pixels uint8 [S, S, 3] of target and reference, the prompt, and the object's mask [S, S]."""

    target: Bytes
    reference: Bytes
    prompt: str
    region: Mask


def sample_example(rng: np.random.Generator, side: int, palette: Palette) -> Example:
    """A triple at random; its reference shows one object alone, and a target of two shares the reference's object."""
    look, same = sample_appearance(rng, palette), bool(rng.random() < _SAME)
    scene = sample_plain_scene(rng, 2 if same and rng.random() < _TWO else 1)
    index = int(rng.integers(len(scene.objects)))
    word = scene.objects[index].word
    other = sample_plain_scene(rng, 1)
    if same:
        other = other.change(0, word=word)  # a reference has no prompt, so it composes no words
    part = scene.parts.index((index, word))
    target, region = _drawn(scene, part, look, side)
    return Example(target, _drawn(other, 0, look, side)[0], describe_scene(scene).text, region)


def write_example(example: Example, folder: Path, name: str) -> None:
    """Put a triple where `fisedit train-adapter` looks for it."""
    pictures = {"target": example.target, "reference": example.reference, "region": example.region}
    for kind, pixels in pictures.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / kind / f"{name}.png")
    (folder / "target" / f"{name}.txt").write_text(f"{example.prompt}\n", encoding="utf-8")


def sample_plain_scene(rng: np.random.Generator, count: int) -> Scene:
    """A scene of undressed, uncoloured objects."""
    while True:
        scene = sample_scene(rng, count, sky=False)
        plain = not scene.weather and scene.relation == "and"
        looks = [look for placed in scene.objects for look in (placed.colour, placed.scale, placed.accessory) if look]
        if plain and not looks and not has_unseen_words(scene):
            return scene


def _drawn(scene: Scene, part: int, look: Appearance, side: int) -> tuple[Bytes, Mask]:
    """A scene with one part painted, and that part's mask."""
    drawing = render(scene, side)
    return look.paint(drawing.pixels, drawing.masks[part]), drawing.masks[part]


def main() -> None:
    """Parses the command line and draws."""
    parser = argparse.ArgumentParser(prog="python -m training.references", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--side", type=int, default=256, help="of a square picture, in pixels: a multiple of 32")
    parser.add_argument("--seed", type=int, default=0)
    drawn = Palette()
    parser.add_argument("--hues", type=float, nargs=2, default=drawn.hues, help="a range, in degrees")
    parser.add_argument("--saturations", type=float, nargs=2, default=drawn.saturations, help="a range, 0 to 1")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=drawn.patterns)
    chosen = parser.parse_args()
    palette = Palette(tuple(chosen.hues), tuple(chosen.saturations), tuple(chosen.patterns))
    for index in range(chosen.count):
        example = sample_example(np.random.default_rng((chosen.seed, index)), chosen.side, palette)
        write_example(example, chosen.folder, f"{index:06d}")


if __name__ == "__main__":
    main()
