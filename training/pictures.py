"""Drawn scenes in bulk, as arrays and tensors. Knows nothing of models."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.scenes.appearance import Palette, sample_appearance
from benchmarks.scenes.drawing import CELLS, Bytes
from benchmarks.scenes.held_out import has_unseen_words, is_unseen
from benchmarks.scenes.layout import sample_scene
from benchmarks.scenes.scene import RenderedScene, Scene, render
from benchmarks.scenes.vocabulary import FULL_VOCABULARY, SKY_WORDS, SceneVocabulary

PIXELS_PER_CELL = 8
_CLOSE = 16  # cells of a close-up; an undressed object has at most 14
_PALETTE = Palette(saturations=(0.0, 1.0))
_MANY = 1000  # pictures from which drawing is shared out among the cores


@dataclass(frozen=True)
class View:
    """A square window of `cells` cells onto a scene, its corner at (left, top)."""

    scene: Scene
    left: int = 0
    top: int = 0
    cells: int = CELLS

    def draw(self) -> RenderedScene:
        """What it shows, at 8 pixels per cell."""
        whole = render(self.scene, CELLS * PIXELS_PER_CELL)
        rows, columns = (
            slice(at * PIXELS_PER_CELL, (at + self.cells) * PIXELS_PER_CELL) for at in (self.top, self.left)
        )
        return RenderedScene(whole.pixels[rows, columns], whole.masks[:, rows, columns])


def sample_known(rng: np.random.Generator, objects: Sequence[str]) -> Scene:
    """A scene at random of no other objects than these (of any, if there are none).

    No combination of words and no layout that is held out for measurements occurs in it; there are as many objects in
    it as if none were held out.
    """
    vocabulary = _vocabulary(objects)
    scene = sample_scene(rng, vocabulary=vocabulary)
    flying = [placed.word in SKY_WORDS for placed in scene.objects]
    while is_unseen(scene):
        scene = sample_scene(rng, len(flying) - sum(flying), any(flying), vocabulary)
    return scene


def sample_unseen(rng: np.random.Generator, objects: Sequence[str], count: int, sky: bool) -> Scene:
    """A scene of these objects (of any, if there are none) with a combination of words that is held out of training.

    It has `count` objects on the ground and, if `sky`, one above them.
    """
    vocabulary = _vocabulary(objects)
    while True:
        scene = sample_scene(rng, count, sky, vocabulary)
        if has_unseen_words(scene):
            return scene


def _vocabulary(objects: Sequence[str]) -> SceneVocabulary:
    """All words, but of objects these alone if there are some."""
    if not objects:
        return FULL_VOCABULARY
    ground, sky = (tuple(w for w in words if w in objects) for words in (FULL_VOCABULARY.ground, FULL_VOCABULARY.sky))
    return replace(FULL_VOCABULARY, ground=ground, sky=sky)


def sample_view(rng: np.random.Generator, close: bool, objects: Sequence[str] = ()) -> View:
    """A scene at random; if `close`, one of its objects alone, seen in a window of half the side.

    Half the side is a fifth of the work: a denoiser learns there what each word looks like, at the size it will have.
    """
    scene = sample_known(rng, objects)
    if not close:
        return View(scene)
    fit = [i for i, placed in enumerate(scene.objects) if placed.scale != "big"]
    if not fit:
        return sample_view(rng, close, objects)
    placed = scene.objects[int(rng.choice(fit))]
    alone = replace(scene, objects=(placed,), relation="and")
    left, top = (
        int(rng.integers(max(0, stop - _CLOSE), min(start, CELLS - _CLOSE) + 1))
        for start, stop in ((placed.left, placed.right), (max(placed.top, placed.bottom - _CLOSE), placed.bottom))
    )
    return View(alone, left, top, _CLOSE)


@dataclass(frozen=True)
class Picture:
    """A scene and its pixels, uint8 [S, S, 3]."""

    scene: Scene
    pixels: Bytes


class Supply(Protocol):
    """Where training pictures come from."""

    @property
    def side(self) -> int:
        """Height and width in pixels."""

    def take(self, rng: np.random.Generator) -> Picture:
        """One of them at random."""


@dataclass(frozen=True)
class FreshPictures:
    """Scenes drawn when they are asked for, a `painted` share of their objects with a look that no word names."""

    side: int
    painted: float = 0.0
    objects: tuple[str, ...] = ()

    def take(self, rng: np.random.Generator) -> Picture:
        """A new one."""
        scene = sample_known(rng, self.objects)
        drawing = render(scene, self.side)
        pixels = drawing.pixels
        for mask in drawing.masks:
            if rng.random() < self.painted and mask.any():
                pixels = sample_appearance(rng, _PALETTE).paint(pixels, mask)
        return Picture(scene, pixels)


@dataclass(frozen=True)
class Pictures:
    """Scenes and their pixels, uint8 [N, S, S, 3]."""

    scenes: tuple[Scene, ...]
    pixels: Bytes

    @property
    def side(self) -> int:
        """Height and width in pixels."""
        return int(self.pixels.shape[1])

    def take(self, rng: np.random.Generator) -> Picture:
        """One of them at random."""
        index = int(rng.integers(len(self.scenes)))
        return Picture(self.scenes[index], self.pixels[index])


def draw_pictures(seed: int, count: int, side: int, objects: tuple[str, ...] = (), painted: float = 0.0) -> Pictures:
    """Draws `count` scenes, many of them by all cores; scene i depends on (seed, i) alone."""
    draw = partial(_draw_picture, FreshPictures(side, painted, objects), seed)
    if count < _MANY:
        pictures = [draw(index) for index in range(count)]
    else:
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            pictures = list(pool.map(draw, range(count), chunksize=64))
    pixels = np.stack([picture.pixels for picture in pictures])
    return Pictures(tuple(picture.scene for picture in pictures), pixels)


def _draw_picture(fresh: FreshPictures, seed: int, index: int) -> Picture:
    return fresh.take(np.random.default_rng((seed, index)))


def to_tensor(pixels: Bytes, device: torch.device | None = None) -> Tensor:
    """uint8 [B, S, S, 3] to floats in [-1, 1], [B, 3, S, S], channels last, on a device."""
    return torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def to_bytes(pixels: Tensor) -> Bytes:
    """Floats in [-1, 1], [B, 3, S, S], to uint8 [B, S, S, 3]."""
    scaled = pixels.detach().float().clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
    found: Bytes = scaled.permute(0, 2, 3, 1).cpu().numpy()
    return found


def sample_crops(pictures: Supply, rng: np.random.Generator, batch: int, crop: int, on_objects: float) -> Bytes:
    """Crops on the latent grid, most of them over an object because the rest is flat: uint8 [B, crop, crop, 3]."""
    crops = np.empty((batch, crop, crop, 3), dtype=np.uint8)
    for row in range(batch):
        picture = pictures.take(rng)
        aimed = rng.random() < on_objects
        left, top = _corner(picture.scene, pictures.side, rng, crop, aimed)
        crops[row] = picture.pixels[top : top + crop, left : left + crop]
    return crops


def _corner(scene: Scene, side: int, rng: np.random.Generator, crop: int, aimed: bool) -> tuple[int, int]:
    """Left and top of one crop in pixels, a multiple of the cell."""
    cell = side // CELLS
    last = (side - crop) // cell
    if not aimed:
        left, top = rng.integers(0, last + 1, size=2)
        return int(left) * cell, int(top) * cell
    placed = scene.objects[int(rng.integers(len(scene.objects)))]
    middle = np.array((placed.left + placed.size / 2, placed.bottom - placed.size / 2))
    corner = middle - crop / cell / 2 + rng.integers(-3, 4, size=2)
    left, top = np.clip(np.floor(corner), 0, last).astype(int) * cell
    return int(left), int(top)


def save_sheet(path: Path, rows: Sequence[Bytes]) -> None:
    """Writes rows of pictures, each uint8 [N, S, S, 3], as one picture."""
    lines = [np.concatenate(list(row), axis=1) for row in rows]
    Image.fromarray(np.concatenate(lines, axis=0)).save(path)
