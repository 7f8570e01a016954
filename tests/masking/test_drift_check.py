"""Drift: a mask that misses a part of the change is noticed and grown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fisedit import Editor
from fisedit.masking import drift_check
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import EditMask, MaskSource, Step
from tests.support.edits import CAT, DOG, latents, masks_square, pixels_outside
from tests.support.grids import grids

SQUARE = grids(16, 16)["square"]


def difference(inside: float, outside: float) -> np.ndarray:
    return np.where(SQUARE, inside, outside).astype(np.float32)


def checked(others=None):
    return drift_check.plan_check(EditMask(SQUARE, MaskSource.ATTENTION, other_objects=others), 25)


def test_change_within_the_mask_is_no_drift():
    check = checked()
    check.compare(difference(1.0, 0.1))
    assert check.step == 5 and not (check.cells & SQUARE).any()
    assert check.cells[dilate(SQUARE, drift_check.MARGIN) & ~SQUARE].all()


def test_change_around_the_mask_grows_it():
    wide = dilate(SQUARE, 2)
    with pytest.raises(drift_check.DriftDetected) as caught:
        checked().compare(np.where(wide, 1.0, 0.1).astype(np.float32))
    assert (caught.value.grid >= wide).all() and not caught.value.is_global and not caught.value.grid.all()


def test_a_rim_that_changes_less_than_the_mask_is_no_drift_however_wide():
    wide = dilate(SQUARE, drift_check.MARGIN)
    checked().compare(np.where(SQUARE, 1.0, np.where(wide, 0.95, 0.1)).astype(np.float32))


def test_things_that_stay_are_left_alone():
    wide = dilate(SQUARE, drift_check.MARGIN)
    beside = wide & ~SQUARE
    beside[:, : np.flatnonzero(SQUARE.any(0))[-1] + 1] = False  # the columns to the right of the mask
    change = np.where(wide, 1.0, 0.1).astype(np.float32)
    with pytest.raises(drift_check.DriftDetected) as caught:
        checked(others=beside).compare(change)
    assert not (caught.value.grid & beside).any() and (caught.value.grid & ~SQUARE).any()
    checked(others=wide & ~SQUARE).compare(change)


def test_change_everywhere_has_no_mask():
    with pytest.raises(drift_check.DriftDetected) as caught:
        checked().compare(difference(1.0, 0.9))
    assert caught.value.is_global


def small(monkeypatch, grid):
    mask = EditMask(grid, MaskSource.ATTENTION, 1.0)
    monkeypatch.setattr("fisedit.masking.edit_scope.predict_mask", lambda *_: mask)
    return mask


def test_drift_grows_the_mask_and_the_edit_is_that_of_the_larger_mask(editor, monkeypatch):
    grid = np.zeros((editor.current.mask.grid.shape), bool)
    grid[8:10, 3:5] = True
    larger = dilate(grid, 3)
    monkeypatch.setattr("fisedit.masking.drift_check.DriftCheck.compare", drifting(larger, is_global=False))
    small(monkeypatch, grid)
    result = editor.edit(DOG)
    assert np.array_equal(result.mask.grid, larger) and any("the mask was grown" in note for note in result.stats.notes)
    kept = latents(editor._trajectory_cache.get(result.id)[0])
    source = editor.undo()
    assert pixels_outside(result, source)
    again = editor.edit(DOG, mask=larger)
    assert np.abs(np.subtract(result.image, again.image, dtype=int)).max() <= 2  # more of it is decoded, for its rim
    assert (kept == latents(editor._trajectory_cache.get(again.id)[0])).all()


@pytest.mark.parametrize(
    ("words", "grow"), [("an elephant and a cake on a beach", -2), ("a castle and a cake on a beach", -2)]
)
def test_a_mask_that_is_too_small_is_noticed_and_grown(shipped, words, grow):
    """The words' own mask, eroded; nothing stands in for the check."""
    editor = Editor(shipped)
    source, grow = editor.generate(CAT, seed=11, guidance_scale=4.0), grow * editor.native_size // 128
    small, result = editor.preview(words, grow=grow).mask.grid, editor.edit(words, grow=grow)
    assert result.mask.area > 2 * small.mean() and (result.mask.grid >= small).all()
    assert any("the mask was grown" in note for note in result.stats.notes) and not result.stats.fallback
    assert pixels_outside(result, source)


def drifting(grid, *, is_global):
    def compare(self, *_):
        raise drift_check.DriftDetected(grid, self.step, is_global=is_global)

    return compare


def test_drift_everywhere_runs_dense_and_says_so(editor, monkeypatch):
    small(monkeypatch, masks_square(editor))
    monkeypatch.setattr("fisedit.masking.drift_check.DriftCheck.compare", drifting(None, is_global=True))
    result = editor.edit(DOG)
    assert "changed the picture everywhere" in result.stats.fallback and result.mask.grid.all()
    assert result.stats.unet_evaluations_sparse == 0


def test_given_masks_are_not_doubted(editor, monkeypatch):
    monkeypatch.setattr("fisedit.masking.drift_check.DriftCheck.compare", drifting(None, is_global=True))
    assert not editor.edit(DOG, mask=masks_square(editor)).stats.fallback


def test_the_check_costs_less_than_a_step(editor):

    result = editor.edit(DOG)
    assert not any("grown" in note for note in result.stats.notes)
    costs, grid = editor._engine.costs(result.config), result.latent_cells
    check = drift_check.plan_check(replace(result.mask, grid=grid), 6)
    extra = costs.check_macs(grid, result.run.dilation[check.step], check.cells)
    assert 0 < extra < 0.8 * costs.sparse_step(grid, result.run.dilation[check.step])
    whole = costs.sparse(grid, result.run.dilation, decoded_cells=dilate(grid, 1))
    shared = costs.branch() if result.run.dilation[0] is Step.DENSE else 0
    assert result.stats.macs == whole - shared + extra
