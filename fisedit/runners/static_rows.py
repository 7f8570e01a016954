"""Rows of a captured evaluation: static buffers padded to buckets, which hold whatever mask and step is written there.

Knows layer sites, shapes and buffers; knows nothing about blocks, steps, samplers or masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from fisedit.features.sites import LayerSite, Role, base_layer, channels
from fisedit.models.families.conditioning import Conditioning, added_embedding
from fisedit.models.injection import injected
from fisedit.runners.deep_maps import SOURCE_SHARE
from fisedit.sparse.blocks import ShallowBlocks, UNetBlocks
from fisedit.sparse.packed_weights import MergedWeights, PackedTime, PackedWeights, check_capturable
from fisedit.sparse.row_layout import rows_of
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.buckets import Bucket, LevelTables, PlanTables
from fisedit.sparse_kernels.operands import DevicePointer, RecordedMap, Rows, join_rows

SKIPPED = " skipped"
SCALES = " scales"
NORMS = (Role.NORM, Role.NORM_HALO)


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


@dataclass(frozen=True, eq=False)
class Addresses:
    """The addresses of keys and values that are read in place.

    Args:
        pointers: int64, device pointers, at first of `blank`.
        blank: zeros that the first ones point to.
    """

    pointers: Tensor
    blank: Tensor


@dataclass(eq=False)
class Buffers:
    """Everything that one evaluation reads; B items are S guidance branches times E edits, branch by branch.

    Args:
        tables: positions and kernel maps of every level.
        latents: [B, 4, h, w], scaled for the model.
        timestep: float32 [1].
        statistics: float64 [S, groups, 2], group statistics of every norm's recorded maps.
        rows: recorded rows of what is before a 3x3 conv: "active NAME" [B, R, C] of norms and "halo NAME" [B, G, C].
        row_statistics: float32 [B, R, 2 * groups], of the recorded rows of every other norm.
        injected: recorded queries and keys [E, R, C] that the last branch attends with, by site; none where attention
            is not injected.
        text_keys: [B, T, C], keys and values of every cross-attention.
        added: [B, C], what is added to the time's embedding, see `Conditioning`.
        tokens: [S, H * W, C], recorded keys and values; where they are quantised, NAME + `SCALES` is after every one.
        addresses: The addresses of the tokens if these are read in place; None if they are copied.
        deep: [B, R, C], `DeepMaps.change` of a shallow evaluation, which is of the last layer alone; None of others.
    """

    tables: PlanTables
    latents: Tensor
    timestep: Tensor
    statistics: Packed
    rows: Packed
    row_statistics: Packed
    injected: Packed
    text_keys: dict[str, Tensor] = field(default_factory=dict)
    added: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, RecordedMap] = field(default_factory=dict)
    addresses: Addresses | None = None
    deep: Tensor | None = None

    @property
    def copied(self) -> list[Tensor]:
        """Return what a step's features are copied to, in the order of `packed_features.GatherIndex`."""
        return [
            self.statistics.flat,
            self.rows.flat,
            *(packed.flat for packed in (self.row_statistics, self.injected) if packed.shapes),
            *(t for t in self.tokens.values() if isinstance(t, Tensor)),
        ]


class StaticRows:
    """A `row_source.RowSource` over static buffers.

    Args:
        buffers: what is read.
        sites: the model's, by name.
        packed: its weights that are used together.
        merged: its other weights.
        times: what every ResNet block adds for the time [1, C], by name; none in an autoencoder.

    Attributes:
        fresh: rows [B, R, C] for overlays, by site. Where a norm reads two maps side by side, the second one's are
            found by its name and `SKIPPED`. In a shallow evaluation, which keeps them nowhere else, they are beside the
            first one's. Rows of padding hold nothing of use.
        statistics: group statistics of the mixed maps [B, groups, 2], by norm.
    """

    def __init__(
        self,
        buffers: Buffers,
        sites: Mapping[str, LayerSite],
        packed: PackedWeights,
        merged: MergedWeights,
        times: Mapping[str, Tensor],
    ) -> None:
        self._buffers, self._sites, self._packed, self.weight = buffers, sites, packed, merged.weight
        self._times = times
        self.fresh: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}

    def latents(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowSource.latents`."""
        tables, rows = self._buffers.tables, latents.flatten(2).transpose(1, 2)
        read = rows.gather(1, tables.read_positions[..., None].expand(-1, -1, rows.shape[2]))
        active, halo = read.split([tables.bucket.rows[0], tables.bucket.same[0]], 1)
        return active, halo

    def affine(self, name: str, norm: nn.GroupNorm, rows: Rows) -> Tensor:
        """See `RowSource.affine`."""
        placement = self._tables(name).placement
        count = placement.active_mask.shape[1] * (norm.num_channels // norm.num_groups)
        statistics = self._buffers.statistics[name]
        if self._sites[name].role is Role.NORM:
            recorded = self._buffers.row_statistics[name]
            affine, self.statistics[name], self.fresh[name] = ops.summed_group_norm_affine(
                join_rows(rows), recorded, statistics, placement.num_rows, count, norm.weight, norm.bias, norm.eps
            )
            return affine
        recorded = self._buffers.rows[f"active {name}"]
        affine, self.statistics[name] = ops.group_norm_affine(
            rows, recorded, statistics, placement.num_rows, count, norm.weight, norm.bias, norm.eps
        )
        if not isinstance(rows, Tensor) and self._sites[name].skip in self.fresh:
            self.fresh[name], self.fresh[f"{name}{SKIPPED}"] = rows
        else:
            self.fresh[name] = join_rows(rows)
        return affine

    def halo(self, name: str) -> Tensor:
        """See `RowSource.halo`."""
        return self._buffers.rows[f"halo {name}"]

    def kernel_map(self, name: str) -> Tensor:
        """See `RowSource.kernel_map`."""
        tables, role = self._tables(name), self._sites[name].role
        found = {Role.DOWN: tables.down, Role.UP: tables.up}.get(role, tables.same)
        assert found is not None, name
        return found

    def time(self, name: str, block: ResnetBlock2D, embedding: Tensor) -> Tensor:
        """See `RowSource.time`; `times` instead of a projection of the embedding."""
        return self._times[name]

    def joined(self, rows: Tensor, skipped: Tensor) -> Rows:
        """See `RowSource.joined`; both are read beside one another, not copied."""
        return rows, skipped

    def qkv(self, name: str, attention: Any) -> tuple[Tensor, ...]:
        """See `RowSource.qkv`."""
        return (self._packed.qkv[name],)

    def second_biases(self, name: str, block: Any) -> tuple[Tensor, Tensor | None]:
        """See `RowSource.second_biases`."""
        return self._packed.second_biases[name], None

    def folded_end(self, name: str) -> tuple[Tensor, Tensor] | None:
        """See `RowSource.folded_end`."""
        return self._packed.folded_ends[name]

    def keep(self, name: str, rows: Tensor) -> None:
        """See `RowSource.keep`."""
        self.fresh[name] = rows

    def self_attention(self, name: str, heads: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `RowSource.self_attention`."""
        query_name, key_name, value_name = (f"{name}.to_{kind}" for kind in "qkv")
        for site, rows in ((query_name, query), (key_name, key)):
            if (recorded := self.recorded_query(site)) is not None:
                rows[len(rows) - len(recorded) :] = recorded
        self.fresh |= {query_name: query, key_name: key, value_name: value}
        tokens, placement, scales = self._buffers.tokens, self._tables(key_name).placement, None
        if key_name + SCALES in tokens:
            scales = tokens[key_name + SCALES], tokens[value_name + SCALES]
        return ops.attention(query, key, value, tokens[key_name], tokens[value_name], placement, heads, scales)

    def text_keys(self, name: str) -> Tensor:
        """See `RowSource.text_keys`."""
        return self._buffers.text_keys[name]

    def text_parts(self, name: str) -> tuple[()]:
        """See `RowSource.text_parts`: plans that divide the text are not captured."""
        return ()

    def cross_keys(self, name: str) -> tuple[()]:
        """See `RowSource.cross_keys`: evaluations with added layers are not captured."""
        return ()

    def recorded_query(self, name: str) -> Tensor | None:
        """See `RowSource.recorded_query`; of a self-attention's keys as well."""
        return self._buffers.injected[name] if name in self._buffers.injected.shapes else None

    def keep_query(self, name: str, query: Tensor) -> None:
        """See `RowSource.keep_query`."""
        self.fresh[name] = query

    def _tables(self, name: str) -> LevelTables:
        return self._buffers.tables.levels[self._sites[name].level]


class StaticUNet:
    """A UNet's sparse evaluation over static buffers.

    Args:
        unet: left as it is.
        sites: its sites.
        merged: weights of its layers.
        quantised: type of a byte that recorded keys and values are read in (see `operands.quantise`); None for the
            UNet's own.

    Raises:
        UnsupportedModuleError: a block that captured graphs cannot run.

    Attributes:
        heads: The heads of the recorded keys and values that are quantised, by site.
    """

    def __init__(
        self,
        unet: UNet2DConditionModel,
        sites: Sequence[LayerSite],
        merged: MergedWeights,
        *,
        quantised: torch.dtype | None = None,
    ) -> None:
        check_capturable(unet)
        self._packed, self._merged, self._blocks = PackedWeights(unet, merged), merged, UNetBlocks(unet)
        self._time, self._shallow = PackedTime(unet, merged), ShallowBlocks(self._blocks, unet)
        self._quantised, self.unet, self._sites = quantised, unet, {site.name: site for site in sites}
        tokens = [site.name for site in sites if quantised is not None and site.role is Role.TOKENS]
        self.heads = {name: int(unet.get_submodule(name.rpartition(".")[0]).heads) for name in tokens}

    def buffers(
        self,
        bucket: Bucket,
        grids: Sequence[tuple[int, int]],
        edits: int,
        branches: int,
        text: Conditioning,
        injected: Iterable[str] = (),
        shallow: bool = False,
    ) -> Buffers:
        """Fresh buffers.

        Args:
            bucket: The bucket of the plans.
            grids: (height, width) of every level, finest first.
            edits: E.
            branches: S.
            text: Conditions of the shape that is written.
            injected: sites whose recorded queries or keys the last branch attends with.
            shallow: the evaluation is shallow, and reads the sites of the last layer alone.
        """
        sizes, items = [height * width for height, width in grids], edits * branches
        read = {name: site for name, site in self._sites.items() if not shallow or self._shallow.runs(name)}
        like, sites = self.unet.conv_in.weight, read.items()
        statistics = {name: (branches, site.module.num_groups, 2) for name, site in sites if site.role in NORMS}
        rows = recorded(tuple(read.values()), bucket)
        kept = {name: (edits, bucket.rows[read[name].level], _width(read[name])) for name in injected if name in read}
        result = Buffers(
            tables=PlanTables(bucket, sizes, items, like.device),
            latents=like.new_zeros(items, self.unet.config.in_channels, *grids[0]),
            timestep=torch.zeros(1, device=like.device),
            statistics=Packed(statistics, torch.float64, like.device),
            rows=Packed({name: (items, *shape) for name, shape in rows.items()}, like.dtype, like.device),
            row_statistics=recorded_row_statistics(tuple(read.values()), bucket, items, like.device),
            injected=Packed(kept, like.dtype, like.device),
            text_keys={
                name: like.new_zeros(items, text.tokens, _width(site)) for name, site in sites if site.role is Role.TEXT
            },
            added={name: torch.zeros_like(tensor) for name, tensor in text.added.items()},
            deep=like.new_zeros(items, bucket.rows[0], self._shallow.channels) if shallow else None,
        )
        shapes: dict[str, tuple[int, ...]] = {}
        for name, site in sites:
            if site.role is Role.TOKENS:
                shapes[name] = branches, sizes[site.level], _width(site)
                if name in self.heads:
                    shapes[name + SCALES] = *shapes[name][:2], self.heads[name]
        types = {name: self._quantised if self._quantised and name in self.heads else like.dtype for name in shapes}
        if shapes and ops.reads_in_place():
            blank = like.new_zeros(max(prod(shape) for shape in shapes.values()))
            pointers = torch.full((len(shapes),), blank.data_ptr(), device=like.device)
            result.addresses, each = Addresses(pointers, blank), pointers.split(1)
            result.tokens |= {
                name: DevicePointer(at, shapes[name], types[name]) for name, at in zip(shapes, each, strict=True)
            }
        else:
            result.tokens |= {name: like.new_zeros(shape, dtype=types[name]) for name, shape in shapes.items()}
        return result

    def __call__(self, buffers: Buffers) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """One evaluation.

        Returns:
            The prediction at padded active rows [B, R, 4], and `StaticRows.fresh` and `StaticRows.statistics`.
        """
        unet: Any = self.unet
        added, layers = added_embedding(unet, buffers.latents, buffers.added)
        times = self._time.projections(buffers.timestep, added)
        source = StaticRows(buffers, self._sites, self._packed, self._merged, times)
        if buffers.deep is None:
            replacements = self._blocks.replacements(source)
        else:
            recorded = buffers.rows[f"active {self._shallow.entry}"][..., : self._shallow.channels]
            replacements = self._shallow.replacements(source, buffers.deep + SOURCE_SHARE * recorded)
        unread = buffers.latents if added is None else added  # in place of embeddings, which are in `times`
        replacements += [(module, lambda *_: unread) for module in (unet.time_proj, unet.time_embedding, *layers)]
        with injected(unet, replacements):
            (out,) = unet(buffers.latents, buffers.timestep, None, added_cond_kwargs=buffers.added, return_dict=False)
        return rows_of(out), source.fresh, source.statistics


def _width(site: LayerSite) -> int:
    """Channels that a projection gives."""
    return int(base_layer(site.module).out_features)


def recorded(sites: Sequence[LayerSite], bucket: Bucket) -> dict[str, tuple[int, int]]:
    """Rows and channels of everything recorded before a 3x3 conv: "active NAME" of norms, "halo NAME" of all."""
    halos = {Role.NORM_HALO: bucket.same, Role.DOWN: bucket.down, Role.UP: bucket.up}
    found = {}
    for site in sites:
        if site.role is Role.NORM_HALO:
            found[f"active {site.name}"] = bucket.rows[site.level], channels(site)
        if site.role in halos and (count := halos[site.role][site.level]):
            found[f"halo {site.name}"] = count, channels(site)
    return found


def recorded_row_statistics(sites: Sequence[LayerSite], bucket: Bucket, items: int, device: torch.device) -> Packed:
    """Buffers for the recorded statistics of rows, of `items` items."""
    shapes = {s.name: (items, bucket.rows[s.level], 2 * s.module.num_groups) for s in sites if s.role is Role.NORM}
    return Packed(shapes, torch.float32, device)
