"""Insertion points of a UNet: the maps between its blocks, where adapters read, add controls and change maps.

The order is that of HelloMeme (arXiv 2410.22901). In a down block and in the middle: block, hook, control, change; in
an up block: hook on its input, control, change, block. A control is added to the map that is also the last skip; a
change only to the map that goes on. Knows diffusers' blocks; not what changes a map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fisedit.models.injection import Forward, ForwardWrapper, Injection

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

MapChange = Callable[[Tensor], Tensor]
"""[B, C, H, W] -> the same."""

MapHook = Callable[[str, Tensor], None]
"""Sees a place's name and map [B, C, H, W]."""


@dataclass(frozen=True, eq=False)
class InsertionPoint:
    """A map between two blocks.

    Args:
        block: whose output (down, mid) or input (up) it is.
        level: its resolution, 0 the finest.
        channels: C.
        reader: name of the first norm behind it, whose input begins with it.
    """

    block: nn.Module
    level: int
    channels: int
    reader: str


def insertion_points(unet: UNet2DConditionModel) -> dict[str, InsertionPoint]:
    """The insertion points of a UNet, "down_0" to "up_N", in the order of the forward pass."""
    found, level, downs = {}, 0, len(unet.down_blocks)
    for i, block in enumerate(unet.down_blocks):
        level += bool(block.downsamplers)
        after = f"down_blocks.{i + 1}" if i + 1 < downs else "mid_block"
        found[f"down_{i}"] = InsertionPoint(block, level, block.resnets[-1].out_channels, f"{after}.resnets.0.norm1")
    channels = unet.mid_block.resnets[-1].out_channels
    found["mid"] = InsertionPoint(unet.mid_block, level, channels, "up_blocks.0.resnets.0.norm1")
    for i, block in enumerate(unet.up_blocks):
        found[f"up_{i}"] = InsertionPoint(block, level, channels, f"up_blocks.{i}.resnets.0.norm1")
        level -= bool(block.upsamplers)
        channels = block.resnets[-1].out_channels
    return found


def inject_maps(
    unet: UNet2DConditionModel,
    changes: Mapping[str, MapChange] | None = None,
    controls: Mapping[str, Tensor] | None = None,
    hook: MapHook | None = None,
) -> Injection:
    """Inject hooks, controls and changes at a UNet's insertion points.

    Args:
        unet: that is run in the context.
        changes: the changed map of a map, by insertion point.
        controls: [B, C, H, W], added, by insertion point.
        hook: called with every insertion point's name and map, before anything is added.
    """

    def visit(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """The map as a skip keeps it, and as it goes on."""
        if hook:
            hook(name, x)
        if controls and name in controls:
            x = x + controls[name].to(x)
        return x, changes[name](x) if changes and name in changes else x

    def wrapper_for(name: str) -> ForwardWrapper:
        forward = {"down": _down, "mid": _mid, "up": _up}[name.partition("_")[0]]
        return lambda original: partial(forward, original, partial(visit, name))

    names = [name for name in insertion_points(unet) if hook or name in (controls or {}) or name in (changes or {})]
    return Injection(unet, ((insertion_points(unet)[name].block, wrapper_for(name)) for name in names))


class _AllRecorded(Exception):
    """Ends a forward pass whose rest is not needed; not an error."""


@torch.no_grad()
def record_maps(
    unet: UNet2DConditionModel, latents: Tensor, text: Tensor, names: tuple[str, ...], timestep: int = 0
) -> dict[str, Tensor]:
    """Read a reference's maps in one pass that ends at the last wanted insertion point.

    Args:
        unet: that reads the reference.
        latents: [B, 4, h, w], clean.
        text: [B, T, D].
        names: names of insertion points.
        timestep: of the pass.

    Returns:
        [B, C, H, W] by insertion point.
    """
    found: dict[str, Tensor] = {}

    def hook(name: str, x: Tensor) -> None:
        if name in names:
            found[name] = x.clone()
        if len(found) == len(names):
            raise _AllRecorded

    with inject_maps(unet, hook=hook):
        try:
            unet(latents, timestep, text, return_dict=False)
        except _AllRecorded:
            return found
    raise AssertionError(f"the UNet has no {set(names) - set(found)}")


Visit = Callable[[Tensor], tuple[Tensor, Tensor]]


def _down(inner: Forward, visit: Visit, *args: Any, **kwargs: Any) -> Any:
    x, skips = inner(*args, **kwargs)
    skip, x = visit(x)
    return x, (*skips[:-1], skip)


def _mid(inner: Forward, visit: Visit, *args: Any, **kwargs: Any) -> Tensor:
    return visit(inner(*args, **kwargs))[1]


def _up(inner: Forward, visit: Visit, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    return inner(visit(hidden_states)[1], *args, **kwargs)
