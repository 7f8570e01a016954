"""A sparse UNet evaluation in few kernels over static buffers: what a CUDA graph captures.

diffusers' own `UNet2DConditionModel.forward` runs; its ResNet blocks, transformers, samplers and outer convs are
injected whole, where `layers` injects layer by layer. Rows are padded to buckets, and every recorded map that is read
lies in a buffer. Knows nothing about steps, samplers or masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from fisedit.adapters.base import Replacement, injected
from fisedit.buckets import Bucket, LevelTables, Tables
from fisedit.errors import UnsupportedModuleError
from fisedit.graph import Role, Site
from fisedit.layers import map_of, rows_of
from fisedit.sparse_kernels import ops


class Packed:
    """Named tensors side by side in one, so that one copy moves them all."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = dict(shapes)
        sizes = [prod(shape) for shape in self.shapes.values()]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = zip(self.shapes.items(), self.flat.split(sizes), strict=True)
        self._views: dict[str, Tensor] = {name: part.view(shape) for (name, shape), part in parts}

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]


@dataclass(eq=False)
class Buffers:
    """Everything one evaluation reads; B items are S guidance branches times E edits, branch by branch.

    Args:
        latents: [B, 4, h, w], scaled for the model. timestep: float32 [1].
        totals: float64 [S, groups, 2] of every norm's recorded maps.
        rows: recorded rows, "active NAME" [B, R, C] of norms and "halo NAME" [B, G, C] of what is before a 3x3 conv.
        text: [B, T, C], keys and values of every cross-attention. tokens: [S, H * W, C], recorded keys and values.
    """

    tables: Tables
    latents: Tensor
    timestep: Tensor
    totals: Packed
    rows: Packed
    text: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Run:
    """One evaluation: what it reads, and the fresh rows and totals that an overlay will want."""

    buffers: Buffers
    sites: dict[str, Site]
    times: dict[str, slice]
    fresh: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    time: Tensor | None = None
    last: Tensor | None = None

    def tables(self, name: str) -> LevelTables:
        return self.buffers.tables.levels[self.sites[name].level]

    def affine(self, name: str, norm: nn.GroupNorm, rows: Tensor) -> Tensor:
        place = self.tables(name).place
        count = place.taken.shape[1] * (norm.num_channels // norm.num_groups)
        recorded, totals = self.buffers.rows[f"active {name}"], self.buffers.totals[name]
        affine, self.totals[name] = ops.affine(
            rows, recorded, totals, place.valid, count, norm.weight, norm.bias, norm.eps
        )
        self.fresh[name] = rows
        return affine


class Fused:
    """A UNet's blocks in fused form, with weights that are used together packed together.

    Args:
        unet: left as it is. sites: its sites.

    Raises:
        UnsupportedModuleError: a block that has no fused form.
    """

    def __init__(self, unet: UNet2DConditionModel, sites: Sequence[Site]) -> None:
        self.unet, self._sites = unet, {site.name: site for site in sites}
        blocks = {name: m for name, m in unet.named_modules() if isinstance(m, ResnetBlock2D | Transformer2DModel)}
        _check(unet, sites, blocks)
        resnets = {name: m for name, m in blocks.items() if isinstance(m, ResnetBlock2D)}
        self._time_weight = torch.cat([m.time_emb_proj.weight.detach() for m in resnets.values()])
        self._time_bias = torch.cat([m.time_emb_proj.bias.detach() for m in resnets.values()])
        self._times, start = {}, 0
        for name, resnet in resnets.items():
            self._times[name] = slice(start, start := start + resnet.time_emb_proj.out_features)
        self._packed = {
            f"{name}.transformer_blocks.{i}": torch.cat([getattr(b.attn1, to).weight.detach() for to in _QKV])
            for name, model in blocks.items()
            if isinstance(model, Transformer2DModel)
            for i, b in enumerate(model.transformer_blocks)
        }

    def buffers(
        self, bucket: Bucket, grids: Sequence[tuple[int, int]], edits: int, branches: int, tokens: int
    ) -> Buffers:
        """Fresh buffers.

        Args:
            bucket: of the plans. grids: (height, width) of every level, finest first.
            edits, branches: E and S. tokens: T.
        """
        sizes, items = [height * width for height, width in grids], edits * branches
        like, sites = self.unet.conv_in.weight, self._sites.items()
        totals = {name: (branches, site.module.num_groups, 2) for name, site in sites if site.role in NORMS}
        made = Buffers(
            Tables(bucket, sizes, items, like.device),
            like.new_zeros(items, self.unet.config.in_channels, *grids[0]),
            torch.zeros(1, device=like.device),
            Packed(totals, torch.float64, like.device),
            Packed({n: (items, *shape) for n, shape in self._recorded(bucket).items()}, like.dtype, like.device),
        )
        for name, site in sites:
            if site.role is Role.TOKENS:
                made.tokens[name] = like.new_zeros(branches, sizes[site.level], site.module.out_features)
            if site.role is Role.TEXT:
                made.text[name] = like.new_zeros(items, tokens, site.module.out_features)
        return made

    def _recorded(self, bucket: Bucket) -> dict[str, tuple[int, int]]:
        """Rows and channels of everything recorded that is read by rows."""
        halos = {Role.NORM_HALO: bucket.same, Role.DOWN: bucket.down, Role.UP: bucket.up}
        found = {}
        for name, site in self._sites.items():
            if site.role in NORMS:
                found[f"active {name}"] = bucket.rows[site.level], channels(site)
            if site.role in halos:
                found[f"halo {name}"] = halos[site.role][site.level], channels(site)
        return found

    def __call__(self, buffers: Buffers) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """One evaluation.

        Returns:
            The prediction at padded active rows [B, R, 4]; the fresh rows [B, R, C] by site; totals of the mixed maps
            [B, groups, 2] by norm. Rows of padding hold nothing of use.
        """
        run = _Run(buffers, self._sites, self._times)
        replacements: list[Replacement] = [
            (module, partial(_BLOCKS[type(module)], self, run, name))
            for name, module in self.unet.named_modules()
            if type(module) in _BLOCKS
        ]
        unet = self.unet
        replacements += [(unet.conv_in, partial(_conv_in, unet.conv_in, run)), (unet.conv_act, lambda x: x)]
        replacements += [(unet.conv_norm_out, partial(_norm_out, unet.conv_norm_out, run))]
        replacements += [(unet.conv_out, partial(_conv_out, unet.conv_out, run))]
        with injected(replacements):
            (out,) = unet(buffers.latents, buffers.timestep, None, return_dict=False)
        return rows_of(out), run.fresh, run.totals

    def resnet(self, run: _Run, name: str, x: Tensor, temb: Tensor, *_: Any, **__: Any) -> Tensor:
        """A ResNet block: two norms' statistics, two convs, and the shortcut."""
        block, rows = self.unet.get_submodule(name), rows_of(x)
        if run.time is None:  # one time for all items and all blocks
            run.time = F.linear(F.silu(temb[:1]), self._time_weight, self._time_bias)
        first, second = f"{name}.norm1", f"{name}.norm2"
        same, kept = run.tables(first).same, run.buffers.rows
        norm = run.affine(first, block.norm1, rows)
        time = run.time[:, run.times[name]]
        hidden = ops.norm_conv3x3(rows, kept[f"halo {first}"], same, block.conv1.weight, block.conv1.bias, norm, time)
        norm = run.affine(second, block.norm2, hidden)
        short = rows if block.conv_shortcut is None else _linear(block.conv_shortcut, rows)
        weight, bias, halo = block.conv2.weight, block.conv2.bias, kept[f"halo {second}"]
        return map_of(ops.norm_conv3x3(hidden, halo, same, weight, bias, norm, residual=short))

    def transformer(self, run: _Run, name: str, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
        """A transformer model, its norm in proj_in's prologue."""
        model, rows = self.unet.get_submodule(name), rows_of(x)
        norm = run.affine(f"{name}.norm", model.norm, rows)
        hidden = ops.norm_linear(rows, model.proj_in.weight.flatten(1), model.proj_in.bias, norm=norm)
        for i, block in enumerate(model.transformer_blocks):
            hidden = self._block(run, f"{name}.transformer_blocks.{i}", block, hidden)
        return (map_of(_linear(model.proj_out, hidden, rows)),)

    def sampler(self, run: _Run, name: str, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """The conv of a downsampler or upsampler."""
        conv, rows, tables = self.unet.get_submodule(name).conv, rows_of(x), run.tables(name)
        table = tables.down if self._sites[name].role is Role.DOWN else tables.up
        assert table is not None
        run.fresh[name] = rows
        return map_of(ops.norm_conv3x3(rows, run.buffers.rows[f"halo {name}"], table, conv.weight, conv.bias))

    def _block(self, run: _Run, name: str, block: Any, x: Tensor) -> Tensor:
        own, cross = block.attn1, block.attn2
        packed = ops.norm_linear(x, self._packed[name], None, layer=_layer(block.norm1))
        query, key, value = packed.chunk(3, -1)
        query_name, key_name, value_name = (f"{name}.attn1.{to}" for to in _QKV)
        tokens, place = run.buffers.tokens, run.tables(key_name).place
        run.fresh |= {query_name: query, key_name: key, value_name: value}
        mixed = ops.attention(query, key, value, tokens[key_name], tokens[value_name], place, own.heads)
        x = _linear(own.to_out[0], mixed, x)
        query_name, key_name, value_name = (f"{name}.attn2.{to}" for to in _QKV)
        query = run.fresh[query_name] = ops.norm_linear(x, cross.to_q.weight, None, layer=_layer(block.norm2))
        text = run.buffers.text
        heads = (t.unflatten(-1, (cross.heads, -1)).transpose(1, 2) for t in (query, text[key_name], text[value_name]))
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = _linear(cross.to_out[0], mixed, x)
        gate = block.ff.net[0].proj
        return _linear(block.ff.net[2], ops.norm_geglu(x, gate.weight, gate.bias, _layer(block.norm3)), x)


NORMS = (Role.NORM, Role.NORM_HALO)
_ROLES = {Role[name] for name in "CONV NORM_HALO NORM DOWN UP TOKENS QUERY TEXT POINTWISE".split()}
_QKV = ("to_q", "to_k", "to_v")
_BLOCKS: dict[type[nn.Module], Callable[..., Any]] = {
    ResnetBlock2D: Fused.resnet,
    Transformer2DModel: Fused.transformer,
    Downsample2D: Fused.sampler,
    Upsample2D: Fused.sampler,
}


def _conv_in(conv: nn.Conv2d, run: _Run, latents: Tensor) -> Tensor:
    """The first conv, at rows gathered from the whole latents."""
    tables, rows = run.buffers.tables, latents.flatten(2).transpose(1, 2)
    read = rows.gather(1, tables.read[..., None].expand(-1, -1, rows.shape[2]))
    active, halo = read.split([tables.bucket.rows[0], tables.bucket.same[0]], 1)
    return map_of(ops.norm_conv3x3(active, halo, tables.levels[0].same, conv.weight, conv.bias))


def _norm_out(norm: nn.GroupNorm, run: _Run, x: Tensor) -> Tensor:
    """The last norm's statistics; it is applied in the last conv's prologue."""
    run.last = run.affine("conv_norm_out", norm, rows_of(x))
    return x


def _conv_out(conv: nn.Conv2d, run: _Run, x: Tensor) -> Tensor:
    same, halo = run.buffers.tables.levels[0].same, run.buffers.rows["halo conv_norm_out"]
    return map_of(ops.norm_conv3x3(rows_of(x), halo, same, conv.weight, conv.bias, run.last))


def _linear(module: Any, rows: Tensor, residual: Tensor | None = None) -> Tensor:
    """A linear layer or 1x1 conv of rows, and what is added to it."""
    return ops.norm_linear(rows, module.weight.flatten(1), module.bias, residual=residual)


def _layer(norm: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps


def channels(site: Site) -> int:
    """Channels of the map that a norm or sampler reads."""
    module = site.module
    return int(module.num_channels if isinstance(module, nn.GroupNorm) else module.conv.in_channels)


def _check(unet: UNet2DConditionModel, sites: Sequence[Site], blocks: Mapping[str, nn.Module]) -> None:
    """Refuse what the fused forms leave out."""
    for name, block in blocks.items():
        if not (_plain_resnet(block) if isinstance(block, ResnetBlock2D) else _plain_transformer(block)):
            raise _unfused(f"block {name} is unusual")
    for name, module in unet.named_modules():
        if hasattr(module, "base_layer"):
            raise _unfused(f"layer {name} has a LoRA around it")
    for site in sites:
        if site.role not in _ROLES:
            raise _unfused(f"layer {site.name} belongs to an adapter")
    if unet.config.time_cond_proj_dim is not None:
        raise _unfused("time embedding takes the guidance scale")


def _unfused(what: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(f"the UNet's {what} and has no fused form; run it layer by layer")


def _plain_resnet(block: ResnetBlock2D) -> bool:
    plain = isinstance(block.nonlinearity, nn.SiLU) and block.time_embedding_norm == "default"
    return plain and block.time_emb_proj is not None and bool(block.output_scale_factor == 1)


def _plain_transformer(model: Any) -> bool:
    return all(map(_plain, model.transformer_blocks))


def _plain(block: Any) -> bool:
    attentions = (block.attn1, block.attn2)
    if None in attentions or block.attn1.is_cross_attention or not isinstance(block.ff.net[0], GEGLU):
        return False
    return all(
        a.to_q.bias is None and a.rescale_output_factor == 1 and not a.residual_connection and a.norm_q is None
        for a in attentions
    )
