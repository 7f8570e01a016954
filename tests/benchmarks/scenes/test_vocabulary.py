"""What can be drawn and named: much, and no two things alike."""

from __future__ import annotations

import numpy as np

from benchmarks.scenes.drawing import glyph_pixels
from benchmarks.scenes.layout import sample_scene
from benchmarks.scenes.prompts import describe_scene, prompt_words
from benchmarks.scenes.scene import Scene, render
from benchmarks.scenes.vocabulary import (
    ACCESSORIES,
    BACKGROUND,
    BACKGROUNDS,
    OBJECT,
    OBJECTS,
    WEATHER,
    WEATHERS,
)
from tests.support.quality import needs_font
from tests.support.scenes import SIDE, words

pytestmark = needs_font


class TestVocabulary:
    def test_there_is_much_to_draw(self) -> None:
        assert len(OBJECTS) == len(OBJECT) >= 60
        assert len(BACKGROUNDS) == len(BACKGROUND) >= 10
        assert len({thing.family for thing in OBJECTS}) >= 6
        assert len(WEATHERS) == len(WEATHER) >= 3
        assert not set(OBJECT) & set(ACCESSORIES)

    def test_no_two_things_look_alike(self) -> None:
        glyphs = {glyph_pixels(thing.glyph, 32).tobytes() for thing in OBJECTS}
        glyphs |= {glyph_pixels(glyph, 32).tobytes() for glyph in ACCESSORIES.values()}
        assert len(glyphs) == len(OBJECTS) + len(ACCESSORIES)

    def test_no_two_places_or_weathers_look_alike(self) -> None:
        empty = [Scene(background, 17, (), weather) for background in BACKGROUND for weather in ("", *WEATHER)]
        assert len({render(scene, SIDE).pixels.tobytes() for scene in empty}) == len(empty)

    def test_the_vocabulary_is_what_prompts_are_made_of(self) -> None:
        said = {
            word
            for seed in range(3000)
            for word in words(describe_scene(sample_scene(np.random.default_rng(seed))).text)
        }
        assert said == set(prompt_words())
        assert len(set(prompt_words())) == len(prompt_words())
