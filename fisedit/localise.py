"""Where a source's picture would change for a new prompt: recorded attention, or a few dense steps, becomes a mask.

Joins recorded stories to the pure functions of `masks`; knows no history and runs no edit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fisedit import masks
from fisedit.adapters.base import TURN
from fisedit.attention import affinity, cross_maps, text_keys
from fisedit.errors import InputError
from fisedit.schedule import mask_steps
from fisedit.textdiff import words as split
from fisedit.values import EditKind, EditMask, EditScript, Hunk, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fisedit.cache import StepFeatures
    from fisedit.source import Engine, Story
    from fisedit.values import Recipe

    Heat = NDArray[np.float32]

LATENTS = "latents"
"""The one method that needs dense steps: FISEdit's difference of latents (arXiv 2305.17423)."""

METHODS = (*masks.METHODS, LATENTS)


@dataclass(frozen=True)
class Search:
    """How to look for a mask.

    Args:
        words: look for these instead of what the diff points at; () for the diff's.
        instance: which piece of the mask to keep, counted from the left and from 0; None for all.
        method: one of `METHODS`.
        probe_steps: dense steps to spend on looking; only "latents" needs any.
    """

    words: tuple[str, ...] = ()
    instance: int | None = None
    method: str = masks.DEFAULT
    probe_steps: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"mask_method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if type(self.probe_steps) is not int or self.probe_steps < 0:
            raise InputError(f"probe_steps must be a whole number from 0, got {self.probe_steps!r}")
        if self.method == LATENTS and not self.probe_steps:
            raise InputError("mask_method latents compares dense steps; give probe_steps, for example 10")
        if self.instance is not None and (type(self.instance) is not int or self.instance < 0):
            raise InputError(f"instance must be a whole number from 0, counted from the left, got {self.instance!r}")


def narrowed(script: EditScript, words: Sequence[str], engine: Engine) -> EditScript:
    """A script that points at the given words of either prompt, and at nothing else.

    Raises:
        InputError: a word that is in neither prompt.
    """
    with TURN:
        old, new = (split(prompt, engine.pipe.tokenizer) for prompt in (script.source_prompt, script.prompt))
    hunks = []
    for word in words:
        found = [tuple(w for w in side if w.tokens and _same(w, word)) for side in (old, new)]
        if not any(found):
            raise InputError(f"words must be words of the old or the new prompt, got {word!r}")
        hunks.append(Hunk(EditKind.MIXED, (), (), *found))
    kind = EditKind.MIXED if script.kind is EditKind.GLOBAL else script.kind
    return replace(script, kind=kind, hunks=tuple(hunks))


def undescribed(script: EditScript) -> EditScript:
    """The script of a prompt for a picture that nobody described: every word is new, and the things it names say where.

    A prompt that also names a style or a scene is global: what of it is there already, nobody knows.
    """
    hunks = script.hunks
    if any(hunk.kind is EditKind.GLOBAL for hunk in hunks) or not any(hunk.focus_new for hunk in hunks):
        why = f"{script.reason}, and nobody said what the picture shows; open it with a prompt, or give words or a mask"
        return replace(script, kind=EditKind.GLOBAL, reason=why)
    return replace(script, kind=EditKind.INSERT, reason="")


def kept_tokens(script: EditScript, engine: Engine) -> tuple[tuple[int, int], ...]:
    """Token positions (old, new) of the words that both prompts have, and of the start token."""
    with TURN:
        old, new = (split(prompt, engine.pipe.tokenizer) for prompt in (script.source_prompt, script.prompt))
    gone = {word for hunk in script.hunks for word in hunk.old}
    fresh = {word for hunk in script.hunks for word in hunk.new}
    pairs = zip([w for w in old if w not in gone], [w for w in new if w not in fresh], strict=False)
    tokens = [(i, j) for a, b in pairs if _same(a, b.text) for i, j in zip(a.tokens, b.tokens, strict=False)]
    return ((0, 0), *tokens)


def _same(word: Word, text: str) -> bool:
    return word.text.casefold() == str(text).strip().casefold()


@torch.inference_mode()
def seed_map(engine: Engine, source: Story, recipe: Recipe, text: dict[str, Tensor], script: EditScript) -> Heat:
    """Where the words that would change are looked at: floats [h, w], 0 to 1; `text` as in `predict`."""
    steps, grids = _looks(engine, source, recipe), engine.grids(recipe)
    unet, sites = engine.pipe.unet, engine.executor.sites
    return masks.seed_map(script, *(cross_maps(unet, sites, steps, keys, grids) for keys in (source.text, text)))


@torch.inference_mode()
def predict(
    engine: Engine,
    source: Story,
    recipe: Recipe,
    text: tuple[Tensor, dict[str, Tensor]],
    script: EditScript,
    how: Search,
) -> EditMask:
    """The mask of an edit.

    Args:
        source: its story. recipe: the source's with the new prompt. script: not a global one.
        text: the new prompt's embeddings [B, T, D], and its keys for every cross-attention (filled where missing).

    Raises:
        NumericsError: NaN in what was recorded. MaskError: fewer pieces than `how.instance` asks for.
    """
    sites, unet, grids = engine.executor.sites, engine.pipe.unet, engine.grids(recipe)
    if how.method == LATENTS:
        heat = _moved(engine, source, recipe, text[0], how.probe_steps)
        mask = masks.from_heat(heat)
    else:
        text_keys(sites, *text)
        steps, two_way = _looks(engine, source, recipe), masks.METHODS[how.method].two_way
        old, new = (cross_maps(unet, sites, steps, keys, grids, two_way=two_way) for keys in (source.text, text[1]))
        mask = masks.predict(script, old, new, *affinity(unet, sites, steps, grids), method=how.method)
    return mask if how.instance is None else replace(mask, grid=masks.instance(mask.grid, how.instance))


def _looks(engine: Engine, source: Story, recipe: Recipe) -> list[StepFeatures]:
    """The recorded steps whose queries were remembered."""
    return [source.features[i] for i in mask_steps(engine.sampler(recipe).timesteps)]


def _moved(engine: Engine, source: Story, recipe: Recipe, text: Tensor, steps: int) -> Heat:
    """How far dense steps on the new prompt leave the source's latents, summed over the steps: floats [h, w]."""
    path = engine.sample(recipe, text, source, steps)
    away = [(new - old).float().abs().mean(1)[0] for new, old in zip(path[1:], source.latents[1:], strict=False)]
    total: Heat = torch.stack(away).sum(0).cpu().numpy()
    return total
