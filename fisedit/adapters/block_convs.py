"""The 3x3 convs of a block: the one before the rows, and the end, where a linear layer and a conv are made one conv.

Beyond the frame the last conv reads zeros and not the linear layer's bias, so that cells beside it have less of a bias.
Follows arXiv 2410.22901 for the block. Knows weights; the modules are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fisedit.sparse_kernels import ops, winograd
from fisedit.sparse_kernels.prepacked import Matrix

if TYPE_CHECKING:
    from fisedit.adapters.receptive_field import Closure
    from fisedit.adapters.row_column import Knit
    from fisedit.sparse_kernels.row_plan import KernelMap


@dataclass(frozen=True, eq=False)
class Conv:
    """A 3x3 conv.

    Args:
        weight: [C, C, 3, 3], channels_last. bias: [C], where all taps lie within the frame.
    """

    weight: Tensor
    bias: Tensor

    @cached_property
    def winograd_weights(self) -> list[Matrix]:
        """Its weights for tiles, 16 of [C, C]."""
        return winograd.winograd_weights(self.weight.detach())

    def at(self, rows: Tensor, reads: KernelMap, tiled: winograd.Tiles | None) -> Tensor:
        """Rows [B, R_out, C] of it, of rows [B, R + G, C]; by tiles where there are such and they pay."""
        if tiled is None or not winograd.serves(rows.device):
            return ops.conv3x3(rows, reads, self.weight, self.bias)
        return winograd.conv(rows, tiled, self.winograd_weights, self.bias)


@dataclass(frozen=True, eq=False)
class End(Conv):
    """The last one.

    Args:
        taps: [9, C], what each tap has to do with its bias, in the order (ky, kx).
    """

    taps: Tensor

    def framed(self, rows: Tensor, closure: Closure) -> Tensor:
        """Rows [B, R, C] of the conv, changed in place beside the frame."""
        if len(closure.rim):
            rows.index_add_(1, closure.rim, -(closure.outside * self.taps).sum(1).expand(len(rows), -1, -1))
        return rows


_MADE: WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Any]] = WeakKeyDictionary()


def entry_of(conv: nn.Conv2d) -> Conv:
    """A block's conv before the rows."""
    entry: Conv = _made(conv, tuple(conv.parameters()), Conv)
    return entry


def end_of(knit: Knit) -> End:
    """A block's last two layers in one."""
    end: End = _made(knit, (*knit.proj.parameters(), *knit.column_heads.to_out[0].parameters()), _folded)
    return end


def _made(module: nn.Module, weights: tuple[Tensor, ...], make: Callable[..., Any]) -> Any:
    """What is made of a module's weights, anew only when these are others."""
    mark = tuple((w.data_ptr(), w.dtype, w.device, 0 if w.is_inference() else w._version) for w in weights)  # noqa: SLF001 (its only name)
    known = _MADE.get(module)
    if known is None or known[0] != mark:
        known = _MADE[module] = mark, make(*weights)
    return known[1]


@torch.inference_mode(mode=False)
def _folded(conv: Tensor, bias: Tensor, linear: Tensor, shift: Tensor) -> End:
    """In float32, then as precise as the weights."""
    conv, bias, linear, shift = (weights.detach() for weights in (conv, bias, linear, shift))
    rows = conv.permute(0, 2, 3, 1).float()
    weight = (rows @ linear.float()).to(conv).permute(0, 3, 1, 2)  # channels_last already
    taps = (rows @ shift.float()).flatten(1).T
    fixed = nn.Parameter(weight, requires_grad=False)  # parameters outside inference mode are those that get packed
    return End(fixed, (bias.float() + taps.sum(0)).to(conv), taps.to(conv).contiguous())
