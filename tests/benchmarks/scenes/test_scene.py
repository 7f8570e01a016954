"""Drawn scenes are ground truth: exact masks, prompts that read back, and changes that change one thing alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from benchmarks.scenes import scene as scene_module
from benchmarks.scenes.drawing import Mask, glyph_pixels
from benchmarks.scenes.layout import sample_scene
from benchmarks.scenes.scene import PlacedObject, Scene, render
from benchmarks.scenes.vocabulary import (
    ACCESSORIES,
    BACKGROUND,
    COLOURS,
    OBJECT,
    OBJECTS,
    WEATHER,
)
from tests.support.quality import needs_font
from tests.support.scenes import CAKE, CAT, CAT_AND_CAKE, MOON, SIDE, box, differ, scenes

pytestmark = needs_font

PLATES = ((255, 0, 255), (0, 255, 0), (0, 0, 0))  # any colour of a glyph differs from one of them


@pytest.fixture
def drawn_where(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scene], Mask]:
    """Where drawing a scene's objects changes the picture, whatever was there before."""

    def changed(scene: Scene) -> Mask:
        found = np.zeros((SIDE, SIDE), dtype=bool)
        for colour in PLATES:
            plate = np.full((SIDE, SIDE, 3), colour, dtype=np.uint8)
            monkeypatch.setattr(scene_module, "draw_background", lambda *_, plate=plate: plate)
            found |= (render(scene, SIDE).pixels != plate).any(-1)
        return found

    return changed


class TestDrawing:
    def test_same_seed_same_scene_and_pixels(self) -> None:
        first, second = (sample_scene(np.random.default_rng(5)) for _ in range(2))
        assert first == second
        assert np.array_equal(render(first).pixels, render(second).pixels)
        assert sample_scene(np.random.default_rng(6)) != first

    def test_drawing_does_not_touch_the_cached_background(self) -> None:
        empty = Scene("beach", 17, ())
        before = render(empty).pixels
        render(CAT_AND_CAKE)
        assert np.array_equal(render(empty).pixels, before)

    def test_a_mask_is_where_drawing_the_object_changes_the_picture(self, drawn_where: Callable[[Scene], Mask]) -> None:
        for thing in OBJECTS:
            for colour in ("", *(COLOURS if thing.colours else ())):
                scene = Scene("beach", 17, (PlacedObject(thing.word, 9, 28, 14, colour),))
                mask = render(scene, SIDE).masks[0]
                assert np.array_equal(mask, drawn_where(scene)), f"{colour} {thing.word}"
                assert mask.sum() > 100
                assert not (mask & ~box(scene.objects[0])).any()

    @pytest.mark.parametrize("accessory", ACCESSORIES)
    def test_an_accessory_has_a_mask_of_its_own(self, accessory: str, drawn_where: Callable[[Scene], Mask]) -> None:
        for wearer in (thing.word for thing in OBJECTS if thing.wears):
            bare = Scene("beach", 17, (PlacedObject(wearer, 9, 28, 12),))
            scene = bare.change(0, accessory=accessory)
            worn, head = render(scene, SIDE).masks[1], render(bare, SIDE).masks[0]
            assert scene.parts == ((0, wearer), (0, accessory))
            assert np.array_equal(worn | head, drawn_where(scene))
            assert not (differ(bare, scene) & ~worn).any()
            hat, skull = (np.flatnonzero(mask.any(1)) for mask in (worn, head))
            assert hat[0] < skull[0] <= hat[-1] + 1, "it sits on the head, neither above it nor before the face"
            assert hat[-1] < skull[0] + 0.2 * len(skull)

    def test_masks_of_whole_scenes_are_exact_and_apart(self, drawn_where: Callable[[Scene], Mask]) -> None:
        for scene in scenes()[:100]:
            masks = render(scene, SIDE).masks
            assert masks.shape == (len(scene.parts), SIDE, SIDE)
            assert masks.sum(0).max() <= 1
            assert np.array_equal(masks.any(0), drawn_where(scene))

    def test_everything_that_is_named_can_be_seen(self) -> None:
        for scene in scenes():
            drawn = render(scene, SIDE)
            for (index, word), mask in zip(scene.parts, drawn.masks, strict=True):
                alone = replace(scene, objects=(scene.objects[index],), relation="and")
                whole = render(alone, SIDE).masks[alone.words.index(word)]
                assert mask.sum() > 0.8 * whole.sum(), f"{word} is hidden in {scene}"

    def test_the_background_shows_wherever_no_mask_is(self) -> None:
        for scene in scenes()[:60]:
            drawn, empty = render(scene, SIDE), render(replace(scene, objects=(), relation="and"), SIDE)
            assert np.array_equal(drawn.pixels[~drawn.masks.any(0)], empty.pixels[~drawn.masks.any(0)])

    def test_a_later_object_hides_an_earlier_one_in_its_mask(self) -> None:
        cake = replace(CAKE, left=8)
        both, alone = render(Scene("beach", 17, (CAT, cake))), render(Scene("beach", 17, (CAT,)))
        assert not (both.masks[0] & both.masks[1]).any()
        assert 0 < both.masks[0].sum() < alone.masks[0].sum()

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_the_sky_is_behind_the_ground(self, order: tuple[int, int]) -> None:
        pair = (replace(CAT, bottom=20), replace(MOON, left=4, bottom=12))
        cat, moon = (render(Scene("night", 17, (placed,))).masks[0] for placed in pair)
        both = render(Scene("night", 17, tuple(pair[i] for i in order)))
        assert (cat & moon).any()
        assert np.array_equal(both.masks[order.index(0)], cat)
        assert np.array_equal(both.masks[order.index(1)], moon & ~cat)

    def test_another_background_or_weather_keeps_every_mask(self) -> None:
        before = render(CAT_AND_CAKE, SIDE).masks
        for background in BACKGROUND:
            for weather in ("", *WEATHER):
                after = replace(CAT_AND_CAKE, background=background, weather=weather)
                assert np.array_equal(render(after, SIDE).masks, before)

    @pytest.mark.parametrize("side", [32, 128, 256, 512])
    def test_any_multiple_of_thirty_two_can_be_drawn(self, side: int) -> None:
        drawn = render(CAT_AND_CAKE.change(0, accessory="hat"), side)
        assert drawn.pixels.shape == (side, side, 3)
        assert drawn.masks.shape == (3, side, side)
        assert drawn.masks.any((1, 2)).all()

    def test_a_red_car_is_red_and_a_blue_one_blue(self) -> None:
        for thing in (thing for thing in OBJECTS if thing.colours):
            for colour, hue in COLOURS.items():
                assert apart(hue_of(thing.word, colour), hue) < 8, f"a {colour} {thing.word}"
        assert apart(hue_of("car", "red"), 0) < 8
        assert apart(hue_of("car", "blue"), 215) < 8

    def test_a_colour_changes_no_shape(self) -> None:
        for thing in (thing for thing in OBJECTS if thing.colours):
            masks = [
                render(Scene("snow", 17, (PlacedObject(thing.word, 9, 28, 14, c),)), SIDE).masks for c in ("", *COLOURS)
            ]
            assert all(np.array_equal(mask, masks[0]) for mask in masks)


def hue_of(word: str, colour: str) -> float:
    """The mean hue, in degrees, of the saturated pixels of a thing that differ from one of its colours to another."""
    glyphs = {name: glyph_pixels(OBJECT[word].glyph, 64, name, hue) for name, hue in COLOURS.items()}
    painted = (np.ptp(np.stack(list(glyphs.values())), axis=0) > 0).any(-1) & (glyphs[colour][..., 3] == 255)
    hsv = np.array(Image.fromarray(glyphs[colour][..., :3]).convert("HSV"), dtype=float)[painted]
    strong = hsv[hsv[:, 1] > 70]
    turns = np.exp(2j * np.pi * strong[:, 0] / 256) * strong[:, 1]
    return float(np.degrees(np.angle(turns.sum())) % 360)


def apart(first: float, second: float) -> float:
    return abs((first - second + 180) % 360 - 180)


def test_scenes_need_no_model_libraries() -> None:
    code = "import sys, benchmarks.scenes.layout; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(run.stdout.split())
    assert "benchmarks.scenes.drawing" in loaded
    assert loaded.isdisjoint({"torch", "diffusers", "transformers", "skimage", "scipy"})
