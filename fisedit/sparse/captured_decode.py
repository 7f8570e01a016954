"""Sparse decodes by captured graphs: whatever the mask, graphs of few shapes are replayed, as the UNet's steps are.

At the coarse levels rows are padded to buckets, and index tables are written in place: one graph a bucket. At a fine
level a box and its halo lie in a rectangle of whole latent cells with sides of few lengths: one graph a rectangle,
replayed for every box. So halos are never narrower than `decode.SparseDecode`'s, and what is computed is otherwise the
same. Knows autoencoders and boxes; knows nothing about edits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisedit.models.injection import Forward, Replacement, injected
from fisedit.sparse import vae_tiles as boxing
from fisedit.sparse.feature_cache import FeatureOverlay, map_of, rows_of
from fisedit.sparse.graph_capture import LRUCache, Outputs, TensorPacker, capture, shared_pool
from fisedit.sparse.modules import LayerSite, Role, decoder_sites
from fisedit.sparse.recording import own_forward
from fisedit.sparse.records import FeaturePacker
from fisedit.sparse.static_rows import NORMS, Packed, recorded
from fisedit.sparse.vae_decode import DecoderRecord, cell_sums, coarse_plan, fine_norms, normed, set_in
from fisedit.sparse.vae_tiles import ROWS, Box, cut
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.buckets import Bucket, LevelTables, PlanTables, choose_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diffusers import AutoencoderKL
    from PIL.Image import Image

    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import BoolGrid

BUCKETS, RECTANGLES = 8, 32
"""Graphs kept of the coarse levels, and of the fine ones."""

SIDE = 2
"""Latent cells of a rectangle's shortest side, of which all others are multiples."""


class Decoder:
    """The graphs of one autoencoder for latents of one size, and the memory that they share.

    Args:
        shape: (h, w) of the latents.

    Raises:
        UnsupportedModuleError: as `graph.decoder_sites`.

    Attributes:
        sums, totals: a record's fine sums [groups, 2, h * w and one for no cell] and totals, of the decode under way.
        inputs: for every fine level the rows [n + 1, C] that its upsampler reads, the last one zero: the whole map of
            the coarse levels, then what a rectangle of the level above has.
    """

    def __init__(self, vae: AutoencoderKL, shape: tuple[int, int]) -> None:
        self.vae, self.shape, self.sites = vae, shape, decoder_sites(vae.decoder, ROWS)
        self.records, size = FeaturePacker(self.sites), shape[0] * shape[1]
        like, blocks = vae.decoder.conv_in.weight, vae.decoder.up_blocks
        self.latents = like.new_zeros(1, vae.config.latent_channels, *shape)
        norms = dict(fine_norms(vae))
        self.sums = {name: torch.zeros(m.num_groups, 2, size + 1, device=like.device) for name, m in norms.items()}
        self.totals = {
            name: torch.ones(m.num_groups, 2, dtype=torch.float64, device=like.device) for name, m in norms.items()
        }
        self.inputs: dict[int, Tensor] = {
            level: like.new_zeros(4 ** (level - 1) * size + 1, blocks[level - 1].upsamplers[0].conv.in_channels)
            for level in range(ROWS, len(blocks))
        }
        self.pool = shared_pool(like.device)
        self.rows, self.rectangles = LRUCache[_Rows](BUCKETS), LRUCache[_Rectangle](RECTANGLES)

    @torch.inference_mode()
    def decode(
        self, latents: Tensor, grid: BoolGrid, found: Sequence[Box], record: DecoderRecord, source: Image
    ) -> tuple[Image, DecoderRecord]:
        """See `decode.decode_boxes`; `found` are the mask's boxes."""
        plan = coarse_plan(self.vae, grid)
        done, kept = self.run(latents, plan, grid, found, record)
        return set_in(source, done, grid), kept

    def run(
        self, latents: Tensor, plan: SparsePlan, grid: BoolGrid, found: Sequence[Box], record: DecoderRecord
    ) -> tuple[list[tuple[Box, Box, Tensor]], DecoderRecord]:
        """What `set_in` wants, and the record of this decode; the host waits for nothing."""
        bucket = choose_bucket([plan])
        rows = self.rows.get(bucket, lambda: _Rows(self, bucket))
        self.latents.copy_(latents)
        for name, sums in self.sums.items():
            sums[..., :-1].copy_(record.sums[name].flatten(2))
            self.totals[name].copy_(record.totals[name])
        overlay = rows.replay(plan, record)
        frame = Box(0, 0, *self.shape)
        done = [piece for box in found for piece in self._refine(grid, box, frame, ROWS)]
        kept = {name: sums[..., :-1].unflatten(2, self.shape).clone() for name, sums in self.sums.items()}
        return done, DecoderRecord(overlay, kept, {name: totals.clone() for name, totals in self.totals.items()})

    def _refine(self, grid: BoolGrid, box: Box, inside: Box, level: int) -> Iterator[tuple[Box, Box, Tensor]]:
        """A box's way to pixels from a level on, where the upsampler before it reads what lies `inside`."""
        outer = _around(box, level, inside)
        size = outer.bottom - outer.top, outer.right - outer.left
        rectangle = self.rectangles.get((level, size), lambda: _Rectangle(self, level, size))
        outputs = rectangle.replay(box, outer, inside)
        if outputs:
            yield box, outer.scaled(2**level), outputs["sample"].clone()
            return
        for piece in cut(grid, box, level + 1):
            yield from self._refine(grid, piece, outer, level + 1)


def _around(box: Box, level: int, inside: Box) -> Box:
    """A rectangle of padded sides around a box and its halo, `inside` another, all in latent cells."""
    halo = -(-boxing.HALO // 2**level)
    wanted = Box(box.top - halo, box.left - halo, box.bottom + halo, box.right + halo)

    def side(low: int, high: int, first: int, last: int) -> tuple[int, int]:
        low, high = max(low, first), min(high, last)
        length = min(_padded(high - low), last - first)
        start = min(max(first, low - (length - high + low) // 2), last - length)
        return start, start + length

    top, bottom = side(wanted.top, wanted.bottom, inside.top, inside.bottom)
    left, right = side(wanted.left, wanted.right, inside.left, inside.right)
    return Box(top, left, bottom, right)


def _padded(length: int) -> int:
    """The side for so many latent cells: a multiple of an eighth of the next power of two. A square of 25 % of SD 1.5's
    latents is computed as 1.5 times its cells at the finest level, one of 5 % as 1.3 times."""
    step = max(SIDE, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


class _Rows:
    """The graph of the coarse levels for one bucket, with buffers for what it reads of a record."""

    def __init__(self, decoder: Decoder, bucket: Bucket) -> None:
        self._decoder, self._bucket, like = decoder, bucket, decoder.latents
        height, width = decoder.shape
        sizes = [4**level * height * width for level in reversed(range(ROWS))]
        self._tables = PlanTables(bucket, sizes, 1, like.device)
        self._read = torch.zeros(bucket.rows[-1] + bucket.same[-1], dtype=torch.long, device=like.device)
        totals = {s.name: (1, s.module.num_groups, 2) for s in decoder.sites if s.role in NORMS}
        self._totals = Packed(totals, torch.float64, like.device)
        rows = {name: (1, *shape) for name, shape in recorded(decoder.sites, bucket).items()}
        self._rows = Packed(rows, like.dtype, like.device)
        self._tokens = {
            s.name: like.new_zeros(1, sizes[s.level], s.module.out_features)
            for s in decoder.sites
            if s.role is Role.TOKENS
        }
        self._last = next(s for s in decoder.sites if s.role is Role.UP and not s.level)
        self._captured = capture(self._run, like.device, decoder.pool)
        self._packing = TensorPacker(self._captured.outputs)

    def replay(self, plan: SparsePlan, record: DecoderRecord) -> FeatureOverlay:
        """The coarse levels at a plan's rows: their overlay, and the whole last map for the fine levels."""
        coarsest, records = plan.levels[-1], self._decoder.records
        self._tables.write([plan])
        self._read[: coarsest.rows] = coarsest.active
        self._read[self._bucket.rows[-1] :][: coarsest.same.halo.numel()] = coarsest.same.halo
        loads = records.reading(self._rows, [plan], 1).of(record.maps)
        for there, here in zip([self._totals.flat, self._rows.flat, *self._tokens.values()], loads, strict=True):
            there.copy_(here)
        self._whole.copy_(record.maps.whole(self._last.name, 0)[0])
        self._captured.replay()
        overlay, flats = FeatureOverlay(record.maps, plan), self._packing.copies()
        levels = {site.name: site.level for site in self._decoder.sites}
        for name, lying in self._packing.found.items():
            kind, _, site = name.partition(" ")
            if kind == "totals":
                overlay.totals[site] = lying.of(flats)
            else:
                overlay.maps[site] = lying.some(0, 1, plan.levels[levels[site]].rows).of(flats)
        return overlay

    @property
    def _whole(self) -> Tensor:
        """The last coarse map [n, C], which the first fine level reads."""
        return self._decoder.inputs[ROWS][:-1]

    def _run(self) -> Outputs:
        outputs: Outputs = {}
        vae, sites = self._decoder.vae, self._decoder.sites
        latents = (self._decoder.latents / vae.config.scaling_factor).flatten(2).transpose(1, 2)
        table: list[Replacement] = [
            (site.module, partial(_PADDED[site.role], self, outputs, site)) for site in sites if site.role in _PADDED
        ]
        with injected(vae, [*table, (vae.decoder, partial(_coarse, vae.decoder))]):
            vae.decode(map_of(latents.index_select(1, self._read)), return_dict=False)
        return outputs

    def tables(self, site: LayerSite) -> LevelTables:
        """The tables of a site's level."""
        return self._tables.levels[site.level]

    def norm(self, outputs: Outputs, site: LayerSite, x: Tensor) -> Tensor:
        """Exact GroupNorm of padded rows and, before a conv, of the recorded halo."""
        rows, norm, place = rows_of(x), site.module, self.tables(site).placement
        count = place.active_mask.shape[1] * (norm.num_channels // norm.num_groups)
        old, totals, rest = self._rows[f"active {site.name}"], self._totals[site.name], (norm.weight, norm.bias)
        affine, outputs[f"totals {site.name}"] = ops.group_norm_affine(
            rows, old, totals, place.num_rows, count, *rest, norm.eps
        )
        outputs[f"rows {site.name}"] = rows
        if site.role is Role.NORM_HALO:
            rows = torch.cat([rows, self._rows[f"halo {site.name}"]], 1)
        out = torch.addcmul(affine[:, 1:], rows.float(), affine[:, :1]).to(rows.dtype)
        return map_of(out) if x.ndim == 4 else out.transpose(1, 2)

    def conv(self, outputs: Outputs, site: LayerSite, x: Tensor) -> Tensor:
        """3x3 conv of padded active and halo rows."""
        table, count = self.tables(site).same, self._bucket.rows[site.level]
        rows, halo = rows_of(x).tensor_split([count], 1)
        return map_of(ops.norm_conv3x3(rows, halo, table, site.module.weight, site.module.bias))

    def up(self, outputs: Outputs, site: LayerSite, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """The upsampler between two coarse levels; before the first fine one rows go into the whole map."""
        rows = outputs[f"rows {site.name}"] = rows_of(x)
        tables, conv = self.tables(site), site.module.conv
        if tables.up is None:
            ops.scatter_rows(self._whole[None], rows, tables.placement)
            return x
        return map_of(ops.norm_conv3x3(rows, self._rows[f"halo {site.name}"], tables.up, conv.weight, conv.bias))

    def tokens(self, outputs: Outputs, site: LayerSite, x: Tensor) -> Tensor:
        """Keys or values of every position: fresh where active, recorded elsewhere."""
        rows = outputs[f"rows {site.name}"] = own_forward(site, x)
        return ops.scatter_rows(self._tokens[site.name], rows, self.tables(site).placement)


def _coarse(decoder: Any, x: Tensor, *_: Any) -> Tensor:
    """In place of the decoder's own forward: its coarse blocks."""
    x = decoder.mid_block(decoder.conv_in(x))
    for block in decoder.up_blocks[:ROWS]:
        x = block(x)
    return x


_PADDED: dict[Role, Forward] = {
    Role.NORM_HALO: _Rows.norm,
    Role.NORM: _Rows.norm,
    Role.CONV: _Rows.conv,
    Role.UP: _Rows.up,
    Role.TOKENS: _Rows.tokens,
}


class _Rectangle:
    """The graph of a fine level for rectangles of one size, in latent cells."""

    def __init__(self, decoder: Decoder, level: int, size: tuple[int, int]) -> None:
        self._decoder, self._level, self._size = decoder, level, size
        self._input, self._none, factor = decoder.inputs[level], decoder.shape[0] * decoder.shape[1], 2 ** (level - 1)
        self._seen = size[0] * factor + 2, size[1] * factor + 2
        zero, device = len(self._input) - 1, self._input.device
        self._index = torch.full((self._seen[0] * self._seen[1],), zero, device=device)
        self._cells = torch.full((size[0] * size[1],), self._none, device=device)  # so a capture changes no sums
        self._captured = capture(self._run, device, decoder.pool)

    def replay(self, box: Box, outer: Box, inside: Box) -> Outputs:
        """A box within `outer`, where the input shows what is `inside`: at the last level its "sample" [1, 3, H, W]."""
        factor, width = 2 ** (self._level - 1), self._decoder.shape[1]
        rows, columns = inside.scaled(factor), outer.scaled(factor)
        ys = torch.arange(columns.top - 1, columns.bottom + 1, device=self._index.device)[:, None]
        xs = torch.arange(columns.left - 1, columns.right + 1, device=self._index.device)
        there = (ys >= rows.top) & (ys < rows.bottom) & (xs >= rows.left) & (xs < rows.right)
        at = (ys - rows.top) * (rows.right - rows.left) + xs - rows.left
        self._index.copy_(at.masked_fill_(~there, len(self._input) - 1).flatten())
        ys = torch.arange(outer.top, outer.bottom, device=self._index.device)[:, None]
        xs = torch.arange(outer.left, outer.right, device=self._index.device)
        own = (ys >= box.top) & (ys < box.bottom) & (xs >= box.left) & (xs < box.right)
        self._cells.copy_((ys * width + xs).masked_fill_(~own, self._none).flatten())
        self._captured.replay()
        return self._captured.outputs

    def _run(self) -> Outputs:
        decoder, level = self._decoder.vae.decoder, self._level
        rows = self._input.index_select(0, self._index)
        seen = rows.view(1, *self._seen, -1).permute(0, 3, 1, 2)  # with a ring, zero outside the frame
        conv = decoder.up_blocks[level - 1].upsamplers[0].conv
        x = F.conv2d(F.interpolate(seen, scale_factor=2.0)[..., 1:-1, 1:-1], conv.weight, conv.bias)
        replacements: list[Replacement] = [(m, partial(self._norm, name, m)) for name, m in self._norms()]
        last = level + 1 == len(decoder.up_blocks)
        if not last:
            replacements.append((decoder.up_blocks[level].upsamplers[0], lambda x, *_, **__: x))
        with injected(self._decoder.vae, replacements):
            x = decoder.up_blocks[level](x.contiguous(memory_format=torch.channels_last))
            if last:
                return {"sample": decoder.conv_out(decoder.conv_act(decoder.conv_norm_out(x)))}
        rows = rows_of(x)[0]
        self._decoder.inputs[level + 1][: len(rows)].copy_(rows)
        return {}

    def _norms(self) -> list[tuple[str, nn.GroupNorm]]:
        here = f"up_blocks.{self._level}.", "conv_norm_out"
        return [(name, m) for name, m in fine_norms(self._decoder.vae) if name.startswith(here)]

    def _norm(self, name: str, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        """Under the whole map's totals, with the box's own cells exchanged for the new ones."""
        sums, totals, cells = self._decoder.sums[name], self._decoder.totals[name], self._cells
        fresh = cell_sums(x, norm.num_groups, self._size).flatten(2)
        moved = (fresh - sums.index_select(2, cells)).masked_fill(cells == self._none, 0)
        totals += moved.sum(2, dtype=torch.float64)
        sums.index_copy_(2, cells, fresh)
        return normed(x, norm, totals, self._none * 4**self._level)
