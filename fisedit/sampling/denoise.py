"""Two ways to write a picture's trajectory: densely, or sparsely over another trajectory.

Knows the UNet, samplers and grids; knows nothing about masks from words, pictures or history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fisedit.adapters.base import AdapterStack
from fisedit.adapters.references import References, level_grids
from fisedit.models.prompt_weighting import embeddings, parse
from fisedit.sampling.inversion import inverted
from fisedit.sampling.linear_scheduler import Coefficients, LinearSampler, coefficients
from fisedit.sampling.scheduler import Sampler, blend_latents, mask_steps
from fisedit.sampling.trajectory import Trajectory, max_injection_steps
from fisedit.sparse.cost_model import CostedLayers, Costs
from fisedit.sparse.executor import Executor, apply_guidance, mask_queries
from fisedit.sparse.feature_cache import CachedFeatures, FeatureDelta, ShiftedFeatures, StepFeatures, completed, shifted
from fisedit.sparse.modules import Role, text_keys
from fisedit.sparse.stepping import Graphs, SparseEdit, SparseSteps
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import SparsePlan, make_plan
from fisedit.values import DENSE_STEP, GenerationConfig

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from fisedit.masking.drift_check import DriftCheck
    from fisedit.sampling.trajectory import AttentionInjection, Beginning
    from fisedit.values import BoolGrid

StepCallback = Callable[[int, int, Tensor], None]
"""Called before every step with (index, number of steps, estimate of the clean latents [1, 4, h, w])."""


class Engine:
    """A pipeline and its executor; stateless between calls, so that several editors may share it.

    Args:
        graphs: of the pipeline's UNet, if others have some already; None for the default, on CUDA devices.
    """

    def __init__(self, pipe: StableDiffusionPipeline, graphs: Graphs | None = None) -> None:
        self.pipe = pipe
        self.executor = Executor(pipe.unet)
        self.references = References(pipe, self.executor)
        self.graphs = Graphs() if graphs is None else graphs
        self._coefficients: dict[object, tuple[Coefficients, ...] | None] = {}

    @property
    def _levels(self) -> dict[str, int]:
        """Of the sites whose maps sparse steps read."""
        return {site.name: site.level for site in self.executor.sites if site.role is not Role.QUERY}

    def guided(self, config: GenerationConfig) -> bool:
        """Whether both branches run; distilled models take guidance as an input instead."""
        return config.guided and self.pipe.unet.config.time_cond_proj_dim is None

    def refresh(self) -> None:
        """Take note of LoRAs that came, went or got another scale."""
        if self.executor.refresh():
            self.references.forget()

    def conditioning(self, config: GenerationConfig) -> AdapterStack | None:
        """A config's adapters with what they read of its references, or None. Raises AdapterError without them."""
        return AdapterStack(self.references.conditions(config, self.batch(config))) if config.like else None

    def costs(self, config: GenerationConfig, *, recorded: bool = False) -> Costs:
        """What evaluations and decodes of a config cost.

        Args:
            config: of the source or the edit.
            recorded: the source was made with the config's adapters, so that edits read all that they recorded.
        """
        executor, tokenizer = self.executor, self.pipe.tokenizer
        layers = CostedLayers(executor.sites, self.pipe.vae, self.grids(config), int(tokenizer.model_max_length))
        adapter_macs = partial(self._adapter_macs, config, recorded) if config.like else None
        captured = self.graphs.on(executor.device)
        return Costs(layers, config.num_inference_steps, self.batch(config), executor.device, captured, adapter_macs)

    def _adapter_macs(self, config: GenerationConfig, recorded: bool, plan: SparsePlan | None) -> int:
        """MACs of one branch of a step's adapters; of a dense step without a plan."""
        adapters = AdapterStack(self.references.unread_conditions(config))
        return adapters.macs(self.pipe.unet, self.grids(config), plan, recorded=recorded)

    def remembers(self, trajectory: Trajectory, config: GenerationConfig) -> bool:
        """Whether a trajectory recorded what a config's adapters saw."""
        return self.references.are_recorded(config, trajectory.features[0])

    def without(self, source: Trajectory, config: GenerationConfig, text: Tensor, step: int) -> Tensor | None:
        """What an edit's branch without words predicts [1, 4, h, w], at the one step where its source found it: the
        first."""
        known = source.known_to(config) if step == 0 else None
        return known[1] if known is not None and torch.equal(known[0], text[:1]) else None

    def batch(self, config: GenerationConfig) -> int:
        """B, the branches of one evaluation."""
        return 2 if self.guided(config) else 1

    def grids(self, config: GenerationConfig) -> list[tuple[int, int]]:
        """(height, width) of every level, finest first."""
        return level_grids(config, self.executor.num_levels)

    def sizes(self, config: GenerationConfig) -> tuple[int, ...]:
        """Positions of every level, finest first."""
        return tuple(height * width for height, width in self.grids(config))

    def sampler(self, config: GenerationConfig, source: Trajectory | None = None, *, linear: bool = False) -> Sampler:
        """A fresh run of the config's scheduler, with the noise that inversion found for its source.

        Args:
            linear: where its steps are sums, as one that never makes the host wait.
        """
        unet, noises, scheduler_config = self.pipe.unet, source.noises if source else [], self.pipe.scheduler.config
        rest = config, scheduler_config, unet.config.in_channels, self.executor.device, unet.dtype, noises
        if not linear:
            return Sampler(*rest)
        key = config.scheduler, config.num_inference_steps, bool(noises), str(scheduler_config)
        if key not in self._coefficients:
            self._coefficients[key] = coefficients(config, scheduler_config, noisy=bool(noises))
        steps = self._coefficients[key]
        return Sampler(*rest) if steps is None else LinearSampler(steps, *rest)

    def encode(self, config: GenerationConfig) -> Tensor:
        """Text embeddings [B, T, D], the negative prompt's first; diffusers' own where nothing is weighted."""
        guided, prompt, against = self.guided(config), parse(config.prompt), parse(config.negative_prompt)
        with self.graphs.cache.reading(self.pipe.text_encoder):
            positive, negative = self.pipe.encode_prompt(
                prompt.text,
                self.executor.device,
                1,
                guided,
                against.text,
                prompt_embeds=embeddings(prompt, self.pipe),
                negative_prompt_embeds=embeddings(against, self.pipe) if guided else None,
            )
        return torch.cat([negative, positive]) if guided else positive

    @torch.inference_mode()
    def record(
        self,
        config: GenerationConfig,
        text: Tensor,
        watch: StepCallback,
        pin: tuple[BoolGrid, Trajectory] | None = None,
        path: Sequence[Tensor] | None = None,
        start: int = 0,
        budget: int | None = None,
    ) -> Trajectory:
        """Sample densely, as diffusers would, and remember everything.

        Over a source the first step runs the branch with words alone, and takes the other from there.

        Args:
            text: embeddings [B, T, D]. watch: called before every step.
            pin: a grid [h, w] and the trajectory that stays outside it, whose first latents are those of this one.
            path: of DDPM inversion, latents before every step and at the end [1, 4, h, w]: the noise that leads from
                each to the next is found.
            start: so many first steps are taken over from the source. budget: bytes of features that may stay on the
                device; those of the steps that do not fit wait in host memory.
        """
        trajectory = Trajectory(config)
        sampler = self.sampler(config, pin[1] if pin else trajectory)
        keep = _keeper(*pin) if pin else lambda i, latents: latents
        if pin:
            trajectory.take_over(pin[1], start, sampler)
        else:
            trajectory.latents.append(path[0] if path else sampler.latents)
        for i, t in enumerate(sampler.timesteps[start:], start):
            watch(i, len(sampler.timesteps), sampler.estimate)
            raw, maps = self._evaluate(trajectory, sampler, text, i, trajectory.latents[i], pin[1] if pin else None)
            trajectory.predictions.append(apply_guidance(raw, self._guidance(config)))
            trajectory.features.append(_placed(maps, len(trajectory.features) - start, budget))
            if path:  # the sampler steps with it, so that rounding never adds up
                trajectory.noises.append(
                    sampler.noise_between(trajectory.predictions[i], t, trajectory.latents[i], path[i + 1])
                )
            trajectory.latents.append(keep(i + 1, sampler.step(trajectory.predictions[i], t, trajectory.latents[i])))
        return trajectory

    @torch.inference_mode()
    def invert(
        self, config: GenerationConfig, text: Tensor, clean: Tensor, watch: StepCallback, budget: int | None = None
    ) -> Trajectory:
        """DDIM inversion, and everything remembered on the way: a sampler that passed there would see the same.

        Args:
            text: embeddings [B, T, D]. clean: latents [1, 4, h, w]. watch: called before every step.
            budget: as of `record`.

        Raises:
            InputError, NumericsError: as `inversion.inverted`.
        """
        trajectory, sampler, steps = Trajectory(config), self.sampler(config), config.num_inference_steps

        def look(i: int, latents: Tensor) -> Tensor:
            watch(steps - 1 - i, steps, latents)
            raw, maps = self._evaluate(trajectory, sampler, text, i, latents)
            trajectory.predictions.insert(0, apply_guidance(raw, self._guidance(config)))
            trajectory.features.insert(0, _placed(maps, len(trajectory.features), budget))
            return raw[-1:]

        trajectory.latents = inverted(self.pipe, config, text[-1:], clean, look)
        return trajectory

    @torch.inference_mode()
    def replay(
        self,
        source: Trajectory,
        config: GenerationConfig,
        text: Tensor,
        text_cache: dict[str, Tensor],
        grid: BoolGrid,
        growth: Sequence[int],
        watch: StepCallback,
        check: DriftCheck | None = None,
        structure: AttentionInjection | None = None,
        start: int = 0,
        budget: int | None = None,
    ) -> Trajectory:
        """Sample sparsely over a trajectory: compute the dilated mask's rows, read the rest, pin what lies outside.

        Args:
            config: the source's with the new prompt. text, text_cache: its embeddings, and keys known already.
            grid: booleans [h, w]. growth: latent cells to compute beyond the mask, one number per step. Those that are
                DENSE_STEP run dense, and the steps after them read what is recorded shifted by what they found changed.
            check: computes some more cells at one step and looks at them. structure: what is kept of the source's.
            start: so many first steps are taken over. budget: bytes that captured graphs may gather on the device.

        Raises:
            DriftDetected: what `check` found.
        """
        plans = self._plans(grid, growth, check, start)
        kept = self._kept_text(source, text, text_cache, structure) if structure else {}
        features = list(source.features)
        edit = SparseEdit(
            plans,
            features,
            source.predictions,
            text,
            text_cache,
            kept,
            structure.steps if structure else 0,
            self._guidance(config),
            self.conditioning(config),
            budget,
            mixed=DENSE_STEP in growth[start:],
        )
        steps = SparseSteps(self.graphs, self.executor, [edit])
        sampler = self.sampler(config, source, linear=steps.uses_graphs)
        trajectory = Trajectory(config, text=text_cache)
        keep = _keeper(grid, source)
        trajectory.take_over(source, start, sampler)
        for i, t in enumerate(sampler.timesteps[start:], start):
            watch(i, len(sampler.timesteps), sampler.estimate)
            made: CachedFeatures
            if growth[i] == DENSE_STEP:
                raw, made = self._evaluate(trajectory, sampler, text, i, trajectory.latents[i], source)
                prediction = apply_guidance(raw, self._guidance(config))
                trajectory.shifts.append(FeatureDelta.between(source.features[i], made, self._levels))
            else:
                if trajectory.shifts:
                    features[i] = ShiftedFeatures(source.features[i], trajectory.shifts[-1])
                x, extra = self._inputs(sampler, config, trajectory.latents[i], t)
                prediction, (made,) = steps.step(i, x, t, extra)
            trajectory.predictions.append(prediction)
            if check and i == check.step:
                moved = (prediction - source.predictions[i]).float().norm(dim=1)[0].cpu().numpy()
                check.compare(moved)
            trajectory.features.append(made)
            trajectory.latents.append(keep(i + 1, sampler.step(prediction, t, trajectory.latents[i])))
        if isinstance(sampler, LinearSampler):
            sampler.check()
        trajectory.captured, trajectory.uncaptured = steps.captured, steps.reason
        return trajectory

    @torch.inference_mode()
    def replay_many(
        self,
        source: Trajectory,
        edits: Sequence[Beginning],
        growth: Sequence[int],
        watch: StepCallback,
        budget: int | None = None,
    ) -> list[Trajectory] | None:
        """`replay` of several edits of one source in one batch, by captured graphs; None where that cannot be.

        Args:
            edits: they agree in everything but prompts and masks. The others as in `replay`.
        """
        config = edits[0].config
        sampler, graphs = self.sampler(config, source, linear=True), self.graphs.of(self.executor)
        if isinstance(graphs, str) or not isinstance(sampler, LinearSampler) or config.like or DENSE_STEP in growth:
            return None
        if any(map(shifted, source.features)):
            return None
        plans = [self._plans(edit.grid, growth, None, 0) for edit in edits]
        shared = source.features, source.predictions
        sparse = [
            SparseEdit(plan, *shared, edit.text, edit.cache, {}, 0, self._guidance(config), budget=budget)
            for plan, edit in zip(plans, edits, strict=True)
        ]
        steps, count = SparseSteps(self.graphs, self.executor, sparse), len(sampler.timesteps)
        trajectories = [
            Trajectory(e.config, text=e.cache, noises=source.noises, without=source.known_to(e.config)) for e in edits
        ]
        keep = _keeper(np.stack([edit.grid for edit in edits])[:, None], source)
        latents = source.latents[0].expand(len(edits), -1, -1, -1)
        for i, t in enumerate(sampler.timesteps):
            watch(i, count, sampler.estimate[:1])
            x, extra = self._inputs(sampler, config, latents, t)
            predictions, overlays = steps.step(i, x, t, extra)
            _tell(trajectories, latents, predictions, overlays)
            latents = keep(i + 1, sampler.step(predictions, t, latents))
        sampler.check()
        _tell(trajectories, latents)
        for trajectory in trajectories:
            trajectory.captured, trajectory.uncaptured = steps.captured, steps.reason
        return trajectories

    def _plans(
        self, grid: BoolGrid, growth: Sequence[int], check: DriftCheck | None, start: int
    ) -> dict[int, SparsePlan]:
        """Of every sparse step from `start` on; one object for steps that compute the same cells."""
        made = {cells: self.plan(grid, cells) for cells in set(growth[start:]) - {DENSE_STEP}}
        plans = {i: made[growth[i]] for i in range(start, len(growth)) if growth[i] != DENSE_STEP}
        if check and check.step in plans:
            plans[check.step] = self.plan(grid, growth[check.step], check.cells)
        return plans

    def _kept_text(
        self, source: Trajectory, text: Tensor, cache: dict[str, Tensor], structure: AttentionInjection
    ) -> dict[str, Tensor]:
        """The prompt's keys and values [B, T, C], with the source's keys for the words that both prompts have."""
        text_keys(self.executor.sites, text, cache)
        old, new = (list(tokens) for tokens in zip(*structure.tokens, strict=True))
        kept = dict(cache)
        for name in (name for name in cache if name.endswith(".to_k")):
            kept[name] = cache[name].clone()
            kept[name][-1:, new] = source.text[name][-1:, old]
        return kept

    @torch.inference_mode()
    def sample(
        self, config: GenerationConfig, text: Tensor, source: Trajectory, steps: int, watch: StepCallback | None = None
    ) -> list[Tensor]:
        """The first dense steps from where a trajectory begins, nothing recorded: steps + 1 latents [1, 4, h, w]."""
        sampler, path = self.sampler(config, source), [source.latents[0]]
        for i, t in enumerate(sampler.timesteps[:steps]):
            if watch:
                watch(i, steps, sampler.estimate)
            x, extra = self._inputs(sampler, config, path[-1], t)
            adapters = self.conditioning(config)
            with adapters.injection(self.pipe.unet) if adapters else nullcontext():
                raw = self.pipe.unet(x, t, text, timestep_cond=extra, return_dict=False)[0]
            path.append(sampler.step(apply_guidance(raw, self._guidance(config)), t, path[-1]))
        return path

    @torch.inference_mode()
    def look(self, config: GenerationConfig, text: Tensor, source: Trajectory, step: int) -> StepFeatures:
        """What one step of a dense run from where a trajectory begins would remember, of the prompt's own branch."""
        sampler, path = self.sampler(config, source), self.sample(config, text, source, step)
        t, queries = sampler.timesteps[step], mask_queries(self.executor.sites, self.sizes(config))
        x, extra = self._inputs(sampler, config, path[-1], t)
        return self.executor.run_dense(x[-1:], t, text[-1:], {}, queries, extra, self.conditioning(config))[1]

    def plan(self, grid: BoolGrid, growth: int, besides: BoolGrid | None = None) -> SparsePlan:
        """The plan that computes the mask, `growth` cells around it, and other cells [h, w] besides."""
        cells = dilate(grid, growth) if besides is None else dilate(grid, growth) | besides
        return make_plan(cells, self.executor.num_levels, self.executor.device)

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
        wanted = i < max_injection_steps(config) or i in mask_steps(sampler.timesteps)
        queries = mask_queries(self.executor.sites, self.sizes(config)) if wanted else frozenset()
        x, extra = self._inputs(sampler, config, latents, t)
        without = self.without(source, config, text, i) if source else None
        if source and without is not None:
            text_keys(self.executor.sites, text, trajectory.text)
            own = {name: both[-1:] for name, both in trajectory.text.items()}
            last, recorded = self.executor.run_dense(x[-1:], t, text[-1:], own, queries)
            raw, maps = torch.cat([without, last]), completed(source.features[i], recorded, self._levels)
        else:
            raw, maps = self.executor.run_dense(x, t, text, trajectory.text, queries, extra, self.conditioning(config))
        if i == 0 and self.guided(config):
            trajectory.without = text[:1], raw[:1]
        return raw, maps

    def _inputs(
        self, sampler: Sampler, config: GenerationConfig, latents: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x = sampler.scaled(torch.cat([latents] * self.batch(config)), t)
        width = self.pipe.unet.config.time_cond_proj_dim
        if width is None:
            return x, None
        scale = torch.tensor([config.guidance_scale - 1])
        return x, self.pipe.get_guidance_scale_embedding(scale, embedding_dim=width).to(x)

    def _guidance(self, config: GenerationConfig) -> float | None:
        """The scale of classifier-free guidance, None where one branch runs."""
        return config.guidance_scale if self.guided(config) else None


def _placed(maps: StepFeatures, before: int, budget: int | None) -> StepFeatures:
    """A step recorded after so many others; it waits in host memory if they do not fit on the device with it."""
    if budget is not None and (before + 1) * maps.own_bytes > budget:
        maps.wait_in_host_memory()
    return maps


def _tell(
    trajectories: Sequence[Trajectory],
    latents: Tensor,
    predictions: Tensor | None = None,
    overlays: Sequence[CachedFeatures] = (),
) -> None:
    """Write a step [E, 4, h, w] of a batch into its trajectories."""
    for e, trajectory in enumerate(trajectories):
        trajectory.latents.append(latents[e : e + 1])
        if predictions is not None:
            trajectory.predictions.append(predictions[e : e + 1])
            trajectory.features.append(overlays[e])


def _keeper(grid: BoolGrid, source: Trajectory) -> Callable[[int, Tensor], Tensor]:
    """Pins step i's latents to the source's outside the grid."""
    inside = torch.from_numpy(grid.copy()).to(source.latents[0].device)
    return lambda i, latents: blend_latents(latents, source.latents[i], inside)
