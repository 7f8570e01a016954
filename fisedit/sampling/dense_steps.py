"""A dense step and its record: evaluated, encoded, paged out, read from pages, and made again where a page is gone."""

from __future__ import annotations

from collections.abc import Sequence
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
    with_last_branch,
)
from fisedit.features.sites import loras, project_text
from fisedit.machine.stopwatch import StepWork
from fisedit.models.injection import exclusive
from fisedit.sampling.engine_base import EngineBase
from fisedit.sampling.scheduler import Sampler, mask_steps
from fisedit.sampling.trajectory import Trajectory, max_injection_steps
from fisedit.sampling.trajectory_pages import RecordedSource, from_pages
from fisedit.sparse.executor import mask_queries
from fisedit.values import GenerationConfig

if TYPE_CHECKING:
    from fisedit.features.pages import Page
    from fisedit.features.tiers import Remake


class DenseSteps(EngineBase):
    """Evaluates dense steps and keeps what they recorded; arguments as in `EngineBase`."""

    def unconditional(self, source: Trajectory, config: GenerationConfig, text: Tensor, step: int) -> Tensor | None:
        """The source's unconditional prediction of a step, if it is valid for an edit; that of step 0 alone is.

        Args:
            source: the trajectory to edit.
            config: The config of the edit.
            text: embeddings [B, T, D] of the edit.
            step: index of the step, 0 to N - 1.

        Returns:
            [1, 4, h, w], or None.
        """
        recorded = source.unconditional_for(config) if step == 0 else None
        return recorded[1] if recorded is not None and torch.equal(recorded[0], text[:1]) else None

    def _dense_work(self, config: GenerationConfig) -> StepWork:
        """Return the work of a dense step."""
        sizes = self.sizes(config)
        return StepWork(sizes, sizes, self.batch(config))

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
        x, timestep_cond = self._inputs(sampler, config, latents, i, trajectory.inpaint_inputs)
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
            features: The features of the step as they were recorded.
            config: The config of the trajectory.
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
        """Return whether a dense step takes less than reading a page of so many bytes, by this machine's cost table."""
        if self.table is None or "disk read" not in self.table.rates:
            return False
        sizes = self.sizes(config)
        return self.table.step("dense", sizes, sizes, self.batch(config)) < nbytes / self.table.rates["disk read"]

    def load(self, config: GenerationConfig, pages: Sequence[Page], made_with: str) -> RecordedSource:
        """A source from its pages, whose steps are read when an edit needs them.

        Args:
            config: The config of the source.
            pages: The pages that `trajectory_pages.to_pages` made.
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
        """Make again, to the bit, what a dense step of a trajectory recorded; without embeddings the prompt is encoded.

        Raises:
            PageError: the model's LoRAs or adapters are others now.
        """
        others = (
            config.loras != loras(self.pipe.unet, self.pipe.text_encoder)
            or used(self.pipe, config) != config.textual_inversions
        )
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
