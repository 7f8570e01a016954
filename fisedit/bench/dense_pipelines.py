"""diffusers' own pipeline in every variant of precision, memory format and execution.

Each has modules of its own over the model's weights, and copies of those weights alone that lie otherwise in it.
Knows diffusers and torch.compile, and what runs it instead (`runtimes`); nothing of sparse edits.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from fisedit.bench.dense_search import (
    DEEPCACHE,
    DEEPCACHE_INTERVAL,
    OPENVINO,
    TORCH,
    DenseSearch,
    DenseVariant,
    failure,
    find_fastest,
    variants,
)
from fisedit.bench.runtimes import (
    CompiledDeepCache,
    DecoderStandIn,
    UNetCall,
    UNetStandIn,
    compile_openvino,
    convert_openvino,
    enable_deepcache,
)
from fisedit.bench.timing import measure_seconds
from fisedit.machine.device import DTYPES
from fisedit.machine.hardware import free_bytes
from fisedit.models.families.conditioning import Conditioning, example
from fisedit.models.families.family import assemble
from fisedit.models.loader import quiet_loaders
from fisedit.sampling.scheduler import SCHEDULERS

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor

    from fisedit.values import GenerationConfig

MODES = {"cuda": "reduce-overhead"}
"""Device -> torch.compile's mode, where it is not the default one: on a GPU CUDA graphs are captured."""


class DensePipelines:
    """Variants of a pipeline, made when they are first used. To be made before an editor uses the pipeline.

    Args:
        pipe: The pipeline whose variants they are; it stays as it is.
        config: The settings of the pictures that are made.
        compiled: whether a search tries torch.compile.
    """

    def __init__(self, pipe: StableDiffusionPipeline, config: GenerationConfig, *, compiled: bool = True) -> None:
        self._pipe, self._config = pipe, config
        self._device: torch.device = pipe.unet.device
        self._pipelines: dict[DenseVariant, StableDiffusionPipeline] = {}
        missing = "" if has_compiler(self._device) else "there is no C++ compiler"
        self._skip_reason = missing if compiled else "--no-compiled left it out"

    @property
    def notes(self) -> list[str]:
        """Return the lines that a reader of the search must know."""
        if self._skip_reason:
            return [f"torch.compile was not tried: {self._skip_reason}"]
        return [f"torch.compile made kernels for {vector_extension()}"] if self._device.type == "cpu" else []

    def search(self, rounds: int | None = None) -> DenseSearch:
        """Find the fastest exact variant by a step and a decode, weighted as in a whole run.

        Its weights are kept, and those of the fastest variant of every runtime.

        Args:
            rounds: The most further rounds of timings; None for as many as are usual.
        """
        candidates = variants(self._device.type, compiled=not self._skip_reason)
        result = find_fastest(candidates, self._run_seconds, self.release, rounds)
        vars(self).pop("_openvino_models", None)
        best = [variant for runtime in (TORCH, OPENVINO) if (variant := result.best_of(runtime))]
        for variant in list(self._pipelines):
            if variant not in {*best, *(replace(variant, compiled=False) for variant in best)}:
                self.release(variant)
        return result

    def others(self, search: DenseSearch) -> dict[DenseVariant, str]:
        """The baselines beside the fastest exact variant -> why each cannot be timed, or "".

        They are the fastest of torch and of OpenVINO, and DeepCache over the fastest eager one.

        Args:
            search: The result of the search.
        """
        found: dict[DenseVariant, str] = {}
        for runtime in (TORCH, OPENVINO):
            left_out = [(v, reason) for v, reason in search.left_out.items() if v.runtime == runtime]
            if variant := search.best_of(runtime):
                found[variant] = ""
            elif left_out:
                found |= left_out[:1]
        found.pop(search.best, None)
        cached = replace(search.fastest_eager, runtime=DEEPCACHE)
        return found | {cached: self.refusal(cached)}

    def refusal(self, variant: DenseVariant) -> str:
        """Return why a variant cannot make a picture, in one line, or "".

        Args:
            variant: The variant that makes a picture in few steps, and is released where it fails.
        """
        try:
            self.run(variant, DEEPCACHE_INTERVAL)
        except (ImportError, RuntimeError) as error:
            self.release(variant)
            return failure(error)
        return ""

    def shortage(self, variant: DenseVariant) -> str:
        """Return why there is no memory for a variant's own weights, in a few words, or "".

        Half as much again is left for what it computes.

        Args:
            variant: The variant, made or not.
        """
        if variant in self._pipelines:
            return ""
        dtype, layout = DTYPES[variant.dtype], _layout(variant)
        modules = [part for part in self._pipe.components.values() if isinstance(part, nn.Module)]
        copied = (weight for part in modules for weight in part.parameters() if _differs(weight, dtype, layout))
        needed, free = sum(weight.numel() for weight in copied) * dtype.itemsize, free_bytes(self._device)
        if free >= 1.5 * needed:
            return ""
        return f"its weights take {needed / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"

    def release(self, variant: DenseVariant) -> None:
        """Forget a variant's copy.

        Args:
            variant: The variant that is not needed any more.
        """
        self._pipelines.pop(variant, None)

    def get(self, variant: DenseVariant) -> StableDiffusionPipeline:
        """The pipeline of a variant.

        Args:
            variant: The variant, whose eager form shares its UNet's weights.
        """
        if variant not in self._pipelines:
            torchs = self._compile if variant.compiled else self._copy
            makers = {OPENVINO: self._convert, DEEPCACHE: self._cache, TORCH: torchs}
            self._pipelines[variant] = makers[variant.runtime](variant)
        return self._pipelines[variant]

    def run(self, variant: DenseVariant, steps: int | None = None) -> None:
        """Make the picture, from prompt to image.

        Args:
            variant: The variant that makes it.
            steps: denoising steps; None for the config's.
        """
        config = self._config
        self.get(variant)(
            prompt=config.prompt,
            width=config.width,
            height=config.height,
            num_inference_steps=steps or config.num_inference_steps,
            guidance_scale=config.guidance_scale,
            generator=torch.Generator().manual_seed(config.seed),
        )

    def step(self, variant: DenseVariant) -> Callable[[], object]:
        """One evaluation of the UNet, both branches of guidance.

        Args:
            variant: The variant that evaluates it.
        """
        unet = self.get(variant).unet
        latents, time, text = self._step_inputs(DTYPES[variant.dtype])
        return lambda: unet(latents, time, return_dict=False, **text.unet_inputs)

    def decode(self, variant: DenseVariant) -> Callable[[], object]:
        """One decode of random latents.

        Args:
            variant: The variant that decodes them.
        """
        vae, latents = self.get(variant).vae, self._latents(DTYPES[variant.dtype])
        return lambda: vae.decode(latents / vae.config.scaling_factor, return_dict=False)

    def _run_seconds(self, variant: DenseVariant) -> float:
        """Seconds of a whole run, from one step and one decode, after a warm-up the first time."""
        is_cached = variant in self._pipelines
        step, decode = self.step(variant), self.decode(variant)
        if not is_cached:
            with warnings.catch_warnings():  # of caches in diffusers that torch.compile looks through
                warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
                step()
                decode()
        return self._config.num_timesteps * measure_seconds(step) + measure_seconds(decode)

    def _latents(self, dtype: torch.dtype) -> Tensor:
        height, width = self._config.height // 8, self._config.width // 8
        return torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(1)).to(self._device, dtype)

    def _step_inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Conditioning]:
        """Latents, a timestep and conditions of both branches of guidance."""
        batch, unet = 2 if self._config.guidance_scale > 1 else 1, self._pipe.unet
        latents, tokens = self._latents(dtype).repeat(batch, 1, 1, 1), self._pipe.tokenizer.model_max_length
        return latents, torch.tensor(500, device=self._device), example(unet, batch, tokens).to(dtype)

    def _copy(self, variant: DenseVariant) -> StableDiffusionPipeline:
        if reason := self.shortage(variant):
            raise RuntimeError(reason)
        parts: dict[str, Any] = dict(self._pipe.components)
        with quiet_loaders():  # diffusers warns of a cast that no part of these models minds
            for name in (name for name, part in parts.items() if isinstance(part, nn.Module)):
                parts[name] = _sharing(parts[name]).to(DTYPES[variant.dtype])
        for name in ("unet", "vae"):
            parts[name].to(memory_format=_layout(variant))
        return self._assemble(parts)

    @property
    def _mode(self) -> str:
        return MODES.get(self._device.type, "default")

    def _compile(self, variant: DenseVariant) -> StableDiffusionPipeline:
        parts: dict[str, Any] = dict(self.get(replace(variant, compiled=False)).components)
        vae = _sharing(parts["vae"])
        vae.decoder = torch.compile(vae.decoder, mode=self._mode)
        return self._assemble(parts | {"unet": torch.compile(parts["unet"], mode=self._mode), "vae": vae})

    @cached_property
    def _openvino_models(self) -> tuple[Any, Any]:
        """UNet and decoder as OpenVINO's models, which every precision is compiled of."""
        latents, time, text = self._step_inputs(torch.float32)
        if text.added:
            raise RuntimeError("its conversion here is of UNets that read text alone")
        with quiet_loaders():
            unet, decoder = (_sharing(part).float() for part in (UNetCall(self._pipe.unet), self._pipe.vae.decoder))
        return convert_openvino(unet, (latents, time.float(), text.text)), convert_openvino(decoder, (latents[:1],))

    def _convert(self, variant: DenseVariant) -> StableDiffusionPipeline:
        """The pipeline whose UNet and decoder OpenVINO runs."""
        unet, decoder = (compile_openvino(model, variant.dtype) for model in self._openvino_models)
        parts: dict[str, Any] = dict(self._copy(replace(variant, runtime=TORCH)).components)
        parts["unet"] = UNetStandIn(unet, parts["unet"])
        parts["vae"].decoder = DecoderStandIn(decoder)
        return self._assemble(parts)

    def _cache(self, variant: DenseVariant) -> StableDiffusionPipeline:
        """The pipeline whose steps reuse deep features by DeepCache."""
        if not variant.compiled:
            pipe = self._copy(variant)
            enable_deepcache(pipe, DEEPCACHE_INTERVAL)
            return pipe
        parts = dict(self.get(replace(variant, runtime=TORCH)).components)  # with its compiled decoder
        parts["unet"] = unet = _sharing(self.get(replace(variant, runtime=TORCH, compiled=False)).unet)
        unet.forward = CompiledDeepCache(unet, DEEPCACHE_INTERVAL, partial(torch.compile, mode=self._mode))
        return self._assemble(parts)

    def _assemble(self, parts: dict[str, Any]) -> StableDiffusionPipeline:
        scheduler, changes = SCHEDULERS[self._config.scheduler]
        parts |= {"scheduler": scheduler.from_config(self._pipe.scheduler.config, **changes)}
        pipe: StableDiffusionPipeline = assemble(parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe


M = TypeVar("M", bound=nn.Module)


def _sharing(module: M) -> M:
    """A module of its own over the same weights, which it keeps until it is cast or laid out anew."""
    return deepcopy(module, {id(weight): nn.Parameter(weight.data, False) for weight in module.parameters()})


def _layout(variant: DenseVariant) -> torch.memory_format:
    return torch.channels_last if variant.channels_last else torch.contiguous_format


def _differs(weight: Tensor, dtype: torch.dtype, layout: torch.memory_format) -> bool:
    """Return whether a weight lies otherwise in a variant; memory formats are of convolutions."""
    return weight.dtype != dtype or (weight.ndim == 4 and not weight.is_contiguous(memory_format=layout))


def vector_extension() -> str:
    """The CPU's vector extension that torch.compile's kernels use, such as "avx512"; probing may miss it."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return str(pick_vec_isa())


def has_compiler(device: torch.device) -> bool:
    """Return whether torch.compile can make kernels: on a CPU it needs a C++ compiler, $CXX, g++ or clang++.

    Args:
        device: The device that they are for.
    """
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return device.type != "cpu" or any(name and shutil.which(name) for name in names)
