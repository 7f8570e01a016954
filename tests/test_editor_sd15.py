"""The user's path at Stable Diffusion's widths: random weights, one layer a block, this machine's dtype and threads."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import torch

from fisedit import Editor
from fisedit.models.device import choose_dtype
from fisedit.models.random_init import random_pipeline
from tests.support import oracle
from tests.support.edits import CAT, DOG, check_outside, latents, oracle_chain, trajectory

STEPS, SIDE = 2, 192
MORE_THAN_DENSE = 1.5
"""How much further than a dense run of the same dtype a sparse one may be from fp32."""


def test_a_sparse_edit_is_the_oracles(pipelines):
    """A sparse edit is as near to the oracle in fp32 as the oracle is in the dtype that this machine runs."""
    cpu = torch.device("cpu")
    pipe = random_pipeline(cpu, choose_dtype(None, cpu), layers_per_block=1)
    editor = Editor(pipe)
    source = editor.generate(CAT, seed=7, num_inference_steps=STEPS, width=SIDE, height=SIDE)
    grid = np.zeros((SIDE // 8, SIDE // 8), bool)
    grid[7:16, 6:14] = True
    edit = editor.edit(DOG, mask=grid, growth=1)
    assert not edit.stats.fallback and edit.stats.unet_evaluations_sparse == STEPS
    check_outside(editor, edit, source)
    got = latents(trajectory(editor, edit)).float()
    pipe.vae = deepcopy(pipelines["demo"].vae).to(pipe.dtype)  # the oracle's pictures are not looked at
    steps = [(DOG, grid, (1,) * STEPS)]
    same_dtype = oracle_chain(pipe, source.config, steps)[1].float()
    exact = (
        same_dtype
        if pipe.dtype == torch.float32
        else oracle_chain(pipe.to(dtype=torch.float32), source.config, steps)[1]
    )
    assert oracle.deviation(got, exact) <= 1e-4 + MORE_THAN_DENSE * oracle.deviation(same_dtype, exact)
