"""Turns a request into a plan: where an edit goes, and how it will run.

Spends no UNet call but those that a mask needs; keeps nothing. Knows neither pictures' decoding nor the history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fisedit.errors import InputError
from fisedit.masking import drift_check, masks
from fisedit.masking.localize import OBJECT_MASKS, MaskOptions, num_probes, predict_mask
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
    Quality,
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
class Region:
    """Where an edit may paint, as the public face takes it.

    Args:
        mask: where to edit, of any form that `masks.grid_of_mask` reads; None for where the words say.
        protect: where never to edit, of the same forms, or None.
        grow: latent cells by which the mask is dilated, -64 to 64; negative erodes.
        mask_options: how a mask is predicted where none is given.
        verify: check a predicted mask for drift.
    """

    mask: object = None
    protect: object = None
    grow: int = 0
    mask_options: MaskOptions = field(default_factory=MaskOptions)
    verify: bool = False


@dataclass(frozen=True, eq=False)
class EditRequest:
    """A picture to be made: generated, opened or edited. Checked when it is built.

    Args:
        config: of the picture; of an edit, its parent's with the new prompt, and with a seed of its own if it has one.
        script: what the prompt changes.
        parent: the result to edit; None for a source.
        picture: an opened picture, upright; None for a generated one.
        region: where to edit.
        focus: the script whose words localize the mask, where that is not `script`.
        growth: latent cells to compute beyond the mask, 0 to 64, for all steps or each; or the quality that decides it.
        strength: share of the steps to run, above 0 to 1, from the last.
        structure: share of the steps that may inject the source's attention which do, 0 to 1.
        on_step: called before every step with (i, n, preview).
        stopwatch: takes the seconds of every stage.

    Attributes:
        mask: booleans [h, w], where to edit; None for where the words say.
        protect: booleans [h, w], where never to edit, or None.
        dilation: `growth` as one number per step; () where a quality decides.
        start: index of the first step to run, from `strength`.

    Raises:
        MaskError: a mask of another type, size or range of values.
        InputError: an argument out of range, or dense steps where structure is kept.
    """

    config: GenerationConfig
    script: EditScript
    parent: EditResult | None = None
    picture: Image | None = None
    region: Region = field(default_factory=Region)
    focus: EditScript | None = None
    growth: int | Sequence[int] | Quality = Quality.BALANCED
    strength: float = 1.0
    structure: float = 0.0
    on_step: OnStep | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    mask: BoolGrid | None = field(init=False)
    protect: BoolGrid | None = field(init=False)
    dilation: tuple[int, ...] = field(init=False)
    start: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", self._grid(self.region.mask))
        object.__setattr__(self, "protect", self._grid(self.region.protect))
        object.__setattr__(self, "dilation", self._dilations())
        object.__setattr__(self, "start", first_step(self.strength, self.config.num_timesteps))
        if type(grow := self.region.grow) is not int or not -MAX_DILATION <= grow <= MAX_DILATION:
            raise InputError(f"grow must be latent cells in [-{MAX_DILATION}, {MAX_DILATION}], got {grow!r}")
        if not (isinstance(self.structure, int | float) and 0 <= self.structure <= 1):
            raise InputError(f"structure must be in [0, 1], got {self.structure!r}")
        if self.structure and DENSE_STEP in self.dilation:
            got = self.dilation[0] if len(set(self.dilation)) == 1 else self.dilation
            raise InputError(f"growth must be under {DENSE_STEP} where structure is kept, got {got!r}; use structure=0")

    def _grid(self, mask: object) -> BoolGrid | None:
        """A mask as the public face takes it, on the latent grid [h, w]; None for None."""
        if mask is None:
            return None
        size = None if self.parent is None else self.parent.size
        return masks.grid_of_mask(mask, self.config.height, self.config.width, size)

    def _dilations(self) -> tuple[int, ...]:
        """Latent cells beyond the mask for every step; () where the cost decides."""
        if isinstance(self.growth, Quality):
            return ()
        growth, steps = self.growth, self.config.num_timesteps
        cells = tuple(growth) if isinstance(growth, Sequence) else (growth,) * steps
        if len(cells) != steps or not all(type(c) is int and 0 <= c <= MAX_DILATION for c in cells):
            raise InputError(
                f"growth must be one number of latent cells in [0, {MAX_DILATION}], or {steps} of them, got {growth!r}"
            )
        return cells

    @property
    def new_noise(self) -> bool:
        """Whether the edit begins with the noise of another seed than its parent's inside the mask."""
        return self.parent is not None and self.config.seed != self.parent.config.seed

    @property
    def unchanged_reason(self) -> str:
        """Why the parent's picture is the answer, or ""."""
        assert self.parent is not None
        is_localized = self.mask is not None or self.focus is not None
        same_words_suffice = self.config.like != self.parent.config.like or self.new_noise
        if self.script.kind is EditKind.IDENTICAL and not (is_localized and same_words_suffice):
            return self.script.reason or "the prompt says the same as before"
        return "" if self.mask is None or self.mask.any() else "the mask is empty"


class RecordedEdit(Protocol):
    """An edit made before: a result, or the record of one in a picture's file."""

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
        skip_reason: why it need not run, or "".
        notes: for the user.
        probes: dense evaluations besides the steps'.
        extra_macs: MACs of those, of reading references, of a check, and of a run that was broken off.
        check: looks for drift at one step, or None.
        recorded: the source was made with the same adapters.
        reuses_unconditional: the first step, where it is dense, takes the unconditional prediction from the source.
    """

    mask: EditMask
    prompt: EncodedPrompt | None = None
    dilation: tuple[int, ...] = ()
    fallback: str = ""
    skip_reason: str = ""
    notes: tuple[str, ...] = ()
    probes: int = 0
    extra_macs: int = 0
    check: DriftCheck | None = None
    recorded: bool = False
    reuses_unconditional: bool = False


class Planner:
    """Plans on one engine; stateless between calls.

    Args:
        engine: whose costs count, and whose attention is read.
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
        return EditPlan(EditMask(grid, MaskSource.NOWHERE), skip_reason=reason)

    def plan_source(self, request: EditRequest, prompt: EncodedPrompt) -> EditPlan:
        """The plan of a picture that is generated or opened: dense, everywhere.

        Args:
            request: the source.
            prompt: encoded.
        """
        config, probes, extra_macs = request.config, 0, self._read_references(request)
        if config.inversion is Inversion.DDIM:  # whose path begins with one evaluation of one branch
            probes, extra_macs = 1, self.costs(config).dense_step() // self._engine.batch(config)
        return EditPlan(self._full_mask(config), prompt, notes=prompt.notes, probes=probes, extra_macs=extra_macs)

    def plan_edit(self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory) -> EditPlan:
        """The plan of an edit over its source's trajectory.

        Args:
            request: the edit.
            prompt: encoded.
            source: the parent's trajectory.

        Raises:
            MaskError: the mask has fewer components than `instance` asks for. NumericsError: NaN in recorded attention.
        """
        extra_macs = self._read_references(request)
        with request.stopwatch.stage("mask"):
            mask, reason, probes = self._resolve_mask(request, prompt, source)
        if not mask.grid.any():
            return self.plan_unchanged(request, "nothing is left of the mask")
        with request.stopwatch.stage("plan"):
            costs = self.costs(request.config)
            dilation = request.dilation or self._choose_dilations(request, mask, costs)
            reason = reason or costs.dense_is_cheaper(mask.grid, dilation)
        plan = EditPlan(
            mask,
            prompt,
            () if reason else dilation,
            reason,
            notes=prompt.notes,
            probes=probes,
            extra_macs=extra_macs + self._probe_macs(request, probes),
            recorded=self._engine.has_adapter_features(source, request.config),
            reuses_unconditional=self._reuses_unconditional(request, prompt, source),
        )
        return (
            self._with_drift_check(request, plan)
            if request.region.verify and mask.source is MaskSource.ATTENTION
            else plan
        )

    def plan_recorded(
        self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory, edit: RecordedEdit
    ) -> EditPlan:
        """The plan of an edit whose cells are known, as it was made before.

        Args:
            request: with the structure and the first step of then.
            prompt: encoded.
            source: the parent's trajectory.
            edit: mask, cells and whether it was checked for drift.
        """
        reuses_unconditional = self._reuses_unconditional(request, prompt, source)
        fallback = "" if edit.growth else "it ran dense when it was made first"
        plan = EditPlan(
            edit.mask, prompt, edit.growth, fallback, notes=prompt.notes, reuses_unconditional=reuses_unconditional
        )
        return self._with_drift_check(request, plan) if edit.checked else plan

    def widen(self, request: EditRequest, plan: EditPlan, drift: DriftDetected) -> EditPlan:
        """The plan after drift was found: a larger mask, or a dense run.

        Args:
            request: the edit.
            plan: that was run until the drift was found.
            drift: the larger mask, and the step.
        """
        costs, old_mask = self.costs(request.config, recorded=plan.recorded), plan.mask
        steps_run = plan.dilation[request.start : drift.step + 1]
        extra_macs = sum(costs.sparse_step(old_mask.grid, cells) for cells in steps_run) - self._shared_macs(
            request, plan, costs
        )
        plan = replace(plan, extra_macs=plan.extra_macs + extra_macs, check=None)
        mask = self._full_mask(request.config) if drift.is_global else replace(old_mask, grid=drift.grid)
        if request.protect is not None:
            mask = replace(mask, grid=mask.grid & ~request.protect)
        if drift.is_global:
            reason = f"at step {drift.step} the edit changed the picture everywhere"
            return replace(plan, mask=mask, dilation=(), fallback=reason)
        note = f"the mask was grown from {old_mask.area:.1%} to {mask.area:.1%}: at step {drift.step} the edit left it"
        dilation = plan.dilation
        if costs.dense_is_cheaper(mask.grid, dilation):
            dilation = self._choose_dilations(request, mask, costs)
        reason = costs.dense_is_cheaper(mask.grid, dilation)
        dilation, notes = () if reason else dilation, (*plan.notes, note)
        return replace(plan, mask=mask, dilation=dilation, fallback=reason, notes=notes)

    def costs(self, config: GenerationConfig, *, recorded: bool = False) -> Costs:
        """Costs of a config.

        Args:
            config: of the picture.
            recorded: the source was made with the config's adapters, so that sparse steps read what it recorded.
        """
        return self._engine.costs(config, recorded=recorded)

    def macs(self, request: EditRequest, plan: EditPlan) -> int:
        """Multiply-accumulates of a plan's run, probes included.

        Args:
            request: that is planned.
            plan: of the request.
        """
        costs, start = self.costs(request.config, recorded=plan.recorded), request.start
        run = costs.sparse(plan.mask.grid, plan.dilation, start) if plan.dilation else costs.dense(start)
        return plan.extra_macs + run - self._shared_macs(request, plan, costs)

    def seconds(self, request: EditRequest, plan: EditPlan) -> float | None:
        """Predicted seconds of a plan's run, probes included.

        Args:
            request: that is planned.
            plan: of the request.

        Returns:
            Seconds; None where this machine has no cost table.
        """
        costs = self.costs(request.config, recorded=plan.recorded)
        return costs.seconds(plan.mask.grid, plan.dilation, request.start, plan.probes)

    def recorded_bytes(self, request: EditRequest, plan: EditPlan) -> int:
        """Bytes of features that a plan's run will keep for later edits, about.

        Args:
            request: that is planned.
            plan: of the request.
        """
        if plan.skip_reason:
            return 0
        config, start = request.config, request.start
        size = self._engine.record_size(config)
        if not plan.dilation:
            return self._engine.recorded_bytes(config, start)
        costs, total = self.costs(config), 0
        for cells, count in Counter(plan.dilation[start:]).items():
            if cells == DENSE_STEP:  # and what it found changed
                total += count * (size.step + size.overlay(size.sizes))
            else:
                total += count * size.overlay(costs.rows(plan.mask.grid, (cells,)))
        return total

    def _read_references(self, request: EditRequest) -> int:
        """Let the adapters read the config's references; the MACs spent, 0 where that was done before."""
        if not request.config.like:
            return 0
        with request.stopwatch.stage("reference"):
            return self._engine.references.prepare(request.config, self._engine.batch(request.config))

    def _resolve_mask(
        self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory
    ) -> tuple[EditMask, str, int]:
        """The user's mask, or what the words say, never where the user forbids it; why it is everywhere, or ""; and how
        many dense evaluations were spent on that."""
        region, script, config = request.region, request.focus or request.script, request.config
        reason, probes = "", 0
        if request.mask is not None:
            mask = EditMask(request.mask, MaskSource.GIVEN)
        elif script.kind is EditKind.GLOBAL:
            mask, reason = self._full_mask(config), f"global edit: {script.reason}"
        else:
            mask = predict_mask(
                self._engine, source, config, (prompt.embeddings, prompt.keys), script, region.mask_options
            )
            probes = num_probes(script, region.mask_options)
            if mask.confidence < masks.LOW_CONFIDENCE:
                reason = (
                    f"the words point nowhere in particular (confidence {mask.confidence:.2f}); give a mask to be exact"
                )
                mask = replace(self._full_mask(config), confidence=mask.confidence, heatmap=mask.heatmap)
        grid = mask.grid
        if region.grow:
            grid = dilate(grid, region.grow) if region.grow > 0 else erode(grid, -region.grow)
        return replace(mask, grid=grid if request.protect is None else grid & ~request.protect), reason, probes

    def _probe_macs(self, request: EditRequest, probes: int) -> int:
        """MACs of so many dense evaluations for a mask; "things" runs one branch of the last."""
        step = self.costs(request.config).dense_step()
        single_branch = probes and request.region.mask_options.method == OBJECT_MASKS
        return probes * step - (step - step // self._engine.batch(request.config) if single_branch else 0)

    def _choose_dilations(self, request: EditRequest, mask: EditMask, costs: Costs) -> tuple[int, ...]:
        quality = request.growth if isinstance(request.growth, Quality) else Quality.BALANCED
        plain = request.structure > 0
        return costs.choose_dilations(mask.grid, request.start, quality=quality, plain=plain)

    def _with_drift_check(self, request: EditRequest, plan: EditPlan) -> EditPlan:
        """The plan with a check for drift, where one can be made."""
        steps = request.config.num_timesteps - request.start
        if not plan.dilation or steps <= 1:
            return plan
        check = drift_check.plan_check(plan.mask, steps, request.start)
        costs = self.costs(request.config, recorded=plan.recorded)
        extra = costs.check_macs(plan.mask.grid, plan.dilation[check.step], check.cells)
        return replace(plan, check=check, extra_macs=plan.extra_macs + extra)

    def _reuses_unconditional(self, request: EditRequest, prompt: EncodedPrompt, source: Trajectory) -> bool:
        return self._engine.unconditional(source, request.config, prompt.embeddings, request.start) is not None

    def _shared_macs(self, request: EditRequest, plan: EditPlan, costs: Costs) -> int:
        """MACs of a plan's first step that its source spent."""
        if not plan.reuses_unconditional:
            return 0
        if not plan.dilation:
            return costs.dense_step() // self._engine.batch(request.config)
        return costs.branch() if plan.dilation[request.start] == DENSE_STEP else 0

    def _full_mask(self, config: GenerationConfig) -> EditMask:
        """The mask of all latent cells."""
        return EditMask(np.ones(self._engine.grids(config)[0], bool), MaskSource.EVERYWHERE)
