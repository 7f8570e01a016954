"""Where things stand in a scene, and changes that change one thing alone."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain, combinations, pairwise

import numpy as np
import pytest

from benchmarks.scenes.drawing import Mask
from benchmarks.scenes.layout import CHANGE_KINDS, SceneChange, sample_change, sample_scene, scene_for
from benchmarks.scenes.prompts import describe_scene, parse_prompt
from benchmarks.scenes.scene import PlacedObject, Scene, render
from benchmarks.scenes.vocabulary import BACKGROUND, GROUND_WORDS, SKY_WORDS, WEATHER
from tests.support.quality import needs_font
from tests.support.scenes import SIDE, box, edits, request_of, scenes, words

pytestmark = needs_font

OBJECT_KINDS = [kind for kind in CHANGE_KINDS if kind not in ("background", "weather")]


class TestLayout:
    def test_objects_stay_in_their_boxes_and_those_on_the_ground_do_not_overlap(self) -> None:
        for scene in scenes():
            ground = standing(scene)
            assert not overlap(ground)
            assert all(placed.word in SKY_WORDS for placed in scene.objects[len(ground) :])
            for (index, _), mask in zip(scene.parts, render(scene, SIDE).masks, strict=True):
                assert not (mask & ~box(scene.objects[index])).any()

    @pytest.mark.parametrize("size", [7, 8, 9, 11, 12, 16, 20])
    def test_the_first_row_is_that_of_what_is_worn(self, size: int) -> None:
        dressed = PlacedObject("lion", 6, 29, size, accessory="crown")  # both glyphs are as tall as their squares
        rows = np.flatnonzero(render(Scene("snow", 17, (dressed,))).masks.any((0, 2)))
        assert dressed.top <= rows[0] / 8 < dressed.top + 1
        assert rows[-1] == 29 * 8 - 1

    def test_objects_stand_from_left_to_right_below_the_horizon(self) -> None:
        for scene in scenes():
            ground = standing(scene)
            if scene.relation == "on top of":
                top, under = ground
                assert (top.bottom, top.left) == (under.top, under.left)
            else:
                assert all(one.right <= other.left for one, other in pairwise(ground))
                assert all(placed.bottom > scene.horizon for placed in ground)
            assert all(placed.bottom < scene.horizon for placed in scene.objects[len(ground) :])

    def test_what_is_next_to_another_touches_it(self) -> None:
        pairs = [scene.objects for scene in scenes() if scene.relation == "next to"]
        assert len(pairs) > 10
        assert all(objects[0].right == objects[1].left for objects in pairs)

    def test_big_is_bigger_than_small(self) -> None:
        sizes = {scale: scene_for(f"a {scale} dog on a lawn", 1).objects[0].size for scale in ("big", "", "small")}
        assert sizes["big"] > sizes[""] > sizes["small"]

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("a cat and a cake on a beach", "a dog and a red car in the forest"),
            ("a big cat in the snow under the moon", "a big tree by the sea under a rocket"),
            ("a cat next to a dog at night", "a lion next to a book in space"),
            ("a fox on top of a house in the city", "a robot on top of a bus in a room"),
            ("a fox, a cow, a pig and an owl on the grass", "a bus, a tent, a ball and a bell in space in the fog"),
        ],
    )
    def test_prompts_of_the_same_shape_share_their_boxes(self, first: str, second: str) -> None:
        for seed in range(20):
            one, other = scene_for(first, seed), scene_for(second, seed)
            assert one.horizon == other.horizon
            assert boxes(one) == boxes(other)
        assert len({tuple(boxes(scene_for(first, seed))) for seed in range(20)}) > 5

    def test_a_prompt_is_laid_out_as_it_says(self) -> None:
        for scene in scenes():
            for seed in range(2):
                laid = scene_for(describe_scene(scene).text, seed)
                assert request_of(laid) == request_of(scene)
                assert laid == scene_for(describe_scene(scene).text, seed)
                assert [p.size for p in laid.objects] == [p.size for p in scene.objects]

    def test_count_and_sky_can_be_chosen(self) -> None:
        for seed in range(20):
            for count in (1, 2, 3, 4):
                for sky in (False, True):
                    scene = sample_scene(np.random.default_rng(seed), count, sky)
                    flying = [placed.word in SKY_WORDS for placed in scene.objects]
                    assert flying == [False] * count + [True] * sky

    def test_a_relation_ends_with_one_of_its_two(self) -> None:
        scene = scene_for("a cat next to a dog and a cow in space", 1)
        assert [scene.without(index).relation for index in range(3)] == ["and", "and", "next to"]


def standing(scene: Scene) -> list[PlacedObject]:
    return [placed for placed in scene.objects if placed.word in GROUND_WORDS]


def overlap(ground: list[PlacedObject]) -> bool:
    return any((box(one) & box(other)).any() for one, other in combinations(ground, 2))


def boxes(scene: Scene) -> list[tuple[int, int, int]]:
    return [(placed.left, placed.bottom, placed.size) for placed in scene.objects]


class TestChanges:
    @pytest.mark.parametrize("kind", CHANGE_KINDS)
    def test_a_change_can_be_seen_and_said(self, kind: str) -> None:
        for change in edits(kind):
            before, after = change.prompts
            assert change.kind == kind
            assert before != after
            assert parse_prompt(before) == request_of(change.before)
            assert parse_prompt(after) == request_of(change.after)
            assert change.region(SIDE).any()
            assert not overlap(standing(change.before)) and not overlap(standing(change.after))
        assert change == sample_change(np.random.default_rng(39), kind)

    @pytest.mark.parametrize(
        ("kind", "changed"),
        [
            ("swap", {"word"}),
            ("recolour", {"colour"}),
            ("dress", {"accessory"}),
            ("resize", {"scale", "size", "left"}),
        ],
    )
    def test_one_object_differs_in_one_thing(self, kind: str, changed: set[str]) -> None:
        for change in edits(kind):
            assert replace(change.after, objects=()) == replace(change.before, objects=())
            for index, (old, new) in enumerate(zip(change.before.objects, change.after.objects, strict=True)):
                fields = {name for name in vars(old) if getattr(old, name) != getattr(new, name)}
                assert fields <= changed if index == change.index else not fields
            old, new = change.before.objects[change.index], change.after.objects[change.index]
            assert kind != "swap" or (old.word in SKY_WORDS) == (new.word in SKY_WORDS)
            assert kind != "dress" or (old.accessory, new.accessory != "") == ("", True)
            assert kind != "resize" or {old.scale, new.scale} == {"big", "small"}
            assert kind != "resize" or (new.size > old.size) == (new.scale == "big")

    def test_a_deleted_object_is_the_only_one_that_goes(self) -> None:
        for change in edits("delete"):
            assert change.after == change.before.without(change.index)
        for change in edits("insert"):
            assert change.before == change.after.without(change.index)

    @pytest.mark.parametrize("kind", ["background", "weather"])
    def test_a_background_changes_around_the_same_objects(self, kind: str) -> None:
        for change in edits(kind):
            assert change.index == -1
            assert replace(change.after, **{kind: getattr(change.before, kind)}) == change.before
            before, after = (render(scene, SIDE).masks for scene in (change.before, change.after))
            assert np.array_equal(before, after)
            assert change.region(SIDE)[~before.any(0)].mean() > 0.5

    @pytest.mark.parametrize("kind", OBJECT_KINDS)
    def test_pixels_outside_the_boxes_of_the_object_stay(self, kind: str) -> None:
        for change in edits(kind):
            inside = np.zeros((SIDE, SIDE), dtype=bool)
            for scene in (change.before, change.after):
                inside |= concerned(change, scene)
            assert not (change.region(SIDE) & ~inside).any()

    @pytest.mark.parametrize("kind", ["swap", "delete", "insert", "recolour", "dress"])
    def test_a_region_lies_within_the_masks_of_the_object(self, kind: str) -> None:
        for change in edits(kind):
            masks = np.zeros((SIDE, SIDE), dtype=bool)
            for scene in (change.before, change.after):
                if not gone(change, scene):
                    rows = [k for k, (index, _) in enumerate(scene.parts) if index == change.index]
                    masks |= render(scene, SIDE).masks[rows].any(0)
            assert not (change.region(SIDE) & ~masks).any()

    def test_the_rest_of_a_prompt_stays_word_for_word(self) -> None:
        for change in chain(*map(edits, ("swap", "recolour", "resize", "dress"))):
            before, after = (without_noun_phrase(change, scene) for scene in (change.before, change.after))
            assert before == after
        for change in edits("insert") + edits("delete"):
            longer, shorter = sorted((words(prompt) for prompt in change.prompts), key=len, reverse=True)
            left = [word for word in shorter if word != "and"]
            rest = iter(word for word in longer if word != "and")
            assert all(word in rest for word in left), change.prompts  # in the same order
        for change in edits("background"):
            before, after = (
                cut(describe_scene(scene).text, BACKGROUND[scene.background].phrases)
                for scene in (change.before, change.after)
            )
            assert before == after
        for change in edits("weather"):
            before, after = change.prompts
            assert words(cut(after, WEATHER[change.after.weather].phrases)) == words(before)

    def test_changes_touch_objects_in_the_sky_and_on_the_ground(self) -> None:
        for kind in ("swap", "delete", "insert", "recolour"):
            concerned_words = {
                max(change.before, change.after, key=lambda scene: len(scene.objects)).objects[change.index].word
                for change in edits(kind)
            }
            assert concerned_words & set(SKY_WORDS)
            assert concerned_words & set(GROUND_WORDS)


def gone(change: SceneChange, scene: Scene) -> bool:
    """Whether the object of a change is not in this one of its scenes."""
    return (change.kind, scene) in (("delete", change.after), ("insert", change.before))


def concerned(change: SceneChange, scene: Scene) -> Mask:
    """The box of the object that a change concerns, in one of its scenes."""
    return np.zeros((SIDE, SIDE), dtype=bool) if gone(change, scene) else box(scene.objects[change.index])


def without_noun_phrase(change: SceneChange, scene: Scene) -> str:
    """A prompt less the changed object's article, adjectives, noun and accessory."""
    placed, text = scene.objects[change.index], describe_scene(scene).text
    described = " ".join(filter(None, (placed.scale, placed.colour, placed.word)))
    worn = f"( (wearing|with) a {placed.accessory})" if placed.accessory else ""
    rest, times = re.subn(rf"\b(a|an|the) {described}{worn}\b(?! with a wooden)", "...", text, count=1)
    assert times == 1
    return rest


def cut(text: str, phrases: tuple[str, ...]) -> str:
    """A text less the longest of the phrases in it."""
    found = max((phrase for phrase in phrases if phrase in text), key=len)
    return text.replace(found, "", 1)
