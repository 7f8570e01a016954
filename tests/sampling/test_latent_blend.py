"""Soft masks: Differential Diffusion (arXiv 2306.00950), by diffusers' pipeline with latents blended so.

Deviations are in units of the expected latents' spread.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fisedit import Editor, Region
from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.values import DENSE_GROWTH, ActiveCells, entry_steps
from tests.support import oracle
from tests.support.edits import (
    CAT,
    DOG,
    FP32,
    as_oracle,
    config_of,
    latents,
    midway,
    pixels_outside,
    record,
    replay,
    same,
    trajectory,
    unwatched,
)
from tests.support.grids import grids
from tests.support.pipelines import SCHEDULERS, with_scheduler

each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
STEPS = 6
SQUARE = grids(16, 16)["square"]
RAMP = np.tile(np.linspace(0, 220, 16).astype(np.uint8), (16, 1))
"""Cells that may change more the further right they are; none from the first step on."""

SPOTS = np.where(grids(16, 16)["blobs"], 255, 0).astype(np.uint8)
SPOTS[4:7, 8:12], SPOTS[10, 3:9] = 128, 90


def may_change(levels: np.ndarray, step: int) -> np.ndarray:
    """The cells that the paper has changed at a step: those that keep no more than the share of steps that is over."""
    return 1 - levels / 255 <= step / STEPS + 1e-9


def changing(levels: np.ndarray) -> ActiveCells:
    entry = entry_steps(levels, STEPS)
    return ActiveCells(entry < STEPS, entry)


@pytest.mark.sweep(1)
@each_scheduler
@pytest.mark.parametrize("levels", [RAMP, SPOTS], ids=["ramp", "spots"])
def test_a_dense_run_is_differential_diffusion(pipelines, scheduler, levels):
    pipe = pipelines["shallow"]
    engine, config = Engine(pipe), config_of(scheduler=scheduler, num_inference_steps=STEPS)
    source, cells, edit = record(engine, config), changing(levels), replace(config, prompt=DOG)
    start = next(i for i in range(STEPS) if may_change(levels, i).any())
    with torch.inference_mode():
        got = denoise.run_dense(engine, edit, engine.encode(edit), unwatched, (cells, source), start=cells.start)
    expected = midway(with_scheduler(pipe, scheduler), as_oracle(config), DOG, start, lambda i: may_change(levels, i))
    assert oracle.deviation(latents(got), expected) <= FP32
    assert (cells.start, start) == ((1, 1) if levels is RAMP else (0, 0))


@pytest.mark.sweep(1)
@each_scheduler
@pytest.mark.parametrize("levels", [RAMP, SPOTS], ids=["ramp", "spots"])
def test_a_sparse_run_computes_the_cells_that_have_joined_and_no_others(pipelines, scheduler, levels):
    pipe = with_scheduler(pipelines["shallow"], scheduler)
    engine, config, cells = (
        Engine(pipe),
        config_of(scheduler=scheduler, num_inference_steps=STEPS),
        changing(levels),
    )
    source = record(engine, config)
    got = replay(engine, source, DOG, cells, (0,) * STEPS)
    maps: list[oracle.Maps] = [{} for _ in range(STEPS)]
    with oracle._around_calls(pipe.unet, lambda i: oracle.recording(pipe.unet, maps[i])):
        oracle.dense_generate(pipe, as_oracle(config))

    @contextmanager
    def mixed(i):
        joined = torch.from_numpy(may_change(levels, i))
        with oracle.mixing(pipe.unet, maps[i], joined) if joined.any() else nullcontext():
            yield

    expected = midway(pipe, as_oracle(config), DOG, cells.start, lambda i: may_change(levels, i), mixed)
    assert oracle.deviation(latents(got), expected) <= FP32
    never = torch.from_numpy(~cells.grid)
    for i, (ours, kept) in enumerate(zip(got.latents, source.latents, strict=True)):
        still = torch.from_numpy(~may_change(levels, i - 1)) if i else torch.ones(16, 16, dtype=torch.bool)
        assert torch.equal(ours[..., still | never], kept[..., still | never])


def test_cells_that_join_late_begin_with_the_noise_of_the_edits_seed(pipelines):
    """Over the finished picture, as image to image of diffusers adds it."""
    engine, config = Engine(pipelines["demo"]), config_of(num_inference_steps=STEPS)
    source, cells = record(engine, config), changing(SPOTS)
    got = replay(engine, source, DOG, cells, (0,) * STEPS, seed=config.seed + 1)
    sampler = engine.sampler(replace(config, seed=config.seed + 1), source)
    for i in range(STEPS):
        joining = torch.from_numpy((entry_steps(SPOTS, STEPS) == i) & cells.grid)
        assert torch.equal(got.latents[i][..., joining], sampler.noised(source.latents[-1], i)[..., joining])
    assert sum((entry_steps(SPOTS, STEPS) == i).any() for i in range(STEPS)) == 3


@pytest.fixture
def editor(shipped):
    editor = Editor(shipped, model="demo")
    editor.generate(CAT, seed=7, num_inference_steps=10, width=128, height=128)
    return editor


@pytest.fixture(scope="module")
def shipped():
    return Editor.from_pretrained("demo", local_files_only=True).pipe


def soft(levels: np.ndarray) -> np.ndarray:
    return np.kron(levels, np.ones((8, 8), np.uint8))


def test_white_is_a_hard_mask_and_black_stays(editor):
    hard = editor.edit(DOG, mask=SQUARE)
    source = editor.undo()
    white = editor.edit(DOG, region=Region.mask(soft(np.uint8(255) * SQUARE), soft=True))
    assert same(white, hard) and white.stats.macs == hard.stats.macs and white.mask.levels is None
    editor.undo()
    grey = editor.edit(DOG, region=Region.mask(soft(np.where(SQUARE, 128, 0).astype(np.uint8)), soft=True))
    assert pixels_outside(grey, source) and not same(grey, hard) and not same(grey, source)
    assert (grey.run.start, grey.mask.levels.max()) == (5, 128)


def test_cells_that_join_late_cost_nothing_before(editor):
    hard = editor.preview(DOG, mask=SQUARE, growth=1)
    levels = np.where(SQUARE, 255, 0).astype(np.uint8)
    levels[:, 6:] //= 2
    region = Region.mask(soft(levels), soft=True)
    seen = editor.preview(DOG, region=region, growth=1)
    result = editor.edit(DOG, region=region, growth=1)
    assert seen.macs == result.stats.macs < hard.macs
    half = SQUARE & (levels == 255)
    costs = editor._engine.costs(result.config)
    steps = 6 * costs.sparse_step(half, 1) + 4 * costs.sparse_step(SQUARE, 1)  # 127 of 255 are 4 of 10 steps
    whole = 10 * costs.sparse_step(SQUARE, 1)
    assert hard.macs - seen.macs == whole - steps
    ours, source = trajectory(editor, result), trajectory(editor, editor.history[0])
    late = torch.from_numpy(SQUARE & ~half)
    for i in range(7):
        assert torch.equal(ours.latents[i][..., late], source.latents[i][..., late])
    assert not torch.equal(ours.latents[7][..., late], source.latents[7][..., late])


def test_a_strength_shortens_every_cells_share(editor):
    region = Region.mask(soft(np.where(SQUARE, 200, 0).astype(np.uint8)), soft=True)
    assert editor.preview(DOG, region=region, strength=0.5).mask.levels.max() == 100
    nothing = editor.edit(DOG, region=Region.mask(soft(np.where(SQUARE, 20, 0).astype(np.uint8)), soft=True))
    assert nothing.stats.notes == ("nothing was edited: nothing is left of the mask",)  # a tenth of a step


def test_an_edit_of_a_soft_edit_and_its_way_back(editor, tmp_path):
    """Edits over it read its features at every step; so do its session, its file and its restored features."""
    levels = np.where(SQUARE, 255, 0).astype(np.uint8)
    levels[:, 6:] //= 2
    soft_edit = editor.edit(DOG, region=Region.mask(soft(levels), soft=True))
    over = editor.edit("a dog and a cake in snow", mask=np.roll(SQUARE, 4, 0))
    assert pixels_outside(over, soft_edit)
    editor.undo()
    editor._trajectory_cache.drop([soft_edit.id])
    again = editor.edit("a dog and a cake in snow", mask=np.roll(SQUARE, 4, 0))
    assert same(again, over)
    editor.save(tmp_path / "session")
    loaded = Editor.from_pretrained("demo", local_files_only=True)
    loaded.load(tmp_path / "session")
    assert np.array_equal(loaded.history.find(soft_edit.id).mask.levels, soft_edit.mask.levels)
    assert loaded.history.find(over.id).mask.levels is None
    loaded.history.checkout(soft_edit.id)
    loaded.write(tmp_path / "soft.png")
    remade = Editor.remake(Image.open(tmp_path / "soft.png"), local_files_only=True).current
    assert same(remade, soft_edit) and np.array_equal(remade.mask.levels, soft_edit.mask.levels)


def test_dense_steps_and_qualities_of_a_soft_mask(editor):
    levels = np.where(SQUARE, 255, 0).astype(np.uint8)
    levels[:, 6:] //= 2
    region, source = Region.mask(soft(levels), soft=True), editor.current
    for quality in ("fast", "balanced", "close"):
        result = editor.edit(DOG, region=region, quality=quality)
        assert pixels_outside(result, source) and result.run.growth
        assert quality == "fast" or DENSE_GROWTH in result.run.growth
        editor.undo()
