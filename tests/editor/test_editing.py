"""The editor from end to end: history without dense calls, sharing, interruptions, fallbacks."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fisedit import Cancelled, Editor
from fisedit.errors import InputError, SessionError
from fisedit.masking import masks
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import EditKind, MaskSource, dense_run_as_text
from tests.support import oracle
from tests.support.edits import (
    BIRD,
    CAT,
    DEFAULTS,
    DOG,
    Calls,
    as_oracle,
    check_outside,
    same,
)
from tests.support.grids import grids
from tests.support.pipelines import SCHEDULERS, SHAPES, with_scheduler

SQUARE, BLOBS, CORNER = (grids(16, 16)[name] for name in ("square", "blobs", "corner"))
QUICK = {"seed": 7, "num_inference_steps": 3}

each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)


@pytest.mark.sweep(1)
@each_scheduler
@pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
def test_generate_gives_the_bytes_of_diffusers(pipelines, scheduler, guidance):
    pipe = pipelines["shallow"]
    options = QUICK | {"scheduler": scheduler, "guidance_scale": guidance, "negative_prompt": DOG}
    result = Editor(pipe).generate(CAT, height=104, width=136, **options)
    dense = oracle.dense_generate(with_scheduler(pipe, scheduler), as_oracle(result.config))
    assert result.image.tobytes() == dense.image.tobytes() and result.image.size == (136, 104)


@pytest.mark.parametrize("shape", SHAPES)
def test_generate_at_the_models_own_size(pipelines, shape):
    result = Editor(pipelines[shape]).generate(CAT, num_inference_steps=2)
    dense = oracle.dense_generate(pipelines[shape], as_oracle(result.config))
    assert result.image.tobytes() == dense.image.tobytes()
    assert result.config.width == result.config.height == 128 and result.config.guidance_scale == 7.5


def test_an_edit_after_nothing_is_an_edit_of_the_source(editor, source):
    expected = editor.edit(BIRD, mask=SQUARE, growth=1)
    editor.checkout(source.id)
    editor.edit(CAT)
    assert same(editor.edit(BIRD, mask=SQUARE, growth=1), expected)


def test_words_left_out_by_an_empty_mask_are_still_to_come(editor, source):
    """The picture shows the old prompt, so that asking again without the mask is an edit."""
    expected = editor.edit(DOG)
    editor.checkout(source.id)
    editor.edit(DOG, mask=np.zeros((16, 16), bool))
    again = editor.edit(DOG)
    assert again.diff.kind is EditKind.REPLACE and same(again, expected)


FALLBACKS = {
    "global": ("a cat and a cake at night", {}, "global edit: "),
    "large": (DOG, {"mask": grids(16, 16)["all_but_one"]}, "the region alone takes 100% of the arithmetic"),
    "doubtful": (DOG, {}, "the words point nowhere in particular (confidence 0."),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("protect", [None, BLOBS], ids=["", "protected"])
@pytest.mark.parametrize("case", FALLBACKS)
def test_dense_fallbacks_say_why_and_keep_what_is_outside(editor, source, monkeypatch, case, protect):
    prompt, options, why = FALLBACKS[case]
    monkeypatch.setattr(masks, "LOW_CONFIDENCE", 2.0 if case == "doubtful" else 0.0)
    with Calls(editor.pipe.unet) as calls:
        result = editor.edit(prompt, protect=protect, growth=1, **options)
    assert result.stats.fallback.startswith(why)
    assert f"{dense_run_as_text(result.mask)}: {result.stats.fallback}" in result.stats.notes
    assert (calls.dense, calls.sparse) == (3, 0)
    assert (result.stats.unet_evaluations_dense, result.stats.unet_evaluations_sparse) == (3, 0)
    check_outside(editor, result, source)
    if protect is not None:
        assert not result.mask.grid[protect].any()


@pytest.mark.parametrize("given", [None, SQUARE], ids=["words", "given"])
def test_what_is_protected_stays(editor, source, given):
    barred = grids(16, 16)["checkerboard"]
    result = editor.edit(DOG, mask=given, protect=barred, growth=0)
    assert result.mask.grid.any() and not result.mask.grid[barred].any()
    check_outside(editor, result, source)


def test_a_given_mask_makes_a_global_edit_local(editor, source):
    result = editor.edit("a cat and a cake at night", mask=SQUARE, growth=1)
    assert result.diff.kind is EditKind.GLOBAL and not result.stats.fallback
    check_outside(editor, result, source)


@pytest.mark.parametrize("growth", [0, 3, (2, 1, 0)])
def test_growth_is_taken_as_given(editor, source, growth):
    result = editor.edit(DOG, mask=CORNER, growth=growth)
    steps = (growth,) * 3 if isinstance(growth, int) else growth
    widest = dilate(CORNER, max(steps))
    assert result.run.growth == result.stats.growth == steps
    assert result.stats.active_rows[0] == widest.sum()


def test_what_is_masked_is_painted_anew_with_another_seed(editor, source):
    with Calls(editor.pipe.unet) as calls:
        same_noise, first, second = (editor.edit(CAT, mask=SQUARE, growth=1, seed=seed) for seed in (7, 8, 9))
    assert not same_noise.mask.grid.any() and calls.sparse == 2 * 3 and not calls.dense
    assert [result.config.seed for result in (same_noise, first, second)] == [7, 8, 9]
    for result, parent in ((first, same_noise), (second, first)):
        assert not same(result, parent)
        check_outside(editor, result, parent)
    assert editor.preview(CAT, mask=SQUARE, seed=10).macs and editor.preview(CAT, mask=SQUARE, seed=9).nothing
    assert editor.preview(CAT, seed=10).nothing, "nowhere in particular"


def test_variations_of_one_edit(editor, source):
    results = editor.edit_many([DOG] * 3, [SQUARE] * 3, seeds=[7, 8, 9], growth=1)
    assert len({result.image.tobytes() for result in results}) == 3 and editor.current is source
    alone = editor.edit(DOG, mask=SQUARE, growth=1, seed=8)
    assert same(alone, results[1]) and not same(alone, results[0])
    with pytest.raises(InputError, match="seeds must be as many as prompts, 1, got 2"):
        editor.edit_many([DOG], [SQUARE], seeds=[1, 2])
    with pytest.raises(InputError, match=r"seed must be a whole number in \[0, "):
        editor.edit(DOG, mask=SQUARE, seed=-1)


CHAIN = [(DOG, SQUARE), (BIRD, BLOBS), (CAT, CORNER), ("a car and a cake on a beach", SQUARE), (DOG, CORNER)]


def test_a_chain_branches_and_comes_back_without_a_dense_call(editor, source):
    with Calls(editor.pipe.unet) as calls:
        results = [editor.edit(prompt, mask=grid, growth=1) for prompt, grid in CHAIN]
        assert editor.undo() is results[3] and editor.undo() is results[2] and editor.redo() is results[3]
        editor.checkout(results[1].id)
        branch = editor.edit(DOG, mask=CORNER, growth=1)
        assert editor.undo() is results[1] and editor.redo() is branch
        editor.checkout(results[3].id)
        again = editor.edit(DOG, mask=CORNER, growth=1)
    assert (calls.dense, calls.sparse) == (0, 3 * 7)
    assert same(again, results[4]) and not same(branch, results[4])
    for result, parent in zip(results, [source, *results], strict=False):
        assert result.parent == parent.id
        check_outside(editor, result, parent)
    assert list(editor.history) == [source, *results, branch, again]


def test_a_new_source_starts_another_tree(editor, source):
    edit = editor.edit(DOG, mask=SQUARE, growth=1)
    other = editor.generate(BIRD, **QUICK)
    assert editor.current is other and other.parent is None
    with pytest.raises(SessionError, match="nothing to undo"):
        editor.undo()
    with pytest.raises(SessionError, match="nothing to redo"):
        editor.redo()
    editor.checkout(edit.id)
    assert editor.undo() is source and editor.redo() is edit


def test_a_distilled_scheduler_and_defaults_meet(pipelines):
    """The config keeps what the user asked for, so that a session can be told again."""
    result = Editor(pipelines["shallow"]).generate(CAT, **(DEFAULTS | {"scheduler": "lcm"}))
    assert result.config.scheduler == "lcm" and result.config.num_inference_steps == 4
    assert result.prompt == CAT and result.diff.kind is EditKind.IDENTICAL and not result.run.growth
    assert result.mask.source is MaskSource.EVERYWHERE and result.mask.image().size == (128, 128)


def test_on_step_sees_progress_and_may_cancel(editor, source):
    seen = []
    editor.edit(DOG, mask=SQUARE, growth=1, on_step=lambda *step: seen.append(step))
    assert [(i, n) for i, n, _ in seen] == [(0, 3), (1, 3), (2, 3)]
    assert all(isinstance(p, Image.Image) and p.size == (16, 16) and p.mode == "RGB" for *_, p in seen)

    def cancel(*_):
        raise Cancelled("enough")

    with pytest.raises(Cancelled, match="enough"):
        editor.edit(BIRD, on_step=cancel)
    with pytest.raises(Cancelled, match="enough"):
        editor.generate(BIRD, on_step=cancel)
    assert len(editor.history) == 2


@pytest.mark.parametrize("keep", [True, False])
def test_a_failed_transaction_leaves_redo_as_it_was(editor, source, keep):
    edit = editor.edit(DOG, mask=SQUARE, growth=1)
    editor.undo()

    def edit_twice():
        with editor.transaction(keep=keep):
            editor.edit(BIRD, mask=SQUARE, growth=1)
            editor.edit(CAT, mask=SQUARE, growth=1)
            raise Cancelled

    with pytest.raises(Cancelled):
        edit_twice()
    assert list(editor.history) == [source, edit] and editor.current is source and editor.redo() is edit


def test_a_transaction_keeps_what_is_made_if_it_is_to(editor, source):
    with editor.transaction(keep=False):
        editor.edit(DOG, mask=SQUARE, growth=1)
    assert list(editor.history) == [source]
    with editor.transaction():
        edit = editor.edit(DOG, mask=SQUARE, growth=1)
    assert editor.undo() is source and editor.redo() is edit
