"""An edit's pixels in the source's: blended at the boundary up to a limit."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import distance_transform_edt

from fisedit.sparse.compositing import BLEND_WIDTH, MAX_CORRECTION, composite
from tests.support.decodes import levels, pixels_of
from tests.support.grids import grids

pytestmark = pytest.mark.usefixtures("no_grad")


def plain(grey, size=128):
    return Image.new("RGB", (size, size), (grey,) * 3)


@pytest.mark.parametrize("level", [30, 240])
def test_a_boundary_is_blended_up_to_a_limit(level):
    """Where the edit would show no step, none is left up to `MAX_CORRECTION`; deep inside nothing is touched."""
    for name, grid in grids(16, 16).items():
        mixed = levels(composite(plain(0), plain(level), grid))[..., 0].astype(int)
        depth = distance_transform_edt(np.pad(pixels_of(grid), 128, mode="edge"))[128:-128, 128:-128]
        if grid.all():
            assert (mixed == level).all()
            continue
        assert (mixed[depth == 0] == 0).all() and (mixed[depth > BLEND_WIDTH] == level).all(), name
        first, second = (int(mixed[depth == k].min()) for k in (1, 2))
        assert 0 <= first - max(0, level - MAX_CORRECTION) <= MAX_CORRECTION / 3 and first <= second, name
        assert (mixed[depth > 0] >= level - MAX_CORRECTION).all() and (mixed <= level).all(), name


def test_a_composite_keeps_an_edit_that_fits():
    """Where the edited picture has the source's pixels outside, nothing is mended."""
    for name, grid in grids(16, 16).items():
        edited = Image.fromarray(np.where(pixels_of(grid)[..., None], levels(plain(240)), 20).astype(np.uint8))
        assert composite(plain(20), edited, grid).tobytes() == edited.tobytes(), name


def test_an_edge_of_the_edit_stays_an_edge():
    """The step that the edit has at the boundary is kept, led to the source's colours."""
    grid = grids(16, 16)["row"]
    edited = Image.fromarray(np.where(pixels_of(grid)[..., None], levels(plain(200)), 20).astype(np.uint8))
    mixed = levels(composite(plain(50), edited, grid))
    boundary = distance_transform_edt(pixels_of(grid)) == 1
    assert (abs(mixed[boundary].astype(int) - (50 + 180)) <= 8).all() and (mixed[~pixels_of(grid)] == 50).all()
    assert levels(composite(plain(0, 64), plain(240, 64), np.ones((8, 8), bool))).min() == 240


def test_nothing_is_composited_into_an_empty_mask():
    assert levels(composite(plain(20), plain(240), np.zeros((16, 16), bool))).max() == 20
