"""Runs: pictures made densely and recorded, edited sparsely over a source, sampled for masks, and found by inversion.

Each but the last sets states up and steps them with a runner. Knows engine and grids; knows nothing about masks from
words, pictures or history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisedit.features.cache import StepFeatures, shifted
from fisedit.machine.stopwatch import STEP_DENSE, span
from fisedit.sampling import records
from fisedit.sampling.inversion import invert_ddim
from fisedit.sampling.latent_blend import LatentBlend, filled_from_around
from fisedit.sampling.linear_scheduler import LinearSampler
from fisedit.sampling.step import DenoisingState, StepCallback, denoise
from fisedit.sampling.step_runners import DenseRunner, FrameRunner, SparseRunner, UnrecordedRunner
from fisedit.sampling.trajectory import Trajectory
from fisedit.sparse.executor import UNetInputs, apply_guidance, mask_queries
from fisedit.values import GenerationConfig, Step, next_seed

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.models.families.conditioning import Conditioning
    from fisedit.sampling.engine import Engine
    from fisedit.sampling.trajectory import LatentEdit
    from fisedit.values import ActiveCells


@torch.inference_mode()
def run_dense(
    engine: Engine,
    config: GenerationConfig,
    text: Conditioning,
    callback: StepCallback,
    blend_source: tuple[ActiveCells, Trajectory] | None = None,
    path: Sequence[Tensor] | None = None,
    start: int = 0,
    inpaint_inputs: Tensor | None = None,
) -> Trajectory:
    """Sample densely, as diffusers would, and cache the features of every step.

    Args:
        engine: The engine of the model.
        config: The picture to generate.
        text: The conditions of its prompt.
        callback: called before every step.
        blend_source: cells, and the source whose latents stay outside them, which begins with the same latents.
        path: The path of DDPM inversion, as in `DenseRunner`.
        start: index of the first step to run; those before are taken over from the source.
        inpaint_inputs: The inputs of an inpainting UNet, see `Trajectory`.
    """
    trajectory, source = Trajectory(config, inpaint_inputs=inpaint_inputs), None
    if blend_source is None:
        sampler, blend = engine.sampler(config, trajectory), None
        trajectory.latents.append(path[0] if path else sampler.latents)
    else:
        cells, source = blend_source
        blend = LatentBlend(cells, source, config, start)
        sampler = engine.sampler(config, trajectory, noises=blend.noises())
        trajectory.copy_first_steps(source, start, sampler)
        trajectory.latents.append(blend.first(sampler))
    denoise([DenoisingState(trajectory, sampler, text, blend)], DenseRunner(engine, source, path), callback)
    return trajectory


@torch.inference_mode()
def run_sparse(
    engine: Engine, source: Trajectory, edits: Sequence[LatentEdit], callback: StepCallback
) -> list[Trajectory]:
    """Sample sparsely over a source: compute the rows of the dilated masks, read the rest, blend what lies outside.

    Args:
        engine: The engine of the model.
        source: the trajectory to edit.
        edits: one; or several for which `can_batch` holds, which share every evaluation.
        callback: called before every step.

    Returns:
        A trajectory for each edit.

    Raises:
        DriftDetected: by the edit's check.
    """
    edit, runner = edits[0], SparseRunner(engine, source, edits)
    # With noise of its own, a multistep scheduler begins without history.
    is_linear = runner.steps.uses_graphs and not (edit.config.seed != source.config.seed and edit.mode.start)
    states = [_edit_state(engine, source, each, linear=is_linear) for each in edits]

    def watch(state: DenoisingState) -> None:
        i = state.i - 1
        if edit.check and i == edit.check.step:
            difference = state.trajectory.predictions[i] - source.predictions[i]  # [1, 4, h, w]
            edit.check.compare(difference.float().norm(dim=1)[0].cpu().numpy())

    with engine.tiers.reads(source.features, edit.mode.start) as runner.reads:
        denoise(states, runner, callback, watch=watch)
    runner.finish()
    for state in states:
        if isinstance(state.sampler, LinearSampler):
            state.sampler.raise_if_not_finite()
        state.trajectory.captured, state.trajectory.uncaptured = runner.steps.captured, runner.steps.reason
    return [state.trajectory for state in states]


@torch.inference_mode()
def run_clip(
    engine: Engine,
    source: Trajectory,
    edits: Sequence[LatentEdit],
    callback: StepCallback,
    pads: Sequence[Image] = (),
) -> list[Tensor]:
    """Sample the frames of a clip sparsely over a source, in one evaluation a step; nothing of them is recorded.

    Args:
        engine: The engine of the model.
        source: the trajectory to edit.
        edits: one a frame, as in `FrameRunner`.
        callback: called before every step.
        pads: The pictures before the first frame and after the last, see `References.clip_conditions`.

    Returns:
        Final latents [1, 4, h, w] of every frame.
    """
    runner, states = FrameRunner(engine, source, edits, pads), [_edit_state(engine, source, each) for each in edits]
    with engine.tiers.reads(source.features, edits[0].mode.start) as runner.reads:
        denoise(states, runner, callback)
    return [state.latents for state in states]


def _edit_state(engine: Engine, source: Trajectory, edit: LatentEdit, *, linear: bool = False) -> DenoisingState:
    """Return an edit before its first step; `linear` as in `Engine.sampler`.

    What is erased begins with other noise than the source, over what continues the latents around it.
    """
    config, finished = edit.config, None
    if edit.mode.erases:
        config = replace(config, seed=next_seed(config.seed)) if config.seed == source.config.seed else config
        finished = filled_from_around(source.latents[-1], edit.cells.grid)
    blend = LatentBlend(edit.cells, source, config, edit.mode.start, finished)
    sampler = engine.sampler(config, source, noises=blend.noises(), linear=linear)
    trajectory = Trajectory(edit.config, text_keys=edit.text_keys, inpaint_inputs=edit.inpaint_inputs)
    trajectory.copy_first_steps(source, edit.mode.start, sampler)
    trajectory.latents.append(blend.first(sampler))
    return DenoisingState(trajectory, sampler, edit.text, blend)


def can_batch(engine: Engine, source: Trajectory, edits: Sequence[LatentEdit]) -> bool:
    """Return whether captured graphs can run several edits of a source in one batch.

    Args:
        engine: The engine of the model.
        source: the trajectory to edit.
        edits: equal in everything but prompts and masks.
    """
    edit = edits[0]
    return (
        not isinstance(engine.graphs.executor_for(engine.executor), str)
        and isinstance(engine.sampler(edit.config, source, linear=True), LinearSampler)
        and not (
            edit.mode.needs_mask
            or edit.config.like
            or edit.mode.start
            or edit.injection
            or edit.check
            or Step.DENSE in edit.mode.dilation
        )
        and not any(map(shifted, source.features))
        and len({e.text.text.shape for e in edits}) == 1
    )


@torch.inference_mode()
def sample(
    engine: Engine,
    config: GenerationConfig,
    text: Conditioning,
    source: Trajectory,
    steps: int,
    callback: StepCallback = lambda *_: None,
) -> list[Tensor]:
    """Run the first dense steps from a trajectory's first latents without recording.

    Args:
        engine: The engine of the model.
        config: The picture to generate.
        text: The conditions of its prompt.
        source: the trajectory whose first latents are taken.
        steps: how many are run, 0 to N.
        callback: called before every step.

    Returns:
        steps + 1 latents [1, 4, h, w].
    """
    trajectory = Trajectory(config, [source.latents[0]], inpaint_inputs=source.inpaint_inputs)
    state = DenoisingState(trajectory, engine.sampler(config, source), text)
    denoise([state], UnrecordedRunner(engine), callback, steps=steps)
    return trajectory.latents


@torch.inference_mode()
def record_probe_step(
    engine: Engine, config: GenerationConfig, text: Conditioning, source: Trajectory, step: int
) -> StepFeatures:
    """Record one step of a dense run from a trajectory's first latents, its conditional branch alone.

    Args:
        engine: The engine of the model.
        config: The picture to generate.
        text: The conditions of its prompt.
        source: the trajectory whose first latents are taken.
        step: index of the step, 0 to N - 1; those before run unrecorded.
    """
    sampler, path = engine.sampler(config, source), sample(engine, config, text, source, step)
    t, queries = sampler.timesteps[step], mask_queries(engine.executor.sites, engine.sizes(config))
    x, timestep_cond = engine.inputs(sampler, config, path[-1], step, source.inpaint_inputs)
    return engine.executor.run_dense(
        x[-1:], t, text[-1:], {}, queries, timestep_cond, engine.conditioning(config, step)
    )[1]


@torch.inference_mode()
def invert(
    engine: Engine,
    config: GenerationConfig,
    text: Conditioning,
    clean: Tensor,
    callback: StepCallback,
    inpaint_inputs: Tensor | None = None,
) -> Trajectory:
    """DDIM inversion that caches the features of every step, as a sampler on the same path would.

    Its steps run from the last to the first, and so not through `step`.

    Args:
        engine: The engine of the model.
        config: The config of the source.
        text: The conditions of its prompt.
        clean: latents [1, 4, h, w] of the picture.
        callback: called before every step.
        inpaint_inputs: The inputs of an inpainting UNet, see `Trajectory`.

    Raises:
        InputError, NumericsError: as `inversion.invert_ddim`.
    """
    trajectory, sampler, steps = Trajectory(config), engine.sampler(config), config.num_inference_steps
    trajectory.inpaint_inputs = inpaint_inputs

    def predict(i: int, latents: Tensor) -> Tensor:
        callback(steps - 1 - i, steps, latents)
        with span(STEP_DENSE, work=partial(engine.dense_work, config)):
            raw, features = records.evaluate(engine, trajectory, sampler, text, i, latents)
        trajectory.predictions.insert(0, apply_guidance(raw, engine.guidance(config)))
        remake = partial(records.remake_step, engine, config, text, i, latents, inpaint_inputs)
        records.keep(engine, features, config, i, len(trajectory.features), remake)
        trajectory.features.insert(0, features)
        return raw[-1:]

    def evaluate(timestep: Tensor, latents: Tensor) -> Tensor:
        x = latents if inpaint_inputs is None else torch.cat([latents, inpaint_inputs], 1)
        inputs = UNetInputs(x, timestep, text[-1:], None)
        return engine.executor.run_unrecorded(inputs, engine.conditioning(config, steps - 1))

    trajectory.latents = invert_ddim(engine.pipe, config, clean, evaluate, predict)
    return trajectory
