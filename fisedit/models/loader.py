"""Loads a model, after every check that needs no weights: a path or a name -> diffusers' own StableDiffusionPipeline.

Knows files, configurations and diffusers' loaders; knows nothing of editing. No code from a model is ever run: only
classes named here are built, and only safetensors are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fisedit.errors import ModelError, NumericsError
from fisedit.models import validation as checks
from fisedit.models.device import choose_device, choose_dtype
from fisedit.models.hub import TEXTS, bring, fetch
from fisedit.models.paths import demo_folder, locate
from fisedit.models.weight_files import Shapes, check_vocabulary, read_json, read_shapes, weights_file

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

__all__ = ["demo_folder", "load", "quiet", "texts", "tokenizer"]

_SD15 = Path(__file__).parent / "configs" / "sd15"
_STEMS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}
_RENAMED = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""Names that an autoencoder's attention had in older files; diffusers reads both."""


def load(
    model: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    local_files_only: bool = False,
) -> StableDiffusionPipeline:
    """Load a Stable Diffusion 1.x or 2.x pipeline, checked, on its device, convolutions laid out channels-last.

    Args:
        model: "demo", a diffusers folder, a hub id such as "owner/name", or a .safetensors file (1.x).
        device: None takes CUDA where there is some, else the CPU.
        dtype: "fp32", "bf16", "fp16" or torch's; None as in `devices.choose_dtype`.
        local_files_only: never reach for the network.

    Raises:
        ModelError: the model is missing, damaged, unsafe to load or of another architecture.
        NumericsError: its weights hold NaN or infinity.
        InputError: the device or dtype cannot be used here.
    """
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    path = locate(model)
    with quiet():
        if path is None:
            pipe = _load_folder(fetch(str(model), _STEMS, _check_texts, local_files_only=local_files_only), precision)
        else:
            pipe = (_load_file if path.is_file() else _load_folder)(path, precision)
    _check_finite(pipe)
    return _place(pipe, where)


def texts(model: str | Path, *, local_files_only: bool = False) -> Path:
    """The folder with a model's configurations and tokenizer, checked; no weights are read or brought.

    Raises:
        ModelError: as in `load`, as far as configurations and headers tell.
    """
    path = locate(model)
    if path is not None and path.is_file():
        if refusal := checks.pickled(path):
            raise refusal
        checks.check_single_file(path, read_shapes(path))
        return _SD15
    folder = bring(str(model), TEXTS, local_files_only=local_files_only) if path is None else path
    _check_texts(folder)
    return folder


def tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder from `texts`. Raises ModelError for a damaged one."""
    with quiet():
        return _load_tokenizer(folder / "tokenizer")


def _load_file(path: Path, dtype: torch.dtype) -> StableDiffusionPipeline:
    from diffusers import StableDiffusionPipeline

    if refusal := checks.pickled(path):
        raise refusal
    shapes = read_shapes(path)
    checks.check_single_file(path, shapes)
    for part in checks.MODULES:
        checks.check_shapes(part, _expected(part, _SD15), _converted(part, shapes))
    return StableDiffusionPipeline.from_single_file(
        str(path), config=str(_SD15), torch_dtype=dtype, local_files_only=True, safety_checker=None
    )


def _converted(part: str, shapes: Shapes) -> Shapes:
    """A single file's tensors of one part under diffusers' names; diffusers' own converters run on empty tensors."""
    from diffusers.loaders import single_file_utils as ldm

    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    convert = {
        "unet": ldm.convert_ldm_unet_checkpoint,
        "vae": ldm.convert_ldm_vae_checkpoint,
        "text_encoder": lambda checkpoint, config: ldm.convert_ldm_clip_checkpoint(checkpoint),
    }[part]
    try:
        tensors = convert(empty, config=read_json(_SD15 / part / "config.json"))
    except (KeyError, IndexError) as error:
        raise ModelError(f"the {part}'s weights are not complete (no {error}); download the model again") from error
    return _normalised(part, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def _load_folder(folder: Path, dtype: torch.dtype) -> StableDiffusionPipeline:
    import diffusers
    import transformers

    index = _check_texts(folder)
    files = {part: weights_file(folder / part, stem) for part, stem in _STEMS.items()}
    for part, file in files.items():
        checks.check_shapes(part, _expected(part, folder), _normalised(part, read_shapes(file)))
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
    return diffusers.StableDiffusionPipeline(
        **modules,
        tokenizer=_load_tokenizer(folder / "tokenizer"),
        scheduler=getattr(diffusers, index["scheduler"][1]).from_pretrained(str(folder / "scheduler")),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _check_texts(folder: Path) -> dict[str, Any]:
    """Check all that a folder's configurations tell; returns its model_index."""
    checks.check_pipeline(folder)
    configs = {part: read_json(folder / part / "config.json") for part in checks.MODULES}
    for part, config in configs.items():
        checks.check_config(part, config)
    checks.check_unet(configs["unet"])
    checks.check_vae(configs["vae"])
    checks.check_fit(configs["unet"], configs["text_encoder"])
    read_json(folder / "scheduler" / "scheduler_config.json")
    return read_json(folder / "model_index.json")


def _load_tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    if not (folder / "tokenizer.json").is_file():
        check_vocabulary(folder)
    try:
        return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the tokenizer in {folder} is damaged; copy or download the folder again") from error


def _expected(part: str, folder: Path) -> Shapes:
    """Names and shapes that a part's configuration asks for, from a model without memory."""
    import diffusers
    import transformers

    config = read_json(folder / part / "config.json")
    try:
        with torch.device("meta"):
            if part == "text_encoder":
                module = transformers.CLIPTextModel(transformers.CLIPTextConfig.from_dict(config))
            else:
                module = getattr(diffusers, checks.MODULES[part][1]).from_config(config)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ModelError(f"the {part}'s config.json builds no model ({why}); download the folder again") from error
    return _normalised(part, {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()})


def _normalised(part: str, shapes: Shapes) -> Shapes:
    """Shapes under one spelling of their names, whichever release wrote them."""
    if part == "text_encoder":
        plain = {name.removeprefix("text_model."): shape for name, shape in shapes.items()}
        return {name: shape for name, shape in plain.items() if name != "embeddings.position_ids"}
    return {_renamed(name): shape for name, shape in shapes.items()} if part == "vae" else shapes


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
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
    return pipe.to(device)


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back the loaders' progress bars and warnings, which no one can act on."""
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
