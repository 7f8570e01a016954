"""Renders planned pictures: a prompt is encoded, latents are denoised over the parent's trajectory and decoded.

What was recorded with the parent is rebuilt first where it is gone. Knows engine and cache, and no arguments of users.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from fisedit.decoder.compositing import composite, find_rim, mix
from fisedit.decoder.decode import DecoderCache, decode
from fisedit.edits.planner import EditPlan, Planner
from fisedit.edits.requests import EditRequest
from fisedit.edits.state import EditState
from fisedit.errors import SessionError
from fisedit.features.cache import FeatureOverlay, ShiftedFeatures, StepFeatures
from fisedit.features.sites import loras
from fisedit.history import EditResult
from fisedit.machine.device import default_torch_state
from fisedit.masking.localize import shared_tokens
from fisedit.masking.region import Region
from fisedit.models.injection import exclusive
from fisedit.models.vae import encode, inpaint_inputs, is_inpainting, preview
from fisedit.models.weight_changes import check_files
from fisedit.prompts.text_diff import adds_words, background_prompt, removes_objects
from fisedit.sampling import denoise
from fisedit.sampling.inversion import noise_latents
from fisedit.sampling.prompt_encoding import EncodedPrompt, encode_prompts
from fisedit.sampling.records import deepened, steps_without_features
from fisedit.sampling.trajectory import AttentionInjection, LatentEdit, Trajectory, max_injection_steps
from fisedit.storage.canvas import to_canvas
from fisedit.values import Inversion, OnStep, strength_for_start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffusers import AutoencoderKL
    from PIL.Image import Image
    from torch import Tensor

    from fisedit.values import BoolGrid


@dataclass(frozen=True, eq=False)
class RenderOutput:
    """A rendered picture.

    Args:
        trajectory: trajectory of its latents.
        image: RGB, of the config's size.
        paint: the same before pixels that a mask takes in part are mixed.
        decoder: what its decode recorded.
        decoded: latents [1, 4, h, w] of that decode.
        rim: booleans [h, w], cells beside the plan's mask that show the edit too; None where they were not looked for.
    """

    trajectory: Trajectory
    image: Image
    paint: Image
    decoder: DecoderCache
    decoded: Tensor
    rim: BoolGrid | None = None

    @property
    def own_bytes(self) -> int:
        """Bytes of recorded features held by it alone."""
        return self.trajectory.own_bytes + self.decoder.own_bytes


Job = tuple[EditRequest, EditPlan]


class Renderer:
    """The pictures that plans make with a model and what was recorded.

    Args:
        state: The model, the history and the trajectory cache.
        planner: The planner of results that are rebuilt.
    """

    def __init__(self, state: EditState, planner: Planner) -> None:
        self.state, self.planner = state, planner

    @default_torch_state()
    def encode(self, request: EditRequest) -> EncodedPrompt:
        """Encode the prompt of a request, and those of its regions; errors as in `encode_prompts`."""
        regional = [prompt for _, prompt in request.regional]
        with request.stopwatch.stage("text"):
            engine, read, script = self.state.engine, None, request.script
            if removes_objects(script) or (request.erases and not adds_words(script)):
                with exclusive(engine.pipe.tokenizer):  # other words would paint what they name
                    read = background_prompt(script, engine.pipe.tokenizer)
            return encode_prompts(engine.pipe, engine.encode, request.config, regional, read=read)

    def render(self, jobs: Sequence[Job]) -> list[RenderOutput]:
        """Render planned pictures: one, or several edits of one result that share a batch.

        Raises:
            DriftDetected: the mask is too small.
        """
        request, plan = jobs[0]
        if request.parent is not None:
            self.rebuild(request)
        if request.picture is not None:
            return [self._invert(request, plan)]
        with request.stopwatch.stage("denoise"):
            trajectories = self._denoise(jobs)
        self.check_model(request)
        return [self.decode(*job, trajectory) for job, trajectory in zip(jobs, trajectories, strict=True)]

    def deep_source(self, request: EditRequest, plan: EditPlan) -> Trajectory:
        """The parent's trajectory, and what its shallow steps did not record and the plan reads.

        That is recorded for this plan alone, so that an edit does not depend on those made before it.
        """
        source, engine = self.source(request)[0], self.state.engine
        steps = steps_without_features(source, plan.mode)
        if not steps:
            return source
        encoded = encode_prompts(engine.pipe, engine.encode, source.config, ())
        return deepened(engine, source, encoded.embeddings, steps, self.callback(request))

    def check_model(self, request: EditRequest) -> None:
        """Raise SessionError or ModelError where the model is another one than when the request was made."""
        for part in self.state.parts():
            check_files(part)
        self.state.engine.references.check_files()
        if loras(self.state.engine.pipe.unet, self.state.engine.pipe.text_encoder) != request.config.loras:
            raise SessionError("LoRAs were loaded, scaled or unloaded while this ran, which mixes them; run it again")

    def _denoise(self, jobs: Sequence[Job]) -> list[Trajectory]:
        """Sparse over the parent's trajectory, dense over it, or dense alone."""
        (request, plan), callback = jobs[0], self.callback(jobs[0][0])
        source = self.deep_source(request, plan) if request.parent else None
        if source and plan.mode.dilation:
            return denoise.run_sparse(self.state.engine, source, [self.latent_edit(*job) for job in jobs], callback)
        assert plan.prompt is not None
        blend_source = (plan.mask.cells(request.config.num_timesteps), source) if source else None
        text = plan.prompt.embeddings
        inputs = self._inpaint_inputs(request, plan)
        return [
            denoise.run_dense(
                self.state.engine, request.config, text, callback, blend_source, None, plan.mode.start, inputs
            )
        ]

    def _inpaint_inputs(self, request: EditRequest, plan: EditPlan) -> Tensor | None:
        """Return what an inpainting UNet reads after latents: all masked in a source, the edit's mask in its parent."""
        if not is_inpainting(self.state.engine.pipe.unet):
            return None
        parent, grid = request.parent, plan.mask.grid
        picture = None if parent is None else parent.canvas
        pipe = self.state.engine.pipe
        return inpaint_inputs(pipe.vae, picture, grid).to(pipe.unet.dtype)

    def latent_edit(self, request: EditRequest, plan: EditPlan) -> LatentEdit:
        """Return an edit as the denoising loop knows it."""
        assert plan.prompt is not None
        steps = round(plan.mode.structure * max_injection_steps(request.config))
        injection = AttentionInjection(steps, shared_tokens(request.script, self.state.engine)) if steps else None
        return LatentEdit(
            request.config,
            plan.prompt.embeddings,
            plan.prompt.keys,
            cells=plan.mask.cells(request.config.num_timesteps),
            mode=plan.mode,
            injection=injection,
            check=plan.check,
            read_text=plan.prompt.read if plan.mode.erases else None,
            regional_text=plan.prompt.regional,
            inpaint_inputs=self._inpaint_inputs(request, plan),
        )

    def decode(self, request: EditRequest, plan: EditPlan, trajectory: Trajectory) -> RenderOutput:
        """The picture: of an edit, set into its parent's outside the mask."""
        vae, latents, rim = self.state.engine.pipe.vae, trajectory.latents[-1], plan.mode.rim
        with request.stopwatch.stage("decode"), torch.inference_mode():
            cache = self.source(request)[1] if request.parent else None
            if cache and plan.mode.dilation:
                with self.state.cache.tiers.hold([cache.features]):  # before the decoder's layers are exchanged
                    image, decoder = self.state.engine.graphs.cache.decode(vae, latents, plan.decoded_cells, cache)
                if isinstance(decoder.features, FeatureOverlay):
                    decoder.features.encode(self.state.engine.encoding)
            else:
                image, decoder = decode(vae, latents)
            if not (request.parent and cache):
                return RenderOutput(trajectory, image, image, decoder, latents, rim)
            mask, canvas = plan.mask, request.parent.canvas
            if plan.has_rim and rim is None:
                rim = find_rim(cache.picture, image, mask.grid) & plan.rim_allowed
            shares = mask.canvas_pixels if rim is None else mask.with_cells(mask.grid | rim).canvas_pixels
            paint = composite(canvas, image, mask.grid, rim, cache.picture, None if shares is None else shares > 0)
            image = paint if shares is None else mix(canvas, paint, shares)
            return RenderOutput(trajectory, image, paint, decoder, latents, rim)

    def _invert(self, request: EditRequest, plan: EditPlan) -> RenderOutput:
        """An opened picture on its canvas, and the trajectory that it might have had."""
        config, pipe, callback = request.config, self.state.engine.pipe, self.callback(request)
        assert request.picture is not None
        assert plan.prompt is not None
        picture = request.picture.crop(config.crop) if config.crop else request.picture
        canvas, text = to_canvas(picture, (config.width, config.height)), plan.prompt.embeddings
        with request.stopwatch.stage("encode"):
            clean = encode(pipe.vae, canvas).to(pipe.unet.dtype)
        with request.stopwatch.stage("denoise"):
            is_masked = np.zeros(clean.shape[-2:], bool)
            inputs = inpaint_inputs(pipe.vae, canvas, is_masked).to(clean) if is_inpainting(pipe.unet) else None
            if config.inversion is Inversion.DDPM:
                path = noise_latents(pipe, config, clean)
                trajectory = denoise.run_dense(
                    self.state.engine, config, text, callback, path=path, inpaint_inputs=inputs
                )
            else:
                trajectory = denoise.invert(self.state.engine, config, text, clean, callback, inputs)
        with request.stopwatch.stage("decode"), torch.inference_mode():
            return RenderOutput(trajectory, canvas, canvas, decode(pipe.vae, clean)[1], clean)

    @default_torch_state()
    def render_dense(self, request: EditRequest) -> Image:
        """Run a request densely from where its parent's trajectory begins; return the picture. Nothing is recorded."""
        prompt, config = self.encode(request), request.config
        with request.stopwatch.stage("denoise"):
            source, steps = self.source(request)[0], config.num_timesteps
            latents = denoise.sample(
                self.state.engine, config, prompt.embeddings, source, steps, self.callback(request)
            )[-1]
        self.check_model(request)
        with request.stopwatch.stage("decode"), torch.inference_mode():
            return decode(self.state.engine.pipe.vae, latents)[0]

    def callback(self, request: EditRequest) -> Callable[[int, int, Tensor], None]:
        """Return the call before every step, which shows the request's caller a preview."""

        def callback(i: int, n: int, estimate: Tensor) -> None:
            if request.on_step is not None:
                request.on_step(i, n, preview(self.state.engine.pipe, estimate))

        return callback

    def keep(self, result: EditResult, output: RenderOutput) -> None:
        """Keep in the cache what was recorded with a result.

        Args:
            result: The result.
            output: The picture that was rendered for it.
        """
        base, features = result.parent if result.run.dilation or result.run.start else None, output.decoder.features
        if self.state.engine.executor.device.type == "cpu" and not isinstance(features, ShiftedFeatures):
            redecode = partial(
                _decoder_features, self.state.engine.pipe.vae, output.decoded
            )  # holds nothing of the pipeline
            remake = redecode if isinstance(features, StepFeatures) else None
            self.state.cache.tiers.add(features, len(output.trajectory.features), remake)
        self.state.cache.put(result.id, output.trajectory, output.decoder, base=base)

    def source(self, request: EditRequest) -> tuple[Trajectory, DecoderCache]:
        """Return what was recorded with the parent, after `rebuild`."""
        assert request.parent is not None
        return self.state.cache.get(request.parent.id)

    @default_torch_state()
    def rebuild(self, request: EditRequest) -> int:
        """Rebuild what was recorded with the parent, from the nearest result still cached; how many were rebuilt."""
        assert request.parent is not None
        lineage = self.state.history.lineage(request.parent.id)
        cached = next((i for i in reversed(range(len(lineage))) if lineage[i].id in self.state.cache), -1)
        if cached == len(lineage) - 1:
            return 0
        with self.state.history.mark_in_use(request.parent), request.stopwatch.stage("rebuild"):
            for result in lineage[cached + 1 :]:
                self._rebuild(result, request.on_step)
        return len(lineage) - cached - 1

    def _rebuild(self, result: EditResult, on_step: OnStep | None) -> None:
        """Render a result again from its config, over its parent's trajectory where it has one."""
        parent = None if result.parent is None else self.state.history.find(result.parent)
        if parent is not None and result.stats.unet_evaluations_dense + len(result.run.dilation) == 0:
            self.state.cache.share(parent.id, result.id)
            return
        self.state.check_own_loras(result)
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
            erases=run.erases,
            regional=tuple((Region.mask(each.grid), each.prompt) for each in run.regional),
            on_step=on_step,
        )
        plan = self.planner.plan_recorded(request, self.encode(request), None, result.mask, run)
        self.keep(result, *self.render([(request, plan)]))


@torch.inference_mode()
def _decoder_features(vae: AutoencoderKL, latents: Tensor) -> StepFeatures:
    """Return the features that a dense decode recorded, made again."""
    features = decode(vae, latents)[1].features
    assert isinstance(features, StepFeatures)
    return features
