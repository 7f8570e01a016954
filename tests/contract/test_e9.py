"""E9: the fidelity reference is the dense blended edit, diffusers' pipeline pinned to the source outside the mask.

What is reported against it: tests/bench/ and tests/benchmarks/.
"""

from __future__ import annotations

import pytest
import torch

from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.values import ActiveCells, Step
from tests.support import oracle
from tests.support.edits import (
    DOG,
    FP32,
    as_oracle,
    check_pinned,
    config_of,
    latents,
    record,
    replay,
    trajectory,
    unwatched,
)
from tests.support.grids import grids


@pytest.mark.parametrize("shape", ["demo", "sdxl"])
def test_a_pinned_recording_is_the_dense_blended_edit(pipelines, shape):
    """It is what fallbacks with something protected run."""
    pipe, grid = pipelines[shape], grids(16, 16)["blobs"]
    engine, config = Engine(pipe), config_of()
    source = record(engine, config)
    with torch.inference_mode():
        edit = config_of(DOG)
        got = denoise.run_dense(engine, edit, engine.encode(edit), unwatched, (ActiveCells(grid), source))
    expected = oracle.dense_blended(pipe, as_oracle(config), DOG, torch.from_numpy(grid)).latents
    assert oracle.deviation(latents(got), expected) <= FP32
    check_pinned(got, source, grid)


def test_dense_steps_alone_are_the_dense_blended_edit(pipelines):
    pipe, grid = pipelines["demo"], grids(16, 16)["blobs"]
    engine, config = Engine(pipe), config_of()
    got = replay(engine, record(engine, config), DOG, grid, (Step.DENSE,) * 4)
    expected = oracle.dense_blended(pipe, as_oracle(config), DOG, torch.from_numpy(grid)).latents
    assert oracle.deviation(latents(got), expected) <= FP32


def test_a_blended_fallback_is_the_oracles(editor, source):
    result = editor.edit(DOG, mask=grids(16, 16)["all_but_one"])
    expected = oracle.dense_blended(
        editor.pipe, as_oracle(source.config), DOG, torch.from_numpy(grids(16, 16)["all_but_one"])
    )
    assert oracle.deviation(latents(trajectory(editor, result)), expected.latents) <= FP32
