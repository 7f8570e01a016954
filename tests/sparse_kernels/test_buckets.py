"""Buckets: sizes that many masks share."""

from __future__ import annotations

import pytest

from fisedit.sparse_kernels.buckets import bucket_size, choose_bucket
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support.grids import grids


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, 16), (16, 16), (17, 32), (33, 48), (49, 64), (65, 96), (97, 128), (4096, 4096), (3000, 3072)],
)
def test_buckets(count, size):
    assert bucket_size(count) == size


def test_buckets_waste_at_most_half_and_suit_triton():
    for count in range(17, 5000):
        assert count <= bucket_size(count) < 2 * count
        assert bucket_size(count) % 16 == 0  # kernels are compiled once for such numbers


def test_masks_of_one_size_share_a_bucket():
    buckets = set()
    for top in range(1, 10):
        grid = grids(16, 16)["one_cell"] & False
        grid[top : top + 6, 3:9] = True
        buckets.add(choose_bucket([make_row_plan(grid, 1)]))
    assert len(buckets) == 1
