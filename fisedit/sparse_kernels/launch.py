"""How Triton's kernels are cut: tiles by shape, never by measuring at run time, so that nothing compiles in a loop.

Knows shapes and dtypes; needs no triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PROGRAMS = 264
"""Programs that fill an H200: two for each of its 132 multiprocessors."""


class Tile(NamedTuple):
    """What one program computes ([rows, columns]), K at a time, and how many warps and stages it takes."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_for(rows: int, width: int, channels: int, dtype: torch.dtype) -> Tile:
    """The tile of a GEMM [rows, channels] x [channels, width]. Not measured yet: chosen to fill the chip."""
    tall = next(size for size in (16, 32, 64, 128) if size >= rows or size == 128)
    if rows * width < 128 * 128 * PROGRAMS:
        tall = min(tall, 64)
    wide = 128 if tall == 128 and width >= 128 else 64 if width > 32 else power_of_two(width)
    deep = power_of_two(min(channels, 64 if dtype.itemsize == 2 else 32))
    return Tile(tall, wide, deep, 8 if tall * wide > 64 * 64 else 4, 3 if dtype.itemsize == 2 else 2)


def split_tile(rows: int, width: int, channels: int, taps: int, dtype: torch.dtype) -> tuple[Tile, int]:
    """The tile of a conv over `taps` neighbours, and among how many programs each tile's K is shared."""
    tile = tile_for(rows, width, channels, dtype)
    tiles = -(-rows // tile.rows) * -(-width // tile.columns)
    blocks = taps * -(-channels // tile.depth)
    return tile, max(1, min(PROGRAMS // tiles, blocks // 4))


def power_of_two(count: int) -> int:
    """The smallest power of two from 16 on that holds `count`."""
    return max(16, 1 << (count - 1).bit_length())


def dummy(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer for an argument that the kernel will not read."""
    return stand_in if tensor is None else tensor
