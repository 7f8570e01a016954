"""A small classifier that names what a picture shows; the judge of generated pictures. Knows nothing of diffusion."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fisedit.scenes.drawing import Bytes
from fisedit.scenes.layout import sample_scene
from fisedit.scenes.scene import Scene, render
from fisedit.scenes.vocabulary import ACCESSORIES, BACKGROUNDS, COLOURS, SCALES, THINGS
from training.config import Plan
from training.loop import train
from training.pictures import draw_pictures, to_tensor

WORDS = (*(thing.word for thing in THINGS), *ACCESSORIES)
PLACES = tuple(background.word for background in BACKGROUNDS)
LOOKS = (*COLOURS, *SCALES)
"""Adjectives: first the colours, of which a thing has one, then the sizes."""
_SIDE = 128
_HELD_OUT_SEED, _HELD_OUT = 3_000_000, 400
PLAN = Plan(batch=32, seconds=1200, steps=4000, learning_rate=2e-3, warmup=50, average=0.99, report_every=1000)
_UNKNOWN = -1


class Classifier(nn.Module):
    """Pictures [B, 3, S, S] in [-1, 1] to scores: objects [B, W], places [B, P], looks of each object [B, W, L]."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64, 128, 160)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            stride = 2 if after > 16 else 1
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after), nn.SiLU()]
        layers += [nn.Conv2d(160, 160, 3, 1, 1), nn.GroupNorm(8, 160), nn.SiLU()]
        self.body = nn.Sequential(*layers)
        self.objects = nn.Conv2d(widths[-1], len(WORDS), 3, 1, 1)
        self.looks = nn.Conv2d(widths[-1], len(LOOKS), 3, 1, 1)
        self.places = nn.Linear(widths[-1], len(PLACES))

    def features(self, pictures: Tensor) -> Tensor:
        """[B, 160, 8, 8], of which the mean over positions is what Frechet distances compare."""
        found: Tensor = self.body(F.adaptive_avg_pool2d(pictures, _SIDE))
        return found

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """An object is there when it is somewhere, and looks as it does there; a background is everywhere."""
        features = self.features(pictures)
        maps = self.objects(features).flatten(2)
        looks = maps.softmax(-1) @ self.looks(features).flatten(2).transpose(1, 2)
        return maps.logsumexp(-1), self.places(features.mean((2, 3))), looks


@dataclass(frozen=True)
class Labels:
    """What scenes show: `objects` [N, W] and `looks` [N, W, L] as 0 or 1, -1 where nothing is said; `places` [N]."""

    objects: Tensor
    places: Tensor
    looks: Tensor


@dataclass(frozen=True)
class Seen:
    """What the classifier sees: `objects` bool [N, W], `places` int [N], `looks` scores [N, W, L]."""

    objects: Tensor
    places: Tensor
    looks: Tensor

    def named(self, row: int, scene: Scene) -> list[bool]:
        """Whether each part of a scene is seen in picture `row`."""
        return [bool(self.objects[row, WORDS.index(word)]) for word in scene.words]

    def unnamed(self, row: int, scene: Scene) -> int:
        """How many objects are seen in picture `row` that the scene does not name."""
        return int(self.objects[row].sum()) - sum(self.named(row, scene))

    def place_right(self, row: int, scene: Scene) -> bool:
        """Whether picture `row` shows the scene's background."""
        return PLACES[int(self.places[row])] == scene.background

    def adjectives_right(self, row: int, scene: Scene) -> list[bool]:
        """Whether each colour and size that a scene names is what its object shows; an absent object shows nothing."""
        right = []
        for placed in scene.objects:
            there = bool(self.objects[row, WORDS.index(placed.word)])
            scores = self.looks[row, WORDS.index(placed.word)]
            colour, scales = int(scores[: len(COLOURS)].argmax()), scores[len(COLOURS) :]
            if placed.colour:
                right.append(there and LOOKS[colour] == placed.colour)
            if placed.scale:
                right.append(there and SCALES[int(scales.argmax())] == placed.scale and bool(scales.max() > 0))
        return right


@torch.no_grad()
def look(classifier: Classifier, pixels: Bytes, batch: int = 50) -> Seen:
    """Classifies pictures, uint8 [N, S, S, 3]."""
    parts = [classifier(to_tensor(pixels[start : start + batch])) for start in range(0, len(pixels), batch)]
    there, places, looks = (torch.cat(column) for column in zip(*parts, strict=True))
    return Seen(there > 0, places.argmax(1), looks)


def labels(scenes: list[Scene]) -> Labels:
    """What scenes show. A thing drawn in its own colour says nothing of colours."""
    objects = torch.tensor([[float(word in scene.words) for word in WORDS] for scene in scenes])
    looks = torch.full((len(scenes), len(WORDS), len(LOOKS)), float(_UNKNOWN))
    for row, scene in enumerate(scenes):
        for placed in scene.objects:
            said = looks[row, WORDS.index(placed.word)]
            said[len(COLOURS) :] = torch.tensor([float(placed.scale == scale) for scale in SCALES])
            if placed.colour:
                said[: len(COLOURS)] = torch.tensor([float(placed.colour == colour) for colour in COLOURS])
    return Labels(objects, torch.tensor([PLACES.index(scene.background) for scene in scenes]), looks)


class ClassifierStage:
    """Fresh scenes each step, some of them blurred and noisy so that sharpness decides nothing."""

    name = "classifier"

    def __init__(self, seed: int, side: int) -> None:
        torch.manual_seed(seed)
        self.seed, self.side = seed, side
        self.model: nn.Module = Classifier()
        self.held_out = draw_pictures(_HELD_OUT_SEED, _HELD_OUT, side)

    def losses(self, step: int) -> dict[str, Tensor]:
        """Cross-entropy of objects, of the background and of what is said about looks."""
        rng = np.random.default_rng((self.seed, step))
        scenes = [sample_scene(rng) for _ in range(PLAN.batch)]
        pictures = to_tensor(np.stack([render(scene, _SIDE).pixels for scene in scenes]))
        there, places, looks = self.model(_weathered(pictures, rng))
        truth = labels(scenes)
        said = truth.looks >= 0
        loss = (
            F.binary_cross_entropy_with_logits(there, truth.objects)
            + 0.2 * F.cross_entropy(places, truth.places)
            + 0.2 * F.binary_cross_entropy_with_logits(looks[said], truth.looks[said])
        )
        return {"loss": loss}

    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """Accuracy on held-out scenes; there is no sheet."""
        scenes = list(self.held_out.scenes)
        seen, truth = look(cast(Classifier, averaged), self.held_out.pixels), labels(scenes)
        right = seen.objects == (truth.objects > 0)
        adjectives = [ok for row, scene in enumerate(scenes) for ok in seen.adjectives_right(row, scene)]
        return {
            "object_accuracy": float(right.float().mean()),
            "named_object_recall": float(seen.objects[truth.objects > 0].float().mean()),
            "all_objects_right": float(right.all(1).float().mean()),
            "background_accuracy": float((seen.places == truth.places).float().mean()),
            "adjective_accuracy": float(np.mean(adjectives)),
        }


def _weathered(pictures: Tensor, rng: np.random.Generator) -> Tensor:
    """The pictures, at times blurred by two or three pixels, with a little noise."""
    reach = int(rng.integers(0, 3))
    blurred = F.avg_pool2d(pictures, 2 * reach + 1, 1, reach, count_include_pad=False) if reach else pictures
    noise = rng.standard_normal(pictures.shape, dtype=np.float32)
    return blurred + rng.uniform(0, 0.08) * torch.from_numpy(noise)


def trained_classifier(folder: Path, seed: int, side: int) -> tuple[Classifier, dict[str, float]]:
    """The classifier kept in `folder`, trained first (minutes) when there is none; and its held-out accuracy."""
    stage = ClassifierStage(seed, side)
    averaged = cast(Classifier, train(stage, PLAN, folder / stage.name, torch.device("cpu")).eval())
    return averaged, stage.report(averaged, folder)


@torch.no_grad()
def frechet_distance(classifier: Classifier, first: Bytes, second: Bytes) -> float:
    """Frechet distance (Heusel et al., arXiv 1706.08500) between two sets of pictures in the classifier's features."""
    from scipy.linalg import sqrtm

    moments = []
    for pixels in (first, second):
        parts = [classifier.features(to_tensor(pixels[i : i + 50])).mean((2, 3)) for i in range(0, len(pixels), 50)]
        rows = torch.cat(parts).double().numpy()
        moments.append((rows.mean(0), np.cov(rows, rowvar=False)))
    (mean, spread), (other_mean, other_spread) = moments
    mixed = np.real(sqrtm(spread @ other_spread))
    return float(np.square(mean - other_mean).sum() + np.trace(spread + other_spread - 2 * mixed))
