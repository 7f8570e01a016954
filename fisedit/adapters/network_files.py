"""Reading ControlNets and T2I-Adapters: folders of diffusers, and one file in its names or in those of 2023.

A file is recognised by its tensors' names, and its network is of diffusers' class with the UNet's settings. Nothing is
unpickled. Knows files; `control_net` and `t2i_adapter` know what the networks compute.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fisedit.errors import AdapterError
from fisedit.models.conversion import build, check_finite, converted, origins, scale_names, trace, unscaled
from fisedit.models.families.conditioning import reads_text_alone
from fisedit.models.validation import WHOLE_MODEL, check_shapes, unread
from fisedit.models.weight_files import config_beside, parts_of, read_json, read_shapes, read_tensors, weight_files

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel
    from torch import Tensor

    from fisedit.adapters.picture_adapter import PictureAdapter
    from fisedit.models.weight_files import Shapes

    Naming = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

_log = logging.getLogger(__name__)

CONTROL_NET, T2I_ADAPTER = "ControlNetModel", "T2IAdapter"
NETWORKS = (T2I_ADAPTER, CONTROL_NET)
"""diffusers' classes of networks that read a control picture."""

_STEM = "diffusion_pytorch_model"
_SEES = "controlnet_cond_embedding.conv_in.weight"
_SAW = ("control_model.input_hint_block.0.weight", "input_hint_block.0.weight")
_T2I = re.compile(r"(adapter\.)?(conv_in\.|body\.\d+\.(resnets|block1|block2|body|in_conv|out_conv)\b)")

_OTHERS: tuple[tuple[str, str], ...] = (
    ("lora_controlnet", "a ControlNet as a LoRA (Control-LoRA)"),
    ("lllite_", "a ControlNet-LLLite, for Stable Diffusion XL"),
    ("difference", "a ControlNet as differences from a model"),
    ("control_add_embedding.", "a ControlNet for several kinds of pictures (Union)"),
    ("controlnet_blocks.", "a ControlNet for a transformer, as Stable Diffusion 3 or Flux is"),
    ("controlnet_cond_embedding.weight", "a SparseCtrl network for clips"),
    ("style_embedding", "a T2I-Adapter for styles"),
    ("transformer_layes.", "a T2I-Adapter for styles"),
)
"""Start of a tensor's name -> the kind of a network that is not read."""

_ADDS = ("add_embedding.", "control_model.label_emb.", "label_emb.")
"""Starts of the names of tensors that read what Stable Diffusion XL adds to the time's embedding."""

_T2I_NAMES = (
    (re.compile(r"body\.(\d+)\.body\.(\d+)\."), lambda m: f"body.{m[1]}.resnets.{m[2]}."),
    (re.compile(r"body\.(\d+)\.(block\d)\."), lambda m: f"body.{int(m[1]) // 2}.resnets.{int(m[1]) % 2}.{m[2]}."),
)
"""Names of a T2I-Adapter of 2023 -> diffusers'; a block of the full kind has two layers."""


def network_kind(path: Path, shapes: Shapes) -> str | None:
    """Return the class of the network that one file holds, or None.

    Args:
        path: The file, for messages.
        shapes: Its tensors.

    Raises:
        AdapterError: It is of a kind that is not read.
    """
    if what := next((what for start, what in _OTHERS if any(name.startswith(start) for name in shapes)), None):
        raise AdapterError(f"adapter must be for Stable Diffusion 1.x, 2.x or XL and whole, got {what} ({path})")
    if _SEES in shapes or any(name in shapes for name in _SAW):
        return CONTROL_NET
    return T2I_ADAPTER if shapes and all(_T2I.match(name) for name in shapes) else None


def load_network(path: Path, kind: str, unet: UNet2DConditionModel) -> PictureAdapter:
    """Load a network of diffusers' class.

    Args:
        path: A folder with config.json and weights, or one file.
        kind: One of `NETWORKS`.
        unet: The UNet that it is for, by whose settings one file is read.

    Raises:
        ModelError: It is incomplete, or does not fit its configuration or the UNet.
    """
    from fisedit.adapters.control_net import ControlNetReader
    from fisedit.adapters.t2i_adapter import T2IAdapterReader

    files = weight_files(path, _STEM) if path.is_dir() else parts_of(path)
    shapes = read_shapes(*files)
    if any(name.startswith(_ADDS) for name in shapes) and reads_text_alone(unet):
        raise AdapterError(f"adapter must be for this model, got a ControlNet for Stable Diffusion XL ({path})")
    naming: Naming = dict if path.is_dir() else _naming(kind, unet)
    traced = naming(trace(shapes))
    found = {name: tuple(tensor.shape) for name, tensor in traced.items()}
    config = read_json(path / "config.json") if path.is_dir() else config_beside(path, kind)
    own = config is not None
    config = _CONFIGS[kind](path, found, unet) if config is None else config
    label = {CONTROL_NET: "ControlNet", T2I_ADAPTER: "T2I-Adapter"}[kind]
    expected = _expected(kind, config, path)
    advice = ("config and weights do not match", "download them again") if own else ("load one for this model",) * 2
    check_shapes(label, expected, found, *advice)
    _check_read(label, path, unread(shapes, origins(traced, expected) | scale_names(shapes)))
    read = read_tensors(files)
    tensors = naming(unscaled(read, torch.float32))
    check_finite(f"the {label}", tensors)
    network = build(label, lambda: _made(kind, config), tensors, torch.float32, read.drop_pages)
    return {T2I_ADAPTER: T2IAdapterReader, CONTROL_NET: ControlNetReader}[kind](network)


def _check_read(label: str, path: Path, names: list[str]) -> None:
    """Raise AdapterError for tensors that the network does not have; those of a model beside it are told."""
    if others := [name for name in names if not name.startswith(WHOLE_MODEL)]:
        raise AdapterError(f"{path} holds {others[0]}, which no {label} for this model has; get another file")
    if names:
        _log.warning("%s holds a whole model too, which is not read; its %s is", path.name, label)


def _made(kind: str, config: Mapping[str, Any]) -> Any:
    import diffusers

    return getattr(diffusers, kind).from_config(dict(config))


def _expected(kind: str, config: Mapping[str, Any], path: Path) -> Shapes:
    try:
        with torch.device("meta"):
            network = _made(kind, config)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise AdapterError(f"the settings of {path} build no {kind} ({why:.120}); download it again") from error
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def _naming(kind: str, unet: UNet2DConditionModel) -> Naming:
    """A change of one file's names to diffusers'."""
    if kind == CONTROL_NET:
        return lambda tensors: converted("controlnet", tensors, unet.config)
    return _t2i_named


def _t2i_named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    two_a_block = any(re.match(r"(adapter\.)?body\.\d+\.block1\.", name) for name in tensors)
    found = {}
    for name, tensor in tensors.items():
        new = name.removeprefix("adapter.")
        if two_a_block:
            new = re.sub(r"body\.(\d+)\.in_conv\.", lambda m: f"body.{int(m[1]) // 2}.in_conv.", new)
        for pattern, change in _T2I_NAMES:
            new = pattern.sub(change, new)
        found[f"adapter.{new}"] = tensor
    return found


def _control_net_config(path: Path, shapes: Shapes, unet: UNet2DConditionModel) -> dict[str, Any]:
    """The configuration of a ControlNet in one file, by the UNet's and by its own shapes."""
    from diffusers import ControlNetModel

    config = {name: unet.config[name] for name in inspect.signature(ControlNetModel).parameters if name in unet.config}
    seen = "controlnet_cond_embedding"
    widths = [shapes[name][0] for i in range(1, 99, 2) if (name := f"{seen}.blocks.{i}.weight") in shapes]
    return config | {
        "in_channels": shapes.get("conv_in.weight", (0, 4))[1],
        "conditioning_channels": shapes[f"{seen}.conv_in.weight"][1],
        "conditioning_embedding_out_channels": (shapes[f"{seen}.conv_in.weight"][0], *widths),
        "global_pool_conditions": "shuffle" in path.stem.lower(),  # as web UIs tell them: nothing in the file does
    }


def _t2i_config(path: Path, shapes: Shapes, unet: UNet2DConditionModel) -> dict[str, Any]:
    """The configuration of a T2I-Adapter in one file, by its shapes."""
    blocks = sorted({int(match[1]) for name in shapes if (match := re.match(r"adapter\.body\.(\d+)\.", name))})
    light = "adapter.body.0.out_conv.weight" in shapes
    first = "adapter.body.0.in_conv.weight" if light else "adapter.conv_in.weight"
    last = "out_conv" if light else "resnets.0.block2"
    layers = sum(re.match(r"adapter\.body\.0\.resnets\.\d+\.block1\.weight", name) is not None for name in shapes)
    try:
        inputs, channels = shapes[first][1] // 64, [shapes[f"adapter.body.{i}.{last}.weight"][0] for i in blocks]
    except (KeyError, IndexError) as error:
        raise AdapterError(f"the T2I-Adapter lacks {error} ({path}); download it again") from error
    if inputs not in (1, 3, 4, 12):
        raise AdapterError(f"a T2I-Adapter must be for Stable Diffusion, got one for another ({path})")
    if light:
        channels.pop()  # the last block repeats it
    kind, factor = "light_adapter" if light else "full_adapter", 8
    if inputs in (4, 12):
        kind, factor, inputs = "full_adapter_xl", 16, inputs // 4
    settings = {"in_channels": inputs, "channels": channels, "num_res_blocks": layers, "adapter_type": kind}
    return settings | {"downscale_factor": factor}


_CONFIGS: Mapping[str, Callable[[Path, Shapes, UNet2DConditionModel], dict[str, Any]]] = {
    CONTROL_NET: _control_net_config,
    T2I_ADAPTER: _t2i_config,
}
"""Class -> the configuration of one file."""
