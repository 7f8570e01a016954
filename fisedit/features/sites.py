"""The UNet's module graph as sites: every layer that sees positions, its role and its level.

This is where the read-set comes from: what must be recorded follows from the roles, never from a list of names. Knows
diffusers' block classes; knows nothing about features, plans or steps. A layer without an exact sparse counterpart is
refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any

from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import (
    CrossAttnDownBlock2D,
    CrossAttnUpBlock2D,
    DownBlock2D,
    UNetMidBlock2D,
    UNetMidBlock2DCrossAttn,
    UpBlock2D,
)
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from fisedit.errors import UnsupportedModuleError
from fisedit.models.group_norm import StableGroupNorm
from fisedit.models.layer_changes import check_lora_kind, why_no_product


class Role(Enum):
    """A kind of layer, by what it reads of the positions it does not compute."""

    CONV = auto()
    """3x3 conv over active and halo rows; its input already brings the halo."""
    NORM_HALO = auto()
    """GroupNorm before a 3x3 conv: the whole map's statistics, and the recorded halo rows."""
    NORM = auto()
    """GroupNorm before row-wise layers: the whole map's statistics, and what its active rows had part in them."""
    DOWN = auto()
    """Stride-2 conv: the recorded halo rows of its raw input."""
    UP = auto()
    """Nearest interpolation and 3x3 conv: the recorded halo rows of its raw input."""
    TOKENS = auto()
    """Self-attention's key or value projection: every recorded row."""
    QUERY = auto()
    """A query projection: reads nothing; recorded so that masks can be made from it."""
    TEXT = auto()
    """Cross-attention's key or value projection: text only, once per edit."""
    ATTENTION = auto()
    """Self-attention between those projections: reads nothing itself."""
    POINTWISE = auto()
    """Linear or 1x1 conv: reads nothing."""
    EXTRA = auto()
    """A layer that is added to the UNet's own; its site says what it reads."""


@dataclass(frozen=True, eq=False)
class LayerSite:
    """A layer at work.

    Args:
        name: its dotted name.
        module: the layer.
        role: what it reads.
        level: The level of the map it reads, 0 is the finest.
        skip: The site before the middle that reads the second map too, where an up block's norm reads two maps side by
            side; "" for all others.
    """

    name: str
    module: Any
    role: Role
    level: int
    skip: str = field(default="", kw_only=True)

    @cached_property
    def weights(self) -> int:
        """Multiply-accumulates per output row; 0 where there are no weights, and for norms."""
        conv = getattr(self.module, "conv", self.module)  # resamplers hold their conv
        return 0 if isinstance(conv, nn.GroupNorm | Attention) else int(conv.weight.numel())

    @property
    def cross(self) -> bool:
        """Return whether a query belongs to cross-attention."""
        return ".attn2." in self.name


@dataclass(frozen=True, eq=False)
class CrossKeys:
    """Keys and values that a cross-attention reads beside the text's, by a softmax of its own.

    Args:
        key: [B, T, C].
        value: [B, T, C].
        scale: factor of what is attended.
    """

    key: Tensor
    value: Tensor
    scale: float


def unet_sites(unet: UNet2DConditionModel) -> tuple[LayerSite, ...]:
    """All sites of a UNet, in the order the data travels.

    Raises:
        UnsupportedModuleError: a block, a layer, or a LoRA's kind that the sparse engine has no exact counterpart for.
    """
    for name, module in unet.named_modules():
        check_lora_kind(name, module)
    sites = tuple(_walk(unet))
    skips = _skips(sites)
    return tuple(replace(site, skip=skips[site.name]) if site.name in skips else site for site in sites)


def encoder_sites(network: nn.Module, prefix: str) -> tuple[LayerSite, ...]:
    """The sites of a network that has the form of a UNet's first half, such as a ControlNet.

    Args:
        network: with `conv_in`, `down_blocks` and `mid_block`.
        prefix: The prefix of the sites' names, by which they differ from the UNet's.

    Raises:
        UnsupportedModuleError: as in `unet_sites`.
    """
    return tuple(replace(site, name=f"{prefix}{site.name}") for site in _walk_encoder(network))


def _skips(sites: Sequence[LayerSite]) -> dict[str, str]:
    """Up block's norm -> site that reads the map which skips to it; the down path's last is the first to be joined."""
    joining = [s.name for s in sites if s.name.startswith("up_blocks.") and s.name.endswith(".norm1")]
    down = [s for s in sites if s.name.startswith("down_blocks.")]
    readers = [s.name for s in down if s.role is Role.DOWN or s.name.endswith(".norm1")]
    middle = [s.name for s in sites if s.name == "mid_block.resnets.0.norm1"]
    return dict(zip(joining, reversed([*readers, *middle]), strict=True)) if middle else {}


def decoder_sites(decoder: Decoder, levels: int) -> tuple[LayerSite, ...]:
    """The sites of an autoencoder's decoder at its first `levels` resolutions, up to the upsampler that leaves the last
    of them, which is level 0.

    Raises:
        UnsupportedModuleError: as in `unet_sites`.
    """
    return tuple(_walk_decoder(decoder, levels))


def num_levels(sites: tuple[LayerSite, ...]) -> int:
    """Number of levels."""
    return 1 + max(site.level for site in sites)


def _walk_encoder(network: Any) -> Iterator[LayerSite]:
    level = 0
    yield _conv("conv_in", network.conv_in, level)
    for i, block in enumerate(network.down_blocks):
        yield from _block(f"down_blocks.{i}", block, level)
        level += bool(block.downsamplers)
    if network.mid_block is not None:
        yield from _block("mid_block", network.mid_block, level)


def _walk(unet: UNet2DConditionModel) -> Iterator[LayerSite]:
    yield from _walk_encoder(unet)
    level = sum(bool(block.downsamplers) for block in unet.down_blocks)
    for i, block in enumerate(unet.up_blocks):
        yield from _block(f"up_blocks.{i}", block, level)
        level -= bool(block.upsamplers)
    if unet.conv_norm_out is not None:
        yield _norm("conv_norm_out", unet.conv_norm_out, level, Role.NORM_HALO)
    yield _conv("conv_out", unet.conv_out, level)


def _walk_decoder(decoder: Decoder, levels: int) -> Iterator[LayerSite]:
    level, middle = levels - 1, decoder.mid_block
    yield _conv("conv_in", decoder.conv_in, level)
    for i, resnet in enumerate(middle.resnets):
        yield from _layer(f"mid_block.resnets.{i}", resnet, level)
    for i, attention in enumerate(middle.attentions):
        if attention is None:  # the VAE's mid_block_add_attention is False
            continue
        name = f"mid_block.attentions.{i}"
        yield _norm(f"{name}.group_norm", attention.group_norm, level, Role.NORM)
        if not type(attention.processor).__module__.startswith("diffusers."):  # whose processors all compute the same
            raise _unsupported(name, attention.processor)
        for child in (attention.to_q, attention.to_k, attention.to_v, attention.to_out[0]):
            _check_product(name, child)
        yield LayerSite(f"{name}.to_k", attention.to_k, Role.TOKENS, level)
        yield LayerSite(f"{name}.to_v", attention.to_v, Role.TOKENS, level)
    for i, block in enumerate(decoder.up_blocks[:levels]):
        for j, resnet in enumerate(block.resnets):
            yield from _layer(f"up_blocks.{i}.resnets.{j}", resnet, level)
        yield from _layer(f"up_blocks.{i}.upsamplers.0", block.upsamplers[0], level)
        level -= 1


BLOCKS = (CrossAttnDownBlock2D, CrossAttnUpBlock2D, DownBlock2D, UNetMidBlock2D, UNetMidBlock2DCrossAttn, UpBlock2D)


def _block(name: str, block: nn.Module, level: int) -> Iterator[LayerSite]:
    if type(block) not in BLOCKS:
        raise _unsupported(name, block)
    for child, module in block.named_children():
        if not isinstance(module, nn.ModuleList):
            raise _unsupported(f"{name}.{child}", module)
        for i, layer in enumerate(module):
            yield from _layer(f"{name}.{child}.{i}", layer, level)


def _layer(name: str, layer: nn.Module, level: int) -> Iterator[LayerSite]:
    walk = LAYERS.get(type(layer))
    if walk is None:
        raise _unsupported(name, layer)
    yield from walk(name, layer, level)


def _resnet(name: str, block: ResnetBlock2D, level: int) -> Iterator[LayerSite]:
    if block.upsample is not None or block.downsample is not None:
        raise _unsupported(name, block, "it resamples")
    timed = block.time_emb_proj is not None and (block.time_embedding_norm != "default" or block.skip_time_act)
    if timed or not isinstance(block.nonlinearity, nn.SiLU):
        raise _unsupported(name, block, "it has another activation, or another use of the time, than SD 1.x and 2.x")
    if block.time_emb_proj is not None:
        _check_product(f"{name}.time_emb_proj", block.time_emb_proj)
    yield _norm(f"{name}.norm1", block.norm1, level, Role.NORM_HALO)
    yield _conv(f"{name}.conv1", block.conv1, level)
    yield _norm(f"{name}.norm2", block.norm2, level, Role.NORM_HALO)
    yield _conv(f"{name}.conv2", block.conv2, level)
    if block.conv_shortcut is not None:
        yield _pointwise(f"{name}.conv_shortcut", block.conv_shortcut, level)


def _transformer(name: str, model: Transformer2DModel, level: int) -> Iterator[LayerSite]:
    if not model.is_input_continuous:
        raise _unsupported(name, model, "its input is not continuous")
    yield _norm(f"{name}.norm", model.norm, level, Role.NORM)
    yield _pointwise(f"{name}.proj_in", model.proj_in, level)
    for i, block in enumerate(model.transformer_blocks):
        yield from _transformer_block(f"{name}.transformer_blocks.{i}", block, level)
    yield _pointwise(f"{name}.proj_out", model.proj_out, level)


def _transformer_block(name: str, block: Any, level: int) -> Iterator[LayerSite]:
    if type(block) is not BasicTransformerBlock or block.norm_type != "layer_norm":
        raise _unsupported(name, block)
    for child in ("attn1", "attn2"):
        attention = getattr(block, child)
        if attention is not None:
            yield from _attention(f"{name}.{child}", attention, level)
    for child in ("norm1", "norm2", "norm3"):
        norm = getattr(block, child)
        if norm is not None and type(norm) is not nn.LayerNorm:
            raise _unsupported(f"{name}.{child}", norm)
    for child, module in (("net.0.proj", block.ff.net[0].proj), ("net.2", block.ff.net[2])):
        _check_product(f"{name}.ff.{child}", module)
    for child, module in block.ff.named_modules():
        if isinstance(module, nn.Linear):
            yield _pointwise(f"{name}.ff.{child}", module, level)


def _attention(name: str, attention: Attention, level: int) -> Iterator[LayerSite]:
    extras = (attention.group_norm, attention.spatial_norm, attention.norm_cross, attention.added_kv_proj_dim)
    if any(extra is not None for extra in extras) or attention.fused_projections:
        raise _unsupported(name, attention, "it has norms, added or fused projections")
    if type(attention) is not Attention or any(type(last) is not nn.Dropout for last in attention.to_out[1:]):
        raise _unsupported(name, attention)
    for child in ("to_q", "to_k", "to_v"):
        _check_product(f"{name}.{child}", getattr(attention, child))
    role = Role.TEXT if attention.is_cross_attention else Role.TOKENS
    if not attention.is_cross_attention and is_plain(attention):
        yield LayerSite(name, attention, Role.ATTENTION, level)
    yield LayerSite(f"{name}.to_q", attention.to_q, Role.QUERY, level)
    yield LayerSite(f"{name}.to_k", attention.to_k, role, level)
    yield LayerSite(f"{name}.to_v", attention.to_v, role, level)
    yield _pointwise(f"{name}.to_out.0", attention.to_out[0], level)


def is_plain(attention: Attention) -> bool:
    """Return whether a module computes attention between its projections and nothing else."""
    plain = attention.rescale_output_factor == 1 and not attention.residual_connection and attention.norm_q is None
    return bool(plain and type(attention.processor) is AttnProcessor2_0)


def _downsample(name: str, layer: Downsample2D, level: int) -> Iterator[LayerSite]:
    if not layer.use_conv or layer.padding != 1 or layer.norm is not None or not is_3x3(layer.conv, 2):
        raise _unsupported(name, layer, "it is not a padded 3x3 conv of stride 2")
    _check_product(f"{name}.conv", layer.conv)
    yield LayerSite(name, layer, Role.DOWN, level)


def _upsample(name: str, layer: Upsample2D, level: int) -> Iterator[LayerSite]:
    plain = layer.use_conv and layer.interpolate and not layer.use_conv_transpose and layer.norm is None
    if not plain or not is_3x3(layer.conv, 1):
        raise _unsupported(name, layer, "it is not nearest interpolation and a 3x3 conv")
    _check_product(f"{name}.conv", layer.conv)
    yield LayerSite(name, layer, Role.UP, level)


LAYERS = {
    ResnetBlock2D: _resnet,
    Transformer2DModel: _transformer,
    Downsample2D: _downsample,
    Upsample2D: _upsample,
}


def _norm(name: str, module: nn.Module, level: int, role: Role) -> LayerSite:
    if type(module) not in (nn.GroupNorm, StableGroupNorm):
        raise _unsupported(name, module)
    return LayerSite(name, module, role, level)


def _conv(name: str, module: nn.Module, level: int) -> LayerSite:
    if not is_3x3(module, 1):
        raise _unsupported(name, module, "it is not a padded 3x3 conv")
    _check_product(name, module)
    return LayerSite(name, module, Role.CONV, level)


def is_3x3(module: nn.Module, stride: int) -> bool:
    """Return whether a layer is a 3x3 conv with zeros around the map, whatever LoRAs are in it."""
    module = base_layer(module)
    if not isinstance(module, nn.Conv2d) or module.padding_mode != "zeros":
        return False
    shape = (module.kernel_size, module.stride, module.padding, module.dilation, module.groups)
    return shape == ((3, 3), (stride, stride), (1, 1), (1, 1), 1)


def weight_of(module: Any) -> Tensor:
    """The weight that a linear or convolution works with, LoRAs that are active in it included, with their scales."""
    weight: Tensor
    if type(module) in (nn.Linear, nn.Conv2d):  # a failed attribute lookup takes as long as a small product
        weight = module.weight
        return weight
    bare: Any = base_layer(module)
    weight = bare.weight
    if bare is module or module.disable_adapters or module.merged:
        return weight
    for name in module.active_adapters:
        if name in module.lora_A:
            weight = weight + module.get_delta_weight(name).to(weight)
    return weight


def channels(site: LayerSite) -> int:
    """Channels of the map that a norm or resampler reads."""
    module = site.module
    return int(module.num_channels if isinstance(module, nn.GroupNorm) else base_layer(module.conv).in_channels)


def loras(*models: nn.Module) -> tuple[tuple[str, float], ...]:
    """Names and scales of the LoRAs that are active somewhere in models, sorted."""
    layers = (m for m in _lora_layers(models) if not m.disable_adapters)
    found = {(str(name), float(m.scaling[name])) for m in layers for name in m.active_adapters if name in m.scaling}
    return tuple(sorted(found))


def lora_names(*models: nn.Module) -> set[str]:
    """Names of the LoRAs that are in models, active or not."""
    return {str(name) for layer in _lora_layers(models) for name in layer.lora_A}


def _lora_layers(models: Iterable[nn.Module]) -> Iterator[Any]:
    return (module for model in models for module in model.modules() if hasattr(module, "lora_A"))


def base_layer(module: nn.Module) -> Any:
    """The layer within what diffusers' LoRA loader puts around it."""
    inner = getattr(module, "base_layer", module)
    return inner if isinstance(inner, nn.Module) else module


def _pointwise(name: str, module: nn.Module, level: int) -> LayerSite:
    if getattr(base_layer(module), "kernel_size", (1, 1)) != (1, 1):
        raise _unsupported(name, module)
    _check_product(name, module)
    return LayerSite(name, module, Role.POINTWISE, level)


def _check_product(name: str, module: nn.Module) -> None:
    """Refuse a linear or convolution that its weight does not tell all about; errors as in `unet_sites`."""
    if why := why_no_product(bare := base_layer(module)):
        raise _unsupported(name, bare, why)


def _unsupported(name: str, module: nn.Module, why: str = "it has no sparse counterpart") -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"the UNet's layer {name} is a {type(module).__name__} and {why}; use a Stable Diffusion 1.x, 2.x or XL UNet"
    )


def project_text(sites: Sequence[LayerSite], text: Tensor, text_keys: dict[str, Tensor]) -> None:
    """Project a prompt's embeddings for every cross-attention.

    Args:
        sites: The sites of the UNet.
        text: embeddings [B, T, D].
        text_keys: keys and values [B, T, C] by site name; those that are missing are filled in.
    """
    for site in sites:
        if site.role is Role.TEXT and site.name not in text_keys:
            text_keys[site.name] = type(site.module).forward(site.module, text)  # its own, whatever is injected
