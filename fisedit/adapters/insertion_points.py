"""Where an adapter meets a UNet: taps of its feature maps, controls, and changes of the maps that blocks hand on.

The order is that of HelloMeme (arXiv 2410.22901). In a down block and in the middle: block, tap, control, change; in an
up block: tap of its input, control, change, block. A control is added to the map that also becomes the last skip; a
change goes on without it. Knows diffusers' blocks; nothing about what changes a map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fisedit.models.injection import Around, Forward, Injection

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

Change = Callable[[Tensor], Tensor]
"""[B, C, H, W] -> the same."""

Tap = Callable[[str, Tensor], None]
"""Sees a place's name and map [B, C, H, W]."""


@dataclass(frozen=True, eq=False)
class Place:
    """A map between two blocks.

    Args:
        block: whose output (down, mid) or input (up) it is. level: its resolution, 0 the finest.
        channels: C. reader: the first norm behind it, whose input begins with it.
    """

    block: nn.Module
    level: int
    channels: int
    reader: str


def places(unet: UNet2DConditionModel) -> dict[str, Place]:
    """The places of a UNet, "down_0" to "up_N", in the order the data travels."""
    found, level, downs = {}, 0, len(unet.down_blocks)
    for i, block in enumerate(unet.down_blocks):
        level += bool(block.downsamplers)
        after = f"down_blocks.{i + 1}" if i + 1 < downs else "mid_block"
        found[f"down_{i}"] = Place(block, level, block.resnets[-1].out_channels, f"{after}.resnets.0.norm1")
    channels = unet.mid_block.resnets[-1].out_channels
    found["mid"] = Place(unet.mid_block, level, channels, "up_blocks.0.resnets.0.norm1")
    for i, block in enumerate(unet.up_blocks):
        found[f"up_{i}"] = Place(block, level, channels, f"up_blocks.{i}.resnets.0.norm1")
        level -= bool(block.upsamplers)
        channels = block.resnets[-1].out_channels
    return found


def insertion(
    unet: UNet2DConditionModel,
    changes: Mapping[str, Change] | None = None,
    controls: Mapping[str, Tensor] | None = None,
    tap: Tap | None = None,
) -> Injection:
    """What to inject, to see and to change the maps of a UNet's places.

    Args:
        changes: place -> what becomes of its map. controls: place -> [B, C, H, W], added. tap: sees every map first.
    """

    def visit(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """The map as a skip keeps it, and as it goes on."""
        if tap:
            tap(name, x)
        if controls and name in controls:
            x = x + controls[name].to(x)
        return x, changes[name](x) if changes and name in changes else x

    def around(name: str) -> Around:
        wrap = {"down": _down, "mid": _mid, "up": _up}[name.partition("_")[0]]
        return lambda inner: partial(wrap, inner, partial(visit, name))

    wanted = [name for name in places(unet) if tap or name in (controls or {}) or name in (changes or {})]
    return Injection(unet, ((places(unet)[name].block, around(name)) for name in wanted))


class _SeenAll(Exception):
    """No error: it ends a forward whose rest nobody needs."""


@torch.no_grad()
def taps(
    unet: UNet2DConditionModel, latents: Tensor, text: Tensor, wanted: tuple[str, ...], timestep: int = 0
) -> dict[str, Tensor]:
    """A reference's maps at the wanted places, from one pass that ends at the last of them.

    Args:
        latents: [B, 4, h, w], clean. text: [B, T, D].
    """
    found: dict[str, Tensor] = {}

    def tap(name: str, x: Tensor) -> None:
        if name in wanted:
            found[name] = x.clone()
        if len(found) == len(wanted):
            raise _SeenAll

    with insertion(unet, tap=tap):
        try:
            unet(latents, timestep, text, return_dict=False)
        except _SeenAll:
            return found
    raise AssertionError(f"the UNet has no {set(wanted) - set(found)}")


Visit = Callable[[Tensor], tuple[Tensor, Tensor]]


def _down(inner: Forward, visit: Visit, *args: Any, **kwargs: Any) -> Any:
    x, skips = inner(*args, **kwargs)
    skip, x = visit(x)
    return x, (*skips[:-1], skip)


def _mid(inner: Forward, visit: Visit, *args: Any, **kwargs: Any) -> Tensor:
    return visit(inner(*args, **kwargs))[1]


def _up(inner: Forward, visit: Visit, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    return inner(visit(hidden_states)[1], *args, **kwargs)
