"""Sampled scenes, scenes for a prompt, and pairs of scenes that differ in one property: the truth of an edit.

Everything is sampled from a seed. An object's place depends on the seed, on the number of objects and on its index. It
does not depend on its word, so two prompts of the same shape and seed put their objects in the same boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.scenes.drawing import CELLS, Mask
from benchmarks.scenes.prompts import RELATIONS, ObjectRequest, SceneRequest, describe_scene, parse_prompt
from benchmarks.scenes.scene import PlacedObject, Scene, SceneError, render
from benchmarks.scenes.vocabulary import FULL_VOCABULARY, OBJECT, SKY_WORDS, SceneVocabulary

_SIZES = {1: 14, 2: 12, 3: 10, 4: 8}
_SCALED = {"big": {1: 20, 2: 16}, "small": {1: 8, 2: 7}}
_STACKED_SIZE = 10
_SKY_SIZE, _MAX_SKY_OBJECTS = 8, 2
_NUM_WORDINGS = 1 << 20


def scene_for(prompt: str, seed: int) -> Scene:
    """The scene that a prompt requests.

    Args:
        prompt: in plain English.
        seed: The seed of the layout.

    Raises:
        SceneError: the prompt names no object or no background, or more than fits.
    """
    return arrange(parse_prompt(prompt), np.random.default_rng(seed))


def arrange(request: SceneRequest, rng: np.random.Generator) -> Scene:
    """Lay out what is requested, with the same random numbers whatever the words are.

    Args:
        request: The request of a prompt.
        rng: the only source of randomness.

    Raises:
        SceneError: more is requested than fits.
    """
    ground = [requested for requested in request.objects if requested.word not in SKY_WORDS]
    sky = [requested for requested in request.objects if requested.word in SKY_WORDS]
    stacked = request.relation == "on top of" and len(ground) > 1
    max_objects = 2 if stacked else len(_SIZES)
    if len(ground) > max_objects or len(sky) > _MAX_SKY_OBJECTS:
        words = ", ".join(requested.word for requested in request.objects)
        raise SceneError(
            f"a scene has room for {max_objects} objects and {_MAX_SKY_OBJECTS} in the sky, got {words}: name fewer"
        )
    horizon = int(rng.integers(16, 19))
    shares = rng.random((len(_SIZES), 2))
    sky_shares = rng.random((_MAX_SKY_OBJECTS, 2))
    if stacked:
        placed = _stack(ground, shares)
    else:
        placed = [
            _place_on_ground(requested, i, len(ground), shares[i], request.relation)
            for i, requested in enumerate(ground)
        ]
    for requested, share in zip(sky, sky_shares, strict=False):
        placed.append(_place_in_sky(requested, placed, share))
    relation = request.relation if len(ground) > 1 else "and"
    return Scene(request.background, horizon, tuple(placed), request.weather, relation)


def _place_on_ground(requested: ObjectRequest, slot: int, count: int, share: np.ndarray, relation: str) -> PlacedObject:
    """An object in its own column of the ground, so that no two overlap."""
    size = _SCALED[requested.scale][count] if requested.scale and count <= 2 else _SIZES[count]
    if requested.accessory and not requested.scale:
        size -= size // 7
    start, stop = slot * CELLS // count, (slot + 1) * CELLS // count
    if relation == "next to" and slot < 2:  # both at the wall between them
        left = stop - size if slot == 0 else start
    else:
        left = start + int(share[0] * (stop - start - size + 1))
    return PlacedObject(
        requested.word,
        left,
        28 + int(share[1] * 3),
        size,
        requested.colour,
        requested.scale if count <= 2 else "",
        requested.accessory,
    )


def _stack(ground: list[ObjectRequest], shares: np.ndarray) -> list[PlacedObject]:
    """The first object stands on the second."""
    left, bottom = int(shares[0, 0] * (CELLS - _STACKED_SIZE + 1)), 28 + int(shares[0, 1] * 3)
    heights = (bottom - _STACKED_SIZE, bottom)
    return [PlacedObject(a.word, left, b, _STACKED_SIZE, a.colour) for a, b in zip(ground, heights, strict=True)]


def _place_in_sky(requested: ObjectRequest, others: list[PlacedObject], share: np.ndarray) -> PlacedObject:
    """An object in the sky, over no other if there is room."""
    bottom = _SKY_SIZE + 1 + int(share[1] * 3)
    columns = [
        left
        for left in range(CELLS - _SKY_SIZE + 1)
        if all(o.top >= bottom or o.right <= left or o.left >= left + _SKY_SIZE for o in others)
    ] or list(range(CELLS - _SKY_SIZE + 1))
    return PlacedObject(requested.word, columns[int(share[0] * len(columns))], bottom, _SKY_SIZE, requested.colour)


def sample_scene(
    rng: np.random.Generator,
    count: int | None = None,
    sky: bool | None = None,
    vocabulary: SceneVocabulary = FULL_VOCABULARY,
) -> Scene:
    """Sample a scene.

    Args:
        rng: the only source of randomness; the same state gives the same scene.
        count: number of objects on the ground, 1 to 4; None to sample it.
        sky: whether one more object is in the sky; None for one time in four.
        vocabulary: The vocabulary of its words.
    """
    n = int(rng.choice((1, 2, 3, 4), p=(0.35, 0.38, 0.17, 0.1))) if count is None else count
    has_sky_object = bool(rng.random() < 0.25) if sky is None else sky
    words = [str(word) for word in rng.choice(vocabulary.ground, size=min(n, len(vocabulary.ground)), replace=False)]
    words += [str(rng.choice(vocabulary.sky))] if has_sky_object and vocabulary.sky else []
    relation = str(rng.choice(RELATIONS, p=(0.6, 0.2, 0.2))) if n == 2 else "and"
    scaled = int(rng.integers(n)) if n <= 2 and relation == "and" and rng.random() < 0.4 else -1
    objects = tuple(
        _sample_object(rng, word, i == scaled, n <= 3 and relation != "on top of", vocabulary)
        for i, word in enumerate(words)
    )
    weather = str(rng.choice(vocabulary.weathers)) if rng.random() < 0.15 and vocabulary.weathers else ""
    background = vocabulary.backgrounds[int(rng.integers(len(vocabulary.backgrounds)))]
    wording = int(rng.integers(_NUM_WORDINGS)) if rng.random() < 0.7 else 0
    return replace(arrange(SceneRequest(objects, background, weather, relation), rng), wording=wording)


def _sample_object(
    rng: np.random.Generator, word: str, scaled: bool, may_wear: bool, vocabulary: SceneVocabulary
) -> ObjectRequest:
    object_kind = OBJECT[word]
    may_have_colour = object_kind.colours and rng.random() < 0.5
    colour = str(rng.choice(vocabulary.colours)) if may_have_colour and vocabulary.colours else ""
    scale = str(rng.choice(vocabulary.scales)) if scaled and vocabulary.scales else ""
    wears = may_wear and object_kind.wears and scale != "big" and rng.random() < 0.3
    accessory = str(rng.choice(vocabulary.accessories)) if wears and vocabulary.accessories else ""
    return ObjectRequest(word, colour, scale, accessory)


@dataclass(frozen=True)
class SceneChange:
    """An edit with its truth: two scenes that differ in one property.

    Args:
        kind: one of `CHANGE_KINDS`.
        before: the source's scene.
        after: the edit's scene.
        index: The index of the object concerned, -1 for the whole background.
    """

    kind: str
    before: Scene
    after: Scene
    index: int = -1

    @property
    def prompts(self) -> tuple[str, str]:
        """The prompts before and after."""
        return describe_scene(self.before).text, describe_scene(self.after).text

    def region(self, side: int = 256) -> Mask:
        """The pixels in which the two scenes differ, bool [side, side].

        Args:
            side: The side of the pictures, in pixels.
        """
        before, after = render(self.before, side).pixels, render(self.after, side).pixels
        different: Mask = np.any(before != after, axis=-1)
        return different


def sample_change(rng: np.random.Generator, kind: str) -> SceneChange:
    """Sample a change, with both prompts in the same wording.

    Args:
        rng: the only source of randomness.
        kind: one of `CHANGE_KINDS`.
    """
    while True:
        change = propose_change(rng, kind)
        if change is not None:
            return change


def propose_change(
    rng: np.random.Generator,
    kind: str,
    vocabulary: SceneVocabulary = FULL_VOCABULARY,
    count: int | None = None,
    sky: bool | None = None,
) -> SceneChange | None:
    """Sample a scene and change it; None where it allows no change of that kind.

    Args:
        rng: the only source of randomness.
        kind: one of `CHANGE_KINDS`.
        vocabulary: The vocabulary of both scenes' words.
        count: The argument of `sample_scene`.
        sky: The argument of `sample_scene`.
    """
    return _CHANGES[kind](rng, sample_scene(rng, count, sky, vocabulary), vocabulary)


def _swap(rng: np.random.Generator, scene: Scene, vocabulary: SceneVocabulary) -> SceneChange | None:
    index = int(rng.integers(len(scene.objects)))
    old = scene.objects[index]
    words = vocabulary.sky if old.word in SKY_WORDS else vocabulary.ground
    candidates = [w for w in words if w not in scene.words and (not old.colour or OBJECT[w].colours)]
    candidates = [w for w in candidates if not old.accessory or OBJECT[w].wears]
    return (
        SceneChange("swap", scene, scene.change(index, word=str(rng.choice(candidates))), index) if candidates else None
    )


def _insert(rng: np.random.Generator, scene: Scene, _vocabulary: SceneVocabulary) -> SceneChange | None:
    deleted = _delete(rng, scene, _vocabulary)
    return deleted and SceneChange("insert", deleted.after, deleted.before, deleted.index)


def _delete(rng: np.random.Generator, scene: Scene, _vocabulary: SceneVocabulary) -> SceneChange | None:
    ground = [i for i, placed in enumerate(scene.objects) if placed.word not in SKY_WORDS]
    index = int(rng.integers(len(scene.objects)))
    if (len(ground) < 2 and index in ground) or scene.relation != "and":
        return None
    return SceneChange("delete", scene, scene.without(index), index)


def _recolour(rng: np.random.Generator, scene: Scene, vocabulary: SceneVocabulary) -> SceneChange | None:
    candidates = [i for i, placed in enumerate(scene.objects) if placed.colour]
    if not candidates:
        return None
    index = int(rng.choice(candidates))
    others = [colour for colour in vocabulary.colours if colour != scene.objects[index].colour]
    return (
        SceneChange("recolour", scene, scene.change(index, colour=str(rng.choice(others))), index) if others else None
    )


def _add_accessory(rng: np.random.Generator, scene: Scene, _vocabulary: SceneVocabulary) -> SceneChange | None:
    candidates = [i for i, placed in enumerate(scene.objects) if placed.accessory]
    index = int(rng.choice(candidates)) if candidates else -1
    return SceneChange("dress", scene.change(index, accessory=""), scene, index) if candidates else None


def _resize(_rng: np.random.Generator, scene: Scene, _vocabulary: SceneVocabulary) -> SceneChange | None:
    candidates = [i for i, placed in enumerate(scene.objects) if placed.scale and not placed.accessory]
    if not candidates:
        return None
    index, old = candidates[0], scene.objects[candidates[0]]
    count = sum(placed.word not in SKY_WORDS for placed in scene.objects)
    scale = "small" if old.scale == "big" else "big"
    size = _SCALED[scale][count]
    start, stop = index * CELLS // count, (index + 1) * CELLS // count
    left = min(max(start, old.left + (old.size - size) // 2), stop - size)
    return SceneChange("resize", scene, scene.change(index, scale=scale, size=size, left=left), index)


def _change_background(rng: np.random.Generator, scene: Scene, vocabulary: SceneVocabulary) -> SceneChange | None:
    others = [background for background in vocabulary.backgrounds if background != scene.background]
    return SceneChange("background", scene, replace(scene, background=str(rng.choice(others)))) if others else None


def _change_weather(rng: np.random.Generator, scene: Scene, vocabulary: SceneVocabulary) -> SceneChange | None:
    if scene.weather or not vocabulary.weathers:
        return None
    return SceneChange("weather", scene, replace(scene, weather=str(rng.choice(vocabulary.weathers))))


_CHANGES: dict[str, Callable[[np.random.Generator, Scene, SceneVocabulary], SceneChange | None]] = {
    "swap": _swap,
    "insert": _insert,
    "delete": _delete,
    "recolour": _recolour,
    "resize": _resize,
    "dress": _add_accessory,
    "background": _change_background,
    "weather": _change_weather,
}
CHANGE_KINDS = tuple(_CHANGES)
"""Kinds of change: the last two concern the whole background, the others one object."""
