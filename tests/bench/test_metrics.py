"""Metrics with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from fisedit.bench import metrics
from tests.support.quality import grey, picture


def test_overlap_by_hand():
    found, true = np.zeros((3, 4), bool), np.zeros((3, 4), bool)
    found[:2, :2], true[:2, 1:] = True, True
    assert metrics.mask_overlap(found, true) == metrics.MaskOverlap(2 / 8, 2 / 4, 2 / 6)
    assert metrics.mask_overlap(np.zeros_like(true), true) == metrics.MaskOverlap(0, 0, 0)


def test_a_mask_fits_by_cells_and_by_pixels():
    true = np.zeros((16, 16), bool)
    true[:8, :8] = true[15, 15] = True  # one whole cell, and one pixel of another
    fit = metrics.mask_fit(np.array([[True, False], [False, False]]), true)
    assert fit.cells == metrics.MaskOverlap(1 / 2, 1, 1 / 2)
    assert fit.pixels == metrics.MaskOverlap(64 / 65, 1, 64 / 65)
    assert fit.coverage == 64 / 65
    assert metrics.mask_fit(np.ones((2, 2), bool), true).coverage == 256 / 65


def test_psnr_counts_the_pixels_inside_alone():
    inside = np.zeros((16, 16), bool)
    inside[:4] = True
    other = grey(105)
    other[8:] = 0
    assert metrics.psnr(picture(other), picture(grey(100)), inside) == pytest.approx(20 * np.log10(255 / 5))
    assert metrics.psnr(picture(other), picture(grey(105)), inside) == pytest.approx(148.13, abs=0.01)


def test_one_byte_outside_is_seen():
    grid = np.array([[True, False], [False, False]])
    inside, outside = grey(100), grey(100)
    inside[3, 3, 1], outside[12, 3, 1] = 101, 101
    assert metrics.equal_outside(picture(inside), picture(grey(100)), grid)
    assert not metrics.equal_outside(picture(outside), picture(grey(100)), grid)


def test_seam_is_the_ratio_of_largest_steps_near_the_boundary():
    grid = np.array([[True, False], [False, False]])
    low, high, source = grey(100), grey(100), picture(grey(100))
    low[:8, :8], high[:8, :8] = 110, 125
    high[0, 0] = 200  # far from the boundary
    assert metrics.seam(picture(low), picture(low), source, grid) == 1
    assert metrics.seam(picture(high), picture(low), source, grid) == 2.5
    assert metrics.seam(picture(low), picture(low), source, np.ones((2, 2), bool)) is None
    assert metrics.seam(picture(low), source, source, grid) is None


@pytest.mark.parametrize(("inward", "found"), [(1, True), (3, True), (4, False), (-3, True), (-4, False)])
def test_an_edge_beside_the_boundary_is_a_seam(inward, found):
    """Four pixels either side hold three steps each, beside the one across the boundary."""
    grid = np.array([[True, False], [True, False]])
    low, moved = grey(100), grey(100)
    low[:, :8] = 101
    moved[:, : 8 - inward] = 120
    assert metrics.seam(picture(moved), picture(low), picture(grey(100)), grid) == (20 if found else 0)


def test_the_sources_own_steps_outside_are_no_seam():
    """A decoder blurs an edge outside the mask, which the edit keeps as the source has it."""
    grid = np.array([[True, False], [True, False]])
    source, decoded = grey(100), grey(100)
    source[:, 10:], decoded[:, 10:] = 140, 120
    assert metrics.seam(picture(source), picture(decoded), picture(source), grid) == 1
    assert metrics.seam(picture(source), picture(decoded), picture(decoded), grid) == 2


def test_f1_by_hand():
    assert metrics.f1_score([True, True, False, False], [True, False, True, False]) == 0.5
    assert metrics.f1_score([True, True, True], [True, True, False]) == 0.8
    assert metrics.f1_score([False], [True]) == 0
    assert metrics.f1_score([False], [False]) is None


def test_the_tail_is_the_bad_one():
    values = list(range(11))
    assert metrics.median_and_tail(values, high_is_good=True) == (5, 1)
    assert metrics.median_and_tail(values, high_is_good=False) == (5, 9)


def test_what_a_mask_leaves_of_a_thing():
    thing = np.zeros((16, 24), bool)
    thing[2:10, 6:16] = True
    grid = np.array([[True, True, False], [False, True, False]])
    assert metrics.share_outside(thing, grid) == 4 / 80
    assert metrics.share_outside(thing & False, grid) == 0


def test_a_bootstrap_interval_holds_the_true_mean_nineteen_times_in_twenty():
    rng = np.random.default_rng(5)
    intervals = [metrics.bootstrap_interval(rng.normal(3, 1, 60), np.mean) for _ in range(200)]
    assert 0.9 <= np.mean([low <= 3 <= high for low, high in intervals]) <= 0.99
    assert metrics.bootstrap_interval([2.0] * 9, np.median) == (2.0, 2.0)
