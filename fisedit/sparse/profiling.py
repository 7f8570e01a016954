"""Multiply-accumulates and seconds. Knows layer shapes and clocks; runs nothing.

MACs are counted from the graph: output rows times weights, plus 2 * queries * keys * width for attention. Norms and
activations count nothing, as in torch's FlopCounterMode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from diffusers.models.attention_processor import Attention
from torch import nn

from fisedit.sparse.modules import LayerSite, Role

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

    from fisedit.sparse.vae_tiles import Areas

SHIFT = {Role.DOWN: 1, Role.UP: -1}
"""Levels between a sampler's input and its output."""


def unet_macs(sites: Sequence[LayerSite], rows: Sequence[int], sizes: Sequence[int], batch: int, tokens: int) -> int:
    """Multiply-accumulates of one UNet evaluation, the text's projections aside.

    Args:
        rows: rows computed at each level, finest first (all positions for a dense one).
        sizes: positions of each level. batch: B. tokens: T.
    """
    total = 0
    for site in sites:
        if site.role is Role.TEXT:
            continue
        total += rows[site.level + SHIFT.get(site.role, 0)] * site.weights
        if site.role is Role.QUERY:
            keys = tokens if site.cross else sizes[site.level]
            total += 2 * rows[site.level] * keys * site.module.out_features
    return batch * total


def text_macs(sites: Sequence[LayerSite], batch: int, tokens: int) -> int:
    """Multiply-accumulates of projecting the text for every cross-attention once."""
    return batch * tokens * sum(site.weights for site in sites if site.role is Role.TEXT)


def decoder_macs(vae: AutoencoderKL, areas: Areas, latent_size: int) -> int:
    """Multiply-accumulates of a decode.

    Args:
        areas: cells read and computed at each resolution, see `fisedit.sparse.vae_tiles.Areas`.
        latent_size: h * w, the keys of the middle attention.
    """
    total = vae.post_quant_conv.weight.numel() * areas[0][0] if vae.post_quant_conv is not None else 0
    for name, module in vae.decoder.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            total += module.weight.numel() * _decoder_cells(name, areas)
        elif isinstance(module, Attention):
            total += 2 * areas[0][1] * latent_size * int(module.to_q.weight.shape[0])
    return total


def _decoder_cells(name: str, areas: Areas) -> int:
    """Cells a layer computes."""
    if not name.startswith("up_blocks."):
        return areas[0 if name.startswith(("conv_in", "mid_block")) else -1][1]
    level = int(name.split(".")[1])
    return areas[level + 1][0] if ".upsamplers." in name else areas[level][1]


class Stopwatch:
    """Wall seconds by station."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = perf_counter()

    @contextmanager
    def station(self, name: str) -> Iterator[None]:
        """Add the enclosed time to a station."""
        before = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - before

    def done(self) -> dict[str, float]:
        """All stations and the total."""
        return self.seconds | {"total": perf_counter() - self._start}
