"""Prompts of scenes: they say all that is drawn, and read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scenes.layout import scene_for
from benchmarks.scenes.prompts import (
    CharacterSpan,
    ObjectRequest,
    SceneRequest,
    describe_scene,
    parse_prompt,
    prompt_words,
)
from benchmarks.scenes.scene import PlacedObject, Scene, SceneError, render
from benchmarks.scenes.vocabulary import BACKGROUND, OBJECT
from tests.support.quality import needs_font
from tests.support.scenes import CAKE, CAT, CAT_AND_CAKE, MOON, SIDE, request_of, scenes

pytestmark = needs_font

SALAD = [*prompt_words(), *OBJECT, "on a lawn", "at night", "in the fog", "on top of", "next to", ",", "zebra"]


class TestLanguage:
    def test_prompts_read_like_sentences(self) -> None:
        for scene, text in [
            (CAT_AND_CAKE, "a cat and a cake on a beach"),
            (replace(CAT_AND_CAKE, relation="on top of"), "a cat on top of a cake on a beach"),
            (replace(CAT_AND_CAKE, weather="rain"), "a cat and a cake on a beach in the rain"),
            (Scene("night", 17, (CAT, CAKE, MOON)), "a cat and a cake at night under the moon"),
            (
                Scene(
                    "city", 17, (PlacedObject("owl", 0, 29, 8), PlacedObject("pig", 9, 29, 8, "", "big", "hat"), CAKE)
                ),
                "an owl, a big pig wearing a hat and a cake in the city",
            ),
            (Scene("snow", 17, (PlacedObject("car", 9, 29, 14, "red", "big"),)), "a big red car in the snow"),
            (Scene("snow", 17, (MOON,)), "in the snow under the moon"),
        ]:
            assert describe_scene(scene).text == text

    def test_every_scene_in_every_wording_reads_back(self) -> None:
        for scene in scenes():
            for wording in (scene.wording, *range(12)):
                said = replace(scene, wording=wording)
                assert parse_prompt(describe_scene(said).text) == request_of(scene), describe_scene(said).text

    def test_every_way_to_say_a_place_is_used_and_understood(self) -> None:
        for scene in [Scene(name, 17, (CAT,)) for name in BACKGROUND]:
            said = {describe_scene(replace(scene, wording=wording)).text for wording in range(200)}
            assert all(any(way in text for text in said) for way in BACKGROUND[scene.background].phrases)
            assert {parse_prompt(text).background for text in said} == {scene.background}
            assert len(said) >= 8

    def test_spans_point_at_the_nouns(self) -> None:
        for scene in scenes():
            sentence = describe_scene(scene)
            assert tuple(sentence.text[span.start : span.stop] for span in sentence.spans) == scene.words
            assert all(sentence.text[span.stop : span.stop + 1] in ("", " ", ",") for span in sentence.spans)
        assert describe_scene(CAT_AND_CAKE).spans == (CharacterSpan(2, 5), CharacterSpan(12, 16))

    def test_free_prompts_are_read_for_what_they_ask(self) -> None:
        for prompt, asked in [
            ("A CAT, on a BEACH!", SceneRequest((ObjectRequest("cat"),), "beach")),
            ("my very old red car by the sea", SceneRequest((ObjectRequest("car", "red"),), "sea")),
            (
                "under the sun a cat with a bow in space",
                SceneRequest((ObjectRequest("cat", "", "", "bow"), ObjectRequest("sun")), "space"),
            ),
            ("a house inside a house with a wooden floor", SceneRequest((ObjectRequest("house"),), "room")),
            ("a green cat in a room", SceneRequest((ObjectRequest("cat"),), "room")),  # cats come in no colours
            (
                "a castle wearing a hat at night",
                SceneRequest((ObjectRequest("castle"),), "night"),
            ),  # castles wear nothing
            (
                "a small small tree at sunset on a foggy day",
                SceneRequest((ObjectRequest("tree", "", "small"),), "sunset", "fog"),
            ),
        ]:
            assert parse_prompt(prompt) == asked

    def test_a_prompt_without_object_or_place_is_refused(self) -> None:
        for prompt in ["", "a cat", "on a beach", "a zebra on mars", "🐱 on the 🏖", "sand\ncastle\0s"]:
            with pytest.raises(SceneError, match="a scene needs an object and a background, got") as caught:
                scene_for(prompt, 0)
            assert "\n" not in str(caught.value)

    @settings(max_examples=200, deadline=None)
    @given(st.text())
    def test_any_text_is_read_or_refused(self, prompt: str) -> None:
        settled(prompt, 0)

    @settings(max_examples=400, deadline=None)
    @given(st.lists(st.sampled_from(SALAD), max_size=12), st.integers(0))
    def test_any_salad_of_its_own_words_is_drawn_or_refused(self, salad: list[str], seed: int) -> None:
        settled(f"{' '.join(salad)} in space", seed)


def settled(prompt: str, seed: int) -> None:
    """A prompt becomes a scene that says what was read, every part of it drawn in the frame, or it is refused."""
    scene = scene_or_refusal(prompt, seed)
    if isinstance(scene, SceneError):
        assert "\n" not in str(scene)
        return
    asked = parse_prompt(prompt)
    assert tuple(placed.word for placed in scene.objects) == tuple(wish.word for wish in asked.objects)
    assert (scene.background, scene.weather) == (asked.background, asked.weather)
    assert parse_prompt(describe_scene(scene).text) == request_of(scene)
    assert render(scene, SIDE).masks.any((1, 2)).all()


def scene_or_refusal(prompt: str, seed: int) -> Scene | SceneError:
    try:
        return scene_for(prompt, seed)
    except SceneError as error:
        return error
