"""`python -m training.detector`: trains a small segmentation model of drawn objects for `fisedit batch --detect`.

Knows nothing of diffusion.
"""

import argparse
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessor

from benchmarks.scenes.drawing import Bytes
from benchmarks.scenes.scene import Scene, render
from training.config import Plan
from training.loop import train
from training.pictures import sample_known

OBJECTS = ("cat", "dog", "fox", "panda", "cake", "car", "castle", "tree")
BACKGROUND = "background"
SIDE = 128
PLAN = Plan(batch=8, seconds=3600, steps=6000, learning_rate=1e-3, warmup=200, weight_decay=1e-4, report_every=1000)
HELD_OUT_SEED, _HELD_OUT = 4_000_000, 200
"""Of scenes that it is measured on, and how many."""
_LEAST_PIXELS = 16


def draw(seed: int, index: int) -> tuple[Bytes, NDArray[np.int64]]:
    """A scene's pixels, uint8 [S, S, 3], and each pixel's class [S, S]: 0 for the background, else 1 + the object.

    Args:
        seed: of all scenes.
        index: of this one.
    """
    scene: Scene = sample_known(np.random.default_rng((seed, index)), OBJECTS)
    drawn, classes = render(scene, SIDE), np.zeros((SIDE, SIDE), np.int64)
    for (placed, word), mask in zip(scene.parts, drawn.masks, strict=True):
        if word == scene.objects[placed].word:
            classes[mask] = 1 + OBJECTS.index(word)
    return drawn.pixels, classes


class DetectorStage:
    """Fresh scenes each step."""

    name = "detector"

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        words = (BACKGROUND, *OBJECTS)
        config = SegformerConfig(
            depths=[2, 2, 2, 2],
            hidden_sizes=[16, 32, 64, 96],
            num_attention_heads=[1, 2, 4, 6],
            decoder_hidden_size=64,
            mlp_ratios=[2, 2, 2, 2],
            id2label=dict(enumerate(words)),
            label2id={word: i for i, word in enumerate(words)},
        )
        self.seed = seed
        self.model: nn.Module = SegformerForSemanticSegmentation(config)
        self.processor: Any = SegformerImageProcessor(size={"height": SIDE, "width": SIDE})

    def losses(self, step: int) -> dict[str, Tensor]:
        """Cross-entropy of each pixel's class."""
        drawn = [draw(self.seed, step * PLAN.batch + i) for i in range(PLAN.batch)]
        logits = self._logits(self.model, [pixels for pixels, _ in drawn])
        return {"loss": F.cross_entropy(logits, torch.from_numpy(np.stack([classes for _, classes in drawn])))}

    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """Shares of objects that are found, and of findings that are right, on held-out scenes; there is no sheet.

        A finding is right where its pixels and the object's have an intersection over union of .5 and more.
        """
        averaged.eval()
        there = found = right = 0
        for index in range(_HELD_OUT):
            pixels, truth = draw(HELD_OUT_SEED, index)
            with torch.inference_mode():
                seen = self._logits(averaged, [pixels]).argmax(1)[0].numpy()
            for label in range(1, 1 + len(OBJECTS)):
                here, said = truth == label, seen == label
                there += bool(here.any())
                found += said.sum() >= _LEAST_PIXELS
                right += bool(here.any()) and (here & said).sum() / (here | said).sum() >= 0.5
        return {"recall": right / there, "precision": right / max(1, found)}

    def _logits(self, model: nn.Module, pixels: list[Bytes]) -> Tensor:
        """Scores of each class for each pixel [B, classes, S, S]."""
        values = self.processor([Image.fromarray(each) for each in pixels], return_tensors="pt")["pixel_values"]
        return F.interpolate(cast(Tensor, model(values).logits), size=(SIDE, SIDE), mode="bilinear")


def main() -> None:
    """Trains, or resumes, and writes the detector in half precision."""
    parser = argparse.ArgumentParser(prog="python -m training.detector", description=__doc__)
    parser.add_argument("output", type=Path, help="folder that gets the detector")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="checkpoints and logs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads to use")
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    stage = DetectorStage(chosen.seed)
    averaged = train(stage, PLAN, chosen.folder / stage.name, torch.device("cpu")).eval()
    print(stage.report(averaged, chosen.output))
    cast(SegformerForSemanticSegmentation, averaged).half().save_pretrained(chosen.output)
    stage.processor.save_pretrained(chosen.output)


if __name__ == "__main__":
    main()
