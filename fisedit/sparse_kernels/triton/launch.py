"""Launch shapes of Triton's kernels: tiles by shape, never measured at run time, so that nothing compiles in a loop.

Knows shapes and dtypes; needs no triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from fisedit.sparse_kernels.operands import Rows, join_rows

PROGRAMS = 264
"""Programs that fill an H200: two for each of its 132 multiprocessors."""

MIN_BLOCKS = 4
"""Blocks of K that a program takes at least where programs share it."""

MIN_KEYS = 2
"""Blocks of keys that a program takes at least where programs share an attention's."""


class Tile(NamedTuple):
    """The part of a product that one program computes.

    Args:
        rows: The rows of the output tile.
        columns: The columns of the output tile.
        depth: elements of K in one step.
        warps: The warps of the program.
        stages: The stages of its software pipeline.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_for(rows: int, width: int, channels: int, dtype: torch.dtype) -> Tile:
    """The tile of a GEMM [rows, channels] x [channels, width] of more rows than were measured: as fills the GPU.

    Args:
        rows: The rows of the output.
        width: columns of the output.
        channels: length of K.
        dtype: The dtype of the operands.
    """
    tall = next(size for size in (16, 32, 64, 128) if size >= rows or size == 128)
    if rows * width < 128 * 128 * PROGRAMS:
        tall = min(tall, 64)
    wide = 128 if tall == 128 and width >= 128 else 64 if width > 32 else power_of_two(width)
    deep = power_of_two(min(channels, 64 if dtype.itemsize == 2 else 32))
    return Tile(tall, wide, deep, 8 if tall * wide > 64 * 64 else 4, 3 if dtype.itemsize == 2 else 2)


class SplitK(NamedTuple):
    """The division of one tile's K among programs.

    Args:
        programs: among how many programs.
        blocks: blocks of K of each program.
    """

    programs: int
    blocks: int


def split_k(tiles: int, blocks: int, least: int | None = None) -> SplitK:
    """Divide K so that the programs fill the GPU.

    Args:
        tiles: The number of tiles of the output.
        blocks: blocks of K of each tile.
        least: blocks of each program; None for `MIN_BLOCKS`.
    """
    each = cdiv(blocks, max(1, min(PROGRAMS // tiles, blocks // (least or MIN_BLOCKS))))
    return SplitK(cdiv(blocks, each), each)


FEW_ROWS = 512
"""Rows up to which launch shapes were measured in 16 bit."""

TILES = {
    "linear": ((64, Tile(64, 32, 128, 4, 4)), (17, Tile(32, 32, 256, 4, 3)), (0, Tile(16, 32, 256, 2, 3))),
    "layer_norm": ((64, Tile(32, 64, 64, 4, 4)), (17, Tile(32, 32, 256, 4, 3)), (0, Tile(16, 32, 256, 2, 3))),
    "geglu": ((129, Tile(64, 128, 64, 8, 3)), (33, Tile(64, 64, 128, 8, 3)), (0, Tile(16, 32, 128, 2, 3))),
}
"""Kernel -> (rows from, tile): a linear layer, one behind a layer norm, and a gated one.

They were found by `python -m benchmarks.triton_tuning` on an H200, whose figures are in benchmarks/LOG.md."""


def measured_tile(kernel: str, rows: int, channels: int, dtype: torch.dtype) -> Tile | None:
    """The tile of a GEMM of few rows in 16 bit, by measurement; None for others.

    Args:
        kernel: a name in `TILES`.
        rows: The rows of the output.
        channels: length of K.
        dtype: The dtype of the operands.
    """
    if rows > FEW_ROWS or dtype.itemsize != 2:
        return None
    tile = next(tile for least, tile in TILES[kernel] if rows >= least)
    return tile._replace(depth=min(tile.depth, power_of_two(channels)))


NARROWEST = 16
"""Elements of K that a tile takes at once, at least."""


def gemm_tile(
    items: int, rows: int, width: int, channels: int, dtype: torch.dtype, *, beside: int = 0, layer_norm: bool = False
) -> tuple[Tile, SplitK]:
    """The tile of a GEMM of each item's rows, and how its K is divided.

    Args:
        items: The number of items; their rows do not share tiles.
        rows: The rows of each item.
        width: columns of the output.
        channels: length of K.
        dtype: The dtype of the operands.
        beside: channels of the first of two tensors side by side, which no tile's step crosses; 0 for one tensor.
        layer_norm: every program computes its rows' statistics, so that few share K.
    """
    measured = measured_tile("layer_norm" if layer_norm else "linear", rows, channels, dtype)
    tile = measured or tile_for(rows, width, channels, dtype)
    if beside:
        tile = tile._replace(depth=gcd(tile.depth, beside))
    tiles, blocks = items * cdiv(rows, tile.rows) * cdiv(width, tile.columns), cdiv(channels, tile.depth)
    if measured is None:
        return tile, split_k(tiles, blocks)
    shares = not layer_norm and tiles < SHARED_PROGRAMS // 2
    each = cdiv(blocks, max(1, min(SHARED_PROGRAMS // tiles, channels // MIN_SHARE)) if shares else 1)
    return tile, SplitK(cdiv(blocks, each), each)


SHARED_PROGRAMS = 160
"""Programs of a GEMM of few rows that share K, at most; half as many tiles do not share it."""

MIN_SHARE = 640
"""Elements of K that each takes, at least."""


def geglu_tile(rows: int, width: int, channels: int, dtype: torch.dtype) -> Tile:
    """The tile of a gated linear layer, which computes two products.

    Args:
        rows: The rows of the output.
        width: columns of the output.
        channels: length of K.
        dtype: The dtype of the operands.
    """
    return measured_tile("geglu", rows, channels, dtype) or tile_for(rows, width, channels, dtype)


class AttentionTile(NamedTuple):
    """The part of an attention that one program computes.

    Args:
        queries: The number of queries of one head.
        keys: The number of keys that it takes at once.
        programs: among how many programs the keys of these queries are divided.
        warps: The warps of the program.
        stages: The stages of its software pipeline.
    """

    queries: int
    keys: int
    programs: int
    warps: int
    stages: int


def attention_tile(heads: int, queries: int, keys: int, width: int, dtype: torch.dtype) -> AttentionTile:
    """Return the tile of an attention over a map.

    Args:
        heads: The heads of all items together.
        queries: The queries of each head.
        keys: positions of the map and fresh rows together.
        width: channels of a head.
        dtype: The dtype of the operands.
    """
    most = 32 if power_of_two(width) > 128 or dtype.itemsize > 2 else 64
    block = min(most, power_of_two(queries))
    programs = split_k(cdiv(queries, block) * heads, cdiv(keys, most), MIN_KEYS).programs
    return AttentionTile(block, most, programs, 4, 3 if dtype.itemsize == 2 else 2)


def cross_tile(queries: int, width: int, dtype: torch.dtype) -> AttentionTile:
    """Return the tile of an attention over the text, which is one program's.

    Args:
        queries: The queries of each head.
        width: channels of a head.
        dtype: The dtype of the operands.
    """
    wide = power_of_two(width)
    if dtype.itemsize == 2 and queries <= FEW_ROWS and wide <= 128:
        return (
            AttentionTile(min(32, power_of_two(queries)), 128, 1, 4, 3)
            if wide <= 64
            else AttentionTile(16, 64, 1, 4, 4)
        )
    most = 32 if wide > 128 or dtype.itemsize > 2 else 64
    return AttentionTile(min(most, power_of_two(queries)), most, 1, 4, 3 if dtype.itemsize == 2 else 2)


class SumsTile(NamedTuple):
    """The part of a group's sums that one program computes.

    Args:
        block: rows summed at once.
        chunk: rows that one program sums.
        warps: The warps of the program.
    """

    block: int
    chunk: int
    warps: int


CHUNK = 512
"""Rows of a group that one program sums; more are divided among programs (see `epilogue`)."""


def sums_tile(rows: int) -> SumsTile:
    """Return the tile of sums of a group's rows.

    Args:
        rows: The rows of each item.
    """
    return SumsTile(64, CHUNK, 4) if rows <= 64 else SumsTile(128, CHUNK, 4) if rows <= 128 else SumsTile(256, CHUNK, 8)


COUNTERS = 1 << 16
"""Tiles that may use split-K at once."""


PDL = False
"""True if kernels are launched while the ones before them run, on GPUs that can: from compute capability 9.0 on."""


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Arguments of a kernel's launch that say whether it begins while the one before it runs.

    Args:
        device: The device of the kernel.
    """
    possible = PDL and _launches_dependents(device)
    return {"PDL": True, "launch_pdl": True} if possible else {"PDL": False}


@cache
def _launches_dependents(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and not torch.version.hip
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def counters(tiles: int, device: torch.device) -> Tensor:
    """Arrival counters of a split-K kernel: int32 zeros, one for each tile, which its last program sets to zero again.

    Kernels that share counters must not run at once. So each stream has its own, and all captured graphs of a device
    share one set, as they are replayed on one stream.

    Args:
        tiles: The number of tiles whose K is divided among programs, at most `COUNTERS`.
        device: The device of the kernel.
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
    """Return whether every row [B, R, C] begins at a multiple of 16 bytes and of 16 elements."""
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
