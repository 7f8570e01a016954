"""A small classifier that names what a picture shows; the judge of generated pictures. Knows nothing of diffusion."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config import Plan
from training.drawing import Bytes
from training.loop import train
from training.pictures import draw_pictures, to_tensor
from training.scenes import Scene, render, sample_scene
from training.vocabulary import BACKGROUNDS, THINGS

_WORDS = tuple(thing.word for thing in THINGS)
_PLACES = tuple(background.word for background in BACKGROUNDS)
_SIDE = 64
_HELD_OUT_SEED, _HELD_OUT = 3_000_000, 400
PLAN = Plan(batch=32, seconds=200, steps=2500, learning_rate=2e-3, warmup=50, average=0.99, report_every=1000)


class Classifier(nn.Module):
    """Pictures [B, 3, S, S] in [-1, 1] to one score per object [B, objects] and per background [B, backgrounds]."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 96, 128)
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(widths)):
            stride = 1 if i == 0 else 2
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after), nn.SiLU()]
        self.body = nn.Sequential(*layers)
        self.objects = nn.Conv2d(widths[-1], len(_WORDS), 3, 1, 1)
        self.places = nn.Linear(widths[-1], len(_PLACES))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """An object is there when it is somewhere; a background is everywhere."""
        features = self.body(F.adaptive_avg_pool2d(pictures, _SIDE))
        there = self.objects(features).flatten(2).logsumexp(-1)
        return there, self.places(features.mean((2, 3)))


@dataclass(frozen=True)
class Seen:
    """What the classifier sees in pictures: `objects` bool [N, objects], `places` int [N]."""

    objects: Tensor
    places: Tensor

    def named(self, row: int, scene: Scene) -> list[bool]:
        """Whether each object of a scene is seen in picture `row`."""
        return [bool(self.objects[row, _WORDS.index(word)]) for word in scene.words]

    def unnamed(self, row: int, scene: Scene) -> int:
        """How many objects are seen in picture `row` that the scene does not name."""
        return int(self.objects[row].sum()) - sum(self.named(row, scene))

    def place_right(self, row: int, scene: Scene) -> bool:
        """Whether picture `row` shows the scene's background."""
        return _PLACES[int(self.places[row])] == scene.background


@torch.no_grad()
def look(classifier: Classifier, pixels: Bytes) -> Seen:
    """Classifies pictures, uint8 [N, S, S, 3]."""
    there, places = classifier(to_tensor(pixels))
    return Seen(there > 0, places.argmax(1))


def labels(scenes: list[Scene]) -> tuple[Tensor, Tensor]:
    """What scenes show: objects as 0 or 1 [N, objects], background as an index [N]."""
    objects = torch.tensor([[float(word in scene.words) for word in _WORDS] for scene in scenes])
    return objects, torch.tensor([_PLACES.index(scene.background) for scene in scenes])


class ClassifierStage:
    """Fresh scenes each step, some of them blurred and noisy so that sharpness decides nothing."""

    name = "classifier"

    def __init__(self, seed: int, side: int) -> None:
        torch.manual_seed(seed)
        self.seed, self.side = seed, side
        self.model: nn.Module = Classifier()
        self.held_out = draw_pictures(_HELD_OUT_SEED, _HELD_OUT, side)

    def losses(self, step: int) -> dict[str, Tensor]:
        """Cross-entropy of objects and of the background."""
        rng = np.random.default_rng((self.seed, step))
        scenes = [sample_scene(rng) for _ in range(PLAN.batch)]
        pictures = to_tensor(np.stack([render(scene, self.side).pixels for scene in scenes]))
        there, places = self.model(_weathered(pictures, rng))
        objects, background = labels(scenes)
        loss = F.binary_cross_entropy_with_logits(there, objects) + 0.2 * F.cross_entropy(places, background)
        return {"loss": loss}

    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """Accuracy on held-out scenes; there is no sheet."""
        seen = look(cast(Classifier, averaged), self.held_out.pixels)
        objects, background = labels(list(self.held_out.scenes))
        right = seen.objects == (objects > 0)
        return {
            "object_accuracy": float(right.float().mean()),
            "all_objects_right": float(right.all(1).float().mean()),
            "background_accuracy": float((seen.places == background).float().mean()),
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
