"""What is held out of training: whole combinations, no whole words."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.scenes import drawing
from benchmarks.scenes.held_out import (
    SPLITS,
    has_unseen_layout,
    has_unseen_words,
    held_out,
    is_unseen,
    word_pairs,
)
from benchmarks.scenes.layout import sample_scene
from benchmarks.scenes.scene import PlacedObject, Scene
from benchmarks.scenes.vocabulary import ACCESSORIES, BACKGROUND, COLOURS, OBJECT, WEATHER
from training.pictures import sample_known, sample_unseen, sample_view

ANY_WORDS = {*OBJECT, *ACCESSORIES, *COLOURS, *BACKGROUND, *WEATHER}
PLAIN = Scene("beach", 17, (PlacedObject("cat", 2, 28, 12), PlacedObject("cake", 18, 29, 12)))


def test_every_object_lacks_a_background_and_some_company_and_no_word_lacks_much() -> None:
    combinations = held_out().combinations
    assert {word for pair in combinations for word in pair} <= ANY_WORDS
    for word in OBJECT:
        others = [other for pair in combinations if word in pair for other in pair - {word}]
        assert len([other for other in others if other in BACKGROUND]) == 1
        assert 3 <= len([other for other in others if other in OBJECT]) <= 5
    places = Counter(word for pair in combinations for word in pair if word in BACKGROUND)
    assert max(places.values()) <= 8  # of 72 objects and 3 kinds of weather


@pytest.mark.parametrize(
    "scene",
    [
        Scene("sea", 17, (PlacedObject("cat", 2, 28, 14),)),
        Scene("beach", 17, (PlacedObject("cat", 2, 28, 12), PlacedObject("pig", 18, 28, 12))),
        Scene("beach", 17, (PlacedObject("car", 2, 28, 14, "purple"),)),
        Scene("beach", 17, (PlacedObject("cat", 2, 28, 12, accessory="bow"),)),
        Scene("grass", 17, (PlacedObject("cat", 2, 28, 14),), "snowfall"),
    ],
)
def test_words_are_unseen_together_and_not_alone(scene: Scene) -> None:
    assert has_unseen_words(scene)
    assert is_unseen(scene)
    assert not has_unseen_words(PLAIN)


def test_one_layout_in_so_many_is_held_out_whatever_its_words() -> None:
    scenes = [sample_scene(np.random.default_rng(seed)) for seed in range(800)]
    share = np.mean([has_unseen_layout(scene) for scene in scenes])
    assert abs(share - 1 / held_out().layout_share) < 0.03
    moved = [PLAIN.change(0, left=left) for left in range(20)]
    assert 0 < sum(map(has_unseen_layout, moved)) < 20
    assert [has_unseen_layout(scene.change(0, word="dog")) for scene in moved] == list(map(has_unseen_layout, moved))


@pytest.mark.skipif(not any(path.is_file() for path in drawing.FONT_PATHS), reason="Noto Color Emoji is not installed")
@pytest.mark.parametrize("close", [False, True])
def test_training_sees_nothing_that_is_held_out(close: bool) -> None:
    scenes = [sample_view(np.random.default_rng(seed), close).scene for seed in range(300)]
    assert not any(map(has_unseen_words, scenes))
    assert close or not any(map(is_unseen, scenes))
    together = frozenset.union(*map(word_pairs, scenes))
    assert together.isdisjoint(held_out().combinations)
    assert len(together) > 250


def test_evaluated_scenes_are_unseen_in_words_that_were_trained_on() -> None:
    words = tuple(OBJECT)[::2]
    for seed in range(10):
        scene = sample_unseen(np.random.default_rng(seed), words, 2, sky=False)
        assert has_unseen_words(scene)
        assert {placed.word for placed in scene.objects} <= {*words}
        assert len(scene.objects) == 2
        assert not is_unseen(sample_known(np.random.default_rng(seed), words))


def test_development_and_reported_seeds_differ() -> None:
    assert set(held_out().seeds) == set(SPLITS)
    assert len(set(held_out().seeds.values())) == len(SPLITS)
