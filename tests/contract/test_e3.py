"""E3: latents outside the mask are the source's to the bit at every step, and pixels outside it to the byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.sampling.engine import Engine
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import MaskSource
from tests.support.edits import (
    CAT,
    DOG,
    Calls,
    check_outside,
    check_pinned,
    config_of,
    latents,
    record,
    replay,
    trajectory,
)
from tests.support.grids import grids
from tests.support.pictures import scene
from tests.support.pipelines import ALL_SCHEDULERS, SCHEDULERS

QUICK = {"seed": 7, "num_inference_steps": 3}
BLOBS = grids(16, 16)["blobs"]
each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)


@pytest.fixture(params=["shallow", "sdxl"])
def editor(pipelines, request):
    return Editor(pipelines[request.param])


@pytest.mark.parametrize("scheduler", ALL_SCHEDULERS)
@pytest.mark.parametrize("shape", ["shallow", "sdxl"])
def test_latents_outside_never_move(pipelines, shape, scheduler):
    engine, grid, config = Engine(pipelines[shape]), grids(16, 16)["noise"], config_of(scheduler=scheduler)
    source = record(engine, config)
    check_pinned(replay(engine, source, DOG, grid, (2,) * config.num_timesteps), source, grid)


@pytest.mark.parametrize(("shape", "seed"), [("sd15", 3), ("sd2", 3), ("demo", 7), ("sdxl", 3)])
def test_words_alone_move_only_their_mask(pipelines, shape, seed):
    """With the automatic mask, and beside it in pixels alone where a decoder shows what changed."""
    editor = Editor(pipelines[shape])
    source = editor.generate(CAT, **QUICK | {"seed": seed})
    with Calls(editor.pipe.unet) as calls:
        result = editor.edit(DOG, growth=0, verify=False)
    cells = result.latent_cells
    assert result.mask.source is MaskSource.ATTENTION and 0 < cells.mean() < 0.6 and result.mask.area < 1
    assert not (result.mask.grid & ~dilate(cells, 1)).any() and result.mask.grid[cells].all()
    assert result.run.rim.any() or shape == "sd15"
    assert (calls.dense, calls.sparse) == (0, 3)
    check_outside(editor, result, source)


@pytest.mark.sweep(1)
@each_scheduler
@pytest.mark.parametrize("name", ["one_cell", "corner", "blobs", "checkerboard"])
def test_a_given_mask_is_where_it_moves(editor, scheduler, name):
    """With a given mask, also where growth computes everything."""
    source = editor.generate(CAT, scheduler=scheduler, **QUICK)
    grid = grids(16, 16)[name]
    result = editor.edit(DOG, mask=grid, growth=1)
    assert result.mask.source is MaskSource.GIVEN and np.array_equal(result.mask.grid, grid)
    check_outside(editor, result, source)


def test_what_lies_outside_keeps_its_latents(editor):
    """Although the sampler does not find the way back that inversion came."""
    source = editor.open(scene(), CAT, num_inference_steps=3)
    result = editor.edit(DOG, mask=BLOBS, growth=1)
    ours, theirs = latents(trajectory(editor, result)), latents(trajectory(editor, source))
    outside = ~torch.from_numpy(BLOBS)
    assert torch.equal(ours[..., outside], theirs[..., outside]) and not torch.equal(ours, theirs)
