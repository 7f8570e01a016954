"""Values that need no model: the first step of an edit and its strength, which say the same."""

from __future__ import annotations

import numpy as np
import pytest

from fisedit.values import EditMask, MaskSource, first_step, strength_for_start


@pytest.mark.parametrize("steps", [1, 5, 10, 25, 999])
def test_a_first_step_s_strength_gives_that_step_again(steps):
    strengths = [strength_for_start(start, steps) for start in range(steps)]
    assert all(0 < strength <= 1 for strength in strengths)
    assert [first_step(strength, steps) for strength in strengths] == list(range(steps))


def test_a_masks_former_names_are_those_of_its_maps():
    heatmap, cells = np.ones((2, 2), np.float32), np.eye(2, dtype=bool)
    mask = EditMask(cells, MaskSource.ATTENTION, heatmap=heatmap, other_objects=~cells)
    assert (mask.heat == heatmap).all() and (mask.others == ~cells).all()


def test_a_mask_is_shown_without_its_cells():
    assert len(repr(EditMask(np.ones((64, 64), bool), MaskSource.GIVEN))) < 100
