"""oneDNN's products with prepacked weights, on a CPU.

With few rows, reordering a weight takes longer than the product, so that reordered copies are kept. Only parameters are
packed: one that was written to gets new copies, and its copies are dropped with it. They cost a second copy of every
weight that sparse steps multiply by, 1.6 GB of SD 1.5 in bf16. They take 8 % off a step of 5 % of the picture, and 4 %
off one of 15 %. Dense steps have none: 1 GB would take 3 % off one. Weights are packed while half of the machine's
memory is free, with FISEDIT_PACK=1 always, with 0 never. Others are reordered in every product, with the same result
to the bit.

In float32 oneDNN multiplies for sparse steps where it is faster than the library that torch takes
(`tuning.prefers_onednn`). Their weights are packed as well: 3.3 GB of SD 1.5, 9 to 13 % off a step of 5 %. Dense steps
stay diffusers' own, to the bit.

A CPU that multiplies faster in float32 (`tuning.prefers_fp32`) does so. Maps and rows stay in bf16, and are widened for
a large conv, or for a product with a large packed weight. The copies are then in float32, 3.3 GB. On a Xeon that takes
a quarter off sparse steps and a third off dense ones.

Knows tensors and weights; no modules.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.machine.device import memory_bytes, write_count
from fisedit.machine.hardware import available_bytes
from fisedit.sparse_kernels import tuning

MIN_WIDENED_NUMEL, MIN_WIDENED_MACS = 800_000, 1 << 29
"""Numbers of a weight, and multiply-accumulates of a conv of a whole map, from which they are widened. Smaller ones
take little time; and as what float32 sums up depends a little on the number of threads, a small model's stay torch's
own."""

MIN_FP32_NUMEL = 1 << 16
"""Numbers of a weight in float32 from which it is packed."""

MAX_PATCH_POSITIONS = 512
"""Positions of a map up to which a widened conv is a product with patches, for which weights are packed."""


@dataclass(frozen=True)
class _Copy:
    """A reordered copy of a weight.

    Args:
        weight: The weight that was copied.
        state: address, version and dtype of the weight at that time.
        sample: some of its numbers at that time.
        packed: the weight in oneDNN's order.
    """

    weight: ref[Tensor]
    state: tuple[int, int, torch.dtype]
    sample: Tensor
    packed: Tensor


_copies: dict[int, _Copy] = {}
"""A weight's id -> its copy."""


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0) -> Tensor:
    """`F.conv2d`, bit for bit where nothing is widened.

    Args:
        x: [B, C_in, H, W].
        weight: [C_out, C_in, k, k].
        bias: [C_out] or None.
        stride: in positions.
        padding: in positions.
    """
    if not widens(x) or x[:, 0].numel() * weight.numel() < MIN_WIDENED_MACS:
        return F.conv2d(x, weight, bias, stride, padding)
    if x[0, 0].numel() <= MAX_PATCH_POSITIONS:
        size, x = weight.shape[-1], F.pad(x, (padding,) * 4)
        patches = x.permute(0, 2, 3, 1).unfold(1, size, stride).unfold(2, size, stride).movedim(3, -1)
        return linear(patches.flatten(3), weight, bias).permute(0, 3, 1, 2)
    return F.conv2d(x.float(), weight.float(), _widened(bias), stride, padding).to(x.dtype)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, in bf16 bit for bit where nothing is widened.

    Args:
        rows: [..., C_in], or patches [..., 9 * C_in] for the weight of a 3x3 conv.
        weight: [C_out, C_in], [C_out, C_in, 1, 1] or [C_out, C_in, 3, 3].
        bias: [C_out] or None.
    """
    packed = None if torch.is_grad_enabled() else _packed(weight)
    return _unpacked(rows, matrix(weight), bias) if packed is None else _product(rows, packed, bias)


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of a whole map, bit for bit where nothing is widened, as diffusers' pictures are.

    Args:
        x: [..., C_in].
        weight: [C_out, C_in].
        bias: [C_out] or None.
    """
    return linear(x, weight, bias) if widens(x) else F.linear(x, weight, bias)


class Matrix:
    """A weight of which only the packed copy is kept.

    Args:
        weight: [C_out, C_in].
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = weight.dtype is torch.bfloat16 and _can_pack(weight)
        self._weight = _ordered(weight) if self._packed else weight

    def linear(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` with the weight.

        Args:
            rows: [..., C_in].
            bias: [C_out] or None.
        """
        return (_product if self._packed else F.linear)(rows, self._weight, bias)


def refresh() -> None:
    """Drop copies of weights that were replaced, or written to unnoticed by torch: PEFT merges through `.data`."""
    for key, copy in list(_copies.items()):
        weight = copy.weight()
        if weight is None or copy.state != _state(weight) or not torch.equal(copy.sample, _sample(weight)):
            _copies.pop(key, None)


def matrix(weight: Tensor) -> Tensor:
    """A weight as a matrix; [C_out, 9 * C_in] of a 3x3 conv, which is a view where the weight is channels_last."""
    return weight if weight.ndim == 2 else weight.permute(0, 2, 3, 1).reshape(len(weight), -1)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not _available():
        return False
    if weight.dtype is torch.bfloat16:
        return _widens_copy(weight) or _multiplies_bf16()
    return weight.dtype is torch.float32 and weight.numel() >= MIN_FP32_NUMEL and tuning.prefers_onednn()


def _has_room(weight: Tensor) -> bool:
    """Return whether half of the machine's memory stays free beside a weight's copy, or what FISEDIT_PACK asks for."""
    wanted = os.environ.get("FISEDIT_PACK")
    return wanted == "1" or (wanted != "0" and available_bytes() - weight.nbytes >= memory_bytes(weight.device) // 2)


def _multiplies_bf16() -> bool:
    """Return whether the CPU multiplies bf16, and oneDNN may use it: ONEDNN_MAX_CPU_ISA can forbid that."""
    cpu = torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 (torch has no public name)
    return cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 (likewise)


def _widens_copy(weight: Tensor) -> bool:
    """Return whether a weight's copy is in float32."""
    return widens(weight) and weight.numel() >= MIN_WIDENED_NUMEL


def widens(x: Tensor) -> bool:
    """Return whether products with a tensor are computed in float32 though it is in bf16."""
    return x.dtype is torch.bfloat16 and x.device.type == "cpu" and tuning.prefers_fp32()


def _widened(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _ordered(weight: Tensor) -> Tensor:
    order = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 (torch has no public name)
    packed: Tensor = order(weight.float() if _widens_copy(weight) else weight, None)
    return packed


def _product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    multiply, dtype = torch.ops.mkldnn._linear_pointwise.default, rows.dtype  # noqa: SLF001 (torch has no public name)
    if packed.dtype is not dtype:
        rows, bias = rows.float(), _widened(bias)
    out: Tensor = multiply(rows, packed, bias, "none", [], "")
    return out.to(dtype)


def _packed(weight: Tensor) -> Tensor | None:
    """The current copy of a weight, None for one that is not packed."""
    key = id(weight)
    found = _copies.get(key)
    if found is not None and found.weight() is weight and found.state == _state(weight):
        return found.packed
    if not (isinstance(weight, torch.nn.Parameter) and _can_pack(weight)) or weight.is_inference():
        return None
    if not _has_room(weight):
        return None
    copy = _Copy(
        ref(weight, lambda weight_ref: _drop_copy(key, weight_ref)),
        _state(weight),
        _sample(weight).clone(),
        _ordered(matrix(weight.detach())),
    )
    _copies[key] = copy
    return copy.packed


def _unpacked(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`; in float32 by oneDNN on CPUs where it is faster, which nothing is differentiated through."""
    is_fp32 = rows.dtype is torch.float32 and rows.device.type == "cpu"
    if is_fp32 and not torch.is_grad_enabled() and tuning.prefers_onednn() and _available():
        return _product(rows, weight, bias)
    return F.linear(rows, weight, bias)


def _state(weight: Tensor) -> tuple[int, int, torch.dtype]:
    """Address, version and dtype of a weight."""
    return weight.data_ptr(), write_count(weight), weight.dtype


def _sample(weight: Tensor) -> Tensor:
    """At most a thousand of a weight's numbers, spread over it."""
    count = min(1000, weight.numel())
    return weight.detach().as_strided((count,), (weight.numel() // count,))


def _drop_copy(key: int, weight_ref: ref[Tensor]) -> None:
    """Drop a dead weight's copy, as another parameter may get its id."""
    if key in _copies and _copies[key].weight is weight_ref:
        del _copies[key]


@cache
def _available() -> bool:
    """Return whether this build of torch has oneDNN's products with packed weights."""
    names = "_linear_pointwise", "_reorder_linear_weight"
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
