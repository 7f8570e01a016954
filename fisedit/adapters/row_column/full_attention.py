"""A study: the row-column block with the whole map as one line, so that every token attends to all others.

It has the weights of family v5, by number and by name, the same insertion points and the same conv that begins at zero.
Only the keys of a token differ, and with them the cost, which grows with the square of the map. So the two can be
compared (see `training/README.md`). It can be trained and run densely; the sparse engine and `load_adapter` refuse it.
Follows arXiv 2410.22901 (HelloMeme) for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fisedit.adapters.row_column.attention import (
    ReferenceKeys,
    RowColumnAdapter,
    RowColumnBlock,
    Trace,
    angles,
    append_reference,
)


class FullAttentionBlock(RowColumnBlock):
    """One block: every token attends to all of the map and of the reference, twice."""

    def num_keys(self, height: int, width: int) -> tuple[int, int]:
        """See `RowColumnBlock.num_keys`."""
        return 2 * height * width, 2 * height * width

    def read(self, reference: Tensor) -> ReferenceKeys:
        """See `RowColumnBlock.read`; the reference is to the right of the map."""
        tokens = self._tokens(self.grid(reference).flatten(1, 2), reference, reference.shape[-1])
        return ReferenceKeys(self.row_attention.keys(tokens), self.column_attention.keys(tokens))

    def forward(self, x: Tensor, reference: ReferenceKeys | None = None, trace: Trace | None = None) -> Tensor:
        """See `RowColumnBlock.forward`."""
        found = self.grid(x).flatten(1, 2)[:, None]
        first, second = (reference.rows, reference.columns) if reference else (None, None)
        for heads, keys in ((self.row_attention, first), (self.column_attention, second)):
            tokens = self._tokens(found[:, 0], x, 0)
            found = heads(tokens, append_reference(heads.keys(tokens), keys))
        gain: Tensor = self.proj(found.unflatten(2, x.shape[-2:])[:, 0].permute(0, 3, 1, 2))
        return gain

    def _tokens(self, cells: Tensor, like: Tensor, offset: int) -> Tensor:
        """Normalised tokens of cells [B, H * W, C] as one line; half the channels hold x, half y."""
        height, width = like.shape[-2:]
        x, y = (
            angles(torch.arange(n, device=like.device) + at, self.channels // 2)
            for n, at in ((width, offset), (height, 0))
        )
        by_x, by_y = (torch.cat([each.sin(), each.cos()], 1) for each in (x, y))
        positions = torch.cat([by_x.repeat(height, 1), by_y.repeat_interleave(width, 0)], 1)
        normed: Tensor = self.norm(cells + positions.to(cells))
        return normed[:, None]


class FullAttentionAdapter(RowColumnAdapter):
    """Full attention blocks for one UNet."""

    def block(self, channels: int, heads: int) -> RowColumnBlock:
        """A fresh block."""
        return FullAttentionBlock(channels, heads)
