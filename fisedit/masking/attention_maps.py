"""Attention maps from recorded queries and keys: cross-attention of words, and self-attention between positions.

Follows DAAM (arXiv 2210.04885): probabilities averaged over heads, layers and a few steps, at the latent grid's size.
No UNet call is spent: a new prompt's keys meet the queries that the source recorded. Knows features, not masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.features.cache import CachedFeatures
from fisedit.features.sites import LayerSite, Role

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel
    from numpy.typing import NDArray

    Heatmap = NDArray[np.float32]


def cross_maps(
    unet: UNet2DConditionModel,
    sites: Sequence[LayerSite],
    steps: Sequence[CachedFeatures],
    text_keys: dict[str, Tensor],
    grids: Sequence[tuple[int, int]],
    *,
    two_way: bool = False,
) -> Heatmap:
    """Cross-attention maps of a prompt's tokens, averaged over heads, layers and steps.

    Args:
        unet: The UNet whose attention was recorded.
        sites: its layer sites.
        steps: recorded steps whose queries were kept, one or more.
        text_keys: the prompt's keys by cross-attention (see `project_text`).
        grids: (height, width) of every level, finest first.
        two_way: multiply each probability by the token's attention to the position, as in CALIP (arXiv 2209.14169).

    Returns:
        Probabilities [T, h, w] at the finest grid; two-way ones are products, of no fixed sum.
    """
    maps = []
    for site in _recorded(sites, steps[0], cross=True):
        key = text_keys[_sibling(site, "to_k")][-1:]
        heads = unet.get_submodule(site.name.rpartition(".")[0]).heads
        attend = _two_way_probabilities if two_way else _probabilities
        mean = torch.stack([attend(step.whole(site.name, site.level), key, heads) for step in steps]).mean(0)
        maps.append(_resized(mean.T, grids[site.level], grids[0]))
    heatmap: Heatmap = torch.stack(maps).mean(0).cpu().numpy()
    return heatmap


def affinity(
    unet: UNet2DConditionModel,
    sites: Sequence[LayerSite],
    steps: Sequence[CachedFeatures],
    grids: Sequence[tuple[int, int]],
) -> tuple[Heatmap, tuple[int, int]]:
    """Self-attention at the finest recorded level, averaged over heads, layers and steps.

    Args:
        unet: The UNet, as in `cross_maps`.
        sites: The layer sites, as in `cross_maps`.
        steps: The recorded features, as in `cross_maps`.
        grids: The sizes of the levels, as in `cross_maps`.

    Returns:
        Probabilities [n, n], rows summing to 1, and that level's grid (height, width).
    """
    recorded = _recorded(sites, steps[0], cross=False)
    level = min(site.level for site in recorded)
    total = torch.zeros(())
    chosen = [site for site in recorded if site.level == level]
    for site in chosen:
        heads = unet.get_submodule(site.name.rpartition(".")[0]).heads
        for step in steps:
            key = step.whole(_sibling(site, "to_k"), level)[-1:]
            total = total + _probabilities(step.whole(site.name, level), key, heads).cpu()
    mean: Heatmap = (total / (len(chosen) * len(steps))).numpy()
    return mean, grids[level]


def _recorded(sites: Sequence[LayerSite], step: CachedFeatures, *, cross: bool) -> list[LayerSite]:
    return [s for s in sites if s.role is Role.QUERY and s.cross is cross and s.name in step]


def _sibling(site: LayerSite, name: str) -> str:
    return f"{site.name.rpartition('.')[0]}.{name}"


def _probabilities(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """Softmax of [1, n, C] over [1, m, C], averaged over heads: float32 [n, m]."""
    mean: Tensor = _scores(query, key, heads).softmax(-1).mean(0)
    return mean


def _two_way_probabilities(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """`_probabilities`, each times the softmax over the n positions and times n."""
    scores = _scores(query, key, heads)
    mean: Tensor = (scores.softmax(-1) * scores.softmax(-2)).mean(0) * scores.shape[-2]
    return mean


def _scores(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """Scaled products by head: float32 [heads, n, m]."""
    q, k = (t[0].float().unflatten(-1, (heads, -1)).transpose(0, 1) for t in (query, key))
    scores: Tensor = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    return scores


def _resized(maps: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """[T, n] on a grid -> [T, h, w]."""
    return F.interpolate(maps.unflatten(-1, grid)[None], size=size, mode="bilinear", align_corners=False)[0]
