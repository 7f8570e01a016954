"""Reads and writes image files. What a file claims is checked before anything of it is decoded.

Knows Pillow's formats and nothing of editing.
"""

from __future__ import annotations

import os
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, TiffImagePlugin, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from fisedit.errors import InputError
from fisedit.metadata import image_metadata
from fisedit.metadata.file_form import FORM
from fisedit.metadata.image_metadata import Metadata
from fisedit.metadata.jpeg_form import FORM_CHUNK, form_to_bytes, in_form
from fisedit.metadata.stealth_texts import without_stealth
from fisedit.storage.canvas import MAX_PIXELS, to_srgb, upright
from fisedit.storage.files import IMAGE_FORMATS, write_file

READABLE = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
MAX_BYTES = 1 << 30

_DAMAGED = (OSError, SyntaxError, ValueError, LookupError, TypeError, OverflowError, EOFError, struct.error, zlib.error)
"""The exceptions that Pillow's decoders raise for truncated or forged files."""

_WHITE_IS_ZERO, _YCBCR = 0, 6
"""Photometric interpretations in TIFF."""

_BIG_ENDIAN_16_BIT = ("I;16B", "I;16B")
TiffImagePlugin.OPEN_INFO.setdefault((b"MM", _WHITE_IS_ZERO, (1,), 1, (16,), ()), _BIG_ENDIAN_16_BIT)
"""Pillow opens the same in the other byte order; `_levels_16_bit` inverts both."""

_MOST = 2**16 - 1
_RAW_SCALES = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}
"""Pillow's form of a PNG's samples -> its levels of 8 bits per sample, by which it scales pixels and not tRNS."""

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "PNG": {},
    "WEBP": {"lossless": True, "exact": True},
    "JPEG": {},
    "TIFF": {"compression": "tiff_adobe_deflate"},
}
_MODES = {
    "PNG": ("1", "L", "LA", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK"),
    "TIFF": ("L", "LA", "RGB", "RGBA", "CMYK", "I;16"),
}
"""Modes that a format stores without loss of depth, alpha or colours."""

_MAX_SIDES = {"WEBP": 16_383, "JPEG": 65_500}
"""Most pixels of a side, of the formats that have such a limit."""


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A decoded file.

    Args:
        image: The pixels.
        format: Pillow's name of the file's format.
        notes: Remarks for the user.
    """

    image: Image.Image
    format: str
    notes: tuple[str, ...] = ()


def read_bytes(path: Path) -> bytes:
    """The bytes of a plain file. Pipes and devices are never opened.

    Args:
        path: The file.

    Raises:
        InputError: No plain file, or one too large to be an image.
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path.name} must be a plain file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a pipe by now
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise InputError(f"{path.name} must be a plain file of at most 1 GiB, got {status.st_size} bytes")
        return file.read(MAX_BYTES)


def decode(
    data: bytes,
    what: str = "picture",
    error: type[InputError] = InputError,
    formats: tuple[str, ...] = READABLE,
    max_pixels: int = MAX_PIXELS,
) -> DecodedImage:
    """Decode a file's bytes, rotated as its EXIF orientation says; of an animation the first frame.

    Args:
        data: The file's bytes.
        what: The name of the image in errors.
        error: The class of errors.
        formats: Pillow's names of the formats that it may have.
        max_pixels: The most pixels that it may have.

    Raises:
        InputError: No image of such a format, a damaged one, or one of too many pixels (nothing is decoded then).
    """
    with _opened(data, what, error, formats, max_pixels) as image:
        return _load(image)


def read_size(data: bytes, what: str = "picture", formats: tuple[str, ...] = READABLE) -> tuple[int, int]:
    """Width and height of an image that is not decoded; a PNG's checksums are compared.

    Args:
        data: The file's bytes.
        what: The name of the image in errors.
        formats: Pillow's names of the formats that it may have.

    Raises:
        InputError: As in `decode`.
    """
    with _opened(data, what, InputError, formats) as image:
        image.verify()
        return image.size


@contextmanager
def _opened(
    data: bytes, what: str, error: type[InputError], formats: tuple[str, ...], max_pixels: int = MAX_PIXELS
) -> Iterator[Image.Image]:
    """An image file, opened and not decoded; what Pillow raises of it becomes one line."""
    if not data:
        raise error(f"{what} must be an image, got an empty file")
    too_large = f"{what} must have at most {max_pixels // 10**6} million pixels, got {{}}; make it smaller"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the limit here is lower than Pillow's, and doubtful metadata is common
        try:
            with Image.open(BytesIO(data), formats=formats) as image:
                if image.width * image.height > max_pixels:
                    raise error(too_large.format(f"{image.width}x{image.height}"))
                if _is_raw_ycbcr(image):
                    raise error(f"{what} must not be an uncompressed YCbCr TIFF, which is not read; save it as PNG")
                yield image
        except InputError:
            raise
        except UnidentifiedImageError as cause:
            if kind := next((name for name in formats if _begins_as(name, data)), ""):
                raise error(
                    f"{what} must be a whole {kind} of a kind that is read, got another; save it as PNG"
                ) from cause
            raise error(f"{what} must be a {', '.join(formats)} image, got something else") from cause
        except Image.DecompressionBombError as cause:
            raise error(too_large.format("many more")) from cause
        except _DAMAGED as cause:
            raise error(f"{what} must be whole, got a damaged file ({cause}); restore it from a copy") from cause


def _begins_as(name: str, data: bytes) -> bool:
    """Return whether a file's bytes begin as those of a format do, of Pillow's name."""
    accepts = Image.OPEN[name][1]
    return accepts is not None and accepts(data[:16]) is True


def _is_raw_ycbcr(image: Image.Image) -> bool:
    """Return whether an image is an uncompressed YCbCr TIFF, which Pillow takes for RGB with a fourth byte."""
    return (
        isinstance(image, TiffImageFile)
        and image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == _YCBCR
        and any(tile.codec_name == "raw" for tile in image.tile)
    )


def _load(image: Image.Image) -> DecodedImage:
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # a depth map is no frame
    is_deep = image.mode in ("LA", "RGB", "RGBA") and any(
        ";16" in str(tile.args) for tile in getattr(image, "tile", ())
    )
    form = image_metadata.file_info(image)
    tiles = getattr(image, "tile", ()) if image.format == "PNG" else ()
    scale = _RAW_SCALES.get(str(tiles[0].args)) if tiles else None
    image.load()
    notes = [f"animated: the first of {frames} frames was edited"] if frames > 1 else []
    if is_deep:
        notes.append("levels of 16 bits a channel were read as 8 bits; a grey picture would keep them")
    loaded = _levels_16_bit(image) if isinstance(image, TiffImageFile) else image.copy()
    if scale is not None and "transparency" in image.info:
        clear = np.multiply(image.info["transparency"], scale).astype(int).tolist()
        loaded.info["transparency"] = tuple(clear) if image.mode == "RGB" else clear
    loaded.info = image_metadata.with_raw_profiles(loaded.info) | form
    if image.format == "TIFF":
        loaded.info["exif"] = image_metadata.tiff_exif(image)
    return DecodedImage(upright(loaded), image.format or "", tuple(notes))


def _levels_16_bit(image: TiffImageFile) -> Image.Image:
    """A copy of a TIFF; grey of more than 8 bits, which Pillow leaves as it is stored, from black 0 to white 65535."""
    most = 2 ** image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0] - 1
    is_inverted = image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO
    if not image.mode.startswith("I;16") or (most == _MOST and not is_inverted):
        return image.copy()
    levels = np.asarray(image).astype(np.uint32) * _MOST // most
    scaled = Image.fromarray((_MOST - levels if is_inverted else levels).astype(np.uint16))
    scaled.info = dict(image.info)
    return scaled


def encode(
    image: Image.Image, suffix: str, metadata: Metadata | None = None, *, keeps_form: bool = False
) -> tuple[bytes, tuple[str, ...]]:
    """Encode an image in the format of a file name suffix, with its colour profile and metadata.

    What the format cannot store is converted to 8-bit sRGB, for a JPEG on white.

    Args:
        image: An image, whose `info` is as `image_metadata.owner_info` makes it.
        suffix: One of `IMAGE_FORMATS`.
        metadata: How the image was made, or None.
        keeps_form: Whether a PNG tells the form of the JPEG that the image was opened from.

    Returns:
        The file's bytes, and notes on what was lost.

    Raises:
        InputError: As `check_size`.
    """
    file = BytesIO()
    notes = _save(image, suffix, file, metadata, keeps_form=keeps_form)
    return file.getvalue(), notes


def write_image(image: Image.Image, path: Path, metadata: Metadata | None = None) -> tuple[str, ...]:
    """Write an image as `encode` does; the file is complete or absent.

    Args:
        image: The image, as in `encode`.
        path: The file; its folder is created if missing.
        metadata: How the image was made, or None.

    Returns:
        Notes on what was lost.

    Raises:
        InputError: As `check_size`.
    """
    return write_file(path, lambda file: _save(image, path.suffix, file, metadata))


def can_hold(suffix: str, image: Image.Image) -> bool:
    """Return whether the format of a file name suffix stores an image without loss of depth, alpha or colours."""
    return image.mode in _MODES[IMAGE_FORMATS[suffix.lower()]]


def check_size(suffix: str, size: tuple[int, int]) -> None:
    """Check that the format of a file name suffix can store an image of a size.

    Args:
        suffix: The suffix of the file, as ".webp"; one of no format of `IMAGE_FORMATS` passes.
        size: Width and height in pixels.

    Raises:
        InputError: A side is too long.
    """
    limit = _MAX_SIDES.get(IMAGE_FORMATS.get(suffix.lower(), ""))
    if limit is not None and max(size) > limit:
        raise InputError(f"a {suffix} has at most {limit} pixels a side, got {size[0]}x{size[1]}; write a .png")


def is_written_form(decoded: DecodedImage, image: Image.Image) -> bool:
    """Return whether a decoded file has the pixels that an image has after it is written in the file's format."""
    suffix = {"JPEG": ".jpg", "WEBP": ".webp"}.get(decoded.format, ".png")
    return np.array_equal(np.asarray(decode(encode(image, suffix)[0]).image), np.asarray(decoded.image))


def _save(
    image: Image.Image, suffix: str, file: IO[bytes], metadata: Metadata | None, *, keeps_form: bool = False
) -> tuple[str, ...]:
    check_size(suffix, image.size)
    kind, stored = IMAGE_FORMATS[suffix.lower()], image
    notes: tuple[str, ...] = ()
    if not can_hold(suffix, image):
        stored = to_srgb(image, alpha=kind != "JPEG")
        notes = (f"{suffix} holds no {image.mode}: written as a screen shows it",)
    options, more_notes = image_metadata.save_options(image, kind, metadata or Metadata())
    profile, form = stored.info.get("icc_profile"), stored.info.get(FORM)
    if metadata is None:
        stored, hidden_notes = without_stealth(stored)
        notes += hidden_notes
    if keeps_form and kind == "PNG" and form is not None and form.jpeg is not None:
        options["pnginfo"].add(FORM_CHUNK, form_to_bytes(form.jpeg))
    if kind == "JPEG":
        stored, own = in_form(stored, None if form is None else form.jpeg)
        options |= own
    stored.save(file, format=kind, **{**_OPTIONS[kind], **options}, icc_profile=profile)
    return notes + more_notes
