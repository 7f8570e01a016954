"""Triples with looks that words do not name: what is painted, what stays, what is said."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.scenes import drawing
from benchmarks.scenes.appearance import Appearance, Palette, sample_appearance
from benchmarks.scenes.vocabulary import ACCESSORIES, COLOURS, SCALES
from fisedit.adapters.training.triples import read_triples
from training.gamut import colour_error, drawn_objects
from training.references import sample_example, write_example

pytestmark = pytest.mark.skipif(
    not any(path.is_file() for path in drawing.FONT_PATHS), reason="Noto Color Emoji is not installed"
)


def hues(pixels: np.ndarray) -> np.ndarray:
    """Degrees."""
    return np.asarray(Image.fromarray(pixels).convert("HSV"))[..., 0] * (360 / 256)


@pytest.mark.parametrize("pattern", ["plain", "stripes", "dots"])
def test_a_look_paints_its_hues_within_the_mask_alone(pattern):
    pixels = np.random.default_rng(0).integers(60, 255, (64, 64, 3), np.uint8)
    mask = np.zeros((64, 64), dtype=bool)
    mask[16:48, 8:40] = True
    painted = Appearance((120, 240), 0.8, pattern, period=0.2).paint(pixels, mask)
    assert np.array_equal(painted[~mask], pixels[~mask])
    first, second = (np.abs(hues(painted)[mask] - hue) < 6 for hue in (120, 240))
    assert (first | second).all()
    assert first.any()
    assert second.any() == (pattern != "plain")


def test_light_and_shade_stay():
    pixels = np.full((8, 8, 3), 80, np.uint8)
    pixels[:, 4:] = 200
    painted = Appearance((30, 30), 0.9).paint(pixels, np.ones((8, 8), dtype=bool)).max(-1)
    assert (painted[:, :4] < painted[:, 4:]).all()


def test_palettes_bound_looks():
    palette = Palette((20, 40), (0.1, 0.2), ("plain", "dots"))
    looks = [sample_appearance(np.random.default_rng(seed), palette) for seed in range(40)]
    assert all(20 <= hue <= 40 for look in looks for hue in look.hues)
    assert all(0.1 <= look.saturation <= 0.2 for look in looks)
    assert {look.pattern for look in looks} == {"plain", "dots"}


def test_examples_say_nothing_of_the_look():
    for seed in range(20):
        example = sample_example(np.random.default_rng(seed), 64, Palette())
        assert not {*COLOURS, *SCALES, *ACCESSORIES} & set(re.findall("[a-z]+", example.prompt))
        assert example.region.any()
        again = sample_example(np.random.default_rng(seed), 64, Palette())
        assert np.array_equal(example.target, again.target) and np.array_equal(example.reference, again.reference)


def test_target_and_reference_share_their_hue():
    for seed in range(10):
        example = sample_example(np.random.default_rng(seed), 64, Palette(patterns=("plain",)))
        hue = np.median(hues(example.target)[example.region])
        assert (np.abs(hues(example.reference) - hue) < 4).mean() > 0.01


def test_what_is_written_can_be_trained_on(tmp_path):
    example = sample_example(np.random.default_rng(1), 64, Palette())
    write_example(example, tmp_path, "000000")
    (triple,) = read_triples(tmp_path)
    assert triple.prompt == example.prompt
    assert np.array_equal(np.asarray(Image.open(triple.target)), example.target)
    assert np.array_equal(np.asarray(Image.open(triple.region)).astype(bool), example.region)


def test_how_far_an_autoencoder_is_off():
    class Perfect:
        """Its latents are pixels; of green, 60 levels are lost."""

        device = torch.device("cpu")

        def encode(self, pixels):
            return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: pixels))

        def decode(self, latents):
            return SimpleNamespace(sample=latents - torch.tensor([0, 60 / 127.5, 0])[:, None, None])

    objects = drawn_objects(3, 64)
    green, bright = Appearance((120, 120), 0.9), [(np.full_like(pixels, 255), mask) for pixels, mask in objects]
    assert colour_error(Perfect(), bright, green) == pytest.approx(20, abs=0.5)
    assert colour_error(Perfect(), bright, Appearance((0, 0), 1.0)) < 1
