"""Dilation and erosion of grids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given as quantified
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fisedit.errors import InputError
from fisedit.sparse_kernels.dilation import dilate, erode
from tests.support.grids import square

GRIDS = arrays(bool, st.tuples(st.integers(1, 20), st.integers(1, 20)))
CELLS = square(6, 8, 1, 2, 3)


def test_growing_takes_in_diagonals_and_stops_at_the_border():
    assert np.array_equal(dilate(square(7, 7, 3, 3, 1), 2), square(7, 7, 1, 1, 5))
    assert np.array_equal(dilate(square(5, 5, 0, 0, 1), 1), square(5, 5, 0, 0, 2))
    assert np.array_equal(erode(square(7, 7, 1, 1, 5), 2), square(7, 7, 3, 3, 1))
    assert np.array_equal(erode(square(5, 5, 0, 0, 2), 1), square(5, 5, 0, 0, 1))


@pytest.mark.parametrize("shape", [dilate, erode])
def test_negative_cells_are_refused(shape):
    with pytest.raises(InputError, match="got -1"):
        shape(CELLS, -1)


@quantified(GRIDS, st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_grow_and_shrink_are_each_others_mirror(grid, cells):
    assert (dilate(grid, cells) >= grid).all()
    assert np.array_equal(erode(grid, cells), ~dilate(~grid, cells))
    assert (erode(dilate(grid, cells), cells) >= grid).all()
    assert np.array_equal(dilate(grid, 0), grid)
