"""Scenes to prompts in plain English, and prompts to what they request.

Every wording uses the same few keywords, so parsing needs no grammar. A noun names an object, an adjective before it
describes it, and an accessory after "wearing" or "with" is worn by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.scenes.scene import PlacedObject, Scene, SceneError
from benchmarks.scenes.vocabulary import (
    ACCESSORIES,
    BACKGROUND,
    BACKGROUNDS,
    COLOURS,
    OBJECT,
    SCALES,
    SKY_WORDS,
    WEATHER,
    WEATHERS,
)

RELATIONS = ("and", "next to", "on top of")
_OPENINGS = ("", "", "a picture of ", "a drawing of ", "there is ")
_ACCESSORY_WORDS = ("wearing", "with")
_PLACE_PHRASES = {
    place.word: _phrases
    for places in (BACKGROUNDS, WEATHERS)
    for place in places
    if (_phrases := [tuple(phrase.split()[1:]) for phrase in place.phrases])
}
"""Background or weather -> its phrases without their first word."""


@dataclass(frozen=True)
class CharacterSpan:
    """A word's characters [start, stop) in a prompt."""

    start: int
    stop: int


@dataclass(frozen=True)
class ScenePrompt:
    """A prompt, and the spans of the nouns of a scene's `parts`.

    Args:
        text: the prompt.
        spans: in the order of the parts.
    """

    text: str
    spans: tuple[CharacterSpan, ...]


@dataclass(frozen=True)
class ObjectRequest:
    """One object that a prompt requests."""

    word: str
    colour: str = ""
    scale: str = ""
    accessory: str = ""


@dataclass(frozen=True)
class SceneRequest:
    """The parts of a scene that a prompt requests.

    Args:
        objects: in the order of the prompt, those in the sky last.
        background: a word of `BACKGROUND`.
        weather: a word of `WEATHER`, or "".
        relation: one of `RELATIONS`.
    """

    objects: tuple[ObjectRequest, ...]
    background: str
    weather: str = ""
    relation: str = "and"


def describe_scene(scene: Scene) -> ScenePrompt:
    """The prompt of a scene, in its own wording.

    Args:
        scene: The scene, whose `wording` selects the phrases.
    """
    text, spans = "", {}
    for piece, part in _pieces(scene):
        if part is not None:
            spans[part] = CharacterSpan(len(text), len(text) + len(piece))
        text += piece
    return ScenePrompt(text, tuple(spans[part] for part in scene.parts))


def _pieces(scene: Scene) -> Iterator[tuple[str, tuple[int, str] | None]]:
    """The prompt in pieces, each with the part that it names."""
    rng = np.random.default_rng(scene.wording) if scene.wording else None

    def choose(options: tuple[str, ...], probability: float = 0.5) -> str:
        return options[0] if rng is None or rng.random() > probability else options[int(rng.integers(len(options)))]

    opening, background = choose(_OPENINGS), choose(BACKGROUND[scene.background].phrases, 0.8)
    wearing, first = choose(_ACCESSORY_WORDS), choose(("last", "first"), 0.3) == "first"
    under = choose(("under", "below"), 0.3)
    weather = choose(WEATHER[scene.weather].phrases, 0.8) if scene.weather else ""  # last: the rest is worded alike
    ground = [i for i, placed in enumerate(scene.objects) if placed.word not in SKY_WORDS]
    sky = [i for i in range(len(scene.objects)) if i not in ground]
    place = f"{background} {weather}".strip()
    yield (f"{place}, " if first else "") + opening, None
    for rank, index in enumerate(ground):
        if rank:
            last = rank == len(ground) - 1
            yield f" {scene.relation} " if rank == 1 and scene.relation != "and" else " and " if last else ", ", None
        yield from _noun_phrase(scene.objects[index], index, wearing)
    if not first:
        yield f"{' ' if ground else ''}{place}", None
    for rank, index in enumerate(sky):
        yield f" {under} " if rank == 0 else " and ", None
        yield from _noun_phrase(scene.objects[index], index, wearing)


def _noun_phrase(placed: PlacedObject, index: int, wearing: str) -> Iterator[tuple[str, tuple[int, str] | None]]:
    before = " ".join(filter(None, (placed.scale, placed.colour)))
    article = (
        "the" if OBJECT[placed.word].takes_definite_article else "an" if (before or placed.word)[0] in "aeiou" else "a"
    )
    yield " ".join(filter(None, (article, before))) + " ", None
    yield placed.word, (index, placed.word)
    if placed.accessory:
        yield f" {wearing} a ", None
        yield placed.accessory, (index, placed.accessory)


def parse_prompt(prompt: str) -> SceneRequest:
    """Return what a prompt requests; unknown words are ignored.

    Args:
        prompt: in plain English.

    Raises:
        SceneError: it names no background, or no object.
    """
    words = tuple(re.findall(r"[a-z]+", prompt.lower()))
    objects: list[ObjectRequest] = []
    for position, word in enumerate(words):
        if word in OBJECT and not _within_place(words, position):
            object_kind, before = OBJECT[word], _adjectives(words, position)
            colour = next((w for w in before if w in COLOURS and object_kind.colours), "")
            objects.append(ObjectRequest(word, colour, next((w for w in before if w in SCALES), "")))
        elif word in ACCESSORIES and objects and OBJECT[objects[-1].word].wears:
            objects[-1] = ObjectRequest(objects[-1].word, objects[-1].colour, objects[-1].scale, word)
    backgrounds = [name for name in BACKGROUND if _mentions(words, name)]
    if not backgrounds or not objects:
        raise SceneError(f"a scene needs an object and a background, got {prompt!r}: for example 'a cat on a beach'")
    weather = next((name for name in WEATHER if _mentions(words, name)), "")
    text = f" {' '.join(words)} "
    relation = next((r for r in RELATIONS[1:] if f" {r} " in text), "and")
    objects.sort(key=lambda requested: requested.word in SKY_WORDS)
    return SceneRequest(
        tuple({requested.word: requested for requested in objects}.values()), backgrounds[0], weather, relation
    )


def _adjectives(words: tuple[str, ...], position: int) -> tuple[str, ...]:
    start = position
    while start and words[start - 1] in (*COLOURS, *SCALES):
        start -= 1
    return words[start:position]


def _mentions(words: tuple[str, ...], name: str) -> bool:
    text = f" {' '.join(words)} "
    return any(f" {' '.join(phrase)} " in text for phrase in _PLACE_PHRASES[name])


def _within_place(words: tuple[str, ...], position: int) -> bool:
    """Return whether a noun is part of a background's phrase ("inside a house with a wooden floor")."""
    phrases = [phrase for phrases in _PLACE_PHRASES.values() for phrase in phrases if words[position] in phrase]
    return any(
        words[position - phrase.index(words[position]) : position - phrase.index(words[position]) + len(phrase)]
        == phrase
        for phrase in phrases
        if position >= phrase.index(words[position])
    )


def prompt_words() -> tuple[str, ...]:
    """Every word that `describe_scene` can use, in a fixed order."""
    phrases = [*RELATIONS, *_OPENINGS, *_ACCESSORY_WORDS, "a an the under below"]
    phrases += [phrase for places in (BACKGROUNDS, WEATHERS) for place in places for phrase in place.phrases]
    words = [*OBJECT, *ACCESSORIES, *COLOURS, *SCALES, *(word for phrase in phrases for word in phrase.split())]
    return tuple(dict.fromkeys(words))
