"""Boxes over a mask: they cover it, are cut where that is cheaper, and have their halo."""

from __future__ import annotations

import numpy as np
import pytest

from fisedit.decoder.tiles import (
    COARSE_LEVELS,
    DILATION,
    HALO,
    Box,
    box_areas,
    boxes,
    cut,
    frame_areas,
    upsampler_input,
    with_halo,
)
from tests.support.decodes import each_grid, each_size
from tests.support.grids import grids

pytestmark = pytest.mark.usefixtures("no_grad", "boxed")


@pytest.mark.sweep(1)
@each_size
@each_grid
def test_boxes_cover_the_mask_and_only_where_it_is(size, name):
    grid, covered = grids(*size)[name], np.zeros(size, bool)
    for box in boxes(grid):
        assert grid[box.slices].any()
        assert 0 <= box.top < box.bottom <= size[0] and 0 <= box.left < box.right <= size[1]
        assert not (covered[box.slices] & grid[box.slices]).any()
        covered[box.slices] = True
    assert covered[grid].all()


def spots(*cells, size=(64, 64)):
    grid = np.zeros(size, bool)
    for y, x in cells:
        grid[y : y + 2, x : x + 2] = True
    return grid


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (spots((5, 5)), {Box(5, 5, 7, 7)}),
        (spots((5, 5), (60, 60)), {Box(5, 5, 7, 7), Box(60, 60, 62, 62)}),
        (spots((5, 5), (5, 8)), {Box(5, 5, 7, 10)}),
        (spots((5, 5), (7, 7)), {Box(5, 5, 9, 9)}),
        (np.zeros((8, 8), bool), set()),
        (np.ones((8, 8), bool), {Box(0, 0, 8, 8)}),
    ],
    ids=["one", "far apart", "near", "touching", "nothing", "everything"],
)
def test_boxes_are_cut_where_that_is_cheaper(grid, expected):
    assert set(boxes(grid)) == expected


def test_areas_count_every_box_with_its_halo():
    assert box_areas(np.ones((8, 8), bool)) == frame_areas(64)
    one, other = spots((5, 5)), spots((60, 60))
    both = [tuple(map(sum, zip(a, b, strict=True))) for a, b in zip(box_areas(one), box_areas(other), strict=True)]
    assert box_areas(one | other) == tuple(both)
    rows = [4**level * (2 + 2 * DILATION) ** 2 for level in range(COARSE_LEVELS)]
    alone = [(2 * 2**level + 2 * HALO) ** 2 for level in (2, 3)]
    assert [computed for _, computed in box_areas(spots((30, 30)))] == rows + alone


@each_size
@pytest.mark.parametrize("level", [2, 3])
def test_an_upsampler_sees_what_a_box_needs_and_has_it(size, level):
    """One cell around what is wanted behind it, within what was computed before it."""
    factor = 2**level
    for top, left in np.ndindex(*size):
        box = Box(top, left, min(top + 3, size[0]), min(left + 2, size[1]))
        frame = Box(0, 0, *size)
        before = with_halo(box, level - 1, size) if level > COARSE_LEVELS else frame.scaled(2 ** (COARSE_LEVELS - 1))
        outer = with_halo(box, level, size)
        seen, wanted = upsampler_input(outer).clipped(before), outer.dilated(1).clipped(frame.scaled(factor))
        assert covers(seen.scaled(2), wanted)


def covers(one, other):
    return one.top <= other.top and one.left <= other.left and one.bottom >= other.bottom and one.right >= other.right


def test_a_box_is_cut_finer_where_cells_are_dear():
    """Two blobs that a halo of one cell joins and one of half a cell does not."""
    grid = np.zeros((64, 64), bool)
    grid[5:7, 5:8] = grid[7:10, 8:11] = True
    (box,) = boxes(grid)
    pieces = cut(grid, box, 3)
    assert len(pieces) == 2 and sum(piece.area for piece in pieces) == grid.sum()


def test_box_arithmetic():
    box = Box(1, 2, 4, 8)
    assert box.area == 18
    assert box.scaled(2) == Box(2, 4, 8, 16)
    assert box.dilated(2) == Box(-1, 0, 6, 10) and box.dilated(2).clipped(Box(0, 0, 5, 9)) == Box(0, 0, 5, 9)
    assert box.coarsened(2) == Box(0, 1, 2, 4) and box.shape == (3, 6)
    assert box.within(Box(1, 1, 9, 9)) == Box(0, 1, 3, 7)
