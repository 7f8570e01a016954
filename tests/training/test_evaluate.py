"""What is counted in the figures: the right prompts, words, looks and backgrounds, and how far two sets are apart."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.classifier import (
    ADJECTIVES,
    BACKGROUND_WORDS,
    SIDE,
    WORDS,
    SceneClassifier,
    ScenePredictions,
    classify,
    frechet_distance,
    scene_labels,
)
from benchmarks.scenes.scene import PlacedObject, Scene
from benchmarks.scenes.vocabulary import SCALES
from training.autoencoder import psnr
from training.evaluate import count_objects, evaluation_scenes

FOX, CAR, MOON = (
    PlacedObject("fox", 0, 28, 8, "", "small", "hat"),
    PlacedObject("car", 16, 28, 12, "red"),
    PlacedObject("moon", 2, 9, 8),
)
SCENE = Scene("night", 17, (FOX, CAR, MOON))


def perfectly_seen(*scenes: Scene) -> ScenePredictions:
    """What a judge that is always right sees."""
    truth = scene_labels(list(scenes))
    return ScenePredictions(truth.objects > 0, truth.backgrounds, truth.adjectives)


def test_three_hundred_prompts_with_one_two_and_three_objects() -> None:
    scenes = evaluation_scenes()
    assert Counter(len(scene.objects) for scene in scenes) == {1: 100, 2: 100, 3: 100}
    assert scenes == evaluation_scenes()
    assert len(set(scenes)) == 300
    assert {word for scene in scenes for word in scene.words} >= {"hat", "sun", "cat"}


def test_labels_are_what_a_perfect_judge_would_see() -> None:
    seen, cat = perfectly_seen(SCENE), SCENE.change(0, word="cat")
    assert seen.objects_found(0, SCENE) == [True] * 4  # the hat, too
    assert seen.background_correct(0, SCENE)
    assert seen.objects_found(0, cat) == [False, True, True, True]
    assert seen.extra_objects(0, SCENE) == 0
    assert seen.extra_objects(0, cat) == 1
    assert not seen.background_correct(0, replace(SCENE, background="sea"))
    assert scene_labels([SCENE]).objects.sum() == 4


def test_labels_say_no_more_of_looks_than_the_scene() -> None:
    looks = dict(zip(WORDS, scene_labels([SCENE]).adjectives[0], strict=True))
    said = {word: dict(zip(ADJECTIVES, row.tolist(), strict=True)) for word, row in looks.items()}
    assert [name for name, value in said["car"].items() if value == 1] == ["red"]
    assert said["car"]["blue"] == said["car"]["big"] == 0
    assert (said["fox"]["small"], said["fox"]["big"], said["fox"]["red"]) == (1, 0, -1)  # foxes are red anyway
    assert set(said["robot"].values()) == {-1}


@pytest.mark.parametrize(
    ("shown", "right"),
    [
        (SCENE, [True, True]),
        (SCENE.change(1, colour="blue"), [True, False]),
        (SCENE.change(0, scale="big"), [False, True]),
        (SCENE.change(0, scale=""), [False, True]),
        (SCENE.without(1), [True, False]),  # what is not there has no colour
        (SCENE.change(0, word="cat"), [False, True]),
    ],
)
def test_adjectives_are_right_when_their_object_is_there_and_looks_so(shown: Scene, right: list[bool]) -> None:
    assert perfectly_seen(shown).adjectives_correct(0, SCENE) == right


def test_a_thing_of_plain_size_is_neither_big_nor_small() -> None:
    plain = perfectly_seen(SCENE.change(0, scale=""))
    assert [plain.adjectives_correct(0, SCENE.change(0, scale=scale)) for scale in SCALES] == [[False, True]] * 2


def test_figures_of_a_judge_that_saw_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = evaluation_scenes()
    others = [*scenes[1:], scenes[0]]
    for shown, least, most in ((scenes, 1, 1), (others, 0, 0.2)):
        monkeypatch.setattr("training.evaluate.classify", lambda *_, shown=shown: perfectly_seen(*shown))
        found = count_objects(None, scenes, None)
        shares = {f"objects_present_{n}" for n in (1, 2, 3)} | {"all_present", "adjectives_right", "background_right"}
        assert all(least <= found[name] <= most for name in shares), found
        assert (found["unnamed_per_picture"] < 0.1) == (shown is scenes)  # a hat that two wear is seen once
        assert found["adjectives"] > 50


def test_the_judge_looks_at_pictures_of_any_size(judge: SceneClassifier) -> None:
    for side in (96, SIDE, 256):
        seen = classify(judge, np.zeros((2, side, side, 3), dtype=np.uint8))
        assert seen.objects.shape == (2, len(WORDS))
        assert seen.adjectives.shape == (2, len(WORDS), len(ADJECTIVES))
        assert all(0 <= place < len(BACKGROUND_WORDS) for place in seen.backgrounds)


def test_pictures_are_judged_one_by_one(judge: SceneClassifier) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
    together, apart = classify(judge, pixels), classify(judge, pixels, batch=2)
    assert torch.equal(together.objects, apart.objects)
    assert torch.allclose(together.adjectives, apart.adjectives, atol=1e-5)


def test_the_frechet_distance_is_nothing_to_itself_and_grows_with_a_shift(judge: SceneClassifier) -> None:
    pixels = np.random.default_rng(0).integers(0, 100, (40, 16, 16, 3), dtype=np.uint8)
    near, far = (frechet_distance(judge, pixels, pixels + np.uint8(shift)) for shift in (20, 80))
    itself = frechet_distance(judge, pixels, pixels)
    assert abs(itself) < 0.01 * near
    assert 0 < near < far
    assert frechet_distance(judge, pixels + np.uint8(80), pixels) == pytest.approx(far, rel=1e-3)


def test_the_frechet_distance_of_shifted_sets_is_the_square_of_the_shift() -> None:
    pixels = np.random.default_rng(0).integers(0, 200, (30, 4, 4, 3), dtype=np.uint8)
    plain = SimpleNamespace(features=lambda pictures: pictures)  # three features: the mean colours, in [-1, 1]
    assert frechet_distance(plain, pixels, pixels + np.uint8(51)) == pytest.approx(3 * (51 / 127.5) ** 2, rel=1e-4)


def test_psnr_of_known_errors() -> None:
    black = np.zeros((1, 4, 4, 3), dtype=np.uint8)
    assert psnr(np.full_like(black, 255), black) == pytest.approx(0)
    assert psnr(np.full_like(black, 1), black) == pytest.approx(48.13, abs=0.01)
