"""What cannot be drawn is refused in one line."""

from __future__ import annotations

import pytest

from benchmarks.scenes import drawing
from benchmarks.scenes.drawing import FontMissing, emoji_font
from benchmarks.scenes.layout import scene_for
from benchmarks.scenes.scene import PlacedObject, Scene, SceneError, render
from fisedit.errors import FisEditError, InputError
from tests.support.quality import needs_font
from tests.support.scenes import CAT_AND_CAKE

pytestmark = needs_font


class TestErrors:
    def test_what_cannot_be_drawn_is_refused_in_one_line(self) -> None:
        for make, message in [
            (lambda: PlacedObject("zebra", 0, 14, 7), "object must be one of .*, got 'zebra'"),
            (lambda: PlacedObject("cat", 22, 28, 12), "object box must lie in"),
            (lambda: PlacedObject("cat", 0, 8, 12), "object box must lie in"),
            (lambda: PlacedObject("cat", 0, 8, 0), "object box must lie in"),
            (lambda: PlacedObject("cat", 0, 28, 12, "red"), "no cat comes in 'red'"),
            (lambda: PlacedObject("car", 0, 28, 12, "mauve"), "no car comes in 'mauve'"),
            (
                lambda: PlacedObject("car", 0, 28, 12, "", "huge"),
                "scale must be one of big, small or empty, got 'huge'",
            ),
            (lambda: PlacedObject("car", 0, 28, 12, accessory="hat"), "a car can't wear 'hat'"),
            (lambda: PlacedObject("cat", 0, 28, 12, accessory="monocle"), "a cat can't wear 'monocle'"),
            (lambda: Scene("moonbase", 17, ()), "background must be one of .*, got 'moonbase'"),
            (lambda: Scene("snow", 17, (), "hail"), "weather must be one of .* or empty, got 'hail'"),
            (lambda: CAT_AND_CAKE.change(1, word="cat"), "objects must differ"),
            (lambda: render(CAT_AND_CAKE, 100), "positive multiple of 32 pixels, got 100"),
            (lambda: render(CAT_AND_CAKE, 0), "positive multiple of 32 pixels, got 0"),
            (
                lambda: scene_for("a cat, a dog, a fox, a pig and a cow in space", 0),
                "room for 4 objects .*name fewer",
            ),
            (lambda: scene_for("a cat on top of a dog on top of a cow in space", 0), "room for 2 objects .*, got cat"),
            (lambda: scene_for("a cat in space under the sun, the moon and a star", 0), "2 in the sky, got"),
        ]:
            with pytest.raises(SceneError, match=message) as caught:
                make()
            assert "\n" not in str(caught.value)

    def test_a_missing_font_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drawing, "FONT_PATHS", ())
        emoji_font.cache_clear()
        with pytest.raises(FontMissing, match="apt-get install fonts-noto-color-emoji") as caught:
            emoji_font()
        assert "\n" not in str(caught.value)

    def test_errors_are_those_of_the_package(self) -> None:
        assert issubclass(FontMissing, FisEditError)
        assert issubclass(SceneError, InputError) and issubclass(InputError, FisEditError)
