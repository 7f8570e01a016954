"""Image files of kinds that Pillow reads wrongly."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from fisedit.errors import InputError
from fisedit.storage.images import decode, encode, write_image


def ycbcr_tiff(compression: str | None, size: tuple[int, int] = (60, 41)) -> tuple[Image.Image, bytes]:
    """A smooth picture, and a valid TIFF of it in YCbCr."""
    small = Image.fromarray(np.random.default_rng(0).integers(0, 255, (5, 6, 3), np.uint8))
    picture, file = small.resize(size, Image.Resampling.BICUBIC), BytesIO()
    picture.convert("YCbCr").save(file, "TIFF", compression=compression)
    return picture, file.getvalue()


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"])
def test_compressed_ycbcr_tiffs_keep_their_colours(compression):
    picture, data = ycbcr_tiff(compression)
    apart = np.abs(np.asarray(decode(data).image, int) - np.asarray(picture, int))
    assert apart.mean() < (8 if compression == "jpeg" else 1.5)


@pytest.mark.parametrize("padding", [0, 10_000])
def test_uncompressed_ycbcr_tiffs_are_named(padding):
    """Pillow takes their bytes for four a pixel: a file that is long enough would be read in wrong colours."""
    with pytest.raises(InputError, match="picture must not be an uncompressed YCbCr TIFF, which is not read"):
        decode(ycbcr_tiff(None)[1] + bytes(padding))


def png(depth: int, colour: int, row: bytes) -> bytes:
    """A PNG of one pixel."""
    header = struct.pack(">IIBBBBB", 1, 1, depth, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_colours_of_16_bits_are_read_as_8_and_that_is_said():
    deep = decode(png(16, 2, struct.pack(">HHH", 1000, 2000, 3000)))
    assert deep.image.getpixel((0, 0)) == (3, 7, 11) and "16 bits a channel" in deep.notes[0]
    assert decode(png(8, 2, bytes((3, 7, 11)))).notes == ()
    grey = decode(png(16, 0, struct.pack(">H", 1000)))
    assert grey.image.getpixel((0, 0)) == 1000 and grey.notes == ()


@pytest.mark.parametrize(("name", "size"), [("a.webp", (16_384, 1)), ("a.WEBP", (1, 16_384)), ("a.jpeg", (65_501, 1))])
def test_sides_that_a_format_cannot_hold(tmp_path, name, size):
    path, longest = tmp_path / name, max(size) - 1
    with pytest.raises(InputError, match=rf"a {path.suffix} has at most {longest} pixels a side, .*; write a \.png"):
        write_image(Image.new("RGB", size), path)
    assert not list(tmp_path.iterdir())
    assert decode(encode(Image.new("RGB", (longest, 1)), path.suffix)[0]).image.size == (longest, 1)
    assert decode(encode(Image.new("RGB", size), ".png")[0]).image.size == size
