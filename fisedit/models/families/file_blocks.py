"""Blocks of a UNet in a single file: how many there are, by its names, where a distilled model has fewer.

Knows the names of the original releases; reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fisedit.errors import ModelError

T = TypeVar("T")

_UNET = "model.diffusion_model."
_BLOCK = re.compile(rf"{re.escape(_UNET)}(input_blocks|output_blocks|middle_block)\.(\d+)\.(.+)")
_LAYER = re.compile(r"transformer_blocks\.(\d+)\.")
_UPSAMPLER = re.compile(r"[12]\.conv\.")
_MIDDLES = {(): None, (0,): "UNetMidBlock2D", (0, 1, 2): "UNetMidBlock2DCrossAttn"}
"""Numbers of the middle's modules -> diffusers' class of it."""

_BY_LEVEL = ("block_out_channels", "attention_head_dim")

Depths = tuple[tuple[int, ...], ...]
"""Level -> block -> transformer layers, 0 for a block without attention."""


@dataclass(frozen=True)
class FileBlocks:
    """The blocks of a UNet.

    Args:
        down: Those of the way down, finest level first.
        up: Those of the way up, coarsest level first.
        middle: The numbers of the middle's modules, and its transformer layers.
        renamed: Name -> the name that diffusers' converter takes, where numbers were left out.
    """

    down: Depths
    up: Depths
    middle: tuple[tuple[int, ...], int]
    renamed: Mapping[str, str]

    def config(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a UNet's configuration with these blocks.

        Args:
            own: The configuration of its family.

        Raises:
            ModelError: diffusers has no configuration with these blocks.
        """
        if not any(self.down):  # a check of shapes tells what is missing
            return dict(own)
        levels, (modules, depth) = len(self.down), self.middle
        counts = {len(blocks) for blocks in self.down} | {len(blocks) - 1 for blocks in self.up}
        is_mixed = any(0 in blocks and any(blocks) for blocks in self.down + self.up)
        if is_mixed or (levels, counts) != (len(self.up), {min(counts)}) or levels > len(own["block_out_channels"]):
            raise self._error()
        if modules not in _MIDDLES or (depth and self.down[-1][0] not in (0, depth)):
            raise self._error()
        layers = [_layers(blocks) for blocks in self.down]  # diffusers reads the middle's where the last has none
        layers[-1] = depth if depth and not any(self.down[-1]) else layers[-1]
        up = [_layers(blocks) for blocks in self.up]
        told = {
            **{name: own[name][:levels] for name in _BY_LEVEL if isinstance(own[name], list)},
            "layers_per_block": counts.pop(),
            "down_block_types": [_kind(blocks, "Down") for blocks in self.down],
            "up_block_types": [_kind(blocks, "Up") for blocks in self.up],
            "mid_block_type": _MIDDLES[modules],
            "transformer_layers_per_block": layers,
            "reverse_transformer_layers_per_block": None if up == layers[::-1] else up,
        }
        known = {"mid_block_type": _MIDDLES[0, 1, 2], **own}
        if not isinstance(depths := own.get("transformer_layers_per_block", 1), list):
            known["transformer_layers_per_block"] = [depths] * levels
        return {**own, **{name: value for name, value in told.items() if value != known.get(name)}}

    def _error(self) -> ModelError:
        return ModelError(
            f"a single file's UNet must have blocks that diffusers has, got {list(self.down)} on its way down, "
            f"{self.middle[1] if self.middle[0] else 'nothing'} in the middle and {list(self.up)} on its way up "
            "(transformer layers of each block, level by level); load its diffusers folder"
        )


def read_blocks(names: Collection[str]) -> FileBlocks:
    """Read a UNet's blocks from the names of a single file's tensors.

    Numbers may be left out, as by tools that number every level as if it had two blocks.

    Args:
        names: The names.
    """
    found: dict[str, dict[int, list[str]]] = {"input_blocks": {}, "middle_block": {}, "output_blocks": {}}
    for match in filter(None, map(_BLOCK.fullmatch, names)):
        found[match[1]].setdefault(int(match[2]), []).append(match[3])
    down, up, middle = found["input_blocks"], found["output_blocks"], found["middle_block"]
    numbers = {("input_blocks", old): new for new, old in enumerate(sorted(down))}
    place = -1
    for old in sorted(up):  # an upsampler belongs to the block before it
        place += any(name.startswith("0.") for name in up[old])
        numbers["output_blocks", old] = max(place, 0)
    depths = tuple(sorted(middle)), _depth(middle.get(1, ()))
    return FileBlocks(_levels(down, skip=1), _levels(up), depths, dict(_renamed(names, numbers)))


def renumbered(tensors: Mapping[str, T], blocks: FileBlocks) -> dict[str, T]:
    """Return a file's tensors with its blocks numbered without a gap.

    Args:
        tensors: By their names in the file.
        blocks: From `read_blocks`.
    """
    return {blocks.renamed.get(name, name): tensor for name, tensor in tensors.items()}


def _renamed(names: Collection[str], numbers: Mapping[tuple[str, int], int]) -> Mapping[str, str]:
    """Names of blocks whose number changes -> their new names."""
    changes = {}
    for match in filter(None, map(_BLOCK.fullmatch, names)):
        if (new := numbers.get((match[1], int(match[2])))) is not None and new != int(match[2]):
            changes[match[0]] = f"{_UNET}{match[1]}.{new}.{match[3]}"
    return changes


def _levels(blocks: Mapping[int, Collection[str]], skip: int = 0) -> Depths:
    """Blocks by level: a sampler ends one."""
    levels: list[list[int]] = [[]]
    for number in sorted(blocks)[skip:]:
        names, is_down = blocks[number], any(name.startswith("0.op.") for name in blocks[number])
        if any(name.startswith("0.") for name in names) and not is_down:
            levels[-1].append(_depth(names))
        if is_down or any(map(_UPSAMPLER.match, names)):
            levels.append([])
    return tuple(map(tuple, levels))


def _depth(names: Collection[str]) -> int:
    """The transformer layers among a block's tensors."""
    return len({match[1] for match in map(_LAYER.search, names) if match})


def _kind(blocks: tuple[int, ...], way: str) -> str:
    return f"{'CrossAttn' if any(blocks) else ''}{way}Block2D"


def _layers(blocks: tuple[int, ...]) -> int | list[int]:
    """One number where all blocks have as many layers."""
    return (blocks[0] or 1) if len(set(blocks)) == 1 else list(blocks)
