"""Attention along the rows, then the columns, of a feature map beside a reference's: HelloMeme's "spatial knitting".

Follows arXiv 2410.22901 (Zhang et al., HelloMeme). A map's tokens attend along their row to the row itself and to the
reference's, then along their column likewise; a 3x3 conv that begins at zero adds what they found to the map. Every
published family of reference adapters is made of the modules here (see `families`). The reference's keys and values do
not change over a picture's steps: `read` makes them once. Only the map's own tokens ask. Knows tensors; neither files
nor UNets.

Maps are [B, C, H, W]; lines of tokens [B, lines, n, C], where a row's tokens stand in the order of x, a column's of y.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisedit.adapters.variants import module_name
from fisedit.errors import InputError
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fisedit.adapters.variants import Family

TABLE = 128
"""Positions that a stored table holds: those of a row of 64 and of its reference's."""

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of lines of tokens, [B, lines, n, C] each."""


@dataclass(frozen=True, eq=False)
class Known:
    """What a reference gives to one block for all steps: keys and values of its rows [B, H, W, C] and of its columns
    [B, W, H, C]."""

    rows: KeyValue
    columns: KeyValue

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the reference's map."""
        return self.rows[0].shape[1], self.rows[0].shape[2]

    def last(self, batch: int) -> Known:
        """That of the last so many of a batch."""
        if batch >= len(self.rows[0]):
            return self
        return Known(*((k[-batch:], v[-batch:]) for k, v in (self.rows, self.columns)))


@dataclass(eq=False)
class Seen:
    """What one dense pass computed of the map itself, laid out as in `Known`: queries, keys and values."""

    rows: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)


class Heads(nn.Module):
    """The projections of a multi-head attention, under diffusers' names: no bias but that of the output."""

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

    def look(self, asked: Tensor, keys: KeyValue) -> Tensor:
        """What queries [B, lines, n, C] find among the keys of their line [B, lines, m, C], before `to_out`."""
        q, k, v = (x.flatten(0, 1).unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (asked, *keys))
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        lines: Tensor = found.unflatten(0, asked.shape[:2])
        return lines

    def forward(self, tokens: Tensor, keys: KeyValue) -> Tensor:
        """What tokens [B, lines, n, C] find among the keys of their line [B, lines, m, C]."""
        out: Tensor = self.to_out[0](self.look(self.to_q(tokens), keys))
        return out


class Table(nn.Module):
    """Stored positions, sine and cosine by turns."""

    pe: Tensor

    def __init__(self, channels: int, length: int = TABLE) -> None:
        super().__init__()
        turned = angles(torch.arange(length), channels)
        self.register_buffer("pe", torch.stack([turned.sin(), turned.cos()], -1).flatten(1)[None])


class Knit(nn.Module):
    """One block: rows, columns, and the conv that brings what they found.

    Args:
        channels: C, divisible by 2 and by `heads`. names: of the rows' and the columns' attention.
        table: positions are stored. conv_in: maps pass a 3x3 conv first.
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
        self.pos_embed = Table(channels) if table else None
        for name in names:
            self.add_module(name, Heads(channels, heads))
        self.norm = nn.LayerNorm(channels)
        self.proj = nn.Conv2d(channels, channels, 3, padding=1)
        for weights in self.proj.parameters():
            nn.init.zeros_(weights)

    @property
    def knit(self) -> Knit:
        """What runs at every step."""
        return self

    @property
    def row_heads(self) -> Heads:
        """Attention along rows."""
        heads: Heads = self.get_submodule(self._names[0])  # type: ignore[assignment]  # made in __init__
        return heads

    @property
    def column_heads(self) -> Heads:
        """Attention along columns."""
        heads: Heads = self.get_submodule(self._names[1])  # type: ignore[assignment]  # made in __init__
        return heads

    def looks(self, height: int, width: int) -> tuple[int, int]:
        """Keys that a token of a map looks at, along rows and along columns, its reference's among them."""
        return 2 * width, 2 * height

    def tokens(self, lines: Tensor, at: Tensor, length: int = 0) -> Tensor:
        """Normed tokens of lines [B, lines, n, C] that lie at positions int64 [n]; where many share few of them, below
        `length`, each is made once."""
        turned = self._positions(_span(length, at) if length else at).to(lines)
        normed: Tensor = self.norm(lines + (turned.index_select(0, at) if length else turned))
        return normed

    def grid(self, x: Tensor) -> Tensor:
        """A map [B, C, H, W] as it enters the rows: [B, H, W, C]."""
        return (x if self.conv_in is None else self.conv_in(x)).permute(0, 2, 3, 1)

    def read(self, reference: Tensor) -> Known:
        """What a reference's map [B, C, H, W] gives: its rows stand behind the map's, its columns below.

        Raises:
            InputError: it is larger than the stored positions reach.
        """
        height, width = reference.shape[-2:]
        if self.pos_embed is not None and 2 * max(height, width) > TABLE:
            side = TABLE // 2 * LATENT_FACTOR
            raise InputError(
                f"an adapter of the families v1 to v4 takes pictures up to {side} pixels a side, got a feature map of "
                f"{width}x{height}; use one of family v5 or v5b, or a smaller picture"
            )
        grid = self.grid(reference)
        rows = self.tokens(grid, _span(width, reference) + width)
        columns = self.tokens(grid.transpose(1, 2), _span(height, reference) + height)
        return Known(self.row_heads.keys(rows), self.column_heads.keys(columns))

    def forward(self, x: Tensor, known: Known | None = None, seen: Seen | None = None) -> Tensor:
        """What a map [B * F, C, H, W] gains: [B * F, C, H, W], to be added to it.

        Args:
            known: from `read`, of a map of the same size; every one of B is read by F frames. None: the map alone.
            seen: is given the map's own queries, keys and values.
        """
        height, width = x.shape[-2:]
        seen = Seen() if seen is None else seen
        rows, heads = self.tokens(self.grid(x), _span(width, x)), self.row_heads
        asked, keys = heads.to_q(rows), heads.keys(rows)
        seen.rows += asked, *keys
        found = heads.to_out[0](heads.look(asked, joined(keys, known.rows if known else None)))
        columns, heads = self.tokens(found.transpose(1, 2), _span(height, x)), self.column_heads
        asked, keys = heads.to_q(columns), heads.keys(columns)
        seen.columns += asked, *keys
        found = heads.to_out[0](heads.look(asked, joined(keys, known.columns if known else None)))
        gain: Tensor = self.proj(found.permute(0, 3, 2, 1))
        return gain

    def _positions(self, at: Tensor) -> Tensor:
        """[n, C]."""
        if self.pos_embed is not None:
            return self.pos_embed.pe[0, at]
        turned = angles(at, self.channels)
        return torch.cat([turned.sin(), turned.cos()], -1)


class Staged(nn.Module):
    """Family v5b: the reference is knitted alone first, once for all steps."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attn_ref = Knit(channels, heads, ("attnx", "attny"), conv_in=True)
        self.attn = Knit(channels, heads, ("attnx", "attny"), conv_in=True)

    @property
    def knit(self) -> Knit:
        """What runs at every step."""
        return self.attn

    def read(self, reference: Tensor) -> Known:
        """As of `Knit`."""
        return self.attn.read(self.attn_ref(reference))

    def forward(self, x: Tensor, known: Known | None = None) -> Tensor:
        """As of `Knit`."""
        gain: Tensor = self.attn(x, known)
        return gain


def joined(own: KeyValue, known: KeyValue | None) -> KeyValue:
    """A map's keys and values, and behind them those of its reference, for every frame."""
    if known is None:
        return own
    frames = own[0].shape[0] // known[0].shape[0]
    behind = known if frames == 1 else [x.repeat_interleave(frames, 0) for x in known]
    k, v = (torch.cat(pair, 2) for pair in zip(own, behind, strict=True))
    return k, v


class RowColumnAdapter(nn.Module):
    """A family's blocks for one UNet, under the names of the published files.

    Args:
        family: one of `FAMILIES`. channels: of each of the family's places, by name (see `Family.places`).
        heads: of every attention, or of each place. config: settings that its file came with.

    A fresh one changes nothing: what it adds is zero until it is trained.
    """

    def __init__(
        self,
        family: Family,
        channels: Mapping[str, int],
        heads: int | Sequence[int] = 8,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.family, self.config = family, dict(config or {})
        self.channels = dict(channels)
        each = [heads] * len(channels) if isinstance(heads, int) else list(heads)
        for (place, width), count in zip(channels.items(), each, strict=True):
            self._add(place, self.block(width, count))

    def block(self, channels: int, heads: int) -> Knit | Staged:
        """A fresh block of the family."""
        return Staged(channels, heads) if self.family.staged else Knit(channels, heads, table=self.family.table)

    @property
    def blocks(self) -> dict[str, Knit | Staged]:
        """Place -> its block."""
        return {place: self.get_submodule(module_name(place, self.family)) for place in self.channels}  # type: ignore[misc]

    def read(self, taps: Mapping[str, Tensor]) -> dict[str, Known]:
        """What a reference gives to every block.

        Args:
            taps: place -> the reference's map there, [B, C, H, W].

        Raises:
            InputError: a map is larger than the stored positions reach.
        """
        return {place: block.read(taps[place]) for place, block in self.blocks.items()}

    def _add(self, place: str, block: nn.Module) -> None:
        """Put a block where its published name says."""
        parent, _, name = module_name(place, self.family).rpartition(".")
        if not parent:
            self.add_module(name, block)
            return
        if not hasattr(self, parent):
            self.add_module(parent, nn.ModuleDict())
        self.get_submodule(parent).add_module(name, block)


def _span(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, device=like.device)


def angles(at: Tensor, channels: int) -> Tensor:
    """Positions [n] times the frequencies of sinusoidal embeddings: [n, C / 2], float32."""
    steps = torch.arange(channels // 2, device=at.device, dtype=torch.float32)
    return at.float()[:, None] * torch.exp(steps * (-2 * math.log(10000.0) / channels))
