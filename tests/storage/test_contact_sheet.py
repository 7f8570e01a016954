"""Images for reports: a mask over pictures of every mode."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageCms

from fisedit.storage.canvas import to_editable, to_srgb
from fisedit.storage.contact_sheet import overlay
from tests.support.pictures import noise


def swapped_profile() -> bytes:
    """sRGB with red and green exchanged."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    tags = [data.index(name) for name in (b"rXYZ", b"gXYZ")]
    for tag, name in zip(tags, (b"gXYZ", b"rXYZ"), strict=True):
        data[tag : tag + 4] = name
    return bytes(data)


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16", "CMYK", "RGBA", "LAB"])
def test_outside_a_mask_a_picture_is_as_a_screen_shows_it(mode):
    levels = np.random.default_rng(0).integers(0, 2**16, (64, 64), np.uint16)
    picture = Image.fromarray(levels) if mode == "I;16" else noise(mode, 64, 64)
    if mode == "RGB":
        picture.info["icc_profile"] = swapped_profile()
    inside = np.arange(64)[None].repeat(64, 0) < 24
    seen = np.asarray(overlay(picture, Image.fromarray(inside).convert("L")))
    shown = np.asarray(to_srgb(to_editable(picture), alpha=False))
    assert np.array_equal(seen[~inside], shown[~inside]) and (seen[inside] != shown[inside]).any()
    if mode == "I;16":
        assert np.abs(seen[..., 0][~inside] - levels[~inside] / 257).max() <= 0.5
