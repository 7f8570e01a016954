"""Reading motion modules: published folders, single files and the hub.

HelloMeme's v1 and v2 are AnimateDiff's `MotionAdapter` of diffusers; v3 to v5 have classes of their own. A file is
recognised by the class that its configuration names, else by its tensors' names. Nothing is unpickled.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fisedit.adapters.hellomeme.drive_files import filled
from fisedit.adapters.hellomeme.motion_adapter import MotionReader
from fisedit.adapters.hellomeme.motion_modules import FrameTransformer, MotionBlock, PaddedTransformer
from fisedit.errors import AdapterError
from fisedit.models.weight_files import read_json, read_shapes, weights_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fisedit.adapters.hellomeme.motion_modules import MotionModule
    from fisedit.models.weight_files import Shapes

MOTION_ADAPTERS = ("MotionAdapter", "HM3MotionAdapter", "HM5MotionAdapter")
"""Classes that published configurations name."""

_STEM = "diffusion_pytorch_model"
_BETWEEN_BLOCKS = re.compile(r"motion_(down|up)\.(\d+)\.")
_BEHIND_LAYERS = re.compile(r"(?:(down|up)_blocks\.(\d+)|(mid)_block)\.motion_modules\.(\d+)\.")
_HEADS, _GROUPS = 8, 32
"""The heads and the groups of modules whose configuration does not say."""


def is_motion_adapter(kind: object, shapes: Callable[[], Shapes]) -> bool:
    """Return whether a folder or file holds motion modules.

    Args:
        kind: class that a configuration names, or None.
        shapes: The shapes of the tensors, asked for where there is no class.
    """
    if kind is not None:
        return kind in MOTION_ADAPTERS
    return any(_BETWEEN_BLOCKS.match(name) or _BEHIND_LAYERS.match(name) for name in shapes())


def load_motion_adapter(path: Path) -> MotionReader:
    """Load motion modules, checked, in the precision of their file.

    Args:
        path: a folder or a .safetensors file.

    Raises:
        AdapterError: they are damaged or of another architecture. NumericsError: their weights hold NaN or infinity.
    """
    file = weights_file(path, _STEM) if path.is_dir() else path
    shapes, config = read_shapes(file), file.parent / "config.json"
    settings = read_json(config) if config.is_file() else {}
    try:
        if any(_BEHIND_LAYERS.match(name) for name in shapes):
            return _behind_layers(shapes, file, settings)
        return _between_blocks(shapes, file, settings.get("num_attention_heads", _HEADS))
    except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
        raise AdapterError(f"the motion adapter is of no family known here ({file}); download it again") from error


def _between_blocks(shapes: Shapes, file: Path, heads: int) -> MotionReader:
    """HelloMeme's v3 to v5: a module after every down block and before every up block."""
    names = sorted({match[0] for name in shapes if (match := _BETWEEN_BLOCKS.match(name))})
    parts = nn.ModuleDict({"motion_down": nn.ModuleDict(), "motion_up": nn.ModuleDict()})
    found: dict[str, MotionModule] = {}
    for name in names:
        side, index, _ = name.removeprefix("motion_").split(".")
        module: MotionModule
        with torch.device("meta"):
            if f"{name}pos_embed_t.pe" in shapes:
                channels, time_width = shapes[f"{name}time_emb_proj.weight"]
                module = MotionBlock(channels, time_width, heads)
            else:
                module = PaddedTransformer(shapes[f"{name}attn1.norm.weight"][0], heads)
        found[f"{side}_{index}"] = module
        parts[f"motion_{side}"].add_module(index, module)
    filled(parts, file, shapes, "the motion adapter")
    return MotionReader(found)


def _behind_layers(shapes: Shapes, file: Path, settings: Mapping[str, Any]) -> MotionReader:
    """AnimateDiff's: modules behind the layers of blocks, by diffusers' own class."""
    from diffusers import MotionAdapter

    counts: dict[str, int] = {}
    widths: dict[str, int] = {}
    for name in shapes:
        if match := _BEHIND_LAYERS.match(name):
            block = f"{match[1] or match[3]}_{match[2] or 0}"
            counts[block] = max(counts.get(block, 0), 1 + int(match[4]))
            widths[block] = shapes[f"{match[0]}norm.weight"][0]
    downs = [block for block in counts if block.startswith("down")]
    heads = settings.get("motion_num_attention_heads", _HEADS)
    first = "down_blocks.0.motion_modules.0.transformer_blocks.0"
    with torch.device("meta"):
        adapter = MotionAdapter(
            block_out_channels=tuple(widths[f"down_{i}"] for i in range(len(downs))),
            motion_layers_per_block=tuple(counts[f"down_{i}"] for i in range(len(downs))),
            motion_num_attention_heads=heads if isinstance(heads, int) else tuple(heads),
            motion_norm_num_groups=settings.get("motion_norm_num_groups", _GROUPS),
            motion_max_seq_length=shapes[f"{first}.pos_embed.pe"][1],
            use_motion_mid_block="mid_0" in counts,
        )
    adapter = filled(adapter, file, shapes, "the motion adapter")
    found: dict[str, MotionModule] = {}
    for name, block in [
        *((f"down_{i}", block) for i, block in enumerate(adapter.down_blocks)),
        *([("mid", adapter.mid_block)] if adapter.mid_block is not None else []),
        *((f"up_{i}", block) for i, block in enumerate(adapter.up_blocks)),
    ]:
        found |= {f"{name}.{j}": FrameTransformer(module) for j, module in enumerate(block.motion_modules)}
    return MotionReader(found)
