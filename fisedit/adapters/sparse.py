"""What an adapter's block does while a source is recorded and while an edit is replayed.

One changed cell changes its row, and then every column. But the block is exact on the active set if it runs on the set
grown by one and closed under rows x columns (`Closure`), at the cells' own places, with the recorded keys and values of
the rest of those rows and columns. What was recorded is then mixed at the active set alone, as everywhere. A source
that was made without the adapter has no such keys: there the block sees the closure and the reference alone.

Follows arXiv 2410.22901 for the block itself. Knows rows and positions; no samplers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisedit.adapters.places import places
from fisedit.adapters.row_column import Knit, Known, Seen, joined
from fisedit.graph import Role, Site
from fisedit.layers import Recording, Replay, map_of, rows_of
from fisedit.sparse_kernels import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffusers import UNet2DConditionModel

    from fisedit.adapters.guides import Guide
    from fisedit.adapters.row_column import KeyValue
    from fisedit.cache import StepFeatures
    from fisedit.plan import Closure

ROWS, COLUMNS = ("row_k", "row_v"), ("column_k", "column_v")


@dataclass(frozen=True, eq=False)
class KnitSite(Site):
    """An adapter's block at work; `reader` is the norm whose recorded input begins with the same map."""

    reader: str = ""


def sites(unet: UNet2DConditionModel, guides: Sequence[Guide]) -> tuple[KnitSite, ...]:
    """The blocks of all guides; what they record is told apart by the adapter's identity."""
    there = places(unet)
    return tuple(
        KnitSite(f"{guide.identity}.{name}", block.knit, Role.KNIT, there[name].level, there[name].reader)
        for guide in guides
        for name, block in guide.adapter.blocks.items()
    )


def remembered(identity: str, step: StepFeatures) -> bool:
    """Whether a step was recorded with the adapter of that identity."""
    return any(f"{identity}.{name}.x" in step for name in ("mid", "up_0", "up_1"))


def record_knit(run: Recording, site: KnitSite, x: Tensor, known: Known) -> Tensor:
    """Run densely; remember the map, and its own keys and values of both directions."""
    seen = Seen()
    gain = Knit.forward(site.module, x, known, seen)
    run.maps.maps[f"{site.name}.x"] = rows_of(x)
    for names, keys in ((ROWS, seen.rows), (COLUMNS, [keys.transpose(1, 2) for keys in seen.columns])):
        for name, lines in zip(names, keys, strict=True):
            run.maps.maps[f"{site.name}.{name}"] = lines.flatten(1, 2).contiguous()
    return gain


def replay_knit(run: Replay, site: KnitSite, x: Tensor, known: Known) -> Tensor:
    """Run on the closure of the active rows; what the map [B, C, R, 1] gains."""
    knit, closure, rows = site.module, run.level(site).closure, rows_of(x)
    tokens = knit.tokens(_grid(run, site, rows), closure.columns)
    own = knit.row_heads.keys(tokens)
    keys = _among(run, site, ROWS, own, closure.whole_rows, closure.columns)
    found = knit.row_heads(tokens, joined(keys, _lines(known.rows, closure.rows)))
    tokens = knit.tokens(found.transpose(1, 2), closure.rows)
    across = knit.column_heads.keys(tokens)
    keys = _among(run, site, COLUMNS, across, closure.whole_columns, closure.rows)
    found = knit.column_heads(tokens, joined(keys, _lines(known.columns, closure.columns)))
    if f"{site.name}.x" in run.source:
        run.overlay.maps[f"{site.name}.x"] = rows
        _keep(run, site, ROWS, own, closure)
        _keep(run, site, COLUMNS, tuple(lines.transpose(1, 2) for lines in across), closure)
    read = found.transpose(1, 2).flatten(1, 2).index_select(1, closure.read)
    return map_of(ops.conv3x3(read, run.level(site).same, knit.proj.weight, knit.proj.bias))


def _grid(run: Replay, site: KnitSite, rows: Tensor) -> Tensor:
    """The closure of the map as it enters the rows [B, r, c, C]: fresh where active, recorded elsewhere."""
    closure, knit = run.level(site).closure, site.module
    if knit.conv_in is not None:
        reads = run.level(site).closing
        halo = _recorded(run, site, reads.halo, rows.shape[2])
        inside: Tensor = ops.conv3x3(torch.cat([rows, halo], 1), reads, knit.conv_in.weight, knit.conv_in.bias)
    else:
        inside = _recorded(run, site, closure.positions, rows.shape[2]).index_copy_(1, closure.active, rows)
    grid: Tensor = inside.unflatten(1, (len(closure.rows), len(closure.columns)))
    return grid


def _recorded(run: Replay, site: KnitSite, positions: Tensor, channels: int) -> Tensor:
    """Rows of the source's map here [B, len(positions), C], whether it had the adapter or not."""
    own = f"{site.name}.x"
    rows = run.source.rows(own if own in run.source else site.reader, site.level, positions)
    return rows[..., :channels].contiguous()


def _among(
    run: Replay, site: KnitSite, names: tuple[str, str], own: KeyValue, lines: Tensor, at: Tensor
) -> tuple[Tensor, Tensor]:
    """The lines' keys and values from end to end: `own` at the places `at` of every line, recorded ones elsewhere."""
    if f"{site.name}.x" not in run.source:
        return own
    k, v = (run.source.rows(f"{site.name}.{name}", site.level, lines) for name in names)
    whole = [recorded.unflatten(1, (own[0].shape[1], -1)) for recorded in (k, v)]
    k, v = (recorded.index_copy_(2, at, fresh) for recorded, fresh in zip(whole, own, strict=True))
    return k, v


def _keep(run: Replay, site: KnitSite, names: tuple[str, str], own: tuple[Tensor, ...], closure: Closure) -> None:
    """Drop the closure's keys and values back to the active rows, for later edits to read."""
    for name, lines in zip(names, own, strict=True):
        run.overlay.maps[f"{site.name}.{name}"] = lines.flatten(1, 2).index_select(1, closure.active)


def _lines(keys: KeyValue, at: Tensor) -> KeyValue:
    k, v = (x.index_select(1, at) for x in keys)
    return k, v
