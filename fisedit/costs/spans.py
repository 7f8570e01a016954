"""Layers by kind and level: the spans of their calls, their multiply-accumulates and their bytes.

Layers that sparse blocks compute open their spans themselves (`machine.stopwatch.layer`); those that torch calls
get hooks here, for as long as spans are recorded. Knows sites and shapes; no prompts and no masks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from fisedit.costs.macs import site_macs
from fisedit.features.sites import LayerSite, Role, base_layer, unet_sites
from fisedit.machine.stopwatch import OTHER, SpanRecorder, current_recorder, recording_spans
from fisedit.models.injection import exclusive

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, UNet2DConditionModel

    from fisedit.machine.model import Model

LayerWork = dict[tuple[str, int], tuple[int, int]]
"""(kind, level) -> (multiply-accumulates, bytes) of a step."""

_KINDS = {
    Role.CONV: "conv",
    Role.DOWN: "conv",
    Role.UP: "conv",
    Role.NORM: "group norm",
    Role.NORM_HALO: "group norm",
    Role.ATTENTION: "attention",
    Role.TEXT: "cross-attention",
}


def kind_of(site: LayerSite) -> str:
    """The kind of a layer, as profiles and cost tables name it.

    Args:
        site: A site of the UNet.
    """
    if site.role in _KINDS:
        return _KINDS[site.role]
    if site.cross:
        return "cross-attention"
    if ".ff." in site.name:
        return "feed-forward"
    return "conv" if site.name.endswith("conv_shortcut") else "linear"


@contextmanager
def recorded_spans(pipe: Model, recorder: SpanRecorder | None = None) -> Iterator[SpanRecorder]:
    """Record the spans of a model's layers in the enclosed calls of this thread; the model is left as it was.

    Args:
        pipe: the model.
        recorder: The recorder that gets the spans; None for a fresh one, which waits for the model's GPU if it has one.
    """
    sites, levels = unet_sites(pipe.unet), dict[str, int]()
    for site in sites:
        parts = site.name.split(".")
        for length in range(1, len(parts) + 1):
            levels.setdefault(".".join(parts[:length]), site.level)
    if recorder is None:
        device = pipe.unet.device
        wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
        recorder = SpanRecorder(levels, wait=wait)
    else:
        recorder.levels = levels
    hooks = ExitStack()
    try:
        with exclusive(pipe.unet, pipe.vae):  # no other thread calls the hooks then
            for module, kind, name, leaf in (*_unet_layers(pipe.unet, sites), *_decoder_blocks(pipe.vae)):
                hooks.callback(module.register_forward_pre_hook(_begin_hook(kind, name, leaf=leaf)).remove)
                hooks.callback(module.register_forward_hook(_end_hook, always_call=True).remove)
        with recording_spans(recorder):
            yield recorder
    finally:
        with exclusive(pipe.unet, pipe.vae):
            hooks.close()


Hooked = tuple[nn.Module, str, str, bool]
"""A module, its spans' kind and name, and whether they are leaves."""


def _unet_layers(unet: UNet2DConditionModel, sites: Sequence[LayerSite]) -> Iterator[Hooked]:
    for name, module in unet.named_modules():
        if isinstance(module, ResnetBlock2D | Transformer2DModel):
            yield module, OTHER, name, False
        elif name.endswith(".attn2"):
            yield module, "cross-attention", name, True
        elif name.endswith(".ff"):
            yield module, "feed-forward", name, True
    for site in sites:
        kind = kind_of(site)
        if kind not in ("cross-attention", "feed-forward"):
            yield site.module, kind, site.name, kind != "attention"


def _decoder_blocks(vae: AutoencoderKL) -> Iterator[Hooked]:
    yield vae.decoder.mid_block, "decode 0", "mid_block", True
    for i, block in enumerate(vae.decoder.up_blocks):
        yield block, f"decode {i}", f"up_blocks.{i}", True


def _begin_hook(kind: str, name: str, *, leaf: bool) -> Callable[..., None]:
    def begin_span(*_: object) -> None:
        if recorder := current_recorder():
            recorder.begin(kind, name, leaf=leaf)

    return begin_span


def _end_hook(*_: object) -> None:
    if recorder := current_recorder():
        recorder.end()


def layer_work(
    sites: Sequence[LayerSite], rows: Sequence[int], sizes: Sequence[int], batch: int, tokens: int
) -> LayerWork:
    """Multiply-accumulates of a step by kind and level, and bytes that it reads and writes at least.

    Args:
        sites: The sites of the UNet.
        rows: computed at each level, finest first.
        sizes: positions of each level.
        batch: items.
        tokens: T, the tokens of the text.
    """
    found: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for site in sites:
        if site.role is Role.TEXT:
            continue
        layer, attended = site_macs(site, rows, sizes, tokens)
        item = _itemsize(site)
        num_bytes = site.weights * item + batch * rows[site.level] * _channels(site) * item
        _add(found, (kind_of(site), site.level), batch * layer, num_bytes)
        if attended:
            keys, width = (tokens if site.cross else sizes[site.level]), int(base_layer(site.module).out_features)
            kind = "cross-attention" if site.cross else "attention"
            _add(found, (kind, site.level), batch * attended, 2 * batch * (rows[site.level] + keys) * width * item)
    return dict(found)


def _add(found: dict[tuple[str, int], tuple[int, int]], key: tuple[str, int], macs: int, num_bytes: int) -> None:
    before = found[key]
    found[key] = before[0] + macs, before[1] + num_bytes


def _itemsize(site: LayerSite) -> int:
    parameters: Any = next(site.module.parameters(), None)
    return 0 if parameters is None else int(parameters.element_size())


def _channels(site: LayerSite) -> int:
    """Channels that a layer reads and writes for a row."""
    layer = base_layer(getattr(site.module, "conv", site.module))
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels + layer.out_channels
    if isinstance(layer, nn.Linear):
        return layer.in_features + layer.out_features
    return 2 * layer.num_channels if isinstance(layer, nn.GroupNorm) else 0
