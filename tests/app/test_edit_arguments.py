"""What the page's settings mean for an edit."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from app.edit_arguments import region_of
from app.validation import RegionSettings
from fisedit.masking.region_values import RegionCanvas
from fisedit.values import EditMask, MaskSource


class Scope:
    """A picture in which words attend to the first row, and points mark the last one."""

    cells = (8, 8)

    def __init__(self, confidence: float) -> None:
        self._confidence = confidence

    def by_words(self, options):
        return EditMask(np.arange(64).reshape(8, 8) < 8, MaskSource.ATTENTION, self._confidence), ""

    def by_points(self, inside, outside):
        return np.arange(64).reshape(8, 8) >= 56


@pytest.mark.parametrize(("confidence", "rows"), [(0.61, [0, 4, 7]), (0.59, [4, 7])])
@pytest.mark.parametrize("only", [False, True])
def test_marks_replace_words_that_point_nowhere_and_add_to_others(confidence, rows, only):
    stroke = Image.new("L", (64, 64))
    stroke.paste(255, (0, 32, 64, 40))
    settings = RegionSettings(add=stroke, inside=((1, 1),), only=only)
    found = region_of(settings).bind(RegionCanvas(64, 64, (64, 64))).resolve(Scope(confidence)).mask.grid
    assert np.flatnonzero(found.any(1)).tolist() == ([4, 7] if only else rows)
