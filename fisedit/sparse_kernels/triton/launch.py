"""How Triton's kernels are cut: tiles by shape, never by measuring at run time, so that nothing compiles in a loop.

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

LEAST = 4
"""Blocks of K that a program takes at least where programs share it."""


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


class Share(NamedTuple):
    """Among how many programs a tile's K is shared, and how many blocks of K each takes."""

    programs: int
    blocks: int


def share(tiles: int, blocks: int) -> Share:
    """How `tiles` with `blocks` of K each fill the chip."""
    each = cdiv(blocks, max(1, min(PROGRAMS // tiles, blocks // LEAST)))
    return Share(cdiv(blocks, each), each)


COUNTERS = 1 << 16
"""Tiles whose programs may share a sum at once."""


def counters(tiles: int, device: torch.device) -> Tensor:
    """Int32 zeros, one for each tile whose programs share a sum: who is done counts, the last one sets zero again.

    Kernels that have the same ones must not run at once: each stream has its own, and all captured graphs of a device
    have theirs, as they are replayed on one stream.
    """
    assert tiles <= COUNTERS, tiles
    for_graphs = _zeros(device, None)  # made before the first capture
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return for_graphs
    return _zeros(device, torch.cuda.current_stream(device).cuda_stream)


@cache
def _zeros(device: torch.device, stream: int | None) -> Tensor:
    """Counters of a stream; its number is of the key alone."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def pair(rows: Rows, block: int, lay: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Rows as two tensors side by side, the first ending at a multiple of `block` channels; the same twice if one.

    Args:
        lay: what lays a tensor as the kernel wants it.
    """
    if isinstance(rows, tuple) and rows[0].shape[-1] % block:
        rows = join_rows(rows)
    if isinstance(rows, tuple):
        return lay(rows[0]), lay(rows[1])
    one = lay(rows)
    return one, one


def dense(rows: Tensor) -> Tensor:
    """Rows [B, R, C] that follow one another within each item, in place where they do."""
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()


def aligned(*tensors: Tensor) -> bool:
    """Whether every row [B, R, C] of these begins at a multiple of sixteen bytes and of sixteen elements."""
    return all(not (t.shape[2] | t.stride(0)) % 16 and not t.data_ptr() % 16 for t in tensors)


def cdiv(count: int, size: int) -> int:
    """How many blocks of a size hold a count."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The smallest power of two from 16 on that holds `count`."""
    return max(16, 1 << (count - 1).bit_length())


def dummy(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer for an argument that the kernel will not read."""
    return stand_in if tensor is None else tensor
