"""Edits of one source in padded rows, and what torch makes of their mixed maps densely, in float64.

Everything that must not be read (padding rows and padding halo) is NaN.
"""

from __future__ import annotations

from math import nan

import torch

from fisedit.sparse_kernels.buckets import PlanTables, choose_bucket
from fisedit.sparse_kernels.row_plan import make_row_plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.03}
"""In units of the expected value, and of the spread of all of them or of what they are means of."""


class Edits:
    """Several masks over one source of some guidance branches; item b is edit b % E of branch b // E."""

    def __init__(self, grids, dtype, *, depth=2, branches=2, device=DEVICE):
        self.plans = [make_row_plan(grid, depth, device) for grid in grids]
        self.levels = self.plans[0].levels
        self.dtype, self.device, self.branches, self.edits = dtype, device, branches, len(grids)
        self.items = branches * len(grids)
        self.bucket = choose_bucket(self.plans)
        self.tables = PlanTables(self.bucket, [level.size for level in self.levels], self.items, device)
        self.tables.write(self.plans)

    def level(self, item, i):
        return self.plans[item % self.edits].levels[i]

    def random(self, *shape, scale=1.0):
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)

    def maps(self, i, channels):
        """The recorded maps [S, C, H, W] of a level, and the mixed ones [B, C, H, W]."""
        height, width = self.levels[i].height, self.levels[i].width
        recorded = self.random(self.branches, channels, height, width) + 0.5
        mixed = recorded.repeat_interleave(self.edits, 0)
        for b in range(self.items):
            active = self.level(b, i).active
            mixed[b].flatten(1)[:, active] = self.random(channels, len(active), scale=2) - 0.5
        return recorded, mixed

    def rows(self, full, i):
        """A map's active rows [B, R, C], padded with NaN."""
        return self._padded(full, [self.level(b, i).active for b in range(self.items)], self.bucket.rows[i])

    def halo(self, full, i, kind="same"):
        """A map's rows around them [B, G, C], padded with NaN."""
        positions = [getattr(self.level(b, i), kind).halo for b in range(self.items)]
        return self._padded(full, positions, getattr(self.bucket, kind)[i])

    def _padded(self, full, positions, count):
        out = torch.full((self.items, count, full.shape[1]), nan, dtype=full.dtype, device=self.device)
        for b, here in enumerate(positions):
            out[b, : len(here)] = full[b].flatten(1)[:, here].T
        return out

    def totals(self, recorded, groups):
        """Sums and sums of squares of the recorded maps, float64 [S, groups, 2]."""
        grouped = recorded.double().flatten(2).unflatten(1, (groups, -1))
        return torch.stack([grouped.sum((2, 3)), grouped.square().sum((2, 3))], -1)

    def close(self, got, expected, i, spread=None):
        """Check rows [B, R, C] against a map [B, C, H, W] where they stand."""
        assert got.dtype == self.dtype
        spread = expected.double().std(correction=0).clamp(min=0.1) if spread is None else spread
        for b in range(self.items):
            active = self.level(b, i).active
            there = expected[b].flatten(1)[:, active].T
            limit = TOLERANCE[self.dtype] * (spread + there.abs())
            assert ((got[b, : len(active)].double() - there).abs() <= limit).all()  # a NaN fails, too
