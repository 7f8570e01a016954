"""A block of row-column attention in a dense evaluation that records, and in a sparse one.

A changed cell changes its row, and then every column. But the block is exact at the active cells if it runs on their
`receptive_field`. It reads the recorded queries, keys and values of all other cells of those rows and columns. A source
that was made without the adapter has none of these. The block then reads the boxes around the active blobs, as if they
were the whole map, and the reference only.

Follows arXiv 2410.22901 for the block itself. Knows rows and positions; no samplers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fisedit.adapters.insertion_points import insertion_points
from fisedit.adapters.row_column.attention import ReferenceKeys, RowColumnBlock, Trace
from fisedit.adapters.row_column.block_convs import input_conv, output_conv
from fisedit.adapters.row_column.receptive_field import RecordedLines, find_receptive_field
from fisedit.adapters.row_column.variants import FAMILIES
from fisedit.errors import AdapterError
from fisedit.features.sites import Role
from fisedit.sparse.cached_rows import CachedRows
from fisedit.sparse.executor import ExtraSite
from fisedit.sparse.recording import DenseContext
from fisedit.sparse.row_layout import map_of, rows_of
from fisedit.sparse_kernels import ops

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.adapters.row_column.attention import KeyValue, LineAttention, RowColumnAdapter
    from fisedit.adapters.row_column.receptive_field import PaddedLines, ReceptiveField
    from fisedit.features.cache import CachedFeatures

ROWS, COLUMNS = ("row_q", "row_k", "row_v"), ("column_q", "column_k", "column_v")
"""The names of a block's recorded rows. Its map, `x`, is recorded too where that passes a conv first."""


@dataclass(frozen=True, eq=False)
class RowColumnSite(ExtraSite):
    """A block as a layer of an executor.

    Args:
        reader: name of the norm whose recorded input begins with the map that the block reads.
    """

    reader: str = ""

    def run_dense(self, run: DenseContext, *args: Any) -> Tensor:
        """See `run_dense_block`."""
        return run_dense_block(run, self, *args)

    def run_sparse(self, run: CachedRows, *args: Any) -> Tensor:
        """See `run_sparse_block`."""
        return run_sparse_block(run, self, *args)


def sites(unet: UNet2DConditionModel, identity: str, adapter: RowColumnAdapter) -> tuple[RowColumnSite, ...]:
    """The blocks of an adapter as layers of an executor.

    Args:
        unet: The UNet that the adapter is for.
        identity: The identity of the adapter; the start of the names under which its blocks record.
        adapter: its blocks.

    Raises:
        AdapterError: the blocks attend along no rows and columns.
    """
    points = insertion_points(unet)
    if any(type(block.row_column) is not RowColumnBlock for block in adapter.blocks.values()):
        raise AdapterError(
            f"sparse edits need attention along rows and columns, got an adapter of family "
            f"{adapter.family.name}; use one of {', '.join(FAMILIES)}"
        )
    return tuple(
        RowColumnSite(f"{identity}.{name}", block.row_column, Role.EXTRA, points[name].level, points[name].reader)
        for name, block in adapter.blocks.items()
    )


def is_recorded(identity: str, step: CachedFeatures) -> bool:
    """Return whether a step's features were recorded with an adapter.

    Args:
        identity: The identity of the adapter.
        step: features of a source's step.
    """
    return any(f"{identity}.{name}.{ROWS[0]}" in step for name in ("mid", "up_0", "up_1"))


def run_dense_block(run: DenseContext, site: RowColumnSite, x: Tensor, reference: ReferenceKeys) -> Tensor:
    """Run a block on whole maps, and record its queries, keys and values.

    Args:
        run: the evaluation.
        site: The site of the block.
        x: [B * F, C, H, W].
        reference: The reference's keys and values, as in `RowColumnBlock.forward`.

    Returns:
        The map's gain [B * F, C, H, W].
    """
    trace = Trace()
    gain = RowColumnBlock.forward(site.module, x, reference, trace)
    if site.module.conv_in is not None:
        run.maps.maps[f"{site.name}.x"] = rows_of(x)
    for names, found in ((ROWS, trace.rows), (COLUMNS, [keys.transpose(1, 2) for keys in trace.columns])):
        for name, lines in zip(names, found, strict=True):
            run.maps.maps[f"{site.name}.{name}"] = lines.flatten(1, 2).contiguous()
    return gain


def run_sparse_block(run: CachedRows, site: RowColumnSite, x: Tensor, reference: ReferenceKeys) -> Tensor:
    """Run a block on the receptive field of the active rows.

    Args:
        run: the evaluation.
        site: The site of the block.
        x: [B, C, R, 1], the active rows as a map.
        reference: The reference's keys and values, as in `RowColumnBlock.forward`.

    Returns:
        The gain of the active rows [B, C, R, 1].
    """
    block, width, recorded = site.module, run.level(site).width, f"{site.name}.{ROWS[0]}" in run.source
    cells = find_receptive_field(run.level(site), conv=block.conv_in is not None, recorded=recorded)
    tokens = block.tokens(_block_inputs(run, site, cells, rows_of(x)), cells.fresh % width, width)
    rows, columns = block.row_attention, block.column_attention
    queries, keys = _linear(rows.to_q, tokens), _keys(rows, tokens)
    if recorded:
        _record_active(run, site, ROWS, (queries, *keys), cells.active)
        queries = _recorded(run, site, ROWS[0], cells.changed).index_copy_(1, cells.fresh_in_changed, queries)
    reference_lines = _reference_lines(block, reference, cells)
    keys, valid = _mixed_key_values(run, site, ROWS[1:], keys, cells.row_keys, len(cells.rows))
    found = _linear(rows.to_out[0], _attend(queries, cells.row_queries, keys, reference_lines[0], valid))
    tokens = block.tokens(found, cells.changed // width, run.level(site).height)
    queries, keys = _linear(columns.to_q, tokens.index_select(1, cells.querying_in_changed)), _keys(columns, tokens)
    if recorded:
        run.overlay.maps[f"{site.name}.{COLUMNS[0]}"] = queries[:, : len(cells.active)].clone()
        _record_active(run, site, COLUMNS[1:], keys, cells.fresh_in_changed[cells.active])
        queries = _recorded(run, site, COLUMNS[0], cells.conv_inputs).index_copy_(
            1, cells.querying_in_conv_inputs, queries
        )
    keys, valid = _mixed_key_values(run, site, COLUMNS[1:], keys, cells.column_keys, len(cells.columns))
    found, end, level = (
        _attend(queries, cells.column_queries, keys, reference_lines[1], valid),
        output_conv(block),
        run.level(site),
    )
    if not recorded:
        found = found.new_zeros(len(found), len(level.read_positions), found.shape[2]).index_copy_(
            1, cells.conv_input_rows, found
        )
    return map_of(end.correct_border(end.forward(found, level.same, cells.tiles), cells))


def _block_inputs(run: CachedRows, site: RowColumnSite, cells: ReceptiveField, rows: Tensor) -> Tensor:
    """The fresh cells before the rows [B, F, C]: of the edit at active cells, of the source at all others."""
    block, channels = site.module, rows.shape[2]
    if cells.entering is not None:
        if f"{site.name}.x" in run.source:
            run.overlay.maps[f"{site.name}.x"] = rows
        rows = torch.cat([rows, _map(run, site, cells.entering.halo, channels)], 1)
        return input_conv(block.conv_in).forward(rows, cells.entering, cells.entering_tiles)
    if len(cells.fresh) == rows.shape[1]:
        return rows
    return _map(run, site, cells.fresh, channels).index_copy_(1, cells.active, rows)


def _map(run: CachedRows, site: RowColumnSite, positions: Tensor, channels: int) -> Tensor:
    """Rows of the source's map before the block [B, len(positions), C], whether the source had the adapter or not."""
    own = f"{site.name}.x"
    rows = run.source.rows(own if own in run.source else site.reader, site.level, positions)
    return rows[..., :channels].contiguous()


def _recorded(run: CachedRows, site: RowColumnSite, name: str, positions: Tensor) -> Tensor:
    return run.source.rows(f"{site.name}.{name}", site.level, positions)


def _mixed_key_values(
    run: CachedRows,
    site: RowColumnSite,
    names: tuple[str, ...],
    fresh: KeyValue,
    keys: RecordedLines | PaddedLines,
    lines: int,
) -> tuple[KeyValue, Tensor | None]:
    """Keys and values of lines [B, lines, n, C], and which of them are not padding (None: all)."""
    if isinstance(keys, RecordedLines):
        whole, valid = (_recorded(run, site, name, keys.whole) for name in names), None
        k, v = (each.index_copy_(1, keys.fresh, new) for each, new in zip(whole, fresh, strict=True))
    else:
        (k, v), valid = (new.index_select(1, keys.at) for new in fresh), keys.real
    return (k.unflatten(1, (lines, -1)), v.unflatten(1, (lines, -1))), valid


def _attend(
    queries: Tensor, query_lines: PaddedLines, keys: KeyValue, reference_lines: KeyValue, valid: Tensor | None
) -> Tensor:
    """Attention of the queries of cells [B, N, C] over their lines and the reference's."""
    batch, lines = queries.shape[0], keys[0].shape[1]
    padded = queries.index_select(1, query_lines.at).unflatten(1, (lines, -1)).flatten(0, 1)
    frames = batch // len(reference_lines[0])
    k, v = (x.flatten(0, 1) for x in keys)
    reference_k, reference_v = (
        (x if frames == 1 else x.repeat_interleave(frames, 0)).flatten(0, 1) for x in reference_lines
    )
    found = ops.row_column_attention(
        padded, (k, v), (reference_k, reference_v), None if valid is None else valid.repeat(batch, 1)
    )
    return found.view(batch, -1, queries.shape[2]).index_select(1, query_lines.back)


_CACHE: WeakKeyDictionary[ReferenceKeys, WeakKeyDictionary[ReceptiveField, tuple[KeyValue, KeyValue]]] = (
    WeakKeyDictionary()
)


def _reference_lines(
    block: RowColumnBlock, reference: ReferenceKeys, cells: ReceptiveField
) -> tuple[KeyValue, KeyValue]:
    """A reference's keys and values of the queried rows and columns, by head [B, lines, H, n, C / H]; cached."""
    cached = _CACHE.setdefault(reference, WeakKeyDictionary())
    if cells not in cached:
        rows = _split_heads(reference.rows, cells.rows, block.row_attention.heads)
        cached[cells] = rows, _split_heads(reference.columns, cells.columns, block.column_attention.heads)
    return cached[cells]


def _split_heads(keys: KeyValue, lines: Tensor, heads: int) -> KeyValue:
    k, v = (x.index_select(1, lines).unflatten(3, (heads, -1)).transpose(2, 3).contiguous() for x in keys)
    return k, v


def _linear(layer: Any, rows: Tensor) -> Tensor:
    return ops.norm_linear(rows, layer.weight, layer.bias)


def _keys(heads: LineAttention, tokens: Tensor) -> KeyValue:
    return _linear(heads.to_k, tokens), _linear(heads.to_v, tokens)


def _record_active(
    run: CachedRows, site: RowColumnSite, names: tuple[str, ...], fresh: tuple[Tensor, ...], active: Tensor
) -> None:
    """Put what was computed at the active cells into the overlay, for later edits."""
    for name, rows in zip(names, fresh, strict=True):
        run.overlay.maps[f"{site.name}.{name}"] = rows.index_select(1, active)
