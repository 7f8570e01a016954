"""Which edits are made, and their truth: changes of drawn scenes, in words that the model knows.

Everything comes from a seed. Knows scenes and tokenizers; nothing of models, masks or methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from fisedit.errors import InputError
from fisedit.evaluation.scenes.layout import CHANGE_KINDS, SceneChange, sample_change
from fisedit.evaluation.scenes.scene import Scene, render

if TYPE_CHECKING:
    from fisedit.evaluation.scenes.drawing import Mask
    from fisedit.masking.text_diff import Tokenizer

    WordFilter = Callable[[str], bool]

WHOLE = ("background", "weather")
"""Kinds of change that concern the whole picture."""

GENERATED_EVERY = 4
"""One edit in so many starts from a picture of the model's own instead of a drawn one."""

_BEFORE, _AFTER = ("swap", "recolour", "resize", "delete"), ("swap", "recolour", "resize", "insert", "dress")
_TRIES = 3000


@dataclass(frozen=True, eq=False)
class BenchmarkEdit:
    """One edit to make.

    Args:
        kind: a kind of `KINDS`, or a dataset's name for one.
        source_prompt, prompt: what the picture shows, and what it shall show.
        picture: to open, S x S pixels; None to generate one from `seed`.
        truth: pixels that the edit concerns, bool [S, S]; None where nobody knows, or where it is the whole picture.
        whole: whether it concerns the whole picture; None where nobody says.
        change: the scenes before and after, for the judge; None where there are none.
    """

    kind: str
    source_prompt: str
    prompt: str
    picture: Image.Image | None = None
    seed: int = 0
    true_mask: Mask | None = None
    whole: bool | None = None
    change: SceneChange | None = None


def is_single_token(tokenizer: Tokenizer, word: str) -> bool:
    """Whether a model was taught a word: its tokenizer keeps it whole."""
    return len(tokenizer(word, add_special_tokens=False).input_ids) == 1


def vocabulary(tokenizer: Tokenizer) -> WordFilter:
    """`known` for one tokenizer, each word asked once."""
    return cache(partial(is_single_token, tokenizer))


def expressible_kinds(words: WordFilter, seed: int = 0) -> tuple[str, ...]:
    """The kinds of change that can be said in known words.

    Raises:
        InputError: there are none.
    """
    rngs = {kind: np.random.default_rng(seed) for kind in CHANGE_KINDS}
    found = tuple(kind for kind, rng in rngs.items() if any(islice(_attempts(rng, kind, words), _TRIES)))
    if not found:
        raise InputError("the model must know words of drawn scenes, such as cat and beach, as one token each")
    return found


def sample_edits(
    count: int, side: int, words: WordFilter, classes: Sequence[str], seed: int = 0
) -> Iterator[BenchmarkEdit]:
    """Edits at random.

    Args:
        count: how many. side: of the pictures in pixels, a multiple of 32. words: which words may be used.
        classes: kinds of change, one after the other; see `kinds`.
    """
    for i in range(count):
        kind = classes[i % len(classes)]
        change = next(filter(None, _attempts(np.random.default_rng((seed, i)), kind, words)))
        old, new = change.prompts
        edit = BenchmarkEdit(kind, old, new, None, 1000 * seed + i, whole=kind in WHOLE, change=change)
        if i // len(classes) % GENERATED_EVERY != 1:
            picture = Image.fromarray(render(change.before, side).pixels)
            edit = replace(edit, picture=picture, true_mask=true_mask(change, side))
        yield edit


def _attempts(rng: np.random.Generator, kind: str, words: WordFilter) -> Iterator[SceneChange | None]:
    """Changes at random without end, None in the place of each that cannot be said."""
    while True:
        yield _said(sample_change(rng, kind), words)


def _said(change: SceneChange, words: WordFilter) -> SceneChange | None:
    """The change in its own wording if every word is known, in the plainest if that is, or None."""
    plain = replace(change, before=replace(change.before, wording=0), after=replace(change.after, wording=0))
    asked = (set(re.findall(r"[a-z]+", " ".join(way.prompts))) for way in (change, plain))
    return next((way for way, text in zip((change, plain), asked, strict=True) if all(map(words, text))), None)


def true_mask(change: SceneChange, side: int) -> Mask | None:
    """The pixels that a change concerns, bool [side, side]; None for the whole picture.

    They are what can be seen of the object before and after, or of what it wears. An inserted object's are its box: the
    prompt says that it comes, and not in which outline.
    """
    if change.kind in WHOLE:
        return None
    scenes = ((change.before, _BEFORE), (change.after, _AFTER))
    outlines = [_outline(scene, change, side) for scene, concerned in scenes if change.kind in concerned]
    region: Mask = np.any(outlines, axis=0)
    return _box(region) if change.kind == "insert" else region


def _outline(scene: Scene, change: SceneChange, side: int) -> Mask:
    placed = scene.objects[change.index]
    nouns = {"dress": (placed.accessory,), "insert": (placed.word, placed.accessory)}
    nouns["delete"] = nouns["insert"]
    parts = [(change.index, word) for word in nouns.get(change.kind, (placed.word,))]
    masks = render(scene, side).masks
    seen: Mask = np.any([mask for mask, part in zip(masks, scene.parts, strict=True) if part in parts], axis=0)
    return seen


def _box(region: Mask) -> Mask:
    rows, columns = (np.flatnonzero(region.any(axis)) for axis in (1, 0))
    box = np.zeros_like(region)
    box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
    return box
