"""A study: the block of row/column attention with lines as long as the map, so that every token looks at every other.

It has the weights of family v5, by number and by name, the same places and the same conv that begins at zero; only what
tokens see differs, and with it the cost, which grows with the square of the map. So the two can be compared (see
`training/README.md`). It can be trained and run densely; the sparse engine and `load_adapter` refuse it. Beside it:
HelloMeme's, arXiv 2410.22901.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fisedit.adapters.row_column import Knit, Known, RowColumnAdapter, Seen, angles, joined


class Whole(Knit):
    """One block: every token looks at all of the map and of the reference, twice, as in two-dimensional attention."""

    def looks(self, height: int, width: int) -> tuple[int, int]:
        """As of `Knit`."""
        return 2 * height * width, 2 * height * width

    def read(self, reference: Tensor) -> Known:
        """What a reference's map [B, C, H, W] gives: it stands to the right of the map."""
        tokens = self._told(self.grid(reference).flatten(1, 2), reference, reference.shape[-1])
        return Known(self.row_heads.keys(tokens), self.column_heads.keys(tokens))

    def forward(self, x: Tensor, known: Known | None = None, seen: Seen | None = None) -> Tensor:
        """What a map [B * F, C, H, W] gains: [B * F, C, H, W], to be added to it. Arguments as of `Knit`."""
        found = self.grid(x).flatten(1, 2)[:, None]
        first, second = (known.rows, known.columns) if known else (None, None)
        for heads, keys in ((self.row_heads, first), (self.column_heads, second)):
            tokens = self._told(found[:, 0], x, 0)
            found = heads(tokens, joined(heads.keys(tokens), keys))
        gain: Tensor = self.proj(found.unflatten(2, x.shape[-2:])[:, 0].permute(0, 3, 1, 2))
        return gain

    def _told(self, cells: Tensor, like: Tensor, behind: int) -> Tensor:
        """Normed tokens of the cells [B, H * W, C] of a map like this in one line; half the channels tell x, half y."""
        height, width = like.shape[-2:]
        x, y = (
            angles(torch.arange(n, device=like.device) + at, self.channels // 2)
            for n, at in ((width, behind), (height, 0))
        )
        across, down = (torch.cat([each.sin(), each.cos()], 1) for each in (x, y))
        places = torch.cat([across.repeat(height, 1), down.repeat_interleave(width, 0)], 1)
        normed: Tensor = self.norm(cells + places.to(cells))
        return normed[:, None]


class WholeAdapter(RowColumnAdapter):
    """Such blocks for one UNet."""

    def block(self, channels: int, heads: int) -> Knit:
        """A fresh block."""
        return Whole(channels, heads)
