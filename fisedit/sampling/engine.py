"""The parts of a model that denoising needs: samplers, grids, text, adapters, costs and the size of its records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisedit.adapters.base import AdapterStack
from fisedit.adapters.references import References
from fisedit.costs.model import CostedLayers, Costs
from fisedit.costs.pace import Pace
from fisedit.decoder.tiles import COARSE_LEVELS
from fisedit.features.codec import AS_RECORDED, FeatureEncoding
from fisedit.features.record_size import RecordSize
from fisedit.features.sites import LayerSite, Role, decoder_sites, loras
from fisedit.features.tiers import FeatureTiers
from fisedit.machine.stopwatch import StepWork
from fisedit.models.families.stable_diffusion_xl import as_model
from fisedit.models.layer_changes import check_layers
from fisedit.runners.stepping import Graphs
from fisedit.sampling.edit_plans import row_plan
from fisedit.sampling.linear_scheduler import Coefficients, LinearSampler, coefficients
from fisedit.sampling.prompt_encoding import PromptEncoder
from fisedit.sampling.scheduler import Sampler, mask_steps
from fisedit.sampling.trajectory import Trajectory, max_injection_steps
from fisedit.sparse.executor import Executor, mask_queries
from fisedit.sparse_kernels.row_plan import SparsePlan
from fisedit.values import GenerationConfig, level_grids

if TYPE_CHECKING:
    from fisedit.costs.table import CostTable
    from fisedit.machine.model import Model
    from fisedit.models.families.conditioning import Conditioning
    from fisedit.values import BoolGrid


class Engine:
    """A pipeline and its executor, for one editor: references, cost table and coefficients stay from call to call.

    Editors beside one another have one each, and share graphs and tiers.

    Args:
        pipe: the model.
        graphs: The graphs of the pipeline's UNet, if others have some already; None for the default, on CUDA devices.
        budget: bytes of features that a source keeps on the device, and that captured graphs gather there for an edit;
            None for no limit. Steps that do not fit wait in host memory.
        encoding: The encoding of recorded features.
        tiers: where recorded steps lie; None for memory without a bound.

    Attributes:
        loras: names and scales of the LoRAs in the UNet and the text encoder, at the last `refresh`.
        table: what this machine takes, measured; None where it was not.
        pace: What the last runs took, over what `Costs.work` predicted.
    """

    def __init__(
        self,
        pipe: Model,
        graphs: Graphs | None = None,
        budget: int | None = None,
        encoding: FeatureEncoding = AS_RECORDED,
        tiers: FeatureTiers | None = None,
    ) -> None:
        pipe = as_model(pipe)
        self.pipe, self.budget, self.encoding = pipe, budget, encoding
        self.tiers = FeatureTiers() if tiers is None else tiers
        self.executor, self.loras = Executor(pipe.unet), loras(pipe.unet, pipe.text_encoder)
        self.references = References(pipe, self.executor)
        self.graphs = Graphs() if graphs is None else graphs
        self._coefficients: dict[object, tuple[Coefficients, ...] | None] = {}
        self._encoder = PromptEncoder(pipe, self.graphs)
        self.table: CostTable | None = None
        self.pace = Pace()

    @property
    def read_sites(self) -> dict[str, LayerSite]:
        """The sites whose maps sparse steps read, by name."""
        return {site.name: site for site in self.executor.sites if site.role is not Role.QUERY}

    def guided(self, config: GenerationConfig) -> bool:
        """Return whether both branches run; distilled models take guidance as an input instead."""
        return config.guided and self.pipe.unet.config.time_cond_proj_dim is None

    def refresh(self) -> None:
        """Notice LoRAs that were added, removed or scaled, in the UNet or in the text encoder.

        Raises:
            UnsupportedModuleError: a layer of the UNet or of the decoder has no exact sparse counterpart any more.
        """
        check_layers(self.pipe.vae, "VAE", "decoder")
        decoder_sites(self.pipe.vae.decoder, COARSE_LEVELS)
        self.loras = loras(self.pipe.unet, self.pipe.text_encoder)
        if self.executor.refresh():
            self.references.forget()

    def conditioning(self, config: GenerationConfig, step: int) -> AdapterStack | None:
        """The adapters of a config's step with what they read of its references, or None.

        Args:
            config: The config of the picture.
            step: its index.

        Raises:
            AdapterError: one is missing.
        """
        return AdapterStack(self.references.conditions(config, self.batch(config), step)) if config.like else None

    def costs(self, config: GenerationConfig, *, recorded: bool = False) -> Costs:
        """Return what evaluations and decodes of a config cost.

        Args:
            config: The config of the source or the edit.
            recorded: the source was made with the config's adapters, so that edits read all that they recorded.
        """
        executor = self.executor
        layers = CostedLayers(
            executor.sites,
            self.pipe.vae,
            self.grids(config),
            self._encoder.length(config, guided=self.guided(config)),
            tuple(site for site in executor.sites if executor.shallow.runs(site.name)),
        )
        adapter_macs = partial(self._adapter_macs, config, recorded) if config.like else None
        captured = self.graphs.is_enabled(executor.device)
        steps, batch = config.num_timesteps, self.batch(config)
        return Costs(layers, steps, batch, executor.device, captured, adapter_macs, self.table, self.pace)

    def _adapter_macs(self, config: GenerationConfig, recorded: bool, plan: SparsePlan | None) -> int:
        """MACs of one branch of a step's adapters, in the mean over steps; of a dense step without a plan."""
        arguments = self.pipe.unet, self.grids(config), plan
        shares = self.references.unread_conditions(config, self.batch(config))
        return round(sum(share * adapter.macs(*arguments, recorded=recorded) for adapter, share in shares))

    def has_adapter_features(self, trajectory: Trajectory, config: GenerationConfig) -> bool:
        """Return whether a trajectory's features include those of a config's adapters."""
        return self.references.are_recorded(config, trajectory.features)

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
        """Return the size of what a config's steps record.

        Args:
            config: The config of the picture.
            encoding: The encoding of a source's maps; None for the engine's.
            itemsize: bytes of a number of the model; 0 for what it has now.
        """
        sites, size, now = self.executor.sites, itemsize or self.pipe.unet.dtype.itemsize, self.encoding
        return RecordSize(sites, self.sizes(config), self.batch(config), size, now if encoding is None else encoding)

    def recorded_bytes(self, config: GenerationConfig, start: int = 0, size: RecordSize | None = None) -> int:
        """Bytes that dense steps from one on record.

        Args:
            config: The config of the picture.
            start: the first step.
            size: The size of its steps; None for `record_size`.
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
            source: The source whose noises are used, if inversion found some.
            noises: The noises of every step, instead; None for the source's.
            linear: Return a `LinearSampler`, which never makes the host wait, where the scheduler's steps are linear.
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

    def encode(self, config: GenerationConfig) -> Conditioning:
        """The conditions of a prompt; see `PromptEncoder.encode`."""
        return self._encoder.encode(config, guided=self.guided(config))

    def inputs(
        self, sampler: Sampler, config: GenerationConfig, latents: Tensor, step: int, inpaint_inputs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The inputs of the UNet at a step, branch by branch, and the guidance of distilled models.

        Args:
            sampler: The run of the scheduler, which scales latents.
            config: The config of the pictures.
            latents: [E, 4, h, w] before the step.
            step: its index.
            inpaint_inputs: [E, 5, h, w] of an inpainting UNet, or None.

        Returns:
            Latents [B * E, C, h, w], and [1, C] for distilled models or None.
        """
        x = sampler.scaled(torch.cat([latents] * self.batch(config)), step)
        if inpaint_inputs is not None:
            x = torch.cat([x, torch.cat([inpaint_inputs] * self.batch(config))], 1)
        width = self.pipe.unet.config.time_cond_proj_dim
        if width is None:
            return x, None
        scale = torch.tensor([config.guidance_scale - 1])
        return x, self.pipe.get_guidance_scale_embedding(scale, embedding_dim=width).to(x)

    def guidance(self, config: GenerationConfig) -> float | None:
        """The scale of classifier-free guidance, None where one branch runs."""
        return config.guidance_scale if self.guided(config) else None

    def unconditional(
        self, source: Trajectory, config: GenerationConfig, text: Conditioning, step: int
    ) -> Tensor | None:
        """The source's unconditional prediction of a step, if it is valid for an edit; that of step 0 alone is.

        Args:
            source: the trajectory to edit.
            config: The config of the edit.
            text: The conditions of the edit.
            step: index of the step, 0 to N - 1.

        Returns:
            [1, 4, h, w], or None.
        """
        recorded = source.unconditional_for(config) if step == 0 else None
        return recorded[1] if recorded is not None and torch.equal(recorded[0], text[:1].key) else None

    def dense_work(self, config: GenerationConfig) -> StepWork:
        """The work of a dense step."""
        sizes = self.sizes(config)
        return StepWork(sizes, sizes, self.batch(config))

    def row_plan(self, grid: BoolGrid, dilation: int, extra_cells: BoolGrid | None = None) -> SparsePlan:
        """The plan that computes a dilated mask; see `edit_plans.row_plan`."""
        return row_plan(self.executor, grid, dilation, extra_cells)
