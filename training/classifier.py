"""Training the judge of drawn pictures. Knows nothing of diffusion."""

from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.classifier import SIDE, WORDS, SceneClassifier, classify, scene_labels
from benchmarks.scenes.layout import sample_scene
from benchmarks.scenes.scene import RenderedScene, Scene, render
from training.config import Plan
from training.loop import train
from training.pictures import draw_pictures, to_tensor

_HELD_OUT_SEED, _HELD_OUT = 3_000_000, 400
PLAN = Plan(batch=32, seconds=6000, steps=2500, learning_rate=2e-3, warmup=50, average=0.99, report_every=1000)


class ClassifierStage:
    """Fresh scenes each step, some of them blurred and noisy so that sharpness decides nothing."""

    name = "classifier"

    def __init__(self, seed: int, side: int) -> None:
        torch.manual_seed(seed)
        self.seed, self.side = seed, side
        self.model: nn.Module = SceneClassifier()
        self.held_out = draw_pictures(_HELD_OUT_SEED, _HELD_OUT, side)

    def losses(self, step: int) -> dict[str, Tensor]:
        """Cross-entropy of objects, of the background and of what is said about looks."""
        rng = np.random.default_rng((self.seed, step))
        scenes = [sample_scene(rng) for _ in range(PLAN.batch)]
        drawings = [render(scene, SIDE) for scene in scenes]
        pictures = to_tensor(np.stack([drawing.pixels for drawing in drawings]))
        maps, places, looks = cast(SceneClassifier, self.model).maps(_weathered(pictures, rng))
        truth, where = scene_labels(scenes), _where(scenes, drawings, maps)
        said = truth.adjectives >= 0
        loss = (
            F.binary_cross_entropy_with_logits(maps, where, pos_weight=torch.tensor(4.0)) * len(WORDS)
            + 0.2 * F.cross_entropy(places, truth.backgrounds)
            + 0.2 * F.binary_cross_entropy_with_logits(looks[said], truth.adjectives[said])
        )
        return {"loss": loss}

    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """Accuracy on held-out scenes; there is no sheet."""
        scenes = list(self.held_out.scenes)
        seen, truth = classify(cast(SceneClassifier, averaged), self.held_out.pixels), scene_labels(scenes)
        right = seen.objects == (truth.objects > 0)
        adjectives = [ok for row, scene in enumerate(scenes) for ok in seen.adjectives_correct(row, scene)]
        return {
            "object_accuracy": float(right.float().mean()),
            "named_object_recall": float(seen.objects[truth.objects > 0].float().mean()),
            "all_objects_right": float(right.all(1).float().mean()),
            "background_accuracy": float((seen.backgrounds == truth.backgrounds).float().mean()),
            "adjective_accuracy": float(np.mean(adjectives)),
        }


def _where(scenes: list[Scene], drawings: list[RenderedScene], maps: Tensor) -> Tensor:
    """Where each part is, as a judge's maps [B, W, 8, 8] should say: at positions that it mostly covers."""
    where = torch.zeros(maps.shape)
    for row, (scene, drawing) in enumerate(zip(scenes, drawings, strict=True)):
        shares = F.adaptive_avg_pool2d(torch.from_numpy(drawing.masks).float(), maps.shape[-1])
        for word, share in zip(scene.words, shares, strict=True):
            place = where[row, WORDS.index(word)]
            place.copy_(torch.maximum(place, ((share > 0.5) | (share == share.max())).float()))
    return where


def _weathered(pictures: Tensor, rng: np.random.Generator) -> Tensor:
    """The pictures, at times blurred by two or three pixels, with a little noise."""
    reach = int(rng.integers(0, 3))
    blurred = F.avg_pool2d(pictures, 2 * reach + 1, 1, reach, count_include_pad=False) if reach else pictures
    noise = rng.standard_normal(pictures.shape, dtype=np.float32)
    return blurred + rng.uniform(0, 0.08) * torch.from_numpy(noise)


def trained_classifier(folder: Path, seed: int, side: int) -> tuple[SceneClassifier, dict[str, float]]:
    """The classifier kept in `folder`, trained first (minutes) when there is none; and its held-out accuracy."""
    stage = ClassifierStage(seed, side)
    averaged = cast(SceneClassifier, train(stage, PLAN, folder / stage.name, torch.device("cpu")).eval())
    return averaged, stage.report(averaged, folder)
