"""ResNet blocks and transformers of a replayed forward in one piece each, where these are plain.

They do what diffusers' own code does with the layers of `layers` in them; but where maps are small that code, a call
for every module and a view for every layer, takes as long as the arithmetic. Knows nothing about samplers or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from fisedit.models.injection import Forward
from fisedit.sparse.layers import Replay, map_of, norm_rows, replay_query, replay_tokens, rows_of, text_once
from fisedit.sparse.modules import LayerSite, is_plain, weight_of
from fisedit.sparse.packed_weights import plain_resnet, plain_transformer
from fisedit.sparse_kernels import ops


@dataclass(frozen=True, eq=False)
class Whole:
    """A block, the sites within it by their names there, and what it does in a replayed forward."""

    module: Any
    sites: dict[str, LayerSite]
    forward: Forward


def wholes(unet: UNet2DConditionModel, sites: Sequence[LayerSite]) -> tuple[tuple[Whole, ...], tuple[LayerSite, ...]]:
    """The plain blocks of a UNet, and the sites outside of them."""
    found, rest = [], {site.name: site for site in sites}
    for name, module in unet.named_modules():
        forward = _forward(module)
        if forward is not None:
            inside = {key.removeprefix(f"{name}."): rest.pop(key) for key in list(rest) if key.startswith(f"{name}.")}
            found.append(Whole(module, inside, forward))
    return tuple(found), tuple(rest.values())


def _forward(module: nn.Module) -> Forward | None:
    if isinstance(module, ResnetBlock2D) and plain_resnet(module):
        return replay_resnet
    if isinstance(module, Transformer2DModel) and plain_transformer(module):
        attentions = (getattr(block, name) for block in module.transformer_blocks for name in ("attn1", "attn2"))
        return replay_transformer if all(map(is_plain, attentions)) else None
    return None


def replay_resnet(run: Replay, whole: Whole, x: Tensor, temb: Tensor, *_: Any, **__: Any) -> Tensor:
    """Norm, SiLU and conv, twice, with the time between them, and the shortcut."""
    block, rows = whole.module, rows_of(x)
    hidden = _half(run, whole, "1", rows)
    hidden += linear(block.time_emb_proj, run.warm(temb))
    hidden = _half(run, whole, "2", hidden)
    return map_of(hidden.add_(rows if block.conv_shortcut is None else linear(block.conv_shortcut, rows)))


def _half(run: Replay, whole: Whole, which: str, rows: Tensor) -> Tensor:
    norm, conv = whole.sites[f"norm{which}"], whole.sites[f"conv{which}"].module
    level = run.level(norm)
    activated = F.silu(norm_rows(run, norm, rows, level.read_positions), inplace=True)
    return ops.conv3x3(activated, level.same, weight_of(conv), conv.bias)


def replay_transformer(
    run: Replay, whole: Whole, x: Tensor, encoder_hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor]:
    """A norm, a linear layer, transformer blocks, a linear layer and what came in."""
    model, norm, rows = whole.module, whole.sites["norm"], rows_of(x)
    hidden = linear(model.proj_in, norm_rows(run, norm, rows, run.level(norm).active))
    for i, block in enumerate(model.transformer_blocks):
        hidden = _block(run, whole.sites, f"transformer_blocks.{i}", block, hidden, encoder_hidden_states)
    return (map_of(linear(model.proj_out, hidden, rows)),)


def _block(run: Replay, sites: dict[str, LayerSite], name: str, block: Any, x: Tensor, text: Tensor) -> Tensor:
    normed, own, cross = _layer_norm(block.norm1, x), f"{name}.attn1.to_", f"{name}.attn2.to_"
    query = replay_query(run, sites[f"{own}q"], normed)
    key, value = (replay_tokens(run, sites[own + to], normed) for to in "kv")
    x = linear(block.attn1.to_out[0], ops.dense_attention(query, key, value, block.attn1.heads), x)
    query = replay_query(run, sites[f"{cross}q"], _layer_norm(block.norm2, x))
    key, value = (text_once(run, sites[cross + to], text) for to in "kv")
    x = linear(block.attn2.to_out[0], ops.dense_attention(query, key, value, block.attn2.heads), x)
    hidden, gate = linear(block.ff.net[0].proj, _layer_norm(block.norm3, x)).chunk(2, -1)
    return linear(block.ff.net[2], hidden * F.gelu(gate), x)


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def linear(module: Any, rows: Tensor, residual: Tensor | None = None) -> Tensor:
    """A linear layer or 1x1 conv of rows [B, R, C], whatever LoRAs are in it, and what is added to it."""
    return ops.norm_linear(rows, weight_of(module), module.bias, residual=residual)
