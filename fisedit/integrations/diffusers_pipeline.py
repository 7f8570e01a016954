"""`FisEditPipeline`: the editor behind the arguments and the output class of diffusers' pipelines.

A script of diffusers changes its import, and gains `source_prompt`: what the given image shows. Knows the public face
of the editor alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from inspect import signature
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from fisedit.editor import Editor
from fisedit.errors import InputError, PromptError, as_text
from fisedit.storage.canvas import to_editable
from fisedit.values import SchedulerName

if TYPE_CHECKING:
    from pathlib import Path

    from diffusers import SchedulerMixin, StableDiffusionPipeline
    from diffusers.pipelines.stable_diffusion import StableDiffusionPipelineOutput
    from PIL.Image import Image

    from fisedit.history import EditResult

_log = logging.getLogger(__name__)

_OUTPUT_TYPES = ("pil", "np")
_OPTIONS = ("max_recorded_bytes", "max_host_bytes", "max_disk_bytes", "graphs", "cache_dtype")

_LOADING = frozenset(signature(Editor.from_pretrained).parameters) - {"model"}
_EDITING = frozenset(signature(Editor.edit).parameters) - {"self", "prompt", "mask", "strength"}
"""Arguments of the editor that are passed on."""

_USUAL_LOADING: Mapping[str, object] = {
    **dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder", "variant", "revision", "token")),
    **dict.fromkeys(("cache_dir", "custom_pipeline", "device_map")),
    "requires_safety_checker": False,
    "use_safetensors": True,
    "low_cpu_mem_usage": True,
}
_USUAL_CALLS: Mapping[str, object] = {
    **dict.fromkeys(("timesteps", "sigmas", "latents", "prompt_embeds", "negative_prompt_embeds", "ip_adapter_image")),
    **dict.fromkeys(("ip_adapter_image_embeds", "masked_image_latents", "padding_mask_crop", "cross_attention_kwargs")),
    **dict.fromkeys(("callback_on_step_end", "callback", "callback_steps")),
    "callback_on_step_end_tensor_inputs": ["latents"],
    "num_images_per_prompt": 1,
    "eta": 0.0,
    "guidance_rescale": 0.0,
}
"""Argument of diffusers' that has no counterpart here -> the value that asks for what is done anyway."""

_TCD_ETA = 0.3
"""The eta that TCD runs with, its scheduler's own default; 0, that of diffusers' pipelines, is another sampler."""

_NO_EDIT: Mapping[str, object] = {"mask_image": None, "source_prompt": None, "strength": 1.0}
"""Argument of a call that only edits have -> its default."""

_FP16 = (torch.float16, "fp16", "float16")

_VARIANTS: Mapping[SchedulerName, Mapping[tuple[str, ...], SchedulerName]] = {
    SchedulerName.DDIM: {("trailing",): SchedulerName.DDIM_TRAILING},
    SchedulerName.EULER: {("trailing",): SchedulerName.EULER_TRAILING},
    SchedulerName.DPM_SOLVER: {
        ("karras",): SchedulerName.DPM_SOLVER_KARRAS,
        ("sde",): SchedulerName.DPM_SOLVER_SDE,
        ("karras", "sde"): SchedulerName.DPM_SOLVER_SDE_KARRAS,
    },
}
"""Scheduler -> settings that make it another one -> that one."""


class FisEditPipeline:
    """Generate and edit by the arguments of diffusers' pipelines.

    Args:
        editor: that generates and edits; sources and edits are in its history.
    """

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self._options: dict[str, Any] = {}  # of editors, as `from_pretrained` got them
        self._exchanged: SchedulerName | None = None  # the scheduler that was set, None for the model's own

    @property
    def editor(self) -> Editor:
        """The editor, which may be exchanged; its sources are forgotten then."""
        return self._editor

    @editor.setter
    def editor(self, editor: Editor) -> None:
        self._editor = editor
        self._sources: dict[str, EditResult] = {}  # of this editor, by what they were opened or generated as

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Load a model.

        Args:
            pretrained_model_name_or_path: "demo", a diffusers folder, a hub id, or one .safetensors file.
            kwargs: `torch_dtype`, and arguments of `Editor.from_pretrained` such as `device`. Others of diffusers' are
                accepted where they ask for what is done anyway, such as `safety_checker=None`; `variant="fp16"` with
                `torch_dtype=torch.float16`, in which weights of either file are the same.

        Raises:
            ModelError, NumericsError: as in `Editor.from_pretrained`. InputError: as there, or another argument.
        """
        if "torch_dtype" in kwargs:
            kwargs["dtype"] = kwargs.pop("torch_dtype")
        if kwargs.get("variant") == "fp16" and kwargs.get("dtype") in _FP16:
            del kwargs["variant"]
        kwargs = _known_arguments(kwargs, _LOADING, _USUAL_LOADING)
        made = cls(Editor.from_pretrained(pretrained_model_name_or_path, **kwargs))
        made._options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        return made

    @classmethod
    def from_pipe(cls, pipeline: StableDiffusionPipeline) -> Self:
        """A pipeline over the models of one of diffusers'.

        Args:
            pipeline: of Stable Diffusion 1.x or 2.x; its models are shared.
        """
        return cls(Editor(pipeline))

    @property
    def scheduler(self) -> SchedulerMixin:
        """The scheduler, which may be exchanged as in diffusers; images that are opened are edited with DDIM alone."""
        return self.editor.pipe.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: SchedulerMixin) -> None:
        self._exchanged = _scheduler_name(scheduler)  # refuses one that is not known
        self.editor.pipe.scheduler = scheduler
        self._forget()

    @property
    def components(self) -> dict[str, Any]:
        """The models, for further pipelines of diffusers."""
        return dict(self.editor.pipe.components)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the models, as in diffusers; what was recorded is forgotten.

        Args:
            args: a device, a dtype, or both.
            kwargs: as in `DiffusionPipeline.to`.

        Raises:
            AdapterError: an adapter's file is gone; nothing has moved then.
        """
        if self.editor.adapters:
            self._make_editor()  # raises what would leave models moved and adapters not
        self.editor.pipe.to(*args, **kwargs)
        self.editor = self._make_editor()
        return self

    def _make_editor(self) -> Editor:
        """Another editor of the models where they are now, with the options and adapters of this one."""
        editor = Editor(self.editor.pipe, model=self.editor.model, vae=self.editor.vae, **self._options)
        for loaded in self.editor.adapters:
            encoder = loaded.image_encoder or None
            editor.load_adapter(loaded.source, **loaded.use.as_dict(), image_encoder=encoder)
        return editor

    def __call__(
        self,
        prompt: str | Sequence[str],
        image: Image | None = None,
        source_prompt: str | None = None,
        mask_image: object = None,
        *,
        height: int | None = None,
        width: int | None = None,
        strength: float = 1.0,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        negative_prompt: str | None = None,
        generator: torch.Generator | None = None,
        clip_skip: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        **edit: Any,
    ) -> StableDiffusionPipelineOutput | tuple[list[Any] | np.ndarray, None]:
        """Edit an image to fit a prompt, or generate one without an image.

        An image is opened once: the next calls with that image, `source_prompt` and settings edit what was recorded.
        It is inverted and edited with DDIM, whatever the scheduler is; where another one was set, a warning is logged.
        An image that the last generating call gave is not opened, but edited as it was made, with its scheduler.

        Args:
            prompt: what the image should show; several give one image each.
            image: the picture to edit; None to generate.
            source_prompt: what it shows; None where that is not known.
            mask_image: white where the image may change; None for where the changed words say.
            height: in pixels, divisible by 8; None for the model's own, or what suits the image.
            width: in pixels, divisible by 8; None likewise.
            strength: share of the steps that an edit runs, above 0 to 1.
            num_inference_steps: denoising steps.
            guidance_scale: of classifier-free guidance.
            negative_prompt: what the image should not show.
            generator: whose initial seed is taken, each time anew; None for seed 0.
            clip_skip: layers of the text encoder to leave out; None for none.
            output_type: "pil" or "np".
            return_dict: whether an output object is returned, instead of a tuple.
            edit: further arguments of `Editor.edit`, such as `quality` or `protect`. Others of diffusers' are accepted
                at their defaults, such as `num_images_per_prompt=1`.

        Returns:
            Images, and None for `nsfw_content_detected`. Pixels outside the mask are the image's own.

        Raises:
            PromptError, MaskError, NumericsError: as in `Editor.generate` and `Editor.edit`.
            InputError: as there, another argument, or one of an edit without an image.
        """
        from diffusers.pipelines.stable_diffusion import StableDiffusionPipelineOutput

        if output_type not in _OUTPUT_TYPES:
            raise InputError(f"output_type must be one of {', '.join(_OUTPUT_TYPES)}, got {as_text(output_type)}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(f"generator must be a torch.Generator, got {type(generator).__name__}; seed one")
        if not isinstance(prompt, Sequence):
            raise PromptError(f"prompt must be text or several texts, got {type(prompt).__name__}; describe the image")
        makes_by_tcd = image is None and _scheduler_name(self.scheduler) is SchedulerName.TCD
        edit = _known_arguments(edit, _EDITING, {**_USUAL_CALLS, **({"eta": _TCD_ETA} if makes_by_tcd else {})})
        settings: dict[str, Any] = {
            "seed": generator.initial_seed() if generator else 0,
            "negative_prompt": negative_prompt or "",
            "num_inference_steps": num_inference_steps,
            "guidance_scale": guidance_scale,
            "height": height,
            "width": width,
            "clip_skip": clip_skip or 0,
        }
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not prompts:
            raise PromptError("prompt must be text or several texts, got an empty list; describe the image")
        if image is None:
            _check_not_given(edit | {"mask_image": mask_image, "source_prompt": source_prompt, "strength": strength})
            self._forget()
            images = [self._generate(one, settings) for one in prompts]
        else:
            source = self._source(image, source_prompt, settings)
            images = [self._edit(source, one, mask=mask_image, strength=strength, **edit) for one in prompts]
        found = images if output_type == "pil" else np.stack([np.asarray(one, np.float32) / 255 for one in images])
        return StableDiffusionPipelineOutput(found, None) if return_dict else (found, None)

    def _generate(self, prompt: str, settings: dict[str, Any]) -> Image:
        result = self.editor.generate(prompt, scheduler=_scheduler_name(self.scheduler), **settings)
        image: Image = result.image
        self._sources[_digest(image)] = result
        return image

    def _source(self, image: Image, source_prompt: str | None, settings: dict[str, Any]) -> EditResult:
        """The source that an image is edited as: that which it was generated as, or opened as."""
        key = _digest(to_editable(image))
        if key in self._sources and source_prompt in (None, self._sources[key].prompt):
            return self._sources[key]
        key = f"{key} {source_prompt!r} {settings}"
        if key not in self._sources:
            self._forget()
            if self._exchanged not in (None, SchedulerName.DDIM):
                name = type(self.scheduler).__name__
                _log.warning(
                    "an opened image is edited with DDIM, got %s; set DDIMScheduler, or generate it here", name
                )
            self._sources[key] = self.editor.open(image, source_prompt, **settings)
        return self._sources[key]

    def _edit(self, source: EditResult, prompt: str, **options: Any) -> Image:
        self.editor.checkout(source.id)
        image: Image = self.editor.edit(prompt, **options).image
        return image

    def _forget(self) -> None:
        """Begin a history of its own, so that what earlier images recorded is freed."""
        self.editor = self.editor.beside()


def _known_arguments(given: Mapping[str, Any], known: Collection[str], usual: Mapping[str, object]) -> dict[str, Any]:
    """The known ones of the arguments that were given.

    Args:
        given: their names and values.
        known: names.
        usual: further names -> the value at which they are left out.

    Raises:
        InputError: there are others.
    """
    found = _unusual(given, usual)
    if others := [name for name in found if name not in known]:  # without values: one may be the hub's token
        raise InputError(
            f"arguments must be fisedit's, or diffusers' at their defaults, got {', '.join(others)}; leave them out"
        )
    return found


def _check_not_given(edit: Mapping[str, Any]) -> None:
    """Raise InputError for arguments of an edit, where there is no image to edit."""
    if found := _unusual(edit, _NO_EDIT):
        raise InputError(f"image must be given with {', '.join(found)}, got None; give it, or leave them out")


def _unusual(given: Mapping[str, Any], usual: Mapping[str, object]) -> dict[str, Any]:
    """Arguments without those that have the usual value."""
    return {name: value for name, value in given.items() if name not in usual or not _same(value, usual[name])}


def _same(value: object, usual: object) -> bool:
    return value is usual or (isinstance(value, int | float | list) and value == usual)


def _digest(image: Image) -> str:
    return sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()


def _scheduler_name(scheduler: SchedulerMixin) -> SchedulerName:
    """The sampler that runs as a scheduler of diffusers does. Raises InputError for one that none is."""
    config, kind = scheduler.config, type(scheduler).__name__
    try:
        name = SchedulerName(kind)
    except ValueError as error:
        raise InputError(f"scheduler must be one of {', '.join(SchedulerName)}, got {kind}; exchange it") from error
    algorithm = config.get("algorithm_type", "dpmsolver++") if name is SchedulerName.DPM_SOLVER else "dpmsolver++"
    found = {
        "karras": bool(config.get("use_karras_sigmas")),
        "exponential": bool(config.get("use_exponential_sigmas")),
        "beta": bool(config.get("use_beta_sigmas")),
        "sde": algorithm == "sde-dpmsolver++",
        f"algorithm_type={algorithm}": not str(algorithm).endswith("dpmsolver++"),
        "skip_prk_steps=False": name is SchedulerName.PNDM and not config.get("skip_prk_steps"),
        "trailing": config.get("timestep_spacing") == "trailing" and name in (SchedulerName.DDIM, SchedulerName.EULER),
    }
    variant = tuple(sorted(setting for setting, is_set in found.items() if is_set))
    variants = {(): name, **_VARIANTS.get(name, {})}
    if variant not in variants:
        known = ", ".join(sorted({setting for each in variants for setting in each})) or "none of these"
        raise InputError(f"{kind} runs with {known}, got {' and '.join(variant)}; set it otherwise, or exchange it")
    return variants[variant]
