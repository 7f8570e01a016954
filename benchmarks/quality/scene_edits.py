"""Edits of drawn scenes with their true masks, in words that the model knows, of scenes held out of training.

Everything is sampled from a seed. Knows scenes, tokenizers and vocabularies; nothing of mask prediction or methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from benchmarks.scenes.held_out import is_unseen
from benchmarks.scenes.layout import CHANGE_KINDS, SceneChange, propose_change
from benchmarks.scenes.scene import Scene, render
from benchmarks.scenes.vocabulary import SKY_WORDS, SceneVocabulary
from fisedit.bench.edit_case import BenchmarkEdit
from fisedit.errors import InputError
from fisedit.models.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from benchmarks.scenes.drawing import Mask
    from fisedit.prompts.text_diff import Tokenizer

    WordFilter = Callable[[str], bool]

GLOBAL_KINDS = ("background", "weather")
"""Kinds of change that concern the whole picture."""

DELETE = "delete"
"""The kind of change that takes an object away."""

GENERATED_EVERY = 4
"""One edit in this many starts from a generated picture instead of a drawn one."""

_BEFORE, _AFTER = ("swap", "recolour", "resize", DELETE), ("swap", "recolour", "resize", "insert", "dress")
_MAX_ATTEMPTS = 2000

VISIBLE_DIFFERENCE = 32
"""Grey levels by which a pixel of an object differs from what is behind it, in any channel, so that it is seen."""


def is_single_token(tokenizer: Tokenizer, word: str) -> bool:
    """Return whether a tokenizer encodes a word as one token, without which its model was not trained on it.

    Args:
        tokenizer: the model's.
        word: in lower case.
    """
    return len(tokenizer(word, add_special_tokens=False).input_ids) == 1


def single_token_words(tokenizer: Tokenizer) -> WordFilter:
    """`is_single_token` for one tokenizer, cached."""
    return cache(partial(is_single_token, tokenizer))


def known_words(pipe: Any) -> WordFilter:
    """The words that a pipeline was trained on: single tokens, in its vocabulary where it has one.

    Args:
        pipe: any pipeline.
    """
    vocabulary, is_token = vocabulary_of(pipe), single_token_words(pipe.tokenizer)
    return is_token if vocabulary is None else lambda word: word in vocabulary.words and is_token(word)


def available_kinds(words: WordFilter, seed: int = 0) -> tuple[str, ...]:
    """The kinds of change whose prompts need only known words.

    Args:
        words: whether a word is known.
        seed: The seed of the changes that are tried.

    Raises:
        InputError: there are none.
    """
    rngs = {kind: np.random.default_rng(seed) for kind in CHANGE_KINDS}
    kinds = tuple(kind for kind, rng in rngs.items() if any(islice(_attempts(rng, kind, words), _MAX_ATTEMPTS)))
    if not kinds:
        raise InputError("the model must know words of drawn scenes, such as cat and beach, as one token each")
    return kinds


def sample_edits(
    count: int, side: int, words: WordFilter, classes: Sequence[str], seed: int = 0
) -> Iterator[BenchmarkEdit]:
    """Sample edits.

    Args:
        count: number of edits.
        side: The side of the pictures in pixels, a multiple of 32.
        words: whether a word may be used.
        classes: kinds of change, in turn; see `available_kinds`.
        seed: The seed of all of them.
    """
    for i in range(count):
        kind = classes[i % len(classes)]
        change = next(filter(None, _attempts(np.random.default_rng((seed, i)), kind, words)))
        old, new = change.prompts
        edit = BenchmarkEdit(kind, old, new, None, 1000 * seed + i, is_global=kind in GLOBAL_KINDS, change=change)
        if i // len(classes) % GENERATED_EVERY != 1:
            picture = Image.fromarray(render(change.before, side).pixels)
            true_pixels, removed = true_mask(change, side), removed_pixels(change, side)
            edit = replace(edit, picture=picture, true_mask=true_pixels, removed=removed)
        yield edit


def _attempts(rng: np.random.Generator, kind: str, words: WordFilter) -> Iterator[SceneChange | None]:
    """Endless changes, None in place of each that training may have seen, or whose prompts need unknown words."""
    vocabulary = SceneVocabulary.from_filter(words)
    count: int | None = None
    sky: bool | None = None
    while vocabulary.ground and vocabulary.backgrounds:
        change = propose_change(rng, kind, vocabulary, count, sky)
        if change and count is None:  # scenes of many objects are held out more often: their share stays as it is
            flying = [placed.word in SKY_WORDS for placed in max(change.before.objects, change.after.objects, key=len)]
            count, sky = len(flying) - sum(flying), any(flying)
        unseen = change and is_unseen(change.before) and is_unseen(change.after)
        yield _choose_wording(change, words) if change and unseen else None


def _choose_wording(change: SceneChange, words: WordFilter) -> SceneChange | None:
    """The change in its own wording if every word is known, in the plainest one if that is, or None."""
    plain = replace(change, before=replace(change.before, wording=0), after=replace(change.after, wording=0))
    words_used = (set(re.findall(r"[a-z]+", " ".join(candidate.prompts))) for candidate in (change, plain))
    return next(
        (candidate for candidate, text in zip((change, plain), words_used, strict=True) if all(map(words, text))), None
    )


def true_mask(change: SceneChange, side: int) -> Mask | None:
    """The pixels that a change concerns.

    They are the visible pixels of the object before and after, or of its accessory.

    Args:
        change: the scenes before and after.
        side: The side of the pictures in pixels, a multiple of 32.

    Returns:
        Booleans [side, side]; None for the whole picture.
    """
    if change.kind in GLOBAL_KINDS:
        return None
    scenes = ((change.before, _BEFORE), (change.after, _AFTER))
    visible = [_visible_pixels(scene, change, side) for scene, kinds in scenes if change.kind in kinds]
    region: Mask = np.any(visible, axis=0)
    return region


def removed_pixels(change: SceneChange, side: int) -> Mask | None:
    """The pixels where an object that is replaced or deleted is seen before what is behind it.

    Args:
        change: the scenes before and after.
        side: The side of the pictures in pixels, a multiple of 32.

    Returns:
        Booleans [side, side]; None for kinds of change that remove no object.
    """
    if change.kind not in ("swap", DELETE):
        return None
    before, objects = change.before, change.before.objects
    without = replace(before, objects=(*objects[: change.index], *objects[change.index + 1 :]))
    levels = [np.asarray(render(scene, side).pixels, int) for scene in (before, without)]
    visible: Mask = np.abs(np.subtract(*levels)).max(-1) > VISIBLE_DIFFERENCE
    if change.kind == "swap":  # what the object wears, the new one wears too
        rendered, placed = render(before, side), before.objects[change.index]
        worn = [
            mask
            for mask, part in zip(rendered.masks, before.parts, strict=True)
            if part == (change.index, placed.accessory)
        ]
        visible &= ~np.any(worn, axis=0) if worn else True
    return visible


def _visible_pixels(scene: Scene, change: SceneChange, side: int) -> Mask:
    placed = scene.objects[change.index]
    nouns = {"dress": (placed.accessory,), "insert": (placed.word, placed.accessory)}
    nouns[DELETE] = nouns["insert"]
    parts = [(change.index, word) for word in nouns.get(change.kind, (placed.word,))]
    masks = render(scene, side).masks
    visible: Mask = np.any([mask for mask, part in zip(masks, scene.parts, strict=True) if part in parts], axis=0)
    return visible
