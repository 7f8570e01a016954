"""The end of a block in one layer: what its columns find passes a linear layer and then a 3x3 conv, which is one conv.

Beyond the frame the conv reads zeros and not the linear layer's bias, so that cells beside it have less of a bias.
Follows arXiv 2410.22901 for the block. Knows weights; the modules are left as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

if TYPE_CHECKING:
    from fisedit.adapters.closure import Closure
    from fisedit.adapters.row_column import Knit


@dataclass(frozen=True, eq=False)
class End:
    """A 3x3 conv.

    Args:
        weight: [C, C, 3, 3], channels_last. bias: [C], where all taps lie within the frame.
        taps: [9, C], what each tap has to do with that bias, in the order (ky, kx).
    """

    weight: Tensor
    bias: Tensor
    taps: Tensor

    def framed(self, rows: Tensor, closure: Closure) -> Tensor:
        """Rows [B, R, C] of the conv, changed in place beside the frame."""
        if len(closure.rim):
            rows.index_add_(1, closure.rim, -(closure.outside * self.taps).sum(1).expand(len(rows), -1, -1))
        return rows


_ENDS: WeakKeyDictionary[Knit, tuple[tuple[object, ...], End]] = WeakKeyDictionary()


def end_of(knit: Knit) -> End:
    """A block's last two layers in one, made anew only when their weights are others."""
    weights = (*knit.proj.parameters(), *knit.column_heads.to_out[0].parameters())
    mark = tuple((w.data_ptr(), w.dtype, w.device, 0 if w.is_inference() else w._version) for w in weights)  # noqa: SLF001 (its only name)
    known = _ENDS.get(knit)
    if known is None or known[0] != mark:
        known = _ENDS[knit] = mark, _folded(*(w.detach() for w in weights))
    return known[1]


def _folded(conv: Tensor, bias: Tensor, linear: Tensor, shift: Tensor) -> End:
    """In float32, then as precise as the weights."""
    rows = conv.permute(0, 2, 3, 1).float()
    weight = (rows @ linear.float()).to(conv).permute(0, 3, 1, 2)  # channels_last already
    taps = (rows @ shift.float()).flatten(1).T
    return End(weight, (bias.float() + taps.sum(0)).to(conv), taps.to(conv).contiguous())
