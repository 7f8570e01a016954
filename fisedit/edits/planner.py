"""Turns a request into a plan: where an edit goes, and how it will run.

Spends no UNet call but those that a mask needs; keeps nothing. Knows neither pictures' decoding nor the history.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fisedit.costs.model import steps_alike
from fisedit.costs.schedules import find_shallow_steps
from fisedit.errors import InputError, MaskError
from fisedit.masking import drift_check
from fisedit.masking.edit_scope import EditScope
from fisedit.masking.masks import cells_of_pixels
from fisedit.masking.region_values import WHOLE
from fisedit.sampling.prompt_encoding import EncodedPrompt
from fisedit.sampling.records import steps_without_features
from fisedit.sampling.scheduler import mask_steps
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import (
    EditMask,
    EditMode,
    GenerationConfig,
    Inversion,
    MaskSource,
    Quality,
    RegionalPrompt,
    SchedulerName,
    Shallow,
    Step,
    entry_steps,
)

if TYPE_CHECKING:
    from fisedit.costs.model import Costs
    from fisedit.edits.requests import EditRequest
    from fisedit.masking.drift_check import DriftCheck, DriftDetected
    from fisedit.sampling.engine import Engine
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.values import ActiveCells, BoolGrid, Dilation


_LONG_MEMORIES = frozenset(
    {
        *(SchedulerName.PNDM, SchedulerName.UNIPC, SchedulerName.HEUN),
        *(SchedulerName.DPM_SDE, SchedulerName.DPM_SDE_KARRAS),
    }
)
"""Samplers whose step reads latents or predictions of steps before, which cells that join with noise have not."""


def _runs(_name: str) -> bool:
    """Return True: a full step computes every layer."""
    return True


@dataclass(frozen=True, eq=False)
class EditPlan:
    """The decisions for a request.

    Args:
        mask: the cells that may change.
        costs: The costs of the picture's steps and decode.
        prompt: encoded; None where nothing is run.
        mode: The way it runs; of a soft mask its start is the step at which the first cells join.
        fallback: why it runs dense, or "".
        skip_reason: why it need not run, or "".
        notes: for the user.
        probes: dense evaluations besides the steps'.
        extra_macs: MACs of those, of reading references, of a check, and of a run that was broken off.
        check: looks for drift at one step, or None.
        reuses_unconditional: the first step, where it is dense, takes the unconditional prediction from the source.
        protected: booleans [h, w], cells that the mask may not grow to, or None.
        has_rim: whether cells beside the mask that show the edit become a part of it when it is decoded.
    """

    mask: EditMask
    costs: Costs
    prompt: EncodedPrompt | None = None
    mode: EditMode = field(default_factory=EditMode)
    fallback: str = ""
    skip_reason: str = ""
    notes: tuple[str, ...] = ()
    probes: int = 0
    extra_macs: int = 0
    check: DriftCheck | None = None
    reuses_unconditional: bool = False
    protected: BoolGrid | None = None
    has_rim: bool = False

    @property
    def decoded_cells(self) -> BoolGrid:
        """The latent cells that are decoded: booleans [h, w]."""
        return dilate(self.mask.grid, 1) if self.has_rim else self.mask.grid

    @property
    def rim_allowed(self) -> BoolGrid:
        """Cells [h, w] that may become a part of the mask since the edit shows there.

        They lie beside a cell that is painted as a whole, and are not protected.
        """
        whole, cells = self.mask.grid, self.mask.grid.shape
        if self.mask.pixels is not None:
            whole = whole & (cells_of_pixels(self.mask.pixels, cells, np.minimum) == WHOLE)
        allowed: BoolGrid = dilate(whole, 1)
        return allowed if self.protected is None else allowed & ~self.protected

    def with_dilation(self, dilation: tuple[Dilation, ...], fallback: str = "") -> EditPlan:
        """The same with other steps.

        Args:
            dilation: latent cells computed beyond the mask at each step, or `Step.DENSE`; () for a dense run.
            fallback: why it is dense, or "".
        """
        structure, erases = (self.mode.structure, self.mode.erases) if dilation else (0.0, False)
        mode = replace(self.mode, dilation=dilation, structure=structure, erases=erases)
        return replace(self, mode=mode, fallback=fallback)


class Planner:
    """Plans on one engine; stateless between calls.

    Args:
        engine: the engine whose costs count, and whose attention is read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def plan_unchanged(self, request: EditRequest, reason: str) -> EditPlan:
        """The plan of an edit that need not run.

        Args:
            request: the edit.
            reason: for the user.
        """
        grid = np.zeros(self._engine.grids(request.config)[0], bool)
        return EditPlan(EditMask(grid, MaskSource.NOWHERE), self.costs(request.config), skip_reason=reason)

    def plan_source(self, request: EditRequest, prompt: EncodedPrompt) -> EditPlan:
        """The plan of a picture that is generated or opened: dense, everywhere.

        Args:
            request: the source.
            prompt: encoded.
        """
        config, probes, extra_macs = request.config, 0, self._read_references(request)
        costs = self.costs(config)
        if config.inversion is Inversion.DDIM:  # whose path begins with one evaluation of one branch
            probes, extra_macs = 1, extra_macs + costs.dense_step() // self._engine.batch(config)
        mask = self._full_mask(config)
        return EditPlan(mask, costs, prompt, notes=prompt.notes, probes=probes, extra_macs=extra_macs)

    def plan_edit(self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory) -> EditPlan:
        """The plan of an edit over its source's trajectory.

        Args:
            request: the edit.
            prompt: encoded.
            source: the parent's trajectory.

        Raises:
            MaskError: the mask has fewer components than `instance` asks for. NumericsError: NaN in recorded attention.
        """
        extra_macs, config = self._read_references(request), request.config
        costs = self.costs(config, recorded=self._engine.has_adapter_features(source, config))
        text = prompt.embeddings, prompt.keys
        scope = EditScope(self._engine, source, config, text, request.script, costs.dense_step())
        with request.stopwatch.stage("mask"):
            found = request.region.resolve(scope)
            regional = self._regional(request, scope)
            mask, start = self._begin(found.kept_to_pixels(), request)
        if not mask.grid.any():
            return self.plan_unchanged(request, "nothing is left of the mask")
        if request.new_noise and mask.levels is not None and config.scheduler in _LONG_MEMORIES:
            name = config.scheduler.label
            raise InputError(f"soft masks with another seed need a sampler without memory, such as DDIM, got {name}")
        if request.erases and (found.reason or mask.grid.all()):
            raise MaskError(f"erasing must leave a part of the picture, got {found.reason or 'all of it'}; give a mask")
        with request.stopwatch.stage("plan"):
            cells = mask.cells(config.num_timesteps)
            is_part = not found.reason and not mask.grid.all() and mask.levels is None
            erases = request.erases or (request.removes and is_part)
            start = request.erasing_start if erases and mask.levels is None else start
            dilation = request.dilation or self._choose_dilations(request, cells, start, costs, erases=erases)
            is_sparse = erases or regional or request.is_frame
            reason = found.reason or ("" if is_sparse else costs.dense_is_cheaper(cells, dilation, start))
        by_words = mask.source is MaskSource.ATTENTION and mask.levels is None
        plan = EditPlan(
            mask,
            costs,
            prompt,
            EditMode(dilation, float(request.structure), start, erases=erases, regional=regional),
            notes=(*prompt.notes, *request.region.notes, *self._adapter_notes(request, start)),
            probes=scope.probes,
            extra_macs=extra_macs + scope.macs + len(regional) * costs.text(),
            reuses_unconditional=self._reuses_unconditional(request, prompt, source, start),
            protected=request.region.protected(scope),
            has_rim=by_words and not request.is_frame,
        )
        plan = plan.with_dilation((), reason) if reason else plan
        deepened = len(steps_without_features(source, plan.mode))
        plan = replace(plan, extra_macs=plan.extra_macs + deepened * costs.dense_step())
        if not (request.verify and by_words) or regional or plan.mode.erases:
            return plan  # around regions no prompt of theirs is read; around what goes other words, and less guidance
        return self._with_drift_check(request, plan)

    def _adapter_notes(self, request: EditRequest, start: int) -> tuple[str, ...]:
        """Return notes on the adapters of a picture or of its edit that take no part in the steps that run."""
        config, loaded = request.config, self._engine.references.adapters
        before = request.parent.config.like if request.parent else ()
        gone = [entry.adapter for entry in before if entry.adapter not in loaded]
        idle = [
            loaded[entry.adapter].source
            for entry in config.like
            if not any(entry.use.covers(i, config.num_timesteps) for i in range(start, config.num_timesteps))
        ]
        return (
            *(f"made without the adapter {name} of the edited picture, which is not loaded now" for name in gone),
            *(f"the adapter {name} takes part in none of the steps that run, from step {start} on" for name in idle),
        )

    def _regional(self, request: EditRequest, scope: EditScope) -> tuple[RegionalPrompt, ...]:
        """The cells of every prompt of a region."""
        regional = []
        for region, prompt in request.regional:
            found = region.resolve(scope)
            if found.reason or not found.mask.grid.any():
                why = found.reason or "it marks nothing"
                raise MaskError(f"the region of {prompt!r:.60} must be a part of the picture: {why}")
            regional.append(RegionalPrompt(prompt, found.mask.grid))
        return tuple(regional)

    def _begin(self, mask: EditMask, request: EditRequest) -> tuple[EditMask, int]:
        """A mask with the strength of a request, and the first step to run. Cells of a soft mask that would join at no
        step are none of it."""
        if mask.levels is None:
            return mask, request.start
        levels = np.rint(mask.levels * request.strength).astype(np.uint8)
        steps = request.config.num_timesteps
        levels[entry_steps(levels, steps) == steps] = 0
        mask = replace(mask, grid=levels > 0, levels=levels)
        return mask, min(mask.cells(steps).start, steps - 1)

    def plan_recorded(
        self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory | None, mask: EditMask, run: EditMode
    ) -> EditPlan:
        """The plan of an edit, or of a source, just as it was computed before.

        Args:
            request: with the structure of then.
            prompt: encoded.
            source: the parent's trajectory; None for a source.
            mask: the cells that might change.
            run: how it was computed.
        """
        shares = source is not None and self._reuses_unconditional(request, prompt, source, run.start)
        recorded = source is not None and self._engine.has_adapter_features(source, request.config)
        mask = mask if run.rim is None else mask.with_cells(mask.grid & ~run.rim)
        plan = EditPlan(
            mask,
            self.costs(request.config, recorded=recorded),
            prompt,
            run,
            "" if run.dilation else "it ran dense when it was made first",
            notes=prompt.notes,
            reuses_unconditional=shares,
            has_rim=run.rim is not None,
        )
        return self._with_drift_check(request, plan, passed=True) if run.checked else plan

    def widen(self, request: EditRequest, plan: EditPlan, drift: DriftDetected) -> EditPlan:
        """The plan after drift was found: a larger mask, or a dense run.

        Args:
            request: the edit.
            plan: the plan that was run until the drift was found.
            drift: the larger mask, and the step.
        """
        costs, old_mask, start = plan.costs, plan.mask, plan.mode.start
        steps_run = plan.mode.dilation[start : drift.step + 1]
        spent = sum(costs.sparse_step(old_mask.grid, cells) for cells in steps_run)
        extra_macs = spent - self._shared_macs(request, plan, costs)
        plan = replace(
            plan, extra_macs=plan.extra_macs + extra_macs, check=None, mode=replace(plan.mode, checked=False)
        )
        full = self._full_mask(request.config)
        grid = full.grid if drift.is_global else drift.grid
        if plan.protected is not None:
            grid = (grid & ~plan.protected) | (grid & old_mask.grid)
        mask = old_mask.with_cells(grid)
        mask = replace(full, grid=mask.grid, pixels=mask.pixels) if drift.is_global else mask
        if drift.is_global:
            reason = f"at step {drift.step} the edit changed the picture everywhere"
            return replace(plan, mask=mask).with_dilation((), reason)
        note = f"the mask was grown from {old_mask.area:.1%} to {mask.area:.1%}: at step {drift.step} the edit left it"
        dilation, cells = plan.mode.dilation, mask.cells(request.config.num_timesteps)
        if costs.dense_is_cheaper(cells, dilation, start):
            dilation = self._choose_dilations(request, cells, start, costs, erases=plan.mode.erases)
        reason = costs.dense_is_cheaper(cells, dilation, start)
        return replace(plan, mask=mask, notes=(*plan.notes, note)).with_dilation(() if reason else dilation, reason)

    def costs(self, config: GenerationConfig, *, recorded: bool = False) -> Costs:
        """Costs of a config.

        Args:
            config: config of the picture.
            recorded: the source was made with the config's adapters, so that sparse steps read what it recorded.
        """
        return self._engine.costs(config, recorded=recorded)

    def macs(self, request: EditRequest, plan: EditPlan) -> int:
        """Multiply-accumulates of a plan's run, probes included.

        Args:
            request: the request that is planned.
            plan: plan of the request.
        """
        costs, mode, cells = plan.costs, plan.mode, self._cells(request, plan)
        run = (
            costs.sparse(cells, mode.dilation, mode.start, plan.decoded_cells)
            if mode.dilation
            else costs.dense(mode.start)
        )
        return plan.extra_macs + run - self._shared_macs(request, plan, costs)

    def seconds(self, request: EditRequest, plan: EditPlan) -> float | None:
        """Predicted seconds of a plan's run, probes included.

        Args:
            request: the request that is planned.
            plan: plan of the request.

        Returns:
            Seconds; None where this machine has no cost table and nothing was run.
        """
        cells, mode = self._cells(request, plan), plan.mode
        return plan.costs.seconds(cells, mode.dilation, mode.start, plan.probes, plan.decoded_cells)

    def learn_pace(self, request: EditRequest, plan: EditPlan, seconds: float) -> None:
        """Correct predictions by what a run took.

        Args:
            request: the request that was run; runs that read a picture or references have parts that are not predicted.
            plan: plan of the request.
            seconds: The seconds of the run.
        """
        if request.picture is None and not request.config.like:
            cells, mode, edit = self._cells(request, plan), plan.mode, request.parent is not None
            work = plan.costs.work(cells, mode.dilation, mode.start, plan.probes, plan.decoded_cells)
            self._engine.pace = self._engine.pace.after(seconds / work, sparse=bool(mode.dilation), edit=edit)

    def recorded_bytes(self, request: EditRequest, plan: EditPlan) -> int:
        """Bytes of features that a plan's run will keep for later edits, about.

        Args:
            request: the request that is planned.
            plan: plan of the request.
        """
        if plan.skip_reason:
            return 0
        config, dilation, start, mask = request.config, plan.mode.dilation, plan.mode.start, self._cells(request, plan)
        size = self._engine.record_size(config)
        if not dilation:
            return self._engine.recorded_bytes(config, start)
        total = 0
        for i, count in steps_alike(mask, dilation, start):
            if dilation[i] is Step.DENSE:
                total += count * size.step
            else:
                runs = self._engine.executor.shallow.runs if isinstance(dilation[i], Shallow) else _runs
                total += count * size.overlay(plan.costs.rows(mask.at(i), (dilation[i],)), runs)
        return total

    def _cells(self, request: EditRequest, plan: EditPlan) -> ActiveCells:
        return plan.mask.cells(request.config.num_timesteps)

    def _read_references(self, request: EditRequest) -> int:
        """Let the adapters read the config's references; the MACs spent, 0 where that was done before."""
        if not request.config.like:
            return 0
        with request.stopwatch.stage("reference"):
            return self._engine.references.prepare(request.config, self._engine.batch(request.config))

    def _choose_dilations(
        self, request: EditRequest, cells: ActiveCells, start: int, costs: Costs, *, erases: bool
    ) -> tuple[Dilation, ...]:
        quality = request.growth if isinstance(request.growth, Quality) else Quality.BALANCED
        plain = request.structure > 0 or erases or bool(request.regional) or request.is_frame
        shallow = () if cells.entry is not None else self.shallow_steps(request.config, start)
        return costs.choose_dilations(cells, start, quality=quality, plain=plain, shallow=shallow)

    def shallow_steps(self, config: GenerationConfig, start: int = 0) -> tuple[int, ...]:
        """The steps of an edit that may be shallow.

        Those are not the first two, not that of the drift check, and not all of those that later masks are made from.

        Args:
            config: The settings of the edit.
            start: the first step to run.
        """
        steps = config.num_timesteps
        full = {start, start + 1, start + drift_check.check_step(steps - start)}
        found = find_shallow_steps(steps, full)
        read = mask_steps(self._engine.sampler(config).timesteps)
        return tuple(i for i in found if i != read[0]) if {*read} <= {*found} else found

    def _with_drift_check(self, request: EditRequest, plan: EditPlan, *, passed: bool = False) -> EditPlan:
        """The plan with a check for drift, where one can be made; `passed` as in `drift_check.plan_check`."""
        mode, steps = plan.mode, request.config.num_timesteps - plan.mode.start
        if not mode.dilation or steps <= 1:
            return plan
        check = drift_check.plan_check(plan.mask, steps, mode.start, passed=passed)
        extra = plan.costs.check_macs(plan.mask.grid, mode.dilation[check.step], check.cells)
        return replace(plan, check=check, extra_macs=plan.extra_macs + extra, mode=replace(mode, checked=True))

    def _reuses_unconditional(
        self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory, start: int
    ) -> bool:
        return self._engine.unconditional(source, request.config, prompt.embeddings, start) is not None

    def _shared_macs(self, request: EditRequest, plan: EditPlan, costs: Costs) -> int:
        """MACs of a plan's first step that its source spent."""
        if not plan.reuses_unconditional:
            return 0
        if not plan.mode.dilation:
            return costs.dense_step() // self._engine.batch(request.config)
        return costs.branch() if plan.mode.dilation[plan.mode.start] is Step.DENSE else 0

    def _full_mask(self, config: GenerationConfig) -> EditMask:
        """The mask of all latent cells."""
        return EditMask(np.ones(self._engine.grids(config)[0], bool), MaskSource.EVERYWHERE)
