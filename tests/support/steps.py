"""Single steps of a UNet: a source, an edit of it, and what the oracle makes of both."""

from __future__ import annotations

import torch

from fisedit.features.cache import FeatureOverlay
from tests.support import oracle
from tests.support.conditions import random_conditions


class StepEdit:
    """A source and an edit of it on one UNet: same latents outside the mask, new ones inside, new text."""

    def __init__(self, unet, grid, batch=2, seed=0):
        make = torch.Generator().manual_seed(seed)
        self.source = torch.randn(batch, 4, *grid.shape, generator=make)
        self.texts = [random_conditions(unet, batch, make) for _ in range(2)]
        self.timestep = torch.tensor(500)
        self.inside = torch.from_numpy(grid)
        self.edited = torch.where(self.inside, torch.randn(self.source.shape, generator=make), self.source)

    def oracle(self, unet):
        recording = oracle.record(unet, self.source, self.timestep, self.texts[0].unet_inputs)
        return oracle.mixed_forward(unet, recording, self.edited, self.timestep, self.texts[1].unet_inputs, self.inside)

    def sparse(self, executor, plan):
        """Returns the edit's rows, and where they belong."""
        _, maps = executor.run_dense(self.source, self.timestep, self.texts[0], {})
        return executor.run_sparse(self.edited, self.timestep, self.texts[1], {}, FeatureOverlay(maps, plan))


def rows(full, grid):
    return full.flatten(2).transpose(1, 2)[:, torch.from_numpy(grid).flatten()]
