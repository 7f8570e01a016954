"""Progress of a run: the error on held-out triples under fixed noise, and a sheet of samples.

Each row of a sheet: target, reference, the base's picture of the prompt, and the picture with the adapter.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from diffusers.utils import make_image_grid

from fisedit.adapters.base import inject_adapters
from fisedit.adapters.training.denoising import ConditionedUNet, denoising_loss
from fisedit.adapters.training.draws import generator_for

if TYPE_CHECKING:
    from diffusers import DDPMScheduler
    from PIL.Image import Image

    from fisedit.adapters.row_column.attention import RowColumnAdapter
    from fisedit.adapters.row_column.reader import ReferenceCondition
    from fisedit.adapters.training.examples import TrainingExamples
    from fisedit.adapters.training.training_settings import TrainingSettings
    from fisedit.machine.model import Model

_STEPS, _GUIDANCE, _MAX_SAMPLES = 20, 4.0, 8


class SampleSheets:
    """Held-out triples, and the base's pictures of them, which are painted once.

    Args:
        pipe: the base.
        examples: The examples of all held-out triples; the first eight are drawn.
    """

    def __init__(self, pipe: Model, examples: TrainingExamples) -> None:
        self._pipe, self._examples = pipe, examples
        self._base_images: list[Image] = []

    @torch.no_grad()
    def report(
        self, adapter: RowColumnAdapter, scheduler: DDPMScheduler, settings: TrainingSettings
    ) -> tuple[Image, float]:
        """Measure and draw.

        Args:
            adapter: in eval mode.
            scheduler: The scheduler of the noise.
            settings: The settings of the run.

        Returns:
            The sheet; the mean error.
        """
        model, empty_prompt = ConditionedUNet(self._pipe.unet, adapter), self._examples.empty_prompt
        errors = []
        for start in range(0, len(self._examples), settings.batch):
            batch = self._examples.batch(range(start, min(start + settings.batch, len(self._examples))))
            noise = generator_for(settings.seed, start, self._pipe.device)
            error = denoising_loss(model, scheduler, batch, empty_prompt, settings, noise)
            errors += [float(error)] * len(batch.targets)
        self._base_images = self._base_images or self._generate(None)
        references = self._examples.batch(range(min(_MAX_SAMPLES, len(self._examples)))).references
        batched = torch.cat([torch.zeros_like(references), references])
        return self._sheet(self._generate(model.condition(batched, empty_prompt))), sum(errors) / len(errors)

    def _generate(self, condition: ReferenceCondition | None) -> list[Image]:
        prompts = [triple.prompt for triple in self._examples.triples[:_MAX_SAMPLES]]
        seeds = [generator_for(0, row, self._pipe.device) for row in range(len(prompts))]
        with inject_adapters(self._pipe.unet, [condition]) if condition else nullcontext():
            images: list[Image] = self._pipe(
                prompts,
                width=self._examples.side,
                height=self._examples.side,
                num_inference_steps=_STEPS,
                guidance_scale=_GUIDANCE,
                generator=seeds,
            ).images
        return images

    def _sheet(self, images: list[Image]) -> Image:
        rows = zip(self._examples.triples[:_MAX_SAMPLES], self._base_images, images, strict=True)
        picture = self._examples.picture
        cells = [x for triple, *outputs in rows for x in (picture(triple.target), picture(triple.reference), *outputs)]
        grid: Image = make_image_grid(cells, rows=len(images), cols=4)
        return grid
