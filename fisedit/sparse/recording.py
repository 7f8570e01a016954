"""Dense recording: diffusers' own forward runs, and its layers cache what a later sparse evaluation may read.

Knows layers and their roles; knows nothing about samplers or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from fisedit.features.cache import StepFeatures
from fisedit.features.sites import CrossKeys, LayerSite, Role, is_3x3, is_plain
from fisedit.models.injection import Forward, Replacement, injected
from fisedit.sparse.row_layout import rows_of
from fisedit.sparse_kernels import ops


@dataclass(eq=False)
class DenseContext:
    """The state of one dense evaluation.

    Args:
        maps: where feature maps go.
        text_keys: the text's keys and values by site name, filled where they are not there yet.
        queries: names of the query projections that are recorded.
        shares_skips: a map that skips to an up block is recorded once, where the down path reads it.
    """

    maps: StepFeatures
    text_keys: dict[str, Tensor]
    queries: frozenset[str] = frozenset()
    shares_skips: bool = False


def recording_replacements(context: DenseContext, sites: Sequence[LayerSite]) -> list[Replacement]:
    """Return what is injected into a model for a dense evaluation that records."""
    return [(site.module, partial(RECORD[site.role], context, site)) for site in sites if site.role in RECORD]


def own_forward(site: LayerSite, x: Tensor) -> Tensor:
    """Run the forward of the layer's own class."""
    out: Tensor = type(site.module).forward(site.module, x)
    return out


def apply_layer(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a linear layer or a conv on a whole map."""
    if type(layer) is nn.Linear:
        return ops.dense_linear(x, layer.weight, layer.bias)
    return apply_conv(layer, x)


def apply_conv(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a conv on a map by the kernels; any other layer by its class's forward.

    Args:
        layer: A layer of a model.
        x: [B, C, H, W].
    """
    if type(layer) is nn.Conv2d and (layer.kernel_size == (1, 1) or is_3x3(layer, layer.stride[0])):
        stride, padding = layer.stride[0], int(layer.padding[0])
        return ops.dense_conv(x, layer.weight, layer.bias, stride, padding)
    out: Tensor = type(layer).forward(layer, x)
    return out


def _pass(context: DenseContext, site: LayerSite, x: Tensor) -> Tensor:
    return apply_layer(site.module, x)


def _record_resampler(context: DenseContext, site: LayerSite, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    context.maps.maps[site.name] = rows_of(x)
    with injected(site.module, [(site.module.conv, partial(apply_conv, site.module.conv))]):
        out: Tensor = type(site.module).forward(site.module, x, *args, **kwargs)
    return out


def _record_norm(context: DenseContext, site: LayerSite, x: Tensor) -> Tensor:
    """Record a norm's input, without what skips to it from a map that is recorded already, and its group statistics."""
    norm, rows, step = site.module, rows_of(x), context.maps
    if site.skip and context.shares_skips:
        rows = rows[..., : rows.shape[2] - step.channels(site.skip)].contiguous()
        step.joined[site.name] = site.skip
    step.maps[site.name] = rows
    out, step.statistics[site.name] = ops.dense_group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    return out


def _record_row_statistics(context: DenseContext, site: LayerSite, x: Tensor) -> Tensor:
    """Record what every row has part in a norm's group statistics, and these: nothing else is read of its input."""
    norm, step = site.module, context.maps
    step.maps[site.name] = ops.row_statistics(rows_of(x), norm.num_groups)
    out, step.statistics[site.name] = ops.dense_group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    return out


def _record_tokens(context: DenseContext, site: LayerSite, x: Tensor) -> Tensor:
    out = context.maps.maps[site.name] = apply_layer(site.module, x)
    return out


def _record_query(context: DenseContext, site: LayerSite, x: Tensor) -> Tensor:
    """Record the conditional branch's queries where masks or attention injection will read them."""
    out = apply_layer(site.module, x)
    if site.name in context.queries:
        context.maps.maps[site.name] = out[-1:].clone()
    return out


def _project_text(context: DenseContext, site: LayerSite, text: Tensor) -> Tensor:
    """Project the text at the first step only."""
    if site.name not in context.text_keys:
        context.text_keys[site.name] = own_forward(site, text)
    return context.text_keys[site.name]


def _attend(context: DenseContext, site: LayerSite, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Self-attention by the kernels; by the module's own processor where it got another one."""
    attention = site.module
    if not is_plain(attention):
        own: Tensor = type(attention).forward(attention, x, *args, **kwargs)
        return own
    attended = ops.dense_attention(attention.to_q(x), attention.to_k(x), attention.to_v(x), attention.heads)
    out: Tensor = attention.to_out[0](attended)
    return out


def attend_beside(
    attention: Any, extra: Sequence[CrossKeys], x: Tensor, encoder_hidden_states: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Cross-attention to the text, plus that to each of other keys and values.

    Args:
        attention: a plain one.
        extra: keys and values beside the text's.
        x: [B, N, C].
        encoder_hidden_states: the text [B, T, D].

    Returns:
        [B, N, C].
    """
    query, heads = attention.to_q(x), attention.heads
    attended = ops.dense_attention(
        query, attention.to_k(encoder_hidden_states), attention.to_v(encoder_hidden_states), heads
    )
    for one in extra:
        attended = attended + one.scale * ops.dense_attention(query, one.key, one.value, heads)
    out: Tensor = attention.to_out[0](attended)
    return out


RECORD: dict[Role, Forward] = {
    Role.CONV: _pass,
    Role.POINTWISE: _pass,
    Role.NORM_HALO: _record_norm,
    Role.NORM: _record_row_statistics,
    Role.DOWN: _record_resampler,
    Role.UP: _record_resampler,
    Role.TOKENS: _record_tokens,
    Role.QUERY: _record_query,
    Role.ATTENTION: _attend,
    Role.TEXT: _project_text,
}
"""Role -> a layer's forward in a dense evaluation."""
