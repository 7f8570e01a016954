"""Single captured steps, compared with the engine's own."""

from __future__ import annotations

import torch

from fisedit.features.cache import FeatureOverlay
from fisedit.models.families.conditioning import interleaved
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support.conditions import random_conditions

TOLERANCE = 1e-4
TIME = torch.tensor(500)


class Case:
    """A recorded source, and edits of it with masks and texts of their own."""

    def __init__(self, unet, masks, *, branches=2, queries=frozenset()):
        self.executor = Executor(unet)
        self.masks = [torch.from_numpy(mask) for mask in masks]
        self.plans = [make_row_plan(mask, self.executor.num_levels) for mask in masks]
        source = torch.randn(branches, 4, *masks[0].shape)
        texts = [random_conditions(unet, branches) for _ in range(1 + len(masks))]
        _, self.maps = self.executor.run_dense(source, TIME, texts[0], {}, queries)
        self.texts = texts[1:]
        self.latents = [torch.where(mask, torch.randn_like(source), source) for mask in self.masks]

    def alone(self, e, features=None):
        """The engine's own step of one edit: rows [S, R, 4] and the overlay."""
        features = features or self.maps
        return self.executor.run_sparse(
            self.latents[e], TIME, self.texts[e], {}, FeatureOverlay(features, self.plans[e])
        )

    def begin(self, graphs, features=None):
        """All edits in one batch, branch by branch."""
        return graphs.begin(self.plans, {0: features or self.maps}, interleaved(self.texts))

    def batch(self):
        return torch.stack(self.latents, 1).flatten(0, 1)

    def check(self, got, features=None):
        """Compare a step's rows [S * E, R, 4] with each edit alone."""
        for e, rows in enumerate(got.unflatten(0, (-1, len(self.plans))).unbind(1)):
            expected, _ = self.alone(e, features)
            assert torch.allclose(rows[:, : expected.shape[1]], expected, atol=TOLERANCE, rtol=0)
