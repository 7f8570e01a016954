"""Latents of an edit into its source's, by step: which cells are the edit's, and with which noise they begin.

Knows latents and cells; neither the UNet nor schedulers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fisedit.sampling.scheduler import Sampler
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.values import ActiveCells, BoolGrid, GenerationConfig


class LatentBlend:
    """Latents before a step, of which those outside the cells that an edit changes are its source's.

    Args:
        cells: The active cells of the edit.
        source: the trajectory that is edited.
        config: The config of the edit. Where its seed is another, cells begin with its own noise over finished latents.
        start: index of the first step.
        finished: those latents [1, 4, h, w]; None for the source's.
    """

    def __init__(
        self,
        cells: ActiveCells,
        source: Trajectory,
        config: GenerationConfig,
        start: int,
        finished: Tensor | None = None,
    ) -> None:
        self._cells, self._source, self._start = cells, source, start
        self._own_noise, self._seed = config.seed != source.config.seed, config.seed
        self._finished = source.latents[-1] if finished is None else finished
        self._tensors: dict[int, Tensor] = {}

    def noises(self) -> list[Tensor]:
        """The noise of every step that inversion of the source found, replaced by own noise inside the cells."""
        if not (self._own_noise and self._source.noises):
            return self._source.noises
        generator, found = torch.Generator().manual_seed(self._seed), []
        for i, noise in enumerate(self._source.noises):
            own = torch.randn(noise.shape, generator=generator).to(noise)
            found.append(torch.where(self._inside(i), own, noise) if i >= self._start else noise)
        return found

    def first(self, sampler: Sampler) -> Tensor:
        """Latents before the first step [1, 4, h, w]."""
        for i in range(self._start, len(self._source.predictions)):
            self._inside(i)  # is moved to the device now, so that the host does not wait between steps
        return self._with_noise(self._start, self._source.latents[self._start], sampler)

    def __call__(self, i: int, latents: Tensor, sampler: Sampler) -> Tensor:
        """Latents before step i, 1 to N.

        Args:
            i: index of the step.
            latents: [1, 4, h, w] as the step before made them.
            sampler: The sampler whose noise is the edit's.
        """
        return self._with_noise(i, torch.where(self._inside(i - 1), latents, self._source.latents[i]), sampler)

    def _with_noise(self, i: int, latents: Tensor, sampler: Sampler) -> Tensor:
        """Latents in which the cells that join at step i begin with noise of their own, if the edit has some."""
        if not self._own_noise or i == len(self._source.predictions):
            return latents
        joining = self._cells.joining(i, self._start)
        if not joining.any():
            return latents
        return torch.where(self._to_tensor(joining), sampler.noised(self._finished, i), latents)

    def _inside(self, i: int) -> Tensor:
        """The cells that are inside at step i: booleans [1, 1, h, w]."""
        key = self._cells.stage(i)
        if key not in self._tensors:
            self._tensors[key] = self._to_tensor(self._cells.at(i))
        return self._tensors[key]

    def _to_tensor(self, grid: BoolGrid) -> Tensor:
        return torch.from_numpy(grid[None, None].copy()).to(self._source.latents[0].device)


def filled_from_around(latents: Tensor, grid: BoolGrid) -> Tensor:
    """Latents whose cells inside a mask continue those around it, by biharmonic inpainting.

    Args:
        latents: [1, 4, h, w], without noise.
        grid: booleans [h, w], the mask; not all of them.
    """
    from skimage.restoration import inpaint_biharmonic

    known = latents[0].permute(1, 2, 0).cpu().double().numpy()  # [h, w, 4]
    filled = inpaint_biharmonic(known, grid.copy(), channel_axis=-1)  # which cannot take a read-only mask
    return torch.from_numpy(filled).permute(2, 0, 1)[None].to(latents)
