"""Padded plans: index tables of any mask in buffers of a few shapes.

A captured CUDA graph holds addresses and shapes. So the tables of a plan are in device buffers whose shapes depend on
its bucket alone. Another mask is written into the same buffers. Padding rows read the zero row only, and no row reads
them. Knows index arithmetic only, as `row_plan` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.sparse_kernels.row_plan import TAPS, KernelMap, Level, SparsePlan

MIN_ROWS = 16
"""Rows of the smallest bucket: those of one tensor-core product."""

MIN_HALO_ROWS = 64
"""Halo rows for which every bucket has room."""


def bucket_size(count: int) -> int:
    """Round a number of rows up to the size of a bucket: 16 times a power of two, or one and a half times that.

    Args:
        count: rows, 0 or more.
    """
    size = MIN_ROWS
    while size < count:
        size *= 2
    middle = size // 4 * 3
    return middle if middle % MIN_ROWS == 0 and middle >= count else size


@dataclass(frozen=True)
class Bucket:
    """Shapes of a plan's buffers, finest level first.

    Args:
        rows: active rows of each level with padding.
        same: halo rows with padding of each level's `Level.same`.
        down: those of `Level.down`; 0 where there is none.
        up: those of `Level.up`; 0 where there is none.
    """

    rows: tuple[int, ...]
    same: tuple[int, ...]
    down: tuple[int, ...]
    up: tuple[int, ...]


def choose_bucket(plans: Sequence[SparsePlan]) -> Bucket:
    """Choose the smallest bucket that holds each of some plans.

    A bucket has room for as many halo rows as active rows, and for at least `MIN_HALO_ROWS`. So masks of one size
    mostly share a bucket; unused room costs memory only.

    Args:
        plans: The plans of maps of one size, at least one.
    """
    levels = list(zip(*(plan.levels for plan in plans), strict=True))
    rows = tuple(bucket_size(max(level.rows for level in same)) for same in levels)

    def halo(kernel_maps: Iterable[tuple[KernelMap | None, ...]]) -> tuple[int, ...]:
        sizes = [max((r.halo.numel() for r in each if r is not None), default=None) for each in kernel_maps]
        return tuple(
            0 if n is None else bucket_size(max(n, r, MIN_HALO_ROWS)) for n, r in zip(sizes, rows, strict=True)
        )

    return Bucket(
        rows,
        halo(tuple(level.same for level in same) for same in levels),
        halo(tuple(level.down for level in same) for same in levels),
        halo(tuple(level.up for level in same) for same in levels),
    )


@dataclass(frozen=True, eq=False)
class RowPlacement:
    """Positions of padded rows in their map, for each of B items.

    Args:
        positions: int64 [B, R], ascending; H * W for padding rows.
        active_mask: bool [B, H * W], the positions that have a row.
        num_rows: int32 [B], rows that are not padding; these come first.
    """

    positions: Tensor
    active_mask: Tensor
    num_rows: Tensor

    @staticmethod
    def empty(batch: int, rows: int, size: int, device: torch.device) -> RowPlacement:
        """Allocate buffers in which every row is padding.

        Args:
            batch: items, B.
            rows: padded rows of each, R.
            size: positions of the map, H * W.
            device: The device of the buffers.
        """
        return RowPlacement(
            torch.full((batch, rows), size, device=device),
            torch.zeros(batch, size, dtype=torch.bool, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )

    def write(self, item: int, level: Level) -> None:
        """Write a level's active rows into one item's buffers.

        Args:
            item: index in [0, B).
            level: with at most R active rows.
        """
        size = self.active_mask.shape[1]
        self.positions[item].copy_(F.pad(level.active, (0, self.positions.shape[1] - level.rows), value=size))
        self.active_mask[item].zero_().index_fill_(0, level.active, True)
        self.num_rows[item].fill_(level.rows)


@dataclass(frozen=True, eq=False)
class LevelTables:
    """One level's buffers: positions of its rows, and kernel maps of its 3x3 convs with padding.

    A kernel map is int32 [B, R_out, 9], indices into [active rows with padding | halo rows with padding | zero row].

    Args:
        placement: The placement of the level's rows.
        same: kernel map of the level's own convs.
        down: The kernel map of the downsampler's conv, or None where there is none.
        up: The kernel map of the upsampler's conv, or None where there is none.
    """

    placement: RowPlacement
    same: Tensor
    down: Tensor | None
    up: Tensor | None


class PlanTables:
    """The buffers of one bucket, into which plans are written.

    Args:
        bucket: shapes of the buffers.
        sizes: positions H * W of each level, finest first.
        batch: items, B; item b has the plan b % (number of plans), as the guidance branches follow one another.
        device: The device of the buffers.
    """

    def __init__(self, bucket: Bucket, sizes: Sequence[int], batch: int, device: torch.device) -> None:
        self.bucket, self.batch = bucket, batch
        rows = bucket.rows

        def table(out: int | None, inside: int, halo: int) -> Tensor | None:
            if out is None or not halo:
                return None
            return torch.full((batch, out, TAPS), inside + halo, dtype=torch.int32, device=device)

        def level(i: int) -> LevelTables:
            same = table(rows[i], rows[i], bucket.same[i])
            assert same is not None
            coarser, finer = rows[i + 1] if i + 1 < len(rows) else None, rows[i - 1] if i else None
            down, up = table(coarser, rows[i], bucket.down[i]), table(finer, rows[i], bucket.up[i])
            return LevelTables(RowPlacement.empty(batch, rows[i], sizes[i], device), same, down, up)

        self.levels = tuple(level(i) for i in range(len(rows)))
        self.read_positions = torch.zeros(batch, rows[0] + bucket.same[0], dtype=torch.long, device=device)
        """int64 [B, R + G], positions of the finest level's active and halo rows."""

    def write(self, plans: Sequence[SparsePlan]) -> None:
        """Write one plan for each edit in place, without synchronising with the device.

        Args:
            plans: The plans that are written; they fit the bucket, and their number divides B.
        """
        assert self.batch % len(plans) == 0, (self.batch, len(plans))
        for item in range(self.batch):
            self._write(item, plans[item % len(plans)])

    def _write(self, item: int, plan: SparsePlan) -> None:
        for i, (tables, level) in enumerate(zip(self.levels, plan.levels, strict=True)):
            tables.placement.write(item, level)
            inside = level.rows, self.bucket.rows[i]
            for table, kernel_map, halo in (
                (tables.same, level.same, self.bucket.same[i]),
                (tables.down, level.down, self.bucket.down[i]),
                (tables.up, level.up, self.bucket.up[i]),
            ):
                if table is not None and kernel_map is not None:
                    _write_kernel_map(table[item], kernel_map, inside, halo)
        finest = plan.levels[0]
        self.read_positions[item, : finest.rows] = finest.active
        self.read_positions[item, self.bucket.rows[0] :][: finest.same.halo.numel()] = finest.same.halo


def _write_kernel_map(table: Tensor, kernel_map: KernelMap, rows: tuple[int, int], halo: int) -> None:
    """Write a kernel map into [R_out, 9]; `rows` are the input's active rows without and with padding."""
    (active, padded), halo_rows = rows, kernel_map.halo.numel()
    index = kernel_map.table.view(-1, TAPS)
    index = index + (index >= active) * (padded - active) + (index >= active + halo_rows) * (halo - halo_rows)
    table.fill_(padded + halo)[: len(index)].copy_(index)
