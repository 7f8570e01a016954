"""Runs plans: a request's prompt is encoded, its latents denoised and decoded, the result accounted for and kept.

Generated, opened and edited pictures, second runs after drift, rebuilt results and batches all pass `render`. Knows
engine, cache and history; checks no arguments of users.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import torch

from fisedit.edit_requests import EditRequest, EditRequests
from fisedit.errors import ModelError, PageError, SessionError
from fisedit.history import EditResult, History
from fisedit.masking.drift_check import DriftDetected
from fisedit.masking.localize import shared_tokens
from fisedit.masking.region import Region
from fisedit.models.device import default_torch_state, device_and_dtype, weight_versions, weights_digest
from fisedit.models.injection import exclusive
from fisedit.models.vae import encode, inpaint_inputs, is_inpainting, preview
from fisedit.planner import EditPlan, Planner
from fisedit.sampling.denoise import Engine
from fisedit.sampling.inversion import noise_latents
from fisedit.sampling.prompt_encoding import EncodedPrompt, encode_prompts
from fisedit.sampling.trajectory import AttentionInjection, LatentEdit, Trajectory, max_injection_steps
from fisedit.sampling.trajectory_pages import RecordedSource, to_pages
from fisedit.sparse import cost_store
from fisedit.sparse.compositing import composite
from fisedit.sparse.feature_cache import ShiftedFeatures, StepFeatures
from fisedit.sparse.modules import loras
from fisedit.sparse.vae_decode import DecoderCache, decode
from fisedit.storage.canvas import is_canvas, paste_edit, to_canvas, upscale_note
from fisedit.values import (
    DENSE_STEP,
    EditKind,
    EditMask,
    EditStats,
    Inversion,
    MaskSource,
    OnStep,
    strength_for_start,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from diffusers import AutoencoderKL, StableDiffusionPipeline
    from PIL.Image import Image
    from torch import Tensor

    from fisedit.sampling.trajectory_cache import TrajectoryCache
    from fisedit.sparse.feature_codec import FeatureEncoding
    from fisedit.sparse.stepping import Graphs
    from fisedit.storage.pages import Page

T = TypeVar("T")
P = ParamSpec("P")

MIN_MEAN_DIFFERENCE = 1.0
"""Mean difference inside the mask, of 255, below which an edit is said to have had no effect."""


@dataclass(frozen=True, eq=False)
class RenderOutput:
    """A rendered picture.

    Args:
        trajectory: of its latents.
        image: RGB, of the config's size.
        decoder: what its decode recorded.
        decoded: latents [1, 4, h, w] of that decode.
    """

    trajectory: Trajectory
    image: Image
    decoder: DecoderCache
    decoded: Tensor

    @property
    def own_bytes(self) -> int:
        """Bytes of recorded features held by it alone."""
        return self.trajectory.own_bytes + self.decoder.own_bytes


Job = tuple[EditRequest, EditPlan]


class EditPipeline(EditRequests):
    """One user's engine, trajectory cache and history, and what is done with them.

    Args:
        pipe: the model.
        cache: for trajectories.
        graphs: whether edits want captured ones.
        encoding: of recorded features.
    """

    def __init__(
        self, pipe: StableDiffusionPipeline, cache: TrajectoryCache, graphs: Graphs, encoding: FeatureEncoding
    ) -> None:
        super().__init__(Engine(pipe, graphs, cache.max_bytes, encoding, cache.tiers))
        self.cache = cache
        self.planner = Planner(self.engine)
        self._recorded_with: object = None

    def beside(self, history: History | None = None, references: dict[str, Image] | None = None) -> EditPipeline:
        """Another one with the same model, graphs, adapters and tiers, and a cache of its own; arguments as in
        `Editor.beside`."""
        engine = self.engine
        pipeline = EditPipeline(engine.pipe, self.cache.emptied(), engine.graphs, engine.encoding)
        pipeline.engine.references.adapters |= self.engine.references.adapters
        if history is not None:
            pipeline.history = history
        if references is not None:
            pipeline.engine.references.pictures = references
        return pipeline

    def refresh(self) -> None:
        """Read the model's LoRAs, placement and scheduler again; a model that is another one drops what was recorded.

        Raises:
            ModelError: the parts of the pipeline differ in dtype or device, or one was taken out.
        """
        pipe = self.engine.pipe
        if pipe.unet is not self.engine.executor.unet:
            raise ModelError("the pipeline has another UNet than this editor was made for; make a new Editor(pipe)")
        placement, weights = device_and_dtype(pipe), weight_versions(pipe)
        if pipe.scheduler is None:
            raise ModelError("a pipeline must have a scheduler, got None; set pipe.scheduler")
        model = placement, weights, pipe.vae, pipe.text_encoder, dict(pipe.scheduler.config)
        if self._recorded_with not in (None, model):
            self.cache = self.cache.emptied()
            self.engine.references.forget()
        if self._recorded_with != model or self.engine.table is None:  # it may have been measured since
            self.engine.table = cost_store.load_table(pipe)
        self._recorded_with = model
        self.engine.refresh()

    def again_if_damaged(self, request: EditRequest, call: Callable[[], T]) -> T:
        """Call, and once more with all made again that the edit lies over, if a page of it is gone or damaged."""
        try:
            return call()
        except PageError:
            assert request.parent is not None, "a source reads no pages"
            source = self.history.lineage(request.parent.id)[0]
            self.cache.drop([one.id for one in self.history if self.history.lineage(one.id)[0] is source])
        return call()

    def plan(self, request: EditRequest) -> EditPlan:
        """Where an edit goes and how it will run; what was recorded is rebuilt for it where it is gone."""
        return self.again_if_damaged(request, partial(self._plan, request))

    @default_torch_state()
    def _plan(self, request: EditRequest) -> EditPlan:
        if reason := request.unchanged_reason:
            return self.planner.plan_unchanged(request, reason)
        with self.history.mark_in_use(request.parent):
            prompt = self.encode(request)
            rebuilt = self.restore(request)
            plan = self.planner.plan_edit(request, prompt, self.source(request)[0])
        notes = (f"results rebuilt first, as their features were gone: {rebuilt}",) if rebuilt else ()
        return replace(plan, notes=plan.notes + notes)

    def run(self, request: EditRequest, plan: EditPlan) -> EditResult:
        """Run a plan, and once more with a larger mask where the change leaves the first; keep the result."""
        return self.again_if_damaged(request, partial(self._run, request, plan))

    @default_torch_state()
    def _run(self, request: EditRequest, plan: EditPlan) -> EditResult:
        with self.history.mark_in_use(request.parent):
            if plan.skip_reason:
                return self.add_unchanged(request, plan)
            self._reserve_cache([(request, plan)])
            try:
                (output,) = self.render([(request, plan)])
            except DriftDetected as drift:
                return self._run(request, self.planner.widen(request, plan, drift))
            return self.add_result(request, plan, output)

    @default_torch_state()
    def run_many(self, requests: Sequence[EditRequest]) -> tuple[EditResult, ...]:
        """Several edits of the current result, which stays the current one; in batches where possible."""
        parent = self.history.current
        with self.history.mark_in_use(parent):
            try:
                return tuple(self._run_batched([(request, self.plan(request)) for request in requests]))
            finally:
                self.history.checkout(parent.id)

    @default_torch_state()
    def render_clip(self, requests: Sequence[EditRequest], pads: Sequence[Image] = ()) -> list[Image]:
        """The frames of a clip, which loaded motion modules let attend to one another; nothing of them is kept.

        Args:
            requests: edits of one result, planned alike: they differ in what adapters read.
            pads: as in `References.clip_conditions`.
        """
        first = requests[0]
        with self.history.mark_in_use(first.parent):
            plan = self.plan(replace(first, is_frame=True))
            return self.again_if_damaged(first, partial(self._render_clip, requests, plan, pads))

    def _render_clip(self, requests: Sequence[EditRequest], plan: EditPlan, pads: Sequence[Image]) -> list[Image]:
        request = requests[0]
        self.restore(request)
        edits = [self._latent_edit(each, plan) for each in requests]
        latents = self.engine.run_clip(self.source(request)[0], edits, self._callback(request), pads)
        self._check_loras(request)
        frames = []
        for each, final in zip(requests, latents, strict=True):
            canvas = self._decode(each, plan, Trajectory(each.config, latents=[final])).image
            frames.append(_on_picture(each, plan, canvas))
        return frames

    def _run_batched(self, jobs: Sequence[Job]) -> Iterator[EditResult]:
        """The results of edits of one result, in their order."""
        outputs: dict[int, RenderOutput] = {}
        for batch in self._batches(jobs):
            batch_jobs = [jobs[i] for i in batch]
            self._reserve_cache(batch_jobs)
            rendered = self.again_if_damaged(batch_jobs[0][0], partial(self.render, batch_jobs))
            outputs |= dict(zip(batch, rendered, strict=True))
        for i, job in enumerate(jobs):
            yield self.add_result(*job, outputs[i]) if i in outputs else self.run(*job)

    def _batches(self, jobs: Sequence[Job]) -> Iterator[list[int]]:
        """Indices of edits of one picture that can run in one batch: same dilations, start, noise and text length."""
        alike: dict[object, list[int]] = {}
        for i, (request, plan) in enumerate(jobs):
            if plan.dilation and plan.prompt and not plan.skip_reason:
                key = plan.dilation, plan.start, request.config.seed, plan.prompt.embeddings.shape
                alike.setdefault(key, []).append(i)
        for batch in alike.values():
            if len(batch) > 1:
                self.restore(jobs[batch[0]][0])
                edits = [self._latent_edit(*jobs[i]) for i in batch]
                if self.engine.can_batch(self.source(jobs[batch[0]][0])[0], edits):
                    yield batch

    @default_torch_state()
    def encode(self, request: EditRequest) -> EncodedPrompt:
        """Encode the prompt of a request, and those of its regions; errors as in `encode_prompts`."""
        reads_nothing = request.erases and request.script.kind is EditKind.IDENTICAL  # words would paint what they name
        regional = [prompt for _, prompt in request.regional]
        with request.stopwatch.stage("text"):
            engine = self.engine
            return encode_prompts(engine.pipe, engine.encode, request.config, regional, reads_nothing=reads_nothing)

    def render(self, jobs: Sequence[Job]) -> list[RenderOutput]:
        """Render planned pictures: one, or several edits of one result that share a batch.

        Raises:
            DriftDetected: the mask is too small.
        """
        request, plan = jobs[0]
        if request.parent is not None:
            self.restore(request)
        if request.picture is not None:
            return [self._invert(request, plan)]
        with request.stopwatch.stage("denoise"):
            trajectories = self._denoise(jobs)
        self._check_loras(request)
        return [self._decode(*job, trajectory) for job, trajectory in zip(jobs, trajectories, strict=True)]

    def _check_loras(self, request: EditRequest) -> None:
        if loras(self.engine.pipe.unet) != request.config.loras:
            raise SessionError("LoRAs were loaded, scaled or unloaded while this ran, which mixes them; run it again")

    def _denoise(self, jobs: Sequence[Job]) -> list[Trajectory]:
        """Sparse over the parent's trajectory, dense over it, or dense alone."""
        (request, plan), callback = jobs[0], self._callback(jobs[0][0])
        source = self.source(request)[0] if request.parent else None
        if source and plan.dilation:
            return self.engine.run_sparse(source, [self._latent_edit(*job) for job in jobs], callback)
        assert plan.prompt is not None
        blend_source = (plan.mask.cells(request.config.num_timesteps), source) if source else None
        text = plan.prompt.embeddings
        inputs = self._inpaint_inputs(request, plan)
        return [self.engine.run_dense(request.config, text, callback, blend_source, None, plan.start, inputs)]

    def _inpaint_inputs(self, request: EditRequest, plan: EditPlan) -> Tensor | None:
        """What an inpainting UNet reads after the latents: all is masked in a source, the edit's mask in its parent."""
        if not is_inpainting(self.engine.pipe.unet):
            return None
        parent, grid = request.parent, plan.mask.grid
        picture = None if parent is None else parent.canvas
        return inpaint_inputs(self.engine.pipe.vae, picture, grid)

    def _latent_edit(self, request: EditRequest, plan: EditPlan) -> LatentEdit:
        assert plan.prompt is not None
        steps = round(request.structure * max_injection_steps(request.config))
        injection = AttentionInjection(steps, shared_tokens(request.script, self.engine)) if steps else None
        return LatentEdit(
            request.config,
            plan.prompt.embeddings,
            plan.prompt.keys,
            cells=plan.mask.cells(request.config.num_timesteps),
            dilation=plan.dilation,
            start=plan.start,
            injection=injection,
            check=plan.check,
            erases=request.erases,
            read_text=plan.prompt.read,
            regional=[(each.grid, text) for each, text in zip(plan.regional, plan.prompt.regional, strict=True)],
            inpaint_inputs=self._inpaint_inputs(request, plan),
        )

    def _decode(self, request: EditRequest, plan: EditPlan, trajectory: Trajectory) -> RenderOutput:
        """The picture: of an edit, set into its parent's outside the mask."""
        vae, latents, grid = self.engine.pipe.vae, trajectory.latents[-1], plan.mask.grid
        with request.stopwatch.stage("decode"), torch.inference_mode():
            if request.parent and plan.dilation:
                cache, source_image = self.source(request)[1], request.parent.canvas
                with self.cache.tiers.hold([cache.features]):  # before the decoder's layers are exchanged
                    decoded = self.engine.graphs.cache.decode(vae, latents, grid, cache, source_image)
                return RenderOutput(trajectory, *decoded, latents)
            image, decoder = decode(vae, latents)
            if request.parent:
                image = composite(request.parent.canvas, image, grid)
            return RenderOutput(trajectory, image, decoder, latents)

    def _invert(self, request: EditRequest, plan: EditPlan) -> RenderOutput:
        """An opened picture on its canvas, and the trajectory that it might have had."""
        config, pipe, callback = request.config, self.engine.pipe, self._callback(request)
        assert request.picture is not None
        assert plan.prompt is not None
        picture = request.picture.crop(config.crop) if config.crop else request.picture
        canvas, text = to_canvas(picture, (config.width, config.height)), plan.prompt.embeddings
        with request.stopwatch.stage("encode"):
            clean = encode(pipe.vae, canvas)
        with request.stopwatch.stage("denoise"):
            is_masked = np.zeros(clean.shape[-2:], bool)
            inputs = inpaint_inputs(pipe.vae, canvas, is_masked) if is_inpainting(pipe.unet) else None
            if config.inversion is Inversion.DDPM:
                path = noise_latents(pipe, config, clean)
                trajectory = self.engine.run_dense(config, text, callback, path=path, inpaint_inputs=inputs)
            else:
                trajectory = self.engine.invert(config, text, clean, callback, inputs)
        with request.stopwatch.stage("decode"), torch.inference_mode():
            return RenderOutput(trajectory, canvas, decode(pipe.vae, clean)[1], clean)

    @default_torch_state()
    def render_dense(self, request: EditRequest) -> Image:
        """What a dense run makes of a request from where its parent's trajectory begins; nothing is recorded."""
        prompt, config = self.encode(request), request.config
        with request.stopwatch.stage("denoise"):
            source, steps = self.source(request)[0], config.num_timesteps
            latents = self.engine.sample(config, prompt.embeddings, source, steps, self._callback(request))[-1]
        self._check_loras(request)
        with request.stopwatch.stage("decode"), torch.inference_mode():
            return decode(self.engine.pipe.vae, latents)[0]

    def pages(self) -> dict[str, list[Callable[[], bytes]]]:
        """Of every source whose features are kept, what returns the bytes of each of their pages."""
        self.refresh()  # which drops what another model recorded
        kept = [result.id for result in self.history if result.parent is None and result.id in self.cache]
        made_with = self._made_with() if kept else ""
        return {each: to_pages(RecordedSource(*self.cache.get(each)), made_with) for each in kept}

    def load_pages(self, pages: Mapping[str, Sequence[Page]]) -> None:
        """Keep sources as their pages have them; those whose pages are of no use are made again when they are needed.

        Args:
            pages: id of a source -> its pages.
        """
        self.refresh()
        made_with = self._made_with() if pages else ""
        for result_id, each in pages.items():
            with suppress(PageError):
                source = self.engine.load(self.history.find(result_id).config, each, made_with)
                self.cache.put(result_id, source.trajectory, source.decoder, base=None)

    def _made_with(self) -> str:
        """What features were recorded with: weights, scheduler, encoding and kind of device."""
        pipe, encoding = self.engine.pipe, self.engine.encoding
        scheduler = json.dumps(dict(pipe.scheduler.config), sort_keys=True, default=str)
        return f"{weights_digest(pipe)} {scheduler} {tuple(encoding)} {self.engine.executor.device.type}"

    def _callback(self, request: EditRequest) -> Callable[[int, int, Tensor], None]:
        def callback(i: int, n: int, estimate: Tensor) -> None:
            if request.on_step is not None:
                request.on_step(i, n, preview(self.engine.pipe, estimate))

        return callback

    def _reserve_cache(self, jobs: Sequence[Job]) -> None:
        """Make room for edits of one result, whose own trajectory stays."""
        if parent := jobs[0][0].parent:
            self.restore(jobs[0][0])
            self.cache.make_room(sum(self.planner.recorded_bytes(*job) for job in jobs), keep=parent.id)

    def add_result(self, request: EditRequest, plan: EditPlan, output: RenderOutput) -> EditResult:
        """Account for a picture, cache its trajectory and make it the current result.

        Args:
            request: that was run.
            plan: by which it was run.
            output: what was rendered.
        """
        trajectory, parent, image = output.trajectory, request.parent, output.image
        macs = self.planner.macs(request, plan)
        plan = replace(plan, notes=plan.notes + _result_notes(request, plan, image))
        stats = self._stats(request, plan, macs, len(trajectory.predictions) - plan.start)
        stats = replace(
            stats,
            recorded_bytes=output.own_bytes,
            unet_evaluations_captured=trajectory.captured,
            uncaptured=trajectory.uncaptured or self.engine.graphs.cache.reason,
        )
        if request.picture is not None:
            image = image if not request.config.crop and is_canvas(request.picture, image.size) else request.picture
        elif parent:
            image = _on_picture(request, plan, image)
        with exclusive(self.history):
            result = EditResult(
                id=self.history.next_id(),
                parent=parent.id if parent else None,
                config=request.config,
                image=image,
                mask=plan.mask,
                diff=request.script,
                stats=stats,
                run=plan.run(request),
                painted=output.image if output.image is not image else None,
            )
            self._cache(result, output)
            return self.history.add(result)

    def add_unchanged(self, request: EditRequest, plan: EditPlan) -> EditResult:
        """The parent's picture, byte for byte, without a UNet call; and its prompt, for that is what it shows."""
        assert request.parent is not None
        parent = request.parent
        mask = EditMask(np.zeros_like(parent.mask.grid), MaskSource.NOWHERE)
        empty_plan = EditPlan(mask, notes=(f"nothing was edited: {plan.skip_reason}",))
        dense = self.planner.costs(request.config).dense(0)
        stats = replace(self._stats(request, empty_plan, 0, 0), macs_dense=dense, steps_shared=0)
        with exclusive(self.history):
            result = EditResult(
                id=self.history.next_id(),
                parent=parent.id,
                config=parent.config,
                image=parent.image,
                mask=mask,
                diff=request.script,
                stats=stats,
                painted=parent.painted,
            )
            self.cache.share(parent.id, result.id)
            return self.history.add(result)

    def _cache(self, result: EditResult, output: RenderOutput) -> None:
        base, features = result.parent if result.run.growth or result.run.start else None, output.decoder.features
        if self.engine.executor.device.type == "cpu" and not isinstance(features, ShiftedFeatures):
            redecode = partial(_decoder_features, self.engine.pipe.vae, output.decoded)  # holds nothing of the pipeline
            remake = redecode if isinstance(features, StepFeatures) else None
            self.cache.tiers.add(features, len(output.trajectory.features), remake)
        self.cache.put(result.id, output.trajectory, output.decoder, base=base)

    def _stats(self, request: EditRequest, plan: EditPlan, macs: int, steps: int) -> EditStats:
        """What so many steps cost; bytes and graphs aside."""
        costs, dilation = self.planner.costs(request.config), plan.dilation
        dense = dilation[plan.start :].count(DENSE_STEP) if dilation else steps
        return EditStats(
            mask_area=plan.mask.area,
            mask_source=plan.mask.source,
            mask_confidence=plan.mask.confidence,
            active_rows=costs.rows(plan.mask.grid, dilation) if dilation else costs.sizes if steps else (),
            growth=dilation,
            unet_evaluations_dense=plan.probes + dense,
            unet_evaluations_sparse=steps - dense,
            macs=macs,
            macs_dense=costs.dense(plan.start),
            seconds=request.stopwatch.done(),
            recorded_bytes=0,
            fallback=plan.fallback,
            notes=plan.notes,
            steps_shared=plan.start,
        )

    def source(self, request: EditRequest) -> tuple[Trajectory, DecoderCache]:
        """What was recorded with the parent, after `restore`."""
        assert request.parent is not None
        return self.cache.get(request.parent.id)

    @default_torch_state()
    def restore(self, request: EditRequest) -> int:
        """Rebuild what was recorded with the parent, from the nearest result still cached; how many were rebuilt."""
        assert request.parent is not None
        lineage = self.history.lineage(request.parent.id)
        cached = next((i for i in reversed(range(len(lineage))) if lineage[i].id in self.cache), -1)
        with self.history.mark_in_use(request.parent):
            for result in lineage[cached + 1 :]:
                self._rebuild(result, request.on_step)
        return len(lineage) - cached - 1

    def _rebuild(self, result: EditResult, on_step: OnStep | None) -> None:
        """Render a result again from its config, over its parent's trajectory where it has one."""
        parent = None if result.parent is None else self.history.find(result.parent)
        if parent is not None and result.stats.unet_evaluations_dense + len(result.run.growth) == 0:
            self.cache.share(parent.id, result.id)
            return
        self.check_own_loras(result)
        config, picture = result.config, None
        if parent is None and config.opened:
            picture = result.image if config.crop else result.canvas
        run = result.run
        request = EditRequest(
            config,
            result.diff,
            parent,
            picture,
            strength=strength_for_start(run.start, config.num_timesteps),
            structure=run.structure,
            erases=run.erased,
            regional=tuple((Region.mask(each.grid), each.prompt) for each in run.regional),
            on_step=on_step,
        )
        plan = self.planner.replay(request, self.encode(request), None, result.mask, run)
        self._cache(result, *self.render([(request, plan)]))


@torch.inference_mode()
def _decoder_features(vae: AutoencoderKL, latents: Tensor) -> StepFeatures:
    """What a dense decode recorded, made again."""
    features = decode(vae, latents)[1].features
    assert isinstance(features, StepFeatures)
    return features


def _on_picture(request: EditRequest, plan: EditPlan, canvas: Image) -> Image:
    """An edit's picture: its canvas, or that set into the picture which the parent's canvas shows."""
    parent = request.parent
    assert parent is not None
    return paste_edit(parent.image, canvas, plan.mask.grid, parent.config.crop) if parent.painted else canvas


def _result_notes(request: EditRequest, plan: EditPlan, image: Image) -> tuple[str, ...]:
    """What the user should know of a picture."""
    if request.parent is None:
        return _part_notes(request)
    notes, difference = [], _mean_difference(request.parent.canvas, image, plan.mask)
    if plan.fallback:
        notes.append(f"the whole picture was painted: {plan.fallback}")
    if difference < MIN_MEAN_DIFFERENCE:
        notes.append(
            f"the picture hardly changed inside the mask (by {difference:.2f} of 255 in the mean); say more, or grow it"
        )
    crop = request.config.crop
    left, top, right, bottom = crop or (0, 0, *request.parent.size)
    if upscale := upscale_note((right - left, bottom - top), image.size, is_part=crop is not None):
        notes.append(upscale)
    return tuple(notes)


def _part_notes(request: EditRequest) -> tuple[str, ...]:
    """That a part of an opened picture alone is on the canvas, and edits go there."""
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
