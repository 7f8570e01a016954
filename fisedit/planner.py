"""Turns a request into a plan: where an edit goes, and how it will run.

Spends no UNet call but those that look for a mask; keeps nothing. Knows neither pictures' decoding nor the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fisedit.errors import InputError
from fisedit.masking import drift_check, masks
from fisedit.masking.localize import THINGS, Search, num_probes, predict_mask, restrict_to_words
from fisedit.models.stopwatch import Stopwatch
from fisedit.sparse_kernels.dilation import dilate, erode
from fisedit.values import (
    DENSE_STEP,
    MAX_DILATION,
    EditKind,
    EditMask,
    GenerationConfig,
    Inversion,
    MaskSource,
    first_step,
)

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from fisedit.history import EditResult
    from fisedit.masking.drift_check import DriftCheck, DriftDetected
    from fisedit.sampling.denoise import Engine
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.sparse.cost_model import Costs
    from fisedit.values import BoolGrid, EditScript, OnStep


@dataclass(frozen=True, eq=False)
class EditRequest:
    """A picture to be made: generated, opened or edited. Checked when it is built.

    Args:
        config: of the picture; of an edit, its parent's with the new prompt.
        script: what the prompt changes.
        parent: the result to edit; None for a source.
        picture: an opened picture, upright; None for a generated one.
        mask: booleans [h, w], where to edit; None for where the words say.
        protect: booleans [h, w], where never to edit, or None.
        grow: latent cells by which the mask is dilated, -64 to 64; negative erodes.
        search: how a mask is predicted.
        dilation: latent cells to compute beyond the mask, one number per step; () for what costs least.
        structure: share of the steps that may inject the source's attention which do, 0 to 1.
        start: index of the first step to run.
        verify: check a predicted mask for drift.
        on_step: called before every step.
        stopwatch: takes the seconds of every stage.

    Raises:
        InputError: grow or structure out of range, or dense steps where structure is kept.
    """

    config: GenerationConfig
    script: EditScript
    parent: EditResult | None = None
    picture: Image | None = None
    mask: BoolGrid | None = None
    protect: BoolGrid | None = None
    grow: int = 0
    search: Search = field(default_factory=Search)
    dilation: tuple[int, ...] = ()
    structure: float = 0.0
    start: int = 0
    verify: bool = False
    on_step: OnStep | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self) -> None:
        if type(self.grow) is not int or not -MAX_DILATION <= self.grow <= MAX_DILATION:
            raise InputError(f"grow must be latent cells in [-{MAX_DILATION}, {MAX_DILATION}], got {self.grow!r}")
        if not (isinstance(self.structure, int | float) and 0 <= self.structure <= 1):
            raise InputError(f"structure must be in [0, 1], got {self.structure!r}")
        if self.structure and DENSE_STEP in self.dilation:
            got = self.dilation[0] if len(set(self.dilation)) == 1 else self.dilation
            raise InputError(f"growth must be under {DENSE_STEP} where structure is kept, got {got!r}; use structure=0")

    def located(
        self,
        mask: object,
        protect: object,
        *,
        grow: int,
        search: Search,
        growth: int | Sequence[int] | None,
        strength: float,
    ) -> EditRequest:
        """The request with where and when it computes, as the public face takes these arguments."""
        return replace(
            self,
            mask=self.grid(mask),
            protect=self.grid(protect),
            grow=grow,
            search=search,
            dilation=self.dilations(growth),
            start=first_step(strength, self.config.num_inference_steps),
        )

    def grid(self, mask: object) -> BoolGrid | None:
        """A mask as the public face takes it, on the latent grid [h, w]; None for None."""
        assert self.parent is not None
        sizes = self.config.height, self.config.width, self.parent.size
        return None if mask is None else masks.grid_of_mask(mask, *sizes)

    def dilations(self, growth: int | Sequence[int] | None) -> tuple[int, ...]:
        """Latent cells beyond the mask for every step; () where the cost decides. Raises InputError out of range."""
        if growth is None:
            return ()
        steps = self.config.num_inference_steps
        cells = tuple(growth) if isinstance(growth, Sequence) else (growth,) * steps
        if len(cells) != steps or not all(type(c) is int and 0 <= c <= MAX_DILATION for c in cells):
            raise InputError(
                f"growth must be one number of latent cells in [0, {MAX_DILATION}], or {steps} of them, got {growth!r}"
            )
        return cells

    @property
    def unchanged(self) -> str:
        """Why the parent's picture is the answer, or ""."""
        assert self.parent is not None
        restyled = self.config.like != self.parent.config.like and (self.mask is not None or self.search.words)
        if self.script.kind is EditKind.IDENTICAL and not restyled:
            return self.script.reason or "the prompt says the same as before"
        return "" if self.mask is None or self.mask.any() else "the mask is empty"


class PlannedEdit(Protocol):
    """A result, or what a picture's file tells of one."""

    @property
    def mask(self) -> EditMask:
        """The cells that may have changed."""

    @property
    def growth(self) -> tuple[int, ...]:
        """Latent cells beyond the mask, one number per step; () for a dense run."""

    @property
    def checked(self) -> bool:
        """Whether it was checked for drift, which moves roundings."""


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt as the UNet reads it.

    Args:
        embeddings: [B, T, D].
        keys: keys and values by projection, filled as they are needed.
        notes: what the encoder could not read.
    """

    embeddings: Tensor
    keys: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class EditPlan:
    """What was decided for a request.

    Args:
        mask: the cells that may change.
        prompt: encoded; None where nothing is run.
        dilation: latent cells computed beyond the mask at each step, or `DENSE_STEP`; () for a dense run.
        fallback: why it runs dense, or "".
        nothing: why it need not run, or "".
        notes: for the user.
        probes: dense evaluations besides the steps'.
        spent: MACs of those, of reading references, of a check, and of a run that was broken off.
        check: looks for drift at one step, or None.
        recorded: the source was made with the same adapters.
        halved: the first step, where it is dense, takes the unconditional prediction from the source.
    """

    mask: EditMask
    prompt: EncodedPrompt | None = None
    dilation: tuple[int, ...] = ()
    fallback: str = ""
    nothing: str = ""
    notes: tuple[str, ...] = ()
    probes: int = 0
    spent: int = 0
    check: DriftCheck | None = None
    recorded: bool = False
    halved: bool = False


class Planner:
    """Plans on one engine; stateless between calls.

    Args:
        engine: whose costs count, and whose attention is read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def plan_nothing(self, request: EditRequest, why: str) -> EditPlan:
        """The plan of an edit that need not run."""
        grid = np.zeros(self._engine.grids(request.config)[0], bool)
        return EditPlan(EditMask(grid, MaskSource.NOWHERE), nothing=why)

    def plan_source(self, request: EditRequest, prompt: EncodedPrompt) -> EditPlan:
        """The plan of a picture that is generated or opened: dense, everywhere."""
        config, probes, spent = request.config, 0, self._read_references(request)
        if config.inversion is Inversion.DDIM:  # whose path begins with one evaluation of one branch
            probes, spent = 1, self.costs(config).dense_step() // self._engine.batch(config)
        return EditPlan(self._everywhere(config), prompt, notes=prompt.notes, probes=probes, spent=spent)

    def plan_edit(self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory) -> EditPlan:
        """The plan of an edit over its source's trajectory."""
        spent = self._read_references(request)
        with request.stopwatch.stage("mask"):
            mask, reason, probes = self._mask(request, prompt, source)
        if not mask.grid.any():
            return self.plan_nothing(request, "nothing is left of the mask")
        with request.stopwatch.stage("plan"):
            costs = self.costs(request.config)
            dilation = request.dilation or self._cheapest(request, mask, costs)
            reason = reason or costs.dense_is_cheaper(mask.grid, dilation)
        plan = EditPlan(
            mask,
            prompt,
            () if reason else dilation,
            reason,
            notes=prompt.notes,
            probes=probes,
            spent=spent + self._probing(request, probes),
            recorded=self._engine.remembers(source, request.config),
            halved=self._halved(request, prompt, source),
        )
        return self._checked(request, plan) if request.verify and mask.source is MaskSource.ATTENTION else plan

    def plan_remake(
        self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory, past: PlannedEdit
    ) -> EditPlan:
        """The plan of an edit whose cells are known, as it was made before.

        Args:
            request: with the structure and the first step of then.
            prompt: encoded.
            source: the parent's trajectory.
            past: mask, cells and whether it was checked for drift.
        """
        halved = self._halved(request, prompt, source)
        fallback = "" if past.growth else "it ran dense when it was made first"
        plan = EditPlan(past.mask, prompt, past.growth, fallback, notes=prompt.notes, halved=halved)
        return self._checked(request, plan) if past.checked else plan

    def widen(self, request: EditRequest, plan: EditPlan, drift: DriftDetected) -> EditPlan:
        """The plan after drift was found: a larger mask, or a dense run."""
        costs, before = self.costs(request.config, recorded=plan.recorded), plan.mask
        ran = plan.dilation[request.start : drift.step + 1]
        lost = sum(costs.sparse_step(before.grid, cells) for cells in ran) - self._shared(request, plan, costs)
        plan = replace(plan, spent=plan.spent + lost, check=None)
        mask = self._everywhere(request.config) if drift.everywhere else replace(before, grid=drift.grid)
        if request.protect is not None:
            mask = replace(mask, grid=mask.grid & ~request.protect)
        if drift.everywhere:
            reason = f"at step {drift.step} the edit changed the picture everywhere"
            return replace(plan, mask=mask, dilation=(), fallback=reason)
        note = f"the mask was grown from {before.area:.1%} to {mask.area:.1%}: at step {drift.step} the edit left it"
        dilation = plan.dilation
        if costs.dense_is_cheaper(mask.grid, dilation):
            dilation = self._cheapest(request, mask, costs)
        reason = costs.dense_is_cheaper(mask.grid, dilation)
        dilation, notes = () if reason else dilation, (*plan.notes, note)
        return replace(plan, mask=mask, dilation=dilation, fallback=reason, notes=notes)

    def costs(self, config: GenerationConfig, *, recorded: bool = False) -> Costs:
        """Costs of a config, over a source that was made with its adapters or not."""
        return self._engine.costs(config, recorded=recorded)

    def macs(self, request: EditRequest, plan: EditPlan) -> int:
        """Multiply-accumulates of a plan's run, what looking took included."""
        costs, start = self.costs(request.config, recorded=plan.recorded), request.start
        run = costs.sparse(plan.mask.grid, plan.dilation, start) if plan.dilation else costs.dense(start)
        return plan.spent + run - self._shared(request, plan, costs)

    def seconds(self, request: EditRequest, plan: EditPlan) -> float | None:
        """Predicted seconds of a plan's run, what looking took included; None where this machine was not measured."""
        costs = self.costs(request.config, recorded=plan.recorded)
        return costs.seconds(plan.mask.grid, plan.dilation, request.start, plan.probes)

    def _read_references(self, request: EditRequest) -> int:
        """Let the adapters read the config's references; the MACs spent, 0 where that was done before."""
        if not request.config.like:
            return 0
        with request.stopwatch.stage("reference"):
            return self._engine.references.prepare(request.config, self._engine.batch(request.config))

    def _mask(self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory) -> tuple[EditMask, str, int]:
        """The user's mask, or what the words say, never where the user forbids it; why it is everywhere, or ""; and how
        many dense evaluations were spent on looking."""
        search, script, config = request.search, request.script, request.config
        if search.words:
            script = restrict_to_words(script, search.words, self._engine)
        reason, probes = "", 0
        if request.mask is not None:
            mask = EditMask(request.mask, MaskSource.GIVEN)
        elif script.kind is EditKind.GLOBAL:
            mask, reason = self._everywhere(config), f"global edit: {script.reason}"
        else:
            mask = predict_mask(self._engine, source, config, (prompt.embeddings, prompt.keys), script, search)
            probes = num_probes(script, search)
            if mask.confidence < masks.LOW_CONFIDENCE:
                reason = (
                    f"the words point nowhere in particular (confidence {mask.confidence:.2f}); give a mask to be exact"
                )
                mask = replace(self._everywhere(config), confidence=mask.confidence, heat=mask.heat)
        grid = mask.grid
        if request.grow:
            grid = dilate(grid, request.grow) if request.grow > 0 else erode(grid, -request.grow)
        return replace(mask, grid=grid if request.protect is None else grid & ~request.protect), reason, probes

    def _probing(self, request: EditRequest, probes: int) -> int:
        """MACs of so many dense evaluations for a mask; "things" runs one branch of the last."""
        step = self.costs(request.config).dense_step()
        one_branch = probes and request.search.method == THINGS
        return probes * step - (step - step // self._engine.batch(request.config) if one_branch else 0)

    def _cheapest(self, request: EditRequest, mask: EditMask, costs: Costs) -> tuple[int, ...]:
        return costs.growth(mask.grid, request.start, plain=request.structure > 0)

    def _checked(self, request: EditRequest, plan: EditPlan) -> EditPlan:
        """The plan with a check for drift, where one can be made."""
        steps = request.config.num_inference_steps - request.start
        if not plan.dilation or steps <= 1:
            return plan
        check = drift_check.plan_check(plan.mask, steps, request.start)
        costs = self.costs(request.config, recorded=plan.recorded)
        extra = costs.check(plan.mask.grid, plan.dilation[check.step], check.cells)
        return replace(plan, check=check, spent=plan.spent + extra)

    def _halved(self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory) -> bool:
        return self._engine.without(source, request.config, prompt.embeddings, request.start) is not None

    def _shared(self, request: EditRequest, plan: EditPlan, costs: Costs) -> int:
        """MACs of a plan's first step that its source spent."""
        dense = not plan.dilation or plan.dilation[request.start] == DENSE_STEP
        return costs.branch() if plan.halved and dense else 0

    def _everywhere(self, config: GenerationConfig) -> EditMask:
        """The mask of all latent cells."""
        return EditMask(np.ones(self._engine.grids(config)[0], bool), MaskSource.EVERYWHERE)
