"""HelloMeme's control networks: a drawn head pose and the numbers of an expression, to maps that are added to a UNet's.

Follows arXiv 2410.22901 and its published files, families v1 to v5; every module has the names of the files. The maps
do not depend on noisy latents. Knows tensors; neither files nor UNets.

Pictures are [N, 3, H, W] in [-1, 1]; maps [N, C, h, w] by insertion point (see `insertion_points`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import TimestepEmbedding, get_timestep_embedding
from torch import Tensor, nn

from fisedit.adapters.hellomeme.cross_attention import DownsampleBlock, MapToTokens
from fisedit.adapters.row_column.attention import LineAttention, PositionTable, RowColumnBlock, angles
from fisedit.values.drive import EMOTION, EXPRESSIONS, FACE

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXPRESSION_SCALE, _EMOTION_SCALE = 500.0, 20.0

_LINE = 64
"""Positions that a stored table of lines holds, families v1 to v3."""


def embed_numbers(numbers: Tensor, width: int) -> Tensor:
    """Numbers [N, T] as sinusoids [N, T, width], cosines first."""
    flat = get_timestep_embedding(numbers.flatten().float(), width, flip_sin_to_cos=True, downscale_freq_shift=0)
    embedded: Tensor = flat.view(*numbers.shape, width)
    return embedded


class DriveNetwork(nn.Module):
    """Families v1 to v3: the picture is halved again and again, and attends to the numbers at every size.

    Args:
        channels: The channels of the first conv and of every block.
        width: D of the tokens.
        scale: by which the picture is made smaller first.
        positions: the most tokens.
        reads: "expression", "emotion", or both of them in turn.
        points: insertion points of the blocks' maps.
        side_convs: channels of the maps for down blocks 0 and 1, made of those for up blocks 2 and 1 (family v3).

    Attributes:
        channels: The channels of the maps by insertion point.
        reads_expressions: whether it reads ARKit's coefficients.
        reads_emotions: whether it reads PD-FGC's vector.
        multiple: latent cells that a picture's sides must be multiples of.
        max_side: the longest side of a picture in pixels, or None.
    """

    def __init__(
        self,
        channels: Sequence[int] = (128, 320, 640, 1280),
        width: int = 320,
        scale: int = 8,
        positions: int = 64,
        reads: Sequence[str] = ("expression",),
        points: Sequence[str] = ("down_0", "down_1", "down_2"),
        side_convs: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.width, self.scale, self.points = width, scale, tuple(points)
        self.conv_in = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        if side_convs:
            self.conv_up2_down0 = nn.Conv2d(channels[2], side_convs[0], 1, bias=False)
            self.conv_up1_down1 = nn.Conv2d(channels[3], side_convs[1], 1, bias=False)
        if "expression" in reads:
            self.exp_proj = TimestepEmbedding(width, width)
            self.face_proj = TimestepEmbedding(FACE[1], width)
        if "emotion" in reads:
            self.emo_proj = TimestepEmbedding(width, width)
        pairs = pairwise(channels)
        self.blocks_down = nn.ModuleList(MapToTokens(a, b, width, positions=(_LINE, positions)) for a, b in pairs)
        self.channels = dict(zip(self.points, channels[1:], strict=True))
        if side_convs:
            self.channels |= {f"down_{i}": count for i, count in enumerate([*side_convs, channels[4], channels[4]])}
        self.reads_expressions, self.reads_emotions = "expression" in reads, "emotion" in reads
        self.multiple, self.max_side = 1, 2 * scale * _LINE

    def tokens(self, expression: Tensor | None, face: Tensor | None, emotion: Tensor | None) -> Tensor:
        """The numbers as tokens [N, T, D], in the precision of the weights.

        Args:
            expression: [N, 51], with `face`; or None.
            face: [N, 3, 1024].
            emotion: [N, 548], instead.
        """
        like = self.conv_in.weight
        if expression is None or face is None:
            assert emotion is not None, "an expression and a face, or an emotion, are given"
            found: Tensor = self.emo_proj(embed_numbers(emotion * _EMOTION_SCALE, self.width).to(like))
            return found
        numbers = embed_numbers(expression * _EXPRESSION_SCALE, self.width).to(like)
        both: Tensor = self.exp_proj(torch.cat([self.face_proj(face.to(like)), numbers], 1))
        return both

    def forward(
        self,
        picture: Tensor,
        expression: Tensor | None = None,
        face: Tensor | None = None,
        emotion: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The maps by insertion point; arguments as in `tokens`, and the drawn pose."""
        x, tokens = self.conv_in(_smaller(picture, self.scale)), self.tokens(expression, face, emotion)
        found: dict[str, Tensor] = {}
        for point, block in zip(self.points, self.blocks_down, strict=True):
            x = found[point] = block(x, tokens)
        if hasattr(self, "conv_up2_down0"):
            found |= {"down_0": self.conv_up2_down0(found["up_2"]), "down_1": self.conv_up1_down1(found["up_1"])}
            found |= {"down_2": found["up_0"], "down_3": found["up_0"]}
        return found


class LinesToTokens(nn.Module):
    """Families v4 and v5: a map's rows and columns attend to tokens, with one norm for all.

    Args:
        channels: C.
        width: D of the tokens.
        heads: The number of heads of both attentions.
        table: positions are stored (v4).
    """

    def __init__(self, channels: int, width: int, heads: int = 8, *, table: bool) -> None:
        super().__init__()
        self.channels, self.token_width = channels, width
        self.conv_in = nn.Conv2d(channels, channels, 3, padding=1)
        if table:
            self.pos_embed, self.pos_embed_hidden = PositionTable(channels, 512), PositionTable(width, 1024)
        self.norm = nn.LayerNorm(channels)
        self.attn1, self.attn2 = (LineAttention(channels, heads, width) for _ in range(2))
        self.ff = FeedForward(channels, inner_dim=16 * channels, activation_fn="geglu")
        self.proj = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """[N, C, h, w] and [N, T, D] to [N, C, h, w]."""
        lines = self.conv_in(x).permute(0, 2, 3, 1)
        read = (tokens + self._positions("pos_embed_hidden", tokens.shape[1], self.token_width, tokens))[:, None]
        for heads in (self.attn1, self.attn2):
            query = self.norm(lines + self._positions("pos_embed", lines.shape[2], self.channels, lines))
            lines = heads(query, heads.keys(read.expand(-1, lines.shape[1], -1, -1))).transpose(1, 2)
        found: Tensor = self.proj(self.norm(self.ff(lines)).permute(0, 3, 1, 2))
        return found

    def _positions(self, table: str, count: int, channels: int, like: Tensor) -> Tensor:
        """[count, channels]: stored, or computed with all sines first."""
        if hasattr(self, table):
            stored: Tensor = getattr(self, table).pe[0, :count]
            return stored.to(like)
        phases = angles(torch.arange(count, device=like.device), channels)
        return torch.cat([phases.sin(), phases.cos()], -1).to(like)


class SmallUNet(nn.Module):
    """Families v4 and v5: the picture on its way down attends to tokens, and comes up again.

    Args:
        channels: The channels of every size on the way down.
        last: channels of the finest map on the way up.
        width: D of the tokens.
        table: True if positions are stored, as in `LinesToTokens`.
    """

    def __init__(
        self, channels: Sequence[int] = (320, 640, 1280), last: int = 320, width: int = 2048, *, table: bool
    ) -> None:
        super().__init__()
        down, up = [3, *channels], [*reversed(channels), last]
        self.down_blocks = nn.ModuleList(DownsampleBlock(a, b) for a, b in pairwise(down))
        self.up_blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1),
                nn.InstanceNorm2d(b),
                nn.SiLU(),
                nn.Upsample(scale_factor=2, mode="bilinear"),
            )
            for a, b in pairwise(up)
        )
        self.attn_blocks = nn.ModuleList(LinesToTokens(c, width, table=table) for c in channels)

    def forward(self, x: Tensor, tokens: Tensor) -> list[Tensor]:
        """Maps of one size after another, the coarsest first, of [N, 3, 8h, 8w] and [N, T, D]."""
        skips: list[Tensor] = []
        for down, attend in zip(self.down_blocks, self.attn_blocks, strict=True):
            x = attend(down(x), tokens)
            skips.append(x)
        found = [skips.pop()]
        for up in self.up_blocks:
            x = up(found[-1])
            found.append(x + skips.pop() if skips else x)
        return found


class DriveBase(nn.Module):
    """Families v4 and v5: the network that all base models share.

    Args:
        width: D of the tokens.
        table: True if positions are stored, as in `LinesToTokens`; v4 has one.
        channels: The channels, as in `SmallUNet`.

    Attributes:
        reads_expressions, reads_emotions, multiple, max_side: The same as in `DriveNetwork`.
    """

    max_side: int | None

    def __init__(self, width: int = 2048, channels: Sequence[int] = (320, 640, 1280), *, table: bool) -> None:
        super().__init__()
        for name, count in (("emo", EMOTION), ("exp", len(EXPRESSIONS)), ("face", FACE[0])):
            self.add_module(f"{name}_pre_proj", TimestepEmbedding(count, 16))
            self.add_module(f"{name}_proj", TimestepEmbedding(FACE[1], width))
        self.ctrl_attn = SmallUNet(channels, channels[0], width, table=table)
        self.reads_expressions = self.reads_emotions = True
        self.multiple, self.max_side = 2 ** len(channels), None

    def forward(
        self,
        picture: Tensor,
        expression: Tensor | None = None,
        face: Tensor | None = None,
        emotion: Tensor | None = None,
    ) -> list[Tensor]:
        """Maps, the coarsest first; arguments as in `DriveNetwork`."""
        if expression is None or face is None:
            assert emotion is not None, "an expression and a face, or an emotion, are given"
            tokens = self._project("emo", embed_numbers(emotion * _EMOTION_SCALE, FACE[1]).to(picture))
        else:
            numbers = embed_numbers(expression * _EXPRESSION_SCALE, FACE[1]).to(picture)
            tokens = self._project("exp", numbers) + self._project("face", face.to(picture))
        found: list[Tensor] = self.ctrl_attn(_smaller(picture, 8), tokens)
        return found

    def _project(self, name: str, numbers: Tensor) -> Tensor:
        """[N, T, 1024] to 16 tokens [N, 16, D]."""
        few = self.get_submodule(f"{name}_pre_proj")(numbers.transpose(1, 2)).transpose(1, 2)
        found: Tensor = self.get_submodule(f"{name}_proj")(few)
        return found


_PROJECTIONS: Mapping[str, tuple[str, int, int, int]] = {
    "up_0": ("map1280_to_1280", 0, 1280, 1280),
    "up_1": ("map640_to_1280", 1, 640, 1280),
    "up_2": ("map320_to_1280", 2, 320, 1280),
    "up_3": ("map320_to_640", 3, 320, 640),
    "down_0": ("map320_to_320", 2, 320, 320),
    "down_1": ("map640_to_640", 1, 640, 640),
    "down_2": ("map1280_to_1280_2", 0, 1280, 1280),
    "down_3": ("map1280_to_1280_3", 0, 1280, 1280),
}
"""Insertion point of SD 1.5 -> name in files, number of `DriveBase`'s map, its channels and the point's."""


class MapProjector(nn.Module):
    """Family v5: a conv, and attention along rows and columns on fewer channels.

    Args:
        channels_in: The channels of a map.
        channels: The channels of the output.
        heads: The number of heads of the attention.
    """

    def __init__(self, channels_in: int, channels: int, heads: int = 8) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.attn = _NarrowBlock(channels, channels // 4, heads)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C_in, h, w] -> [N, C, h, w]."""
        found: Tensor = self.proj(x)
        attended: Tensor = self.attn(found)
        return found + attended


class _NarrowBlock(RowColumnBlock):
    """A row-column block whose convs go to fewer channels and back."""

    def __init__(self, channels: int, inner: int, heads: int) -> None:
        super().__init__(inner, heads, ("attnx", "attny"), conv_in=True)
        self.conv_in, self.proj = nn.Conv2d(channels, inner, 3, padding=1), nn.Conv2d(inner, channels, 3, padding=1)


class DriveProjection(nn.Module):
    """Families v4 and v5: the base network's maps to those of one base model, SD 1.5.

    Args:
        attends: by `MapProjector`s (v5) instead of convs (v4).

    Attributes:
        channels: The channels of the maps by insertion point.
    """

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        for name, _, channels_in, channels in _PROJECTIONS.values():
            layer: Any = MapProjector if attends else _conv
            self.add_module(name, layer(channels_in, channels))
        self.channels = {point: channels for point, (*_, channels) in _PROJECTIONS.items()}

    def forward(self, maps: Sequence[Tensor]) -> dict[str, Tensor]:
        """Maps by insertion point, of `DriveBase`'s."""
        return {point: self.get_submodule(name)(maps[i]) for point, (name, i, *_) in _PROJECTIONS.items()}


def _conv(channels_in: int, channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)


def _smaller(picture: Tensor, scale: int) -> Tensor:
    size = picture.shape[2] // scale, picture.shape[3] // scale
    return F.interpolate(picture, size=size, mode="bilinear", align_corners=False)
