"""Regions: what they are built from, and what union, intersection, difference, growing and feathering make of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as quantified
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from scipy.ndimage import grey_dilation, grey_erosion

from fisedit import Editor, Region
from fisedit.errors import InputError, MaskError
from fisedit.masking import masks
from fisedit.masking.region_arguments import cells_on_picture
from fisedit.masking.region_values import RegionCanvas
from fisedit.values import EditMask, MaskSource
from tests.support.edits import CAT, DOG, pixels_outside, same
from tests.support.grids import grids, square

CANVAS = RegionCanvas(64, 96, (96, 64))
LEVELS = arrays(np.uint8, (8, 12), elements=st.sampled_from([0, 40, 128, 255]))
WORDS = square(8, 12, 2, 3, 3)


class Scope:
    """A picture in which words attend to `WORDS`, or nowhere."""

    cells = (8, 12)

    def __init__(self, reason: str = "") -> None:
        self._reason = reason
        self.asked: list[tuple[str, ...]] = []

    def by_words(self, options):
        self.asked.append(options.words)
        grid = np.ones(self.cells, bool) if self._reason else WORDS
        return EditMask(grid, MaskSource.ATTENTION, 0.05 if self._reason else 0.9), self._reason

    def by_points(self, inside, outside):
        """The cells of the points inside, and the last column if there are others."""
        grid = np.zeros(self.cells, bool)
        for x, y in inside:
            grid[int(y) // 8, int(x) // 8] = True
        grid[:, -1] |= bool(outside)
        return grid


def levels(region: Region, scope: Scope | None = None) -> np.ndarray:
    return region.bind(CANVAS).resolve(scope or Scope()).levels


def test_words_without_confidence_leave_it_to_marks():
    mark = Region.box(0, 0, 16, 16)
    alone, sure = levels(mark), Scope()
    both = levels(mark | Region.words())
    assert both.any() and not np.array_equal(both, alone)
    assert np.array_equal(levels(Region.words().unless_unsure() | mark, sure), both) and sure.asked
    unsure = Region.words().grow(1).unless_unsure(0.95)
    assert np.array_equal(levels(unsure | mark), alone)
    found = (unsure | mark).bind(CANVAS).resolve(Scope())
    assert found.mask.source is MaskSource.GIVEN and not found.reason
    assert "confidence of 0.90" in unsure.bind(CANVAS).resolve(Scope()).reason
    assert np.array_equal(levels(mark.unless_unsure(1)), alone)  # a mask needs none


def given_levels(values: np.ndarray) -> Region:
    return Region.mask(np.kron(values, np.ones((8, 8), np.uint8)), soft=True)


@quantified(LEVELS, LEVELS)
def test_sets_of_soft_masks_are_the_fuzzy_ones(a, b):
    """Zadeh's: the greater, the lesser, and what the other leaves."""
    one, other = given_levels(np.maximum(a, 2)), given_levels(np.maximum(b, 2))
    a, b = np.maximum(a, 2), np.maximum(b, 2)  # an array of 0 and 1 alone is read as booleans
    assert np.array_equal(levels(one | other), np.maximum(a, b))
    assert np.array_equal(levels(one & other), np.minimum(a, b))
    assert np.array_equal(levels(one - other), np.minimum(a, 255 - b))


@quantified(arrays(bool, (8, 12)), arrays(bool, (8, 12)))
def test_sets_of_hard_masks_are_sets(a, b):
    one, other = Region.mask(a), Region.mask(b)
    for got, expected in ((one | other, a | b), (one & other, a & b), (one - other, a & ~b)):
        mask = got.bind(CANVAS).resolve(Scope()).mask
        assert np.array_equal(mask.grid, expected) and mask.levels is None


@quantified(LEVELS, st.integers(-3, 3))
def test_growing_is_greyscale_morphology(values, cells):
    region, footprint = given_levels(np.maximum(values, 2)), np.ones((2 * abs(cells) + 1,) * 2, bool)
    morphology = grey_dilation if cells > 0 else grey_erosion
    expected = morphology(np.maximum(values, 2), footprint=footprint, mode="nearest") if cells else values
    assert np.array_equal(levels(region.grow(cells)), np.maximum(expected, 2))


def test_a_feathered_border_lies_inside_and_falls_off_by_distance():
    region = Region.mask(square(8, 12, 0, 0, 5)).feather(2)
    expected = np.zeros((8, 12))
    expected[:5, :5], expected[:4, :4], expected[:3, :3] = 85, 170, 255  # the picture's own border is none
    assert np.array_equal(levels(region), expected)
    assert np.array_equal(levels(Region.everywhere().feather(3)), np.full((8, 12), 255))
    assert not levels(Region.mask(np.zeros((8, 12), bool)).feather(3)).any()


def test_boxes_are_the_cells_that_their_pixels_lie_in():
    assert np.array_equal(levels(Region.box(8, 16, 24, 40)) > 0, square(8, 12, 2, 1, 3) & (np.arange(12) < 3))
    one_pixel = levels(Region.box(95, 63, 96, 64))
    assert one_pixel[7, 11] == 255 and (one_pixel > 0).sum() == 1
    assert np.array_equal(levels(Region.box(-50, -50, 500, 500)), levels(Region.everywhere()))
    photograph = RegionCanvas(64, 96, (3000, 2000))
    mask = Region.box(0, 0, 250, 250).bind(photograph).resolve(Scope()).mask
    assert np.array_equal(mask.grid, square(8, 12, 0, 0, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Region.box(5, 0, 5, 9), "a box must have left < right and top < bottom, got (5, 0, 5, 9)"),
        (lambda: Region.box(0, float("nan"), 5, 9), "a box must be four numbers left, top, right, bottom, got"),
        (lambda: Region.box(0, "1", 5, 9), "a box must be four numbers"),
        (lambda: Region.everywhere().grow(65), "grow must be latent cells in [-64, 64], got 65"),
        (lambda: Region.everywhere().grow(True), "grow must be latent cells in [-64, 64], got True"),
        (lambda: Region.everywhere().feather(-1), "feather must be latent cells in [0, 64], got -1"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(InputError) as raised:
        make()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (Region.box(96, 0, 120, 10), "a box must lie on the picture's 96x64 pixels, got (96, 0, 120, 10)"),
        (Region.mask(np.zeros((5, 5))), "mask must have the picture's 96x64 pixels"),
        (Region.mask(np.zeros((5, 5)), soft=True), "mask must have the picture's 96x64 pixels"),
        (Region.mask(np.full((64, 96), 1.5), soft=True), "mask of float64 must hold values from 0 to 1"),
        (Region.mask("a.png"), "mask must be a PIL image, a numpy array or an EditMask, got str"),
    ],
)
def test_what_does_not_fit_the_picture(region, message):
    for nested in (region, region.grow(1), Region.words() | region, Region.everywhere() - region):
        with pytest.raises(MaskError) as raised:
            nested.bind(CANVAS)
        assert str(raised.value).startswith(message)


def test_words_are_asked_for_where_they_are():
    scope = Scope()
    assert np.array_equal(levels(Region.words("cat") | Region.words(), scope) > 0, WORDS)
    assert scope.asked == [("cat",), ()]
    assert (Region.words("cat") - Region.words("tree")).named_words == ("cat", "tree")
    assert Region.words().is_default and not Region.words("cat").is_default
    assert Region.words().grow(2).is_default and not Region.words().feather(2).is_default


def test_words_that_point_nowhere_are_left_to_the_other_side():
    nowhere, box = Scope("the words point nowhere"), Region.box(0, 0, 8, 8)
    for region in (Region.words() | box, box | Region.words()):
        found = region.bind(CANVAS).resolve(nowhere)
        assert (found.mask.area, found.reason) == (1 / 96, "")
    found = (Region.words() & box).bind(CANVAS).resolve(nowhere)
    assert (found.mask.area, found.reason, found.mask.confidence) == (1 / 96, "", 0.05)
    assert Region.words().bind(CANVAS).resolve(nowhere).reason == "the words point nowhere"
    found = (Region.everywhere() - Region.words()).bind(CANVAS).resolve(nowhere)
    assert found.mask.grid.all()  # nothing was found to take out


def test_what_was_taken_out_stays_out_however_the_mask_grows():
    box = Region.box(0, 0, 16, 16)
    out = levels(box) > 0
    assert np.array_equal((Region.words() - box).bind(CANVAS).protected(Scope()), out)
    assert np.array_equal(((Region.words() - box) & Region.words()).bind(CANVAS).protected(Scope()), out)
    assert not ((Region.words() - box) | Region.words()).bind(CANVAS).protected(Scope()).any()


def test_soft_levels_of_every_form_of_a_mask():
    grey = np.zeros((64, 96), np.uint8)
    grey[0, 0], grey[63, 95], grey[10, 10] = 200, 7, 255
    expected = np.zeros((8, 12), np.uint8)
    expected[0, 0], expected[7, 11], expected[1, 1] = 200, 7, 255
    for form in (grey, grey / 255, Image.fromarray(grey), grey.astype(np.int64)):
        assert np.array_equal(masks.levels_of_mask(form, 64, 96), expected)
    mask = EditMask(expected > 0, MaskSource.GIVEN, levels=expected)
    assert np.array_equal(masks.levels_of_mask(mask, 64, 96), expected)
    assert np.array_equal(masks.levels_of_mask(replace(mask, levels=None), 64, 96), 255 * (expected > 0))
    assert np.array_equal(masks.levels_of_mask(expected > 0, 64, 96), 255 * (expected > 0))
    large = np.kron(grey, np.ones((5, 7), np.uint8))
    assert np.array_equal(masks.levels_of_mask(large, 64, 96, (672, 320)), expected)
    assert np.array_equal(masks.levels_of_mask(mask.image(), 64, 96), expected)


QUICK = {"seed": 7, "num_inference_steps": 6, "width": 128, "height": 128}


@pytest.fixture(scope="module")
def source_editor():
    editor = Editor.from_pretrained("demo", local_files_only=True)
    editor.generate(CAT, **QUICK)
    return editor


@pytest.fixture
def editor(source_editor):
    source_editor.history.checkout("0")
    return source_editor


def test_a_region_is_what_the_older_arguments_say(editor):
    grid, keep = grids(16, 16)["square"], square(16, 16, 4, 4, 2)
    for arguments, region in (
        ({"mask": grid, "protect": keep, "grow": 1}, Region.mask(grid).grow(1) - Region.mask(keep)),
        ({"words": ["cat"], "grow": -1}, Region.words("cat").grow(-1)),
        ({}, Region.words()),
    ):
        said = editor.edit(DOG, **arguments)
        editor.undo()
        told = editor.edit(DOG, region=region)
        editor.undo()
        assert (
            same(said, told) and np.array_equal(said.mask.grid, told.mask.grid) and said.stats.macs == told.stats.macs
        )
    with pytest.raises(InputError, match="give a region, or a mask and words, got both"):
        editor.edit(DOG, region=Region.words(), mask=grid)
    for words in ({"words": ["cat"]}, {"instance": 0}, {"probe_steps": 1}):
        with pytest.raises(InputError, match="instance, mask_method and probe_steps, got both; join"):
            editor.edit(DOG, mask=grid, **words)
    with pytest.raises(InputError, match=r"region must be a Region, got ndarray; use Region.mask or Region.words"):
        editor.edit(DOG, region=grid)


def test_words_in_a_box_and_around_a_thing(editor):
    source, box = editor.current, Region.box(0, 0, 64, 128)
    inside = editor.edit(DOG, region=Region.words() & box)
    assert pixels_outside(inside, source) and not inside.mask.grid[:, 8:].any()
    editor.undo()
    joined = editor.edit(DOG, region=(Region.words() | Region.box(0, 0, 16, 16)).feather(1))
    assert pixels_outside(joined, source) and joined.mask.grid[:2, :2].all() and joined.mask.levels is not None
    assert joined.mask.source is MaskSource.ATTENTION
    editor.undo()
    nothing = editor.edit(DOG, region=Region.box(0, 0, 64, 64) & Region.box(64, 64, 128, 128))
    assert nothing.stats.notes == ("nothing was edited: nothing is left of the mask",)
    editor.undo()
    with pytest.raises(InputError, match=r"words must be words of the old or the new prompt, got .zeppelin."):
        editor.edit(DOG, region=Region.words("zeppelin") | Region.box(0, 0, 8, 8))


def test_points_are_placed_on_the_canvas():
    whole = RegionCanvas(64, 96, (192, 128))
    found = Region.points((10, 20), (180, 120), outside=[(0, 0)]).bind(whole).resolve(Scope()).mask
    assert found.source is MaskSource.GIVEN and found.grid[1, 0] and found.grid[7, 11] and found.grid[:, -1].all()
    bound = Region.points((10, 20)).bind(whole)
    assert bound.bind(whole) is bound  # as a request that is changed binds its region again
    part = RegionCanvas(64, 96, (192, 128), crop=(96, 64, 192, 128))
    picked = Region.points((100, 70), outside=[(0, 0)]).bind(part).resolve(Scope()).mask.grid
    assert picked[0, 0] and picked.sum() == 1  # the point outside lies beside the part
    beside = Region.points((3, 3))
    assert not (beside | Region.box(100, 70, 108, 78)).bind(part).resolve(Scope()).mask.grid[:, -1].any()
    with pytest.raises(MaskError, match="must lie on the opened part"):
        beside.bind(part)


def test_points_have_no_place_before_their_picture_is_opened():
    region = Region.points((3, 3)).grow(1) | Region.box(0, 0, 8, 8)
    assert region.reads_attention and not region.reads_words and not region.is_default
    with pytest.raises(InputError, match="once it is opened"):
        cells_on_picture(region, (64, 64))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Region.points, "must have one"),
        (lambda: Region.points((1, 2, 3)), "must be pairs"),
        (lambda: Region.points(5), "must be pairs"),
        (lambda: Region.points("ab"), "must be pairs"),
        (lambda: Region.points((1, float("nan"))), "must be pairs"),
        (lambda: Region.points((1, 2), outside=7), "must be pairs"),
        (lambda: Region.points((1, 2), outside=[(True, 1)]), "must be pairs"),
        (lambda: Region.points(*[(1, 2)] * 65), "at most 64 points"),
    ],
)
def test_points_that_are_none(make, says):
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Region.box(0, 0, 10**400, 8), "a box must be four numbers"),
        (lambda: Region.box(0, 0, "8", 8), "a box must be four numbers"),
        (lambda: Region.points((10**400, 1)), "must be pairs"),
        (lambda: Region.border(10**5000), "a border must be pixels"),
        (lambda: Region.words(1), "words must be a list of words"),
        (lambda: Region.words(method=["things"]), "mask_method must be one of"),
        (lambda: Region.words().grow(10**5000), "grow must be latent cells"),
        (lambda: Region.words().feather(float("nan")), "feather must be latent cells"),
        (lambda: Region.union([]), "a union must be of one or more Regions"),
        (lambda: Region.union(None), "a union must be of one or more Regions"),
        (lambda: Region.union([Region.words(), "cat"]), "a union must be of one or more Regions"),
    ],
)
def test_bounds_that_are_no_numbers_and_regions_that_are_none(make, says):
    with pytest.raises(InputError, match=says) as raised:
        make()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250


@pytest.mark.parametrize("at", [(96, 0), (0, 64), (-1, 3)])
def test_points_beside_the_picture(at):
    with pytest.raises(MaskError, match="must lie on the picture's 96x64 pixels"):
        Region.points((1, 1), at).bind(CANVAS)
