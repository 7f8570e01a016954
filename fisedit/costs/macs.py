"""Multiply-accumulates of the UNet and of the VAE decoder, counted from their layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diffusers.models.attention_processor import Attention
from torch import nn

from fisedit.decoder.tiles import COARSE_LEVELS, Areas
from fisedit.features.sites import LayerSite, Role

if TYPE_CHECKING:
    from diffusers import AutoencoderKL


LEVEL_CHANGE = {Role.DOWN: 1, Role.UP: -1}
"""Levels between a resampler's input and its output."""


def unet_macs(sites: Sequence[LayerSite], rows: Sequence[int], sizes: Sequence[int], batch: int, tokens: int) -> int:
    """Multiply-accumulates of one UNet evaluation, the text's projections aside.

    Args:
        sites: The sites of the UNet.
        rows: rows computed at each level, finest first (all positions for a dense one).
        sizes: positions of each level.
        batch: B.
        tokens: T.
    """
    return batch * sum(sum(site_macs(site, rows, sizes, tokens)) for site in sites if site.role is not Role.TEXT)


def site_macs(site: LayerSite, rows: Sequence[int], sizes: Sequence[int], tokens: int) -> tuple[int, int]:
    """Multiply-accumulates of one item in a layer of the UNet, and in the attention behind a query projection.

    Args:
        site: no projection of the text.
        rows: rows computed at each level, finest first.
        sizes: positions of each level.
        tokens: T.
    """
    layer = rows[site.level + LEVEL_CHANGE.get(site.role, 0)] * site.weights
    if site.role is not Role.QUERY:
        return layer, 0
    keys = tokens if site.cross else sizes[site.level]
    return layer, 2 * rows[site.level] * keys * int(site.module.out_features)


def text_macs(sites: Sequence[LayerSite], batch: int, tokens: int) -> int:
    """Multiply-accumulates of projecting the text for every cross-attention once.

    Args:
        sites: The sites of the UNet.
        batch: B.
        tokens: T.
    """
    return batch * tokens * sum(site.weights for site in sites if site.role is Role.TEXT)


def decoder_macs(vae: AutoencoderKL, areas: Areas, latent_size: int) -> int:
    """Multiply-accumulates of a decode.

    Args:
        vae: The autoencoder whose decoder it is.
        areas: cells read and computed at each resolution, see `fisedit.decoder.tiles.Areas`.
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


def decode_work(areas: Areas) -> dict[str, float]:
    """The work of a sparse decode by kind: cells of the coarse levels and of each fine one.

    Args:
        areas: The areas of a decode, from `fisedit.decoder.tiles.box_areas`.
    """
    fine = {f"decode fine {i}": float(areas[i][1]) for i in range(COARSE_LEVELS, len(areas))}
    return {"decode coarse": float(areas[0][1]), "decode": float(areas[-1][1])} | fine
