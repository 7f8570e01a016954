"""Denoising loops: a dense one that caches features, and a sparse one that reuses those of a source.

Knows the UNet, samplers and grids; knows nothing about masks from words, pictures or history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    StepFeatures,
    shifted,
)
from fisedit.features.sites import project_text
from fisedit.machine.stopwatch import STEP_DENSE, STEP_SPARSE, StepWork, span
from fisedit.runners.stepping import SparseEdit, SparseSteps
from fisedit.sampling.dense_steps import DenseSteps
from fisedit.sampling.edit_plans import injected_keys, plans_of, row_plan
from fisedit.sampling.inversion import invert_ddim
from fisedit.sampling.latent_blend import LatentBlend
from fisedit.sampling.linear_scheduler import LinearSampler
from fisedit.sampling.trajectory import Trajectory
from fisedit.sparse.executor import UNetInputs, apply_guidance, mask_queries
from fisedit.sparse.row_layout import scatter
from fisedit.sparse_kernels.row_plan import SparsePlan
from fisedit.values import DENSE_STEP, GenerationConfig

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.sampling.trajectory import LatentEdit
    from fisedit.values import ActiveCells, BoolGrid

StepCallback = Callable[[int, int, Tensor], None]
"""Called before every step with (index, number of steps, estimate of the clean latents [1, 4, h, w])."""


class Engine(DenseSteps):
    """Denoises with one model, for one editor. Arguments as in `EngineBase`."""

    @torch.inference_mode()
    def run_dense(
        self,
        config: GenerationConfig,
        text: Tensor,
        callback: StepCallback,
        blend_source: tuple[ActiveCells, Trajectory] | None = None,
        path: Sequence[Tensor] | None = None,
        start: int = 0,
        inpaint_inputs: Tensor | None = None,
    ) -> Trajectory:
        """Sample densely, as diffusers would, and cache the features of every step.

        Over a source whose first unconditional prediction is valid here, the first step runs the other branch alone.

        Args:
            config: what to generate.
            text: embeddings [B, T, D].
            callback: called before every step.
            blend_source: cells, and the source whose latents stay outside them, which begins with the same latents.
            path: The path of DDPM inversion: latents before every step and at the end [1, 4, h, w]. The noise that
                leads from each to the next is found.
            start: index of the first step to run; those before are taken over from the source.
            inpaint_inputs: The inputs of an inpainting UNet, see `Trajectory`.
        """
        trajectory, source = (
            Trajectory(config, inpaint_inputs=inpaint_inputs),
            blend_source[1] if blend_source else None,
        )
        blend = LatentBlend([blend_source[0]], blend_source[1], config, start) if blend_source else None
        sampler = self.sampler(config, trajectory, noises=blend.noises() if blend else None)
        if source:
            trajectory.copy_first_steps(source, start, sampler)
            assert blend is not None, "a source is there to be blended with"
            trajectory.latents.append(blend.first(sampler))
        else:
            trajectory.latents.append(path[0] if path else sampler.latents)
        for i in range(start, len(sampler.timesteps)):
            callback(i, len(sampler.timesteps), sampler.estimate)
            latents = trajectory.latents[i]
            with span(STEP_DENSE, work=partial(self._dense_work, config)):
                raw, features = self._evaluate(trajectory, sampler, text, i, latents, source)
            prediction = apply_guidance(raw, self._guidance(config))
            if path:  # the sampler steps with it, so that rounding never adds up
                trajectory.noises.append(sampler.noise_between(prediction, i, latents, path[i + 1]))
            next_latents = sampler.step(prediction, i, latents)
            next_latents = blend(i + 1, next_latents, sampler) if blend else next_latents
            shares_branch = source is not None and i == start == 0  # then another trajectory's step is part of it
            remake = None if shares_branch else partial(self._remake, config, text, i, latents, inpaint_inputs)
            self._keep(features, config, i, i - start, remake)
            trajectory.append(prediction, features, next_latents)
        return trajectory

    @torch.inference_mode()
    def invert(
        self,
        config: GenerationConfig,
        text: Tensor,
        clean: Tensor,
        callback: StepCallback,
        inpaint_inputs: Tensor | None = None,
    ) -> Trajectory:
        """DDIM inversion that caches the features of every step, as a sampler on the same path would.

        Args:
            config: The config of the source.
            text: embeddings [B, T, D].
            clean: latents [1, 4, h, w] of the picture.
            callback: called before every step.
            inpaint_inputs: The inputs of an inpainting UNet, see `Trajectory`.

        Raises:
            InputError, NumericsError: as `inversion.invert_ddim`.
        """
        trajectory, sampler, steps = Trajectory(config), self.sampler(config), config.num_inference_steps
        trajectory.inpaint_inputs = inpaint_inputs

        def predict(i: int, latents: Tensor) -> Tensor:
            callback(steps - 1 - i, steps, latents)
            with span(STEP_DENSE, work=partial(self._dense_work, config)):
                raw, features = self._evaluate(trajectory, sampler, text, i, latents)
            trajectory.predictions.insert(0, apply_guidance(raw, self._guidance(config)))
            remake = partial(self._remake, config, text, i, latents, inpaint_inputs)
            self._keep(features, config, i, len(trajectory.features), remake)
            trajectory.features.insert(0, features)
            return raw[-1:]

        def evaluate(timestep: Tensor, latents: Tensor) -> Tensor:
            x = latents if inpaint_inputs is None else torch.cat([latents, inpaint_inputs], 1)
            inputs = UNetInputs(x, timestep, text[-1:], None)
            return self.executor.run_unrecorded(inputs, self.conditioning(config, steps - 1))

        trajectory.latents = invert_ddim(self.pipe, config, clean, evaluate, predict)
        return trajectory

    @torch.inference_mode()
    def run_sparse(self, source: Trajectory, edits: Sequence[LatentEdit], callback: StepCallback) -> list[Trajectory]:
        """Sample sparsely over a source: compute the rows of the dilated masks, read the rest, blend what lies outside.

        A `DENSE_STEP` computes all rows; the steps after it read recorded features shifted by what it found changed.

        Args:
            source: the trajectory to edit.
            edits: one; or several for which `can_batch` holds, which share every evaluation.
            callback: called before every step.

        Returns:
            A trajectory for each edit.

        Raises:
            DriftDetected: by the edit's check.
        """
        edit, features = edits[0], list(source.features)
        with span("setup"):
            steps = SparseSteps(self.graphs, self.executor, [self._sparse_edit(source, features, e) for e in edits])
        own_noise = edit.config.seed != source.config.seed  # then a multistep scheduler begins without history
        blend = LatentBlend([e.cells for e in edits], source, edit.config, edit.start)
        is_linear = steps.uses_graphs and not (own_noise and edit.start)
        sampler = self.sampler(edit.config, source, noises=blend.noises(), linear=is_linear)
        trajectories = [Trajectory(e.config, text_keys=e.text_keys, inpaint_inputs=e.inpaint_inputs) for e in edits]
        read = [e.inpaint_inputs for e in edits if e.inpaint_inputs is not None]
        inpaint_inputs = torch.cat(read) if read else None
        for trajectory in trajectories:
            trajectory.copy_first_steps(source, edit.start, sampler)
        latents, feature_deltas = blend.first(sampler).expand(len(edits), -1, -1, -1), trajectories[0].feature_deltas
        for trajectory, own in zip(trajectories, latents.split(1), strict=True):
            trajectory.latents.append(own)
        with self.tiers.reads(source.features, edit.start) as reads:
            for i, t in enumerate(sampler.timesteps[edit.start :], edit.start):
                callback(i, len(sampler.timesteps), sampler.estimate[:1])
                reads.at(i)
                step_features: Sequence[CachedFeatures]
                if edit.dilation[i] == DENSE_STEP:
                    with span(STEP_DENSE, work=partial(self._dense_work, edit.config)):
                        raw, dense_features = self._evaluate(trajectories[0], sampler, edit.text, i, latents, source)
                    predictions, step_features = apply_guidance(raw, self._guidance(edit.config)), [dense_features]
                    with span("shift"):
                        feature_deltas.append(
                            FeatureDelta.between(source.features[i], dense_features, self._read_sites)
                        )
                    dense_features.encode(self.encoding)
                else:
                    if feature_deltas:
                        features[i] = ShiftedFeatures(source.features[i], feature_deltas[-1])
                    x, timestep_cond = self._inputs(sampler, edit.config, latents, i, inpaint_inputs)
                    with span(STEP_SPARSE, work=partial(self._sparse_work, edits, i)):
                        predictions, step_features = steps.step(i, x, t, timestep_cond)
                if edit.check and i == edit.check.step:
                    difference = (predictions - source.predictions[i]).float().norm(dim=1)[0]
                    edit.check.compare(difference.cpu().numpy())
                latents = blend(i + 1, sampler.step(predictions, i, latents), sampler)
                for e, trajectory in enumerate(trajectories):
                    trajectory.append(predictions[e : e + 1], step_features[e], latents[e : e + 1])
                    self._let_page_out(step_features[e], edit.config, i)
        if isinstance(sampler, LinearSampler):
            sampler.raise_if_not_finite()
        for trajectory in trajectories:
            trajectory.captured, trajectory.uncaptured = steps.captured, steps.reason
        return trajectories

    @torch.inference_mode()
    def run_clip(
        self,
        source: Trajectory,
        edits: Sequence[LatentEdit],
        callback: StepCallback,
        pads: Sequence[Image] = (),
    ) -> list[Tensor]:
        """Sample the frames of a clip sparsely over a source, in one evaluation a step; nothing of them is recorded.

        Args:
            source: the trajectory to edit.
            edits: one a frame; they differ in what adapters read alone, and have no dense steps.
            callback: called before every step.
            pads: The pictures before the first frame and after the last, see `References.clip_conditions`.

        Returns:
            Final latents [1, 4, h, w] of every frame.
        """
        edit, count = edits[0], len(edits)
        conditions = self.references.clip_conditions([e.config for e in edits], pads, self.batch(edit.config))
        plans, text = plans_of(self.executor, edit), edit.text.repeat_interleave(count, 0)
        text_keys: dict[str, Tensor] = {}
        blend = LatentBlend([e.cells for e in edits], source, edit.config, edit.start)
        sampler = self.sampler(edit.config, source, noises=blend.noises())
        Trajectory(edit.config).copy_first_steps(source, edit.start, sampler)
        latents = blend.first(sampler).expand(count, -1, -1, -1)
        read = [e.inpaint_inputs for e in edits if e.inpaint_inputs is not None]
        inpaint_inputs = torch.cat(read) if read else None
        with self.tiers.reads(source.features, edit.start) as reads:
            for i, t in enumerate(sampler.timesteps[edit.start :], edit.start):
                callback(i, len(sampler.timesteps), sampler.estimate[:1])
                reads.at(i)
                x, timestep_cond = self._inputs(sampler, edit.config, latents, i, inpaint_inputs)
                overlay = FeatureOverlay(RepeatedFeatures(source.features[i], count), plans[i])
                stack = AdapterStack(conditions(i))
                with span(STEP_SPARSE, work=partial(self._sparse_work, edits, i)):
                    rows, _ = self.executor.run_sparse(
                        x, t, text, text_keys, overlay, timestep_cond, extra_layers=stack
                    )
                rows = apply_guidance(rows, self._guidance(edit.config))
                still = source.predictions[i].expand(count, -1, -1, -1)
                predictions = scatter(still, plans[i].levels[0].active, rows)
                latents = blend(i + 1, sampler.step(predictions, i, latents), sampler)
        return list(latents.split(1))

    def can_batch(self, source: Trajectory, edits: Sequence[LatentEdit]) -> bool:
        """Return whether captured graphs can run several edits of a source in one batch.

        Args:
            source: the trajectory to edit.
            edits: equal in everything but prompts and masks.
        """
        edit = edits[0]
        return (
            not isinstance(self.graphs.executor_for(self.executor), str)
            and isinstance(self.sampler(edit.config, source, linear=True), LinearSampler)
            and not (
                edit.erases
                or edit.regional
                or edit.config.like
                or edit.start
                or edit.injection
                or edit.check
                or DENSE_STEP in edit.dilation
            )
            and not any(map(shifted, source.features))
            and len({e.text.shape for e in edits}) == 1
        )

    def _sparse_edit(self, source: Trajectory, features: list[CachedFeatures], edit: LatentEdit) -> SparseEdit:
        text, text_keys = edit.text, edit.text_keys
        if edit.regional or edit.read_text is not None:  # masks of later edits are made from the prompt's own alone
            project_text(self.executor.sites, text, text_keys)
            first = text if edit.read_text is None else edit.read_text
            text, text_keys = torch.cat([first, *(own for _, own in edit.regional)], 1), {}
        return SparseEdit(
            plans=plans_of(self.executor, edit),
            features=features,
            predictions=source.predictions,
            text=text,
            text_keys=text_keys,
            injected_text_keys=injected_keys(self.executor, source, edit),
            injected_steps=edit.injection.steps if edit.injection else 0,
            guidance=self._guidance(edit.config),
            extra_layers=partial(self.conditioning, edit.config) if edit.config.like else None,
            budget=self.budget,
            has_dense_steps=DENSE_STEP in edit.dilation[edit.start :],
        )

    def _sparse_work(self, edits: Sequence[LatentEdit], i: int) -> StepWork:
        """Return the work of a sparse step; edits that share a batch have alike masks."""
        plan = plans_of(self.executor, edits[0])[i]
        rows, config = tuple(level.rows for level in plan.levels), edits[0].config
        return StepWork(rows, self.sizes(config), len(edits) * self.batch(config))

    @torch.inference_mode()
    def sample(
        self,
        config: GenerationConfig,
        text: Tensor,
        source: Trajectory,
        steps: int,
        callback: StepCallback | None = None,
    ) -> list[Tensor]:
        """Run the first dense steps from a trajectory's first latents without recording.

        Args:
            config: what to generate.
            text: embeddings [B, T, D].
            source: the trajectory whose first latents are taken.
            steps: how many are run, 0 to N.
            callback: called before every step, or None.

        Returns:
            steps + 1 latents [1, 4, h, w].
        """
        sampler, path = self.sampler(config, source), [source.latents[0]]
        for i, t in enumerate(sampler.timesteps[:steps]):
            if callback:
                callback(i, steps, sampler.estimate)
            x, timestep_cond = self._inputs(sampler, config, path[-1], i, source.inpaint_inputs)
            inputs = UNetInputs(x, t, text, timestep_cond)
            raw = self.executor.run_unrecorded(inputs, self.conditioning(config, i))
            path.append(sampler.step(apply_guidance(raw, self._guidance(config)), i, path[-1]))
        return path

    @torch.inference_mode()
    def record_probe_step(self, config: GenerationConfig, text: Tensor, source: Trajectory, step: int) -> StepFeatures:
        """Record one step of a dense run from a trajectory's first latents, its conditional branch alone.

        Args:
            config: what to generate.
            text: embeddings [B, T, D].
            source: the trajectory whose first latents are taken.
            step: index of the step, 0 to N - 1; those before run unrecorded.
        """
        sampler, path = self.sampler(config, source), self.sample(config, text, source, step)
        t, queries = sampler.timesteps[step], mask_queries(self.executor.sites, self.sizes(config))
        x, timestep_cond = self._inputs(sampler, config, path[-1], step, source.inpaint_inputs)
        return self.executor.run_dense(
            x[-1:], t, text[-1:], {}, queries, timestep_cond, self.conditioning(config, step)
        )[1]

    def row_plan(self, grid: BoolGrid, dilation: int, extra_cells: BoolGrid | None = None) -> SparsePlan:
        """The plan that computes a dilated mask; see `edit_plans.row_plan`."""
        return row_plan(self.executor, grid, dilation, extra_cells)
