"""What an adapter's block does while a source is recorded and while an edit is replayed.

One changed cell changes its row, and then every column. But the block is exact on the active set if it runs on the
cells of `closure`, at their own places, with the recorded queries, keys and values of the rest of those rows and
columns. What was recorded is then mixed at the active set alone, as everywhere. A source that was made without the
adapter has none of these: there the block sees the boxes around the active blobs, as if they were the whole map, and
the reference alone.

Follows arXiv 2410.22901 for the block itself. Knows rows and positions; no samplers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fisedit.adapters.block_convs import end_of, entry_of
from fisedit.adapters.insertion_points import places
from fisedit.adapters.receptive_field import Keys, closure_of
from fisedit.adapters.row_column import Knit, Known, Seen
from fisedit.adapters.variants import FAMILIES
from fisedit.errors import AdapterError
from fisedit.sparse.executor import ExtraSite
from fisedit.sparse.layers import Recording, Replay, map_of, rows_of
from fisedit.sparse.modules import Role
from fisedit.sparse_kernels import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffusers import UNet2DConditionModel

    from fisedit.adapters.receptive_field import Closure, Lines
    from fisedit.adapters.row_column import Heads, KeyValue, RowColumnAdapter
    from fisedit.sparse.feature_cache import CachedFeatures

ROWS, COLUMNS = ("row_q", "row_k", "row_v"), ("column_q", "column_k", "column_v")
"""What is recorded of a block besides: its map, `x`, where that passes a conv first."""


@dataclass(frozen=True, eq=False)
class KnitSite(ExtraSite):
    """An adapter's block at work; `reader` is the norm whose recorded input begins with the same map."""

    reader: str = ""

    def run_dense(self, run: Recording, *args: Any) -> Tensor:
        """See `record_knit`."""
        return record_knit(run, self, *args)

    def run_sparse(self, run: Replay, *args: Any) -> Tensor:
        """See `replay_knit`."""
        return replay_knit(run, self, *args)


def sites(unet: UNet2DConditionModel, adapters: Sequence[tuple[str, RowColumnAdapter]]) -> tuple[KnitSite, ...]:
    """The blocks of some adapters.

    Args:
        unet: that the adapters are for.
        adapters: identity, which tells what they record apart, and adapter.

    Raises:
        AdapterError: a block's attention runs along no rows and columns.
    """
    there = places(unet)
    for _, adapter in adapters:
        if any(type(block.knit) is not Knit for block in adapter.blocks.values()):
            raise AdapterError(
                f"sparse edits need attention along rows and columns, got an adapter of family "
                f"{adapter.family.name}; use one of {', '.join(FAMILIES)}"
            )
    return tuple(
        KnitSite(f"{identity}.{name}", block.knit, Role.EXTRA, there[name].level, there[name].reader)
        for identity, adapter in adapters
        for name, block in adapter.blocks.items()
    )


def remembered(identity: str, step: CachedFeatures) -> bool:
    """Whether a step was recorded with the adapter of that identity."""
    return any(f"{identity}.{name}.{ROWS[0]}" in step for name in ("mid", "up_0", "up_1"))


def record_knit(run: Recording, site: KnitSite, x: Tensor, known: Known) -> Tensor:
    """Run densely; remember the map's own queries, keys and values."""
    seen = Seen()
    gain = Knit.forward(site.module, x, known, seen)
    if site.module.conv_in is not None:
        run.maps.maps[f"{site.name}.x"] = rows_of(x)
    for names, found in ((ROWS, seen.rows), (COLUMNS, [keys.transpose(1, 2) for keys in seen.columns])):
        for name, lines in zip(names, found, strict=True):
            run.maps.maps[f"{site.name}.{name}"] = lines.flatten(1, 2).contiguous()
    return gain


def replay_knit(run: Replay, site: KnitSite, x: Tensor, known: Known) -> Tensor:
    """Run on the closure of the active rows; what the map [B, C, R, 1] gains."""
    knit, width, recorded = site.module, run.level(site).width, f"{site.name}.{ROWS[0]}" in run.source
    cells = closure_of(run.level(site), conv=knit.conv_in is not None, recorded=recorded)
    tokens = knit.tokens(_entering(run, site, cells, rows_of(x)), cells.fresh % width, width)
    rows, columns = knit.row_heads, knit.column_heads
    asked, keys = _linear(rows.to_q, tokens), _keys(rows, tokens)
    if recorded:
        _keep(run, site, ROWS, (asked, *keys), cells.active)
        asked = _recorded(run, site, ROWS[0], cells.found).index_copy_(1, cells.found_fresh, asked)
    beside = _beside(knit, known, cells)
    keys, seen = _mixed(run, site, ROWS[1:], keys, cells.row_keys, len(cells.rows))
    found = _linear(rows.to_out[0], _look(asked, cells.row_asks, keys, beside[0], seen))
    tokens = knit.tokens(found, cells.found // width, run.level(site).height)
    asked, keys = _linear(columns.to_q, tokens.index_select(1, cells.asking)), _keys(columns, tokens)
    if recorded:
        run.overlay.maps[f"{site.name}.{COLUMNS[0]}"] = asked[:, : len(cells.active)].clone()
        _keep(run, site, COLUMNS[1:], keys, cells.found_fresh[cells.active])
        asked = _recorded(run, site, COLUMNS[0], cells.read).index_copy_(1, cells.read_asking, asked)
    keys, seen = _mixed(run, site, COLUMNS[1:], keys, cells.column_keys, len(cells.columns))
    found, end, level = _look(asked, cells.column_asks, keys, beside[1], seen), end_of(knit), run.level(site)
    if not recorded:
        found = found.new_zeros(len(found), len(level.read_positions), found.shape[2]).index_copy_(
            1, cells.reads, found
        )
    return map_of(end.framed(end.at(found, level.same, cells.tiles), cells))


def _entering(run: Replay, site: KnitSite, cells: Closure, rows: Tensor) -> Tensor:
    """The fresh cells as they enter the rows [B, F, C]: of active ones, and of the source's where those are not."""
    knit, channels = site.module, rows.shape[2]
    if cells.entering is not None:
        if f"{site.name}.x" in run.source:
            run.overlay.maps[f"{site.name}.x"] = rows
        rows = torch.cat([rows, _map(run, site, cells.entering.halo, channels)], 1)
        return entry_of(knit.conv_in).at(rows, cells.entering, cells.entering_tiles)
    if len(cells.fresh) == rows.shape[1]:
        return rows
    return _map(run, site, cells.fresh, channels).index_copy_(1, cells.active, rows)


def _map(run: Replay, site: KnitSite, positions: Tensor, channels: int) -> Tensor:
    """Rows of the source's map here [B, len(positions), C], whether it had the adapter or not."""
    own = f"{site.name}.x"
    rows = run.source.rows(own if own in run.source else site.reader, site.level, positions)
    return rows[..., :channels].contiguous()


def _recorded(run: Replay, site: KnitSite, name: str, positions: Tensor) -> Tensor:
    return run.source.rows(f"{site.name}.{name}", site.level, positions)


def _mixed(
    run: Replay, site: KnitSite, names: tuple[str, ...], fresh: KeyValue, keys: Keys | Lines, lines: int
) -> tuple[KeyValue, Tensor | None]:
    """Keys and values of lines [B, lines, n, C], and which of them are there (None: all)."""
    if isinstance(keys, Keys):
        whole, seen = (_recorded(run, site, name, keys.whole) for name in names), None
        k, v = (each.index_copy_(1, keys.fresh, new) for each, new in zip(whole, fresh, strict=True))
    else:
        (k, v), seen = (new.index_select(1, keys.at) for new in fresh), keys.real
    return (k.unflatten(1, (lines, -1)), v.unflatten(1, (lines, -1))), seen


def _look(asked: Tensor, asks: Lines, keys: KeyValue, beside: KeyValue, seen: Tensor | None) -> Tensor:
    """What queries of cells [B, N, C] find on their lines, and on the reference's beside them."""
    batch, lines = asked.shape[0], keys[0].shape[1]
    query = asked.index_select(1, asks.at).unflatten(1, (lines, -1)).flatten(0, 1)
    frames = batch // len(beside[0])
    k, v = (x.flatten(0, 1) for x in keys)
    beside_k, beside_v = ((x if frames == 1 else x.repeat_interleave(frames, 0)).flatten(0, 1) for x in beside)
    found = ops.row_column_attention(
        query, (k, v), (beside_k, beside_v), None if seen is None else seen.repeat(batch, 1)
    )
    return found.view(batch, -1, asked.shape[2]).index_select(1, asks.back)


_BESIDE: WeakKeyDictionary[Known, WeakKeyDictionary[Closure, tuple[KeyValue, KeyValue]]] = WeakKeyDictionary()


def _beside(knit: Knit, known: Known, cells: Closure) -> tuple[KeyValue, KeyValue]:
    """A reference's keys and values on the rows and the columns that ask, head by head, [B, lines, H, n, C / H]; made
    once an edit."""
    made = _BESIDE.setdefault(known, WeakKeyDictionary())
    if cells not in made:
        rows = _by_head(known.rows, cells.rows, knit.row_heads.heads)
        made[cells] = rows, _by_head(known.columns, cells.columns, knit.column_heads.heads)
    return made[cells]


def _by_head(keys: KeyValue, lines: Tensor, heads: int) -> KeyValue:
    k, v = (x.index_select(1, lines).unflatten(3, (heads, -1)).transpose(2, 3).contiguous() for x in keys)
    return k, v


def _linear(layer: Any, rows: Tensor) -> Tensor:
    return ops.norm_linear(rows, layer.weight, layer.bias)


def _keys(heads: Heads, tokens: Tensor) -> KeyValue:
    return _linear(heads.to_k, tokens), _linear(heads.to_v, tokens)


def _keep(run: Replay, site: KnitSite, names: tuple[str, ...], fresh: tuple[Tensor, ...], active: Tensor) -> None:
    """Drop what is fresh back to the active rows, for later edits to read."""
    for name, rows in zip(names, fresh, strict=True):
        run.overlay.maps[f"{site.name}.{name}"] = rows.index_select(1, active)
