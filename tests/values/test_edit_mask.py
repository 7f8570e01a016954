"""Masks of latent cells."""

from __future__ import annotations

import numpy as np

from fisedit.values import EditMask, MaskSource


def test_a_mask_is_shown_without_its_cells():
    assert len(repr(EditMask(np.ones((64, 64), bool), MaskSource.GIVEN))) < 100
