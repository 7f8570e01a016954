"""ComfyUI's tensors as Pillow's pictures, and back. Knows no node and no editor.

An IMAGE is [B, H, W, C] and a MASK [B, H, W], floats from 0 to 1 of any dtype, on any device.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from fisedit.errors import InputError, MaskError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

PLACEHOLDER = (64, 64)
"""Height and width of the black MASK that Load Image gives for a picture without alpha."""


def to_levels(tensor: Tensor) -> Tensor:
    """Round floats from 0 to 1 to the 8 bits that Pillow has: uint8 of the same shape, on the CPU."""
    return (tensor.detach().float().cpu() * 255).round().clamp(0, 255).to(torch.uint8)


def to_pictures(images: Tensor) -> list[Image.Image]:
    """The pictures of an IMAGE: grey, RGB or RGBA. Raises InputError for other channels, and for NaN."""
    if images.ndim != 4 or images.shape[3] not in {1, 3, 4} or images.isnan().any():
        got = "NaN" if images.isnan().any() else f"{list(images.shape)}"
        raise InputError(f"image must be numbers [batch, height, width, 1, 3 or 4], got {got}; look at what made it")
    levels = to_levels(images).numpy()
    return [Image.fromarray(each[..., 0] if each.shape[2] == 1 else each) for each in levels]


def to_image(picture: Image.Image | NDArray[np.uint8]) -> Tensor:
    """An IMAGE [1, H, W, C] of a picture, with one channel where it is grey."""
    return torch.from_numpy(np.atleast_3d(np.asarray(picture)).astype(np.float32) / 255)[None]


def to_masks(mask: Tensor | None, count: int) -> list[Image.Image | None]:
    """A mask for each of `count` pictures, of the MASK's own size, or None. Raises MaskError for another number."""
    if mask is None or (tuple(mask.shape[-2:]) == PLACEHOLDER and not mask.any()):
        return [None] * count
    levels = to_levels(mask).reshape(-1, *mask.shape[-2:]).numpy()
    if len(levels) not in {1, count}:
        raise MaskError(f"mask must be one, or one for each of {count} pictures, got {len(levels)}")
    return [Image.fromarray(levels[i % len(levels)]) for i in range(count)]


def digest(tensor: Tensor | None) -> str:
    """Return a digest of a tensor's shape and 8-bit values; "" for none."""
    values = b"" if tensor is None else f"{list(tensor.shape)}".encode() + to_levels(tensor).numpy().tobytes()
    return sha256(values).hexdigest() if values else ""
