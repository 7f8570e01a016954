"""How many kernels a sparse step of Stable Diffusion 1.5 takes: Triton's launches and torch's operations.

The UNet has its real shapes and no numbers (torch's meta device), so every choice by shape is the real one. Every
operation of torch that is not a view or an allocation counts as one kernel.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fisedit.models.families.conditioning import Conditioning
from fisedit.models.families.family import SD1
from fisedit.runners import cuda_graphs
from fisedit.runners.cuda_graphs import GraphExecutor
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.row_plan import make_row_plan

pytest.importorskip("triton", reason="the package triton is not installed")

AIM = 320
SIDE = 64
FREE = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}


class Kernels(TorchDispatchMode):
    """Counts what would run on a GPU, by name."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen = Counter()
        from fisedit.sparse_kernels.triton import conv

        def launch(kernel, *_, **__):
            self.seen[kernel.fn.__name__] += 1

        monkeypatch.setattr(type(conv._gather), "run", launch)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name, found = func._schema.name, {t.untyped_storage()._cdata for t in tree_leaves(out) if is_tensor(t)}
        read = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        if name not in FREE and (func._schema.is_mutable or not found <= read):
            self.seen[name] += 1
        return out


class Replayed:
    """What stands in for a captured graph: the function again, and nothing else."""

    def __init__(self, function, _):
        self.replay, self.outputs = function, function()


def step(monkeypatch, area, edits=1, *, quantised=""):
    """Kernels of one step of some edits over a square mask of some share of the picture: copies and evaluation."""
    monkeypatch.setattr(cuda_graphs, "capture", Replayed)
    grid, edge = np.zeros((SIDE, SIDE), bool), round(SIDE * area**0.5)
    grid[8 : 8 + edge, 8 : 8 + edge] = True
    with torch.device("meta"), torch.inference_mode():
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(SD1.configs / "unet")).half().eval()
        unet.to(memory_format=torch.channels_last)
        latents, time = torch.zeros(2, 4, SIDE, SIDE).half(), torch.tensor(500)
        text = Conditioning(torch.zeros(2, 77, 768).half())
    executor = Executor(unet)
    plans, many = [make_row_plan(grid, executor.num_levels, "meta")] * edits, latents.repeat_interleave(edits, 0)
    with torch.inference_mode():
        _, maps = executor.run_dense(latents, time, text, {})
        with ops.use("triton"), Kernels(monkeypatch) as kernels:
            edit = GraphExecutor(executor, quantised=quantised).begin(plans, {0: maps}, text.repeated(edits))
            edit.step(0, many, time)  # writes tables and text, too
            begun = kernels.seen.total()
            kernels.seen.clear()
            out = edit.step(0, many, time)
    assert begun > kernels.seen.total() > 0 and out.shape[::2] == (2 * edits, 4)
    return kernels.seen


@pytest.mark.sweep(1)
@pytest.mark.parametrize("quantised", ["", "int8", "fp8"])
@pytest.mark.parametrize(("area", "edits"), [(0.01, 1), (0.05, 1), (0.25, 1), (0.5, 1), (0.05, 16)])
def test_a_sparse_step_takes_few_kernels(monkeypatch, area, edits, quantised):
    seen = step(monkeypatch, area, edits, quantised=quantised)
    sys.stdout.write(f"{area:.0%}, {edits} edits: {seen.total()} kernels, {dict(seen.most_common())}\n")
    assert seen.total() <= AIM, seen
