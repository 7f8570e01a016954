"""The kinds of step: dense and recorded, dense and unrecorded, sparse over a source, and the frames of a clip together.

Each is a `step.Runner` of one engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisedit.adapters.base import AdapterStack
from fisedit.features.cache import (
    CachedFeatures,
    FeatureDelta,
    FeatureOverlay,
    RepeatedFeatures,
    ShiftedFeatures,
)
from fisedit.features.sites import project_text
from fisedit.machine.stopwatch import STEP_DENSE, STEP_SPARSE, StepWork, span
from fisedit.models.families.conditioning import joined
from fisedit.runners.stepping import SparseEdit, SparseSteps
from fisedit.sampling import records
from fisedit.sampling.edit_plans import injected_keys, plans_of
from fisedit.sparse.executor import UNetInputs, apply_guidance
from fisedit.sparse.row_layout import scatter
from fisedit.values import Step

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.features.tiers import StepReads
    from fisedit.sampling.engine import Engine
    from fisedit.sampling.step import DenoisingState, Predicted
    from fisedit.sampling.trajectory import LatentEdit, Trajectory


ERASED_GUIDANCE = 1.5
"""The most guidance of cells that are erased, which shall be as their surroundings are, more than as words say.

Measured on 34 removals in drawn scenes (256 px, development seed 973, guidance 7.5). A person sees artefacts in 21 of
them as `benchmarks.quality` counts. With a guidance of 7.5 and a drift check it is 28. The tenth percentile is 4 dB
nearer to the drawn truth."""


class DenseRunner:
    """Evaluates whole steps, and keeps what later edits read.

    Over a source whose first unconditional prediction is valid here, the first step runs the other branch alone.

    Args:
        engine: The engine of the model.
        source: The trajectory that is edited; None for a source.
        path: The path of DDPM inversion: latents before every step and at the end [1, 4, h, w]. The noise that leads
            from each to the next is found.
    """

    def __init__(self, engine: Engine, source: Trajectory | None = None, path: Sequence[Tensor] | None = None) -> None:
        self._engine, self._source, self._path = engine, source, path

    def __call__(self, states: Sequence[DenoisingState]) -> Sequence[Predicted]:
        """See `step.Runner`."""
        return [self._run(state) for state in states]

    def _run(self, state: DenoisingState) -> Predicted:
        engine, trajectory, i, latents = self._engine, state.trajectory, state.i, state.latents
        config, start = trajectory.config, trajectory.start
        with span(STEP_DENSE, work=partial(engine.dense_work, config)):
            raw, features = records.evaluate(engine, trajectory, state.sampler, state.text, i, latents, self._source)
        prediction = apply_guidance(raw, engine.guidance(config))
        if self._path:  # the sampler steps with it, so that rounding never adds up
            trajectory.noises.append(state.sampler.noise_between(prediction, i, latents, self._path[i + 1]))
        shares_branch = self._source is not None and i == start == 0  # another trajectory's step is part of it
        remake = partial(records.remake_step, engine, config, state.text, i, latents, trajectory.inpaint_inputs)
        records.keep(engine, features, config, i, i - start, None if shares_branch else remake)
        return prediction, features


class UnrecordedRunner:
    """Evaluates whole steps of which nothing is kept.

    Args:
        engine: The engine of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, states: Sequence[DenoisingState]) -> Sequence[Predicted]:
        """See `step.Runner`."""
        return [(self._predict(state), None) for state in states]

    def _predict(self, state: DenoisingState) -> Tensor:
        engine, config, i = self._engine, state.trajectory.config, state.i
        x, timestep_cond = engine.inputs(state.sampler, config, state.latents, i, state.trajectory.inpaint_inputs)
        inputs = UNetInputs(x, state.sampler.timesteps[i], state.text, timestep_cond)
        raw = engine.executor.run_unrecorded(inputs, engine.conditioning(config, i))
        return apply_guidance(raw, engine.guidance(config))


class SparseRunner:
    """Computes the rows of edits' dilated masks over their source, and reads the rest.

    A `Step.DENSE` computes all rows; the steps after it read recorded features shifted by what it found changed.

    Args:
        engine: The engine of the model.
        source: The trajectory that is edited.
        edits: one; or several for which `can_batch` holds, which share every evaluation.
    """

    def __init__(self, engine: Engine, source: Trajectory, edits: Sequence[LatentEdit]) -> None:
        self._engine, self._source, self._edits = engine, source, edits
        self._features, self._feature_deltas = list(source.features), list[FeatureDelta]()
        self.reads: StepReads | None = None
        with span("setup"):
            sparse_edits = [_sparse_edit(engine, source, self._features, edit) for edit in edits]
            self.steps = SparseSteps(engine.graphs, engine.executor, sparse_edits)

    def __call__(self, states: Sequence[DenoisingState]) -> Sequence[Predicted]:
        """See `step.Runner`."""
        i = states[0].i
        if self.reads is not None:
            self.reads.at(i)
        is_dense = self._edits[0].mode.dilation[i] is Step.DENSE
        if is_dense:
            return [self._dense(state) for state in states]
        predicted = self._sparse(states)
        for _, overlay in predicted:
            overlay.encode(self._engine.encoding)
            records.let_page_out(self._engine, overlay, self._edits[0].config, i)
        return predicted

    def finish(self) -> None:
        """Encode what dense steps found changed and steps no longer read."""
        for delta in self._feature_deltas:
            delta.encode(self._engine.encoding)

    def _dense(self, state: DenoisingState) -> tuple[Tensor, ShiftedFeatures]:
        engine, config, i = self._engine, state.trajectory.config, state.i
        with span(STEP_DENSE, work=partial(engine.dense_work, config)):
            raw, features = records.evaluate(
                engine, state.trajectory, state.sampler, state.text, i, state.latents, self._source
            )
        with span("shift"):
            kept = ShiftedFeatures.dense(self._source.features[i], features, engine.read_sites)
        self.finish()  # with those before
        self._feature_deltas.append(kept.shift)
        state.trajectory.feature_deltas.append(kept.shift)
        self.steps.keep_dense(0, i, features)
        assert kept.own is not None
        kept.own.encode(engine.encoding)
        return apply_guidance(raw, engine.guidance(config)), kept

    def _sparse(self, states: Sequence[DenoisingState]) -> list[tuple[Tensor, FeatureOverlay]]:
        i, sampler = states[0].i, states[0].sampler
        if self._feature_deltas:
            self._features[i] = ShiftedFeatures(self._source.features[i], self._feature_deltas[-1])
        x, timestep_cond = _inputs(self._engine, states)
        with span(STEP_SPARSE, work=partial(_sparse_work, self._engine, self._edits, i)):
            predictions, overlays = self.steps.step(i, x, sampler.timesteps[i], timestep_cond)
        return list(zip(predictions.split(1), overlays, strict=True))


class FrameRunner:
    """Computes the frames of a clip over their source in one evaluation, so that they may attend to one another.

    Nothing of them is recorded.

    Args:
        engine: The engine of the model.
        source: The trajectory that is edited.
        edits: one a frame; they differ in what adapters read alone, and have no dense steps.
        pads: The pictures before the first frame and after the last, see `References.clip_conditions`.
    """

    def __init__(
        self, engine: Engine, source: Trajectory, edits: Sequence[LatentEdit], pads: Sequence[Image] = ()
    ) -> None:
        self._engine, self._source, self._edits = engine, source, edits
        edit, count, batch = edits[0], len(edits), engine.batch(edits[0].config)
        self._conditions = engine.references.clip_conditions([each.config for each in edits], pads, batch)
        self._plans, self._text = plans_of(engine.executor, edit), edit.text.repeated(count)
        self._text_keys: dict[str, Tensor] = {}
        self.reads: StepReads | None = None

    def __call__(self, states: Sequence[DenoisingState]) -> Sequence[Predicted]:
        """See `step.Runner`."""
        engine, i, count = self._engine, states[0].i, len(states)
        if self.reads is not None:
            self.reads.at(i)
        x, timestep_cond = _inputs(engine, states)
        overlay = FeatureOverlay(RepeatedFeatures(self._source.features[i], count), self._plans[i])
        with span(STEP_SPARSE, work=partial(_sparse_work, engine, self._edits, i)):
            rows, _ = engine.executor.run_sparse(
                x,
                states[0].sampler.timesteps[i],
                self._text,
                self._text_keys,
                overlay,
                timestep_cond,
                extra_layers=AdapterStack(self._conditions(i)),
            )
        rows = apply_guidance(rows, engine.guidance(self._edits[0].config))
        still = self._source.predictions[i].expand(count, -1, -1, -1)
        predictions = scatter(still, self._plans[i].levels[0].active, rows)
        return [(prediction, None) for prediction in predictions.split(1)]


def _inputs(engine: Engine, states: Sequence[DenoisingState]) -> tuple[Tensor, Tensor | None]:
    """The inputs of the UNet at the next step of E pictures, as in `Engine.inputs`."""
    first = states[0]
    masked = [each.trajectory.inpaint_inputs for each in states if each.trajectory.inpaint_inputs is not None]
    return engine.inputs(
        first.sampler,
        first.trajectory.config,
        torch.cat([each.latents for each in states]),
        first.i,
        torch.cat(masked) if masked else None,
    )


def _sparse_edit(engine: Engine, source: Trajectory, features: list[CachedFeatures], edit: LatentEdit) -> SparseEdit:
    text, text_keys, guidance = edit.text, edit.text_keys, engine.guidance(edit.config)
    if edit.mode.erases and guidance is not None:
        guidance = min(guidance, ERASED_GUIDANCE)
    if edit.regional_text or edit.read_text is not None:  # masks of later edits are made from the prompt's own alone
        project_text(engine.executor.sites, text.text, text_keys)
        first = text if edit.read_text is None else edit.read_text
        text, text_keys = joined([first, *edit.regional_text]), {}
    return SparseEdit(
        plans=plans_of(engine.executor, edit),
        features=features,
        predictions=source.predictions,
        text=text,
        text_keys=text_keys,
        injected_text_keys=injected_keys(engine.executor, source, edit),
        injected_steps=edit.injection.steps if edit.injection else 0,
        guidance=guidance,
        extra_layers=partial(engine.conditioning, edit.config) if edit.config.like else None,
        budget=engine.budget,
        shallow=edit.mode.shallow,
        has_dense_steps=Step.DENSE in edit.mode.dilation[edit.mode.start :],
    )


def _sparse_work(engine: Engine, edits: Sequence[LatentEdit], i: int) -> StepWork:
    """Return the work of a sparse step; edits that share a batch have alike masks."""
    plan = plans_of(engine.executor, edits[0])[i]
    rows, config = tuple(level.rows for level in plan.levels), edits[0].config
    return StepWork(rows, engine.sizes(config), len(edits) * engine.batch(config))
