"""The user's path at Stable Diffusion's widths: random weights, this machine's dtype and threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.machine.device import choose_dtype
from fisedit.models.random_init import random_pipeline
from tests.support import oracle
from tests.support.edits import CAT, DOG, check_outside, latents, oracle_chain, trajectory

STEPS = 2
FURTHEST = {torch.float32: {"model": 1e-4, "int8": 0.4}, torch.bfloat16: {"model": 0.2, "int8": 0.4}}
"""How far an edit's latents may be from the oracle's in fp32, in their spread, by what features are kept in: 0.13 in
bfloat16, 0.20 and at 256 pixels 0.32 in int8, the source 1.1 (a random network hides no error)."""


@pytest.mark.slow
@pytest.mark.parametrize(("side", "layers_per_block"), [(192, 1), (256, 2)], ids=str)
def test_a_sparse_edit_is_the_oracles(side, layers_per_block, pipelines):
    cpu = torch.device("cpu")
    pipe = random_pipeline(cpu, choose_dtype(None, cpu), layers_per_block)
    dtype, grid, got = pipe.dtype, np.zeros((side // 8, side // 8), bool), {}
    grid[7:16, 6:14] = True
    for cache_dtype in FURTHEST[dtype]:
        editor = Editor(pipe, cache_dtype=cache_dtype)
        source = editor.generate(CAT, seed=7, num_inference_steps=STEPS, width=side, height=side)
        edit = editor.edit(DOG, mask=grid, growth=1)
        assert not edit.stats.fallback and edit.stats.unet_evaluations_sparse == STEPS
        check_outside(editor, edit, source)
        got[cache_dtype] = latents(trajectory(editor, edit)).float()
    pipe.vae = pipelines["demo"].vae  # the oracle's pictures are not looked at
    exact = oracle_chain(pipe.to(dtype=torch.float32), source.config, [(DOG, grid, (1,) * STEPS)])[1]
    for cache_dtype, furthest in FURTHEST[dtype].items():
        assert oracle.deviation(got[cache_dtype], exact) <= furthest, cache_dtype
