"""Seconds of single layers, and which of them is slower than its peers.

A machine that is slower as a whole slows every layer alike. Ratios to earlier times are therefore judged over their
median, and a layer over the median of its kind and level too. Knows a UNet; no pipeline and no table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from fisedit.costs.spans import kind_of, recorded_spans
from fisedit.features.sites import unet_sites
from fisedit.machine.stopwatch import OTHER, STEP_DENSE, span
from fisedit.models.families.conditioning import example
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from fisedit.machine.model import Model
    from fisedit.values import OnStep

FEWEST = 5
"""Evaluations whose fastest one counts; the first of all does not."""

SLOW_RATIO = 1.2
"""The ratio of a layer's slowdown to its peers' from which the layer is named."""

ROUNDS = 3
"""Times that a layer must be seen slow, each in other seconds, as a busy machine slows any layer for a while."""

SHORTEST = 5e-5
"""Seconds of a layer below which its clock and hooks are what is measured."""


@dataclass(frozen=True)
class LayerDelay:
    """A layer beside its peers.

    Args:
        layer: its name.
        kind: The kind of layer.
        level: The level of its map.
        seconds: The seconds that it takes now.
        before: The seconds that it took at calibration.
        slowdown: The ratio of its slowdown to its peers'.
    """

    layer: str
    kind: str
    level: int
    seconds: float
    before: float
    slowdown: float


@torch.inference_mode()
def layer_seconds(pipe: Model, size: int, seconds: float, on_step: OnStep | None = None) -> dict[str, float]:
    """The fewest seconds that each layer of a UNet takes in dense evaluations, by name.

    Args:
        pipe: the model.
        size: side of the picture in pixels, divisible by 8.
        seconds: The approximate time that it takes.
        on_step: called before every evaluation; may raise `Cancelled`.
    """
    unet, device, side = pipe.unet, pipe.unet.device, size // LATENT_FACTOR
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, unet.config.in_channels, side, side, generator=generator).to(device, unet.dtype)
    text = example(unet, 2, pipe.tokenizer.model_max_length, generator)
    best: dict[str, float] = {}
    began = perf_counter()
    for i in count():
        if i > FEWEST and perf_counter() - began > seconds:
            return best
        if on_step is not None:
            on_step(i, max(i, FEWEST) + 1, None)
        with recorded_spans(pipe) as recorder, span(STEP_DENSE):
            unet(latents, 500, return_dict=False, **text.unet_inputs)
        if i:
            for layer in recorder.spans:
                if layer.name and layer.kind != OTHER:
                    best[layer.name] = min(best.get(layer.name, layer.own), layer.own)
    return best


def slow_layers(pipe: Model, before: Mapping[str, float], size: int, seconds: float) -> list[LayerDelay]:
    """Layers that are slower than their peers, compared with earlier times of the same machine; the slowest first.

    Args:
        pipe: the model.
        before: seconds by name, from `layer_seconds`.
        size: side of the picture that they were measured with, in pixels.
        seconds: The approximate time that a round takes.
    """
    kinds = {site.name: (kind_of(site), site.level) for site in unet_sites(pipe.unet)}
    found: dict[str, LayerDelay] = {}
    for turn in range(ROUNDS):
        named = delays(before, layer_seconds(pipe, size, seconds), kinds)
        slow = {delay.layer: delay for delay in named if delay.slowdown > SLOW_RATIO}
        found = slow if not turn else {name: slow[name] for name in found if name in slow}
        if not found:
            return []
    return sorted(found.values(), key=lambda delay: -delay.slowdown)


def delays(
    before: Mapping[str, float], now: Mapping[str, float], kinds: Mapping[str, tuple[str, int]]
) -> list[LayerDelay]:
    """Every layer's slowdown over its peers': over all layers' median, and over its kind's and level's if that is more.

    Args:
        before: seconds by name.
        now: seconds by name.
        kinds: name -> kind and level.
    """
    ratios = {
        name: now[name] / before[name] for name in before if name in now and min(before[name], now[name]) > SHORTEST
    }
    if not ratios:
        return []
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for name, ratio in ratios.items():
        groups[kinds.get(name, (OTHER, -1))].append(ratio)
    whole, found = median(ratios.values()), []
    for name, ratio in ratios.items():
        kind = kinds.get(name, (OTHER, -1))
        peers = median(groups[kind]) if len(groups[kind]) >= 3 else whole
        found.append(LayerDelay(name, *kind, now[name], before[name], ratio / max(peers, whole)))
    return found
