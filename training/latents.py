"""Scenes as the denoiser sees them: latents, token rows, and the objects' masks on the latent grid.

They are computed once and trained on from memory. Knows nothing of the denoiser.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.scenes.prompts import ScenePrompt, describe_scene
from fisedit.values import LATENT_FACTOR
from training.loop import save_whole
from training.pictures import sample_view, to_tensor
from training.tokens import encode, token_positions

PARTS = 7
"""The most that a scene names: three objects that each wear something, and one in the sky."""
_BATCH = 32
_PART = 960  # scenes that are kept in one file, but for those that a GPU encodes in seconds
_MANY = 1000  # scenes from which drawing is shared out among the cores


@dataclass(frozen=True)
class LatentScenes:
    """N scenes: scaled `means` and `spreads` [N, 4, h, w], `tokens` [N, 77].

    Per slot, one for each part that a prompt names: its noun's token index `positions` [N, 7] (-1 for none) and the
    covered share `masks` [N, 7, h, w].
    """

    means: Tensor
    spreads: Tensor
    tokens: Tensor
    positions: Tensor
    masks: Tensor

    def __len__(self) -> int:
        return len(self.means)

    def to(self, device: torch.device) -> "LatentScenes":
        """The same scenes on another device."""
        return LatentScenes(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def packed(self) -> "LatentScenes":
        """The same in a quarter of the memory: latents in 16 bit, shares of masks counted in pixels."""
        counts = (self.masks * LATENT_FACTOR**2).round().to(torch.uint8)
        return LatentScenes(self.means.half(), self.spreads.half(), self.tokens, self.positions, counts)

    def pick(self, rows: Tensor) -> "LatentScenes":
        """Some of them, in 32 bit whether they are packed or not."""
        masks = self.masks[rows]
        masks = masks.float() / LATENT_FACTOR**2 if masks.dtype == torch.uint8 else masks
        means, spreads = self.means[rows].float(), self.spreads[rows].float()
        return LatentScenes(means, spreads, self.tokens[rows], self.positions[rows], masks)


@torch.no_grad()
def normalise_latents(autoencoder: AutoencoderKL, pixels: Tensor) -> None:
    """Gives the latent channels mean 0 and one spread, exactly, and sets the scaling factor to match.

    The change is folded into the 1x1 convolutions on both sides of the latents, so reconstructions stay as they are.
    `pixels` are pictures [B, 3, S, S] to measure on.
    """
    latents = torch.cat([autoencoder.encode(part).latent_dist.mode() for part in torch.split(pixels, _BATCH)])
    middle, spread = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    overall = spread.square().mean().sqrt()
    gain = overall / spread
    into, out = cast(torch.nn.Conv2d, autoencoder.quant_conv), cast(torch.nn.Conv2d, autoencoder.post_quant_conv)
    channels = len(gain)
    assert into.bias is not None
    assert out.bias is not None
    out.bias += (out.weight[:, :, 0, 0] * middle).sum(1)
    out.weight /= gain[None, :, None, None]
    into.bias[:channels] = (into.bias[:channels] - middle) * gain
    into.weight[:channels] *= gain[:, None, None, None]
    into.bias[channels:] += 2 * gain.log()
    autoencoder.register_to_config(scaling_factor=1 / float(overall))


@dataclass(frozen=True)
class _Drawn(Dataset[tuple[Tensor, ...]]):
    """Scenes as batches: pixels, tokens, positions and pooled masks; scene i depends on (seed, i) alone."""

    seed: int
    numbers: range
    close: bool
    objects: tuple[str, ...]

    def __len__(self) -> int:
        return math.ceil(len(self.numbers) / _BATCH)

    def __getitem__(self, batch: int) -> tuple[Tensor, ...]:
        rows = self.numbers[batch * _BATCH : (batch + 1) * _BATCH]
        views = [sample_view(np.random.default_rng((self.seed, i)), self.close, self.objects) for i in rows]
        drawings, sentences = [view.draw() for view in views], [describe_scene(view.scene) for view in views]
        masks = torch.stack([_slots(torch.from_numpy(drawing.masks).float()) for drawing in drawings])
        return (
            torch.from_numpy(np.stack([drawing.pixels for drawing in drawings])),
            torch.tensor(encode([sentence.text for sentence in sentences])),
            torch.tensor([_position_slots(sentence) for sentence in sentences]),
            F.avg_pool2d(masks, LATENT_FACTOR),
        )


def draw_scenes(
    seed: int, count: int, close: bool = False, objects: tuple[str, ...] = (), first: int = 0, workers: int = 0
) -> Iterator[tuple[Tensor, ...]]:
    """Batches of `count` scenes from number `first`, or of close-ups of them, drawn by so many processes."""
    dataset = _Drawn(seed, range(first, first + count), close, objects)
    for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
        yield tuple(tensor.clone() if workers else tensor for tensor in batch)  # shared memory is given back


@torch.no_grad()
def encode_scenes(
    autoencoder: AutoencoderKL,
    seed: int,
    count: int,
    close: bool = False,
    objects: tuple[str, ...] = (),
    first: int = 0,
    drawn: Iterable[tuple[Tensor, ...]] | None = None,
) -> LatentScenes:
    """Draws and encodes `count` scenes from number `first`, or close-ups of them; or encodes what was drawn."""
    scale = float(autoencoder.config["scaling_factor"])
    parts: list[LatentScenes] = []
    workers = len(os.sched_getaffinity(0)) if autoencoder.device.type == "cuda" and count >= _MANY else 0
    for pixels, tokens, positions, masks in drawn or draw_scenes(seed, count, close, objects, first, workers):
        posterior = autoencoder.encode(to_tensor(pixels.numpy(), autoencoder.device)).latent_dist
        means, spreads = posterior.mean.cpu() * scale, posterior.std.cpu() * scale
        parts.append(LatentScenes(means, spreads, tokens, positions, masks))
    return _joined(parts)


def _joined(parts: list[LatentScenes]) -> LatentScenes:
    return LatentScenes(*(torch.cat(columns) for columns in zip(*(vars(part).values() for part in parts), strict=True)))


def load_or_encode(
    folder: Path,
    autoencoder: AutoencoderKL,
    seed: int,
    count: int,
    close: bool = False,
    objects: tuple[str, ...] = (),
    drawn: Iterable[tuple[Tensor, ...]] | None = None,
) -> LatentScenes:
    """Encoded scenes, packed, from the parts in `folder`; those that are not there yet are written.

    All that were drawn make one part.
    """
    whole = folder / f"{0:06d}-{count}.pt"
    folder.mkdir(parents=True, exist_ok=True)
    parts, size = [], count if drawn is not None or whole.is_file() or autoencoder.device.type == "cuda" else _PART
    for first in range(0, count, size):
        length = min(size, count - first)
        path = folder / f"{first:06d}-{length}.pt"
        if not path.is_file():
            save_whole(vars(encode_scenes(autoencoder, seed, length, close, objects, first, drawn).packed()), path)
        parts.append(LatentScenes(**torch.load(path, weights_only=True)))
    return _joined(parts)


def _slots(masks: Tensor) -> Tensor:
    """Masks [parts, S, S] padded with empty ones to [7, S, S]."""
    return F.pad(masks, (0, 0, 0, 0, 0, PARTS - len(masks)))


def _position_slots(sentence: ScenePrompt) -> list[int]:
    found = token_positions(sentence)
    return [*found, *[-1] * (PARTS - len(found))]
