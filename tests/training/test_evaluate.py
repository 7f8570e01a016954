"""What is counted in the figures: the right prompts, the right words, the right background."""

from collections import Counter

import numpy as np
import pytest
import torch

from training.autoencoder import psnr
from training.classifier import Classifier, Seen, labels, look
from training.evaluate import evaluation_scenes
from training.scenes import Placed, Scene

SCENE = Scene("night", 8, (Placed("fox", 0, 14, 6), Placed("car", 8, 14, 6), Placed("moon", 2, 5, 5)))


def test_two_hundred_prompts_with_one_two_and_three_objects() -> None:
    scenes = evaluation_scenes()
    assert Counter(len(scene.objects) for scene in scenes) == {1: 67, 2: 67, 3: 66}
    assert scenes == evaluation_scenes()


def test_labels_are_what_a_perfect_judge_would_see() -> None:
    objects, places = labels([SCENE])
    seen = Seen(objects > 0, places)
    assert seen.named(0, SCENE) == [True, True, True]
    assert seen.place_right(0, SCENE)
    assert seen.named(0, SCENE.replace_object(0, "cat")) == [False, True, True]
    assert seen.unnamed(0, SCENE) == 0
    assert seen.unnamed(0, SCENE.replace_object(0, "cat")) == 1
    assert not seen.place_right(0, SCENE.with_background("sea"))
    assert objects.sum() == 3


def test_the_classifier_looks_at_pictures_of_any_size() -> None:
    torch.manual_seed(0)
    seen = look(Classifier(), np.zeros((2, 96, 96, 3), dtype=np.uint8))
    assert seen.objects.shape == (2, 18)
    assert seen.places.shape == (2,)


def test_psnr_of_known_errors() -> None:
    black = np.zeros((1, 4, 4, 3), dtype=np.uint8)
    assert psnr(np.full_like(black, 255), black) == pytest.approx(0)
    assert psnr(np.full_like(black, 1), black) == pytest.approx(48.13, abs=0.01)
