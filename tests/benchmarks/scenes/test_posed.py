"""Drawn heads as drives say: what is drawn at rest is the scene's own picture, and a drive moves the head alone."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scenes.layout import scene_for
from benchmarks.scenes.posed import EYES, SHIFT, TILT, PosedScene, render_posed, rest, sample_posed
from benchmarks.scenes.scene import SceneError, render
from fisedit.values.drive import Drive
from tests.support.quality import needs_font

pytestmark = needs_font

CAT = scene_for("a cat and a cake on a beach", 7)


def posed(**changes):
    _, _, _, x, y, scale = rest(CAT, 0).pose
    pose = [0, 0, changes.get("tilt", 0), x + changes.get("across", 0), y, scale * changes.get("growth", 1)]
    return PosedScene(CAT, 0, Drive(pose, changes.get("expression", ())))


def centre(mask):
    return np.array([each.mean() for each in np.nonzero(mask)])


def test_at_rest_it_is_the_scene():
    pixels, head = render_posed(posed().at_rest)
    whole = render(CAT)
    assert np.abs(pixels.astype(int) - whole.pixels).mean() < 1  # but for the glyph's smoother edge
    overlap = (head & whole.masks[0]).sum() / (head | whole.masks[0]).sum()
    assert overlap > 0.95


def test_a_drive_moves_the_head_alone():
    still, at_rest = render_posed(posed())
    tilted, head = render_posed(posed(tilt=30))
    outside = ~(at_rest | head)
    assert (tilted[outside] == still[outside]).all() and (tilted != still).any()
    assert np.abs(centre(head) - centre(at_rest)).max() < 4
    shifted, moved = render_posed(posed(across=0.25))
    assert np.allclose(centre(moved) - centre(at_rest), [0, 32], atol=1)
    grown = render_posed(posed(growth=1.2))[1]
    assert grown.sum() / at_rest.sum() == pytest.approx(1.44, rel=0.03)
    assert (shifted != still).any()


def test_counterclockwise():
    """A head that is turned by a quarter has what was at its top at its left."""
    upright, quarter = (render_posed(posed(tilt=tilt))[1] for tilt in (0, 90))
    x, y, size = (*(128 * (1 + at) for at in rest(CAT, 0).pose[3:5]), 256 * rest(CAT, 0).pose[5])
    square = [slice(round(at - size / 2), round(at + size / 2)) for at in (y, x)]
    turned = np.rot90(upright[tuple(square)])
    assert (turned == quarter[tuple(square)]).mean() > 0.97


@pytest.mark.parametrize("word", EYES)
def test_eyes_close_one_by_one(word):
    scene = scene_for(f"a {word} on a beach", 3)

    def drawn(**expression):
        return render_posed(PosedScene(scene, 0, Drive(rest(scene, 0).pose, expression)))[0].astype(int)

    opened, left, right = drawn(), drawn(eyeBlinkLeft=1), drawn(eyeBlinkRight=1)
    middle = 128 * (1 + rest(scene, 0).pose[3])
    columns = [np.nonzero((shut != opened).any((0, 2)))[0] for shut in (left, right)]
    assert columns[0].min() > middle > columns[1].max()  # a face's own left eye is on the picture's right
    both = drawn(eyeBlinkLeft=1, eyeBlinkRight=1)
    assert np.abs((both - opened) - (left - opened) - (right - opened)).max() == 0


def test_samples_are_near_the_scene_and_on_the_picture():
    for seed in range(40):
        one = sample_posed(np.random.default_rng(seed))
        _, _, tilt, x, y, scale = one.drive.pose
        _, _, _, rest_x, rest_y, _ = one.at_rest.drive.pose
        assert abs(tilt) <= TILT and max(abs(x), abs(y)) <= 1 - scale + 1e-9
        assert max(abs(x - rest_x), abs(y - rest_y)) <= SHIFT / 16 + 0.2  # and what keeps it on the picture
        assert one == sample_posed(np.random.default_rng(seed))


def test_what_has_no_face():
    with pytest.raises(SceneError, match=r"a head must be one of cat, .*, got 'cake'"):
        PosedScene(CAT, 1, Drive())
