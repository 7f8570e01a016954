"""A small classifier of drawn scenes, by which generated and edited pictures are measured.

It was trained on drawn scenes (`training.classifier`) and knows nothing of diffusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.scenes.drawing import Bytes
from benchmarks.scenes.scene import Scene
from benchmarks.scenes.vocabulary import ACCESSORIES, BACKGROUNDS, COLOURS, OBJECTS, SCALES
from fisedit.errors import ModelError

WORDS = (*(object_kind.word for object_kind in OBJECTS), *ACCESSORIES)
BACKGROUND_WORDS = tuple(background.word for background in BACKGROUNDS)
ADJECTIVES = (*COLOURS, *SCALES)
"""First the colours, of which an object has one, then the sizes."""
SIDE = 128
_UNKNOWN = -1


class SceneClassifier(nn.Module):
    """Pictures [B, 3, S, S] in [-1, 1] to scores of objects [B, W], backgrounds [B, P] and adjectives [B, W, L]."""

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
        self.looks = nn.Conv2d(widths[-1], len(ADJECTIVES), 3, 1, 1)
        self.places = nn.Linear(widths[-1], len(BACKGROUND_WORDS))
        nn.init.constant_(cast(Tensor, self.objects.bias), -6.0)  # an object is absent from most positions

    def features(self, pictures: Tensor) -> Tensor:
        """Features [B, 160, 8, 8], whose means over positions Frechet distances compare.

        Args:
            pictures: [B, 3, S, S] in [-1, 1].
        """
        found: Tensor = self.body(F.adaptive_avg_pool2d(pictures, SIDE))
        return found

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of objects, backgrounds and adjectives: objects by their maximum over positions.

        Args:
            pictures: [B, 3, S, S] in [-1, 1].
        """
        maps, backgrounds, adjectives = self.maps(pictures)
        return maps.amax((2, 3)), backgrounds, adjectives

    def maps(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores by position of objects [B, W, 8, 8], and of backgrounds and adjectives.

        Args:
            pictures: [B, 3, S, S] in [-1, 1].
        """
        features = self.features(pictures)
        maps = self.objects(features)
        adjectives = maps.flatten(2).softmax(-1) @ self.looks(features).flatten(2).transpose(1, 2)
        return maps, self.places(features.mean((2, 3))), adjectives


@dataclass(frozen=True)
class SceneLabels:
    """Training targets of scenes.

    Args:
        objects: [N, W], 0 or 1.
        backgrounds: index of the background, [N].
        adjectives: adjectives of every object [N, W, L], 0 or 1, or -1 where the prompt has none.
    """

    objects: Tensor
    backgrounds: Tensor
    adjectives: Tensor


@dataclass(frozen=True)
class ScenePredictions:
    """The classifier's output for N pictures.

    Args:
        objects: whether each is found, bool [N, W].
        backgrounds: index of the background, int [N].
        adjectives: scores of adjectives of every object, [N, W, L].
    """

    objects: Tensor
    backgrounds: Tensor
    adjectives: Tensor

    def objects_found(self, row: int, scene: Scene) -> list[bool]:
        """Return for each part of a scene whether it is found.

        Args:
            row: The row of the picture.
            scene: The scene that it should show.
        """
        return [bool(self.objects[row, WORDS.index(word)]) for word in scene.words]

    def extra_objects(self, row: int, scene: Scene) -> int:
        """Number of objects that are found and not in the scene.

        Args:
            row: The row of the picture.
            scene: The scene that it should show.
        """
        return int(self.objects[row].sum()) - sum(self.objects_found(row, scene))

    def background_correct(self, row: int, scene: Scene) -> bool:
        """Return whether the scene's background is found.

        Args:
            row: The row of the picture.
            scene: The scene that it should show.
        """
        return BACKGROUND_WORDS[int(self.backgrounds[row])] == scene.background

    def adjectives_correct(self, row: int, scene: Scene) -> list[bool]:
        """Return for each colour and size in a scene whether it is found of its object; never of an absent one.

        Args:
            row: The row of the picture.
            scene: The scene that it should show.
        """
        correct = []
        for placed in scene.objects:
            found = bool(self.objects[row, WORDS.index(placed.word)])
            scores = self.adjectives[row, WORDS.index(placed.word)]
            colour, scales = int(scores[: len(COLOURS)].argmax()), scores[len(COLOURS) :]
            if placed.colour:
                correct.append(found and ADJECTIVES[colour] == placed.colour)
            if placed.scale:
                correct.append(found and SCALES[int(scales.argmax())] == placed.scale and bool(scales.max() > 0))
        return correct


@torch.no_grad()
def classify(classifier: SceneClassifier, pixels: Bytes, batch: int = 50) -> ScenePredictions:
    """Classify pictures.

    Args:
        classifier: the classifier.
        pixels: uint8 [N, S, S, 3].
        batch: pictures at a time.
    """
    parts = [classifier(_tensor(pixels[start : start + batch])) for start in range(0, len(pixels), batch)]
    objects, backgrounds, adjectives = (torch.cat(column) for column in zip(*parts, strict=True))
    return ScenePredictions(objects > 0, backgrounds.argmax(1), adjectives)


def scene_labels(scenes: list[Scene]) -> SceneLabels:
    """Training targets; an object in its own colour has none for colours.

    Args:
        scenes: N of them.
    """
    objects = torch.tensor([[float(word in scene.words) for word in WORDS] for scene in scenes])
    adjectives = torch.full((len(scenes), len(WORDS), len(ADJECTIVES)), float(_UNKNOWN))
    for row, scene in enumerate(scenes):
        for placed in scene.objects:
            targets = adjectives[row, WORDS.index(placed.word)]
            targets[len(COLOURS) :] = torch.tensor([float(placed.scale == scale) for scale in SCALES])
            if placed.colour:
                targets[: len(COLOURS)] = torch.tensor([float(placed.colour == colour) for colour in COLOURS])
    return SceneLabels(
        objects, torch.tensor([BACKGROUND_WORDS.index(scene.background) for scene in scenes]), adjectives
    )


@torch.no_grad()
def frechet_distance(classifier: SceneClassifier, first: Bytes, second: Bytes) -> float:
    """Frechet distance (Heusel et al., arXiv 1706.08500) between two sets of pictures in the classifier's features.

    Args:
        classifier: the classifier.
        first: uint8 [N, S, S, 3].
        second: uint8 [M, S, S, 3].
    """
    from scipy.linalg import sqrtm

    moments = []
    for pixels in (first, second):
        parts = [classifier.features(_tensor(pixels[i : i + 50])).mean((2, 3)) for i in range(0, len(pixels), 50)]
        rows = torch.cat(parts).double().numpy()
        moments.append((rows.mean(0), np.cov(rows, rowvar=False)))
    (mean, covariance), (other_mean, other_covariance) = moments
    root = np.real(sqrtm(covariance @ other_covariance))
    return float(np.square(mean - other_mean).sum() + np.trace(covariance + other_covariance - 2 * root))


def _tensor(pixels: Bytes) -> Tensor:
    """uint8 [B, S, S, 3] to floats in [-1, 1], [B, 3, S, S]."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def load_classifier(path: Path) -> SceneClassifier:
    """The classifier with weights from a .safetensors file.

    Args:
        path: The path of the file.

    Raises:
        ModelError: there is no such file, or it holds other weights.
    """
    from safetensors.torch import load_file

    classifier = SceneClassifier().eval()
    try:
        classifier.load_state_dict({name: weight.float() for name, weight in load_file(path).items()})
    except (OSError, RuntimeError) as error:
        raise ModelError(f"the classifier of drawn scenes must be in {path}, found none that fits") from error
    return classifier
