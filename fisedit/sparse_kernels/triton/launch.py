"""Launch shapes of Triton's kernels: tiles by shape, never measured at run time, so that nothing compiles in a loop.

Knows shapes and dtypes; needs no triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fisedit.sparse_kernels.reference import Rows, join_rows

PROGRAMS = 264
"""Programs that fill an H200: two for each of its 132 multiprocessors."""

MIN_BLOCKS = 4
"""Blocks of K that a program takes at least where programs share it."""


class Tile(NamedTuple):
    """What one program computes.

    Args:
        rows: of the output tile.
        columns: of the output tile.
        depth: elements of K in one step.
        warps: of the program.
        stages: of its software pipeline.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_for(rows: int, width: int, channels: int, dtype: torch.dtype) -> Tile:
    """The tile of a GEMM [rows, channels] x [channels, width]. Not measured yet: chosen to fill the GPU.

    Args:
        rows: of the output.
        width: columns of the output.
        channels: length of K.
        dtype: of the operands.
    """
    tall = next(size for size in (16, 32, 64, 128) if size >= rows or size == 128)
    if rows * width < 128 * 128 * PROGRAMS:
        tall = min(tall, 64)
    wide = 128 if tall == 128 and width >= 128 else 64 if width > 32 else power_of_two(width)
    deep = power_of_two(min(channels, 64 if dtype.itemsize == 2 else 32))
    return Tile(tall, wide, deep, 8 if tall * wide > 64 * 64 else 4, 3 if dtype.itemsize == 2 else 2)


class SplitK(NamedTuple):
    """How the K of one tile is divided.

    Args:
        programs: among how many programs.
        blocks: blocks of K of each program.
    """

    programs: int
    blocks: int


def split_k(tiles: int, blocks: int) -> SplitK:
    """Divide K so that the programs fill the GPU.

    Args:
        tiles: of the output.
        blocks: blocks of K of each tile.
    """
    each = cdiv(blocks, max(1, min(PROGRAMS // tiles, blocks // MIN_BLOCKS)))
    return SplitK(cdiv(blocks, each), each)


def gemm_tile(items: int, rows: int, width: int, channels: int, dtype: torch.dtype) -> tuple[Tile, SplitK]:
    """The tile of a GEMM of each item's rows, and how its K is divided.

    Args:
        items: whose rows do not share tiles.
        rows: of each.
        width: columns of the output.
        channels: length of K.
        dtype: of the operands.
    """
    tile = tile_for(rows, width, channels, dtype)
    tiles = items * cdiv(rows, tile.rows) * cdiv(width, tile.columns)
    return tile, split_k(tiles, cdiv(channels, tile.depth))


class AttentionTile(NamedTuple):
    """What one program of an attention computes.

    Args:
        queries: of one head.
        keys: that it takes at once.
        programs: among how many programs the keys of these queries are divided.
        warps: of the program.
        stages: of its software pipeline.
    """

    queries: int
    keys: int
    programs: int
    warps: int
    stages: int


def attention_tile(heads: int, queries: int, keys: int, width: int, dtype: torch.dtype) -> AttentionTile:
    """Of an attention over a map.

    Args:
        heads: of all items together.
        queries: of each.
        keys: positions of the map and fresh rows together.
        width: channels of a head.
        dtype: of the operands.
    """
    most = 32 if power_of_two(width) > 128 or dtype.itemsize > 2 else 64
    block = min(most, power_of_two(queries))
    programs = split_k(cdiv(queries, block) * heads, cdiv(keys, most)).programs
    return AttentionTile(block, most, programs, 4, 2)


def cross_tile(queries: int, width: int, dtype: torch.dtype) -> AttentionTile:
    """Of an attention over the text, which is one program's.

    Args:
        queries: of each head.
        width: channels of a head.
        dtype: of the operands.
    """
    most = 32 if power_of_two(width) > 128 or dtype.itemsize > 2 else 64
    return AttentionTile(min(most, power_of_two(queries)), most, 1, 4, 3 if dtype.itemsize == 2 else 2)


class SumsTile(NamedTuple):
    """What one program of a group's sums computes.

    Args:
        block: rows summed at once.
        chunk: rows that one program sums.
        warps: of the program.
    """

    block: int
    chunk: int
    warps: int


def sums_tile(rows: int) -> SumsTile:
    """Of sums of a group's rows.

    Args:
        rows: of each item.
    """
    return SumsTile(64, 512, 4)


COUNTERS = 1 << 16
"""Tiles that may use split-K at once."""


def counters(tiles: int, device: torch.device) -> Tensor:
    """Arrival counters of a split-K kernel: int32 zeros, one for each tile, which its last program sets to zero again.

    Kernels that share counters must not run at once. So each stream has its own, and all captured graphs of a device
    share one set, as they are replayed on one stream.

    Args:
        tiles: whose K is divided among programs, at most `COUNTERS`.
        device: of the kernel.
    """
    assert tiles <= COUNTERS, tiles
    for_graphs = _zeros(device, None)  # made before the first capture
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return for_graphs
    return _zeros(device, torch.cuda.current_stream(device).cuda_stream)


@cache
def _zeros(device: torch.device, stream: int | None) -> Tensor:
    """Counters of a stream; `stream` is only part of the key."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def pair(rows: Rows, block: int, to_contiguous: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Rows as two tensors side by side, the first with a multiple of `block` channels; one tensor is given twice.

    Args:
        rows: one tensor or two.
        block: channels.
        to_contiguous: makes a tensor contiguous in the layout that the kernel reads.
    """
    if isinstance(rows, tuple) and rows[0].shape[-1] % block:
        rows = join_rows(rows)
    if isinstance(rows, tuple):
        return to_contiguous(rows[0]), to_contiguous(rows[1])
    one = to_contiguous(rows)
    return one, one


def dense(rows: Tensor) -> Tensor:
    """Rows [B, R, C] that are contiguous within each item; not copied where they are already."""
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()


def aligned(*tensors: Tensor) -> bool:
    """Whether every row [B, R, C] begins at a multiple of 16 bytes and of 16 elements."""
    return all(not (t.shape[2] | t.stride(0)) % 16 and not t.data_ptr() % 16 for t in tensors)


def cdiv(count: int, size: int) -> int:
    """Blocks of `size` that hold `count`."""
    return -(-count // size)


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def power_of_two(count: int) -> int:
    """The smallest power of two, 16 or more, that is at least `count`."""
    return max(16, next_power_of_two(count))


def dummy(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """A valid pointer for an argument that the kernel does not read."""
    return placeholder if tensor is None else tensor
