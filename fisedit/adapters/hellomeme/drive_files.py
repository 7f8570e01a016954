"""Reading HelloMeme's control networks: published folders, single files and the hub.

A file is recognised by the class that its configuration names, else by its tensors' names, and checked before a weight
is read. Families v4 and v5 consist of a base and a projection for Stable Diffusion 1.5. The projection lies in the
folder beside the base's, "proj" in place of "base". Nothing is unpickled. Knows files; `drive_networks` knows what they
compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from fisedit.adapters.hellomeme.drive_adapter import DriveReader
from fisedit.adapters.hellomeme.drive_networks import DriveBase, DriveNetwork, DriveProjection
from fisedit.errors import AdapterError
from fisedit.models import paths
from fisedit.models.conversion import check_finite
from fisedit.models.weight_files import read_json, read_shapes, weights_file

if TYPE_CHECKING:
    from fisedit.models.conversion import check_finite
from fisedit.models.weight_files import Shapes

M = TypeVar("M", bound=nn.Module)

_DOWN_BLOCKS = 3
"""The number of Stable Diffusion 1.5's down blocks that halve their maps; networks with more reach the up blocks."""

NETWORKS = (
    *("HMControlNet", "HMControlNet2", "HMV2ControlNet", "HMV2ControlNet2", "HMV3ControlNet"),
    *("HMControlNetBase", "HM5ControlNetBase"),
)
PROJECTIONS = ("HM4SD15ControlProj", "HM5SD15ControlProj")
"""Classes that published configurations name."""

_STEM = "diffusion_pytorch_model"
_NETWORK, _BASE, _PROJECTION = "blocks_down.", "ctrl_attn.", "map1280_to_1280"
"""Starts of tensors' names by which files without a configuration are recognised."""


def is_control_network(kind: object, shapes: Callable[[], Shapes]) -> bool:
    """Return whether a folder or file holds a control network, or a projection of one.

    Args:
        kind: class that a configuration names, or None.
        shapes: The shapes of the tensors, asked for where there is no class.
    """
    if kind is not None:
        return kind in NETWORKS + PROJECTIONS
    return any(name.startswith((_NETWORK, _BASE, _PROJECTION)) for name in shapes())


def load_control_network(source: str | Path, *, local_files_only: bool = False) -> DriveReader:
    """Load a control network, checked, in the precision of its file.

    Args:
        source: a folder, a .safetensors file, or a hub id such as "songkey/hm_control".
        local_files_only: never reach for the network.

    Raises:
        AdapterError: it is damaged, of another architecture, or lacks its projection.
        NumericsError: its weights hold NaN or infinity.
    """
    file = _file(paths.adapter_path(source, local_files_only=local_files_only))
    shapes = read_shapes(file)
    if any(name.startswith(_PROJECTION) for name in shapes):
        raise AdapterError(f"{source} projects a control network's maps; load the network's base, it is found beside")
    if not any(name.startswith(_BASE) for name in shapes):
        return DriveReader(filled(_network(shapes, file), file, shapes))
    base = filled(_base(shapes), file, shapes)
    beside = projection_of(source)
    if beside is None:
        raise AdapterError(f"the control network {source} needs its projection; call the folders ..._base and ..._proj")
    path = paths.adapter_path(beside, local_files_only=local_files_only)
    if not path.exists():
        raise AdapterError(f"the control network {source} needs its projection, got none at {beside}; put it there")
    file = _file(path)
    shapes = read_shapes(file)
    with torch.device("meta"):
        projection = DriveProjection(attends=f"{_PROJECTION}.proj.weight" in shapes)
    return DriveReader(base, filled(projection, file, shapes))


def _file(path: Path) -> Path:
    return weights_file(path, _STEM) if path.is_dir() else path


def projection_of(source: str | Path) -> Path | None:
    """Return the path of a base's projection, on disk or on the hub; None for a name without "base".

    The last "base" of the name is "proj" there.
    """
    path = Path(source)
    start, found, end = path.name.rpartition("base")
    return path.with_name(f"{start}proj{end}") if found else None


def _network(shapes: Shapes, file: Path) -> DriveNetwork:
    """Families v1 to v3, by the shapes of a file."""
    try:
        blocks = 1 + max(int(match[1]) for name in shapes if (match := re.match(r"blocks_down\.(\d+)\.", name)))
        first = shapes["conv_in.weight"][0]
        channels = (first, *(shapes[f"blocks_down.{i}.conv.conv1.weight"][0] for i in range(blocks)))
        side_convs = [shapes[name][0] for name in ("conv_up2_down0.weight", "conv_up1_down1.weight") if name in shapes]
        reads = [what for what in ("expression", "emotion") if f"{what[:3]}_proj.linear_1.weight" in shapes]
        _, positions, width = shapes["blocks_down.0.pos_embed_hidden.pe"]
    except KeyError as error:
        raise AdapterError(f"the control network lacks {error} ({file}); download it again") from error
    except (ValueError, IndexError) as error:
        raise AdapterError(f"the control network is of no family known here ({file}); download it again") from error
    config_file = file.parent / "config.json"
    named = str(read_json(config_file).get("_class_name", "")) if config_file.is_file() else ""
    reaches_up = named.startswith(("HMV2", "HMV3")) or (not named and blocks > _DOWN_BLOCKS)
    points = [f"up_{blocks - 1 - i}" if reaches_up else f"down_{i}" for i in range(blocks)]
    try:
        with torch.device("meta"):
            return DriveNetwork(channels, width, 4 if reaches_up else 8, positions, reads, points, side_convs)
    except (IndexError, ValueError) as error:  # such as side convs without the blocks that they follow
        raise AdapterError(f"the control network is of no family known here ({file}); download it again") from error


def _base(shapes: Shapes) -> DriveBase:
    """The base of families v4 and v5, by the shapes of a file."""
    table = "ctrl_attn.attn_blocks.0.pos_embed.pe" in shapes
    with torch.device("meta"):
        return DriveBase(table=table)


def filled(module: M, file: Path, shapes: Shapes, whose: str = "the control network") -> M:
    """The module with a file's weights.

    Args:
        module: without weights.
        file: A file of safetensors.
        shapes: The shapes of its tensors by name.
        whose: they are, for messages.

    Raises:
        AdapterError: names or shapes are not the module's own. NumericsError: NaN or infinity.
    """
    from safetensors.torch import load_file

    for name, tensor in module.state_dict().items():
        if name not in shapes:
            raise AdapterError(f"{whose} lacks {name} ({file}); download it again")
        if shapes[name] != tuple(tensor.shape):
            raise AdapterError(f"{whose}'s {name} must be {tuple(tensor.shape)}, got {shapes[name]} ({file})")
    expected = module.state_dict().keys()
    if more := [name for name in shapes if name not in expected]:
        raise AdapterError(f"{whose} is of no family known here: it has {more[0]} ({file})")
    weights = load_file(file)
    check_finite(whose, weights)
    module.load_state_dict(weights, assign=True)
    return module.eval().requires_grad_(False)
