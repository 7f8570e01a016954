"""FISEdit and DiffEdit, by their limits."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.quality import baselines
from fisedit.features.cache import FeatureOverlay
from fisedit.sparse.executor import Executor
from tests.support.edits import BIRD, CAT
from tests.support.quality import HOW, SQUARE, fresh, levels


def test_blocks_are_whole():
    grid = np.zeros((5, 6), bool)
    grid[1, 3] = grid[4, 0] = True
    expected = np.zeros((5, 6), bool)
    expected[:2, 2:4] = expected[4, :2] = True
    assert np.array_equal(baselines.as_blocks(grid), expected)


def test_stale_norms_repeat_the_source_and_nothing_else(generated):
    """On the source's own inputs old and mixed statistics are the same; on others they are not."""
    case, trajectory = generated, generated.trajectory
    unet, plan = case.editor.pipe.unet, case.engine.row_plan(SQUARE, 0)
    text, t = case.engine.encode(case.source.config), case.engine.sampler(case.config).timesteps[2]

    def rows(executor: Executor, latents: torch.Tensor) -> torch.Tensor:
        return executor.run_sparse(torch.cat([latents] * 2), t, text, {}, FeatureOverlay(trajectory.features[2], plan))[
            0
        ]

    with torch.inference_mode():
        old, other = trajectory.latents[2], 2 * trajectory.latents[2]
        stale, exact = baselines.StaleNormExecutor(unet), Executor(unet)
        torch.testing.assert_close(rows(stale, old), rows(exact, old), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(rows(stale, other), rows(exact, other), rtol=1e-2, atol=1e-2)


def test_fisedits_latents_outside_its_mask_are_the_sources(generated):
    trajectory, engine = generated.trajectory, generated.engine
    with torch.inference_mode():
        text = engine.encode(generated.config)
        latents = baselines._sparse_steps(generated, text, trajectory.latents[2], 2, SQUARE)
    moved = (latents != trajectory.latents[-1]).any(1)[0].numpy()
    assert moved[SQUARE].all() and not moved[~SQUARE].any()


def test_fisedits_mask_is_where_the_dense_steps_leave_the_source(generated):
    """With all steps dense nothing is sparse, and the mask is Otsu's of the whole way."""
    outcome = baselines.fisedit_paper(fresh(generated), share=1.0)
    assert outcome.evaluations == HOW["num_inference_steps"]
    assert outcome.grid.any() and not outcome.grid.all()
    assert np.array_equal(baselines.as_blocks(outcome.grid), outcome.grid)


def test_diffedits_mask_is_where_the_prompts_differ(generated):
    mask = baselines.difference_mask(generated)
    assert 0 < mask.mean() < 0.9 and np.array_equal(mask, baselines.difference_mask(fresh(generated)))
    assert not np.array_equal(mask, baselines.difference_mask(fresh(generated, prompt=BIRD)))
    same = fresh(generated, prompt=CAT)
    assert not baselines.difference_mask(same).any()
    assert levels(baselines.diffedit(same).picture, same.source.image) <= 1
