"""The source of blocks' rows, and what is kept of them.

It is all that differs between an eager, a captured and a decoder's evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from fisedit.features.sites import CrossKeys
from fisedit.sparse_kernels.operands import Rows
from fisedit.sparse_kernels.row_plan import KernelMap, TextPart


class RowSource(Protocol):
    """The source of what blocks on active rows read and write beside their rows.

    Names are those of layer sites and their blocks.
    """

    def latents(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Active rows [B, R, 4] and halo rows [B, G, 4] of the latents [B, 4, h, w]."""

    def affine(self, name: str, norm: nn.GroupNorm, rows: Rows) -> Tensor:
        """A norm's scale and shift by the statistics of the whole map with fresh rows in it; keeps the rows.

        Args:
            name: The name of the norm.
            norm: A norm of C channels.
            rows: [B, R, C], fresh.

        Returns:
            float32 [B, 2, C].
        """

    def halo(self, name: str) -> Tensor:
        """Recorded rows [B, G, C] around the active ones, of the map that a norm or resampler reads."""

    def kernel_map(self, name: str) -> KernelMap | Tensor:
        """Return where the 3x3 conv behind a norm or of a resampler finds its neighbours in [active | halo | zero]."""

    def time(self, name: str, block: ResnetBlock2D, embedding: Tensor) -> Tensor:
        """Return what a ResNet block adds for the time.

        Args:
            name: The name of the block.
            block: The block whose projection is used.
            embedding: The time embedding [B, E].

        Returns:
            [B or 1, C].
        """

    def joined(self, rows: Tensor, skipped: Tensor) -> Rows:
        """The rows that enter an up block's ResNet block: its own and those that skipped the middle."""

    def weight(self, module: Any) -> Tensor:
        """The weight of a linear or convolution, with its LoRAs."""

    def qkv(self, name: str, attention: Any) -> tuple[Tensor, ...]:
        """Weights of the projections to queries, keys and values: three, or one with all three side by side."""

    def second_biases(self, name: str, block: Any) -> tuple[Tensor, Tensor | None]:
        """Biases of a ResNet block's second conv and of its shortcut, or their sum and None."""

    def folded_end(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of a transformer's last feed-forward layer and its proj_out in one, for [gated | residual];
        None where they are two layers."""

    def keep(self, name: str, rows: Tensor) -> None:
        """Keep rows for the overlay."""

    def self_attention(self, name: str, heads: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of active queries over every position's keys and values; keeps all three.

        Args:
            name: The name of the attention.
            heads: C is heads * width.
            query: [B, R, C].
            key: [B, R, C].
            value: [B, R, C].

        Returns:
            [B, R, C].
        """

    def text_keys(self, name: str) -> Tensor:
        """The text's keys or values [B, T, C]."""

    def text_parts(self, name: str) -> Sequence[TextPart]:
        """Parts of the text and the rows that attend to them; () where every row attends to all of it."""

    def cross_keys(self, name: str) -> Sequence[CrossKeys]:
        """Keys and values that a cross-attention reads beside the text's; () for none."""

    def recorded_query(self, name: str) -> Tensor | None:
        """The source's queries [E, R, C] that the last items attend with (attention injection), or None."""

    def keep_query(self, name: str, query: Tensor) -> None:
        """Keep cross-attention's queries for the overlay."""
