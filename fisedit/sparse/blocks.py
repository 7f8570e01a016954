"""The blocks of a UNet on active rows: ResNet block, transformer, resamplers, up block and outer convs.

Each is written once, over a `RowSource` that says where recorded rows come from. `CachedRows` reads them at a plan's
exact sizes. `StaticRows` reads them from the padded buffers of a captured graph. diffusers' own
`UNet2DConditionModel.forward` runs, with these blocks injected whole. Between them a feature map is [B, C, R, 1]: the
active rows stand in place of pixels. Knows nothing about steps, samplers or masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from fisedit.features.sites import is_plain
from fisedit.machine.stopwatch import block as block_span
from fisedit.machine.stopwatch import layer as layer_span
from fisedit.models.injection import Replacement
from fisedit.sparse.row_layout import map_of, rows_of
from fisedit.sparse.row_source import RowSource
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.operands import NO_EPILOGUE, ConvEpilogue, LayerNormParams, Rows

Forward = Callable[[RowSource, str, Any, Rows, Tensor], Tensor]


@block_span
def resnet(source: RowSource, name: str, block: Any, rows: Rows, embedding: Tensor | None = None) -> Tensor:
    """A ResNet block: norm, SiLU and conv, twice, with the time between them if there is one, and the shortcut.

    Args:
        source: The source of recorded rows.
        name: The name of the block.
        block: a `ResnetBlock2D`.
        rows: [B, R, C_in].
        embedding: The time embedding [B, E]; None in an autoencoder.

    Returns:
        [B, R, C_out].
    """
    first, second, short = f"{name}.norm1", f"{name}.norm2", block.conv_shortcut
    affine = source.affine(first, block.norm1, rows)
    time = None if embedding is None else source.time(name, block, embedding)
    hidden = _conv3x3(source, first, block.conv1, rows, affine, ConvEpilogue(time))
    affine = source.affine(second, block.norm2, hidden)
    bias, short_bias = source.second_biases(name, block)
    if short is None:
        assert isinstance(rows, Tensor), name
        epilogue = ConvEpilogue(residual=rows)
    else:
        epilogue = ConvEpilogue(shortcut=(rows, source.weight(short), short_bias))
    halo, kernel_map, weight = source.halo(second), source.kernel_map(second), source.weight(block.conv2)
    out = ops.norm_conv3x3(hidden, halo, kernel_map, weight, bias, affine, epilogue)
    return out if block.output_scale_factor == 1 else out / block.output_scale_factor


@block_span
def transformer(source: RowSource, name: str, model: Any, rows: Tensor, text: Tensor) -> Tensor:
    """A transformer model: a norm, a linear layer, transformer blocks, a linear layer and the residual.

    Args:
        source: The source of recorded rows.
        name: The name of the model.
        model: a `Transformer2DModel`.
        rows: [B, R, C].
        text: embeddings [B, T, D].

    Returns:
        [B, R, C].
    """
    norm = source.affine(f"{name}.norm", model.norm, rows)
    hidden = _linear(source, model.proj_in, rows, affine=norm)
    for i, block in enumerate(model.transformer_blocks):
        gated, hidden = transformer_block(source, f"{name}.transformer_blocks.{i}", block, hidden, text)
        last = i + 1 == len(model.transformer_blocks)
        if last and gated is not None and (end := source.folded_end(name)) is not None:
            return ops.norm_linear((gated, hidden), *end, residual=rows)
        if gated is not None:
            hidden = _end_of_feed_forward(source, block.ff.net[2], gated, hidden)
    return _linear(source, model.proj_out, hidden, residual=rows)


def transformer_block(
    source: RowSource, name: str, block: Any, x: Tensor, text: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Self-attention, cross-attention and a feed-forward, each behind a layer norm and with a residual.

    Args:
        source: The source of recorded rows.
        name: The name of the block.
        block: a `BasicTransformerBlock`.
        x: rows [B, R, C].
        text: embeddings [B, T, D].

    Returns:
        What enters the last linear layer, and what that is added to; None and the sum of a feed-forward without gates.
    """
    own, cross = block.attn1, block.attn2
    if is_plain(own) and not own.is_cross_attention:
        layer = _layer(block.norm1)
        query, key, value = ops.norm_qkv(x, source.qkv(f"{name}.attn1", own), layer)
        attended = source.self_attention(f"{name}.attn1", own.heads, query, key, value)
        x = _linear(source, own.to_out[0], attended, residual=x)
    else:
        x = x + own(_normed(block.norm1, x), encoder_hidden_states=text if own.is_cross_attention else None)
    if cross is not None and is_plain(cross) and cross.is_cross_attention:
        x = _cross_attention(source, f"{name}.attn2", block.norm2, cross, x)
    elif cross is not None:
        x = x + cross(_normed(block.norm2, x), encoder_hidden_states=text if cross.is_cross_attention else None)
    gate = block.ff.net[0]
    if type(gate) is not GEGLU:
        return None, x + block.ff(_normed(block.norm3, x))
    gated = ops.norm_geglu(x, source.weight(gate.proj), gate.proj.bias, _layer(block.norm3))
    return gated, x


@block_span
def attention_block(source: RowSource, name: str, attention: Any, rows: Tensor) -> Tensor:
    """Self-attention behind a group norm with a residual: the attention of an autoencoder.

    Args:
        source: The source of recorded rows.
        name: The name of the attention.
        attention: The attention of an autoencoder's middle block.
        rows: [B, R, C].

    Returns:
        [B, R, C].
    """
    norm = source.affine(f"{name}.group_norm", attention.group_norm, rows)
    layers = (attention.to_q, attention.to_k, attention.to_v)
    query, key, value = (_linear(source, layer, rows, affine=norm) for layer in layers)
    attended = source.self_attention(name, attention.heads, query, key, value)
    return _linear(source, attention.to_out[0], attended, residual=rows)


@layer_span("cross-attention")
def _cross_attention(source: RowSource, name: str, norm: nn.LayerNorm, attention: Any, x: Tensor) -> Tensor:
    query_name, key, value = f"{name}.to_q", source.text_keys(f"{name}.to_k"), source.text_keys(f"{name}.to_v")
    weight, recorded = source.weight(attention.to_q), source.recorded_query(query_name)

    def attend(rows: Tensor, tokens: slice = slice(None)) -> tuple[Tensor, Tensor]:
        read = key[:, tokens], value[:, tokens]
        return ops.cross_attention(rows, _layer(norm), weight, *read, attention.heads, recorded)

    if parts := source.text_parts(query_name):
        order = torch.cat([part.rows for part in parts]).argsort()
        attended, query = (
            torch.cat(each, 1)[:, order] for each in zip(*(attend(x[:, p.rows], p.tokens) for p in parts), strict=True)
        )
    else:
        attended, query = attend(x)
    for one in source.cross_keys(name):
        attended = attended + one.scale * ops.dense_attention(query, one.key, one.value, attention.heads)
    source.keep_query(query_name, query)
    return _linear(source, attention.to_out[0], attended, residual=x)


@block_span
def resampler(source: RowSource, name: str, module: Any, rows: Tensor) -> Tensor:
    """The conv of a downsampler, or interpolation and conv of an upsampler in one kernel map.

    Args:
        source: The source of recorded rows.
        name: The name of the resampler.
        module: a `Downsample2D` or `Upsample2D`.
        rows: [B, R, C].

    Returns:
        [B, R_out, C], the active rows of the next level.
    """
    source.keep(name, rows)
    return _conv3x3(source, name, module.conv, rows)


@block_span
def up_block(
    source: RowSource, name: str, block: Any, rows: Tensor, skipped: list[Tensor], embedding: Tensor, text: Tensor
) -> Tensor:
    """An up block of the UNet.

    Args:
        source: The source of recorded rows.
        name: The name of the block.
        block: an `UpBlock2D` or `CrossAttnUpBlock2D`.
        rows: [B, R, C].
        skipped: rows [B, R, C_i] of the down blocks' outputs, read last to first; emptied.
        embedding: The time embedding [B, E].
        text: embeddings [B, T, D].

    Returns:
        [B, R_out, C_out].
    """
    for i, resnet_block in enumerate(block.resnets):
        entering = source.joined(rows, skipped.pop())
        rows = resnet(source, f"{name}.resnets.{i}", resnet_block, entering, embedding)
        if models := getattr(block, "attentions", None):
            rows = transformer(source, f"{name}.attentions.{i}", models[i], rows, text)
    for i, module in enumerate(block.upsamplers or ()):
        rows = resampler(source, f"{name}.upsamplers.{i}", module, rows)
    return rows


def _conv3x3(
    source: RowSource,
    name: str,
    conv: Any,
    rows: Rows,
    affine: Tensor | None = None,
    epilogue: ConvEpilogue = NO_EPILOGUE,
) -> Tensor:
    halo, kernel_map, weight = source.halo(name), source.kernel_map(name), source.weight(conv)
    return ops.norm_conv3x3(rows, halo, kernel_map, weight, conv.bias, affine, epilogue)


@layer_span("feed-forward")
def _end_of_feed_forward(source: RowSource, module: Any, gated: Tensor, residual: Tensor) -> Tensor:
    return _linear(source, module, gated, residual=residual)


def _linear(source: RowSource, module: Any, rows: Tensor, **added: Any) -> Tensor:
    """A linear layer or 1x1 conv of rows, the affine before it and what is added to it."""
    return ops.norm_linear(rows, source.weight(module), module.bias, **added)


def _layer(norm: nn.LayerNorm) -> LayerNormParams:
    return norm.weight, norm.bias, norm.eps


def _normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class EncoderBlocks:
    """The blocks of a UNet, or of a network that has the form of its first half, as they are injected.

    Args:
        network: The network whose modules get other forwards.
        prefix: The prefix of the names of its sites.
    """

    def __init__(self, network: Any, prefix: str = "") -> None:
        self._network, self._conv_in = network, f"{prefix}conv_in"
        self._blocks = tuple((f"{prefix}{name}", module) for name, module in _outermost(network))

    def replacements(self, source: RowSource) -> list[Replacement]:
        """The modules that get another forward, over a source of rows."""
        first = self._network.conv_in
        found: list[Replacement] = [(m, partial(FORWARDS[type(m)], source, name, m)) for name, m in self._blocks]
        return [*found, (first, partial(_conv_in, source, self._conv_in, first))]


class UNetBlocks(EncoderBlocks):
    """A UNet's blocks as they are injected.

    Args:
        unet: The model whose modules get other forwards.
    """

    def __init__(self, unet: UNet2DConditionModel) -> None:
        super().__init__(unet)
        self._unet = unet

    def replacements(self, source: RowSource, *, by_layer: bool = False) -> list[Replacement]:
        """See `EncoderBlocks.replacements`.

        Args:
            source: The source of rows.
            by_layer: the layers of up blocks get other forwards, and diffusers' own blocks call them, so that what is
                injected between them is called too.
        """
        unet, last = self._unet, _OutputNorm(source)
        found: list[Replacement] = [*super().replacements(source), (unet.conv_act, lambda x: x)]
        if by_layer:
            layers = [(name, module) for name, module in unet.named_modules() if type(module) in LAYERS_OF_BLOCKS]
            inner = [
                (m, partial(FORWARDS[type(m)], source, name, m)) for name, m in layers if name.startswith("up_blocks.")
            ]
            found = [*(one for one in found if one[0] not in set(unet.up_blocks)), *inner]
        found += [(unet.conv_norm_out, partial(last.norm, unet.conv_norm_out))]
        return [*found, (unet.conv_out, partial(last.conv, unet.conv_out))]


class ShallowBlocks:
    """A UNet of which the first conv and the last layer alone run, as in DeepCache (arXiv 2312.00858).

    The deep map that enters the last layer beside the first conv's output is given instead of computed. The modules in
    between hand on what they get.

    Args:
        blocks: The whole UNet's blocks.
        unet: The model whose modules get other forwards.
    """

    def __init__(self, blocks: UNetBlocks, unet: UNet2DConditionModel) -> None:
        self._blocks, self._unet, self._last = blocks, unet, len(unet.up_blocks[-1].resnets) - 1
        self.entry = f"up_blocks.{len(unet.up_blocks) - 1}.resnets.{self._last}.norm1"
        self.channels = unet.up_blocks[-1].resnets[-1].in_channels - unet.config.block_out_channels[0]

    def runs(self, name: str) -> bool:
        """Return whether a layer runs, by its name."""
        up, last = f"up_blocks.{len(self._unet.up_blocks) - 1}", self._last
        return name.startswith((f"{up}.resnets.{last}.", f"{up}.attentions.{last}.", "conv_in", NORM_OUT, "conv_out"))

    def replacements(self, source: RowSource, deep: Tensor) -> list[Replacement]:
        """The modules that get another forward.

        Args:
            source: The source of rows.
            deep: rows [B, R, C] of the map that enters the last layer, without what skipped the middle.
        """
        unet = self._unet
        passed: list[Replacement] = [(block, partial(_passed_down, block)) for block in unet.down_blocks]
        passed += [(block, _passed) for block in (unet.mid_block, *unet.up_blocks[:-1]) if block is not None]
        inner = {module for block, _ in passed for module in block.modules()}
        own = [
            one for one in self._blocks.replacements(source) if one[0] not in inner and one[0] is not unet.up_blocks[-1]
        ]
        return [*passed, *own, (unet.up_blocks[-1], partial(self._last_layer, source, deep))]

    def _last_layer(
        self,
        source: RowSource,
        deep: Tensor,
        hidden_states: Tensor,
        res_hidden_states_tuple: tuple[Tensor, ...],
        temb: Tensor,
        encoder_hidden_states: Any = None,
        **__: Any,
    ) -> Tensor:
        block: Any = self._unet.up_blocks[-1]
        name, i = f"up_blocks.{len(self._unet.up_blocks) - 1}", self._last
        entering = source.joined(deep, rows_of(res_hidden_states_tuple[0]))
        rows = resnet(source, f"{name}.resnets.{i}", block.resnets[i], entering, temb)
        if models := getattr(block, "attentions", None):
            rows = transformer(source, f"{name}.attentions.{i}", models[i], rows, encoder_hidden_states)
        return map_of(rows)


def _passed(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _passed_down(block: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    outputs = len(block.resnets) + len(block.downsamplers or ())
    return hidden_states, (hidden_states,) * outputs


def _outermost(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks that have a form on rows, those inside another such block left out."""
    outer = ""
    for name, module in network.named_modules():
        if type(module) in FORWARDS and not (outer and name.startswith(outer)):
            outer = f"{name}."
            yield name, module


class _OutputNorm:
    """The last norm, which is applied in the last conv."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._affine: Tensor | None = None

    def norm(self, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        self._affine = self._source.affine(NORM_OUT, norm, rows_of(x))
        return x

    def conv(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        return map_of(_conv3x3(self._source, NORM_OUT, conv, rows_of(x), self._affine))


NORM_OUT = "conv_norm_out"


def _conv_in(source: RowSource, name: str, conv: nn.Conv2d, latents: Tensor) -> Tensor:
    rows, halo = source.latents(latents)
    return map_of(ops.norm_conv3x3(rows, halo, source.kernel_map(name), source.weight(conv), conv.bias))


def _resnet_map(source: RowSource, name: str, block: Any, x: Tensor, temb: Tensor, *_: Any, **__: Any) -> Tensor:
    return map_of(resnet(source, name, block, rows_of(x), temb))


def _transformer_map(
    source: RowSource, name: str, model: Any, x: Tensor, encoder_hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor]:
    return (map_of(transformer(source, name, model, rows_of(x), encoder_hidden_states)),)


def _resampler_map(source: RowSource, name: str, module: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return map_of(resampler(source, name, module, rows_of(x)))


def _up_block_map(
    source: RowSource,
    name: str,
    block: Any,
    hidden_states: Tensor,
    res_hidden_states_tuple: tuple[Tensor, ...],
    temb: Tensor,
    encoder_hidden_states: Any = None,
    **_: Any,
) -> Tensor:
    skipped = [rows_of(x) for x in res_hidden_states_tuple]
    return map_of(up_block(source, name, block, rows_of(hidden_states), skipped, temb, encoder_hidden_states))


FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    ResnetBlock2D: _resnet_map,
    Transformer2DModel: _transformer_map,
    Downsample2D: _resampler_map,
    Upsample2D: _resampler_map,
    UpBlock2D: _up_block_map,
    CrossAttnUpBlock2D: _up_block_map,
}
"""Block -> its forward on maps [B, C, R, 1]."""

LAYERS_OF_BLOCKS = (ResnetBlock2D, Transformer2DModel, Upsample2D)
"""The types of layer that up blocks consist of."""
