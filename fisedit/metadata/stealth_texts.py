"""Reads and clears the text that NovelAI and others hide in the lowest bits of a picture's alpha, column by column."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PLAIN, _PACKED = b"stealth_pnginfo", b"stealth_pngcomp"
_IN_COLOURS = (b"stealth_rgbinfo", b"stealth_rgbcomp")
_HEAD = len(_PLAIN) + 4
_MAX_BYTES = 1 << 22
_ANY_WRAPPER = 32 + zlib.MAX_WBITS


def read_stealth(picture: Image.Image) -> str:
    """The text in an image's alpha, "" if there is none.

    Args:
        picture: An image of any mode.
    """
    head = _alpha_bytes(picture, 0, _HEAD)
    magic, bits = head[: len(_PLAIN)], int.from_bytes(head[len(_PLAIN) :])
    if magic not in (_PLAIN, _PACKED) or bits > 8 * _MAX_BYTES:
        return ""
    data = _alpha_bytes(picture, _HEAD, bits // 8)
    try:
        unpacked = zlib.decompressobj(_ANY_WRAPPER).decompress(data, _MAX_BYTES) if magic == _PACKED else data
        return unpacked.decode()
    except (zlib.error, UnicodeDecodeError):
        return ""


def without_stealth(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    """An image without hidden text, and notes on what was changed, or cannot be.

    Args:
        image: An image of any mode.
    """
    if _bytes(_pixels(image, slice(0, 3)), 0, len(_PLAIN)) in _IN_COLOURS:
        return image, ("its colours hide a text on how it was made, which stays where they were not edited",)
    if _alpha_bytes(image, 0, len(_PLAIN)) not in (_PLAIN, _PACKED):
        return image, ()
    cleared = image.copy()
    cleared.putalpha(Image.fromarray(np.asarray(image.getchannel("A")) | 1))
    return cleared, ("the text that its alpha hid, on how it was made, was cleared",)


def _alpha_bytes(picture: Image.Image, first: int, count: int) -> bytes:
    return _bytes(_pixels(picture, slice(-1, None)), first, count) if picture.mode in ("RGBA", "LA") else b""


def _pixels(picture: Image.Image, channels: slice) -> NDArray[np.uint8]:
    """Levels [w, h, C], of columns first; none of images without colours in 8 bits."""
    if picture.mode not in ("RGB", "RGBA", "LA"):
        return np.zeros((0, 0, 1), np.uint8)
    return np.asarray(picture)[..., channels].swapaxes(0, 1)


def _bytes(pixels: NDArray[np.uint8], first: int, count: int) -> bytes:
    """Bytes of the lowest bits, as many as there are."""
    per_column = max(1, pixels[0].size if len(pixels) else 1)
    start, stop = 8 * first, 8 * (first + count)
    columns = pixels[start // per_column : -(-stop // per_column)]
    bits = (columns.ravel() & 1)[start % per_column :][: stop - start]
    return np.packbits(bits).tobytes() if bits.size == stop - start else b""
