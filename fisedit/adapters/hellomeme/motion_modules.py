"""Motion modules: layers in which the frames of a clip attend to one another, at every position by itself.

Three kinds, by what was published: HelloMeme's of v3 and v4, HelloMeme's of v5 (arXiv 2410.22901), and AnimateDiff's
(arXiv 2307.04725), which HelloMeme's v1 and v2 use. Each gives what the maps of a clip gain: `forward` on whole maps,
`gain` or `attend` at some rows of them.

Shapes: B clips (guidance branches), F frames, [B * F, R, C] rows, [B * F, C, H, W] maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D
from torch import Tensor, nn

from fisedit.adapters.row_column.attention import LineAttention, PositionTable
from fisedit.sparse.row_layout import rows_of
from fisedit.sparse_kernels import ops

if TYPE_CHECKING:
    from collections.abc import Callable

POSITIONS = 154
"""The positions of a v3 module's table, the pads among them."""


@dataclass(frozen=True, eq=False)
class ClipInputs:
    """The inputs of motion modules beside the maps.

    Args:
        frames: F.
        time: embeddings of the timestep [B * F, E].
        pad: maps [B, 2, C, H, W] of the frames before the first and after the last; None for none.
    """

    frames: int
    time: Tensor
    pad: Tensor | None = None

    def clips(self, x: Tensor) -> Tensor:
        """[B * F, ...] -> [B, F, ...]."""
        clips: Tensor = x.unflatten(0, (-1, self.frames))
        return clips


@dataclass(frozen=True, eq=False)
class OtherRows:
    """The values that a module may ask of the rows that it is not given: those where the source stands still.

    Args:
        size: rows of a whole map.
        statistics: A function of the number of groups: sums and sums of squares, float64 [B, groups, 2], over those
            rows of one frame.
        pad: rows [B, 2, R, C] of the frames at either side at the rows that are given; None for none.
        pad_statistics: The same as `statistics`, of both pads' whole maps.
    """

    size: int
    statistics: Callable[[int], Tensor]
    pad: Tensor | None = None
    pad_statistics: Callable[[int], Tensor] | None = None


class MotionBlock(nn.Module):
    """HelloMeme v3 and v4: attention over the clip and a frame at either side, a feed-forward layer and a 3x3 conv.

    Args:
        channels: C.
        time_width: The width of the time's embedding.
        heads: The number of heads of the attention.
    """

    reads_pads = True

    def __init__(self, channels: int, time_width: int = 1280, heads: int = 8) -> None:
        super().__init__()
        self.channels = channels
        self.pos_embed_t = PositionTable(channels, POSITIONS)
        self.time_emb_proj = nn.Linear(time_width, channels)
        self.temp_attn, self.norm = LineAttention(channels, heads), nn.LayerNorm(channels)
        self.ff = FeedForward(channels, inner_dim=2 * channels, activation_fn="geglu")
        self.proj = nn.Conv2d(channels, channels, 3, padding=1)
        for weights in self.proj.parameters():
            nn.init.zeros_(weights)

    def attend(self, rows: Tensor, pad: Tensor, inputs: ClipInputs) -> Tensor:
        """Return the rows that enter the conv.

        Args:
            rows: [B * F, R, C].
            pad: [B, 2, R, C].
            inputs: The inputs of the clip.

        Returns:
            [B * F, R, C].
        """
        clip = torch.cat([pad[:, :1], inputs.clips(rows), pad[:, 1:]], 1)
        clip = clip + inputs.clips(self.time_emb_proj(inputs.time))[:, :1, None]
        lines = clip.transpose(1, 2)
        tokens = self.norm(lines + self.pos_embed_t.pe[0, : lines.shape[2]])
        found = self.ff(self.temp_attn(tokens, self.temp_attn.keys(tokens)))[:, :, 1:-1]
        attended: Tensor = found.transpose(1, 2).flatten(0, 1).contiguous()
        return attended

    def forward(self, x: Tensor, inputs: ClipInputs) -> Tensor:
        """The gain of whole maps."""
        assert inputs.pad is not None
        found = self.attend(rows_of(x), _rows_of_pad(inputs.pad), inputs)
        gain: Tensor = self.proj(found.transpose(1, 2).unflatten(2, x.shape[2:]))
        return gain


class FrameTransformer(nn.Module):
    """AnimateDiff: diffusers' own module.

    Args:
        transformer: The module itself.
    """

    reads_pads = False

    def __init__(self, transformer: AnimateDiffTransformer3D) -> None:
        super().__init__()
        self.transformer, self.channels = transformer, int(transformer.in_channels)

    def gain(self, rows: Tensor, inputs: ClipInputs, others: OtherRows) -> Tensor:
        """The gain of rows [B * F, R, C]."""
        return transform(self.transformer, inputs.clips(rows), others).flatten(0, 1)

    def forward(self, x: Tensor, inputs: ClipInputs) -> Tensor:
        """The gain of whole maps."""
        gain: Tensor = self.transformer(x, num_frames=inputs.frames) - x
        return gain


class PaddedTransformer(nn.Module):
    """HelloMeme v5: a transformer over the clip and a frame at either side, if there are such, and one over the clip.

    Where the source stands still the first is taken to find nothing, so that its rows need not be computed there.

    Args:
        channels: C.
        heads: The number of heads of the attentions.
        groups: The number of groups of the norms.
    """

    reads_pads = True

    def __init__(self, channels: int, heads: int = 8, groups: int = 32) -> None:
        super().__init__()
        self.channels = channels
        self.attn1, self.attn_pad = (_transformer(channels, heads, groups) for _ in range(2))

    def gain(self, rows: Tensor, inputs: ClipInputs, others: OtherRows) -> Tensor:
        """The gain of rows [B * F, R, C]."""
        clip = inputs.clips(rows)
        if others.pad is None:
            return transform(self.attn1, clip, others).flatten(0, 1)
        padded = torch.cat([others.pad[:, :1], clip, others.pad[:, 1:]], 1)
        found = 2 * clip + transform(self.attn_pad, padded, others)[:, 1:-1]
        twice = OtherRows(
            others.size, lambda groups: others.statistics(groups) * torch.tensor([2.0, 4.0]).to(rows.device)
        )
        return (found + transform(self.attn1, found, twice) - clip).flatten(0, 1)

    def forward(self, x: Tensor, inputs: ClipInputs) -> Tensor:
        """The gain of whole maps."""
        found = x
        if inputs.pad is not None:
            padded = torch.cat([inputs.pad[:, :1], inputs.clips(x), inputs.pad[:, 1:]], 1).flatten(0, 1)
            padded = self.attn_pad(padded, num_frames=inputs.frames + 2)
            found = x + padded.unflatten(0, (-1, inputs.frames + 2))[:, 1:-1].flatten(0, 1)
        gain: Tensor = self.attn1(found, num_frames=inputs.frames) - x
        return gain


MotionModule = MotionBlock | FrameTransformer | PaddedTransformer


def transform(module: Any, clip: Tensor, others: OtherRows) -> Tensor:
    """Run diffusers' `AnimateDiffTransformer3D` on some rows of a clip, without its residual.

    Args:
        module: The module that is run.
        clip: rows [B, F, R, C], its pads included.
        others: the clip's other rows.

    Returns:
        [B, F, R, C].
    """
    batch, frames, count, channels = clip.shape
    norm, rows = module.norm, clip.flatten(0, 1)
    padded = others.pad_statistics is not None and others.pad is not None
    still = frames - 2 if padded else frames
    own = ops.group_statistics(rows.contiguous(), norm.num_groups).unflatten(0, (batch, frames))
    own = own[:, 1:-1] if padded else own
    sums = own.sum(1) + still * others.statistics(norm.num_groups)
    if padded:
        assert others.pad_statistics is not None
        sums = sums + others.pad_statistics(norm.num_groups)
    affine = _affine(norm, sums / (frames * others.size * (channels // norm.num_groups)))
    normed = torch.addcmul(affine[:, 1, None, None], clip, affine[:, 0, None, None])
    hidden = module.proj_in(normed.transpose(1, 2).flatten(0, 1))
    for block in module.transformer_blocks:
        hidden = block(hidden)
    found: Tensor = module.proj_out(hidden).unflatten(0, (batch, count)).transpose(1, 2)
    return found


def _affine(norm: nn.GroupNorm, moments: Tensor) -> Tensor:
    """Scale and shift [B, 2, C] of a norm, by means and mean squares [B, groups, 2]."""
    mean, square = moments.unbind(-1)
    scale = (square - mean.square()).clamp_min(0).add(norm.eps).rsqrt()
    width = norm.num_channels // norm.num_groups
    scale = scale.repeat_interleave(width, 1) * norm.weight
    shift = norm.bias - mean.repeat_interleave(width, 1) * scale
    return torch.stack([scale, shift], 1).to(norm.weight)


def _rows_of_pad(pad: Tensor) -> Tensor:
    """[B, 2, C, H, W] -> [B, 2, H * W, C]."""
    return pad.flatten(3).transpose(2, 3)


def _transformer(channels: int, heads: int, groups: int) -> AnimateDiffTransformer3D:
    return AnimateDiffTransformer3D(
        num_attention_heads=heads,
        attention_head_dim=channels // heads,
        in_channels=channels,
        norm_num_groups=groups,
        double_self_attention=True,
        positional_embeddings="sinusoidal",
        num_positional_embeddings=32,
    )
