"""What an edit changed outside its mask, for pictures of any size beside the canvas."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fisedit.errors import SessionError
from fisedit.history import EditResult, History
from fisedit.storage.canvas import canvas_size, paste_edit
from fisedit.values import EditMask, MaskSource, cell_pixels
from tests.support.edits import config_of


def result(image: Image.Image, grid: np.ndarray) -> EditResult:
    return EditResult("1", "0", config_of(), image, EditMask(grid, MaskSource.GIVEN), None, None)


@pytest.mark.parametrize(
    ("mode", "size"), [("RGB", (500, 750)), ("L", (750, 500)), ("RGBA", (127, 65)), ("RGB", (901, 333))]
)
def test_only_pixels_outside_the_mask_count_as_changed_outside(mode, size):
    """Random boxes in opened pictures whose sides are no multiple of the canvas."""
    chance, shape = np.random.default_rng(0), (*size[::-1], 3)
    before = Image.fromarray(chance.integers(0, 128, shape, np.uint8)).convert(mode)
    canvas = canvas_size(size, 128)
    painted = Image.new("RGB", canvas, (255, 255, 255))
    for _ in range(20):
        grid = np.zeros((canvas[1] // 8, canvas[0] // 8), bool)
        top, left = (chance.integers(0, n) for n in grid.shape)
        grid[top : chance.integers(top, len(grid)) + 1, left : chance.integers(left, grid.shape[1]) + 1] = True
        after = paste_edit(before, painted, grid)
        assert result(after, grid).changed_outside(result(before, grid)) == 0
        everywhere = result(Image.new(mode, size, "white"), grid)
        assert everywhere.changed_outside(result(before, grid)) == (~cell_pixels(grid, size)).sum()


def test_nothing_lies_outside_a_mask_of_everything():
    grid, before = np.ones((4, 4), bool), Image.new("RGB", (32, 32))
    assert result(Image.new("RGB", (32, 32), "white"), grid).changed_outside(result(before, grid)) == 0


def test_one_pixel_beside_the_mask_is_seen():
    grid = np.zeros((12, 8), bool)
    grid[3:7, 2:5] = True
    before, size = Image.new("RGB", (500, 750)), (500, 750)
    inside = cell_pixels(grid, size)
    beside = (np.roll(inside, 1, 0) | np.roll(inside, -1, 0) | np.roll(inside, 1, 1) | np.roll(inside, -1, 1)) & ~inside
    rows, columns = beside.nonzero()
    for y, x in list(zip(rows.tolist(), columns.tolist(), strict=True))[::40]:
        after = before.copy()
        after.putpixel((x, y), (0, 0, 1))
        assert result(after, grid).changed_outside(result(before, grid)) == 1


def test_a_pixel_belongs_to_the_cell_that_its_centre_lies_in():
    grid = np.random.default_rng(1).random((3, 5)) < 0.5
    for width, height in ((5, 3), (40, 24), (17, 10), (4, 2), (501, 299)):
        exact = [
            [grid[(2 * y + 1) * 3 // (2 * height), (2 * x + 1) * 5 // (2 * width)] for x in range(width)]
            for y in range(height)
        ]
        assert np.array_equal(cell_pixels(grid, (width, height)), exact)


def test_a_lineage_may_be_longer_than_the_stack():
    history, first = History(), result(Image.new("RGB", (8, 8)), np.ones((1, 1), bool))
    count = sys.getrecursionlimit() + 10
    for number in range(count):
        history.add(replace(first, id=str(number), parent=str(number - 1) if number else None))
    assert [one.id for one in history.lineage(str(count - 1))] == [str(number) for number in range(count)]


def test_redo_goes_to_the_child_visited_last():
    history, first = History(), result(Image.new("RGB", (8, 8)), np.ones((1, 1), bool))
    for number, parent in enumerate((None, "0", "0")):
        history.add(replace(first, id=str(number), parent=parent))
    history.undo()
    assert history.redo_id == "2" and history.redo().id == "2" and history.redo_id is None


def test_redo_outlives_the_deletion_of_another_child():
    history, first = History(), result(Image.new("RGB", (8, 8)), np.ones((1, 1), bool))
    for number, parent in enumerate((None, "0", "0")):
        history.add(replace(first, id=str(number), parent=parent))
    history.undo()
    assert history.delete("1") == ("1",)
    assert history.redo().id == "2"


def test_redo_can_be_kept_over_what_is_added_and_deleted():
    history, first = History(), result(Image.new("RGB", (8, 8)), np.ones((1, 1), bool))
    for number, parent in enumerate((None, "0", "0")):
        history.add(replace(first, id=str(number), parent=parent))
    history.undo()
    redo_ids = history.redo_ids()
    history.add(replace(first, id="3", parent="0"))
    history.delete("3")
    assert history.redo_id is None
    history.restore_redo(redo_ids)
    assert history.redo_id == "2"
    history.delete("2")
    history.restore_redo(redo_ids)
    assert history.redo_id is None


def test_what_is_no_id_is_refused_in_one_line():
    for wrong in ([], 0, None, "7"):
        with pytest.raises(SessionError, match="no result"):
            History().checkout(wrong)


def test_a_parent_of_another_size_is_refused():
    one, other = (result(Image.new("RGB", (side, side)), np.ones((1, 1), bool)) for side in (8, 16))
    with pytest.raises(SessionError, match="pass its parent"):
        one.changed_outside(other)
