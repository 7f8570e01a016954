"""Plans of any mask in buffers of few shapes: rows padded to buckets, index tables written in place.

A captured CUDA graph knows addresses and shapes. So the tables of a plan live in device buffers whose shapes depend on
its bucket alone; another mask is other numbers in the same buffers. Padded rows read the zero row alone, and nothing
reads them. Knows index arithmetic only, as `plan` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.sparse_kernels.row_plan import TAPS, KernelMap, Level, SparsePlan

STEP = 16
"""Rows of the smallest bucket: what one tensor-core product takes."""


HALO = 64
"""Halo rows that every bucket has room for."""


def bucket_size(count: int) -> int:
    """The bucket for a number of rows: 16 times a power of two, or one and a half times that."""
    size = STEP
    while size < count:
        size *= 2
    middle = size // 4 * 3
    return middle if middle % STEP == 0 and middle >= count else size


@dataclass(frozen=True)
class Bucket:
    """Shapes of a plan's buffers, finest level first.

    Args:
        rows: padded active rows of each level.
        same, down, up: padded halo rows of each level's reads; 0 where there are none.
    """

    rows: tuple[int, ...]
    same: tuple[int, ...]
    down: tuple[int, ...]
    up: tuple[int, ...]


def choose_bucket(plans: Sequence[SparsePlan]) -> Bucket:
    """The smallest bucket that holds all of some plans of one size, at least one.

    As many halo rows as active ones always have room, and `HALO` of them, so that masks of one size mostly share a
    bucket; what is not used costs memory alone.
    """
    levels = list(zip(*(plan.levels for plan in plans), strict=True))
    rows = tuple(bucket_size(max(level.rows for level in same)) for same in levels)

    def halo(reads: Iterable[tuple[KernelMap | None, ...]]) -> tuple[int, ...]:
        sizes = [max((r.halo.numel() for r in each if r is not None), default=None) for each in reads]
        return tuple(0 if n is None else bucket_size(max(n, r, HALO)) for n, r in zip(sizes, rows, strict=True))

    return Bucket(
        rows,
        halo(tuple(level.same for level in same) for same in levels),
        halo(tuple(level.down for level in same) for same in levels),
        halo(tuple(level.up for level in same) for same in levels),
    )


@dataclass(frozen=True, eq=False)
class RowPlacement:
    """Where padded rows stand in their map, for each of B items.

    Args:
        positions: int64 [B, R], ascending; the map's size for padded rows.
        active_mask: bool [B, H * W], the positions that have a row.
        num_rows: int32 [B], rows that are not padding; they come first.
    """

    positions: Tensor
    active_mask: Tensor
    num_rows: Tensor

    @staticmethod
    def empty(batch: int, rows: int, size: int, device: torch.device) -> RowPlacement:
        """Buffers in which every row is padding."""
        return RowPlacement(
            torch.full((batch, rows), size, device=device),
            torch.zeros(batch, size, dtype=torch.bool, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )

    def write(self, item: int, level: Level) -> None:
        """Put a level's active rows into one item's buffers."""
        size = self.active_mask.shape[1]
        self.positions[item].copy_(F.pad(level.active, (0, self.positions.shape[1] - level.rows), value=size))
        self.active_mask[item].zero_().index_fill_(0, level.active, True)
        self.num_rows[item].fill_(level.rows)


@dataclass(frozen=True, eq=False)
class LevelTables:
    """One level's buffers: where its rows stand, and the reads of its 3x3 convs.

    Args:
        same, down, up: int32 [B, R_out, 9] into [padded rows | padded halo | one zero row], None where there are none.
    """

    placement: RowPlacement
    same: Tensor
    down: Tensor | None
    up: Tensor | None


class PlanTables:
    """The buffers of one bucket, and what writes a plan into them.

    Args:
        bucket: their shapes. sizes: positions of each level, finest first.
        batch: B; item b has the plan b % (number of plans), as guidance branches come one after another.
        device: where they live.
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
        """Write one plan for each edit, in place; nothing is allocated that stays, and the host waits for nothing."""
        assert self.batch % len(plans) == 0, (self.batch, len(plans))
        for item in range(self.batch):
            self._write(item, plans[item % len(plans)])

    def _write(self, item: int, plan: SparsePlan) -> None:
        for i, (tables, level) in enumerate(zip(self.levels, plan.levels, strict=True)):
            tables.placement.write(item, level)
            inside = level.rows, self.bucket.rows[i]
            for table, reads, halo in (
                (tables.same, level.same, self.bucket.same[i]),
                (tables.down, level.down, self.bucket.down[i]),
                (tables.up, level.up, self.bucket.up[i]),
            ):
                if table is not None and reads is not None:
                    _write_reads(table[item], reads, inside, halo)
        finest = plan.levels[0]
        self.read_positions[item, : finest.rows] = finest.active
        self.read_positions[item, self.bucket.rows[0] :][: finest.same.halo.numel()] = finest.same.halo


def _write_reads(table: Tensor, reads: KernelMap, rows: tuple[int, int], halo: int) -> None:
    """Write a neighbour table into [R_out, 9]; `rows` are the input's active ones and their bucket."""
    (active, bucket), there = rows, reads.halo.numel()
    found = reads.table.view(-1, TAPS)
    moved = found + (found >= active) * (bucket - active) + (found >= active + there) * (halo - there)
    table.fill_(bucket + halo)[: len(moved)].copy_(moved)
