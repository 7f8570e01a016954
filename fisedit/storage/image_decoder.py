"""Bytes -> a picture, and a picture -> bytes. What a file claims is checked before anything of it is decoded.

Knows Pillow's formats and nothing of editing.
"""

from __future__ import annotations

import os
import stat
import struct
import warnings
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, UnidentifiedImageError

from fisedit.errors import InputError
from fisedit.storage import files, image_metadata
from fisedit.storage.image_metadata import Metadata

READABLE = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
MOST_BYTES = 1 << 30
MOST_PIXELS = 64_000_000

_DAMAGED = (OSError, SyntaxError, ValueError, LookupError, TypeError, OverflowError, EOFError, struct.error, zlib.error)
"""What Pillow's decoders raise for files that are cut or made up."""


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A decoded file: the image, the format it was in, and what the user should know of it."""

    image: Image.Image
    format: str
    notes: tuple[str, ...] = ()


def read_bytes(path: Path) -> bytes:
    """The bytes of a plain file. Pipes and devices are never opened.

    Raises:
        InputError: no plain file, or one too large to be a picture. OSError: it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path.name} must be a plain file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a pipe by now
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise InputError(f"{path.name} must be a plain file of at most 1 GiB, got {status.st_size} bytes")
        return file.read(MOST_BYTES)


def decode(data: bytes, what: str = "picture") -> DecodedImage:
    """The first picture in a file's bytes, whole.

    Args:
        what: the word for it in errors.

    Raises:
        InputError: no picture of a readable format, a damaged one, or one of too many pixels (nothing is decoded then).
    """
    if not data:
        raise InputError(f"{what} must be an image, got an empty file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the limit here is lower than Pillow's, and doubtful metadata is no news
        try:
            with Image.open(BytesIO(data), formats=READABLE) as image:
                _check_size(image, what)
                frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # a depth map is no frame
                image.load()
                notes = (f"animated: the first of {frames} frames was edited",) if frames > 1 else ()
                whole = image.copy()
                if image.format == "TIFF":
                    whole.info["exif"] = image_metadata.tags(image)
                return DecodedImage(whole, image.format or "", notes)
        except InputError:
            raise
        except UnidentifiedImageError as error:
            raise InputError(f"{what} must be a {', '.join(READABLE)} image, got something else") from error
        except Image.DecompressionBombError as error:
            raise _too_large(what, "many more") from error
        except _DAMAGED as error:
            raise InputError(f"{what} must be whole, got a damaged file ({error}); restore it from a copy") from error


def levels(data: bytes, size: tuple[int, int]) -> Image.Image:
    """A mask's levels, mode "L", resized; what is transparent is outside.

    Raises:
        InputError: as in `decode`.
    """
    image = decode(data, "mask").image
    colour = (_shallow(image) if image.mode.startswith("I") else image).convert("RGBA")
    light = Image.composite(colour.convert("L"), Image.new("L", colour.size), colour.getchannel("A"))
    return light if light.size == size else light.resize(size, Image.Resampling.BOX)


def encode(image: Image.Image, name: str, made: Metadata | None = None) -> tuple[bytes, tuple[str, ...]]:
    """A file's bytes in the format of its name's ending, with how it was made if that is to be told; what was lost."""
    return files.image_bytes(image, PurePosixPath(name).suffix, made)


def shows(picture: DecodedImage, image: Image.Image) -> bool:
    """Whether a picture is what an image looks like once it is written in the picture's format."""
    name = {"JPEG": "a.jpg", "WEBP": "a.webp"}.get(picture.format, "a.png")
    return np.array_equal(np.asarray(decode(encode(image, name)[0]).image), np.asarray(picture.image))


def _check_size(image: Image.Image, what: str) -> None:
    if image.width * image.height > MOST_PIXELS:
        raise _too_large(what, f"{image.width}x{image.height}")


def _too_large(what: str, got: str) -> InputError:
    limit = f"{MOST_PIXELS // 10**6} million pixels"
    return InputError(f"{what} must have at most {limit}, got {got}; make it smaller")


def _shallow(image: Image.Image) -> Image.Image:
    """16-bit levels as 8-bit ones; scaled, where Pillow would clip them."""
    return image.point(lambda level: level / 257, "F").convert("L")
