"""A 3x3 conv at four outputs a time: a 2x2 tile of them takes 16 products with C x C weights instead of 36.

Winograd's minimal filtering, Lavin & Gray, arXiv 1509.09308: the same numbers, but for rounding. Tiles lie wherever
active cells do, so that a square at any place is covered without waste, and uneven blobs almost. It serves the convs of
HelloMeme's block, arXiv 2410.22901. Knows index tables and weights; neither plans nor modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.sparse_kernels.prepacked import Matrix
from fisedit.sparse_kernels.row_plan import TAPS

PRODUCTS = 16
"""Rows that a tile multiplies, each with weights of its own."""

CENTRE = 5
"""The product, (1, 1), that every output has once: it brings the bias."""

MIN_TILES = 4
"""Tiles from which this pays; the weights of fewer take longer to read than nine taps'."""


_CELLS = (1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)
_OUTPUTS = (1, 1, 1, 0), (0, 1, -1, -1)
"""Along one axis: what a filter's four weights multiply of four cells, and two outputs of these products."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Index tables of the 2x2 output tiles that cover a conv's outputs.

    Args:
        table: int64 [16, T], indices into [rows | zero row] of every tile's 4x4 input cells, by (y, x).
        output_index: int64 [2, R_out], the cell (y, x) of its tile and the tile that hold an output.
    """

    table: Tensor
    output_index: Tensor

    @property
    def count(self) -> int:
        """Tiles, T."""
        return self.table.shape[1]

    def macs(self, channels: int) -> int:
        """Multiply-accumulates of a conv: the products, and the sums before and after them.

        Args:
            channels: C_in, which is C_out.
        """
        return self.count * channels * PRODUCTS * (channels + len(_CELLS) ** 2 + len(_OUTPUTS) ** 2)


def is_faster(device: torch.device) -> bool:
    """Return whether this is faster on a device: on a GPU launches cost more than products. "meta" counts as a CPU."""
    return device.type in ("cpu", "meta")


def make_tiles(kernel_map: Tensor, outputs: Tensor, width: int, zero: int) -> Tiles | None:
    """Tiles for a conv of stride 1, or None where nine products for every output cost less.

    Args:
        kernel_map: int64 [R_out * 9], a `row_plan.KernelMap.table`.
        outputs: int64 [R_out], ascending positions of a map.
        width: The width of that map.
        zero: index of the zero row.
    """
    cells = [divmod(position, width) for position in outputs.tolist()]
    corners = _corners(cells)
    if len(corners) < MIN_TILES or PRODUCTS * len(corners) >= TAPS * len(cells):
        return None
    offsets = [(y, x) for y in (0, 1) for x in (0, 1)]
    tile_of_cell = {(y + j, x + i): (tile, j, i) for tile, (y, x) in enumerate(corners) for j, i in offsets}
    tile, y, x = torch.tensor([tile_of_cell[cell] for cell in cells]).T
    table, taps = torch.full((len(corners), 4, 4), zero), torch.arange(3)
    table[tile[:, None, None], y[:, None, None] + taps[:, None], x[:, None, None] + taps] = kernel_map.view(-1, 3, 3)
    return Tiles(table.flatten(1).T.contiguous(), torch.stack([2 * y + x, tile]))


def _corners(cells: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(y, x) of the first cells of 2x2 tiles that cover ascending cells."""
    uncovered, corners = set(cells), []
    for y, x in cells:
        if (y, x) in uncovered:
            corners.append((y, x))
            uncovered -= {(y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1)}
    return corners


def winograd_weights(weight: Tensor) -> list[Matrix]:
    """Transform a conv's weights [C_out, C_in, 3, 3] into the 16 weights [C_out, C_in] of a tile's products."""
    by_x = torch.stack(_filter(*weight.float().unbind(3)))  # [4, C_out, C_in, 3], by x
    by_xy = torch.stack(_filter(*by_x.unbind(3)))
    return [Matrix(each) for each in by_xy.flatten(0, 1).to(weight.dtype)]


def _filter(first: Tensor, middle: Tensor, last: Tensor) -> list[Tensor]:
    outer = first + last
    return [first, (outer + middle) / 2, (outer - middle) / 2, last]


def conv(rows: Tensor, tiles: Tiles, weights: Sequence[Matrix], bias: Tensor) -> Tensor:
    """3x3 convolution at the outputs of tiles.

    Args:
        rows: [B, R + G, C_in].
        tiles: The tiles of the conv's outputs.
        weights: from `winograd_weights`.
        bias: [C_out].

    Returns:
        [B, R_out, C_out].
    """
    batch, count, _ = rows.shape
    starts = torch.arange(batch, device=rows.device)[:, None]
    padded = F.pad(rows, (0, 0, 0, 1)).flatten(0, 1)
    read = padded[(starts * (count + 1) + tiles.table[:, None]).flatten(1)]  # [16, B * T, C_in]
    inputs = (_both_axes(_CELLS, rows) @ read.flatten(1)).view_as(read)
    products = torch.stack([weights[i].linear(inputs[i], bias if i == CENTRE else None) for i in range(PRODUCTS)])
    outputs = (_both_axes(_OUTPUTS, rows) @ products.flatten(1)).unflatten(1, products.shape[1:])  # [4, B * T, C_out]
    cell, tile = tiles.output_index
    result: Tensor = outputs[cell, starts * tiles.count + tile]
    return result


def _both_axes(coefficients: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """The matrix that transforms both axes, of the one that transforms one axis."""
    matrix = torch.tensor(coefficients, dtype=like.dtype, device=like.device)
    return torch.kron(matrix, matrix)
