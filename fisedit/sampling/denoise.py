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
from fisedit.adapters.references import References
from fisedit.adapters.textual_inversion import used
from fisedit.errors import PageError
from fisedit.models.injection import exclusive
from fisedit.models.stopwatch import STEP_DENSE, STEP_SPARSE, StepWork, span
from fisedit.sampling.edit_plans import injected_keys, plans_of, row_plan
from fisedit.sampling.inversion import invert_ddim
from fisedit.sampling.latent_blend import LatentBlend
from fisedit.sampling.linear_scheduler import Coefficients, LinearSampler, coefficients
from fisedit.sampling.prompt_encoding import PromptEncoder
from fisedit.sampling.scheduler import Sampler, mask_steps
from fisedit.sampling.trajectory import Trajectory, max_injection_steps
from fisedit.sampling.trajectory_pages import RecordedSource, from_pages
from fisedit.sparse.cost_model import CostedLayers, Costs
from fisedit.sparse.executor import Executor, UNetInputs, apply_guidance, mask_queries
from fisedit.sparse.feature_cache import (
    CachedFeatures,
    FeatureDelta,
    FeatureOverlay,
    RepeatedFeatures,
    ShiftedFeatures,
    StepFeatures,
    scatter,
    shifted,
    with_last_branch,
)
from fisedit.sparse.feature_codec import AS_RECORDED, FeatureEncoding
from fisedit.sparse.feature_tiers import FeatureTiers
from fisedit.sparse.modules import LayerSite, Role, loras, project_text
from fisedit.sparse.record_size import RecordSize
from fisedit.sparse.stepping import Graphs, SparseEdit, SparseSteps
from fisedit.sparse_kernels.row_plan import SparsePlan
from fisedit.values import DENSE_STEP, GenerationConfig, level_grids

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from PIL.Image import Image

    from fisedit.sampling.trajectory import LatentEdit
    from fisedit.sparse.cost_table import CostTable
    from fisedit.sparse.feature_tiers import Remake
    from fisedit.storage.pages import Page
    from fisedit.values import ActiveCells, BoolGrid

StepCallback = Callable[[int, int, Tensor], None]
"""Called before every step with (index, number of steps, estimate of the clean latents [1, 4, h, w])."""


class Engine:
    """A pipeline and its executor; stateless between calls, so that several editors may share it.

    Args:
        pipe: the model.
        graphs: of the pipeline's UNet, if others have some already; None for the default, on CUDA devices.
        budget: bytes of features that a source keeps on the device, and that captured graphs gather there for an edit;
            None for no limit. Steps that do not fit wait in host memory.
        encoding: of recorded features.
        tiers: where recorded steps lie; None for memory without a bound.

    Attributes:
        table: what this machine takes, measured; None where it was not.
    """

    def __init__(
        self,
        pipe: StableDiffusionPipeline,
        graphs: Graphs | None = None,
        budget: int | None = None,
        encoding: FeatureEncoding = AS_RECORDED,
        tiers: FeatureTiers | None = None,
    ) -> None:
        self.pipe, self.budget, self.encoding = pipe, budget, encoding
        self.tiers = FeatureTiers() if tiers is None else tiers
        self.executor = Executor(pipe.unet)
        self.references = References(pipe, self.executor)
        self.graphs = Graphs() if graphs is None else graphs
        self._coefficients: dict[object, tuple[Coefficients, ...] | None] = {}
        self._encoder = PromptEncoder(pipe, self.graphs)
        self.table: CostTable | None = None

    @property
    def _read_sites(self) -> dict[str, LayerSite]:
        """The sites whose maps sparse steps read, by name."""
        return {site.name: site for site in self.executor.sites if site.role is not Role.QUERY}

    def guided(self, config: GenerationConfig) -> bool:
        """Whether both branches run; distilled models take guidance as an input instead."""
        return config.guided and self.pipe.unet.config.time_cond_proj_dim is None

    def refresh(self) -> None:
        """Notice LoRAs that were added, removed or scaled."""
        if self.executor.refresh():
            self.references.forget()

    def conditioning(self, config: GenerationConfig, step: int) -> AdapterStack | None:
        """The adapters of a config's step with what they read of its references, or None.

        Args:
            config: of the picture.
            step: its index.

        Raises:
            AdapterError: one is missing.
        """
        return AdapterStack(self.references.conditions(config, self.batch(config), step)) if config.like else None

    def costs(self, config: GenerationConfig, *, recorded: bool = False) -> Costs:
        """What evaluations and decodes of a config cost.

        Args:
            config: of the source or the edit.
            recorded: the source was made with the config's adapters, so that edits read all that they recorded.
        """
        executor = self.executor
        layers = CostedLayers(
            executor.sites, self.pipe.vae, self.grids(config), self._encoder.length(config, guided=self.guided(config))
        )
        adapter_macs = partial(self._adapter_macs, config, recorded) if config.like else None
        captured = self.graphs.is_enabled(executor.device)
        steps, batch = config.num_timesteps, self.batch(config)
        return Costs(layers, steps, batch, executor.device, captured, adapter_macs, self.table)

    def _adapter_macs(self, config: GenerationConfig, recorded: bool, plan: SparsePlan | None) -> int:
        """MACs of one branch of a step's adapters, in the mean over steps; of a dense step without a plan."""
        arguments = self.pipe.unet, self.grids(config), plan
        shares = self.references.unread_conditions(config, self.batch(config))
        return round(sum(share * adapter.macs(*arguments, recorded=recorded) for adapter, share in shares))

    def has_adapter_features(self, trajectory: Trajectory, config: GenerationConfig) -> bool:
        """Whether a trajectory's features include those of a config's adapters."""
        return self.references.are_recorded(config, trajectory.features)

    def unconditional(self, source: Trajectory, config: GenerationConfig, text: Tensor, step: int) -> Tensor | None:
        """The source's unconditional prediction of a step, if it is valid for an edit; that of step 0 alone is.

        Args:
            source: the trajectory to edit.
            config: of the edit.
            text: embeddings [B, T, D] of the edit.
            step: index of the step, 0 to N - 1.

        Returns:
            [1, 4, h, w], or None.
        """
        recorded = source.unconditional_for(config) if step == 0 else None
        return recorded[1] if recorded is not None and torch.equal(recorded[0], text[:1]) else None

    def batch(self, config: GenerationConfig) -> int:
        """B, the branches of one evaluation."""
        return 2 if self.guided(config) else 1

    def grids(self, config: GenerationConfig) -> list[tuple[int, int]]:
        """(height, width) of every level, finest first."""
        return level_grids(config, self.executor.num_levels)

    def sizes(self, config: GenerationConfig) -> tuple[int, ...]:
        """Positions of every level, finest first."""
        return tuple(height * width for height, width in self.grids(config))

    def record_size(
        self, config: GenerationConfig, encoding: FeatureEncoding | None = None, itemsize: int = 0
    ) -> RecordSize:
        """What a config's steps record.

        Args:
            config: of the picture.
            encoding: of a source's maps; None for the engine's.
            itemsize: bytes of a number of the model; 0 for what it has now.
        """
        sites, size, now = self.executor.sites, itemsize or self.pipe.unet.dtype.itemsize, self.encoding
        return RecordSize(sites, self.sizes(config), self.batch(config), size, now if encoding is None else encoding)

    def recorded_bytes(self, config: GenerationConfig, start: int = 0, size: RecordSize | None = None) -> int:
        """Bytes that dense steps from one on record.

        Args:
            config: of the picture.
            start: the first step.
            size: of its steps; None for `record_size`.
        """
        size = size or self.record_size(config)
        timesteps = self.sampler(config).timesteps
        queried = {*range(max_injection_steps(config)), *mask_steps(timesteps)} & {*range(start, len(timesteps))}
        names = mask_queries(self.executor.sites, size.sizes)
        return size.step * (len(timesteps) - start) + size.queries(names) * len(queried)

    def sampler(
        self,
        config: GenerationConfig,
        source: Trajectory | None = None,
        *,
        noises: Sequence[Tensor] | None = None,
        linear: bool = False,
    ) -> Sampler:
        """A fresh run of the config's scheduler, with the noise that inversion found for its source.

        Args:
            config: scheduler, steps, seed and size.
            source: whose noises are used, if inversion found some.
            noises: of every step, instead; None for the source's.
            linear: as a `LinearSampler`, which never makes the host wait, where the scheduler's steps are linear.
        """
        unet, scheduler_config = self.pipe.unet, self.pipe.scheduler.config
        if noises is None:
            noises = source.noises if source else []
        arguments = config, scheduler_config, unet.config.out_channels, self.executor.device, unet.dtype, noises
        if not linear:
            return Sampler(*arguments)
        key = config.scheduler, config.num_inference_steps, bool(noises), str(scheduler_config)
        if key not in self._coefficients:
            self._coefficients[key] = coefficients(config, scheduler_config, noisy=bool(noises))
        steps = self._coefficients[key]
        return Sampler(*arguments) if steps is None else LinearSampler(steps, *arguments)

    def encode(self, config: GenerationConfig) -> Tensor:
        """Text embeddings; see `PromptEncoder.encode`."""
        return self._encoder.encode(config, guided=self.guided(config))

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
            path: of DDPM inversion, latents before every step and at the end [1, 4, h, w]: the noise that leads from
                each to the next is found.
            start: index of the first step to run; those before are taken over from the source.
            inpaint_inputs: as in `Trajectory`.
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
        for i, t in enumerate(sampler.timesteps[start:], start):
            callback(i, len(sampler.timesteps), sampler.estimate)
            latents = trajectory.latents[i]
            with span(STEP_DENSE, work=partial(self._dense_work, config)):
                raw, features = self._evaluate(trajectory, sampler, text, i, latents, source)
            prediction = apply_guidance(raw, self._guidance(config))
            if path:  # the sampler steps with it, so that rounding never adds up
                trajectory.noises.append(sampler.noise_between(prediction, t, latents, path[i + 1]))
            next_latents = sampler.step(prediction, t, latents)
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
            config: of the source.
            text: embeddings [B, T, D].
            clean: latents [1, 4, h, w] of the picture.
            callback: called before every step.
            inpaint_inputs: as in `Trajectory`.

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
                    x, timestep_cond = self._inputs(sampler, edit.config, latents, t, inpaint_inputs)
                    with span(STEP_SPARSE, work=partial(self._sparse_work, edits, i)):
                        predictions, step_features = steps.step(i, x, t, timestep_cond)
                if edit.check and i == edit.check.step:
                    difference = (predictions - source.predictions[i]).float().norm(dim=1)[0]
                    edit.check.compare(difference.cpu().numpy())
                latents = blend(i + 1, sampler.step(predictions, t, latents), sampler)
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
            pads: as in `References.clip_conditions`.

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
        with self.tiers.reads(source.features, edit.start) as reads:
            for i, t in enumerate(sampler.timesteps[edit.start :], edit.start):
                callback(i, len(sampler.timesteps), sampler.estimate[:1])
                reads.at(i)
                x, timestep_cond = self._inputs(sampler, edit.config, latents, t, edit.inpaint_inputs)
                overlay = FeatureOverlay(RepeatedFeatures(source.features[i], count), plans[i])
                stack = AdapterStack(conditions(i))
                with span(STEP_SPARSE, work=partial(self._sparse_work, edits, i)):
                    rows, _ = self.executor.run_sparse(
                        x, t, text, text_keys, overlay, timestep_cond, extra_layers=stack
                    )
                rows = apply_guidance(rows, self._guidance(edit.config))
                still = source.predictions[i].expand(count, -1, -1, -1)
                predictions = scatter(still, plans[i].levels[0].active, rows)
                latents = blend(i + 1, sampler.step(predictions, t, latents), sampler)
        return list(latents.split(1))

    def can_batch(self, source: Trajectory, edits: Sequence[LatentEdit]) -> bool:
        """Whether captured graphs can run several edits of a source in one batch.

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

    def _dense_work(self, config: GenerationConfig) -> StepWork:
        """Of a dense step."""
        sizes = self.sizes(config)
        return StepWork(sizes, sizes, self.batch(config))

    def _sparse_work(self, edits: Sequence[LatentEdit], i: int) -> StepWork:
        """Of a sparse step; edits that share a batch have alike masks."""
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
            x, timestep_cond = self._inputs(sampler, config, path[-1], t, source.inpaint_inputs)
            inputs = UNetInputs(x, t, text, timestep_cond)
            raw = self.executor.run_unrecorded(inputs, self.conditioning(config, i))
            path.append(sampler.step(apply_guidance(raw, self._guidance(config)), t, path[-1]))
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
        x, timestep_cond = self._inputs(sampler, config, path[-1], t, source.inpaint_inputs)
        return self.executor.run_dense(
            x[-1:], t, text[-1:], {}, queries, timestep_cond, self.conditioning(config, step)
        )[1]

    def row_plan(self, grid: BoolGrid, dilation: int, extra_cells: BoolGrid | None = None) -> SparsePlan:
        """The plan that computes a dilated mask; see `edit_plans.row_plan`."""
        return row_plan(self.executor, grid, dilation, extra_cells)

    def _evaluate(
        self,
        trajectory: Trajectory,
        sampler: Sampler,
        text: Tensor,
        i: int,
        latents: Tensor,
        source: Trajectory | None = None,
    ) -> tuple[Tensor, StepFeatures]:
        """The i-th step's predictions [B, 4, h, w], and what of it later edits and masks may read."""
        config, t = trajectory.config, sampler.timesteps[i]
        records_queries = i < max_injection_steps(config) or i in mask_steps(sampler.timesteps)
        queries = mask_queries(self.executor.sites, self.sizes(config)) if records_queries else frozenset()
        x, timestep_cond = self._inputs(sampler, config, latents, t, trajectory.inpaint_inputs)
        unconditional = self.unconditional(source, config, text, i) if source else None
        if source and unconditional is not None:
            project_text(self.executor.sites, text, trajectory.text_keys)
            conditional_keys = {name: keys[-1:] for name, keys in trajectory.text_keys.items()}
            conditional, recorded = self.executor.run_dense(x[-1:], t, text[-1:], conditional_keys, queries)
            raw, features = (
                torch.cat([unconditional, conditional]),
                with_last_branch(source.features[i], recorded, self._read_sites),
            )
        else:
            raw, features = self.executor.run_dense(
                x, t, text, trajectory.text_keys, queries, timestep_cond, self.conditioning(config, i)
            )
        if i == 0 and self.guided(config):
            trajectory.unconditional = text[:1], raw[:1]
        return raw, features

    def _keep(
        self, features: StepFeatures, config: GenerationConfig, i: int, before: int, remake: Remake | None
    ) -> None:
        """Encode a recorded step, and move it to host memory or to disk if what is before it is full.

        Args:
            features: as they were recorded.
            config: of the trajectory.
            i: the step.
            before: steps of its trajectory that were recorded before it.
            remake: makes it again; None where that cannot be done.
        """
        features.encode(self.encoding)
        if self.budget is not None and (before + 1) * features.own_bytes > self.budget:
            features.move_to_host()
        self._let_page_out(features, config, i, remake)

    def _let_page_out(
        self, step: CachedFeatures, config: GenerationConfig, i: int, remake: Remake | None = None
    ) -> None:
        """Let a step's maps be paged out, if they are in host memory."""
        if isinstance(step, FeatureOverlay) and step.share > 1:
            return  # what edits of a batch share goes when all of them go
        on_host = self.executor.device.type == "cpu" or (isinstance(step, StepFeatures) and step.offloaded_from)
        if on_host and not isinstance(step, ShiftedFeatures):
            disposable = remake is not None and self._remake_is_faster(config, step.own_bytes)
            self.tiers.add(step, i, remake, disposable=disposable)

    def _remake_is_faster(self, config: GenerationConfig, nbytes: int) -> bool:
        """Whether a dense step takes less than reading a page of so many bytes, by this machine's cost table."""
        if self.table is None or "disk read" not in self.table.rates:
            return False
        sizes = self.sizes(config)
        return self.table.step("dense", sizes, sizes, self.batch(config)) < nbytes / self.table.rates["disk read"]

    def load(self, config: GenerationConfig, pages: Sequence[Page], made_with: str) -> RecordedSource:
        """A source from its pages, whose steps are read when an edit needs them.

        Args:
            config: of the source.
            pages: as `trajectory_pages.to_pages` made them.
            made_with: identifies model and settings, as in `to_pages`.

        Raises:
            PageError: they are gone, damaged, or of another model or other settings.
        """
        source = from_pages(config, pages, made_with, self.tiers, self.executor.device)
        for i, step in enumerate(source.trajectory.features):
            assert isinstance(step, StepFeatures)
            trajectory = source.trajectory
            remake = partial(self._remake, config, None, i, trajectory.latents[i], trajectory.inpaint_inputs)
            self.tiers.add(step, i, remake, page=pages[i + 1])
        return source

    @torch.inference_mode()
    def _remake(
        self, config: GenerationConfig, text: Tensor | None, i: int, latents: Tensor, inpaint_inputs: Tensor | None
    ) -> StepFeatures:
        """What a dense step of a trajectory recorded, made again to the bit; without embeddings the prompt is encoded.

        Raises:
            PageError: the model's LoRAs or adapters are others now.
        """
        others = config.loras != loras(self.pipe.unet) or used(self.pipe, config) != config.textual_inversions
        if others or any(r.adapter not in self.references.adapters for r in config.like):
            raise PageError("recorded features are gone, and the model's LoRAs, adapters or words are others now")
        if text is None:
            with exclusive(self.pipe.text_encoder, self.pipe.tokenizer):
                text = self.encode(config)
        again = Trajectory(config, inpaint_inputs=inpaint_inputs)
        features = self._evaluate(again, self.sampler(config), text, i, latents)[1]
        features.encode(self.encoding)
        if self.executor.device.type != "cpu":
            features.move_to_host()
        return features

    def _inputs(
        self, sampler: Sampler, config: GenerationConfig, latents: Tensor, t: Tensor, inpaint_inputs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = sampler.scaled(torch.cat([latents] * self.batch(config)), t)
        if inpaint_inputs is not None:
            x = torch.cat([x, torch.cat([inpaint_inputs] * self.batch(config))], 1)
        width = self.pipe.unet.config.time_cond_proj_dim
        if width is None:
            return x, None
        scale = torch.tensor([config.guidance_scale - 1])
        return x, self.pipe.get_guidance_scale_embedding(scale, embedding_dim=width).to(x)

    def _guidance(self, config: GenerationConfig) -> float | None:
        """The scale of classifier-free guidance, None where one branch runs."""
        return config.guidance_scale if self.guided(config) else None
