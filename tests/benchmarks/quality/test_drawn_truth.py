"""The drawn truth stands where the edited picture has the new thing."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from benchmarks.quality.drawn_truth import drawn_truth
from benchmarks.scenes.layout import SceneChange
from benchmarks.scenes.scene import PlacedObject, Scene, render
from tests.support.quality import SWAP, TWO, needs_font

pytestmark = needs_font

PLACES = [(0, 0, 0), (3, -2, -1), (-5, -6, 0), (1, 0, -2)]


@pytest.mark.parametrize(("right", "down", "larger"), PLACES)
def test_a_new_thing_is_found_where_it_stands(right, down, larger):
    one = Scene("beach", 16, (PlacedObject("cat", 0, 30, 10),))
    both = Scene("beach", 16, (*one.objects, PlacedObject("car", 16, 30, 12)))
    shown = render(both.change(1, left=16 + right, bottom=30 + down, size=12 + larger))
    truth = drawn_truth(SceneChange("insert", one, both, 1), Image.fromarray(shown.pixels))
    assert np.array_equal(truth.pixels, shown.pixels) and np.array_equal(truth.thing, shown.masks[1])


def test_a_thing_with_another_colour_stays_where_it_was():
    change = SceneChange("recolour", TWO, TWO.change(1, colour="blue"), 1)
    elsewhere = render(TWO.change(1, left=10)).pixels
    truth, drawn = drawn_truth(change, Image.fromarray(elsewhere)), render(change.after)
    assert np.array_equal(truth.pixels, drawn.pixels) and np.array_equal(truth.thing, drawn.masks[1])


def test_the_thing_is_the_accessory_or_nothing():
    dressed, shown = TWO.change(0, accessory="hat", size=10), Image.fromarray(render(SWAP.after).pixels)
    hat = drawn_truth(SceneChange("dress", dressed.change(0, accessory=""), dressed, 0), shown).thing
    assert np.array_equal(hat, render(dressed).masks[1])
    assert not drawn_truth(SceneChange("delete", TWO, TWO.without(0), 0), shown).thing.any()
