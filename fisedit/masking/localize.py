"""Where a source's picture would change for a new prompt: recorded attention, or a few dense steps, becomes a mask.

Joins recorded trajectories to the pure functions of `masks`; knows no history and runs no edit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fisedit.errors import InputError
from fisedit.masking import heatmaps, masks, object_masks
from fisedit.masking.attention_maps import affinity, cross_maps
from fisedit.masking.text_diff import words as split
from fisedit.masking.word_classes import Sentence, named_things
from fisedit.models.injection import TURN
from fisedit.sampling.scheduler import mask_steps
from fisedit.sampling.trajectory import kept_steps
from fisedit.sparse.modules import text_keys
from fisedit.values import EditKind, EditMask, EditScript, Hunk, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fisedit.sampling.denoise import Engine
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.sparse.feature_cache import CachedFeatures
    from fisedit.values import GenerationConfig

    Heat = NDArray[np.float32]

THINGS = DEFAULT = "things"
"""The config of `things`, which `fisedit bench masks` compares with the others."""

LATENTS = "latents"
"""FISEdit's difference of latents (arXiv 2305.17423); it needs dense steps."""

METHODS = (THINGS, *heatmaps.METHODS, LATENTS)


@dataclass(frozen=True)
class Search:
    """How to look for a mask.

    Args:
        words: look for these instead of what the diff points at; () for the diff's.
        instance: which piece of the mask to keep, counted from the left and from 0; None for all.
        method: one of `METHODS`.
        probe_steps: dense steps on the new prompt to spend on looking; None for one where "things" has a thing to look
            for that the source has not. "latents" needs some, the others need none.
    """

    words: tuple[str, ...] = ()
    instance: int | None = None
    method: str = DEFAULT
    probe_steps: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"mask_method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.probe_steps is not None and (type(self.probe_steps) is not int or self.probe_steps < 0):
            raise InputError(f"probe_steps must be a whole number from 0, got {self.probe_steps!r}")
        if self.method == LATENTS and not self.probe_steps:
            raise InputError("mask_method latents compares dense steps; give probe_steps, for example 10")
        if self.instance is not None and (type(self.instance) is not int or self.instance < 0):
            raise InputError(f"instance must be a whole number from 0, counted from the left, got {self.instance!r}")


def probes(script: EditScript, how: Search) -> int:
    """How many dense evaluations `predict` spends; the last one of "things" runs the prompt's own branch alone."""
    if how.method == LATENTS:
        return how.probe_steps or 0
    if how.method != THINGS or not _comes(script):
        return 0
    return 1 if how.probe_steps is None else how.probe_steps


def _comes(script: EditScript) -> bool:
    """Whether a thing comes that the source has not; of a picture that nobody described, nobody knows."""
    return bool(script.source_prompt) and any(h.focus_new and not h.focus_old for h in script.hunks)


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
def seed_map(
    engine: Engine, source: Trajectory, config: GenerationConfig, text: dict[str, Tensor], script: EditScript
) -> Heat:
    """Where the words that would change are looked at: floats [h, w], 0 to 1; `text` as in `predict`."""
    steps, grids = _looks(engine, source, config), engine.grids(config)
    unet, sites = engine.pipe.unet, engine.executor.sites
    return heatmaps.seed_map(script, *(cross_maps(unet, sites, steps, keys, grids) for keys in (source.text, text)))


@torch.inference_mode()
def predict(
    engine: Engine,
    source: Trajectory,
    config: GenerationConfig,
    text: tuple[Tensor, dict[str, Tensor]],
    script: EditScript,
    how: Search,
) -> EditMask:
    """The mask of an edit.

    Args:
        source: its trajectory. config: the source's with the new prompt. script: not a global one.
        text: the new prompt's embeddings [B, T, D], and its keys for every cross-attention (filled where missing).

    Raises:
        NumericsError: NaN in what was recorded. MaskError: fewer pieces than `how.instance` asks for.
    """
    text_keys(engine.executor.sites, *text)
    if how.method == LATENTS:
        mask = heatmaps.from_heat(_moved(engine, source, config, text[0], how.probe_steps or 0))
    elif how.method == THINGS:
        mask = _things(engine, source, config, text, script, probes(script, how))
    else:
        sites, unet, grids = engine.executor.sites, engine.pipe.unet, engine.grids(config)
        steps, two_way = _looks(engine, source, config), heatmaps.METHODS[how.method].two_way
        old, new = (cross_maps(unet, sites, steps, keys, grids, two_way=two_way) for keys in (source.text, text[1]))
        mask = heatmaps.predict(script, old, new, *affinity(unet, sites, steps, grids), method=how.method)
    return mask if how.instance is None else replace(mask, grid=masks.instance(mask.grid, how.instance))


def _things(
    engine: Engine,
    source: Trajectory,
    config: GenerationConfig,
    text: tuple[Tensor, dict[str, Tensor]],
    script: EditScript,
    evaluations: int,
) -> EditMask:
    """The mask by "things"; what comes is looked for in the last of so many dense evaluations."""
    sites, unet, grids = engine.executor.sites, engine.pipe.unet, engine.grids(config)
    steps = _looks(engine, source, config)
    where = steps
    if evaluations:
        where = [engine.look(config, text[0], source, evaluations - 1)]
    elif _comes(script) and kept_steps(config):  # the earlier, the less is settled of what is where
        where = source.features[:1]
    with TURN:
        named = named_things(Sentence.of(split(script.source_prompt, engine.pipe.tokenizer)))
    maps = cross_maps(unet, sites, steps, source.text, grids)
    scene = object_masks.Scene(maps, *affinity(unet, sites, steps, grids), named)
    return object_masks.predict(script, scene, cross_maps(unet, sites, where, text[1], grids))


def _looks(engine: Engine, source: Trajectory, config: GenerationConfig) -> list[CachedFeatures]:
    """The recorded steps whose queries were remembered."""
    return [source.features[i] for i in mask_steps(engine.sampler(config).timesteps)]


def _moved(engine: Engine, source: Trajectory, config: GenerationConfig, text: Tensor, steps: int) -> Heat:
    """How far dense steps on the new prompt leave the source's latents, summed over the steps: floats [h, w]."""
    path = engine.sample(config, text, source, steps)
    away = [(new - old).float().abs().mean(1)[0] for new, old in zip(path[1:], source.latents[1:], strict=False)]
    total: Heat = torch.stack(away).sum(0).cpu().numpy()
    return total
