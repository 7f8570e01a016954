"""Image files of kinds that Pillow reads wrongly."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from fisedit.errors import InputError
from fisedit.storage.images import decode


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
