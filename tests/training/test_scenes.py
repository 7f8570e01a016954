"""The renderer is ground truth: deterministic, exact masks, exact words, and one change changes one place."""

import subprocess
import sys

import numpy as np
import pytest

from training import drawing
from training.drawing import FontMissing, emoji_font, glyph_pixels, paste
from training.scenes import Placed, Scene, SceneError, render, sample_scene
from training.vocabulary import BACKGROUND, THING, THINGS

pytestmark = pytest.mark.skipif(
    not any(path.is_file() for path in drawing.FONT_PATHS), reason="Noto Color Emoji is not installed"
)
CAT_AND_CAKE = Scene("beach", 8, (Placed("cat", 0, 14, 7), Placed("cake", 9, 14, 6)))


def scenes(count: int = 40) -> list[Scene]:
    return [sample_scene(np.random.default_rng(seed)) for seed in range(count)]


def test_same_seed_same_scene_and_pixels() -> None:
    first, second = (sample_scene(np.random.default_rng(5)) for _ in range(2))
    assert first == second
    assert np.array_equal(render(first).pixels, render(second).pixels)
    assert sample_scene(np.random.default_rng(6)) != first


def test_drawing_does_not_touch_the_cached_background() -> None:
    empty = Scene("beach", 8, ())
    before = render(empty).pixels
    render(CAT_AND_CAKE)
    assert np.array_equal(render(empty).pixels, before)


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.word)
def test_a_mask_is_where_drawing_the_object_changes_the_picture(thing: drawing.Background) -> None:
    plates = [np.full((64, 64, 3), colour, dtype=np.uint8) for colour in ((255, 0, 255), (0, 255, 0), (0, 0, 0))]
    drawn = [plate.copy() for plate in plates]
    masks = [paste(pixels, glyph_pixels(thing.glyph, 40), 8, 16) for pixels in drawn]
    changed = np.any([(new != old).any(-1) for new, old in zip(drawn, plates, strict=True)], axis=0)
    assert np.array_equal(masks[0], changed)
    assert changed.sum() > 100


def test_objects_stay_in_their_boxes_and_apart() -> None:
    for scene in scenes():
        drawn = render(scene)
        assert drawn.masks.sum(0).max() <= 1
        for placed, mask in zip(scene.objects, drawn.masks, strict=True):
            left, top, size = placed.pixel_box(128)
            assert mask[top : top + size, left : left + size].sum() == mask.sum() > 0


def test_a_later_object_hides_an_earlier_one_in_its_mask() -> None:
    both = render(Scene("beach", 8, (Placed("cat", 0, 14, 7), Placed("cake", 3, 14, 7))))
    alone = render(Scene("beach", 8, (Placed("cat", 0, 14, 7),)))
    assert not (both.masks[0] & both.masks[1]).any()
    assert both.masks[0].sum() < alone.masks[0].sum()


def test_spans_point_at_the_objects_words() -> None:
    for scene in scenes():
        assert tuple(scene.prompt[span.start : span.stop] for span in scene.spans) == scene.words


def test_prompts_read_like_sentences() -> None:
    moon = Placed("moon", 2, 5, 5)
    assert CAT_AND_CAKE.prompt == "a cat and a cake on a beach"
    three = Scene("night", 8, (Placed("fox", 0, 14, 5), Placed("tree", 5, 14, 5), Placed("car", 10, 14, 5), moon))
    assert three.prompt == "a fox, a tree and a car at night under the moon"
    assert Scene("snow", 8, (moon,)).prompt == "in the snow under the moon"


def test_replacing_an_object_changes_only_the_union_of_both_masks() -> None:
    for scene in scenes():
        word = next(
            word for word in THING if word not in scene.words and THING[word].in_sky == THING[scene.words[0]].in_sky
        )
        before, after = render(scene), render(scene.replace_object(0, word))
        changed = (before.pixels != after.pixels).any(-1)
        assert changed.any()
        assert not (changed & ~(before.masks[0] | after.masks[0])).any()
        assert np.array_equal(before.masks[1:], after.masks[1:])


def test_removing_an_object_changes_only_its_mask() -> None:
    before, after = render(CAT_AND_CAKE), render(CAT_AND_CAKE.without_object(1))
    changed = (before.pixels != after.pixels).any(-1)
    assert not (changed & ~before.masks[1]).any()


def test_another_background_keeps_every_mask() -> None:
    before, after = render(CAT_AND_CAKE), render(CAT_AND_CAKE.with_background("night"))
    assert np.array_equal(before.masks, after.masks)
    assert len({render(CAT_AND_CAKE.with_background(word)).pixels.tobytes() for word in BACKGROUND}) == len(BACKGROUND)


def test_any_multiple_of_sixteen_can_be_drawn() -> None:
    assert render(CAT_AND_CAKE, 256).pixels.shape == (256, 256, 3)
    with pytest.raises(SceneError, match="multiple of 16 pixels, got 100"):
        render(CAT_AND_CAKE, 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placed("zebra", 0, 14, 7), "object must be one of .*, got 'zebra'"),
        (lambda: Placed("cat", 12, 14, 7), "object box must lie in"),
        (lambda: Scene("moonbase", 8, ()), "background must be one of .*, got 'moonbase'"),
        (lambda: CAT_AND_CAKE.replace_object(1, "cat"), "objects must differ"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make: object, message: str) -> None:
    with pytest.raises(SceneError, match=message):
        make()


def test_a_missing_font_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "FONT_PATHS", ())
    emoji_font.cache_clear()
    with pytest.raises(FontMissing, match="apt-get install fonts-noto-color-emoji"):
        emoji_font()


def test_the_renderer_needs_no_torch() -> None:
    code = "import sys, training.scenes; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
