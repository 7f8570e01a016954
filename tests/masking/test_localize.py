"""Where an edit paints, and what the user says in it: words, instances, methods, previews."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.errors import InputError, MaskError
from fisedit.masking import masks
from fisedit.masking.localize import shared_tokens
from fisedit.masking.mask_options import METHODS
from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.sampling.trajectory import AttentionInjection, LatentEdit, max_injection_steps
from fisedit.sparse_kernels.dilation import dilate, erode
from fisedit.values import DENSE_GROWTH, ActiveCells, EditMode, MaskSource
from tests.support.edits import CAT, DOG, Calls, latents, masks_square, pixels_outside
from tests.support.grids import grids

SQUARE = grids(16, 16)["square"]


def test_words_say_where_instead_of_what_changed(editor):
    cat, cake, both = (editor.preview(DOG, words=words).mask.grid for words in (["cat"], ["Cake "], ["cat", "cake"]))
    assert (cat != cake).any() and (both >= cat).all() and (both >= cake).all()
    assert (cat & editor.preview(DOG).mask.grid).sum() > 0.8 * cat.sum()
    with pytest.raises(InputError, match="words must be words of the old or the new prompt, got 'horse'"):
        editor.preview(DOG, words=["horse"])


def test_words_make_a_global_edit_local(editor):
    night = "a cat and a cake at night"
    assert editor.preview(night).fallback.startswith("global edit")
    seen = editor.preview(night, words=["cat"])
    assert seen.mask.source is MaskSource.ATTENTION and not seen.mask.grid.all() and not seen.fallback


def test_one_instance_of_several(editor):
    two = editor.preview(DOG, words=["cat", "cake"]).mask.grid
    count = masks_of(two)
    parts = [editor.preview(DOG, words=["cat", "cake"], instance=i).mask.grid for i in range(count)]
    assert np.array_equal(np.any(parts, axis=0), two) and sum(part.sum() for part in parts) == two.sum()
    middles = [np.argwhere(part)[:, 1].min() + np.argwhere(part)[:, 1].max() for part in parts]
    assert middles == sorted(middles)
    with pytest.raises(MaskError, match=f"instance must be below {count}"):
        editor.preview(DOG, words=["cat", "cake"], instance=count)


def masks_of(grid):
    from scipy.ndimage import label

    return label(grid, np.ones((3, 3)))[1]


def test_instances_are_counted_from_the_left():
    grid = np.zeros((6, 9), bool)
    grid[0:2, 6:8], grid[3:6, 0:2], grid[1, 3] = True, True, True
    found = [np.argwhere(masks.select_instance(grid, i))[0].tolist() for i in range(3)]
    assert found == [[3, 0], [1, 3], [0, 6]]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_a_mask(editor, method):
    with Calls(editor.pipe.unet) as calls:
        seen = editor.preview(DOG, mask_method=method, probe_steps=2 if method == "latents" else 0)
    assert seen.mask.grid.any() and calls.dense == (2 if method == "latents" else 0) and calls.sparse == 0
    assert len(editor.history) == 1


ADDED = "a cat and a cake and a dog on a beach"


@pytest.mark.parametrize(("options", "calls"), [({}, 1), ({"probe_steps": 0}, 0), ({"probe_steps": 3}, 3)])
def test_a_thing_that_comes_is_looked_for_in_dense_steps_that_are_counted(editor, options, calls):
    with Calls(editor.pipe.unet) as seen:
        result = editor.edit(ADDED, verify=False, **options)
    assert (seen.dense, seen.sparse) == (result.stats.unet_evaluations_dense, result.stats.unet_evaluations_sparse)
    assert seen.dense == calls + result.run.growth.count(DENSE_GROWTH) < len(result.run.growth)
    editor.undo()
    cells, growth, costs = result.latent_cells, result.run.growth, Engine(editor.pipe).costs(result.config)
    spent = result.stats.macs - editor.edit(ADDED, mask=cells).stats.macs
    spent -= costs.sparse(cells, growth, decoded_cells=dilate(cells, 1)) - costs.sparse(cells, growth)  # for its rim
    step = costs.dense_step()
    assert spent == pytest.approx(max(0, calls - 0.5) * step, rel=1e-6)  # the last one runs one branch of two


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_method": "magic"}, "mask_method must be one of"),
        ({"mask_method": "latents"}, "give probe_steps"),
        ({"probe_steps": -1}, "probe_steps must be"),
        ({"instance": -1}, "instance must be"),
        ({"grow": 65}, "grow must be"),
        ({"grow": 1.5}, "grow must be"),
    ],
)
def test_what_cannot_be_asked(editor, options, said):
    with pytest.raises(InputError, match=said):
        editor.preview(DOG, **options)


def test_a_preview_is_what_the_edit_does(editor):
    seen = editor.preview(DOG, grow=1)
    result = editor.edit(DOG, grow=1, verify=False)
    assert np.array_equal(seen.mask.grid, result.latent_cells) and seen.confidence == result.stats.mask_confidence
    assert (seen.macs, seen.macs_dense, seen.fallback) == (
        result.stats.macs,
        result.stats.macs_dense,
        result.stats.fallback,
    )
    assert seen.diff == result.diff


def test_a_preview_of_nothing_costs_nothing(editor):
    seen = editor.preview(CAT)
    assert seen.nothing and seen.macs == 0 and not seen.mask.grid.any()


@pytest.mark.parametrize("cells", [-1, 0, 2])
def test_a_given_mask_grows_and_shrinks(pipelines, cells):
    editor = Editor(pipelines["shallow"])
    editor.generate(CAT, seed=7, num_inference_steps=2)
    expected = dilate(SQUARE, cells) if cells > 0 else erode(SQUARE, -cells)
    assert np.array_equal(editor.preview(DOG, mask=SQUARE, grow=cells).mask.grid, expected)


def test_an_edit_without_effect_is_said(pipelines, monkeypatch):
    editor = Editor(pipelines["shallow"])
    editor.generate(CAT, seed=7, num_inference_steps=2)
    loud = editor.edit(DOG, mask=SQUARE)
    assert not any("hardly changed" in note for note in loud.stats.notes)
    editor.undo()
    monkeypatch.setattr("fisedit.edits.pipeline.MIN_MEAN_DIFFERENCE", 256.0)
    assert any("hardly changed inside the mask" in note for note in editor.edit(DOG, mask=SQUARE).stats.notes)


def test_an_edit_by_words_without_effect_is_said():
    """It is told from more of a change than in a mask that was given, which may hold more than what changes."""
    editor = Editor.from_pretrained("demo", local_files_only=True)
    source = editor.generate(CAT, seed=7, num_inference_steps=6, width=128, height=128)
    told = "hardly changed where the words point"
    weighted = editor.edit(CAT.replace("cat", "(cat:1.01)"))
    assert weighted.mask.source is MaskSource.ATTENTION and any(told in note for note in weighted.stats.notes)
    editor.checkout(source.id)
    given = editor.edit(CAT.replace("cat", "(cat:1.01)"), mask=weighted.mask.grid)
    assert not any("hardly changed" in note for note in given.stats.notes)
    for prompt, options in ((DOG, {}), (DOG, {"strength": 0.2}), ("a cake on a beach", {})):
        editor.checkout(source.id)
        assert not any(told in note for note in editor.edit(prompt, **options).stats.notes)


# ---- drift ------------------------------------------------------------------------------------------------------


# ---- structure --------------------------------------------------------------------------------------------------


TIGER = "a tiger and a cake on a beach"
"""Round as the cat."""


def test_structure_is_kept_by_degrees(editor):
    """All of it is nearer to the picture, where the things have one shape; none is an ordinary edit; outside the mask
    nothing moves."""
    source, mask = editor.current, editor.preview(TIGER).mask.grid
    pictures = []
    for structure in (0.0, 0.5, 1.0):
        editor.checkout(source.id)
        result = editor.edit(TIGER, mask=mask, structure=structure)
        assert pixels_outside(result, source) and result.run.structure == structure
        pictures.append(result.image)
    plain, half, full = pictures
    editor.checkout(source.id)
    assert editor.edit(TIGER, mask=mask).image.tobytes() == plain.tobytes()
    inside = np.kron(mask, np.ones((8, 8), bool))
    away = [np.abs(np.asarray(p, float) - np.asarray(source.image, float))[inside].mean() for p in pictures]
    assert away[2] < away[0] and plain.tobytes() != half.tobytes() != full.tobytes()


def test_all_structure_and_the_same_words_attend_as_the_source_did(shipped):
    """With every query, key and text of the source's, a structured step is the source's step.

    Features are kept as recorded: 8 bits, the default, alone move latents by 2e-2.
    """
    editor = Editor(shipped, cache_dtype="model")
    editor.generate(CAT, seed=7, num_inference_steps=6, guidance_scale=4.0)
    engine, result = editor._engine, editor.current
    trajectory = editor._trajectory_cache.get(result.id)[0]
    grid = masks_square(editor)
    kept = AttentionInjection(max_injection_steps(result.config), tuple((i, i) for i in range(77)))
    with torch.inference_mode():
        text = engine.encode(result.config)
        edit = LatentEdit(result.config, text, {}, ActiveCells(grid), EditMode((1,) * 6), injection=kept)
        (again,) = denoise.run_sparse(engine, trajectory, [edit], lambda *_: None)
    assert kept.steps == 2
    for ours, theirs in zip(again.latents, trajectory.latents, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4 if ours.dtype == torch.float32 else 0.1)


def test_structure_survives_a_rebuild(editor):
    result = editor.edit(DOG, mask=masks_square(editor), structure=1.0)
    kept = latents(editor._trajectory_cache.get(result.id)[0]).clone()
    editor._trajectory_cache._entries.clear()
    editor.edit(CAT, mask=masks_square(editor))
    assert torch.equal(latents(editor._trajectory_cache.get(result.id)[0]), kept)


def test_shared_tokens_are_those_of_words_in_both_prompts(editor):
    two = "a robot and a cat on a beach", "a robot, a gift and a cat on a beach"
    ids = [editor.pipe.tokenizer(prompt).input_ids for prompt in two]
    pairs = shared_tokens(editor._pipeline.requests.diff(*two), editor._engine)
    assert all(ids[0][i] == ids[1][j] for i, j in pairs) and [i for i, _ in pairs] == list(range(9))
    assert dict(pairs)[5] == ids[1].index(ids[0][5]) == 8


@pytest.mark.parametrize("share", [-0.1, 1.1, "much"])
def test_structure_out_of_range(editor, share):
    with pytest.raises(InputError, match="structure must be in"):
        editor.edit(DOG, structure=share)


def test_a_thing_that_shall_be_larger_gets_the_room(editor):
    source = editor.generate("a small cat on a beach", seed=7, num_inference_steps=6, guidance_scale=4.0)
    box = editor.preview("a small dog on a beach").mask.grid
    larger, red = (editor.preview(prompt).mask for prompt in ("a big cat on a beach", "a small red cat on a beach"))
    assert (larger.grid | ~box).all() and larger.grid.sum() > 2 * box.sum()
    assert (box | ~red.grid).all()
    rows, columns = larger.grid.any(1).nonzero()[0], larger.grid.any(0).nonzero()[0]
    assert larger.grid.sum() == len(rows) * len(columns) and rows[-1] == box.any(1).nonzero()[0][-1]
    assert editor.edit("a big cat on a beach").changed_outside(source) == 0


def test_a_thing_that_shall_be_smaller_keeps_its_room(editor):
    editor.generate("a big cat on a beach", seed=7, num_inference_steps=6, guidance_scale=4.0)
    smaller, red = (
        editor.preview(prompt).mask.grid for prompt in ("a small cat on a beach", "a big red cat on a beach")
    )
    assert (smaller == red).all()
