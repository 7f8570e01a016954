"""Image files of kinds that Pillow reads wrongly."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from fisedit.errors import InputError
from fisedit.storage.canvas import to_editable
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


def grey_tiff(order: str, photometric: int, bits: int, data: bytes) -> bytes:
    """A grey TIFF with one row of two pixels."""
    values = {256: 2, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1, 279: len(data)}
    tags = b"".join(struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0) for tag, value in values.items())
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(data))
    return start + data + struct.pack(f"{order}H", len(values)) + tags + bytes(4)


@pytest.mark.parametrize(
    ("order", "photometric", "bits", "data", "levels"),
    [
        ("<", 0, 16, struct.pack("<2H", 0, 65000), [65535, 535]),
        (">", 0, 16, struct.pack(">2H", 0, 65000), [65535, 535]),
        ("<", 1, 16, struct.pack("<2H", 0, 65000), [0, 65000]),
        (">", 1, 16, struct.pack(">2H", 0, 65000), [0, 65000]),
        ("<", 1, 12, b"\xff\xf0\x00", [65535, 0]),
        ("<", 0, 8, b"\x00\xff", [255, 0]),
    ],
)
def test_grey_tiffs_are_seen_as_they_say(order, photometric, bits, data, levels):
    image = decode(grey_tiff(order, photometric, bits, data)).image
    assert np.asarray(to_editable(image)).tolist() == [levels]


def test_a_known_format_of_another_kind_is_named():
    with pytest.raises(InputError, match="picture must be a whole TIFF of a kind that is read, got another"):
        decode(grey_tiff(">", 1, 12, bytes(3)))


def png(depth: int, colour: int, row: bytes, *, clear: bytes = b"") -> bytes:
    """A PNG of one pixel."""
    header = struct.pack(">IIBBBBB", 1, 1, depth, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"tRNS", clear), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b""))
    chunks = tuple(chunk for chunk in chunks if chunk != (b"tRNS", b""))
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


@pytest.mark.parametrize(
    ("depth", "colour", "samples", "row"),
    [
        (1, 0, (1,), b"\x80"),
        (2, 0, (3,), b"\xc0"),
        (4, 0, (5,), b"\x50"),
        (8, 0, (5,), b"\x05"),
        (8, 2, (1, 2, 3), bytes((1, 2, 3))),
        (16, 2, (1000, 512, 65535), struct.pack(">3H", 1000, 512, 65535)),
    ],
)
def test_a_transparent_colour_of_any_depth_is_clear(depth, colour, samples, row):
    for told, alpha in ((samples, 0), ((0,) * len(samples), 255)):
        image = decode(png(depth, colour, row, clear=struct.pack(f">{len(told)}H", *told))).image
        assert np.asarray(to_editable(image))[0, 0, -1] == alpha


def test_a_transparent_level_of_16_bits_is_told():
    image = to_editable(decode(png(16, 0, struct.pack(">H", 1000), clear=struct.pack(">H", 1000))).image)
    assert "16-bit grey, 1000" in encode(image, ".png")[1][0] and image.getpixel((0, 0)) == 1000


@pytest.mark.parametrize(("name", "size"), [("a.webp", (16_384, 1)), ("a.WEBP", (1, 16_384)), ("a.jpeg", (65_501, 1))])
def test_sides_that_a_format_cannot_hold(tmp_path, name, size):
    path, longest = tmp_path / name, max(size) - 1
    with pytest.raises(InputError, match=rf"a {path.suffix} has at most {longest} pixels a side, .*; write a \.png"):
        write_image(Image.new("RGB", size), path)
    assert not list(tmp_path.iterdir())
    assert decode(encode(Image.new("RGB", (longest, 1)), path.suffix)[0]).image.size == (longest, 1)
    assert decode(encode(Image.new("RGB", size), ".png")[0]).image.size == size


@pytest.mark.parametrize("ending", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_photographs_stand_upright_as_soon_as_they_are_read(ending):
    """A phone's camera writes them on their side; what else their file says stays, and no one turns them again."""
    picture, exif, file = Image.new("RGB", (48, 32), "teal"), Image.Exif(), BytesIO()
    picture.paste("white", (0, 0, 8, 8))
    exif[0x0112], exif[0x010E], exif.get_ifd(0x8769)[0x829A] = 6, "mine", 0.25
    options = {"JPEG": {"subsampling": "4:2:2"}, "WEBP": {"lossless": True}}.get(ending, {})
    picture.save(file, ending, exif=exif, **options)
    found, expected = decode(file.getvalue()).image, to_editable(Image.open(file))
    assert found.size == expected.size == (32, 48) and found.convert("RGB").getpixel((28, 3)) > (250, 250, 250)
    again = to_editable(found)
    assert np.array_equal(np.asarray(again), np.asarray(expected)) and again.info.keys() == expected.info.keys()
    assert again.info.get("form") == expected.info.get("form") and b"mine" in again.info["exif"]
