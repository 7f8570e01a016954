"""torch's kernels, the default on every device: gather-then-linear or one dense conv over a crop, fp32 statistics.

Same signatures as `reference`. Weights in channels_last are used in place: a [C_out, C_in, 3, 3] tensor laid out that
way is a [C_out, 9 * C_in] matrix already.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fisedit.models.group_norm import group_norm as models_group_norm
from fisedit.sparse_kernels import prepacked, reference, tuning
from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.operands import (
    NO_EPILOGUE,
    ConvEpilogue,
    LayerNormParams,
    RecordedInput,
    RecordedMap,
    Rows,
    join_rows,
    read_recorded,
)
from fisedit.sparse_kernels.prepacked import conv as dense_conv
from fisedit.sparse_kernels.prepacked import dense_linear
from fisedit.sparse_kernels.reference import time_projections
from fisedit.sparse_kernels.reference_group_norm import row_statistics, summed_group_norm_affine
from fisedit.sparse_kernels.row_plan import TAPS, KernelMap, Level

__all__ = [  # the reference's own where torch does it in one go
    "attention",
    "composite",
    "conv3x3",
    "cross_attention",
    "dense_attention",
    "dense_conv",
    "dense_group_norm",
    "dense_group_norm_affine",
    "dense_linear",
    "group_norm",
    "group_norm_affine",
    "group_statistics",
    "mixed_group_norm_affine",
    "norm_conv3x3",
    "norm_geglu",
    "norm_linear",
    "row_column_attention",
    "row_statistics",
    "scatter_rows",
    "summed_group_norm_affine",
    "time_projections",
]


MAX_SCORES = 1 << 20
"""Attention's scores at a time: 2 MiB of them, in one buffer. Fresh memory for each piece took twice the time."""

MAX_FUSED_KEYS = 512
"""Keys up to which torch's fused attention takes half the time of two products: .13 for .28 ms at 144 x 256."""


def conv3x3(rows: Tensor, kernel_map: KernelMap, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.conv3x3`; the cheaper of the two forms by the measured table in `tuning`."""
    padded = torch.cat([rows, rows.new_zeros(len(rows), 1, rows.shape[2])], 1)
    form = cropped_conv if tuning.prefers_cropped_conv(kernel_map) else gathered_conv
    return form(padded, kernel_map, weight, bias)


def gathered_conv(padded: Tensor, kernel_map: KernelMap, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`conv3x3` as one GEMM over gathered neighbours.

    Args:
        padded: [B, R + G + 1, C_in], the zero row last.
        kernel_map: The kernel map of the conv.
        weight: [C_out, C_in, 3, 3].
        bias: [C_out] or None.
    """
    batch, count, channels = padded.shape
    patches = padded.view(-1, channels).index_select(0, kernel_map.batched_table(batch, count))
    return prepacked.linear(patches.view(batch, -1, TAPS * channels), weight, bias)


def cropped_conv(padded: Tensor, kernel_map: KernelMap, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`conv3x3` as one dense conv over the bounding box of the outputs; see `gathered_conv`."""
    region = kernel_map.crop
    crop = padded.index_select(1, region.table).unflatten(1, (region.height, region.width)).permute(0, 3, 1, 2)
    out = prepacked.conv(crop, weight, bias, kernel_map.stride).permute(0, 2, 3, 1).flatten(1, 2)
    return out if kernel_map.waste == 1 else out.index_select(1, region.output_index)


def group_statistics(rows: Tensor, groups: int) -> Tensor:
    """See `reference.group_statistics`; accumulates in float32, returns float64."""
    batch, _, channels = rows.shape
    numbers = rows.float()
    sums = torch.stack([numbers.sum(1), numbers.square().sum(1)], -1)  # [B, C, 2]
    grouped: Tensor = sums.view(batch, groups, channels // groups, 2).sum(2, dtype=torch.float64)
    return grouped


def dense_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.dense_group_norm`.

    On a CPU torch's kernel computes the statistics anyway, and keeps them in float32 for float32 weights, which changes
    no bit of the output. On CUDA it keeps them in the dtype of the map.
    """
    if x.is_cuda:
        return F.group_norm(x, groups, weight, bias, eps), _statistics_of_map(x, groups)
    channels, size = x.shape[1], x[0, 0].numel()
    if not (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.stride(0) == x[0].numel()):
        x = x.contiguous()  # torch's own test for channels_last looks at the stride of a batch of one, too
    out, mean, variance = models_group_norm(x, groups, weight.float(), bias.float(), eps)
    return out, torch.stack([mean, variance + mean.square()], -1) * (size * (channels // groups))


def _statistics_of_map(x: Tensor, groups: int) -> Tensor:
    """`group_statistics` of a map [B, C, ...] in two reductions that sum in float32."""
    grouped = x.unflatten(1, (groups, -1))
    axes = tuple(range(2, grouped.ndim))
    norms = torch.linalg.vector_norm(grouped, dim=axes, dtype=torch.float32)
    return torch.stack([grouped.sum(axes, dtype=torch.float32), norms.square()], -1).double()


def group_norm(rows: Tensor, statistics: Tensor, count: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `reference.group_norm`; one multiply-add a row with a scale and shift per channel."""
    return _apply(_affine_of(statistics, count, weight, bias, eps), rows, torch.empty_like(rows))


def dense_group_norm_affine(
    rows: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `reference.dense_group_norm_affine`; on a CPU torch's own norm is faster than sums of a short map."""
    size, channels = rows.shape[1:]
    if size <= tuning.SHORT_MAP and tuning.prefers_dense_norm(rows, size):
        x = rows.transpose(1, 2).unsqueeze(-1).contiguous()
        _, statistics = dense_group_norm(x, groups, weight, bias, eps)
    else:
        statistics = group_statistics(rows, groups)
    return _affine_of(statistics, size * (channels // groups), weight, bias, eps), statistics


def _affine_of(statistics: Tensor, count: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Scale and shift of every channel, float32 [B, 2, C]."""
    groups = statistics.shape[1]
    mean, square = (statistics / count).unbind(-1)
    rstd = torch.addcmul(square, mean, mean, value=-1).clamp_(min=0).add_(eps).rsqrt_()
    scale = rstd.float()[..., None] * weight.view(groups, -1)  # [B, groups, C / groups]
    shift = torch.addcmul(bias.view(groups, -1), mean.float()[..., None], scale, value=-1)
    return torch.stack([scale.flatten(1), shift.flatten(1)], 1)


def _apply(affine: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Rows times scale plus shift, in one multiply-add."""
    return torch.addcmul(affine[:, 1:], rows, affine[:, :1], out=out)


def group_norm_affine(
    rows: Rows,
    recorded: Tensor,
    statistics: Tensor,
    num_rows: Tensor | None,
    count: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `reference.group_norm_affine`; accumulates in float32, and treats fresh and recorded rows as one tensor."""
    rows, (branches, groups, _) = join_rows(rows), statistics.shape
    if num_rows is None:
        mixed = statistics - group_statistics(recorded, groups)
        mixed += group_statistics(rows, groups)
        return _affine_of(mixed, count, weight, bias, eps), mixed
    absent = torch.arange(rows.shape[1], device=rows.device) >= num_rows[:, None]
    both = torch.stack([recorded, rows], 1).float().masked_fill_(absent[:, None, :, None], 0)  # [B, 2, R, C]
    sums = torch.stack([both.sum(2), both.square_().sum(2)], -1).unflatten(2, (groups, -1)).sum(3).double()
    mixed = (statistics.repeat_interleave(len(rows) // branches, 0) - sums[:, 0]).add_(sums[:, 1])
    return _affine_of(mixed, count, weight, bias, eps), mixed


def mixed_group_norm_affine(
    rows: Tensor,
    recorded: RecordedInput,
    level: Level,
    halo: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.mixed_group_norm_affine`.

    Recorded statistics are updated by the fresh rows. On a CPU those of a small map are computed anew instead, so that
    they are not worth keeping.
    """
    is_small = tuning.prefers_dense_norm(rows, level.size)
    old_statistics = None if is_small or level.whole else recorded.statistics()
    if old_statistics is None:
        mixed = rows if level.whole else recorded.whole().index_copy_(1, level.active, rows)
        affine, statistics = dense_group_norm_affine(mixed, groups, weight, bias, eps)
        return affine, mixed.index_select(1, halo), None if is_small else statistics
    read = recorded.rows(level.read_positions if len(halo) else level.active)
    count = level.size * (rows.shape[2] // groups)
    affine, statistics = group_norm_affine(rows, read[:, : level.rows], old_statistics, None, count, weight, bias, eps)
    return affine, read[:, level.rows :], statistics


def norm_conv3x3(
    rows: Rows,
    halo: Tensor,
    kernel_map: KernelMap | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    epilogue: ConvEpilogue = NO_EPILOGUE,
) -> Tensor:
    """See `reference.norm_conv3x3`.

    A `KernelMap` of exact size takes the cheaper of two forms, as in `conv3x3`; padded indices are one GEMM over
    gathered neighbours.
    """
    padded = _padded(join_rows(rows), halo, affine)
    items, count, channels = padded.shape
    if isinstance(kernel_map, KernelMap):
        out = (cropped_conv if tuning.prefers_cropped_conv(kernel_map) else gathered_conv)(
            padded, kernel_map, weight, bias
        )
    else:
        start = torch.arange(0, items * count, count, device=halo.device)[:, None, None]
        flat = padded.view(-1, channels).index_select(0, (kernel_map + start).flatten())
        out = prepacked.linear(flat.view(items, -1, TAPS * channels), weight, bias)
    time, residual, shortcut = epilogue
    if time is not None:
        out += time[:, None]
    if shortcut is not None:
        out += norm_linear(*shortcut)
    return out if residual is None else out.add_(residual)


def _padded(rows: Tensor, halo: Tensor, affine: Tensor | None) -> Tensor:
    """[rows | halo | one zero row], after scale, shift and SiLU if there is an affine: [B, R + G + 1, C]."""
    active = rows.shape[1]
    padded = halo.new_empty(len(rows), active + halo.shape[1] + 1, rows.shape[2])
    padded[:, -1] = 0
    if affine is None:
        padded[:, :active], padded[:, active:-1] = rows, halo
        return padded
    _apply(affine, rows, padded[:, :active])
    _apply(affine, halo, padded[:, active:-1])
    return F.silu(padded, inplace=True)


def norm_linear(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None = None,
    layer_norm: LayerNormParams | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `reference.norm_linear`; two tensors side by side are two GEMMs, not a third tensor."""
    if affine is not None:
        rows = join_rows(rows)
        rows = _apply(affine, rows, torch.empty_like(rows))
    if layer_norm is not None:
        rows = join_rows(rows)
        rows = F.layer_norm(rows, rows.shape[-1:], *layer_norm)
    if isinstance(rows, Tensor):
        out = prepacked.linear(rows, weight, bias)
        return out if residual is None else out.add_(residual)
    first, second = rows
    one, other = weight.flatten(1).split([first.shape[-1], second.shape[-1]], 1)
    out = F.linear(first, one, bias).add_(F.linear(second, other))
    return out if residual is None else out.add_(residual)


def norm_geglu(rows: Tensor, weight: Tensor, bias: Tensor, layer_norm: LayerNormParams) -> Tensor:
    """See `reference.norm_geglu`."""
    hidden, gate = norm_linear(rows, weight, bias, layer_norm=layer_norm).chunk(2, -1)
    return hidden * F.gelu(gate)


def cross_attention(
    rows: Tensor,
    layer_norm: LayerNormParams,
    weight: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    recorded_query: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.cross_attention`."""
    query = norm_linear(rows, weight, None, layer_norm=layer_norm)
    if recorded_query is not None:
        query[len(query) - len(recorded_query) :] = recorded_query
    return dense_attention(query, key, value, heads), query


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recorded_key: RecordedMap,
    recorded_value: RecordedMap,
    placement: RowPlacement,
    heads: int,
    scales: tuple[RecordedMap, RecordedMap] | None = None,
) -> Tensor:
    """See `reference.attention`; torch's kernel over one map of keys, into which the fresh ones are copied."""
    key_scales, value_scales = scales or (None, None)
    keys = mixed_tokens(read_recorded(recorded_key, key_scales), key, placement)
    values = mixed_tokens(read_recorded(recorded_value, value_scales), value, placement)
    return dense_attention(query, keys, values, heads)


def mixed_tokens(recorded: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """Recorded keys or values of every item with its fresh rows among them.

    Padding goes to a position behind the map, so that nothing waits for the number of rows.

    Args:
        recorded: [S, P, C].
        rows: [B, R, C].
        placement: positions of the rows.

    Returns:
        [B, P, C].
    """
    branches, size, channels = recorded.shape
    mixed = recorded.new_empty(len(rows), size + 1, channels)
    mixed.unflatten(0, (branches, -1))[:, :, :-1] = recorded[:, None]
    start = torch.arange(0, mixed[..., 0].numel(), size + 1, device=rows.device)[:, None]
    mixed.view(-1, channels).index_copy_(0, (placement.positions + start).flatten(), rows.reshape(-1, channels))
    return mixed[:, :-1]


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """See `reference.dense_attention`.

    In bf16 it is two products and a softmax, in pieces that share one buffer. On Zen 4 that takes .36 to .53 of torch's
    fused kernel. As scores are rounded, outputs differ by .5 % from float64's, where the fused kernel's differ
    by .2 %. CPUs that multiply faster in float32 run the fused kernel in float32.
    """
    if query.dtype is not torch.bfloat16 or query.device.type != "cpu" or keys.shape[1] <= MAX_FUSED_KEYS:
        return reference.dense_attention(query, keys, values, heads)
    if tuning.prefers_fp32():
        return reference.dense_attention(query.float(), keys.float(), values.float(), heads).to(query.dtype)
    batch, count, size = *query.shape[:2], keys.shape[1]
    scaled = query * (query.shape[2] // heads) ** -0.5
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1) for t in (scaled, keys, values))
    out = torch.empty_like(q)
    heads_at_once, rows_at_once = max(1, MAX_SCORES // (count * size)), max(1, MAX_SCORES // size)
    buffer = q.new_empty(min(heads_at_once, len(q)) * min(rows_at_once, count) * size)
    for i in range(0, len(q), heads_at_once):
        for j in range(0, count, rows_at_once):
            at = slice(i, i + heads_at_once), slice(j, j + rows_at_once)
            scores = buffer[: q[at].shape[0] * q[at].shape[1] * size].view(*q[at].shape[:2], size)
            torch.bmm(q[at], k[at[0]].transpose(1, 2), out=scores)
            torch.bmm(torch.softmax(scores, -1, out=scores), v[at[0]], out=out[at])
    attended: Tensor = out.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2)
    return attended


def row_column_attention(
    query: Tensor, own: tuple[Tensor, Tensor], reference_lines: tuple[Tensor, Tensor], valid: Tensor | None = None
) -> Tensor:
    """See `reference.row_column_attention`; in bf16 products and a softmax in pieces, as in `dense_attention`."""
    if query.dtype is not torch.bfloat16 or query.device.type != "cpu":
        return reference.row_column_attention(query, own, reference_lines, valid)
    (_, heads, others, width), count = reference_lines[0].shape, own[0].shape[1]
    q, k, v = (t.unflatten(2, (heads, width)).transpose(1, 2).flatten(0, 1) for t in (query * width**-0.5, *own))
    other_keys, other_values = (t.flatten(0, 1) for t in reference_lines)
    padding = None if valid is None else ~valid.repeat_interleave(heads, 0)[:, None]
    out = torch.empty_like(q)
    lines_at_once = max(1, MAX_SCORES // (q.shape[1] * (count + others)))
    for at in (slice(i, i + lines_at_once) for i in range(0, len(q), lines_at_once)):
        scores = torch.bmm(q[at], k[at].transpose(1, 2))
        if padding is not None:
            scores.masked_fill_(padding[at], -torch.inf)
        scores = torch.cat([scores, torch.bmm(q[at], other_keys[at].transpose(1, 2))], 2).softmax(2)
        torch.bmm(scores[..., :count], v[at], out=out[at]).add_(torch.bmm(scores[..., count:], other_values[at]))
    attended: Tensor = out.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)
    return attended


def scatter_rows(full: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """See `reference.scatter_rows`; waits for nothing."""
    padded = F.pad(full, (0, 0, 0, 1)).scatter_(1, placement.positions[..., None].expand_as(rows), rows)
    return full.copy_(padded[:, :-1])


def composite(base: Tensor, rows: Tensor, placement: RowPlacement) -> Tensor:
    """See `reference.composite`; waits for nothing."""
    at = placement.positions[: len(rows), None].expand(-1, rows.shape[2], -1)
    full = F.pad(base.flatten(2), (0, 1)).expand(len(rows), -1, -1).contiguous()
    mixed: Tensor = full.scatter(2, at, rows.transpose(1, 2))[..., :-1].unflatten(2, base.shape[2:])
    return mixed
