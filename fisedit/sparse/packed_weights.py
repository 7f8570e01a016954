"""Weights as sparse blocks use them: merged with LoRAs, and for captured graphs some side by side.

Says which UNets captured graphs can run. Knows modules and weights; nothing about rows or features.
"""

from __future__ import annotations

from math import log
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import Timesteps
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from fisedit.errors import UnsupportedModuleError
from fisedit.features.sites import weight_of
from fisedit.machine.device import write_count
from fisedit.sparse_kernels import ops

QKV = ("to_q", "to_k", "to_v")


class MergedWeights:
    """Weights of layers with their LoRAs (arXiv 2106.09685), each merged once and kept until the layer changes."""

    def __init__(self) -> None:
        self._merged: WeakKeyDictionary[nn.Module, tuple[object, Tensor]] = WeakKeyDictionary()

    def weight(self, module: Any) -> Tensor:
        """The weight that a linear or convolution works with; a plain layer's own parameter."""
        if type(module) in (nn.Linear, nn.Conv2d):
            weight: Tensor = module.weight
            return weight
        state, found = _lora_state(module), self._merged.get(module)
        if found is None or found[0] != state:
            found = self._merged[module] = state, weight_of(module)
        return found[1]


def _lora_state(module: Any) -> object:
    """Return a state that changes when a layer's merged weight does."""
    weights = ((p.data_ptr(), p.dtype, write_count(p)) for p in module.parameters())
    scales = tuple(sorted(getattr(module, "scaling", {}).items()))
    return tuple(weights), scales, str(getattr(module, "active_adapters", "")), getattr(module, "disable_adapters", 0)


class PackedWeights:
    """Weights that are used together, side by side, with their LoRAs as they are now; the model is left as it is.

    Args:
        model: a UNet or an autoencoder's decoder.
        merged: weights of its layers.

    Attributes:
        second_biases: bias of every ResNet block's second conv and its shortcut's, in sum.
        folded_ends: weight [C, 5 * C] and bias of every transformer's last feed-forward layer and proj_out in one.
        qkv: projections to self-attention's queries, keys and values, [3 * C, C], by attention, if these have no bias.
    """

    def __init__(self, model: nn.Module, merged: MergedWeights) -> None:
        modules: dict[str, Any] = dict(model.named_modules())
        self.second_biases = {name: _second_bias(m) for name, m in modules.items() if isinstance(m, ResnetBlock2D)}
        self.folded_ends = {
            name: _folded_end(m, merged) for name, m in modules.items() if isinstance(m, Transformer2DModel)
        }
        self.qkv = {
            name: torch.cat([merged.weight(getattr(m, to)).detach() for to in QKV])
            for name, m in modules.items()
            if isinstance(m, Attention) and not m.is_cross_attention and m.to_q.bias is None
        }


class PackedTime:
    """The layers from a time to what all ResNet blocks add for it, side by side, with their LoRAs as they are now.

    Args:
        unet: The UNet whose layers they are.
        merged: weights of its layers.
    """

    def __init__(self, unet: UNet2DConditionModel, merged: MergedWeights) -> None:
        resnets = {name: m for name, m in unet.named_modules() if isinstance(m, ResnetBlock2D)}
        times, embedding = [m.time_emb_proj for m in resnets.values()], unet.time_embedding
        last = torch.cat([merged.weight(m).detach() for m in times]), torch.cat([m.bias.detach() for m in times])
        self._layers = [*((merged.weight(m), m.bias) for m in (embedding.linear_1, embedding.linear_2)), last]
        self._frequencies = frequencies(unet.time_proj).to(unet.conv_in.weight.device)
        self._names, self._widths = list(resnets), [m.out_features for m in times]

    def projections(self, timestep: Tensor, added: Tensor | None = None) -> dict[str, Tensor]:
        """Return what every ResNet block adds for a time, by name: [1, C], or [B, C] with what is added.

        Args:
            timestep: float32 [1].
            added: [B, E], added to the time's embedding; or None.
        """
        if added is None:
            found = ops.time_projections(timestep, self._frequencies, self._layers)
        else:
            *embedding, last = self._layers
            found = F.linear(F.silu(ops.time_projections(timestep, self._frequencies, embedding) + added), *last)
        return dict(zip(self._names, found.split(self._widths, 1), strict=True))


def frequencies(embedding: Any) -> Tensor:
    """Return the frequencies of the time's cosines and sines: float32 [F]."""
    half = embedding.num_channels // 2
    power = torch.arange(half, dtype=torch.float32) / (half - embedding.downscale_freq_shift)
    waves: Tensor = torch.exp(-log(10000) * power) * embedding.scale
    return waves


def _second_bias(block: ResnetBlock2D) -> Tensor:
    short = block.conv_shortcut
    bias: Tensor = block.conv2.bias.detach()
    return bias if short is None or short.bias is None else bias + short.bias.detach()


def _folded_end(model: Transformer2DModel, merged: MergedWeights) -> tuple[Tensor, Tensor]:
    """The last feed-forward's linear layer, its residual and proj_out as one layer of [gated | residual]."""
    ff, out = model.transformer_blocks[-1].ff.net[2], model.proj_out
    weight, fp32 = merged.weight(out).detach().flatten(1), torch.float32
    folded = (weight.to(fp32) @ merged.weight(ff).detach().to(fp32)).to(weight.dtype)
    bias = weight.to(fp32) @ ff.bias.detach().to(fp32) + out.bias.detach().to(fp32)
    return torch.cat([folded, weight], 1), bias.to(weight.dtype)


def check_capturable(unet: UNet2DConditionModel) -> None:
    """Refuse blocks that captured graphs cannot run.

    Raises:
        UnsupportedModuleError: names the first of them.
    """
    for name, block in unet.named_modules():
        plain = {ResnetBlock2D: plain_resnet, Transformer2DModel: plain_transformer}.get(type(block))
        if plain is not None and not plain(block):
            raise _uncapturable(f"block {name} is unusual")
    if unet.config.time_cond_proj_dim is not None:
        raise _uncapturable("time embedding takes the guidance scale")
    if not _plain_time(unet):
        raise _uncapturable("time embedding is unusual")


def _uncapturable(what: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(f"the UNet's {what} and cannot be captured; it runs eagerly")


def plain_resnet(block: ResnetBlock2D) -> bool:
    """Return whether a ResNet block is norms, SiLU, convs, a time that is added and a shortcut."""
    plain = isinstance(block.nonlinearity, nn.SiLU) and block.time_embedding_norm == "default"
    return plain and block.time_emb_proj is not None and bool(block.output_scale_factor == 1)


def _plain_time(unet: UNet2DConditionModel) -> bool:
    waves, layers = unet.time_proj, unet.time_embedding
    usual = isinstance(waves, Timesteps) and waves.flip_sin_to_cos and not waves.num_channels % 2
    return usual and isinstance(layers.act, nn.SiLU) and layers.post_act is None and unet.time_embed_act is None


def plain_transformer(model: Any) -> bool:
    """Return whether each block of a transformer is two attentions and a gated feed-forward, and nothing else."""
    return all(map(_plain, model.transformer_blocks))


def _plain(block: Any) -> bool:
    attentions = (block.attn1, block.attn2)
    if None in attentions or block.attn1.is_cross_attention or not isinstance(block.ff.net[0], GEGLU):
        return False
    return all(
        a.to_q.bias is None and a.rescale_output_factor == 1 and not a.residual_connection and a.norm_q is None
        for a in attentions
    )
