"""Regions as JSON equal the regions that Python joins; what is none is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fisedit import Region
from fisedit.errors import InputError
from fisedit.integrations.region_json import MAX_PARTS, parse_region, parse_regions
from fisedit.masking.region_arguments import cells_on_picture
from fisedit.masking.region_values import RegionCanvas

SIZE = 64, 48
GREY = Image.fromarray(np.repeat(np.arange(0, 256, 4, np.uint8)[None], 48, 0))
BOX, OTHER = [8, 8, 40, 32], [24, 0, 64, 16]


def load(name):
    assert name == "grey.png"
    return GREY


def levels(region):
    return region.bind(RegionCanvas(48, 64, SIZE)).resolve(None).levels


@pytest.mark.parametrize(
    ("value", "region"),
    [
        ({"box": BOX}, Region.box(*BOX)),
        ({"box": BOX, "grow": 1, "feather": 2}, Region.box(*BOX).grow(1).feather(2)),
        ({"border": [8, 0, 16, 0]}, Region.border(left=8, right=16)),
        ({"everywhere": True}, Region.everywhere()),
        ({"mask": "grey.png"}, Region.mask(GREY)),
        ({"mask": "grey.png", "soft": True}, Region.mask(GREY, soft=True)),
        ({"any": [{"box": BOX}, {"box": OTHER}]}, Region.box(*BOX) | Region.box(*OTHER)),
        ({"all": [{"box": BOX}, {"box": OTHER}], "grow": 1}, (Region.box(*BOX) & Region.box(*OTHER)).grow(1)),
        (
            {"minus": [{"everywhere": True}, {"box": BOX}, {"box": OTHER}]},
            Region.everywhere() - Region.box(*BOX) - Region.box(*OTHER),
        ),
    ],
)
def test_regions_of_json(value, region):
    assert np.array_equal(levels(parse_region(value, load)), levels(region))
    assert not parse_region(value, load).reads_words


def test_words():
    found = parse_region({"words": ["cat", "dog"], "instance": 1}, load)
    assert found.named_words == ("cat", "dog") and parse_region({"words": []}, load).is_default
    assert parse_region({"all": [{"box": BOX}, {"any": [{"words": []}, {"box": OTHER}], "grow": 1}]}, load).reads_words
    with pytest.raises(InputError, match="once it is opened"):
        cells_on_picture(found, SIZE)


def test_what_a_detector_finds():
    asked = []

    def detect(*arguments):
        asked.append(arguments)
        return Region.box(*BOX)

    least = parse_region({"detected": []}, load, detect)
    found = parse_region({"detected": ["cat"], "threshold": 0.7, "instance": 1, "grow": 1}, load, detect)
    assert np.array_equal(levels(least), levels(Region.box(*BOX)))
    assert np.array_equal(levels(found), levels(Region.box(*BOX).grow(1)))
    assert asked == [([], 0.5, "all"), (["cat"], 0.7, "1")]
    with pytest.raises(InputError, match="needs a detector, got none"):
        parse_region({"detected": ["cat"]}, load)
    with pytest.raises(InputError, match="must be a list of labels, got 'cat'"):
        parse_region({"detected": "cat"}, load, detect)


def test_regions_with_prompts():
    pairs = parse_regions([{"region": {"box": BOX}, "prompt": "a dog"}, {"region": {"words": []}, "prompt": ""}], load)
    assert [prompt for _, prompt in pairs] == ["a dog", ""]
    assert np.array_equal(levels(pairs[0][0]), levels(Region.box(*BOX)))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "one of words, mask"),
        ([], "one of words, mask"),
        ("box", "one of words, mask"),
        ({}, "one of words, mask"),
        ({"box": BOX, "words": []}, "one of words, mask"),
        ({"box": BOX, "soft": True}, "cannot have soft"),
        ({"box": BOX, "instance": 0}, "cannot have instance"),
        ({"box": BOX[:3]}, "in pixels"),
        ({"box": "0,0,8,8"}, "in pixels"),
        ({"box": [0, 0, True, 8]}, "in pixels"),
        ({"box": [0, 0, float("nan"), 8]}, "in pixels"),
        ({"box": [0, 0, 10**400, 8]}, "in pixels"),
        ({"points": [[10**400, 1]]}, "must be pairs"),
        ({"border": [10**5000, 0, 0, 0]}, "in pixels"),
        ({"box": [8, 0, 8, 8]}, "left < right"),
        ({"border": [0, 0, 0, 0]}, "border"),
        ({"border": [0.5, 0, 0, 0]}, "border"),
        ({"everywhere": False}, "must be true"),
        ({"words": "cat"}, "list of words"),
        ({"words": [1]}, "list of words"),
        ({"words": ["cat"] * 17}, "at most 16"),
        ({"words": ["cat"], "instance": "left"}, "instance"),
        ({"mask": 7}, "must be text"),
        ({"mask": "grey.png", "soft": 1}, "true or false"),
        ({"any": []}, "list of regions"),
        ({"any": {"box": BOX}}, "list of regions"),
        ({"all": [{"box": BOX}, 7]}, "one of words, mask"),
        ({"box": BOX, "grow": "much"}, "grow must be"),
        ({"box": BOX, "grow": 10**5000}, "grow must be .* too large to print"),
        ({"box": BOX, "feather": -1}, "feather must be"),
        ({"any": [{"box": BOX}] * MAX_PARTS}, "at most 64"),
    ],
)
def test_no_regions(value, why):
    with pytest.raises(InputError, match=why) as caught:
        parse_region(value, load)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [{}, [], "text", None, [7], [{"region": {"box": BOX}}], [{"region": {}, "prompt": 7}]]
)
def test_no_regions_with_prompts(value):
    with pytest.raises(InputError, match="regions must be"):
        parse_regions(value, load)
