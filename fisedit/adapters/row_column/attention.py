"""Row-column attention: a feature map attends along its rows, then its columns, to itself and to a reference's map.

Follows arXiv 2410.22901 (Zhang et al., HelloMeme), where it is called "spatial knitting". The tokens of a map attend
along their row to that row and to the reference's, then along their column likewise. A 3x3 conv that begins at zero
adds the result to the map. Every published family of reference adapters consists of the modules here (see `variants`).
The reference's keys and values are the same in all steps: `read` computes them once. Only the map's own tokens have
queries. Knows tensors; neither files nor UNets.

Maps are [B, C, H, W]; lines of tokens [B, lines, n, C], a row's tokens in the order of x, a column's of y.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisedit.adapters.row_column.variants import module_name
from fisedit.errors import InputError
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fisedit.adapters.row_column.variants import AdapterFamily

TABLE_LENGTH = 128
"""Positions that a stored table holds: those of a row of 64 and of its reference's."""

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of lines of tokens, [B, lines, n, C] each."""


@dataclass(frozen=True, eq=False)
class ReferenceKeys:
    """A reference's keys and values for one block, the same in all steps.

    Args:
        rows: keys and values of the rows, [B, H, W, C] each.
        columns: keys and values of the columns, [B, W, H, C] each.
    """

    rows: KeyValue
    columns: KeyValue

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the reference's map."""
        return self.rows[0].shape[1], self.rows[0].shape[2]

    def last(self, batch: int) -> ReferenceKeys:
        """The keys and values of the last `batch` items."""
        if batch >= len(self.rows[0]):
            return self
        return ReferenceKeys(*((k[-batch:], v[-batch:]) for k, v in (self.rows, self.columns)))


@dataclass(eq=False)
class Trace:
    """Queries, keys and values of the map itself in one dense pass, with shapes as in `ReferenceKeys`.

    Args:
        rows: those of the rows.
        columns: those of the columns.
    """

    rows: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)


class LineAttention(nn.Module):
    """The projections of a multi-head attention, under diffusers' names; only the output has a bias.

    Args:
        channels: C, of queries and outputs.
        heads: divides C.
        width: channels of the tokens that give keys and values; None for C.
    """

    def __init__(self, channels: int, heads: int, width: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(width or channels, channels, bias=False)
        self.to_v = nn.Linear(width or channels, channels, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def keys(self, tokens: Tensor) -> KeyValue:
        """Keys and values of tokens."""
        return self.to_k(tokens), self.to_v(tokens)

    def attend(self, query: Tensor, keys: KeyValue) -> Tensor:
        """Attention before `to_out`.

        Args:
            query: [B, lines, n, C].
            keys: keys and values of the same lines, [B, lines, m, C] each.

        Returns:
            [B, lines, n, C].
        """
        q, k, v = (x.flatten(0, 1).unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (query, *keys))
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        lines: Tensor = found.unflatten(0, query.shape[:2])
        return lines

    def forward(self, tokens: Tensor, keys: KeyValue) -> Tensor:
        """Attention of tokens.

        Args:
            tokens: [B, lines, n, C].
            keys: keys and values of the same lines, [B, lines, m, C] each.

        Returns:
            [B, lines, n, C].
        """
        out: Tensor = self.to_out[0](self.attend(self.to_q(tokens), keys))
        return out


class PositionTable(nn.Module):
    """Stored positions, sine and cosine in turn.

    Args:
        channels: C.
        length: positions.
    """

    pe: Tensor

    def __init__(self, channels: int, length: int = TABLE_LENGTH) -> None:
        super().__init__()
        phases = angles(torch.arange(length), channels)
        self.register_buffer("pe", torch.stack([phases.sin(), phases.cos()], -1).flatten(1)[None])


class RowColumnBlock(nn.Module):
    """One block: attention along rows, along columns, and the conv that gives the gain.

    Args:
        channels: C, divisible by 2 and by `heads`.
        heads: The number of heads of each attention.
        names: The names of the rows' and the columns' attention in files.
        table: positions are stored.
        conv_in: maps go through a 3x3 conv first.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        names: tuple[str, str] = ("attn1", "attn2"),
        *,
        table: bool = False,
        conv_in: bool = False,
    ) -> None:
        super().__init__()
        self._names, self.channels = names, channels
        self.conv_in = nn.Conv2d(channels, channels, 3, padding=1) if conv_in else None
        self.pos_embed = PositionTable(channels) if table else None
        for name in names:
            self.add_module(name, LineAttention(channels, heads))
        self.norm = nn.LayerNorm(channels)
        self.proj = nn.Conv2d(channels, channels, 3, padding=1)
        for weights in self.proj.parameters():
            nn.init.zeros_(weights)

    @property
    def row_column(self) -> RowColumnBlock:
        """The block that runs at every step."""
        return self

    @property
    def row_attention(self) -> LineAttention:
        """Attention along rows."""
        heads: LineAttention = self.get_submodule(self._names[0])  # type: ignore[assignment]  # made in __init__
        return heads

    @property
    def column_attention(self) -> LineAttention:
        """Attention along columns."""
        heads: LineAttention = self.get_submodule(self._names[1])  # type: ignore[assignment]  # made in __init__
        return heads

    def num_keys(self, height: int, width: int) -> tuple[int, int]:
        """Keys of one token along rows and along columns, those of the reference included."""
        return 2 * width, 2 * height

    def tokens(self, lines: Tensor, at: Tensor, length: int = 0) -> Tensor:
        """Normalise lines with their positions.

        Args:
            lines: [B, lines, n, C].
            at: int64 [n], positions along the line.
            length: positions below it are computed once each, where many tokens share them; 0 for one position a token.

        Returns:
            [B, lines, n, C].
        """
        phases = self._positions(_span(length, at) if length else at).to(lines)
        normed: Tensor = self.norm(lines + (phases.index_select(0, at) if length else phases))
        return normed

    def grid(self, x: Tensor) -> Tensor:
        """A map [B, C, H, W] as it enters the rows: [B, H, W, C]."""
        return (x if self.conv_in is None else self.conv_in(x)).permute(0, 2, 3, 1)

    def read(self, reference: Tensor) -> ReferenceKeys:
        """Compute a reference's keys and values; its rows continue those of the map, its columns likewise.

        Args:
            reference: the reference's map, [B, C, H, W].

        Raises:
            InputError: it is larger than the stored positions reach.
        """
        height, width = reference.shape[-2:]
        if self.pos_embed is not None and 2 * max(height, width) > TABLE_LENGTH:
            side = TABLE_LENGTH // 2 * LATENT_FACTOR
            raise InputError(
                f"an adapter of the families v1 to v4 takes pictures up to {side} pixels a side, got a feature map of "
                f"{width}x{height}; use one of family v5 or v5b, or a smaller picture"
            )
        grid = self.grid(reference)
        rows = self.tokens(grid, _span(width, reference) + width)
        columns = self.tokens(grid.transpose(1, 2), _span(height, reference) + height)
        return ReferenceKeys(self.row_attention.keys(rows), self.column_attention.keys(columns))

    def forward(self, x: Tensor, reference: ReferenceKeys | None = None, trace: Trace | None = None) -> Tensor:
        """Compute the gain of a map.

        Args:
            x: [B * F, C, H, W].
            reference: from `read`, of B maps of the same size, each for F frames; None for the map alone.
            trace: receives the map's own queries, keys and values.

        Returns:
            [B * F, C, H, W], to be added to the map.
        """
        height, width = x.shape[-2:]
        trace = Trace() if trace is None else trace
        rows, heads = self.tokens(self.grid(x), _span(width, x)), self.row_attention
        query, keys = heads.to_q(rows), heads.keys(rows)
        trace.rows += query, *keys
        found = heads.to_out[0](heads.attend(query, append_reference(keys, reference.rows if reference else None)))
        columns, heads = self.tokens(found.transpose(1, 2), _span(height, x)), self.column_attention
        query, keys = heads.to_q(columns), heads.keys(columns)
        trace.columns += query, *keys
        found = heads.to_out[0](heads.attend(query, append_reference(keys, reference.columns if reference else None)))
        gain: Tensor = self.proj(found.permute(0, 3, 2, 1))
        return gain

    def _positions(self, at: Tensor) -> Tensor:
        """[n, C]."""
        if self.pos_embed is not None:
            return self.pos_embed.pe[0, at]
        phases = angles(at, self.channels)
        return torch.cat([phases.sin(), phases.cos()], -1)


class TwoStageBlock(nn.Module):
    """Family v5b: the reference goes through a block of its own first, once for all steps.

    Args:
        channels: The channels, as in `RowColumnBlock`.
        heads: The number of heads, as in `RowColumnBlock`.
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attn_ref = RowColumnBlock(channels, heads, ("attnx", "attny"), conv_in=True)
        self.attn = RowColumnBlock(channels, heads, ("attnx", "attny"), conv_in=True)

    @property
    def row_column(self) -> RowColumnBlock:
        """The block that runs at every step."""
        return self.attn

    def read(self, reference: Tensor) -> ReferenceKeys:
        """See `RowColumnBlock.read`."""
        return self.attn.read(self.attn_ref(reference))

    def forward(self, x: Tensor, reference: ReferenceKeys | None = None) -> Tensor:
        """See `RowColumnBlock.forward`."""
        gain: Tensor = self.attn(x, reference)
        return gain


def append_reference(own: KeyValue, reference: KeyValue | None) -> KeyValue:
    """A map's keys and values, followed by those of its reference, which are repeated for every frame."""
    if reference is None:
        return own
    frames = own[0].shape[0] // reference[0].shape[0]
    expanded = reference if frames == 1 else [x.repeat_interleave(frames, 0) for x in reference]
    k, v = (torch.cat(pair, 2) for pair in zip(own, expanded, strict=True))
    return k, v


class RowColumnAdapter(nn.Module):
    """A family's blocks for one UNet, named as in the published files; a fresh one adds zero until it is trained.

    Args:
        family: one of `FAMILIES`.
        channels: The channels of each of the family's insertion points, by name (see `AdapterFamily.insertion_points`).
        heads: The number of heads of every attention, or of those of each insertion point.
        config: The configuration of its file.
    """

    def __init__(
        self,
        family: AdapterFamily,
        channels: Mapping[str, int],
        heads: int | Sequence[int] = 8,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.family, self.config = family, dict(config or {})
        self.channels = dict(channels)
        each = [heads] * len(channels) if isinstance(heads, int) else list(heads)
        for (point, width), count in zip(channels.items(), each, strict=True):
            self._add(point, self.block(width, count))

    def block(self, channels: int, heads: int) -> RowColumnBlock | TwoStageBlock:
        """A fresh block of the family."""
        return (
            TwoStageBlock(channels, heads)
            if self.family.two_stage
            else RowColumnBlock(channels, heads, table=self.family.table)
        )

    @property
    def blocks(self) -> dict[str, RowColumnBlock | TwoStageBlock]:
        """The blocks by insertion point."""
        return {point: self.get_submodule(module_name(point, self.family)) for point in self.channels}  # type: ignore[misc]

    def read(self, maps: Mapping[str, Tensor]) -> dict[str, ReferenceKeys]:
        """Compute a reference's keys and values for every block.

        Args:
            maps: the reference's maps [B, C, H, W] by insertion point.

        Raises:
            InputError: a map is larger than the stored positions reach.
        """
        return {point: block.read(maps[point]) for point, block in self.blocks.items()}

    def _add(self, point: str, block: nn.Module) -> None:
        """Add a block under its published name."""
        parent, _, name = module_name(point, self.family).rpartition(".")
        if not parent:
            self.add_module(name, block)
            return
        if not hasattr(self, parent):
            self.add_module(parent, nn.ModuleDict())
        self.get_submodule(parent).add_module(name, block)


def _span(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, device=like.device)


def angles(at: Tensor, channels: int) -> Tensor:
    """Positions times the frequencies of sinusoidal embeddings.

    Args:
        at: positions [n].
        channels: C.

    Returns:
        float32 [n, C / 2].
    """
    steps = torch.arange(channels // 2, device=at.device, dtype=torch.float32)
    return at.float()[:, None] * torch.exp(steps * (-2 * math.log(10000.0) / channels))
