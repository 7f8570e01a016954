"""TokenCompose's losses on cross-attention (Wang et al., arXiv 2312.03626), and the recorder that feeds them.

Jointly trained from nothing, a text encoder packs every object into the end token and no word's attention says where
its object is. The renderer knows, so the words are taught. Knows nothing of scenes.
"""

import math
from dataclasses import dataclass, field

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor
from torch.nn import functional as F


@dataclass
class CrossMaps:
    """Cross-attention probabilities of one forward pass, one [B, rows, tokens] per layer, mean over heads."""

    layers: list[Tensor] = field(default_factory=list)

    def take(self) -> list[Tensor]:
        """Hands over the maps and forgets them."""
        found, self.layers = self.layers, []
        return found


class RecordingProcessor:
    """Cross-attention written out, so that its probabilities can be recorded and taught."""

    def __init__(self, maps: CrossMaps) -> None:
        self.maps = maps

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Rows [B, rows, channels] attend to text [B, tokens, width]."""
        query, key, value = attn.to_q(hidden_states), attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states)
        query, key, value = (_split(tensor, attn.heads) for tensor in (query, key, value))
        scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]))
        weights = scores.float().softmax(dim=-1)
        self.maps.layers.append(weights.mean(dim=1))
        joined = (weights.to(value.dtype) @ value).transpose(1, 2).flatten(2)
        mixed: Tensor = attn.to_out[1](attn.to_out[0](joined))
        return mixed


def _split(rows: Tensor, heads: int) -> Tensor:
    """[B, rows, channels] to [B, heads, rows, channels / heads]."""
    return rows.reshape(*rows.shape[:2], heads, -1).transpose(1, 2)


def record_cross_attention(unet: UNet2DConditionModel) -> CrossMaps:
    """Makes every cross-attention of `unet` record; the weights and their names stay as they are."""
    maps = CrossMaps()
    processors = {
        name: RecordingProcessor(maps) if name.endswith("attn2.processor") else AttnProcessor2_0()
        for name in unet.attn_processors
    }
    unet.set_attn_processor(processors)
    return maps


def grounding_losses(maps: list[Tensor], positions: Tensor, masks: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Token loss and pixel loss, each the mean over layers and objects.

    Args:
        maps: recorded probabilities of square layers, each [B, rows, tokens].
        positions: token index of each object's word, [B, objects], -1 where there is none.
        masks: share of each position that the object covers, [B, objects, S, S], 0 to 1.
        least: layers with fewer than this many rows a side are left alone.
    """
    there = (positions >= 0).float()
    token, pixel = [], []
    for layer in maps:
        side = math.isqrt(layer.shape[1])
        if side < least:
            continue
        seen = _word_maps(layer, positions)
        truth = F.adaptive_avg_pool2d(masks, side).flatten(2)
        inside = (seen * truth).sum(-1) / seen.sum(-1).clamp_min(1e-6)
        token.append(_mean_over(there, (1 - inside).square()))
        pixel.append(_mean_over(there, _cross_entropy(seen, truth).mean(-1)))
    return torch.stack(token).mean(), torch.stack(pixel).mean()


def _word_maps(layer: Tensor, positions: Tensor) -> Tensor:
    """The maps of the objects' words: [B, objects, rows]."""
    index = positions.clamp_min(0)[:, None, :].expand(-1, layer.shape[1], -1)
    return layer.gather(2, index).transpose(1, 2)


def _cross_entropy(seen: Tensor, truth: Tensor) -> Tensor:
    """Binary cross-entropy, written out because torch's refuses to run under CUDA's autocast."""
    clipped = seen.clamp(1e-6, 1 - 1e-6)
    return -(truth * clipped.log() + (1 - truth) * (1 - clipped).log())


def _mean_over(there: Tensor, values: Tensor) -> Tensor:
    return (there * values).sum() / there.sum().clamp_min(1)
