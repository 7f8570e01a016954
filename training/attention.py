"""How well a word's cross-attention covers its object, on drawn scenes whose masks are known."""

from dataclasses import dataclass

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor2_0
from numpy.typing import NDArray
from skimage.filters import threshold_otsu
from torch import Tensor

from benchmarks.scenes.drawing import Mask
from fisedit.adapters.training.draws import generator_for
from training.grounding import record_cross_attention
from training.latents import LatentScenes

NOISE_STEPS = (150, 300, 450, 600)


@dataclass(frozen=True)
class Localisation:
    """Means over objects, scenes and noise steps."""

    auc: float
    iou: float


def measure_localisation(pipeline: StableDiffusionPipeline, scenes: LatentScenes, seed: int) -> Localisation:
    """Area under the ROC curve, and intersection over union at Otsu's threshold.

    Both are taken of the mean map of the layers at the latents' own size.
    """
    maps = mean_word_maps(pipeline, scenes, seed)
    aucs, ious = [], []
    for step_maps in maps:
        for found, truth in _pairs(step_maps, scenes):
            aucs.append(auc(found, truth))
            ious.append(iou(found > threshold_otsu(found), truth))
    return Localisation(float(np.mean(aucs)), float(np.mean(ious)))


@torch.no_grad()
def mean_word_maps(pipeline: StableDiffusionPipeline, scenes: LatentScenes, seed: int) -> list[Tensor]:
    """Cross-attention of every token at each of NOISE_STEPS, mean over heads and layers: [N, h * w, 77] each."""
    maps = record_cross_attention(pipeline.unet)
    text = pipeline.text_encoder(scenes.tokens).last_hidden_state
    noise = torch.randn(scenes.means.shape, generator=generator_for(seed, 0, scenes.means.device))
    found = []
    for step in NOISE_STEPS:
        kept = pipeline.scheduler.alphas_cumprod[step]
        pipeline.unet(kept.sqrt() * scenes.means + (1 - kept).sqrt() * noise, step, text)
        rows = scenes.means.shape[-2] * scenes.means.shape[-1]
        found.append(torch.stack([layer for layer in maps.take() if layer.shape[1] == rows]).mean(0))
    pipeline.unet.set_attn_processor(AttnProcessor2_0())
    return found


def _pairs(maps: Tensor, scenes: LatentScenes) -> list[tuple[NDArray[np.float64], Mask]]:
    """Map and true mask of each object, both flat; a position belongs to an object that covers half of it."""
    pairs = []
    for row, slot in (scenes.positions >= 0).nonzero().tolist():
        found = maps[row, :, scenes.positions[row, slot]].double().numpy()
        truth = (scenes.masks[row, slot].flatten() >= 0.5).numpy()
        if truth.any():
            pairs.append((found, truth))
    return pairs


def auc(found: NDArray[np.float64], truth: Mask) -> float:
    """The chance that a position of the object has more attention than one outside (Mann and Whitney's U)."""
    inside, outside = found[truth], np.sort(found[~truth])
    below = np.searchsorted(outside, inside, "left") + np.searchsorted(outside, inside, "right")
    return float(below.mean() / 2 / len(outside))


def iou(found: Mask, truth: Mask) -> float:
    """Intersection over union."""
    return float((found & truth).sum() / (found | truth).sum())
