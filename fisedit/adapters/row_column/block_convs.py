"""The 3x3 convs of a row-column block: the one before the rows, and the last, into which the linear layer is folded.

Beyond the frame the last conv reads zeros and not the linear layer's bias, so that cells beside the frame get less of
that bias. Follows arXiv 2410.22901 for the block. Knows weights; the modules are not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fisedit.machine.device import write_count
from fisedit.sparse_kernels import ops, winograd
from fisedit.sparse_kernels.prepacked import Matrix

if TYPE_CHECKING:
    from fisedit.adapters.row_column.attention import RowColumnBlock
    from fisedit.adapters.row_column.receptive_field import ReceptiveField
    from fisedit.sparse_kernels.row_plan import KernelMap


@dataclass(frozen=True, eq=False)
class BlockConv:
    """A 3x3 conv of rows.

    Args:
        weight: [C, C, 3, 3], channels_last.
        bias: [C], where all taps are within the frame.
    """

    weight: Tensor
    bias: Tensor

    @cached_property
    def winograd_weights(self) -> list[Matrix]:
        """The 16 weights [C, C] of a tile's products."""
        return winograd.winograd_weights(self.weight.detach())

    def forward(self, rows: Tensor, kernel_map: KernelMap, tiles: winograd.Tiles | None) -> Tensor:
        """Compute the conv, by tiles where there are some and the device gains by them.

        Args:
            rows: [B, R + G, C].
            kernel_map: The kernel map of the conv.
            tiles: The tiles of its outputs, or None.

        Returns:
            [B, R_out, C].
        """
        if tiles is None or not winograd.is_faster(rows.device):
            return ops.conv3x3(rows, kernel_map, self.weight, self.bias)
        return winograd.conv(rows, tiles, self.winograd_weights, self.bias)


@dataclass(frozen=True, eq=False)
class FoldedConv(BlockConv):
    """The last conv with the linear layer before it.

    Args:
        taps: [9, C], the part of the bias that each tap brings, in the order (ky, kx).
    """

    taps: Tensor

    def correct_border(self, rows: Tensor, receptive_field: ReceptiveField) -> Tensor:
        """Subtract the bias of taps beyond the frame, in place.

        Args:
            rows: [B, R, C], outputs of the conv.
            receptive_field: The receptive field of the block.

        Returns:
            `rows`.
        """
        boundary = receptive_field.boundary
        if len(boundary):
            missing = (receptive_field.outside_taps * self.taps).sum(1)
            rows.index_add_(1, boundary, -missing.expand(len(rows), -1, -1))
        return rows


_CACHE: WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Any]] = WeakKeyDictionary()


def input_conv(conv: nn.Conv2d) -> BlockConv:
    """A block's conv before the rows."""
    entry: BlockConv = _cached(conv, tuple(conv.parameters()), BlockConv)
    return entry


def output_conv(row_column: RowColumnBlock) -> FoldedConv:
    """A block's last linear layer and conv as one conv."""
    end: FoldedConv = _cached(
        row_column, (*row_column.proj.parameters(), *row_column.column_attention.to_out[0].parameters()), _fold
    )
    return end


def _cached(module: nn.Module, weights: tuple[Tensor, ...], make: Callable[..., Any]) -> Any:
    """Return what `make` computes of a module's weights, cached until they change."""
    state = tuple((w.data_ptr(), w.dtype, w.device, write_count(w)) for w in weights)
    cached = _CACHE.get(module)
    if cached is None or cached[0] != state:
        cached = _CACHE[module] = state, make(*weights)
    return cached[1]


@torch.inference_mode(mode=False)
def _fold(conv: Tensor, bias: Tensor, linear: Tensor, shift: Tensor) -> FoldedConv:
    """Fold in float32, then round to the weights' dtype."""
    conv, bias, linear, shift = (weights.detach() for weights in (conv, bias, linear, shift))
    rows = conv.permute(0, 2, 3, 1).float()
    weight = (rows @ linear.float()).to(conv).permute(0, 3, 1, 2)  # channels_last already
    taps = (rows @ shift.float()).flatten(1).T
    fixed = nn.Parameter(weight, requires_grad=False)  # parameters outside inference mode are those that get packed
    return FoldedConv(fixed, (bias.float() + taps.sum(0)).to(conv), taps.to(conv).contiguous())
