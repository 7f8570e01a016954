"""Which UNets have a fused form, and what of their weights it keeps: some side by side, some multiplied out.

Knows modules and weights; knows nothing about rows, records or kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.embeddings import Timesteps
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from fisedit.errors import UnsupportedModuleError
from fisedit.sparse.modules import LayerSite, Role

QKV = ("to_q", "to_k", "to_v")

_ROLES = {Role[name] for name in "CONV NORM_HALO NORM DOWN UP TOKENS QUERY TEXT POINTWISE ATTENTION".split()}


class Weights:
    """Copies of weights as the fused form wants them; the UNet's own are left as they are.

    Raises:
        UnsupportedModuleError: a block that has no fused form.

    Attributes:
        time: layers from a time's cosines and sines to what all ResNet blocks add. frequencies: float32 [F], of these.
        times: where in the last layer's output a ResNet block's part is.
        second: bias of every ResNet block's second conv, its shortcut's included.
        packed: projections to self-attention's queries, keys and values, [3 * C, C], by transformer block.
        ends: weight [C, 5 * C] and bias of every transformer's last feed-forward and proj_out in one.
    """

    def __init__(self, unet: UNet2DConditionModel, sites: Sequence[LayerSite]) -> None:
        blocks = {name: m for name, m in unet.named_modules() if isinstance(m, ResnetBlock2D | Transformer2DModel)}
        _check(unet, sites, blocks)
        resnets = {name: m for name, m in blocks.items() if isinstance(m, ResnetBlock2D)}
        models = {name: m for name, m in blocks.items() if isinstance(m, Transformer2DModel)}
        times, embedding = [m.time_emb_proj for m in resnets.values()], unet.time_embedding
        last = torch.cat([m.weight.detach() for m in times]), torch.cat([m.bias.detach() for m in times])
        self.time = [*((m.weight, m.bias) for m in (embedding.linear_1, embedding.linear_2)), last]
        self.frequencies = frequencies(unet.time_proj).to(unet.conv_in.weight.device)
        self.times, start = {}, 0
        for name, resnet in resnets.items():
            self.times[name] = slice(start, start := start + resnet.time_emb_proj.out_features)
        self.second = {name: _second_bias(resnet) for name, resnet in resnets.items()}
        self.packed = {
            f"{name}.transformer_blocks.{i}": torch.cat([getattr(b.attn1, to).weight.detach() for to in QKV])
            for name, model in models.items()
            for i, b in enumerate(model.transformer_blocks)
        }
        self.ends = {name: _end(model) for name, model in models.items()}


def frequencies(embedding: Any) -> Tensor:
    """How fast each cosine and sine of the time turns: float32 [F]."""
    half = embedding.num_channels // 2
    power = torch.arange(half, dtype=torch.float32) / (half - embedding.downscale_freq_shift)
    waves: Tensor = torch.exp(-log(10000) * power) * embedding.scale
    return waves


def _second_bias(block: ResnetBlock2D) -> Tensor:
    """The second conv's bias and the shortcut's, which is within it."""
    short = block.conv_shortcut
    bias: Tensor = block.conv2.bias.detach()
    return bias if short is None or short.bias is None else bias + short.bias.detach()


def _end(model: Transformer2DModel) -> tuple[Tensor, Tensor]:
    """The last feed-forward's linear layer, its residual and proj_out as one layer of [gated | residual]."""
    ff, out = model.transformer_blocks[-1].ff.net[2], model.proj_out
    weight, exact = out.weight.detach().flatten(1), torch.float32
    folded = (weight.to(exact) @ ff.weight.detach().to(exact)).to(weight.dtype)
    bias = weight.to(exact) @ ff.bias.detach().to(exact) + out.bias.detach().to(exact)
    return torch.cat([folded, weight], 1), bias.to(weight.dtype)


def _check(unet: UNet2DConditionModel, sites: Sequence[LayerSite], blocks: Mapping[str, nn.Module]) -> None:
    """Refuse what the fused forms leave out."""
    for name, block in blocks.items():
        if not (plain_resnet(block) if isinstance(block, ResnetBlock2D) else plain_transformer(block)):
            raise _unfused(f"block {name} is unusual")
    for name, module in unet.named_modules():
        if hasattr(module, "base_layer"):
            raise _unfused(f"layer {name} has a LoRA around it")
    for site in sites:
        if site.role not in _ROLES:
            raise _unfused(f"layer {site.name} belongs to an adapter")
    if unet.config.time_cond_proj_dim is not None:
        raise _unfused("time embedding takes the guidance scale")
    if not _plain_time(unet):
        raise _unfused("time embedding is unusual")


def _unfused(what: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(f"the UNet's {what} and has no fused form; run it layer by layer")


def plain_resnet(block: ResnetBlock2D) -> bool:
    """Whether a ResNet block is norms, SiLU, convs, a time that is added and a shortcut."""
    plain = isinstance(block.nonlinearity, nn.SiLU) and block.time_embedding_norm == "default"
    return plain and block.time_emb_proj is not None and bool(block.output_scale_factor == 1)


def _plain_time(unet: UNet2DConditionModel) -> bool:
    waves, layers = unet.time_proj, unet.time_embedding
    usual = isinstance(waves, Timesteps) and waves.flip_sin_to_cos and not waves.num_channels % 2
    return usual and isinstance(layers.act, nn.SiLU) and layers.post_act is None and unet.time_embed_act is None


def plain_transformer(model: Any) -> bool:
    """Whether each block of a transformer is two attentions and a gated feed-forward, and nothing else."""
    return all(map(_plain, model.transformer_blocks))


def _plain(block: Any) -> bool:
    attentions = (block.attn1, block.attn2)
    if None in attentions or block.attn1.is_cross_attention or not isinstance(block.ff.net[0], GEGLU):
        return False
    return all(
        a.to_q.bias is None and a.rescale_output_factor == 1 and not a.residual_connection and a.norm_q is None
        for a in attentions
    )
