"""The thing under a point: of arrays, of drawn scenes by the demo model, and of photographs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.picks import measure_picks
from benchmarks.scenes.held_out import held_out
from fisedit import Region
from fisedit.bench.settings import EvaluationSettings
from fisedit.masking.segments import segment_tree

GRID = (8, 8)


def discs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A picture of a red and a blue disc on grey, each attending to itself, and the cells of both."""
    y, x = np.mgrid[:64, :64]
    red, blue = (np.hypot(y - 32, x - middle) < 11 for middle in (16, 48))
    pixels = np.full((64, 64, 3), 128, np.uint8)
    pixels[red], pixels[blue] = (220, 30, 30), (30, 30, 220)
    kind = (red + 2 * blue)[4::8, 4::8].ravel()
    affinity = (kind[:, None] == kind[None]).astype(np.float32)
    return pixels, affinity / affinity.sum(1, keepdims=True), np.stack([red, blue])


def iou(one: np.ndarray, other: np.ndarray) -> float:
    return (one & other).sum() / (one | other).sum()


def test_a_point_picks_its_disc_and_two_points_both():
    pixels, affinity, (red, blue) = discs()
    tree = segment_tree(pixels, affinity, GRID)
    assert iou(tree.pick([(32, 16)]), red) > 0.8 and iou(tree.pick([(32, 48)]), blue) > 0.8
    assert iou(tree.pick([(32, 16), (32, 48)]), red | blue) > 0.8
    assert iou(tree.pick([(32, 16)], [(32, 48)]), red) > 0.8


def test_a_segment_with_points_of_both_kinds_is_shared():
    pixels, affinity, (red, _) = discs()
    tree = segment_tree(pixels, affinity, GRID)
    upper = tree.pick([(28, 16)], [(36, 16)])
    assert upper[25:32, 16].all() and not upper[34:40, 16].any() and iou(upper, red) < 0.7


def test_a_second_point_in_a_segment_picks_the_next_larger_thing():
    pixels, affinity, _ = discs()
    tree = segment_tree(pixels, affinity, GRID)
    once, twice = tree.pick([(32, 16)]), tree.pick([(32, 16), (32, 16)])
    assert (once <= twice).all() and twice.sum() > once.sum()


def test_a_tree_covers_the_picture_once():
    pixels, affinity, _ = discs()
    tree = segment_tree(pixels, affinity, GRID)
    count = int(tree.leaves.max()) + 1
    assert len(tree.parents) == 2 * count - 1 and (tree.parents < 0).sum() == 1
    assert np.allclose(tree.shares[:count], np.bincount(tree.leaves.ravel()) / tree.leaves.size)
    root = int(np.flatnonzero(tree.parents < 0)[0])
    assert tree.ranges[root].tolist() == [0, count] and tree.shares[root] == pytest.approx(1)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            assert tree.ranges[parent, 0] <= tree.ranges[node, 0] < tree.ranges[node, 1] <= tree.ranges[parent, 1]
            assert tree.costs[node] <= tree.costs[parent]


def test_a_picture_of_one_colour_is_one_thing():
    tree = segment_tree(np.full((64, 64, 3), 7, np.uint8), np.full((64, 64), 1 / 64, np.float32), GRID)
    assert tree.pick([(3, 3)]).all()


@pytest.mark.slow
def test_points_pick_things_of_drawn_scenes():
    """The first of the development seed; the table is `python -m benchmarks.picks`."""
    found = measure_picks(
        EvaluationSettings(edits=8, seed=held_out().seeds["development"], dtype="fp32", local_files_only=True)
    )["rows"]
    assert np.median([row["iou_1"] for row in found]) >= 0.65
    assert np.median([row["iou_3"] for row in found]) >= 0.85


def test_an_edit_paints_what_a_point_picks_and_nothing_else(editor):
    source, words = editor.current, "a dog and a cake on a beach"
    cat = editor.preview(words).mask.grid
    row, column = np.argwhere(cat).mean(0).astype(int)
    picked = editor.edit(words, region=Region.points((8 * int(column) + 4, 8 * int(row) + 4)))
    assert picked.mask.grid[row, column] and iou(picked.mask.grid, cat) > 0.4
    outside = ~np.kron(picked.mask.grid, np.ones((8, 8), bool))
    assert (np.asarray(picked.image)[outside] == np.asarray(source.image)[outside]).all()
