"""Reading and writing reference adapters: published folders, single files, the hub, and our own.

A file is recognised by the class that its configuration names, else by its tensors' names, and checked before a weight
is read. Nothing is unpickled, and no code that comes with an adapter is run. The families are those of HelloMeme
(arXiv 2410.22901). Knows files; `row_column` knows what the blocks compute.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fisedit.adapters.insertion_points import insertion_points
from fisedit.adapters.row_column.attention import RowColumnAdapter
from fisedit.adapters.row_column.full_attention import FullAttentionAdapter
from fisedit.adapters.row_column.variants import (
    EXPECTED,
    EXPERIMENTAL_FAMILIES,
    FAMILIES,
    AdapterFamily,
    class_name_of,
    family_of,
    indices,
    is_unused_tensor,
    module_name,
)
from fisedit.errors import AdapterError, ModelError, as_text
from fisedit.models import paths
from fisedit.models.conversion import check_finite
from fisedit.models.families.conditioning import check_reads_text_alone
from fisedit.models.paths import DEMO_ADAPTERS, expand_home
from fisedit.models.validation import pickled
from fisedit.models.weight_files import is_safetensors, read_json, read_shapes, weights_file
from fisedit.storage.files import write_bytes, write_json

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.models.weight_files import Shapes

STEM = "diffusion_pytorch_model"


def load_adapter(source: str | Path, *, local_files_only: bool = False) -> RowColumnAdapter:
    """Load a reference adapter, checked, in the precision of its file.

    Args:
        source: a folder with config.json and weights, a .safetensors file, a hub id such as "songkey/hm3_reference", or
            "demo-look", which ships with the demo model.
        local_files_only: never reach for the network.

    Raises:
        AdapterError: it is missing, damaged, unsafe to load or of another architecture.
        NumericsError: its weights hold NaN or infinity.
    """
    try:
        return _load(_local_path(source, local_files_only=local_files_only))
    except ModelError as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(str(error)) from error


def save_adapter(adapter: RowColumnAdapter, path: str | Path) -> None:
    """Write an adapter, whole or not at all.

    Args:
        adapter: to write.
        path: a folder, laid out as the published ones, or a file that ends in .safetensors.
    """
    from safetensors.torch import save

    path, config = Path(path), {"_class_name": adapter.family.kind, **adapter.config}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.state_dict().items()}
    single = is_safetensors(path)
    described = {"format": "pt"} | ({"config": json.dumps(config)} if single else {})
    write_bytes(save(tensors, described), path if single else path / f"{STEM}.safetensors")
    if not single:
        write_json(config, path / "config.json")


def fresh_adapter(unet: UNet2DConditionModel, family: str = "v3", heads: int = 8) -> RowColumnAdapter:
    """Make an adapter for a UNet that changes nothing yet.

    Args:
        unet: The UNet that the adapter is for.
        family: a name of `FAMILIES` or `EXPERIMENTAL_FAMILIES`.
        heads: The number of heads of every attention.

    Raises:
        AdapterError: no such family, or heads that do not divide its channels.
    """
    families = FAMILIES | EXPERIMENTAL_FAMILIES
    if family not in families:
        raise AdapterError(f"family must be one of {', '.join(families)}, got {family!r}")
    check_reads_text_alone(unet, "a reference adapter")
    points, chosen = insertion_points(unet), families[family]
    ups = len(unet.up_blocks)
    channels = {name: points[name].channels for name in chosen.insertion_points(ups)}
    config: dict[str, Any] = {"num_attention_heads": heads, "cross_attention_dim": unet.config.cross_attention_dim}
    if chosen.kind == "HMReferenceAdapter":
        config |= {"block_out_channels": list(unet.config.block_out_channels), "version": family}
        config |= {name: list(unet.config[name]) for name in ("down_block_types", "up_block_types")}
    else:
        config["block_down_channels"] = [points[f"down_{i}"].channels for i in range(ups)]
        config["block_up_channels"] = [points[f"up_{i}"].channels for i in range(ups)]
    return _built(chosen, channels, config)


def check_fit(adapter: RowColumnAdapter, unet: UNet2DConditionModel) -> None:
    """Check that an adapter was made for a UNet of this shape.

    Args:
        adapter: to check.
        unet: The UNet that the adapter would change.

    Raises:
        AdapterError: names the first insertion point where it was not.
    """
    check_reads_text_alone(unet, "a reference adapter")
    found = insertion_points(unet)
    expected = adapter.family.insertion_points(len(unet.up_blocks))
    if set(expected) != set(adapter.channels):
        ups = sum(name.startswith("up_") for name in adapter.channels) + adapter.family.first_up
        raise AdapterError(
            f"the adapter must be for a UNet of {len(unet.up_blocks)} levels, got one for {ups}; "
            "load the model that it was trained for, or a derivative"
        )
    for name, channels in adapter.channels.items():
        own = found[name].channels if name in found else 0
        if own != channels:
            raise AdapterError(
                f"the adapter must have {own} channels at {name}, got {channels}; "
                "load the model that it was trained for, or a derivative"
            )
    width, unet_width = text_width(adapter), unet.config.cross_attention_dim
    if width not in (None, unet_width):
        raise AdapterError(
            f"the adapter is for a model that reads text of width {width}, got {unet_width}; "
            "load the model that it was trained for, or a derivative (Stable Diffusion 1.x has 768)"
        )


def text_width(adapter: RowColumnAdapter) -> int | None:
    """Width of the text that an adapter's base reads: as configured, else SD 1.x's by its channels, else None."""
    described = adapter.config.get("cross_attention_dim")
    return described if isinstance(described, int) else 768 if max(adapter.channels.values()) == 1280 else None


def identity(adapter: RowColumnAdapter) -> str:
    """16 hexadecimal digits of a SHA-256 of an adapter's family and weights."""
    whole = hashlib.sha256(adapter.family.name.encode())
    for name, tensor in sorted(adapter.state_dict().items()):
        whole.update(name.encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return whole.hexdigest()[:16]


def _local_path(source: str | Path, *, local_files_only: bool) -> Path:
    path = expand_home(source)
    if source not in DEMO_ADAPTERS and not path.exists() and (problem := pickled(path)):
        raise problem
    path = paths.adapter_path(source, local_files_only=local_files_only, is_wanted=_may_be_one)
    if not path.exists():
        shipped = ", ".join(f'"{name}"' for name in DEMO_ADAPTERS)
        raise AdapterError(
            f"adapter must be {shipped}, a folder, a .safetensors file or a hub id owner/name, got {source} (not there)"
        )
    return path


def _may_be_one(folder: Path) -> bool:
    """Return whether a folder's configuration, if any, names the class of a reference adapter. Raises AdapterError."""
    if (folder / "config.json").is_file():
        class_name_of(read_json(folder / "config.json"))
    return True


def _load(path: Path) -> RowColumnAdapter:
    from safetensors.torch import load_file

    if path.is_dir():
        config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        class_name_of(config)
        file = weights_file(path, STEM)
    else:
        if problem := pickled(path):
            raise problem
        file, config = path, {}
    shapes = read_shapes(file)
    config = config or _file_config(file)
    family = family_of(config, shapes, path)
    adapter = _empty(family, shapes, config, path)
    living = adapter.state_dict()
    weights = load_file(file)
    check_finite("the adapter", {name: weights[name] for name in living})
    adapter.load_state_dict({name: weights[name] for name in living}, assign=True)
    return adapter.eval().requires_grad_(False)


def _file_config(file: Path) -> dict[str, Any]:
    """The configuration in the metadata of a single file of ours."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        described = (opened.metadata() or {}).get("config", "{}")
    try:
        config = json.loads(described)
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _empty(family: AdapterFamily, shapes: Shapes, config: Mapping[str, Any], path: Path) -> RowColumnAdapter:
    """The family's adapter, without memory, whose names and shapes are those of the file."""
    ups = max(indices(shapes, "up"), default=-1) + 1 + family.first_up
    channels = {}
    for point in family.insertion_points(ups):
        norm = f"{module_name(point, family)}{'.attn' if family.two_stage else ''}.norm.weight"
        if norm not in shapes:
            raise AdapterError(f"the adapter lacks {norm} ({path}); download it again")
        channels[point] = shapes[norm][0]
    with torch.device("meta"):
        adapter = _built(family, channels, config)
    expected = {name: tuple(tensor.shape) for name, tensor in adapter.state_dict().items()}
    missing = [name for name in expected if name not in shapes]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise AdapterError(f"the adapter lacks {missing[0]}{more} ({path}); download it again")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise AdapterError(f"the adapter's {name} must be {shape}, got {shapes[name]} ({path})")
    unexpected = [name for name in shapes if name not in expected and not is_unused_tensor(name, family, ups)]
    if unexpected:
        raise AdapterError(f"adapter must be {EXPECTED} of family {family.name}, which has no {unexpected[0]} ({path})")
    return adapter


def _built(family: AdapterFamily, channels: Mapping[str, int], config: Mapping[str, Any]) -> RowColumnAdapter:
    heads = config.get("num_attention_heads") or 8
    num_blocks = 1 + max(int(point.partition("_")[2] or 0) for point in channels)
    if isinstance(heads, list | tuple) and len(heads) >= num_blocks:
        counts = _by_insertion_point(channels, list(heads))
    elif isinstance(heads, int):
        counts = [heads] * len(channels)
    else:
        raise AdapterError(f"num_attention_heads must be a number, or one of each block, got {as_text(heads)}")
    if any(type(n) is not int or n < 1 or c % n for n, c in zip(counts, channels.values(), strict=True)):
        raise AdapterError(
            f"num_attention_heads must divide the channels {sorted(set(channels.values()))}, got {heads}"
        )
    adapter_class = FullAttentionAdapter if family.name in EXPERIMENTAL_FAMILIES else RowColumnAdapter
    return adapter_class(family, channels, counts, {k: v for k, v in config.items() if k != "_class_name"})


def _by_insertion_point(channels: Mapping[str, int], heads: list[Any]) -> list[Any]:
    """Heads that are listed by down block, by insertion point; up blocks have them in reverse."""
    sides = [point.partition("_") for point in channels]
    at = [{"mid": -1, "down": int(i or 0), "up": -1 - int(i or 0)}[side] for side, _, i in sides]
    return [heads[i] for i in at]
