"""Loads a diffusers StableDiffusionPipeline from a name or path, after every check that needs no weights.

Knows files, configurations and diffusers' loaders; knows nothing of editing. No code from a model is ever run: only
classes named here are built, and only safetensors are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fisedit.errors import ModelError, NumericsError
from fisedit.models import validation as checks
from fisedit.models.device import choose_device, choose_dtype, default_torch_state
from fisedit.models.group_norm import stabilise
from fisedit.models.paths import CONFIG_PATTERNS, demo_folder, download_files, download_model, expand_home, locate
from fisedit.models.vocabulary import read_vocabulary
from fisedit.models.weight_files import Shapes, check_vocabulary, read_json, read_shapes, weights_file

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

__all__ = ["config_folder", "demo_folder", "load", "load_tokenizer", "quiet_loaders"]

_SD15, _SD2 = (Path(__file__).parent / "configs" / family for family in ("sd15", "sd2"))
_V_PREDICTION = re.compile(r"""^\s*parameterization:\s*["']?v\b""", re.MULTILINE)
_STEMS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}
_OLD_NAMES = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""Names of an autoencoder's attention weights in older files -> today's; diffusers reads both."""


@default_torch_state()
def load(
    model: str | Path,
    *,
    vae: str | Path | None = None,
    preview_vae: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    local_files_only: bool = False,
) -> StableDiffusionPipeline:
    """Load a Stable Diffusion 1.x or 2.x pipeline, checked, on its device, convolutions laid out channels-last.

    Args:
        model: "demo", a diffusers folder, a hub id such as "owner/name", or a .safetensors file.
        vae: Another autoencoder than the model's: a folder, or a .safetensors file; None for the model's own.
        preview_vae: A folder with an `AutoencoderTiny` (TAESD), which decodes previews; None for none.
        device: Torch device; None for CUDA if available, else the CPU.
        dtype: "fp32", "bf16", "fp16" or torch's; None as in `device.choose_dtype`.
        local_files_only: Whether the network is never used.

    Raises:
        ModelError: The model is missing, damaged, unsafe to load or of another architecture.
        NumericsError: Its weights contain NaN or infinity.
        InputError: The device or dtype cannot be used here.
    """
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    path = locate(model)
    with quiet_loaders():
        if path is None:
            folder = download_model(str(model), _STEMS, _check_configs, local_files_only=local_files_only)
            pipe = _load_folder(folder, precision)
        else:
            pipe = (_load_file if path.is_file() else _load_folder)(path, precision)
        if vae is not None:
            pipe.vae = _load_vae(expand_home(vae), precision)
        if preview_vae is not None:
            pipe.preview_vae = _load_preview_vae(expand_home(preview_vae), where, precision)
    _check_finite(pipe)
    return _place(pipe, where)


def config_folder(model: str | Path, *, local_files_only: bool = False) -> Path:
    """The checked folder with a model's configurations and tokenizer; no weights are read or downloaded.

    Args:
        model: As in `load`.
        local_files_only: Whether the network is never used.

    Raises:
        ModelError: As in `load`, as far as configurations and headers show it.
    """
    path = locate(model)
    if path is not None and path.is_file():
        if problem := checks.pickled(path):
            raise problem
        shapes = read_shapes(path)
        checks.check_single_file(path, shapes)
        return _single_file_configs(shapes)
    folder = download_files(str(model), CONFIG_PATTERNS, local_files_only=local_files_only) if path is None else path
    _check_configs(folder)
    return folder


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model.

    Args:
        folder: From `config_folder`.

    Raises:
        ModelError: It is damaged.
    """
    with quiet_loaders():
        return _load_tokenizer(folder / "tokenizer")


def _load_file(path: Path, dtype: torch.dtype) -> StableDiffusionPipeline:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    if problem := checks.pickled(path):
        raise problem
    shapes = read_shapes(path)
    checks.check_single_file(path, shapes)
    folder = _single_file_configs(shapes)
    settings = _settings_beside(path, folder)
    own: Mapping[str, Mapping[str, Any]] = {"unet": {"in_channels": checks.file_inputs(shapes)}}
    for part in checks.MODULES:
        expected = _expected(part, folder, own.get(part, {}))
        checks.check_shapes(part, expected, _converted(part, shapes, folder))
    options: dict[str, Any] = {"config": str(folder), "torch_dtype": dtype, "local_files_only": True}
    pipe = StableDiffusionPipeline.from_single_file(
        str(path),
        **options,
        unet=UNet2DConditionModel.from_single_file(str(path), subfolder="unet", **own["unet"], **options),
        safety_checker=None,
        tokenizer=_load_tokenizer(folder / "tokenizer"),
    )
    if settings:
        pipe.scheduler.register_to_config(prediction_type=settings["prediction_type"])
    if "sample_size" in settings:
        pipe.unet.register_to_config(sample_size=settings["sample_size"])
    return pipe


def _single_file_configs(shapes: Shapes) -> Path:
    """The folder with the configurations of a single file's family."""
    return _SD2 if checks.is_sd2_file(shapes) else _SD15


def _settings_beside(path: Path, folder: Path) -> dict[str, Any]:
    """What a single file does not tell, from the .yaml that is published beside it; a file of 1.x may have none."""
    beside = path.with_suffix(".yaml")
    if folder == _SD15 and not beside.is_file():
        return {}
    try:
        text = beside.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if folder == _SD15:
            raise ModelError(f"{beside} cannot be read as text; remove it, or download it again") from error
        raise ModelError(
            f"one file of Stable Diffusion 2.x does not tell its prediction type; put its {beside.name} beside it, or "
            "convert it to a diffusers folder"
        ) from error
    predicts_v = bool(_V_PREDICTION.search(text))
    found = {"prediction_type": "v_prediction" if predicts_v else "epsilon"}
    return found if folder == _SD15 else found | {"sample_size": 96 if predicts_v else 64}


def _converted(part: str, shapes: Shapes, folder: Path = _SD15) -> Shapes:
    """Shapes of one part of a single file under diffusers' names, by diffusers' own converters on meta tensors."""
    from diffusers.loaders import single_file_utils as ldm

    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    config = read_json(folder / part / "config.json")
    convert = {
        "unet": partial(ldm.convert_ldm_unet_checkpoint, config=config),
        "vae": partial(ldm.convert_ldm_vae_checkpoint, config=config),
        "text_encoder": ldm.convert_ldm_clip_checkpoint,
    }[part]
    if part == "text_encoder" and checks.is_sd2_file(shapes):  # of its model, the converter reads the width alone
        width = SimpleNamespace(config=SimpleNamespace(hidden_size=config["hidden_size"]))
        convert = partial(ldm.convert_open_clip_checkpoint, width)
    try:
        tensors = convert(empty)
    except (KeyError, IndexError) as error:
        raise ModelError(f"the {part}'s weights are not complete (no {error}); download the model again") from error
    return _with_current_names(part, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def _load_folder(folder: Path, dtype: torch.dtype) -> StableDiffusionPipeline:
    import diffusers
    import transformers

    index = _check_configs(folder)
    files = {part: weights_file(folder / part, stem) for part, stem in _STEMS.items()}
    for part, file in files.items():
        checks.check_shapes(part, _expected(part, folder), _with_current_names(part, read_shapes(file)))
    libraries = {"diffusers": diffusers, "transformers": transformers}
    modules = {
        part: getattr(libraries[library], name).from_pretrained(
            str(folder / part),
            use_safetensors=True,
            local_files_only=True,
            variant="fp16" if ".fp16." in files[part].name else None,
            **{"torch_dtype" if library == "diffusers" else "dtype": dtype},
        )
        for part, (library, name) in checks.MODULES.items()
    }
    pipe = diffusers.StableDiffusionPipeline(
        **modules,
        tokenizer=_load_tokenizer(folder / "tokenizer"),
        scheduler=_load_scheduler(getattr(diffusers, index["scheduler"][1]), folder / "scheduler"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.unet.register_to_config(sample_size=checks.sample_size(pipe.unet.config))
    pipe.vocabulary = read_vocabulary(folder)
    return pipe


def _load_scheduler(kind: Any, folder: Path) -> Any:
    try:
        return kind.from_pretrained(str(folder))
    except (NotImplementedError, ValueError, TypeError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"the configuration in {folder} cannot be used ({why:.120}); correct it") from error


def _load_vae(path: Path, dtype: torch.dtype) -> Any:
    """An autoencoder from a folder of its own, from a model's folder, or from one file of Stable Diffusion's shapes."""
    from diffusers import AutoencoderKL

    if path.is_dir():
        folder = path / "vae" if (path / "vae").is_dir() else path
        config = read_json(folder / "config.json")
        checks.check_config("vae", config)
        checks.check_vae(config)
        file = weights_file(folder, _STEMS["vae"])
        checks.check_shapes("vae", _shapes_of("vae", json.dumps(config)), _with_current_names("vae", read_shapes(file)))
        variant = "fp16" if ".fp16." in file.name else None
        return AutoencoderKL.from_pretrained(
            str(folder), use_safetensors=True, local_files_only=True, variant=variant, torch_dtype=dtype
        )
    if problem := checks.pickled(path):
        raise problem
    if not path.is_file():
        raise ModelError(f"vae must be a folder or a .safetensors file, got {path}: no such file")
    shapes = read_shapes(path)
    if not any(name.endswith("encoder.conv_in.weight") for name in shapes):
        raise ModelError(f"{path} holds no autoencoder; give another file, or a model's folder")
    if "encoder.down_blocks.0.resnets.0.conv1.weight" in shapes:
        checks.check_shapes("vae", _expected("vae", _SD15), _with_current_names("vae", shapes))
    else:
        checks.check_shapes("vae", _expected("vae", _SD15), _converted("vae", shapes))
    return AutoencoderKL.from_single_file(
        str(path), config=str(_SD15), subfolder="vae", torch_dtype=dtype, local_files_only=True
    )


def _load_preview_vae(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """An `AutoencoderTiny` with 4 latent channels and a factor of 8."""
    from diffusers import AutoencoderTiny

    if not folder.is_dir():
        raise ModelError(f"preview_vae must be a folder with an AutoencoderTiny, got {folder}: no such folder")
    config = read_json(folder / "config.json")
    checks.check_tiny_vae(config)
    expected = _shapes_of("preview_vae", json.dumps(config))
    checks.check_shapes("preview_vae", expected, read_shapes(weights_file(folder, _STEMS["vae"])))
    model = AutoencoderTiny.from_pretrained(str(folder), use_safetensors=True, local_files_only=True, torch_dtype=dtype)
    return model.eval().requires_grad_(False).to(device, memory_format=torch.channels_last)


def _check_configs(folder: Path) -> dict[str, Any]:
    """Check a folder's configurations; returns its model_index."""
    checks.check_pipeline(folder)
    configs = {part: read_json(folder / part / "config.json") for part in checks.MODULES}
    for part, config in configs.items():
        checks.check_config(part, config)
    checks.check_unet(configs["unet"])
    checks.check_vae(configs["vae"])
    checks.check_fit(configs["unet"], configs["text_encoder"])
    read_json(folder / "scheduler" / "scheduler_config.json")
    return read_json(folder / "model_index.json")


_LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"
"""Transformers' name of its warning, which it gives once a tokenizer."""


def _load_tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    options = {}
    if folder == _SD2 / "tokenizer":  # CLIP's own, padded with another token
        folder, options = _SD15 / "tokenizer", {"pad_token": "!"}
    if not (folder / "tokenizer.json").is_file():
        check_vocabulary(folder)
    try:
        tokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the tokenizer in {folder} is damaged; copy or download the folder again") from error
    tokenizer.deprecation_warnings[_LENGTH_WARNING] = True  # as if already given: results have a note of their own
    return tokenizer


def _expected(part: str, folder: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Shapes:
    """Names and shapes of the tensors of a part's configuration, some settings of which are others."""
    return _shapes_of(part, json.dumps({**read_json(folder / part / "config.json"), **changes}))


@lru_cache(maxsize=16)
def _shapes_of(part: str, config: str) -> Shapes:
    """The same for a configuration's JSON, from a model on the meta device."""
    import diffusers
    import transformers

    try:
        with torch.device("meta"):
            if part == "text_encoder":
                module = transformers.CLIPTextModel(transformers.CLIPTextConfig.from_dict(json.loads(config)))
            else:
                module = getattr(diffusers, checks.CLASSES[part]).from_config(json.loads(config))
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ModelError(f"the {part}'s config.json builds no model ({why}); download the folder again") from error
    return _with_current_names(part, {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()})


def _with_current_names(part: str, shapes: Shapes) -> Shapes:
    """Shapes under the names of today's releases."""
    if part == "text_encoder":
        plain = {name.removeprefix("text_model."): shape for name, shape in shapes.items()}
        return {name: shape for name, shape in plain.items() if name != "embeddings.position_ids"}
    return {_current_name(name): shape for name, shape in shapes.items()} if part == "vae" else shapes


def _current_name(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def _check_finite(pipe: StableDiffusionPipeline) -> None:
    for part in checks.MODULES:
        for name, weights in getattr(pipe, part).named_parameters():
            # one pass without a copy; a sum may overflow where every weight is fine, so only then look closely
            if not weights.sum(dtype=torch.float32).isfinite() and not weights.isfinite().all():
                raise NumericsError(f"the {part}'s {name} holds NaN or infinity; download the model again or use fp32")


def _place(pipe: StableDiffusionPipeline, device: torch.device) -> StableDiffusionPipeline:
    pipe.set_progress_bar_config(disable=True)
    for part in checks.MODULES:
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
