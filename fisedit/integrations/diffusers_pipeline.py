"""`FisEditPipeline`: the editor behind the arguments and the output class of diffusers' pipelines.

A script of diffusers changes its import, and gains `source_prompt`: what the given image shows. Knows the public face
of the editor alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from fisedit.adapters import lora, textual_inversion
from fisedit.editor import Editor
from fisedit.errors import AdapterError, FisEditError, InputError, PromptError, as_text
from fisedit.integrations.diffusers_names import ABSENT, IDLE, PARTS, PASSED, find_missing
from fisedit.models.paths import HUB_ID, download_files, expand_home
from fisedit.storage.canvas import to_editable
from fisedit.values import SchedulerName
from fisedit.values.sizes import Sizes, make_sizes

if TYPE_CHECKING:
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
    **dict.fromkeys(("cache_dir", "custom_pipeline", "device_map", "config", "original_config", "subfolder")),
    "requires_safety_checker": False,
    "use_safetensors": True,
    "low_cpu_mem_usage": True,
}
_USUAL_CALLS: Mapping[str, object] = {
    **dict.fromkeys(("timesteps", "sigmas", "latents", "prompt_embeds", "negative_prompt_embeds")),
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
        ("exponential", "sde"): SchedulerName.DPM_SOLVER_SDE_EXPONENTIAL,
    },
}
"""Scheduler -> settings that make it another one -> that one."""


class FisEditPipeline:
    """Generate and edit by the arguments of diffusers' pipelines.

    Args:
        editor: The editor that generates and edits; sources and edits are in its history.
    """

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self._options: dict[str, Any] = {}  # of editors, as `from_pretrained` got them
        self._exchanged: SchedulerName | None = None  # the scheduler that was set, None for the model's own
        self._loras: dict[str, str] = {}  # adapter_name of a script -> name here
        self._ip_adapter = ""  # what was loaded by `load_ip_adapter`
        self._disabled: dict[str, float] = {}  # scales of LoRAs before `disable_lora`

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of this name of diffusers' pipeline; raise an error that names the counterpart where
        there is none."""
        if name in PASSED:
            return getattr(self.editor.pipe, name)
        if name in IDLE:
            return lambda *_, **__: _log.warning("%s changes no picture, and does nothing here; leave it out", name)
        return find_missing(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, or exchange a part of the model. Raises InputError for a name that would be ignored."""
        if name in PARTS:
            self._exchange(name, value)
        elif name.startswith("_") or isinstance(getattr(type(self), name, None), property):
            super().__setattr__(name, value)
        elif name not in ABSENT or value is not None:
            do = "only None can be set" if name in ABSENT else f"scheduler and {', '.join(PARTS)} can be set"
            raise InputError(f"FisEditPipeline does not use {name}, got {type(value).__name__}; {do}")

    @property
    def _pipe(self) -> StableDiffusionPipeline:
        """The pipeline, of which the editor reads the parts alone."""
        return self.editor.pipe

    def _exchange(self, name: str, part: Any) -> None:
        """Put a part in the place of the model's own. The session of such a model has no name."""
        if type(part).__name__ not in PARTS[name]:
            raise InputError(f"{name} must be {PARTS[name][0]}, got {type(part).__name__}; load one")
        pipe, before = self._pipe, getattr(self._pipe, name)
        if isinstance(part, torch.nn.Module):
            layout = {} if name == "text_encoder" else {"memory_format": torch.channels_last}
            part.eval().requires_grad_(False).to(pipe.device, pipe.dtype, **layout)
        pipe.register_modules(**{name: part})
        try:
            self.editor = self._make_editor(model="")
        except FisEditError:
            pipe.register_modules(**{name: before})
            raise

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
            kwargs: `torch_dtype`, arguments of `Editor.from_pretrained` such as `device` and `variant`, and loaded
                parts: `unet`, `vae`, `text_encoder`, `tokenizer`, `scheduler`. Others of diffusers' are accepted where
                they ask for what is done anyway, such as `safety_checker=None`; `variant="fp16"` of a model without
                one with `torch_dtype=torch.float16`, in which weights of either file are the same.

        Raises:
            ModelError, NumericsError: as in `Editor.from_pretrained`. InputError: as there, or another argument.
        """
        if "torch_dtype" in kwargs:
            kwargs["dtype"] = kwargs.pop("torch_dtype")
        if kwargs.get("variant") == "fp16" and kwargs.get("dtype") in _FP16:
            del kwargs["variant"]
        parts = {name: kwargs.pop(name) for name in (*PARTS, "scheduler") if _is_part(kwargs.get(name))}
        kwargs = _known_arguments(kwargs, _LOADING, _USUAL_LOADING)
        made = cls(Editor.from_pretrained(pretrained_model_name_or_path, **kwargs))
        made._options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    @classmethod
    def from_single_file(cls, pretrained_model_link_or_path: str | Path, **kwargs: Any) -> Self:
        """Load a model of one file.

        Args:
            pretrained_model_link_or_path: the .safetensors file.
            kwargs: The arguments of `from_pretrained`.

        Raises:
            ModelError, NumericsError, InputError: as in `from_pretrained`.
        """
        return cls.from_pretrained(pretrained_model_link_or_path, **kwargs)

    @classmethod
    def from_pipe(cls, pipeline: StableDiffusionPipeline) -> Self:
        """A pipeline over the models of one of diffusers'.

        Args:
            pipeline: A pipeline of Stable Diffusion 1.x, 2.x or XL; its models are shared.
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
            kwargs: The arguments of `DiffusionPipeline.to`.

        Raises:
            AdapterError: an adapter's file is gone; nothing has moved then.
        """
        if self.editor.adapters:
            self._make_editor()  # raises what would leave models moved and adapters not
        self._pipe.to(*args, **kwargs)
        self.editor = self._make_editor()
        return self

    def _make_editor(self, **names: str) -> Editor:
        """Another editor of the models where they are now, with the options and adapters of this one."""
        options: dict[str, Any] = {"model": self.editor.model, "vae": self.editor.vae, **names, **self._options}
        editor = Editor(self.editor.pipe, **options)
        editor.variant = self.editor.variant
        for loaded in self.editor.adapters:
            encoder = loaded.image_encoder or None
            editor.load_adapter(loaded.source, **loaded.use.as_dict(), image_encoder=encoder)
        return editor

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: str | Path,
        adapter_name: str | None = None,
        *,
        weight_name: str | None = None,
        subfolder: str | None = None,
        local_files_only: bool = False,
    ) -> None:
        """Load a LoRA by `Editor.load_lora`.

        Args:
            pretrained_model_name_or_path_or_dict: a file, a folder or a hub id.
            adapter_name: its name for `set_adapters`; None for the file's.
            weight_name: The name of the file in a folder or on the hub.
            subfolder: where it is.
            local_files_only: never reach for the network.

        Raises:
            AdapterError: as in `Editor.load_lora`, or a name that is taken. InputError: tensors in place of a file.
        """
        if adapter_name in {*self._loras, *lora.loaded_scales(self.editor.pipe)}:
            raise AdapterError(f"adapter_name must be new, got {as_text(adapter_name)}; give another")
        place = pretrained_model_name_or_path_or_dict
        name = self.editor.load_lora(
            _file_of(place, weight_name, subfolder, lora.FILE, local_files_only=local_files_only)
        )
        self._loras[adapter_name or name] = name

    def set_adapters(
        self, adapter_names: str | Sequence[str], adapter_weights: float | Sequence[float] | None = None
    ) -> None:
        """Set the scales of LoRAs by `Editor.scale_loras`; those left out count nothing.

        Args:
            adapter_names: names from `load_lora_weights`, or of their files.
            adapter_weights: a scale for all, or one for each; None for 1.

        Raises:
            AdapterError: one that is not loaded. InputError: another number of scales, or scales of blocks.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        given = 1.0 if adapter_weights is None else adapter_weights
        scales = list(given) if isinstance(given, Sequence) else [given] * len(names)
        if len(scales) != len(names):
            raise InputError(f"adapter_weights must be {len(names)} numbers, got {len(scales)}; give one for each name")
        self.editor.scale_loras(dict(zip((self._loras.get(name, name) for name in names), scales, strict=True)))

    def get_active_adapters(self) -> list[str]:
        """The names of the LoRAs that count."""
        return [name for name, scale in self._lora_scales().items() if scale]

    def get_list_adapters(self) -> dict[str, list[str]]:
        """The names of the loaded LoRAs, as those of the UNet."""
        return {"unet": list(self._lora_scales())} if self._lora_scales() else {}

    def disable_lora(self) -> None:
        """Let no LoRA count until `enable_lora`."""
        self._disabled = dict(lora.loaded_scales(self.editor.pipe))
        self.editor.scale_loras({})

    def enable_lora(self) -> None:
        """Let the LoRAs count that `disable_lora` switched off."""
        if self._disabled:
            loaded = lora.loaded_scales(self.editor.pipe)
            self.editor.scale_loras({name: scale for name, scale in self._disabled.items() if name in loaded})
        self._disabled = {}

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        """Take LoRAs out. Raises AdapterError for one that is not loaded."""
        for name in [adapter_names] if isinstance(adapter_names, str) else adapter_names:
            self.editor.unload_lora(self._loras.get(name, name))
            self._loras.pop(name, None)

    def unload_lora_weights(self) -> None:
        """Take all LoRAs out."""
        for name in list(lora.loaded_scales(self.editor.pipe)):
            self.editor.unload_lora(name)
        self._loras.clear()

    def _lora_scales(self) -> dict[str, float]:
        """Scales of LoRAs by the names that a script knows."""
        names = {name: given for given, name in self._loras.items()}
        return {names.get(name, name): scale for name, scale in lora.loaded_scales(self.editor.pipe).items()}

    def load_textual_inversion(
        self,
        pretrained_model_name_or_path: str | Path,
        token: str | None = None,
        *,
        weight_name: str | None = None,
        subfolder: str | None = None,
        local_files_only: bool = False,
    ) -> None:
        """Load a word's embeddings by `Editor.load_textual_inversion`.

        Args:
            pretrained_model_name_or_path: a file, a folder or a hub id.
            token: the word; None for the one that the file tells, or else the file's name.
            weight_name: The name of the file in a folder or on the hub; None for "learned_embeds.safetensors".
            subfolder: where it is.
            local_files_only: never reach for the network.

        Raises:
            AdapterError, InputError: as in `Editor.load_textual_inversion`.
        """
        place = pretrained_model_name_or_path
        usual = "learned_embeds.safetensors"
        file = _file_of(place, weight_name, subfolder, usual, local_files_only=local_files_only)
        self.editor.load_textual_inversion(file, token or textual_inversion.own_word(expand_home(file)))

    def unload_textual_inversion(self, tokens: str | Sequence[str] | None = None) -> None:
        """Take words out, or all. Raises AdapterError for one that was not loaded."""
        words = list(textual_inversion.loaded(self.editor.pipe)) if tokens is None else tokens
        for word in [words] if isinstance(words, str) else words:
            self.editor.unload_textual_inversion(word)

    def load_ip_adapter(
        self,
        pretrained_model_name_or_path_or_dict: str | Path,
        subfolder: str | None,
        weight_name: str,
        image_encoder_folder: str = "image_encoder",
        *,
        local_files_only: bool = False,
    ) -> None:
        """Load an IP-Adapter by `Editor.load_adapter`; a call's `ip_adapter_image` is its picture.

        Args:
            pretrained_model_name_or_path_or_dict: a folder or a hub id.
            subfolder: where its file is.
            weight_name: name of its file.
            image_encoder_folder: folder of its image encoder beside the file, or from the top where it has a "/".
            local_files_only: never reach for the network.

        Raises:
            AdapterError: as in `Editor.load_adapter`. InputError: several files, or tensors in place of a file.
        """
        source = pretrained_model_name_or_path_or_dict
        for name, value in {"subfolder": subfolder, "weight_name": weight_name}.items():
            if not isinstance(value, str | None):
                raise InputError(f"{name} must be text, got {type(value).__name__}; load adapters one by one")
        top = expand_home(_checked_source(source))
        encoder = None if image_encoder_folder == "image_encoder" else top / image_encoder_folder
        if encoder is not None and "/" not in image_encoder_folder:
            encoder = top / (subfolder or "") / image_encoder_folder
        path = "/".join(filter(None, (subfolder, weight_name)))
        self.editor.load_adapter(source, weight_name=path, image_encoder=encoder, local_files_only=local_files_only)
        self._ip_adapter = self.editor.adapters[-1].source

    def set_ip_adapter_scale(self, scale: float) -> None:
        """Set the scale of the IP-Adapter. Raises AdapterError where none is loaded, InputError for another scale."""
        self.editor.scale_adapter(scale, self._ip_adapter or "none")

    def unload_ip_adapter(self) -> None:
        """Take the IP-Adapter out. Raises AdapterError where none is loaded."""
        self.editor.unload_adapter(self._ip_adapter or "none")
        self._ip_adapter = ""

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Take `disable=True`, as no bar is drawn; others are told by a warning.

        Args:
            kwargs: arguments of tqdm.
        """
        if not kwargs.get("disable"):
            _log.warning("no progress bar is drawn here; editor.generate and editor.edit call on_step before each step")

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the model as a folder of diffusers.

        Args:
            save_directory: the folder.
            kwargs: The arguments of `DiffusionPipeline.save_pretrained`.

        Raises:
            AdapterError: LoRAs are loaded, which are no part of the model.
        """
        if names := list(self._lora_scales()):
            raise AdapterError(f"a model is saved without LoRAs, got {', '.join(names)}; unload_lora_weights first")
        self._pipe.save_pretrained(save_directory, **kwargs)

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
        ip_adapter_image: Image | None = None,
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
            guidance_scale: The scale of classifier-free guidance.
            negative_prompt: what the image should not show.
            generator: The generator whose initial seed is taken, each time anew; None for seed 0.
            clip_skip: layers of the text encoder to leave out; None for none.
            ip_adapter_image: the picture that an IP-Adapter reads, the editor's `reference`; None for none.
            output_type: "pil" or "np".
            return_dict: whether an output object is returned, instead of a tuple.
            edit: further arguments of `Editor.edit`, such as `quality` or `protect`, and sizes of Stable Diffusion XL's
                pipeline, such as `original_size`. Others of diffusers' are accepted at their defaults, such as
                `num_images_per_prompt=1`.

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
        sizes = {field.name: edit.pop(field.name, None) for field in fields(Sizes)}
        edit = _known_arguments(edit, _EDITING, {**_USUAL_CALLS, **({"eta": _TCD_ETA} if makes_by_tcd else {})})
        settings: dict[str, Any] = {
            "seed": generator.initial_seed() if generator else 0,
            "negative_prompt": negative_prompt or "",
            "num_inference_steps": num_inference_steps,
            "guidance_scale": guidance_scale,
            "height": height,
            "width": width,
            "clip_skip": clip_skip or 0,
            "sizes": make_sizes(sizes),
        }
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not prompts:
            raise PromptError("prompt must be text or several texts, got an empty list; describe the image")
        if image is None:
            _check_not_given(edit | {"mask_image": mask_image, "source_prompt": source_prompt, "strength": strength})
            self._forget()
            images = [self._generate(one, settings | {"reference": ip_adapter_image}) for one in prompts]
        else:
            edit |= {} if ip_adapter_image is None else {"reference": ip_adapter_image}
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


def _is_part(value: object) -> bool:
    """Return whether an argument is a loaded part, and no path."""
    return value is not None and not isinstance(value, str | Path)


def _checked_source(source: object) -> str | Path:
    if not isinstance(source, str | Path):
        raise InputError(
            f"a file, a folder or a hub id must be given, got {type(source).__name__}; save a .safetensors file"
        )
    return source


def _is_folder(source: object) -> bool:
    """Return whether a source is a folder here, or a hub id."""
    path = expand_home(_checked_source(source))
    return path.is_dir() or (not path.exists() and HUB_ID.fullmatch(str(source)) is not None)


def _file_of(
    source: object, weight_name: str | None, subfolder: str | None, usual: str, *, local_files_only: bool
) -> str | Path:
    """The file of a source in diffusers' words, which need not exist.

    Args:
        source: a file, a folder or a hub id.
        weight_name: The name of the file in a folder or on the hub; None for the usual one.
        subfolder: where it is.
        usual: name of the usual file.
        local_files_only: never reach for the network.

    Raises:
        InputError: something else, or a name beside a file. ModelError: the hub does not give it.
    """
    place = _checked_source(source)
    if not _is_folder(place):
        if weight_name or subfolder:
            raise InputError(f"weight_name and subfolder are of a folder or a hub id, got {place}; leave them out")
        return place
    path, name = expand_home(place), "/".join(filter(None, (subfolder, weight_name or usual)))
    if not path.is_dir():
        path = download_files(str(place), [name], local_files_only=local_files_only)
    return path / name


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
