"""E7: edits in one batch equal the same edits one by one; padding rows change nothing.

Single padded steps, and all that a batch may hold: tests/runners/test_cuda_graphs.py and test_stepping.py.
"""

from __future__ import annotations

import pytest
import torch

from fisedit import Editor
from fisedit.features.cache import FeatureOverlay
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support import oracle
from tests.support.edits import BIRD, CAT, DOG, FP32, check_outside, latents, trajectory
from tests.support.grids import grids
from tests.support.steps import StepEdit

TOLERANCE = 1e-4


@pytest.mark.parametrize("shape", ["sd15", "sdxl"])
def test_batches_of_edits_equal_one_by_one(pipelines, shape):
    """Edits of one source with one mask, stacked along the batch."""
    unet, grid = pipelines[shape].unet, grids(16, 16)["blobs"]
    case, executor = StepEdit(unet, grid, batch=4), Executor(unet)
    plan = make_row_plan(grid, executor.num_levels)
    together, _ = case.sparse(executor, plan)
    for i in range(4):
        _, maps = executor.run_dense(case.source[i : i + 1], case.timestep, case.texts[0][i : i + 1], {})
        alone, _ = executor.run_sparse(
            case.edited[i : i + 1], case.timestep, case.texts[1][i : i + 1], {}, FeatureOverlay(maps, plan)
        )
        assert torch.allclose(together[i], alone[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", ["sd15", "sdxl"])
def test_masks_of_any_size_in_one_padded_batch_equal_one_by_one(pipelines, shape):
    editor = Editor(pipelines[shape], graphs=True)
    source = editor.generate(CAT, seed=7, num_inference_steps=3)
    masks = [grids(16, 16)[name] for name in ("one_cell", "blobs", "border")]
    together = editor.edit_many([DOG, BIRD, DOG], masks, growth=1)
    for got, mask in zip(together, masks, strict=True):
        editor.checkout(source.id)
        alone = editor.edit(got.prompt, mask=mask, growth=1)
        assert got.stats.unet_evaluations_captured == alone.stats.unet_evaluations_captured == 3
        assert oracle.deviation(*(latents(trajectory(editor, result)) for result in (got, alone))) <= FP32
        check_outside(editor, got, source)
