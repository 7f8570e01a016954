"""A dense step and its record: evaluated, encoded, paged out, read from pages, and made again where a page is gone.

Functions of an engine; they know no edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisedit.adapters.textual_inversion import used
from fisedit.errors import PageError
from fisedit.features.cache import (
    CachedFeatures,
    FeatureOverlay,
    ShiftedFeatures,
    StepFeatures,
    is_shallow,
    with_last_branch,
)
from fisedit.features.sites import loras, project_text
from fisedit.models.injection import exclusive
from fisedit.sampling.scheduler import Sampler, mask_steps
from fisedit.sampling.trajectory import Trajectory, max_injection_steps
from fisedit.sampling.trajectory_pages import RecordedSource, from_pages
from fisedit.sparse.executor import mask_queries
from fisedit.values import GenerationConfig, Shallow

if TYPE_CHECKING:
    from fisedit.features.pages import Page
    from fisedit.features.tiers import Remake
    from fisedit.models.families.conditioning import Conditioning
    from fisedit.sampling.engine import Engine
    from fisedit.sampling.step import StepCallback
    from fisedit.values import EditMode


def evaluate(
    engine: Engine,
    trajectory: Trajectory,
    sampler: Sampler,
    text: Conditioning,
    i: int,
    latents: Tensor,
    source: Trajectory | None = None,
) -> tuple[Tensor, StepFeatures]:
    """The i-th step's predictions [B, 4, h, w], and what of it later edits and masks may read."""
    config, t = trajectory.config, sampler.timesteps[i]
    records_queries = i < max_injection_steps(config) or i in mask_steps(sampler.timesteps)
    queries = mask_queries(engine.executor.sites, engine.sizes(config)) if records_queries else frozenset()
    x, timestep_cond = engine.inputs(sampler, config, latents, i, trajectory.inpaint_inputs)
    unconditional = engine.unconditional(source, config, text, i) if source else None
    if source and unconditional is not None:
        project_text(engine.executor.sites, text.text, trajectory.text_keys)
        conditional_keys = {name: keys[-1:] for name, keys in trajectory.text_keys.items()}
        conditional, recorded = engine.executor.run_dense(x[-1:], t, text[-1:], conditional_keys, queries)
        raw, features = (
            torch.cat([unconditional, conditional]),
            with_last_branch(source.features[i], recorded, engine.read_sites),
        )
    else:
        raw, features = engine.executor.run_dense(
            x, t, text, trajectory.text_keys, queries, timestep_cond, engine.conditioning(config, i)
        )
    if i == 0 and engine.guided(config):
        trajectory.unconditional = text[:1].key, raw[:1]
    return raw, features


def keep(
    engine: Engine, features: StepFeatures, config: GenerationConfig, i: int, before: int, remake: Remake | None
) -> None:
    """Encode a recorded step, and move it to host memory or to disk if what is before it is full.

    Args:
        engine: The engine of the model.
        features: The features of the step as they were recorded.
        config: The config of the trajectory.
        i: the step.
        before: steps of its trajectory that were recorded before it.
        remake: makes it again; None where that cannot be done.
    """
    features.encode(engine.encoding)
    if engine.budget is not None and (before + 1) * features.own_bytes > engine.budget:
        features.move_to_host()
    let_page_out(engine, features, config, i, remake)


def let_page_out(
    engine: Engine, step: CachedFeatures, config: GenerationConfig, i: int, remake: Remake | None = None
) -> None:
    """Let a step's maps be paged out, if they are in host memory."""
    if isinstance(step, FeatureOverlay) and step.share > 1:
        return  # what edits of a batch share goes when all of them go
    on_host = engine.executor.device.type == "cpu" or (isinstance(step, StepFeatures) and step.offloaded_from)
    if on_host and not isinstance(step, ShiftedFeatures):
        disposable = remake is not None and _remake_is_faster(engine, config, step.own_bytes)
        engine.tiers.add(step, i, remake, disposable=disposable)


def _remake_is_faster(engine: Engine, config: GenerationConfig, nbytes: int) -> bool:
    """Return whether a dense step takes less than reading a page of so many bytes, by this machine's cost table."""
    if engine.table is None or "disk read" not in engine.table.rates:
        return False
    sizes = engine.sizes(config)
    return engine.table.step("dense", sizes, sizes, engine.batch(config)) < nbytes / engine.table.rates["disk read"]


def steps_without_features(source: Trajectory, mode: EditMode) -> list[int]:
    """The steps of an edit that compute all layers, and at which its source computed the last one alone.

    Args:
        source: The trajectory that is edited.
        mode: The way that the edit is computed.
    """
    full = [i for i, dilation in enumerate(mode.dilation) if i >= mode.start and not isinstance(dilation, Shallow)]
    return [i for i in full if is_shallow(source.features[i])]


@torch.inference_mode()
def deepened(
    engine: Engine, source: Trajectory, text: Conditioning, steps: Sequence[int], callback: StepCallback
) -> Trajectory:
    """A trajectory of which some shallow steps are recorded densely, from its own latents; the given one stays.

    Args:
        engine: The engine of the model.
        source: The trajectory.
        text: The conditions of its prompt.
        steps: indices.
        callback: called before every one of them; may raise.
    """
    sampler, config, features = engine.sampler(source.config, source), source.config, list(source.features)
    for count, i in enumerate(steps):
        latents, inputs = source.latents[i], source.inpaint_inputs
        callback(count, len(steps), latents)
        found = evaluate(engine, source, sampler, text, i, latents)[1]
        keep(engine, found, config, i, count, partial(remake_step, engine, config, text, i, latents, inputs))
        features[i] = found
    return replace(source, features=features)


def load(engine: Engine, config: GenerationConfig, pages: Sequence[Page], made_with: str) -> RecordedSource:
    """A source from its pages, whose steps are read when an edit needs them.

    Args:
        engine: The engine of the model.
        config: The config of the source.
        pages: The pages that `trajectory_pages.to_pages` made.
        made_with: identifies model and settings, as in `to_pages`.

    Raises:
        PageError: they are gone, damaged, or of another model or other settings.
    """
    source = from_pages(config, pages, made_with, engine.tiers, engine.executor.device)
    for i, step in enumerate(source.trajectory.features):
        assert isinstance(step, StepFeatures)
        trajectory = source.trajectory
        remake = partial(remake_step, engine, config, None, i, trajectory.latents[i], trajectory.inpaint_inputs)
        engine.tiers.add(step, i, remake, page=pages[i + 1])
    return source


@torch.inference_mode()
def remake_step(
    engine: Engine,
    config: GenerationConfig,
    text: Conditioning | None,
    i: int,
    latents: Tensor,
    inpaint_inputs: Tensor | None,
) -> StepFeatures:
    """Make again, to the bit, what a dense step of a trajectory recorded; without embeddings the prompt is encoded.

    Raises:
        PageError: the model's LoRAs or adapters are others now.
    """
    others = (
        config.loras != loras(engine.pipe.unet, engine.pipe.text_encoder)
        or used(engine.pipe, config) != config.textual_inversions
    )
    if others or any(r.adapter not in engine.references.adapters for r in config.like):
        raise PageError("recorded features are gone, and the model's LoRAs, adapters or words are others now")
    if text is None:
        with exclusive(engine.pipe.text_encoder, engine.pipe.tokenizer):
            text = engine.encode(config)
    again = Trajectory(config, inpaint_inputs=inpaint_inputs)
    features = evaluate(engine, again, engine.sampler(config), text, i, latents)[1]
    features.encode(engine.encoding)
    if engine.executor.device.type != "cpu":
        features.move_to_host()
    return features
