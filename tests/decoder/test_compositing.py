"""An edit's pixels in the source's: blended at the boundary up to a limit."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import distance_transform_edt

from fisedit.decoder.compositing import BLEND_WIDTH, MAX_CORRECTION, VISIBLE_CHANGE, composite, find_rim
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


def test_a_rim_is_where_an_edit_shows_beside_its_mask():
    """Next to it, not farther, and not where a change can hardly be seen."""
    grid, cells = grids(16, 16)["square"], np.zeros((16, 16), bool)
    (top, *_), (left, *_) = (np.flatnonzero(grid.any(axis)) for axis in (1, 0))
    cells[top - 1, left], cells[top - 2, left] = True, True  # beside the mask, and one farther
    changed = np.full((128, 128, 3), 100, np.uint8)
    changed[pixels_of(cells)] += int(VISIBLE_CHANGE)
    changed[pixels_of(grid)] = 250
    changed[8 * top, 8 * (left - 1), 1] -= int(VISIBLE_CHANGE)  # one pixel, in one channel
    changed[8 * (top + 2), 8 * (left - 1)] += int(VISIBLE_CHANGE) - 1
    rim = find_rim(plain(100), Image.fromarray(changed), grid)
    assert sorted(zip(*np.nonzero(rim), strict=True)) == [(top - 1, left), (top, left - 1)]
    assert not find_rim(plain(100), plain(100), grid).any()


def test_a_rim_shows_the_edit_and_what_decoding_lost():
    """Detail that the decoder lacks stays where nothing changed, goes where something did; beyond is the source."""
    grid = np.zeros((16, 16), bool)
    grid[4:12, 4:8] = True
    rim = np.roll(grid, 4, 1) & (np.arange(16) == 8)
    detail = np.indices((128, 128)).sum(0) % 2 * 20
    source = Image.fromarray(np.repeat((100 + detail)[..., None], 3, 2).astype(np.uint8))
    decoded = plain(110)
    edited = levels(decoded)
    edited[pixels_of(grid)] = 200
    half = pixels_of(rim) & (np.arange(128) < 64 + 4)
    edited[half] = 200  # the decoder paints some pixels beyond the mask's cells
    picture = Image.fromarray(edited.astype(np.uint8))
    got = levels(composite(source, picture, grid, rim, decoded))
    outside = ~pixels_of(grid | rim)
    assert (got[outside] == levels(source)[outside]).all()
    rows = slice(64, 68)  # far from corners
    assert (abs(got[rows, 64:68] - 200) <= 10).all()
    assert (abs(got[rows, 69:72] - levels(source)[rows, 69:72]) <= 5).all()
    without = composite(source, picture, grid, np.zeros_like(grid), decoded)
    assert without.tobytes() == composite(source, picture, grid).tobytes()
