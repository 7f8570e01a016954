"""Sparse decodes by captured graphs: whatever the mask, graphs of few shapes are replayed, as the UNet's steps are.

At the coarse levels rows are padded to buckets, and index tables are written in place: one graph a bucket. At a fine
level a box is padded to whole latent cells with sides of few lengths: one graph a shape, replayed for every box. So
halos are never narrower than those of boxes of exact sizes. The first replay of every graph is compared with an eager
run, and raises `ReplayMismatchError` where it differs. Knows autoencoders and boxes; knows nothing about edits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisedit.decoder.decode import SparseDecoder, Window, decode_coarse
from fisedit.decoder.tiles import Box, upsampler_input, with_padding
from fisedit.features.cache import CachedFeatures, FeatureOverlay
from fisedit.features.sites import Role
from fisedit.runners.graph_capture import LRUCache, Outputs, capture, check_replay, shared_pool, snapshot
from fisedit.runners.packed_features import FeaturePacker
from fisedit.runners.static_rows import NORMS, Buffers, Packed, StaticRows, recorded, recorded_row_statistics
from fisedit.sparse.packed_weights import MergedWeights, PackedWeights
from fisedit.sparse_kernels.buckets import Bucket, PlanTables, choose_bucket

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

    from fisedit.sparse_kernels.row_plan import SparsePlan

MAX_GRAPHS = 40
"""Graphs kept of all levels; as they share their memory, one more drops all of them."""


class CapturedDecoder(SparseDecoder):
    """A `SparseDecoder` by graphs, for latents of one size; they share their memory.

    Args:
        vae: left as it is.
        shape: (h, w) of the latents.
    """

    def __init__(self, vae: AutoencoderKL, shape: tuple[int, int]) -> None:
        super().__init__(vae, shape)
        self.feature_packer, self.pool = FeaturePacker(tuple(self.sites.values())), shared_pool(self.device)
        self.packed = PackedWeights(vae.decoder, MergedWeights())
        self.graphs = LRUCache[_CoarseGraph | _FineGraph]()

    def run_coarse(self, rows: Tensor, plan: SparsePlan, features: CachedFeatures) -> FeatureOverlay:
        """See `SparseDecoder.run_coarse`."""
        bucket = choose_bucket([plan])
        graph = self._graph(bucket, lambda: _CoarseGraph(self, bucket, rows))
        assert isinstance(graph, _CoarseGraph), bucket
        overlay = graph.replay(rows, plan, features)
        if not graph.verified:
            expected = super().run_coarse(rows, plan, features)
            check_replay(overlay.all_rows(), expected.all_rows())
            check_replay(overlay.statistics, expected.statistics)
            graph.verified = True
        return overlay

    def outer(self, box: Box, level: int, input_box: Box) -> Box:
        """See `SparseDecoder.outer`; padded."""
        return with_padding(box, level, input_box.coarsened(2 ** (level - 1))).scaled(2**level)

    def run_fine(self, box: Box, outer: Box, level: int, x: Tensor, input_box: Box) -> Tensor:
        """See `SparseDecoder.run_fine`."""
        graph = self._graph((level, outer.shape), lambda: _FineGraph(self, level, outer, x))
        assert isinstance(graph, _FineGraph), outer
        return graph.replay(box, outer, x, input_box)

    def _graph(self, key: Hashable, make: Callable[[], _CoarseGraph | _FineGraph]) -> _CoarseGraph | _FineGraph:
        """The graph of a bucket, or of a level and shape, captured now if there is none."""
        if key not in self.graphs and len(self.graphs) >= MAX_GRAPHS:
            self.graphs.clear()
            self.pool = shared_pool(self.device)
        return self.graphs.get(key, make)


class _CoarseGraph:
    """The graph of the coarse levels for one bucket, with buffers for what it reads of a cache."""

    verified = False

    def __init__(self, decoder: CapturedDecoder, bucket: Bucket, rows: Tensor) -> None:
        self._decoder, sites, device, dtype = decoder, decoder.sites.values(), rows.device, rows.dtype
        sizes = [4**level * decoder.frame.area for level in reversed(range(len(bucket.rows)))]
        statistics = {s.name: (1, s.module.num_groups, 2) for s in sites if s.role in NORMS}
        cached = {name: (1, *shape) for name, shape in recorded(tuple(sites), bucket).items()}
        tokens = {s.name: (1, sizes[s.level], s.module.out_features) for s in sites if s.role is Role.TOKENS}
        self._latents = rows.new_zeros(1, bucket.rows[-1] + bucket.same[-1], rows.shape[2])
        self._buffers = Buffers(
            PlanTables(bucket, sizes, 1, device),
            self._latents,
            torch.zeros(1, device=device),
            Packed(statistics, torch.float64, device),
            Packed(cached, dtype, device),
            recorded_row_statistics(tuple(sites), bucket, 1, device),
            Packed({}, dtype, device),
            tokens={name: rows.new_zeros(shape) for name, shape in tokens.items()},
        )
        self._captured = capture(self._run, device, decoder.pool)

    def replay(self, rows: Tensor, plan: SparsePlan, features: CachedFeatures) -> FeatureOverlay:
        """See `SparseDecoder.run_coarse`."""
        buffers, count = self._buffers, plan.levels[-1].rows
        buffers.tables.write([plan])
        self._latents[:, :count].copy_(rows[:, :count])
        self._latents[:, buffers.tables.bucket.rows[-1] :][:, : rows.shape[1] - count].copy_(rows[:, count:])
        gather_index = self._decoder.feature_packer.gather_index(buffers, [plan], 1, features)
        for buffer, cached in zip(buffers.copied, gather_index.gather(features), strict=True):
            buffer.copy_(cached)
        self._captured.replay()
        overlay = FeatureOverlay(features, plan)
        for name, tensor in snapshot(self._captured.outputs).items():
            kind, _, site = name.partition(" ")
            if kind == "statistics":
                overlay.statistics[site] = tensor
            else:
                overlay.maps[site] = tensor[:, : plan.levels[self._decoder.sites[site].level].rows]
        return overlay

    def _run(self) -> Outputs:
        sites, count = self._decoder.sites, self._buffers.tables.bucket.rows[-1]
        source = StaticRows(self._buffers, sites, self._decoder.packed, MergedWeights(), {})
        decode_coarse(source, self._decoder.vae, self._latents, count)
        rows = {f"rows {name}": rows for name, rows in source.fresh.items() if name in sites}
        return rows | {f"statistics {name}": statistics for name, statistics in source.statistics.items()}


class _FineGraph:
    """The graph of a fine level for padded boxes of the shape of `outer`, in latent cells."""

    def __init__(self, decoder: CapturedDecoder, level: int, outer: Box, x: Tensor) -> None:
        self._decoder, self._level, read = decoder, level, upsampler_input(outer)
        cells = decoder.cells_of(Box(0, 0, 0, 0), outer.coarsened(2**level))  # so a capture changes no sums
        whole = outer.within(outer)
        self._window = Window(level, outer.within(read.scaled(2)), whole, cells)
        shape = 1, x.shape[1], *read.shape
        self._read = torch.zeros(shape, dtype=x.dtype, device=x.device).to(memory_format=torch.channels_last)
        self._captured, self._verified = capture(self._run, x.device, decoder.pool), False

    def replay(self, box: Box, outer: Box, x: Tensor, input_box: Box) -> Tensor:
        """See `SparseDecoder.run_fine`; outside the frame, and what is shown, zeros are read."""
        read = upsampler_input(outer)
        inside = read.clipped(input_box)
        self._read.zero_()[(..., *inside.within(read).slices)] = x[(..., *inside.within(input_box).slices)]
        self._window.cells.copy_(self._decoder.cells_of(box, outer.coarsened(2**self._level)))
        self._captured.replay()
        replayed = snapshot(self._captured.outputs)
        if not self._verified:  # run twice, it exchanges the same sums twice: the second time for themselves
            check_replay(replayed, self._run())
            self._verified = True
        return replayed["map"]

    def _run(self) -> Outputs:
        return {"map": self._decoder.fine_blocks(self._window, self._read)}
