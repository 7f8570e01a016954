"""Masks of latent cells."""

from __future__ import annotations

import numpy as np

from fisedit.values import EditMask, MaskSource


def test_a_masks_former_names_are_those_of_its_maps():
    heatmap, cells = np.ones((2, 2), np.float32), np.eye(2, dtype=bool)
    mask = EditMask(cells, MaskSource.ATTENTION, heatmap=heatmap, other_objects=~cells)
    assert (mask.heat == heatmap).all() and (mask.others == ~cells).all()


def test_a_mask_is_shown_without_its_cells():
    assert len(repr(EditMask(np.ones((64, 64), bool), MaskSource.GIVEN))) < 100
