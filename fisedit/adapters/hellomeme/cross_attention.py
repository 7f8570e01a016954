"""Attention of a map's rows, then columns, over tokens: the block of HelloMeme's control networks.

Follows arXiv 2410.22901. Knows tensors only.
"""

from __future__ import annotations

import torch.nn.functional as F
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from fisedit.adapters.row_column.attention import LineAttention, PositionTable


class MapToTokens(nn.Module):
    """Halve a map's size and let it attend to tokens; its output is zero until it is trained.

    Args:
        channels_in: C of the map.
        channels: C of the output.
        width: D of the tokens.
        heads: The number of heads of both attentions.
        positions: the longest line, and the most tokens.
    """

    def __init__(
        self, channels_in: int, channels: int, width: int, heads: int = 8, positions: tuple[int, int] = (64, 64)
    ) -> None:
        super().__init__()
        self.conv = DownsampleBlock(channels_in, channels)
        self.pos_embed, self.pos_embed_hidden = (
            PositionTable(channels, positions[0]),
            PositionTable(width, positions[1]),
        )
        self.norm1, self.attn1 = nn.LayerNorm(channels), LineAttention(channels, heads, width)
        self.norm2, self.attn2 = nn.LayerNorm(channels), LineAttention(channels, heads, width)
        self.ff = FeedForward(channels, inner_dim=2 * channels, activation_fn="geglu")
        self.proj = nn.Conv2d(channels, channels, 3, padding=1)
        for weights in self.proj.parameters():
            nn.init.zeros_(weights)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Compute the output.

        Args:
            x: [B, C_in, 2H, 2W].
            tokens: [B, T, D].

        Returns:
            [B, C, H, W].
        """
        lines = self.conv(x).permute(0, 2, 3, 1)
        read = (tokens + self.pos_embed_hidden.pe[:, : tokens.shape[1]])[:, None]
        for norm, heads in ((self.norm1, self.attn1), (self.norm2, self.attn2)):
            query = norm(lines + self.pos_embed.pe[:, None, : lines.shape[2]])
            lines = heads(query, heads.keys(read.expand(-1, lines.shape[1], -1, -1))).transpose(1, 2)
        gain: Tensor = self.proj(self.ff(lines).permute(0, 3, 1, 2))
        return gain


class DownsampleBlock(nn.Module):
    """A residual block of stride 2; its norms are by instance and have no weights.

    Args:
        channels_in: C of the map.
        channels: C of the output.
    """

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.downsample = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride=2, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, 2H, 2W] -> [B, C, H, W]."""
        inside = F.relu(F.instance_norm(self.conv1(x)))
        shortcut = F.silu(F.instance_norm(self.downsample(x)))
        return F.relu(F.instance_norm(self.conv2(inside)) + shortcut)
