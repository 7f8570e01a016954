"""The plans of an edit's steps: row plans of its cells, and the keys that it attends with.

Knows edits and executors; runs no step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fisedit.features.sites import project_text
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import SparsePlan, divide_text, hide_keys, make_row_plan

if TYPE_CHECKING:
    from torch import Tensor

    from fisedit.sampling.trajectory import LatentEdit, Trajectory
    from fisedit.sparse.executor import Executor
    from fisedit.values import BoolGrid


def plans_of(executor: Executor, edit: LatentEdit) -> dict[int, SparsePlan]:
    """The plans of an edit's sparse steps from the first on; one object for steps that compute the same cells."""
    cells, dilation, start, check = edit.cells, edit.mode.dilation, edit.mode.start, edit.check
    plans: dict[int, SparsePlan] = {}
    known: dict[tuple[int, int, bool], SparsePlan] = {}
    for i, width in enumerate(dilation[start:], start):
        if not isinstance(width, int):
            continue
        is_checked = check is not None and i == check.step
        key = width, cells.stage(i), is_checked
        if key not in known:
            known[key] = _plan(executor, edit, cells.at(i), width, check.cells if check and is_checked else None)
        plans[i] = known[key]
    return plans


def _plan(
    executor: Executor, edit: LatentEdit, grid: BoolGrid, dilation: int, extra_cells: BoolGrid | None
) -> SparsePlan:
    """Return the plan of one sparse step; other arguments as in `row_plan`."""
    plan = row_plan(executor, grid, dilation, extra_cells)
    if edit.mode.erases:
        plan = hide_keys(plan, grid)
    if edit.regional_text:
        grids = [each.grid for each in edit.mode.regional]
        plan = divide_text(plan, grids, [text.tokens for text in (edit.text, *edit.regional_text)])
    return plan


def injected_keys(executor: Executor, source: Trajectory, edit: LatentEdit) -> dict[str, Tensor]:
    """The prompt's keys and values [B, T, C], with the source's keys for the words that both prompts have."""
    if edit.injection is None:
        return {}
    project_text(executor.sites, edit.text.text, edit.text_keys)
    old, new = (list(tokens) for tokens in zip(*edit.injection.tokens, strict=True))
    injected = dict(edit.text_keys)
    for name in (name for name in edit.text_keys if name.endswith(".to_k")):
        injected[name] = edit.text_keys[name].clone()
        injected[name][-1:, new] = source.text_keys[name][-1:, old]
    return injected


def row_plan(executor: Executor, grid: BoolGrid, dilation: int, extra_cells: BoolGrid | None = None) -> SparsePlan:
    """The plan that computes a dilated mask.

    Args:
        executor: The executor whose levels the plan has.
        grid: booleans [h, w], the mask.
        dilation: latent cells computed beyond it, 0 or more.
        extra_cells: booleans [h, w], cells that are computed too, or None.
    """
    cells = dilate(grid, dilation) if extra_cells is None else dilate(grid, dilation) | extra_cells
    return make_row_plan(cells, executor.num_levels, executor.device)
