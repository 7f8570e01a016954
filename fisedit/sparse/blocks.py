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
from diffusers import UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from fisedit.models.injection import Replacement, injected
from fisedit.sparse.layers import map_of, rows_of
from fisedit.sparse.modules import LayerSite, Role
from fisedit.sparse.packed_weights import QKV, Weights
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.buckets import Bucket, LevelTables, PlanTables
from fisedit.sparse_kernels.reference import ConvEpilogue, DevicePointer, LayerNormParams, RecordedMap, Rows


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
        text: [B, T, C], keys and values of every cross-attention.
        tokens: [S, H * W, C], recorded keys and values; where they are coded, NAME + `SCALES` is after every one.
        addresses: int64, where each of these lies if it is read in place, at first in `blank`; None if it is copied.
    """

    tables: PlanTables
    latents: Tensor
    timestep: Tensor
    totals: Packed
    rows: Packed
    text: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, RecordedMap] = field(default_factory=dict)
    addresses: Tensor | None = None
    blank: Tensor | None = None

    @property
    def copied(self) -> list[Tensor]:
        """What a step's features are copied to, in the order of `records.Reading`."""
        return [self.totals.flat, self.rows.flat, *(t for t in self.tokens.values() if isinstance(t, Tensor))]


@dataclass(eq=False)
class _Run:
    """One evaluation: what it reads, and the fresh rows and totals that an overlay will want."""

    buffers: Buffers
    sites: dict[str, LayerSite]
    time: Tensor
    fresh: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    last: Tensor | None = None

    def tables(self, name: str) -> LevelTables:
        return self.buffers.tables.levels[self.sites[name].level]

    def affine(self, name: str, norm: nn.GroupNorm, rows: Rows) -> Tensor:
        place = self.tables(name).placement
        count = place.active_mask.shape[1] * (norm.num_channels // norm.num_groups)
        recorded, totals = self.buffers.rows[f"active {name}"], self.buffers.totals[name]
        affine, self.totals[name] = ops.group_norm_affine(
            rows, recorded, totals, place.num_rows, count, norm.weight, norm.bias, norm.eps
        )
        if isinstance(rows, Tensor):
            self.fresh[name] = rows
        else:
            self.fresh[name], self.fresh[f"{name}{SKIPPED}"] = rows
        return affine


class Fused:
    """A UNet's blocks in fused form, with weights that are used together packed together.

    Args:
        unet: left as it is. sites: its sites.
        coded: what of a byte recorded keys and values are read in (see `reference.coded`); None for the UNet's own.

    Raises:
        UnsupportedModuleError: a block that has no fused form.

    Attributes:
        heads: of the recorded keys and values that are coded, by site.
    """

    def __init__(
        self, unet: UNet2DConditionModel, sites: Sequence[LayerSite], *, coded: torch.dtype | None = None
    ) -> None:
        self._coded = coded
        self.unet, self._sites = unet, {site.name: site for site in sites}
        tokens = [site.name for site in sites if coded is not None and site.role is Role.TOKENS]
        self.heads = {name: int(unet.get_submodule(name.rpartition(".")[0]).heads) for name in tokens}
        self._weights = Weights(unet, sites)

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
        rows = recorded(tuple(self._sites.values()), bucket)
        made = Buffers(
            PlanTables(bucket, sizes, items, like.device),
            like.new_zeros(items, self.unet.config.in_channels, *grids[0]),
            torch.zeros(1, device=like.device),
            Packed(totals, torch.float64, like.device),
            Packed({name: (items, *shape) for name, shape in rows.items()}, like.dtype, like.device),
        )
        shapes = {}
        for name, site in sites:
            if site.role is Role.TOKENS:
                shapes[name] = branches, sizes[site.level], site.module.out_features
                if name in self.heads:
                    shapes[name + SCALES] = *shapes[name][:2], self.heads[name]
            if site.role is Role.TEXT:
                made.text[name] = like.new_zeros(items, tokens, site.module.out_features)
        types = {name: self._coded if self._coded and name in self.heads else like.dtype for name in shapes}
        if ops.reads_in_place():
            made.blank = like.new_zeros(max(prod(shape) for shape in shapes.values()))
            made.addresses = torch.full((len(shapes),), made.blank.data_ptr(), device=like.device)
            each = made.addresses.split(1)
            made.tokens |= {
                name: DevicePointer(at, shapes[name], types[name]) for name, at in zip(shapes, each, strict=True)
            }
        else:
            made.tokens |= {name: like.new_zeros(shape, dtype=types[name]) for name, shape in shapes.items()}
        return made

    def __call__(self, buffers: Buffers) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """One evaluation.

        Returns:
            The prediction at padded active rows [B, R, 4]; the fresh rows [B, R, C] by site, where a norm reads two
            maps side by side the second one's by its name and `SKIPPED`; totals of the mixed maps [B, groups, 2] by
            norm. Rows of padding hold nothing of use.
        """
        time = ops.time_projections(
            buffers.timestep, self._weights.frequencies, self._weights.time
        )  # of all items and blocks
        run = _Run(buffers, self._sites, time)
        replacements: list[Replacement] = [
            (module, partial(_BLOCKS[type(module)], self, run, name))
            for name, module in self.unet.named_modules()
            if type(module) in _BLOCKS
        ]
        unet = self.unet
        replacements += [(unet.conv_in, partial(_conv_in, unet.conv_in, run)), (unet.conv_act, lambda x: x)]
        replacements += [(unet.conv_norm_out, partial(_norm_out, unet.conv_norm_out, run))]
        replacements += [(unet.conv_out, partial(_conv_out, unet.conv_out, run))]
        replacements += [(module, lambda *_: buffers.latents) for module in (unet.time_proj, unet.time_embedding)]
        with injected(unet, replacements):
            (out,) = unet(buffers.latents, buffers.timestep, None, return_dict=False)
        return rows_of(out), run.fresh, run.totals

    def resnet(self, run: _Run, name: str, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """A ResNet block of a map."""
        return map_of(self._resnet(run, name, rows_of(x)))

    def transformer(self, run: _Run, name: str, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
        """A transformer model of a map."""
        return (map_of(self._transformer(run, name, rows_of(x))),)

    def sampler(self, run: _Run, name: str, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """The conv of a downsampler or upsampler, of a map."""
        return map_of(self._sampler(run, name, rows_of(x)))

    def up(
        self, run: _Run, name: str, hidden_states: Tensor, res_hidden_states_tuple: tuple[Tensor, ...], **_: Any
    ) -> Tensor:
        """A block of the decoder; the maps that skipped the middle are read beside its own, not copied to them."""
        block, rows = self.unet.get_submodule(name), rows_of(hidden_states)
        skipped, models = list(res_hidden_states_tuple), getattr(block, "attentions", ())
        for i in range(len(block.resnets)):
            rows = self._resnet(run, f"{name}.resnets.{i}", (rows, rows_of(skipped.pop())))
            if models:
                rows = self._transformer(run, f"{name}.attentions.{i}", rows)
        for i in range(len(block.upsamplers or ())):
            rows = self._sampler(run, f"{name}.upsamplers.{i}", rows)
        return map_of(rows)

    def _resnet(self, run: _Run, name: str, rows: Rows) -> Tensor:
        """Two norms' statistics, two convs, the shortcut within the second one."""
        block = self.unet.get_submodule(name)
        first, second, short = f"{name}.norm1", f"{name}.norm2", block.conv_shortcut
        same, kept, time = run.tables(first).same, run.buffers.rows, run.time[:, self._weights.times[name]]
        norm, conv = run.affine(first, block.norm1, rows), block.conv1
        hidden = ops.norm_conv3x3(rows, kept[f"halo {first}"], same, conv.weight, conv.bias, norm, ConvEpilogue(time))
        norm, weight, bias = run.affine(second, block.norm2, hidden), block.conv2.weight, self._weights.second[name]
        halo = kept[f"halo {second}"]
        if short is None:
            assert isinstance(rows, Tensor), name
            return ops.norm_conv3x3(hidden, halo, same, weight, bias, norm, ConvEpilogue(residual=rows))
        shortcut = rows, short.weight.flatten(1)
        return ops.norm_conv3x3(hidden, halo, same, weight, bias, norm, ConvEpilogue(shortcut=shortcut))

    def _transformer(self, run: _Run, name: str, rows: Tensor) -> Tensor:
        """Its norm is in proj_in's prologue; its last feed-forward and proj_out are one linear layer."""
        model = self.unet.get_submodule(name)
        norm = run.affine(f"{name}.norm", model.norm, rows)
        hidden = ops.norm_linear(rows, model.proj_in.weight.flatten(1), model.proj_in.bias, affine=norm)
        for i, block in enumerate(model.transformer_blocks):
            parts = self._block(run, f"{name}.transformer_blocks.{i}", block, hidden)
            if block is not model.transformer_blocks[-1]:
                hidden = _linear(block.ff.net[2], *parts)
        return ops.norm_linear(parts, *self._weights.ends[name], residual=rows)

    def _sampler(self, run: _Run, name: str, rows: Tensor) -> Tensor:
        conv, tables = self.unet.get_submodule(name).conv, run.tables(name)
        table = tables.down if self._sites[name].role is Role.DOWN else tables.up
        assert table is not None
        run.fresh[name] = rows
        return ops.norm_conv3x3(rows, run.buffers.rows[f"halo {name}"], table, conv.weight, conv.bias)

    def _block(self, run: _Run, name: str, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """A transformer block up to its last linear layer: what that takes, and what is added to it."""
        own, cross = block.attn1, block.attn2
        packed = ops.norm_linear(x, self._weights.packed[name], None, layer_norm=_layer(block.norm1))
        query, key, value = packed.chunk(3, -1)
        query_name, key_name, value_name = (f"{name}.attn1.{to}" for to in QKV)
        tokens, place = run.buffers.tokens, run.tables(key_name).placement
        run.fresh |= {query_name: query, key_name: key, value_name: value}
        scales = (tokens[key_name + SCALES], tokens[value_name + SCALES]) if self.heads else None
        mixed = ops.attention(query, key, value, tokens[key_name], tokens[value_name], place, own.heads, scales)
        x = _linear(own.to_out[0], mixed, x)
        query_name, key_name, value_name = (f"{name}.attn2.{to}" for to in QKV)
        text, weight = run.buffers.text, cross.to_q.weight
        mixed, run.fresh[query_name] = ops.cross_attention(
            x, _layer(block.norm2), weight, text[key_name], text[value_name], cross.heads
        )
        x, gate = _linear(cross.to_out[0], mixed, x), block.ff.net[0].proj
        return ops.norm_geglu(x, gate.weight, gate.bias, _layer(block.norm3)), x


SKIPPED = " skipped"
SCALES = " scales"
NORMS = (Role.NORM, Role.NORM_HALO)
_BLOCKS: dict[type[nn.Module], Callable[..., Any]] = {
    ResnetBlock2D: Fused.resnet,
    Transformer2DModel: Fused.transformer,
    Downsample2D: Fused.sampler,
    Upsample2D: Fused.sampler,
    UpBlock2D: Fused.up,
    CrossAttnUpBlock2D: Fused.up,
}


def _conv_in(conv: nn.Conv2d, run: _Run, latents: Tensor) -> Tensor:
    """The first conv, at rows gathered from the whole latents."""
    tables, rows = run.buffers.tables, latents.flatten(2).transpose(1, 2)
    read = rows.gather(1, tables.read_positions[..., None].expand(-1, -1, rows.shape[2]))
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


def _layer(norm: nn.LayerNorm) -> LayerNormParams:
    return norm.weight, norm.bias, norm.eps


def channels(site: LayerSite) -> int:
    """Channels of the map that a norm or sampler reads."""
    module = site.module
    return int(module.num_channels if isinstance(module, nn.GroupNorm) else module.conv.in_channels)


def recorded(sites: Sequence[LayerSite], bucket: Bucket) -> dict[str, tuple[int, int]]:
    """Rows and channels of everything recorded that is read by rows: "active NAME" of norms, "halo NAME" of what is
    before a 3x3 conv."""
    halos = {Role.NORM_HALO: bucket.same, Role.DOWN: bucket.down, Role.UP: bucket.up}
    found = {}
    for site in sites:
        if site.role in NORMS:
            found[f"active {site.name}"] = bucket.rows[site.level], channels(site)
        if site.role in halos and (count := halos[site.role][site.level]):
            found[f"halo {site.name}"] = count, channels(site)
    return found
