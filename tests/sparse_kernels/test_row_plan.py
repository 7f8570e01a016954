"""Neighbour tables and windows against torch's own unfold, conv and interpolation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fisedit.sparse_kernels.row_plan import count_active_rows, make_row_plan
from tests.support.grids import grids

DEPTH = 3
SIZES = [(8, 8), (16, 12), (13, 9), (7, 12)]
SHIFTS = {"same": 0, "down": 1, "up": -1}

each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
each_grid = pytest.mark.parametrize("name", grids(8, 8))


def reads_of(plan):
    """Every (kind, input level, reads, output level)."""
    for kind, shift in SHIFTS.items():
        for i, level in enumerate(plan.levels):
            if reads := getattr(level, kind):
                yield kind, level, reads, plan.levels[i + shift]


def slid(full, kind, out):
    """The map [1, C, H, W] that the conv slides over."""
    return F.interpolate(full, size=(out.height, out.width), mode="nearest") if kind == "up" else full


def compact(full, level, reads):
    """[active | halo | zero] rows [n, C] of a map [1, C, H, W]."""
    rows = full[0].flatten(1).T
    return torch.cat([rows[level.active], rows[reads.halo], torch.zeros_like(rows[:1])])


def random_map(level, channels=3):
    return torch.randn(1, channels, level.height, level.width, dtype=torch.float64)


@pytest.mark.sweep(1)
@each_size
@each_grid
def test_the_table_is_torchs_unfold(size, name):
    plan = make_row_plan(grids(*size)[name], DEPTH)
    for kind, level, reads, out in reads_of(plan):
        numbered = torch.arange(1.0, level.size + 1).view(1, 1, level.height, level.width)  # 0 is the frame's outside
        patches = F.unfold(slid(numbered, kind, out), 3, padding=1, stride=reads.stride)[0]
        found = compact(numbered, level, reads)[reads.table].view(-1, 9)
        assert torch.equal(found, patches.T[out.active])
        assert reads.rows_out == out.rows


@pytest.mark.sweep(1)
@each_size
@each_grid
def test_the_window_is_a_cropped_conv(size, name):
    plan, weight = make_row_plan(grids(*size)[name], DEPTH), torch.randn(2, 3, 3, 3, dtype=torch.float64)
    for kind, level, reads, out in reads_of(plan):
        full, crop_index = random_map(level), reads.crop
        dense = F.conv2d(slid(full, kind, out), weight, padding=1, stride=reads.stride)[0].flatten(1)
        crop = compact(full, level, reads)[crop_index.table].T.view(1, 3, crop_index.height, crop_index.width)
        found = F.conv2d(crop, weight, stride=reads.stride)[0].flatten(1)
        assert torch.allclose(found[:, crop_index.output_index], dense[:, out.active])
        assert reads.waste == pytest.approx(found.shape[1] / out.rows)


@pytest.mark.sweep(1)
@each_size
@each_grid
def test_the_halo_is_what_is_read_but_not_active(size, name):
    plan = make_row_plan(grids(*size)[name], DEPTH)
    for _, level, reads, _ in reads_of(plan):
        assert torch.equal(reads.halo, reads.halo.unique())
        assert not torch.isin(reads.halo, level.active).any()
        used = reads.table.unique()
        halo_slots = level.rows + torch.arange(len(reads.halo))
        assert torch.isin(halo_slots, used).all(), "a halo row is gathered that nothing reads"
        assert used.max() <= level.rows + len(reads.halo)


@pytest.mark.sweep(1)
@each_size
@each_grid
def test_a_level_is_active_where_any_finer_cell_is(size, name):
    grid = grids(*size)[name]
    for level in make_row_plan(grid, DEPTH).levels:
        assert level.active.tolist() == np.flatnonzero(grid).tolist()
        assert (level.height, level.width) == grid.shape and level.size == grid.size and level.rows == grid.sum()
        padded = np.pad(grid, [(0, n % 2) for n in grid.shape])
        grid = padded.reshape(padded.shape[0] // 2, 2, -1, 2).any((1, 3))


@each_size
def test_everything_active_has_no_halo(size):
    plan = make_row_plan(np.ones(size, bool), DEPTH)
    assert all(len(reads.halo) == 0 and reads.waste == 1 for _, _, reads, _ in reads_of(plan))
    assert plan.rows == tuple(level.size for level in plan.levels)


def test_slots_and_reads_of_a_level():
    level = make_row_plan(grids(6, 8)["corner"], 1).levels[0]
    assert level.row_of_position.view(6, 8)[0, -2:].tolist() == [0, 1]
    assert (level.row_of_position >= 0).sum() == level.rows == 4
    assert level.read_positions.tolist() == [6, 7, 14, 15, 5, 13, 21, 22, 23]


def test_one_level_has_no_samplers():
    (level,) = make_row_plan(grids(8, 8)["blobs"], 1).levels
    assert level.down is None and level.up is None


def test_the_ends_have_one_sampler_each():
    first, middle, last = make_row_plan(grids(8, 8)["blobs"], 3).levels
    assert first.up is None and first.down and middle.up and middle.down and last.up and last.down is None


def test_rows_of_all_levels():
    assert make_row_plan(grids(16, 16)["one_cell"], 4).rows == (1, 1, 1, 1)
    assert make_row_plan(grids(16, 16)["checkerboard"], 4).rows == (128, 64, 16, 4)
    assert all(count_active_rows(grid, DEPTH) == make_row_plan(grid, DEPTH).rows for grid in grids(13, 17).values())


def test_the_grid_is_not_kept():
    """A plan outlives changes to the caller's array."""
    grid = grids(8, 8)["square"]
    plan = make_row_plan(grid, 2)
    before = plan.levels[0].active.tolist()
    grid[:] = True
    assert plan.levels[0].active.tolist() == before
