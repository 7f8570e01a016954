"""GroupNorm of whole maps on a CPU whose statistics hold for flat maps too.

torch adds up channels_last maps in float32, one position after the other. Where many of them are equal, all are rounded
the same way; and a variance, a difference of two sums, is lost. Knows tensors and norms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

MAX_ERROR = 1e-2
"""Largest relative error of a variance that is left as torch has it: half a percent of a map's spread. Where half of it
may be reached by a map's size alone, nothing is left to torch."""

CHUNK, SAMPLES = 4096, 1024
"""Positions that are added up at a time, and about how many the first guess of a mean is of."""


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """GroupNorm of maps on a CPU; torch's own, bit for bit, where its variance cannot be off by `MAX_ERROR`.

    Args:
        x: [B, C, ...].
        groups: Divides C.
        weight: [C].
        bias: [C].
        eps: Added to the variance.

    Returns:
        The normalised map, as `x`; mean and variance of every group, float64 [B, groups].
    """
    x = x if _is_channels_last(x) else x.contiguous()
    batch, channels, size = *x.shape[:2], x[0, 0].numel()
    rounding = 0.0 if x.is_contiguous() else size * 2**-25  # each addition is off by half a unit in the last place
    if rounding <= MAX_ERROR / 2:
        out, mean, rstd = torch.native_group_norm(x, weight, bias, batch, channels, size, groups, eps)
        if not rounding or rounding * (1 + float((mean * rstd).square().max())) <= MAX_ERROR:
            return out, mean.double(), rstd.double().pow(-2) - eps
    rows = x.movedim(1, -1).flatten(1, -2)
    mean, variance = _moments(rows, groups)
    out = torch.empty_like(rows)
    each, scale = (t.repeat_interleave(channels // groups, 1)[:, None] for t in (mean, (variance + eps).rsqrt()))
    near, scale = each.float(), (scale * weight).float()
    shift = (bias - (each - near) * scale).float()
    for chunk, result in zip(rows.split(CHUNK, 1), out.split(CHUNK, 1), strict=True):
        torch.addcmul(shift, chunk.float() - near, scale, out=result)
    return out.transpose(1, 2).unflatten(2, x.shape[2:]), mean, variance


def _is_channels_last(x: Tensor) -> bool:
    """Return whether torch's norm takes a map for channels_last, which the stride of a single picture decides too."""
    return (
        not x.is_contiguous()
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.stride(0) >= x[0].numel()  # attention's output, turned to a map of one picture, has less
    )


def _moments(rows: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of every group of rows [B, R, C], float64 [B, groups]: of distances from a first guess."""
    sample = rows[:, :: -(-rows.shape[1] // SAMPLES)].float().mean(1)
    guess = sample.unflatten(1, (groups, -1)).mean(-1)
    each = guess.repeat_interleave(rows.shape[2] // groups, 1)[:, None]
    sums = torch.zeros(2, *each.shape[::2], dtype=torch.float64)
    for chunk in rows.split(CHUNK, 1):
        distances = chunk.float() - each
        sums[0] += distances.sum(1)
        sums[1] += distances.square_().sum(1)
    moved, square = sums.unflatten(2, (groups, -1)).sum(-1) / (rows.shape[1] * (rows.shape[2] // groups))
    return guess.double() + moved, (square - moved.square()).clamp(min=0)


def apply(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    """A norm of a map, by `group_norm` where torch's own is not exact: of channels_last maps on a CPU.

    Args:
        norm: A norm, for its groups and weights.
        x: [B, C, ...].
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not _is_channels_last(x):
        return nn.GroupNorm.forward(norm, x)
    return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)[0]


class StableGroupNorm(nn.GroupNorm):
    """A GroupNorm that holds for flat maps."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalised map, as `x`."""
        return apply(self, x)


def stabilise(model: nn.Module) -> None:
    """Let a model's norms hold for flat maps; their weights and names stay.

    Args:
        model: A model; its norms become `StableGroupNorm`s.
    """
    for norm in plain_norms(model):
        norm.__class__ = StableGroupNorm


def plain_norms(model: nn.Module) -> list[nn.GroupNorm]:
    """The norms of a model that are torch's own, with torch's own forward."""
    return [module for module in model.modules() if type(module) is nn.GroupNorm and "forward" not in vars(module)]
