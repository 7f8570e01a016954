"""Predicts an edit's mask from a source's recorded attention, or from a few dense steps on the new prompt.

Joins trajectories to the pure functions of this package; knows no history and runs no edit.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fisedit.decoder.decode import decode
from fisedit.errors import InputError, NumericsError, as_text
from fisedit.features.cache import is_shallow
from fisedit.features.sites import project_text
from fisedit.masking import heatmaps, masks, object_masks
from fisedit.masking.attention_maps import affinity, cross_maps
from fisedit.masking.mask_options import LATENTS, OBJECT_MASKS, MaskOptions
from fisedit.masking.segments import segment_tree
from fisedit.models.injection import exclusive
from fisedit.prompts.text_diff import words as split
from fisedit.prompts.whole_picture import object_words
from fisedit.prompts.word_classes import TaggedPrompt
from fisedit.sampling import denoise
from fisedit.sampling.scheduler import mask_steps
from fisedit.sampling.trajectory import max_injection_steps
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import EditKind, EditMask, EditScript, Hunk, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fisedit.features.cache import CachedFeatures
    from fisedit.masking.segments import SegmentTree
    from fisedit.models.families.conditioning import Conditioning
    from fisedit.sampling.engine import Engine
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.values import BoolGrid, GenerationConfig

    Heatmap = NDArray[np.float32]

_SEGMENTS: WeakKeyDictionary[Trajectory, SegmentTree] = WeakKeyDictionary()


INSIDE = 0.8
"""Share of a thing's cells that lie inside a mask, or beside it, where the thing is inside.

In 23 deletions of drawn scenes (256 px, development seed 9100), true masks have all of the thing that goes. Of 58
things that stay they have .31 at most."""


def num_probes(script: EditScript, options: MaskOptions) -> int:
    """Number of dense evaluations that `predict_mask` spends; "things" runs the conditional branch of the last alone.

    Args:
        script: the edit.
        options: how the mask is predicted.
    """
    if options.method == LATENTS:
        return options.probe_steps or 0
    if options.method != OBJECT_MASKS or not _inserts_object(script):
        return 0
    return 1 if options.probe_steps is None else options.probe_steps


def _inserts_object(script: EditScript) -> bool:
    """Return whether the edit inserts an object; unknown, and so False, for a source without a prompt."""
    return bool(script.source_prompt) and any(h.focus_new and not h.focus_old for h in script.hunks)


def restrict_to_words(script: EditScript, words: Collection[str], engine: Engine) -> EditScript:
    """A script localized by the given words of either prompt alone.

    Args:
        script: the edit.
        words: The words of the old or the new prompt.
        engine: The engine whose tokenizer splits the prompts.

    Raises:
        InputError: a word that is in neither prompt.
    """
    with exclusive(engine.pipe.tokenizer):
        old, new = (split(prompt, engine.pipe.tokenizer) for prompt in (script.source_prompt, script.prompt))
    hunks = []
    for word in dict.fromkeys(words):
        focus = [tuple(w for w in side if w.tokens and _same_text(w, word)) for side in (old, new)]
        if not any(focus):
            raise InputError(f"words must be words of the old or the new prompt, got {as_text(word)}")
        hunks.append(Hunk(EditKind.MIXED, (), (), *focus))
    localized = script.kind is EditKind.GLOBAL or (script.kind is EditKind.IDENTICAL and hunks)
    kind = EditKind.MIXED if localized else script.kind
    return replace(script, kind=kind, hunks=tuple(hunks))


def describe_source(script: EditScript) -> EditScript:
    """The script of a prompt for a source without one: every word is new, and the objects that it names localize it.

    A prompt that also names a style or a scene is global, as it is unknown what of it the source shows.
    """
    hunks = script.hunks
    if any(hunk.kind is EditKind.GLOBAL for hunk in hunks) or not any(hunk.focus_new for hunk in hunks):
        reason = f"{script.reason}, and no prompt says what it shows; open it with one, or give words or a mask"
        return replace(script, kind=EditKind.GLOBAL, reason=reason)
    return replace(script, kind=EditKind.INSERT, reason="")


def shared_tokens(script: EditScript, engine: Engine) -> tuple[tuple[int, int], ...]:
    """Token positions (old, new) of the words that both prompts have, and of the start token."""
    with exclusive(engine.pipe.tokenizer):
        old, new = (split(prompt, engine.pipe.tokenizer) for prompt in (script.source_prompt, script.prompt))
    removed = {word for hunk in script.hunks for word in hunk.old}
    added = {word for hunk in script.hunks for word in hunk.new}
    pairs = zip([w for w in old if w not in removed], [w for w in new if w not in added], strict=False)
    tokens = [(i, j) for a, b in pairs if _same_text(a, b.text) for i, j in zip(a.tokens, b.tokens, strict=False)]
    return ((0, 0), *tokens)


def _same_text(word: Word, text: str) -> bool:
    return word.text.casefold() == str(text).strip().casefold()


@torch.inference_mode()
def change_heatmap(
    engine: Engine, source: Trajectory, config: GenerationConfig, text: dict[str, Tensor], script: EditScript
) -> Heatmap:
    """Heatmap of the words that would change.

    Args:
        engine: The engine that recorded the source.
        source: its trajectory.
        config: the source's with the new prompt.
        text: the new prompt's keys and values by cross-attention, complete.
        script: the edit.

    Returns:
        Floats [h, w], 0 to 1.
    """
    steps, grids = _recorded_steps(engine, source, config), engine.grids(config)
    unet, sites = engine.pipe.unet, engine.executor.sites
    with engine.tiers.hold(steps):
        return heatmaps.change_heatmap(
            script, *(cross_maps(unet, sites, steps, keys, grids) for keys in (source.text_keys, text))
        )


@torch.inference_mode()
def predict_mask(
    engine: Engine,
    source: Trajectory,
    config: GenerationConfig,
    text: tuple[Conditioning, dict[str, Tensor]],
    script: EditScript,
    options: MaskOptions,
) -> EditMask:
    """The mask of an edit.

    Args:
        engine: The engine that recorded the source.
        source: its trajectory.
        config: the source's with the new prompt.
        text: the new prompt's conditions, and its keys and values by cross-attention (filled where missing).
        script: the edit, not a global one.
        options: how the mask is predicted.

    Raises:
        NumericsError: NaN in the recorded attention.
        MaskError: the mask has fewer components than `options.instance` asks for.
    """
    project_text(engine.executor.sites, text[0].text, text[1])
    if options.method == LATENTS:
        mask = heatmaps.mask_from_heatmap(_latent_difference(engine, source, config, text[0], options.probe_steps or 0))
    elif options.method == OBJECT_MASKS:
        with engine.tiers.hold(_recorded_steps(engine, source, config)):
            mask = _object_mask(engine, source, config, text, script, num_probes(script, options))
    else:
        sites, unet, grids = engine.executor.sites, engine.pipe.unet, engine.grids(config)
        steps, two_way = _recorded_steps(engine, source, config), heatmaps.METHODS[options.method].two_way
        with engine.tiers.hold(steps):
            old, new = (
                cross_maps(unet, sites, steps, keys, grids, two_way=two_way) for keys in (source.text_keys, text[1])
            )
            mask = heatmaps.predict(script, old, new, *affinity(unet, sites, steps, grids), method=options.method)
    return mask if options.instance is None else replace(mask, grid=masks.select_instance(mask.grid, options.instance))


@torch.inference_mode()
def source_segments(engine: Engine, source: Trajectory, config: GenerationConfig) -> SegmentTree:
    """The segments of a source's picture, joined by its recorded self-attention; found once a source.

    Args:
        engine: The engine that recorded the source.
        source: its trajectory.
        config: The config of the source, with any prompt.

    Raises:
        NumericsError: NaN in the recorded attention.
    """
    if source not in _SEGMENTS:
        steps, grids = _recorded_steps(engine, source, config), engine.grids(config)
        with engine.tiers.hold(steps):
            attention, grid = affinity(engine.pipe.unet, engine.executor.sites, steps, grids)
        if not np.isfinite(attention).all():
            raise NumericsError("recorded attention must be finite, got NaN or infinity; check the model's weights")
        image, _ = decode(engine.pipe.vae, source.latents[-1])
        _SEGMENTS[source] = segment_tree(np.asarray(image.convert("RGB")), attention, grid)
    return _SEGMENTS[source]


@torch.inference_mode()
def things_inside(
    engine: Engine, source: Trajectory, config: GenerationConfig, grid: BoolGrid, named: Collection[str]
) -> tuple[Word, ...]:
    """The words of a source's prompt whose things lie inside a mask.

    Args:
        engine: The engine that recorded the source.
        source: its trajectory.
        config: The config of the source.
        grid: booleans [h, w], the mask.
        named: words that are believed wherever they point.

    Raises:
        NumericsError: NaN in the recorded attention.
    """
    steps = _recorded_steps(engine, source, config)
    with engine.tiers.hold(steps):
        attention = _source_attention(engine, source, config, steps)
    reach, found = dilate(grid, 1), []
    for word in attention.objects:
        hunk = Hunk(EditKind.DELETE, (word,), (), (word,), ())
        mask = object_masks.predict(EditScript(source.config.prompt, "", EditKind.DELETE, (hunk,)), attention)
        is_sure = mask.confidence >= masks.SURE or any(_same_text(word, each) for each in named)
        if is_sure and (mask.grid & reach).sum() >= INSIDE * mask.grid.sum() > 0:
            found.append(word)
    return tuple(found)


def _source_attention(
    engine: Engine, source: Trajectory, config: GenerationConfig, steps: Sequence[CachedFeatures]
) -> object_masks.SourceAttention:
    """The attention of a source's prompt at some recorded steps."""
    sites, unet, grids = engine.executor.sites, engine.pipe.unet, engine.grids(config)
    with exclusive(engine.pipe.tokenizer):
        objects = object_words(TaggedPrompt.from_words(split(source.config.prompt, engine.pipe.tokenizer)))
    maps = object_masks.sharpened(cross_maps(unet, sites, steps, source.text_keys, grids))
    return object_masks.SourceAttention(maps, *affinity(unet, sites, steps, grids), objects)


def _object_mask(
    engine: Engine,
    source: Trajectory,
    config: GenerationConfig,
    text: tuple[Conditioning, dict[str, Tensor]],
    script: EditScript,
    evaluations: int,
) -> EditMask:
    """The mask by "things"; inserted objects are localized in the last of so many dense evaluations."""
    sites, unet, grids = engine.executor.sites, engine.pipe.unet, engine.grids(config)
    steps = _recorded_steps(engine, source, config)
    insertion_steps = steps
    if evaluations:
        insertion_steps = [denoise.record_probe_step(engine, config, text[0], source, evaluations - 1)]
    elif _inserts_object(script) and max_injection_steps(config):  # the layout is least settled at the first step
        insertion_steps = source.features[:1]
    attention = _source_attention(engine, source, config, steps)
    inserted = object_masks.sharpened(cross_maps(unet, sites, insertion_steps, text[1], grids))
    return object_masks.predict(script, attention, inserted)


def _recorded_steps(engine: Engine, source: Trajectory, config: GenerationConfig) -> list[CachedFeatures]:
    """The steps whose queries were recorded for masks; a shallow one has none."""
    steps = [source.features[i] for i in mask_steps(engine.sampler(config).timesteps)]
    return [step for step in steps if not is_shallow(step)]


def _latent_difference(
    engine: Engine, source: Trajectory, config: GenerationConfig, text: Conditioning, steps: int
) -> Heatmap:
    """Mean absolute difference of latents between dense steps on the new prompt and the source's: floats [h, w]."""
    path = denoise.sample(engine, config, text, source, steps)
    differences = [(new - old).float().abs().mean(1)[0] for new, old in zip(path[1:], source.latents[1:], strict=False)]
    total: Heatmap = torch.stack(differences).sum(0).cpu().numpy()
    return total
