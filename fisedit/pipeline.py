"""How a result comes about: planned, run sparse or dense, checked, accounted for, kept; and rebuilt once it is gone.

What `Editor` asks for is done here. Knows the engine, memory and the history; checks no wishes, and speaks to no user.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fisedit.errors import SessionError
from fisedit.history import EditResult, History
from fisedit.masking import drift_check
from fisedit.masking.localize import describe_source, shared_tokens
from fisedit.masking.text_diff import diff
from fisedit.models.injection import exclusive
from fisedit.models.stopwatch import Stopwatch
from fisedit.planner import Plan, Planner, Wish
from fisedit.rendering import Renderer, RenderOutput, Run
from fisedit.sampling.denoise import Engine
from fisedit.sampling.trajectory import AttentionInjection, max_injection_steps
from fisedit.sampling.trajectory_cache import TrajectoryCache
from fisedit.sparse.stepping import Graphs
from fisedit.storage.canvas import is_canvas, paste_edit, upscale_note
from fisedit.values import DENSE_STEP, EditMask, EditScript, EditStats, MaskSource, OnStep, check_prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffusers import StableDiffusionPipeline
    from PIL.Image import Image

    from fisedit.masking.text_diff import Tokenizer
    from fisedit.sampling.trajectory_cache import TrajectoryCache

HARDLY = 1.0
"""Mean difference inside the mask, of 255, below which an edit is said to have had no effect."""


class EditPipeline:
    """One user's engine, memory and history, and what is done with them.

    Args:
        pipe: the model. memory: for trajectories. graphs: whether edits want captured ones.
    """

    def __init__(self, pipe: StableDiffusionPipeline, memory: TrajectoryCache, graphs: Graphs) -> None:
        self.engine, self.memory, self.history = Engine(pipe, graphs), memory, History()
        self.renderer, self.planner = Renderer(self.engine, memory.max_bytes), Planner(self.engine)

    def beside(self, history: History | None = None, references: dict[str, Image] | None = None) -> EditPipeline:
        """Another one with the same model, graphs and adapters, and a memory of its own; arguments as of
        `Editor.beside`."""
        other = EditPipeline(self.engine.pipe, TrajectoryCache(self.memory.max_bytes), self.engine.graphs)
        other.engine.references.adapters |= self.engine.references.adapters
        if history is not None:
            other.history = history
        if references is not None:
            other.engine.references.pictures = references
        return other

    def diff(self, old: str, new: str) -> EditScript:
        """What changes from one prompt to another."""
        return changed(old, new, self.engine.pipe.tokenizer)

    def run(self, prompt: str, on_step: OnStep | None, reference: object = None) -> Run:
        """An edit of the current result, about to be planned; arguments as of `Editor.edit`."""
        self.engine.refresh()
        parent, references = self.history.current, self.engine.references
        if reference is None:
            own = self.history.lineage(parent.id)[0].config.like
            like = tuple(one for one in own if one.adapter in references.adapters)
        else:
            like = references.likenesses(reference)
        config = replace(parent.config, prompt=check_prompt(prompt), like=like, loras=self.engine.executor.loras)
        return Run(config, parent, self.diff(parent.prompt, prompt), Stopwatch(), on_step)

    def plan(self, run: Run, wish: Wish) -> Plan:
        """Where the edit goes and how it will run; what was recorded is rebuilt for it where it is gone."""
        if nothing := self.planner.nothing(run, wish):
            return self.planner.none(run, nothing)
        text = self.renderer.text(run)
        source, rebuilt = self.source(run)
        notes = (f"results rebuilt first, as their features were gone: {rebuilt}",) if rebuilt else ()
        plan = self.planner.plan(run, wish, text, source.trajectory)
        return replace(plan, notes=plan.notes + notes)

    def edited(self, run: Run, plan: Plan, *, verify: bool) -> EditResult:
        """Run a plan, and once more with a larger mask where the change leaves the first."""
        source, text = self.source(run)[0], plan.text
        assert text is not None
        assert run.parent is not None
        self.memory.make_room(self._expected_bytes(run, plan), keep=run.parent.id)
        if not plan.growth:
            pin = plan.mask.grid, source.trajectory
            return self.keep(run, plan, self.renderer.dense(run, text, pin, plan.start))
        steps, over = run.config.num_inference_steps - plan.start, (source.trajectory, source.decoder)
        check = drift_check.plan_check(plan.mask, steps, plan.start) if verify and steps > 1 else None
        plan = replace(plan, checked=check is not None)
        if check:
            costs = self.planner.costs(run.config, recorded=plan.recorded)
            extra = costs.check(plan.mask.grid, plan.growth[check.step], check.cells)
            plan = replace(plan, spent=plan.spent + extra)
        try:
            kept = self._structure(run, plan.structure)
            made = self.renderer.sparse(run, text, over, plan.mask.grid, plan.growth, check, kept, plan.start)
        except drift_check.DriftDetected as drift:
            return self.edited(run, self.planner.grown(run, plan, drift), verify=False)
        return self.keep(run, plan, made)

    def many(self, runs: Sequence[Run], wishes: Sequence[Wish]) -> tuple[EditResult, ...]:
        """Several edits of the current result, on which one stands again at the end."""
        parent = self.history.current
        try:
            plans = [self.plan(run, wish) for run, wish in zip(runs, wishes, strict=True)]
            made = self._together(runs, plans)
            return tuple(
                self._one(run, plan, made.get(i)) for i, (run, plan) in enumerate(zip(runs, plans, strict=True))
            )
        finally:
            self.history.checkout(parent.id)

    def _together(self, runs: Sequence[Run], plans: Sequence[Plan]) -> dict[int, RenderOutput]:
        """Those of several edits of one picture that batches can make: a batch grows its masks alike."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for i, plan in enumerate(plans):
            if plan.growth and not plan.nothing:
                alike.setdefault(plan.growth, []).append(i)
        made: dict[int, RenderOutput] = {}
        for growth, at in alike.items():
            if len(at) > 1:
                made |= self._batch(growth, {i: (runs[i], plans[i]) for i in at})
        return made

    def _batch(self, growth: tuple[int, ...], jobs: Mapping[int, tuple[Run, Plan]]) -> dict[int, RenderOutput]:
        """Edits that grow alike, in one batch; {} where they must go one by one."""
        runs = [run for run, _ in jobs.values()]
        texts, source = [plan.text for _, plan in jobs.values() if plan.text], self.source(runs[0])[0]
        size = sum(self._expected_bytes(run, plan) for run, plan in jobs.values())
        assert runs[0].parent is not None
        self.memory.make_room(size, keep=runs[0].parent.id)
        grids, over = [plan.mask.grid for _, plan in jobs.values()], (source.trajectory, source.decoder)
        made = self.renderer.many(runs, texts, over, grids, growth)
        return {} if made is None else dict(zip(jobs, made, strict=True))

    def _one(self, run: Run, plan: Plan, made: RenderOutput | None) -> EditResult:
        """The result of one of several edits, made with others or now."""
        if plan.nothing:
            return self.unchanged(run, plan.nothing)
        return self.edited(run, plan, verify=False) if made is None else self.keep(run, plan, made)

    def _structure(self, run: Run, share: float) -> AttentionInjection | None:
        """What an edit keeps of its source's structure."""
        steps = round(share * max_injection_steps(run.config))
        return AttentionInjection(steps, shared_tokens(run.script, self.engine)) if steps else None

    def _expected_bytes(self, run: Run, plan: Plan) -> int:
        """What a plan's trajectory will take: its share of rows of what its source took, and dense steps twice."""
        assert run.parent is not None
        whole, costs = self.history.lineage(run.parent.id)[0].stats.recorded_bytes, self.planner.costs(run.config)
        share = sum(costs.rows(plan.mask.grid, plan.growth)) / sum(costs.sizes) if plan.growth else 1.0
        return round(whole * (share + 2 * plan.growth.count(DENSE_STEP) / run.config.num_inference_steps))

    def keep(self, run: Run, plan: Plan, made: RenderOutput, original: Image | None = None) -> EditResult:
        """Account for a picture, remember it, and stand on it; `original` is an opened one's, upright."""
        macs = self.planner.macs(plan, run.config)
        if run.parent and (moved := _moved(run.parent.canvas, made.image, plan.mask)) < HARDLY:
            note = (
                f"the picture hardly changed inside the mask (by {moved:.2f} of 255 in the mean); say more, or grow it"
            )
            plan = replace(plan, notes=(*plan.notes, note))
        if run.parent and (coarse := upscale_note(run.parent.image.size, made.image.size)):
            plan = replace(plan, notes=(*plan.notes, coarse))
        stats = self._stats(run, plan, macs, len(made.trajectory.predictions) - plan.start, made.own_bytes)
        stats = replace(
            stats, unet_evaluations_captured=made.trajectory.captured, uncaptured=made.trajectory.uncaptured
        )
        parent, image = run.parent.id if run.parent else None, made.image
        if original is not None:
            image = image if is_canvas(original, image.size) else original
        elif run.parent and run.parent.painted:
            image = paste_edit(run.parent.image, made.image, plan.mask.grid)
        result = EditResult(
            self.history.next_id(),
            parent,
            run.config,
            image,
            plan.mask,
            run.script,
            stats,
            plan.growth,
            made.image if image is not made.image else None,
            plan.structure if plan.growth else 0.0,
            plan.start,
            plan.checked,
        )
        self.memory.put(result.id, made.trajectory, made.decoder, base=parent if plan.growth or plan.start else None)
        return self.history.add(result)

    def unchanged(self, run: Run, why: str) -> EditResult:
        """The parent's picture, byte for byte, without a UNet call; and its prompt, for that is what it shows."""
        assert run.parent is not None
        mask = EditMask(np.zeros_like(run.parent.mask.grid), MaskSource.NOWHERE)
        stats = self._stats(run, Plan(mask, notes=(f"nothing was edited: {why}",)), 0, 0, 0)
        result = EditResult(
            self.history.next_id(),
            run.parent.id,
            run.parent.config,
            run.parent.image,
            mask,
            run.script,
            stats,
            painted=run.parent.painted,
        )
        self.memory.share(run.parent.id, result.id)
        return self.history.add(result)

    def _stats(self, run: Run, plan: Plan, macs: int, steps: int, held: int) -> EditStats:
        costs, growth = self.planner.costs(run.config), plan.growth
        dense = growth[plan.start :].count(DENSE_STEP) if growth else steps
        return EditStats(
            mask_area=plan.mask.area,
            mask_source=plan.mask.source,
            mask_confidence=plan.mask.confidence,
            active_rows=costs.rows(plan.mask.grid, growth) if growth else costs.sizes if steps else (),
            growth=growth,
            unet_evaluations_dense=plan.probes + dense,
            unet_evaluations_sparse=steps - dense,
            macs=macs,
            macs_dense=costs.dense(plan.start),
            seconds=run.watch.done(),
            recorded_bytes=held,
            fallback=plan.fallback,
            notes=plan.notes,
            steps_shared=plan.start,
        )

    def source(self, run: Run) -> tuple[RenderOutput, int]:
        """What was recorded with the parent, and how many results were rebuilt for it from the nearest still known."""
        assert run.parent is not None
        lineage = self.history.lineage(run.parent.id)
        known = next((i for i in reversed(range(len(lineage))) if lineage[i].id in self.memory), -1)
        for past in lineage[known + 1 :]:
            self.rebuild(past, run.on_step)
        trajectory, decoder = self.memory.get(run.parent.id)
        return RenderOutput(trajectory, run.parent.canvas, decoder), len(lineage) - known - 1

    def rebuild(self, result: EditResult, on_step: OnStep | None) -> None:
        """Run a result's config again, over its parent's trajectory where it was sparse."""
        parent = next((past for past in self.history if past.id == result.parent), None)
        if parent is not None and result.stats.unet_evaluations_dense + len(result.growth) == 0:
            self.memory.share(parent.id, result.id)
            return
        if result.config.loras != self.engine.executor.loras:
            wanted = ", ".join(dict(result.config.loras)) or "no LoRA"
            raise SessionError(
                f"result {result.id} must be rebuilt with {wanted}, as it was made, and with the same scales; "
                "load that, and unload others"
            )
        run = Run(result.config, parent, result.diff, Stopwatch(), on_step)
        text, over = self.renderer.text(run), self.memory.get(parent.id) if parent else None
        grid, start = result.mask.grid, result.start
        if over is not None and result.growth:
            kept, steps = self._structure(run, result.structure), result.config.num_inference_steps - start
            check = drift_check.plan_check(result.mask, steps, start, passed=True) if result.checked else None
            made = self.renderer.sparse(run, text, over, grid, result.growth, check, kept, start)
        elif parent is None and result.config.opened:
            made = self.renderer.opened(run, text, result.canvas)
        else:
            made = self.renderer.dense(run, text, (grid, over[0]) if over else None, start)
        self.memory.put(
            result.id, made.trajectory, made.decoder, base=result.parent if result.growth or start else None
        )


def changed(old: str, new: str, tokenizer: Tokenizer) -> EditScript:
    """What changes from one prompt to another, for a model with such a tokenizer; "" is what nobody described."""
    with exclusive(tokenizer):
        script = diff(old, new, tokenizer)
    return describe_source(script) if script.hunks and not old else script


def _moved(before: Image, after: Image, mask: EditMask) -> float:
    """Mean absolute difference of the pixels inside a mask, 0 to 255."""
    inside = np.asarray(mask.image(), bool)
    old, new = (np.asarray(picture.convert("RGB"), np.float32)[inside] for picture in (before, after))
    return float(np.abs(old - new).mean())
