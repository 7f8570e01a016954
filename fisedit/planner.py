"""Where an edit goes and how it will run: what the user wants and what the words say become a plan.

Spends no UNet call but those that look for a mask; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fisedit.errors import InputError
from fisedit.masking import masks
from fisedit.masking.localize import THINGS, Search, num_probes, predict_mask, restrict_to_words
from fisedit.sparse.cost_model import Costs
from fisedit.sparse_kernels.dilation import dilate, erode
from fisedit.values import DENSE_STEP, MAX_DILATION, EditKind, EditMask, GenerationConfig, MaskSource, first_step

if TYPE_CHECKING:
    from fisedit.masking.drift_check import DriftDetected
    from fisedit.rendering import Run, Text
    from fisedit.sampling.denoise import Engine
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.values import BoolGrid


@dataclass(frozen=True, eq=False)
class Wish:
    """Where the user wants an edit, checked: grids [h, w] or None; growth () where its cost shall decide; what is kept
    of the structure, 0 to 1; the first step to run."""

    mask: BoolGrid | None
    protect: BoolGrid | None
    grow: int
    search: Search
    growth: tuple[int, ...]
    structure: float = 0.0
    start: int = 0


@dataclass(frozen=True, eq=False)
class Plan:
    """An edit about to run.

    Args:
        growth: () where it is dense, and `fallback` says why. nothing: why it need not run.
        barred: cells [h, w] that no mask may take.
        probes: dense evaluations besides the steps'.
        spent: MACs on top: of such evaluations, of a check, and of a run that it broke off.
        structure: how much of the source's is kept. start: the first step to run.
        checked: whether the run looks for a drift. recorded: whether the source was made with the same adapters.
        halved: whether half of the first step, where that is dense, is the source's.
    """

    mask: EditMask
    growth: tuple[int, ...] = ()
    fallback: str = ""
    nothing: str = ""
    text: Text | None = None
    notes: tuple[str, ...] = ()
    barred: BoolGrid | None = None
    structure: float = 0.0
    start: int = 0
    spent: int = 0
    probes: int = 0
    checked: bool = False
    recorded: bool = False
    halved: bool = False


class Planner:
    """Plans on one engine; stateless between calls.

    Args:
        engine: whose costs count, and whose attention is read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def wish(
        self,
        run: Run,
        mask: object,
        protect: object,
        grow: int,
        search: Search,
        growth: int | Sequence[int] | None,
        structure: float = 0.0,
        strength: float = 1.0,
    ) -> Wish:
        """The user's words on where to edit, checked before any work is done."""
        assert run.parent is not None
        sizes = run.config.height, run.config.width, run.parent.image.size
        wanted, barred = (masks.grid_of_mask(m, *sizes) if m is not None else None for m in (mask, protect))
        if type(grow) is not int or not -MAX_DILATION <= grow <= MAX_DILATION:
            raise InputError(f"grow must be latent cells in [-{MAX_DILATION}, {MAX_DILATION}], got {grow!r}")
        if not (isinstance(structure, int | float) and 0 <= structure <= 1):
            raise InputError(f"structure must be in [0, 1], got {structure!r}")
        widths = _widths(growth, run.config)
        if structure and DENSE_STEP in widths:
            raise InputError(
                f"growth must be under {DENSE_STEP} where structure is kept, got {growth!r}; use structure=0"
            )
        start = first_step(strength, run.config.num_inference_steps)
        return Wish(wanted, barred, grow, search, widths, float(structure), start)

    def nothing(self, run: Run, wish: Wish) -> str:
        """Why an edit need not run, or ""."""
        assert run.parent is not None
        restyled = run.config.like != run.parent.config.like and (wish.mask is not None or wish.search.words)
        if run.script.kind is EditKind.IDENTICAL and not restyled:
            return run.script.reason or "the prompt says the same as before"
        return "" if wish.mask is None or wish.mask.any() else "the mask is empty"

    def plan(self, run: Run, wish: Wish, text: Text, source: Trajectory) -> Plan:
        """The plan of an edit over its source's trajectory; `nothing` was asked before."""
        spent = self._reading(run) if run.config.like else 0
        with run.watch.station("mask"):
            mask, reason, probed = self._mask(run, wish, source, text)
        if not mask.grid.any():
            return self.none(run, "nothing is left of the mask")
        with run.watch.station("plan"):
            costs = self.costs(run.config)
            growth = wish.growth or costs.growth(mask.grid, wish.start, plain=wish.structure > 0)
            reason = reason or costs.dense_is_cheaper(mask.grid, growth)
        growth = () if reason else growth
        recorded = self._engine.remembers(source, run.config)
        spent += self._probing(run, wish.search, probed)
        return Plan(
            mask,
            growth,
            reason,
            "",
            text,
            text.notes,
            wish.protect,
            wish.structure,
            wish.start,
            spent=spent,
            probes=probed,
            recorded=recorded,
            halved=self._engine.without(source, run.config, text.embeddings, wish.start) is not None,
        )

    def _reading(self, run: Run) -> int:
        """Let the adapters read the config's references; the MACs spent, 0 where that was done before."""
        with run.watch.station("reference"):
            return self._engine.references.prepare(run.config, self._engine.batch(run.config))

    def none(self, run: Run, why: str) -> Plan:
        """The plan of an edit that need not run."""
        return Plan(EditMask(np.zeros(self._engine.grids(run.config)[0], bool), MaskSource.NOWHERE), nothing=why)

    def _mask(self, run: Run, wish: Wish, source: Trajectory, text: Text) -> tuple[EditMask, str, int]:
        """The user's mask, or what the words say, never where the user forbids it; why it is everywhere, or ""; and how
        many dense evaluations were spent on looking."""
        script = restrict_to_words(run.script, wish.search.words, self._engine) if wish.search.words else run.script
        reason, probed = "", 0
        if wish.mask is not None:
            mask = EditMask(wish.mask, MaskSource.GIVEN)
        elif script.kind is EditKind.GLOBAL:
            mask, reason = self.everywhere(run.config), f"global edit: {script.reason}"
        else:
            mask = predict_mask(self._engine, source, run.config, (text.embeddings, text.cache), script, wish.search)
            probed = num_probes(script, wish.search)
            if mask.confidence < masks.LOW_CONFIDENCE:
                reason = (
                    f"the words point nowhere in particular (confidence {mask.confidence:.2f}); give a mask to be exact"
                )
                mask = replace(self.everywhere(run.config), confidence=mask.confidence, heat=mask.heat)
        grid = mask.grid
        if wish.grow:
            grid = dilate(grid, wish.grow) if wish.grow > 0 else erode(grid, -wish.grow)
        return replace(mask, grid=grid if wish.protect is None else grid & ~wish.protect), reason, probed

    def _probing(self, run: Run, search: Search, calls: int) -> int:
        """MACs of so many dense evaluations for a mask; "things" runs one branch of the last."""
        step = self.costs(run.config).dense_step()
        saved = step - step // self._engine.batch(run.config) if calls and search.method == THINGS else 0
        return calls * step - saved

    def grown(self, run: Run, plan: Plan, drift: DriftDetected) -> Plan:
        """The plan after a drift: a larger mask, or a dense run."""
        costs = self.costs(run.config, recorded=plan.recorded)
        lost = sum(costs.sparse_step(plan.mask.grid, cells) for cells in plan.growth[plan.start : drift.step + 1])
        plan = replace(plan, spent=plan.spent + lost - _known(plan, costs), checked=False)
        grown = self.everywhere(run.config) if drift.everywhere else replace(plan.mask, grid=drift.grid)
        mask = grown if plan.barred is None else replace(grown, grid=grown.grid & ~plan.barred)
        if drift.everywhere:
            reason = f"at step {drift.step} the edit changed the picture everywhere"
            return replace(plan, mask=mask, growth=(), fallback=reason)
        before = plan.mask.area
        note = f"the mask was grown from {before:.1%} to {mask.area:.1%}: at step {drift.step} the edit left it"
        growth = plan.growth
        if costs.dense_is_cheaper(mask.grid, growth):
            growth = costs.growth(mask.grid, plan.start, plain=plan.structure > 0)
        reason = costs.dense_is_cheaper(mask.grid, growth)
        return replace(plan, mask=mask, growth=() if reason else growth, fallback=reason, notes=(*plan.notes, note))

    def dense(self, run: Run, text: Text) -> Plan:
        """The plan of a dense run."""
        spent = self._reading(run) if run.config.like else 0
        return Plan(self.everywhere(run.config), notes=text.notes, spent=spent)

    def everywhere(self, config: GenerationConfig) -> EditMask:
        """The mask of all latent cells."""
        return EditMask(np.ones(self._engine.grids(config)[0], bool), MaskSource.EVERYWHERE)

    def costs(self, config: GenerationConfig, *, recorded: bool = False) -> Costs:
        """Prices of a config, over a source that was made with its adapters or not."""
        return self._engine.costs(config, recorded=recorded)

    def macs(self, plan: Plan, config: GenerationConfig) -> int:
        """Multiply-accumulates of a plan's run, what looking took included."""
        grid, growth, start = plan.mask.grid, plan.growth, plan.start
        costs = self.costs(config, recorded=plan.recorded)
        run = costs.sparse(grid, growth, start) if growth else costs.dense(start)
        return plan.spent + run - _known(plan, costs)


def _known(plan: Plan, costs: Costs) -> int:
    """MACs of a plan's first step that its source spent."""
    dense = not plan.growth or plan.growth[plan.start] == DENSE_STEP
    return costs.branch() if plan.halved and dense else 0


def _widths(growth: int | Sequence[int] | None, config: GenerationConfig) -> tuple[int, ...]:
    """Latent cells of growth for every step; () where the mask's cost shall decide."""
    if growth is None:
        return ()
    steps = config.num_inference_steps
    widths = tuple(growth) if isinstance(growth, Sequence) else (growth,) * steps
    if len(widths) != steps or not all(type(w) is int and 0 <= w <= MAX_DILATION for w in widths):
        raise InputError(
            f"growth must be one number of latent cells in [0, {MAX_DILATION}], or {steps} of them, got {growth!r}"
        )
    return widths
