"""What is trained on: scenes and close-ups of them, their pixels, latents, masks and words."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.scenes import drawing
from benchmarks.scenes.prompts import describe_scene
from benchmarks.scenes.scene import render
from benchmarks.scenes.vocabulary import ACCESSORIES, BACKGROUND, OBJECT
from training.autoencoder import build_autoencoder
from training.config import Autoencoder, Plan
from training.latents import PARTS, LatentScenes, encode_scenes
from training.pictures import View, draw_pictures, sample_crops, sample_view, to_bytes, to_tensor
from training.tokens import build_tokenizer

pytestmark = pytest.mark.skipif(
    not any(path.is_file() for path in drawing.FONT_PATHS), reason="Noto Color Emoji is not installed"
)
SETTINGS = Autoencoder(Plan(batch=1, seconds=1, steps=1, learning_rate=1e-3), channels=(8, 8, 8, 8))


def views(count: int, close: bool) -> list[View]:
    return [sample_view(np.random.default_rng(seed), close) for seed in range(count)]


def encoded(count: int, close: bool) -> LatentScenes:
    torch.manual_seed(0)
    return encode_scenes(build_autoencoder(SETTINGS, 128), 1, count, close)


def test_a_close_up_shows_one_object_whole() -> None:
    for view in views(150, close=True):
        drawn, whole = view.draw(), render(view.scene)
        left, top = view.left * 8, view.top * 8
        assert len(view.scene.objects) == 1
        assert drawn.pixels.shape == (128, 128, 3)
        assert np.array_equal(drawn.pixels, whole.pixels[top : top + 128, left : left + 128])
        shown = drawn.masks.sum((1, 2)) / whole.masks.sum((1, 2))
        assert shown[0] == 1
        assert (shown > 0.7).all(), f"{view} cuts its accessory off"


def test_close_ups_come_to_every_word() -> None:
    found = [view.scene for view in views(2500, close=True)]
    assert {word for scene in found for word in scene.words} == {*OBJECT, *ACCESSORIES}
    assert {scene.background for scene in found} == set(BACKGROUND)
    assert {scene.objects[0].scale for scene in found} == {"", "small"}  # what is big does not fit


def test_a_view_that_is_not_close_is_the_whole_scene() -> None:
    for view in views(5, close=False):
        drawn, whole = view.draw(), render(view.scene, 256)
        assert np.array_equal(drawn.pixels, whole.pixels)
        assert np.array_equal(drawn.masks, whole.masks)


def test_a_picture_depends_on_seed_and_number_alone() -> None:
    two, three, other = draw_pictures(1, 2, 64), draw_pictures(1, 3, 64), draw_pictures(2, 2, 64)
    assert three.scenes[:2] == two.scenes != other.scenes
    assert np.array_equal(three.pixels[:2], two.pixels)
    assert np.array_equal(two.pixels[1], render(two.scenes[1], 64).pixels)


def test_crops_are_pieces_of_the_pictures_on_the_latent_grid() -> None:
    pictures = draw_pictures(1, 3, 64)
    pieces = {
        picture[top : top + 32, left : left + 32].tobytes()
        for picture in pictures.pixels
        for top in range(0, 33, 2)
        for left in range(0, 33, 2)
    }
    crops = sample_crops(pictures, np.random.default_rng(0), 20, 32, on_objects=0.5)
    assert {crop.tobytes() for crop in crops} <= pieces
    assert len({crop.tobytes() for crop in crops}) > 5


def test_aimed_crops_meet_objects() -> None:
    pictures = draw_pictures(1, 8, 64)
    empty = np.stack([render(replace(scene, objects=(), relation="and"), 64).pixels for scene in pictures.scenes])
    objects = replace(pictures, pixels=np.where(pictures.pixels != empty, 255, 0).astype(np.uint8))
    crops = sample_crops(objects, np.random.default_rng(0), 40, 16, on_objects=1)
    assert all(crop.any() for crop in crops)


def test_pictures_survive_the_way_to_tensors_and_back() -> None:
    pixels = draw_pictures(1, 2, 64).pixels
    assert np.array_equal(to_bytes(to_tensor(pixels)), pixels)


@pytest.mark.parametrize(("close", "side", "count"), [(True, 16, 20), (False, 32, 4)])
def test_encoded_scenes_keep_words_and_masks_together(close: bool, side: int, count: int) -> None:
    scenes, tokenizer = encoded(count, close), build_tokenizer()
    assert scenes.means.shape == scenes.spreads.shape == (count, 4, side, side)
    assert scenes.masks.shape == (count, PARTS, side, side)
    for row in range(count):
        view = sample_view(np.random.default_rng((1, row)), close)
        parts, drawn = len(view.scene.parts), view.draw()
        named = [tokenizer.decode(int(scenes.tokens[row, at])).strip() for at in scenes.positions[row, :parts]]
        assert tuple(named) == view.scene.words
        assert scenes.positions[row, parts:].eq(-1).all()
        assert scenes.masks[row, parts:].eq(0).all()
        assert torch.allclose(scenes.masks[row, :parts].mean((1, 2)), torch.tensor(drawn.masks.mean((1, 2))).float())
        said = tokenizer.decode(scenes.tokens[row], skip_special_tokens=True)
        assert said.replace(" ", "") == describe_scene(view.scene).text.replace(" ", "")


def test_an_encoded_scene_depends_on_seed_and_number_alone() -> None:
    few, more = encoded(2, close=True), encoded(3, close=True)
    assert all(
        torch.allclose(one, other[:2], atol=1e-5)
        for one, other in zip(vars(few).values(), vars(more).values(), strict=True)
    )
