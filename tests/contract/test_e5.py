"""E5: steps in any order, and two sessions that take turns, give the same result: no state hides between steps.

The same with graphs: tests/runners/test_cuda_graphs.py.
"""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.models.injection import exclusive
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support.edits import CAT, DOG, same
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline
from tests.support.steps import StepEdit

SQUARE = grids(16, 16)["square"]


@pytest.mark.parametrize("shape", ["sd15", "sdxl"])
def test_steps_in_any_order_give_the_same(pipelines, shape):
    unet, grid = pipelines[shape].unet, grids(16, 16)["blobs"]
    executor = Executor(unet)
    plan = make_row_plan(grid, executor.num_levels)
    cases = [StepEdit(unet, grid, seed=seed) for seed in range(3)]
    forwards = [case.sparse(executor, plan)[0] for case in cases]
    backwards = [case.sparse(executor, plan)[0] for case in reversed(cases)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not np.allclose(forwards[0], forwards[1])


@pytest.mark.parametrize("shape", ["shallow", "sdxl"])
def test_two_editors_on_one_pipeline_take_turns(pipelines, shape):
    """One edits between the other's steps."""
    pipe = pipelines[shape]
    alone = [_session(Editor(pipe), seed, None) for seed in (1, 2)]
    other = Editor(pipe)
    other.generate(CAT, seed=2, num_inference_steps=3)
    interleaved = []

    def on_step(i, *_):
        if i == 1:
            interleaved.append(other.edit(DOG, mask=SQUARE, growth=1))
            other.undo()

    result = _session(Editor(pipe), 1, on_step)
    assert same(result, alone[0]) and len(interleaved) == 2
    assert all(same(done, alone[1]) for done in interleaved)


def _in_threads(*works):
    """Run these at once, to their ends; what each gave."""
    given = {}
    threads = [
        Thread(target=lambda i=i, work=work: given.update({i: work()}), daemon=True) for i, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [given.get(i) for i in range(len(works))]


def test_editors_of_two_models_never_wait_for_one_another():
    """One holds all locks of its model in the middle of an edit, until the other has come to its end."""
    first, second = (build_pipeline("shallow") for _ in range(2))
    alone, done = _session(Editor(second), 2, None), []

    def on_step(i, *_):
        if i == 1:
            with exclusive(first.unet, first.vae, first.text_encoder, first.tokenizer):
                done.extend(_in_threads(lambda: _session(Editor(second), 2, None)))

    _session(Editor(first), 1, on_step)
    assert len(done) == 2 and all(one is not None and same(one, alone) for one in done)


def test_editors_of_one_pipeline_in_threads_give_what_each_gives_alone(pipelines):
    pipe = pipelines["shallow"]
    alone = [_session(Editor(pipe), seed, None) for seed in (1, 2, 3)]
    together = _in_threads(*(lambda seed=seed: _session(Editor(pipe), seed, None) for seed in (1, 2, 3)))
    assert all(one is not None and same(one, other) for one, other in zip(together, alone, strict=True))


def _session(editor, seed, on_step):
    editor.generate(CAT, seed=seed, num_inference_steps=3, on_step=on_step)
    return editor.edit(DOG, mask=SQUARE, growth=1, on_step=on_step)
