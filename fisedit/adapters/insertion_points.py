"""Insertion points of a UNet: the maps between its blocks, and between their layers, where adapters read, add controls
and change maps.

The order between blocks is that of HelloMeme (arXiv 2410.22901). In a down block and in the middle: block, hook,
control, change; in an up block: hook on its input, control, change, block. A control is added to the map that is also
the last skip; a change only to the map that goes on. Knows diffusers' blocks; not what changes a map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
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

TimeHook = Callable[[Tensor], None]
"""Sees the time's embedding [B, E]."""


@dataclass(frozen=True, eq=False)
class InsertionPoint:
    """A map between two blocks.

    Args:
        block: The block whose output (down, mid) or input (up) it is.
        level: its resolution, 0 the finest.
        channels: C.
        reader: name of the first norm behind it, whose input begins with it.
    """

    block: nn.Module
    level: int
    channels: int
    reader: str


def insertion_points(unet: UNet2DConditionModel) -> dict[str, InsertionPoint]:
    """The insertion points of a UNet, "down_0" to "up_N", in the order of the forward pass.

    One without a middle block has no "mid".
    """
    middle = "up_blocks.0" if unet.mid_block is None else "mid_block"
    found, level, downs = {}, 0, len(unet.down_blocks)
    for i, block in enumerate(unet.down_blocks):
        level += bool(block.downsamplers)
        after = f"down_blocks.{i + 1}" if i + 1 < downs else middle
        found[f"down_{i}"] = InsertionPoint(block, level, block.resnets[-1].out_channels, f"{after}.resnets.0.norm1")
    channels = unet.down_blocks[-1].resnets[-1].out_channels
    if unet.mid_block is not None:
        found["mid"] = InsertionPoint(unet.mid_block, level, channels, "up_blocks.0.resnets.0.norm1")
    for i, block in enumerate(unet.up_blocks):
        found[f"up_{i}"] = InsertionPoint(block, level, channels, f"up_blocks.{i}.resnets.0.norm1")
        level -= bool(block.upsamplers)
        channels = block.resnets[-1].out_channels
    return found


def layer_points(unet: UNet2DConditionModel) -> dict[str, InsertionPoint]:
    """The maps behind the layers of a UNet's blocks, "down_0.0" to "up_N.n" and "mid.0".

    AnimateDiff's motion modules (arXiv 2307.04725) change them there. They lie behind a block's attentions, or its
    ResNet blocks where it has none.
    """
    found, blocks = {}, [f"down_blocks.{i}" for i in range(len(unet.down_blocks))]
    blocks += [
        *([] if unet.mid_block is None else ["mid_block"]),
        *(f"up_blocks.{i}" for i in range(len(unet.up_blocks))),
    ]
    points = insertion_points(unet)
    for name, after in zip_longest(blocks, blocks[1:]):
        block: Any = unet.get_submodule(name)
        short = "mid" if name == "mid_block" else name.replace("_blocks.", "_")
        last = "conv_norm_out" if after is None else f"{after}.resnets.0.norm1"
        resamplers = [f"{name}.{kind}.0" for kind in ("downsamplers", "upsamplers") if getattr(block, kind, None)]
        layers = list(getattr(block, "attentions", ()) or block.resnets)
        level = points[short].level - bool(short.startswith("down") and resamplers)
        for j, layer in enumerate(layers):
            inner = f"{name}.resnets.{j + 1}.norm1"
            reader = inner if j + 1 < len(block.resnets) else (*resamplers, last)[0]
            channels = block.resnets[-1].out_channels
            found[f"{short}.{j}"] = InsertionPoint(layer, level, channels, reader)
    return found


def inject_maps(
    unet: UNet2DConditionModel,
    changes: Mapping[str, MapChange] | None = None,
    controls: Mapping[str, Tensor] | None = None,
    hook: MapHook | None = None,
    time_hook: TimeHook | None = None,
) -> Injection:
    """Inject hooks, controls and changes at a UNet's insertion points.

    Args:
        unet: The UNet that is run in the context.
        changes: the changed map of a map, by insertion point.
        controls: [B, C, H, W], added, by insertion point between blocks.
        hook: called with every insertion point's name and map, before anything is added.
        time_hook: called with the time's embedding.
    """

    def visit(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """The map as a skip keeps it, and as it goes on."""
        if hook:
            hook(name, x)
        if controls and name in controls:
            x = x + controls[name].to(x)
        return x, changes[name](x) if changes and name in changes else x

    def wrapper_for(name: str) -> ForwardWrapper:
        forward = _layer if "." in name else {"down": _down, "mid": _mid, "up": _up}[name.partition("_")[0]]
        return lambda original: partial(forward, original, partial(visit, name))

    points = insertion_points(unet)
    if any("." in name for name in changes or {}):
        points |= layer_points(unet)
    given = {*(changes or {}), *(controls or {}), *(insertion_points(unet) if hook else ())}
    wrapped = [(points[name].block, wrapper_for(name)) for name in points if name in given]
    if time_hook:
        wrapped.append((unet.time_embedding, lambda original: partial(_time, original, time_hook)))
    return Injection(unet, wrapped)


class _AllRecorded(Exception):
    """Ends a forward pass whose rest is not needed; not an error."""


@torch.no_grad()
def record_maps(
    unet: UNet2DConditionModel, latents: Tensor, text: Tensor, names: tuple[str, ...], timestep: int = 0
) -> dict[str, Tensor]:
    """Read a reference's maps in one pass that ends at the last wanted insertion point.

    Args:
        unet: The UNet that reads the reference.
        latents: [B, 4, h, w], clean.
        text: [B, T, D].
        names: names of insertion points.
        timestep: The timestep of the pass.

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


def _time(inner: Forward, hook: TimeHook, *args: Any, **kwargs: Any) -> Tensor:
    embedding: Tensor = inner(*args, **kwargs)
    hook(embedding)
    return embedding


def _layer(inner: Forward, visit: Visit, *args: Any, **kwargs: Any) -> Any:
    """A ResNet block gives a map, a transformer a tuple of it."""
    out = inner(*args, **kwargs)
    return (visit(out[0])[1],) if isinstance(out, tuple) else visit(out)[1]


def _up(inner: Forward, visit: Visit, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    return inner(visit(hidden_states)[1], *args, **kwargs)
