"""Sizes that a model is told: names and numbers are checked in one line, and what is as usual is left out."""

from __future__ import annotations

import pytest

from fisedit.errors import InputError
from fisedit.values.sizes import Sizes, make_sizes


def test_sizes_are_read_from_texts_and_mappings():
    told = make_sizes(["original-size=512, 768", "crops_coords_top_left=0,64"])
    assert told == Sizes((512, 768), (0, 64)) == make_sizes(told) == make_sizes(told.as_dict())
    assert told.numbers((64, 128)) == ((512, 768, 0, 64, 64, 128),) * 2
    for nothing in (None, {}, (), {"target_size": None, "negative_crops_coords_top_left": [0, 0]}):
        assert make_sizes(nothing) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": (1, 1)}, "sizes must be of crops_coords_top_left, .*, got 'size'"),
        ({"original_size": (0, 64)}, r"original_size must be height and width, two whole numbers from 1 .*\(0, 64\)"),
        ({"crops_coords_top_left": (0, -1)}, "crops_coords_top_left must be top and left"),
        ({"target_size": 64}, "target_size must be height and width"),
        ({"target_size": (64.5, 64)}, "target_size must be height and width"),
        ({"negative_target_size": (64, 64)}, "must be given together, got negative_target_size; give both"),
        (["original_size=512x768"], "sizes must be as original_size=512,768, got 'original_size=512x768'"),
        (5, "sizes must map names to two numbers"),
    ],
)
def test_other_values_are_refused(given, words):
    with pytest.raises(InputError, match=words) as caught:
        make_sizes(given)
    assert "\n" not in str(caught.value)
