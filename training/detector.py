"""`python -m training.detector`: trains a small detector of drawn objects, as `fisedit batch --detect` loads it.

Knows nothing of diffusion.
"""

import argparse
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

from fisedit.evaluation.scenes.drawing import Bytes
from fisedit.evaluation.scenes.scene import Scene, render
from training.config import Plan
from training.loop import train
from training.pictures import sample_known

OBJECTS = ("cat", "dog", "fox", "panda", "cake", "car", "castle", "tree")
SIDE = 128
PLAN = Plan(batch=16, seconds=2700, steps=16_000, learning_rate=5e-4, warmup=300, weight_decay=1e-4, report_every=2000)
_HELD_OUT_SEED, _HELD_OUT = 4_000_000, 200
_CONFIDENT = 0.5

Boxes = dict[str, tuple[float, float, float, float]]
"""Word -> left, top, right and bottom in pixels."""


def draw(seed: int, index: int) -> tuple[Bytes, Boxes]:
    """A scene's pixels, uint8 [S, S, 3], and where its objects are.

    Args:
        seed: of all scenes.
        index: of this one.
    """
    scene: Scene = sample_known(np.random.default_rng((seed, index)), OBJECTS)
    drawn, boxes = render(scene, SIDE), {}
    for (placed, word), mask in zip(scene.parts, drawn.masks, strict=True):
        if word == scene.objects[placed].word and mask.any():
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            boxes[word] = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    return drawn.pixels, boxes


class DetectorStage:
    """Fresh scenes each step."""

    name = "detector"

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        config = YolosConfig(
            hidden_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=256,
            image_size=[SIDE, SIDE],
            patch_size=16,
            num_detection_tokens=6,
            use_mid_position_embeddings=False,
            id2label=dict(enumerate(OBJECTS)),
            label2id={word: i for i, word in enumerate(OBJECTS)},
        )
        self.seed = seed
        self.model: nn.Module = YolosForObjectDetection(config)
        self.processor: Any = YolosImageProcessor(size={"height": SIDE, "width": SIDE})

    def losses(self, step: int) -> dict[str, Tensor]:
        """The matched losses of classes and boxes (DETR, arXiv 2005.12872)."""
        drawn = [draw(self.seed, step * PLAN.batch + i) for i in range(PLAN.batch)]
        labels = [
            {
                "class_labels": torch.tensor([OBJECTS.index(word) for word in boxes], dtype=torch.long),
                "boxes": torch.tensor([_centred(box) for box in boxes.values()], dtype=torch.float32).reshape(-1, 4),
            }
            for _, boxes in drawn
        ]
        out = self.model(pixel_values=self._values([pixels for pixels, _ in drawn]), labels=labels)
        return {"loss": out.loss} | {name: value for name, value in out.loss_dict.items() if value.ndim == 0}

    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """Shares of found objects and of right findings on held-out scenes; there is no sheet."""
        found = right = there = 0
        for index in range(_HELD_OUT):
            pixels, boxes = draw(_HELD_OUT_SEED, index)
            with torch.inference_mode():
                out = averaged(pixel_values=self._values([pixels]))
            (seen,) = self.processor.post_process_object_detection(out, _CONFIDENT, target_sizes=[(SIDE, SIDE)])
            words = [OBJECTS[label] for label in seen["labels"].tolist()]
            found += len(words)
            right += len(
                {
                    word
                    for word, box in zip(words, seen["boxes"].tolist(), strict=True)
                    if word in boxes and box_iou(box, boxes[word]) >= 0.5
                }
            )
            there += len(boxes)
        return {"recall": right / there, "precision": right / max(1, found)}

    def _values(self, pixels: list[Bytes]) -> Tensor:
        pictures = [Image.fromarray(each) for each in pixels]
        return cast(Tensor, self.processor(pictures, return_tensors="pt")["pixel_values"])


def _centred(box: tuple[float, ...]) -> tuple[float, float, float, float]:
    """A box's middle, width and height as shares of the picture."""
    left, top, right, bottom = (side / SIDE for side in box)
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def box_iou(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Intersection over union of two boxes.

    Args:
        one: left, top, right and bottom.
        other: likewise.
    """
    width, height = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return shared / (sum(areas) - shared)


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
    cast(YolosForObjectDetection, averaged).half().save_pretrained(chosen.output)
    stage.processor.save_pretrained(chosen.output)


if __name__ == "__main__":
    main()
