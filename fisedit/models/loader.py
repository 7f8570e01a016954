"""Loads a diffusers StableDiffusionPipeline from a name or path, after every check that needs no weights.

Knows files, configurations and diffusers' loaders; knows nothing of editing. No code from a model is ever run: only
classes named here are built, and only safetensors are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fisedit.errors import InputError, ModelError, NumericsError, as_text
from fisedit.machine.device import choose_device, choose_dtype, default_torch_state
from fisedit.models import validation as checks
from fisedit.models.conversion import build, converted, current_names, origins, scale_names, trace, unscaled
from fisedit.models.families import family as families
from fisedit.models.families.family import SD1, SD2, SDXL, Family
from fisedit.models.families.file_blocks import read_blocks, renumbered
from fisedit.models.families.stable_diffusion_xl import as_model
from fisedit.models.file_settings import MARKERS, read_settings
from fisedit.models.group_norm import stabilise
from fisedit.models.paths import CONFIG_PATTERNS, demo_folder, download_files, download_model, expand_home, locate
from fisedit.models.vocabulary import read_vocabulary
from fisedit.models.weight_files import (
    Shapes,
    check_vocabulary,
    config_beside,
    parts_of,
    read_json,
    read_shapes,
    read_tensors,
    variants,
    weight_files,
)

if TYPE_CHECKING:
    from fisedit.machine.model import Model

__all__ = ["config_folder", "demo_folder", "load", "load_tokenizer", "quiet_loaders"]

_SCHEDULE_TOLERANCE = 2e-3  # fp16's rounding of numbers up to 1, and less than zero terminal SNR's change
_STEM, _TEXT_STEM = "diffusion_pytorch_model", "model"


@default_torch_state()
def load(
    model: str | Path,
    *,
    vae: str | Path | None = None,
    preview_vae: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    local_files_only: bool = False,
) -> Model:
    """Load a Stable Diffusion 1.x, 2.x or XL pipeline, checked, on its device, convolutions laid out channels-last.

    Args:
        model: "demo", a diffusers folder, a hub id such as "owner/name", or a .safetensors file.
        vae: Another autoencoder than the model's: a folder, or a .safetensors file; None for the model's own. A model
            may lack its own then.
        preview_vae: A folder with an `AutoencoderTiny` (TAESD), which decodes previews; None for none.
        device: Torch device; None for CUDA if available, else the CPU.
        dtype: "fp32", "bf16", "fp16" or torch's; None as in `device.choose_dtype`.
        variant: Name of the variant of a folder's weights, such as "fp16" or "non_ema"; None for those without one, or
            else for fp16, or the only one.
        local_files_only: Whether the network is never used.

    Raises:
        ModelError: The model is missing, damaged, unsafe to load or of another architecture.
        NumericsError: Its weights contain NaN or infinity.
        InputError: The device or dtype cannot be used here, or a variant of one file is asked for.
    """
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    path, without = locate(model), () if vae is None else ("vae",)
    if variant is not None and path is not None and path.is_file():
        raise InputError(f"variant must be of a folder or a hub id, got {as_text(variant)} and one file; leave it out")
    with quiet_loaders():
        if path is None:
            check = partial(_stems_of, without=without)
            path = download_model(str(model), check, variant=variant, local_files_only=local_files_only)
        is_file = path.is_file()
        pipe = _load_file(path, precision, without) if is_file else _load_folder(path, precision, without, variant)
        if vae is not None:
            other, notes = _load_vae(expand_home(vae), precision, pipe.family)
            pipe.register_modules(vae=other)
            pipe.notes += notes
        if preview_vae is not None:
            pipe.preview_vae = _load_preview_vae(expand_home(preview_vae), where, precision)
    _check_finite(pipe, precision)
    return as_model(_place(pipe, where))


def config_folder(model: str | Path, *, local_files_only: bool = False) -> Path:
    """The checked folder with a model's configurations and tokenizer; no weights are read or downloaded.

    Args:
        model: The model that `load` takes.
        local_files_only: Whether the network is never used.

    Raises:
        ModelError: As in `load`, as far as configurations and headers show it.
    """
    path, without = locate(model), ("vae",)  # which may come from elsewhere
    if path is not None and path.is_file():
        return _checked_file(path, without)[2].configs
    folder = download_files(str(model), CONFIG_PATTERNS, local_files_only=local_files_only) if path is None else path
    _check_configs(folder, without)
    return folder


def load_tokenizer(folder: Path, name: str = "tokenizer") -> Any:
    """Load a tokenizer of a model.

    Args:
        folder: From `config_folder`.
        name: The name of the tokenizer.

    Raises:
        ModelError: It is damaged.
    """
    with quiet_loaders():
        return _load_tokenizer(folder / name)


def _load_file(path: Path, dtype: torch.dtype, without: Collection[str]) -> Any:
    files, shapes, family = _checked_file(path, without)
    told = read_settings(files[0], shapes, family)
    configs = {part: read_json(family.configs / part / "config.json") for part in family.parts if part not in without}
    blocks = read_blocks(shapes)
    configs["unet"] = blocks.config(configs["unet"]) | {"in_channels": checks.file_inputs(shapes)}
    read, traced = {*MARKERS, *scale_names(shapes)}, renumbered(trace(shapes), blocks)
    for part, config in configs.items():
        expected, found = _shapes_of(part, json.dumps(config)), _converted(family, part, traced, config)
        actual = {name: tuple(tensor.shape) for name, tensor in found.items()}
        checks.check_shapes(part, expected, actual, again="get the file again")
        read |= origins(found, expected)
    mapped = read_tensors(files)
    tensors = renumbered(unscaled(mapped, dtype), blocks)
    modules = {
        part: _build(
            part,
            config,
            _converted(family, part, tensors, config),
            _dtype(family, part, config, dtype),
            mapped.drop_pages,
        )
        for part, config in configs.items()
    }
    pipe = _assemble(family, family.configs, modules, told.scheduler)
    if told.sample_size is not None:
        pipe.unet.register_to_config(sample_size=told.sample_size)
    others = tuple(start for part in without for start in family.prefixes[part])
    unread = checks.unread(shapes, read | {name for name in shapes if name.startswith(others)})
    pipe.notes = told.notes + checks.unread_note(path, unread)
    if "rescale_betas_zero_snr" not in told.scheduler:
        pipe.notes += _schedule_note(path, tensors.get("alphas_cumprod"), pipe.scheduler)
    return pipe


def _converted(
    family: Family, part: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors of a part of a single file, which OpenCLIP may have named."""
    return converted(part, tensors, config, family.prefixes[part][0] if part == family.open_clip else "")


def _dtype(family: Family, part: str, config: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """The dtype of a part of a model: fp32 for an autoencoder that overflows in fp16."""
    return torch.float32 if dtype is torch.float16 and family.is_upcast(part, config) else dtype


def _checked_file(path: Path, without: Collection[str]) -> tuple[tuple[Path, ...], Shapes, Family]:
    """The files of a single file that may be a model, their shapes and its family."""
    if problem := checks.pickled(path):
        raise problem
    files = parts_of(path)
    shapes = read_shapes(*files)
    return files, shapes, checks.check_single_file(path, shapes, without)


def _schedule_note(path: Path, told: torch.Tensor | None, scheduler: Any) -> tuple[str, ...]:
    """The note on a file whose own noise schedule is another than its family's."""
    own = scheduler.alphas_cumprod
    if told is None or (told.shape == own.shape and (told.float() - own).abs().max() < _SCHEDULE_TOLERANCE):
        return ()
    return (f"{path.name} has a noise schedule of its own (alphas_cumprod), which is not read",)


def _load_folder(folder: Path, dtype: torch.dtype, without: Collection[str], variant: str | None) -> Any:
    family = _check_configs(folder, without)
    parts = {part: _Part(part, folder / part, variant) for part in family.parts if part not in without}
    _check_variant(folder, parts, variant)
    modules = {part: found.load(_dtype(family, part, found.config, dtype)) for part, found in parts.items()}
    pipe = _assemble(family, folder, modules)
    pipe.unet.register_to_config(sample_size=checks.sample_size(pipe.unet.config))
    pipe.vocabulary = read_vocabulary(folder)
    pipe.notes = tuple(note for found in parts.values() for note in found.notes)
    return pipe


def _check_variant(folder: Path, parts: Collection[str], variant: str | None) -> None:
    """Raise ModelError for a variant that no part of a folder has."""
    found = {name for part in parts for name in variants(folder / part, _stem(part))}
    if variant is not None and variant not in found:
        names = ", ".join(sorted(filter(None, found))) or "none"
        raise ModelError(
            f"variant must be one that {folder} has ({names}), got {variant!r:.60}; leave it out or name one"
        )


def _stem(part: str) -> str:
    """The stem of the name of a part's weights."""
    return _TEXT_STEM if part.startswith("text_encoder") else _STEM


def _stems_of(folder: Path, without: Collection[str]) -> dict[str, str]:
    """The stems of the weights of every part of a folder whose configurations pass."""
    return {part: _stem(part) for part in _check_configs(folder, without).parts if part not in without}


class _Part:
    """A part of a model in a folder of its own, whose configuration and headers are checked at once.

    Args:
        part: Its name.
        folder: The folder with config.json and the weights.
        variant: The variant that `weight_files` takes.
    """

    def __init__(self, part: str, folder: Path, variant: str | None = None) -> None:
        self._part, self.config = part, read_json(folder / "config.json")
        self._files = weight_files(folder, _stem(part), variant)
        shapes = read_shapes(*self._files)
        found, expected = current_names(part, shapes), _shapes_of(part, json.dumps(self.config))
        checks.check_shapes(part, expected, found)
        read = {*expected, *scale_names(found)}
        self.notes = checks.unread_note(self._files[0], checks.unread(found, read))

    def load(self, dtype: torch.dtype) -> nn.Module:
        """Return the module."""
        mapped = read_tensors(self._files)
        tensors = current_names(self._part, unscaled(mapped, dtype))
        return _build(self._part, self.config, tensors, dtype, mapped.drop_pages)


def _assemble(
    family: Family,
    folder: Path,
    modules: Mapping[str, nn.Module],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The pipeline of modules, with the tokenizers and the scheduler of a folder."""
    import diffusers

    index = read_json(folder / "model_index.json")
    kind = getattr(diffusers, index["scheduler"][1])
    scheduler = _load_scheduler(kind, folder / "scheduler")
    if settings:
        scheduler = scheduler.from_config(scheduler.config, **settings)
    pipeline = getattr(diffusers, family.pipelines[0])
    options = {**family.options, **{name: bool(index[name]) for name in family.told if name in index}}
    pipe = pipeline(
        **{part: modules.get(part) for part in family.parts},
        **{name: _load_tokenizer(folder / name) for name in family.tokenizers},
        scheduler=scheduler,
        **options,
    )
    pipe.family = family
    return pipe


def _load_scheduler(kind: Any, folder: Path) -> Any:
    try:
        return kind.from_pretrained(str(folder))
    except (NotImplementedError, ValueError, TypeError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"the configuration in {folder} cannot be used ({why:.120}); correct it") from error


def _load_vae(
    path: Path, dtype: torch.dtype, family: Family, variant: str | None = None
) -> tuple[nn.Module, tuple[str, ...]]:
    """An autoencoder, and notes on it: from a folder of its own or a model's, or from one file of SD's shapes."""
    if path.is_dir():
        folder = path / "vae" if (path / "vae").is_dir() else path
        config = read_json(folder / "config.json")
        checks.check_config("vae", config)
        checks.check_vae(config, family)
        found = _Part("vae", folder, variant)
        return found.load(_dtype(family, "vae", config, dtype)), found.notes
    if problem := checks.pickled(path):
        raise problem
    if not path.is_file():
        raise ModelError(f"vae must be a folder or a .safetensors file, got {path}: no such file")
    files, beside = parts_of(path), config_beside(path, "AutoencoderKL")
    shapes, config = (
        read_shapes(*files),
        read_json(family.configs / "vae" / "config.json") if beside is None else beside,
    )
    checks.check_config("vae", config)
    checks.check_vae(config, family)
    checks.check_vae_file(path, shapes)
    change = partial(current_names, "vae") if checks.is_converted_vae(shapes) else partial(_converted_vae, config)
    traced, expected = change(trace(shapes)), _shapes_of("vae", json.dumps(config))
    checks.check_shapes("vae", expected, {name: tuple(tensor.shape) for name, tensor in traced.items()})
    unread = checks.unread(shapes, origins(traced, expected) | scale_names(shapes))
    model = any(name.startswith("model.diffusion_model.") for name in shapes)  # whose VAE alone is asked for
    notes = () if model else checks.unread_note(path, unread)
    mapped, dtype = read_tensors(files), _dtype(family, "vae", config, dtype)
    return _build("vae", config, change(unscaled(mapped, dtype)), dtype, mapped.drop_pages), notes


def _converted_vae(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return converted("vae", tensors, config)


def _load_preview_vae(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """An `AutoencoderTiny` with 4 latent channels and a factor of 8."""
    if not folder.is_dir():
        raise ModelError(f"preview_vae must be a folder with an AutoencoderTiny, got {folder}: no such folder")
    checks.check_tiny_vae(read_json(folder / "config.json"))
    model: Any = _Part("preview_vae", folder).load(dtype)
    return model.to(device, memory_format=torch.channels_last)


def _check_configs(folder: Path, without: Collection[str] = ()) -> Family:
    """Return the family of a folder whose configurations pass."""
    family = checks.check_pipeline(folder, without)
    configs = {part: read_json(folder / part / "config.json") for part in family.parts if part not in without}
    for part, config in configs.items():
        checks.check_config(part, config)
    checks.check_unet(configs["unet"], family)
    if "vae" in configs:
        checks.check_vae(configs["vae"], family)
    checks.check_fit(configs["unet"], [configs[part] for part in family.encoders])
    read_json(folder / "scheduler" / "scheduler_config.json")
    return family


_LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"
"""Transformers' name of its warning, which it gives once a tokenizer."""


def _load_tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    options = {}
    if folder.is_relative_to(families.CONFIGS) and not folder.is_dir():  # CLIP's, which OpenCLIP pads by another token
        pads = folder in (SD2.configs / "tokenizer", SDXL.configs / "tokenizer_2")
        folder, options = SD1.configs / "tokenizer", {"pad_token": "!"} if pads else {}
    if not (folder / "tokenizer.json").is_file():
        check_vocabulary(folder)
    try:
        tokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the tokenizer in {folder} is damaged; copy or download the folder again") from error
    tokenizer.deprecation_warnings[_LENGTH_WARNING] = True  # as if already given: results have a note of their own
    return tokenizer


def _expected(part: str, folder: Path) -> Shapes:
    """Names and shapes of the tensors of a part's configuration."""
    return _shapes_of(part, json.dumps(read_json(folder / part / "config.json")))


@lru_cache(maxsize=16)
def _shapes_of(part: str, config: str) -> Shapes:
    """The same for a configuration's JSON, from a model on the meta device."""
    try:
        with torch.device("meta"):
            module = _module(part, json.loads(config))
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ModelError(f"the {part}'s config.json builds no model ({why}); download the folder again") from error
    return current_names(part, {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()})


def _module(part: str, config: Mapping[str, Any]) -> nn.Module:
    import diffusers
    import transformers

    if part.startswith("text_encoder"):
        text_config = transformers.CLIPTextConfig.from_dict(dict(config))
        text_encoder: nn.Module = getattr(transformers, checks.CLASSES[part])(text_config)
        return text_encoder
    module: nn.Module = getattr(diffusers, checks.CLASSES[part]).from_config(dict(config))
    return module


def _build(
    part: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    copied: Callable[[], None],
) -> nn.Module:
    return build(part, lambda: _module(part, config), tensors, dtype, copied)


def _check_finite(pipe: Any, dtype: torch.dtype) -> None:
    again = "get the file again" + (", or use bf16 or fp32" if dtype is torch.float16 else "")  # which hold more
    for part in (*pipe.family.parts, "preview_vae"):
        module = getattr(pipe, part, None)
        for name, weights in module.named_parameters() if module is not None else ():
            # one pass without a copy; a sum may overflow where every weight is fine, so only then look closely
            if not weights.sum(dtype=torch.float32).isfinite() and not weights.isfinite().all():
                raise NumericsError(f"the {part}'s {name} holds NaN or infinity; {again}")


def _place(pipe: Any, device: torch.device) -> Any:
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.family.parts:
        module: nn.Module = getattr(pipe, part)
        module.eval().requires_grad_(False)
    for convolutional in (pipe.unet, pipe.vae):
        convolutional.to(memory_format=torch.channels_last)
    stabilise(pipe.vae)
    return pipe.to(device)


@contextmanager
def quiet_loaders() -> Iterator[None]:
    """Switch off the loaders' progress bars and warnings in the enclosed code."""
    levels = {}
    for library in ("transformers", "diffusers"):  # in this order: diffusers' import makes transformers warn
        log = import_module(f"{library}.utils.logging")
        levels[log] = log.get_verbosity()
        log.set_verbosity_error()
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log, level in levels.items():
            log.set_verbosity(level)
            log.enable_progress_bar()
