"""Tensors of a model's part under today's names, and the module that holds them.

The names of single files are changed by diffusers' own converters. Knows names and shapes; opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fisedit.errors import ModelError, NumericsError
from fisedit.models.weight_files import Shapes

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

_OLD_NAMES = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""Names of an autoencoder's attention weights in older files -> today's."""

_TEXT_MODEL = "text_model."
_SCALE = ".scale_weight"


class _Named(Tensor):
    """A tensor that knows the name of the tensor it was made of."""

    origin: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Collection[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(made, cls):
            made.origin = next(one.origin for one in args if isinstance(one, cls))
        return made


def current_names(part: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return tensors or shapes of a part under the names of today's releases.

    Args:
        part: The component.
        tensors: By their names in a folder's file.

    Raises:
        ModelError: Two names become one.
    """
    named = {_current_name(part, name): tensor for name, tensor in tensors.items()}
    if len(named) < len(tensors):
        twice = next(name for name in tensors if (new := _current_name(part, name)) != name and new in tensors)
        raise ModelError(f"the {part}'s weights have {twice} under two names; get the file that it was made from")
    return named


def _current_name(part: str, name: str) -> str:
    if part.startswith("text_encoder"):
        return name.removeprefix(_TEXT_MODEL)
    for old, new in _OLD_NAMES.items() if part == "vae" else ():
        name = name.replace(old, new)
    return name


def converted(
    part: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], open_clip: str = ""
) -> dict[str, Tensor]:
    """Return a part's tensors of a single file under today's names.

    Args:
        part: The component.
        tensors: All tensors of the file.
        config: The component's configuration.
        open_clip: The prefix of the tensors of a text encoder that is OpenCLIP's; "" for others.

    Raises:
        ModelError: A tensor is missing that others need.
    """
    from diffusers.loaders import single_file_utils as ldm

    convert: Mapping[str, Callable[..., dict[str, Tensor]]] = {
        "unet": partial(ldm.convert_ldm_unet_checkpoint, config=config),
        "vae": partial(ldm.convert_ldm_vae_checkpoint, config=config),
        "text_encoder": ldm.convert_ldm_clip_checkpoint,
        "controlnet": partial(ldm.convert_controlnet_checkpoint, config=config),
    }
    if open_clip:  # the converter reads the width alone of the model
        width = SimpleNamespace(config=SimpleNamespace(hidden_size=config["hidden_size"]))
        change: Callable[..., dict[str, Tensor]] = partial(ldm.convert_open_clip_checkpoint, width, prefix=open_clip)
    else:
        change = convert[part]
    try:
        found = change(dict(tensors))
    except (KeyError, IndexError) as error:
        raise ModelError(f"the {part}'s weights are not complete (no {error}); download the model again") from error
    return current_names(part, {name: tensor for name, tensor in found.items() if tensor is not None})


def trace(shapes: Shapes) -> dict[str, Tensor]:
    """Return tensors without memory, of which `origins` tells after a conversion by what names they were given.

    Args:
        shapes: By the names of a file.
    """
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, device="meta").as_subclass(_Named)
        tensor.origin = name
        found[name] = tensor
    return found


def origins(tensors: Mapping[str, Tensor], expected: Collection[str]) -> set[str]:
    """Return the names in the file of those traced tensors that a module reads.

    Args:
        tensors: What a conversion made of traced ones.
        expected: Names that the module has.
    """
    return {tensor.origin for name, tensor in tensors.items() if name in expected and isinstance(tensor, _Named)}


def scale_names(shapes: Shapes) -> set[str]:
    """Return the names of the factors of scaled fp8 weights.

    Args:
        shapes: By the names of a file.
    """
    return {name for name in shapes if name.endswith(_SCALE) and name.removesuffix(_SCALE) + ".weight" in shapes}


def unscaled(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a file's tensors, those of scaled fp8 times their factors, which ComfyUI writes.

    Args:
        tensors: The tensors by the names of the file.
        dtype: The dtype of those that had a factor.

    Raises:
        ModelError: A factor does not fit its weight.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(_SCALE)]:
        weight_name = name.removesuffix(_SCALE) + ".weight"
        if weight_name not in found:
            continue
        scale, weight = found.pop(name).float().flatten(), found[weight_name]
        if len(scale) not in (1, len(weight)):
            raise ModelError(f"{name} must be one number or {len(weight)}, got {len(scale)}; get the file again")
        found[weight_name] = (weight.float() * scale.view(-1, *[1] * (weight.ndim - 1))).to(dtype)
    return found


def build(
    part: str,
    make: Callable[[], M],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    copied: Callable[[], None] | None = None,
) -> M:
    """Build a module of diffusers or transformers with copies of a file's tensors, those of convs channels_last.

    Args:
        part: Its name in messages.
        make: Returns the module with weights of its own, which are given no memory.
        tensors: The tensors under today's names; `validation.check_shapes` has checked them.
        dtype: The dtype of the module; None for the file's.
        copied: Called after every copy, so that what was read can be released before the next.

    Raises:
        ModelError: A weight is of whole numbers, as quantised ones are.
    """
    from accelerate import init_empty_weights

    with init_empty_weights():
        module = make()
    own = {name: tensors[name.removeprefix(_TEXT_MODEL)] for name in module.state_dict()}
    if whole := next((name for name, tensor in own.items() if not tensor.is_floating_point()), None):
        kind = str(own[whole].dtype).removeprefix("torch.")
        raise ModelError(f"the {part}'s {whole} must be floating point, got {kind}; get a file that is not quantised")
    for name, tensor in own.items():
        own[name] = _copy(tensor, dtype or tensor.dtype)
        if copied is not None:
            copied()
    module.load_state_dict(own, assign=True)
    return module.eval().requires_grad_(False)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of its own, as those of a file are pages of it and would change with it; channels_last if of a conv."""
    is_laid_out = tensor.ndim != 4 or tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.to(dtype, copy=True, memory_format=torch.preserve_format if is_laid_out else torch.channels_last)


def check_finite(whose: str, tensors: Mapping[str, Tensor]) -> None:
    """Check that a file's tensors are numbers.

    Args:
        whose: Their owner in messages.
        tensors: By their names.

    Raises:
        NumericsError: One holds NaN or infinity.
    """
    for name, tensor in tensors.items():
        numbers = tensor.float() if tensor.element_size() == 1 else tensor  # of fp8, torch has no isfinite
        if tensor.is_floating_point() and not numbers.isfinite().all():
            raise NumericsError(f"{whose}'s {name} holds NaN or infinity; get the file again")
