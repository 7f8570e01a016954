"""Runs plans: a request is planned, rendered, accounted for and kept.

Generated, opened and edited pictures, second runs after drift, rebuilt results and batches all pass `Renderer.render`.
Knows engine, cache and history; checks no arguments of users.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fisedit.edits.planner import EditPlan, Planner
from fisedit.edits.renderer import Job, Renderer, RenderOutput
from fisedit.edits.requests import EditRequest, RequestBuilder
from fisedit.edits.state import EditState
from fisedit.errors import MaskError, PageError
from fisedit.history import EditResult, History
from fisedit.machine.contention import busy_note
from fisedit.machine.device import default_torch_state, weights_digest
from fisedit.masking.drift_check import DriftDetected
from fisedit.masking.localize import things_inside
from fisedit.metadata.image_metadata import file_notes
from fisedit.models.injection import exclusive
from fisedit.prompts.shortening import without_things
from fisedit.sampling import denoise, records
from fisedit.sampling.trajectory import Trajectory
from fisedit.sampling.trajectory_pages import RecordedSource, to_pages
from fisedit.storage.canvas import is_canvas, paste_edit, upscale_note
from fisedit.values import EditMask, EditStats, MaskSource, Step, dense_run_as_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from PIL.Image import Image

    from fisedit.features.pages import Page

T = TypeVar("T")

LEVEL_OPAQUE = 255
"""Alpha of a pixel that nothing shines through."""

MIN_MEAN_DIFFERENCE = 1.0
"""Mean difference inside a mask, of 255, below which an edit is said to have had no effect."""

MIN_MEAN_DIFFERENCE_BY_WORDS = 12.0
"""The same where words found the mask, which then has little beside the thing that is to change.

Of 50 recolours of generated pictures (256 px, development seeds 9100 and 9400), five changed by less. Four of these
have the old colour. The others changed by 19 and more. Other noise helped none of the four."""


class EditPipeline:
    """One user's pictures: requests are planned and run, and results kept.

    Args:
        state: The model, the history and the trajectory cache.
    """

    def __init__(self, state: EditState) -> None:
        self.state, self.requests = state, RequestBuilder(state)
        self.planner = Planner(state.engine)
        self.renderer = Renderer(state, self.planner)

    def beside(self, history: History | None = None, references: dict[str, Image] | None = None) -> EditPipeline:
        """Another one with the same model, graphs, adapters and tiers, and a cache of its own; arguments as in
        `Editor.beside`."""
        engine = self.state.engine
        state = EditState(engine.pipe, self.state.cache.emptied(), engine.graphs, engine.encoding)
        state.engine.references.adapters |= engine.references.adapters
        if history is not None:
            state.history = history
        if references is not None:
            state.engine.references.pictures = references
        return EditPipeline(state)

    def retry_on_page_error(self, request: EditRequest, call: Callable[[], T]) -> T:
        """Call, and once more with all made again that the edit lies over, if a page of it is gone or damaged."""
        try:
            return call()
        except PageError:
            assert request.parent is not None, "a source reads no pages"
            source = self.state.history.lineage(request.parent.id)[0]
            self.state.cache.drop(
                [one.id for one in self.state.history if self.state.history.lineage(one.id)[0] is source]
            )
        return call()

    def plan(self, request: EditRequest) -> EditPlan:
        """Plan where a picture changes and how it will run; what was recorded is rebuilt for it where it is gone."""
        return self.retry_on_page_error(request, partial(self._plan, request))

    @default_torch_state()
    def _plan(self, request: EditRequest) -> EditPlan:
        if request.parent is None:
            return self.planner.plan_source(request, self.renderer.encode(request))
        if reason := request.unchanged_reason:
            return self.planner.plan_unchanged(request, reason)
        with self.state.history.mark_in_use(request.parent):
            prompt = self.renderer.encode(request)
            rebuilt = self.renderer.rebuild(request)
            plan = self.planner.plan_edit(request, prompt, self.renderer.source(request)[0])
        notes = (f"results rebuilt first, as their features were gone: {rebuilt}",) if rebuilt else ()
        return replace(plan, notes=plan.notes + notes)

    def plan_erasing(self, request: EditRequest) -> Job:
        """Plan an edit that erases; its prompt no longer names what goes, where the picture's words point at that."""
        plan = self.plan(request)
        if plan.skip_reason or not request.config.prompt:
            return request, plan
        return self.retry_on_page_error(request, partial(self._without_things, request, plan))

    @default_torch_state()
    def _without_things(self, request: EditRequest, plan: EditPlan) -> Job:
        """The same edit to the prompt without the things that lie inside its mask."""
        engine, config = self.state.engine, request.config
        with self.state.history.mark_in_use(request.parent):
            self.renderer.rebuild(request)
            source, named = self.renderer.source(request)[0], request.region.named_words
            things = things_inside(engine, source, config, plan.mask.grid, named)
        with exclusive(engine.pipe.tokenizer):
            prompt = without_things(config.prompt, things, engine.pipe.tokenizer)
        if prompt == config.prompt:
            return request, plan
        request = self.requests.with_prompt(request, prompt)
        note = f"the prompt no longer names what was erased: {', '.join(word.text for word in things)}"
        return request, replace(plan, prompt=self.renderer.encode(request), notes=(*plan.notes, note))

    def run(self, request: EditRequest, plan: EditPlan) -> EditResult:
        """Run a plan, and once more with a larger mask where the change leaves the first; keep the result."""
        return self.retry_on_page_error(request, partial(self._run, request, plan))

    @default_torch_state()
    def _run(self, request: EditRequest, plan: EditPlan) -> EditResult:
        with self.state.history.mark_in_use(request.parent):
            if plan.skip_reason:
                return self.add_unchanged(request, plan)
            self._reserve_cache([(request, plan)])
            try:
                (output,) = self.renderer.render([(request, plan)])
            except DriftDetected as drift:
                return self._run(request, self.planner.widen(request, plan, drift))
            result = self.add_result(request, plan, output)
            taken = result.stats.seconds
            self.planner.learn_pace(request, plan, taken["total"] - taken.get("rebuild", 0.0))
            return result

    @default_torch_state()
    def run_many(self, requests: Sequence[EditRequest]) -> tuple[EditResult, ...]:
        """Several edits of the current result, which stays the current one; in batches where possible."""
        parent = self.state.history.current
        with self.state.history.mark_in_use(parent):
            try:
                return tuple(self._run_batched([(request, self.plan(request)) for request in requests]))
            finally:
                self.state.history.checkout(parent.id)

    @default_torch_state()
    def render_clip(self, requests: Sequence[EditRequest], pads: Sequence[Image] = ()) -> list[Image]:
        """The frames of a clip, which loaded motion modules let attend to one another; nothing of them is kept.

        Args:
            requests: edits of one result, planned alike: they differ in what adapters read.
            pads: pictures before the first frame and after the last, as in `References.clip_conditions`.

        Raises:
            MaskError: the region marks nothing, or the words concern the whole picture.
        """
        first = requests[0]
        with self.state.history.mark_in_use(first.parent):
            plan = self.plan(replace(first, is_frame=True))
            if not plan.mode.dilation:
                why = plan.skip_reason or plan.fallback
                raise MaskError(f"the region of frames must be a part of the picture: {why}; give a mask")
            return self.retry_on_page_error(first, partial(self._render_clip, requests, plan, pads))

    def _render_clip(self, requests: Sequence[EditRequest], plan: EditPlan, pads: Sequence[Image]) -> list[Image]:
        request = requests[0]
        self.renderer.rebuild(request)
        edits = [self.renderer.latent_edit(each, plan) for each in requests]
        latents = denoise.run_clip(
            self.state.engine, self.renderer.deep_source(request, plan), edits, self.renderer.callback(request), pads
        )
        self.renderer.check_model(request)
        frames = []
        for each, final in zip(requests, latents, strict=True):
            frames.append(
                _on_picture(each, plan, self.renderer.decode(each, plan, Trajectory(each.config, latents=[final])))
            )
        return frames

    def _run_batched(self, jobs: Sequence[Job]) -> Iterator[EditResult]:
        """The results of edits of one result, in their order."""
        outputs: dict[int, RenderOutput] = {}
        for batch in self._batches(jobs):
            batch_jobs = [jobs[i] for i in batch]
            self._reserve_cache(batch_jobs)
            rendered = self.retry_on_page_error(batch_jobs[0][0], partial(self.renderer.render, batch_jobs))
            outputs |= dict(zip(batch, rendered, strict=True))
        for i, job in enumerate(jobs):
            yield self.add_result(*job, outputs[i]) if i in outputs else self.run(*job)

    def _batches(self, jobs: Sequence[Job]) -> Iterator[list[int]]:
        """Indices of edits of one picture that can run in one batch: same dilations, start, noise and text length."""
        alike: dict[object, list[int]] = {}
        for i, (request, plan) in enumerate(jobs):
            if plan.mode.dilation and plan.prompt and not plan.skip_reason:
                mode, tokens = plan.mode, plan.prompt.embeddings.tokens
                key = mode.dilation, mode.shallow, mode.start, request.config.seed, tokens
                alike.setdefault(key, []).append(i)
        for batch in alike.values():
            if len(batch) > 1:
                self.renderer.rebuild(jobs[batch[0]][0])
                edits = [self.renderer.latent_edit(*jobs[i]) for i in batch]
                if denoise.can_batch(self.state.engine, self.renderer.source(jobs[batch[0]][0])[0], edits):
                    yield batch

    def pages(self) -> dict[str, list[Callable[[], bytes]]]:
        """Return functions that return the bytes of each page, for every source whose features are kept."""
        self.state.refresh()  # which drops what another model recorded
        kept = [result.id for result in self.state.history if result.parent is None and result.id in self.state.cache]
        made_with = self._made_with() if kept else ""
        return {each: to_pages(RecordedSource(*self.state.cache.get(each)), made_with) for each in kept}

    def load_pages(self, pages: Mapping[str, Sequence[Page]]) -> None:
        """Keep sources as their pages have them; those whose pages are of no use are made again when they are needed.

        Args:
            pages: id of a source -> its pages.
        """
        self.state.refresh()
        made_with = self._made_with() if pages else ""
        for result_id, each in pages.items():
            with suppress(PageError):
                source = records.load(self.state.engine, self.state.history.find(result_id).config, each, made_with)
                self.state.cache.put(result_id, source.trajectory, source.decoder, base=None)

    def _made_with(self) -> str:
        """Return what features were recorded with: weights, scheduler, encoding and kind of device."""
        pipe, encoding = self.state.engine.pipe, self.state.engine.encoding
        scheduler = json.dumps(dict(pipe.scheduler.config), sort_keys=True, default=str)
        return f"{weights_digest(pipe)} {scheduler} {tuple(encoding)} {self.state.engine.executor.device.type}"

    def _reserve_cache(self, jobs: Sequence[Job]) -> None:
        """Make room for edits of one result, whose own trajectory stays."""
        if parent := jobs[0][0].parent:
            self.renderer.rebuild(jobs[0][0])
            self.state.cache.make_room(sum(self.planner.recorded_bytes(*job) for job in jobs), keep=parent.id)

    def add_result(self, request: EditRequest, plan: EditPlan, output: RenderOutput) -> EditResult:
        """Account for a picture, cache its trajectory and make it the current result.

        Args:
            request: the request that was run.
            plan: the plan by which it was run.
            output: what was rendered.
        """
        trajectory, parent, image = output.trajectory, request.parent, output.image
        macs, run = self.planner.macs(request, plan), replace(plan.mode, rim=output.rim)
        stats = self._stats(request, plan, macs, len(trajectory.predictions) - plan.mode.start)
        if output.rim is not None:
            plan = replace(plan, mask=plan.mask.with_cells(plan.mask.grid | output.rim))
        stats = replace(
            stats,
            mask_area=plan.mask.area,
            notes=plan.notes
            + self._model_notes(request)
            + _result_notes(request, plan, image)
            + self._busy_notes(request),
            recorded_bytes=output.own_bytes,
            unet_evaluations_captured=trajectory.captured,
            uncaptured=trajectory.uncaptured or self.state.engine.graphs.cache.reason,
        )
        if request.picture is not None:
            image = image if not request.config.crop and is_canvas(request.picture, image.size) else request.picture
        elif parent:
            image = _on_picture(request, plan, output)
        with exclusive(self.state.history):
            result = EditResult(
                id=self.state.history.next_id(),
                parent=parent.id if parent else None,
                config=request.config,
                image=image,
                mask=plan.mask,
                diff=request.script,
                stats=stats,
                run=run,
                painted=output.image if output.image is not image else None,
            )
            self.renderer.keep(result, output)
            return self.state.history.add(result)

    def add_unchanged(self, request: EditRequest, plan: EditPlan) -> EditResult:
        """The parent's picture, byte for byte, without a UNet call; and its prompt, for that is what it shows."""
        assert request.parent is not None
        parent = request.parent
        mask = EditMask(np.zeros_like(parent.mask.grid), MaskSource.NOWHERE)
        empty_plan = EditPlan(
            mask, plan.costs, notes=(f"nothing was edited: {plan.skip_reason}", *request.region.notes)
        )
        stats = self._stats(request, empty_plan, 0, 0)
        with exclusive(self.state.history):
            result = EditResult(
                id=self.state.history.next_id(),
                parent=parent.id,
                config=parent.config,
                image=parent.image,
                mask=mask,
                diff=request.script,
                stats=stats,
                painted=parent.painted,
            )
            self.state.cache.share(parent.id, result.id)
            return self.state.history.add(result)

    def _model_notes(self, request: EditRequest) -> tuple[str, ...]:
        """Return what the model's file says and is not obeyed, told with every source."""
        return () if request.parent else tuple(getattr(self.state.engine.pipe, "notes", ()))

    def _busy_notes(self, request: EditRequest) -> tuple[str, ...]:
        """Return a note where other programs took the cores that the steps ran on."""
        waited = request.stopwatch.waited_share("denoise") if self.state.engine.executor.device.type == "cpu" else 0.0
        return tuple(filter(None, (busy_note(waited),)))

    def _stats(self, request: EditRequest, plan: EditPlan, macs: int, steps: int) -> EditStats:
        """Return the cost of so many steps; bytes and graphs aside."""
        costs, dilation, start = plan.costs, plan.mode.dilation, plan.mode.start
        dense = dilation[start:].count(Step.DENSE) if dilation else steps
        return EditStats(
            mask_area=plan.mask.area,
            mask_source=plan.mask.source,
            mask_confidence=plan.mask.confidence,
            active_rows=costs.rows(plan.mask.grid, dilation) if dilation else costs.sizes if steps else (),
            growth=plan.mode.growth,
            unet_evaluations_dense=plan.probes + dense,
            unet_evaluations_sparse=steps - dense,
            macs=macs,
            macs_dense=costs.dense(start),
            seconds=request.stopwatch.done(),
            recorded_bytes=0,
            fallback=plan.fallback,
            notes=plan.notes,
            steps_shared=start,
        )


def _on_picture(request: EditRequest, plan: EditPlan, output: RenderOutput) -> Image:
    """An edit's picture: its canvas, or that set into the picture which the parent's canvas shows."""
    parent, mask = request.parent, plan.mask
    assert parent is not None
    if not parent.painted:
        return output.image
    fills = _fills_clear_pixels(mask)
    return paste_edit(parent.image, output.paint, mask.grid, parent.config.crop, mask.pixels, fills=fills)


def _fills_clear_pixels(mask: EditMask) -> bool:
    """Return whether what is clear in a mask becomes opaque: where it was given, as words find what is around too."""
    return mask.source is MaskSource.GIVEN


def _clear_notes(parent: EditResult, mask: EditMask) -> tuple[str, ...]:
    """Return notes on what became of the clear pixels of a picture that are in the mask of its edit."""
    picture = parent.image
    if picture.mode not in ("LA", "RGBA"):
        return ()
    alpha = np.asarray(picture.getchannel("A"))
    if (alpha[mask.painted(picture.size, parent.config.crop)] == LEVEL_OPAQUE).all():
        return ()
    if _fills_clear_pixels(mask):
        return ("transparent pixels in the mask were filled, and are opaque now",)
    return ("transparent pixels were painted and stay transparent, as words say where; give a mask to fill them",)


def _result_notes(request: EditRequest, plan: EditPlan, image: Image) -> tuple[str, ...]:
    """Return what the user should know of a picture."""
    if request.parent is None:
        return _part_notes(request) + (file_notes(request.picture) if request.picture else ())
    notes, difference = [], _mean_difference(request.parent.canvas, image, plan.mask)
    if plan.fallback:
        notes.append(f"{dense_run_as_text(plan.mask)}: {plan.fallback}")
    by_words = plan.mask.source is MaskSource.ATTENTION and not (
        plan.mode.start or plan.mode.structure or plan.mode.erases
    )
    if difference < MIN_MEAN_DIFFERENCE or (by_words and difference < MIN_MEAN_DIFFERENCE_BY_WORDS):
        where, advice = ("where the words point", "say it otherwise") if by_words else ("inside the mask", "grow it")
        notes.append(
            f"the picture hardly changed {where} (by {difference:.2f} of 255 in the mean); say more, or {advice}"
        )
    crop = request.config.crop
    left, top, right, bottom = crop or (0, 0, *request.parent.size)
    if upscale := upscale_note((right - left, bottom - top), image.size, is_part=crop is not None):
        notes.append(upscale)
    return (*notes, *_clear_notes(request.parent, plan.mask))


def _part_notes(request: EditRequest) -> tuple[str, ...]:
    """Return a note if a part of an opened picture alone is on the canvas, where edits go."""
    if request.picture is None or request.config.crop is None:
        return ()
    (width, height), (left, top, right, bottom) = request.picture.size, request.config.crop
    part = f"{right - left}x{bottom - top} of {width}x{height} pixels, from column {left} and row {top} on"
    return (f"a part of the picture is opened, {part}; open it again to edit elsewhere",)


def _mean_difference(before: Image, after: Image, mask: EditMask) -> float:
    """Mean absolute difference of the pixels inside a mask, 0 to 255."""
    inside = np.asarray(mask.image(), bool)
    pixels_before, pixels_after = (
        np.asarray(picture.convert("RGB"), np.float32)[inside] for picture in (before, after)
    )
    return float(np.abs(pixels_before - pixels_after).mean())
