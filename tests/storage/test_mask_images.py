from __future__ import annotations

import os
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from fisedit.errors import MaskError
from fisedit.storage.mask_images import decode_mask, mask_levels, read_mask

INSIDE = np.array([[0, 255, 0, 0], [0, 255, 255, 0]], np.uint8)


def strokes(mode: str, stroke: tuple[int, ...], ground: tuple[int, ...]) -> Image.Image:
    """A mask with strokes where `INSIDE` is white."""
    found = Image.new(mode, (4, 2), ground)
    found.paste(stroke, (0, 0), Image.fromarray(INSIDE))
    return found


def with_palette() -> Image.Image:
    """Strokes of one colour of a palette, and a clear ground of another."""
    found = Image.fromarray((INSIDE > 0).astype(np.uint8)).convert("P")
    found.putpalette([255, 255, 255, 0, 0, 0])
    found.info["transparency"] = 0
    return found


FORMS = {
    "grey": Image.fromarray(INSIDE),
    "1 bit": Image.fromarray(INSIDE > 0),
    "RGB": Image.fromarray(INSIDE).convert("RGB"),
    "16 bits": Image.fromarray(INSIDE.astype(np.uint16) * 257),
    "32 bits": Image.fromarray(INSIDE.astype(np.int32)),
    "floats": Image.fromarray(INSIDE.astype(np.float32) / 255),
    "black on clear": strokes("RGBA", (0, 0, 0, 255), (0, 0, 0, 0)),
    "red on clear": strokes("RGBA", (255, 0, 0, 255), (0, 0, 0, 0)),
    "white on clear white": strokes("RGBA", (255, 255, 255, 255), (255, 255, 255, 0)),
    "black on clear grey": strokes("LA", (0, 255), (0, 0)),
    "a clear colour of a palette": with_palette(),
    "opaque RGBA": strokes("RGBA", (255, 255, 255, 255), (0, 0, 0, 255)),
    "equally clear everywhere": strokes("RGBA", (255, 255, 255, 200), (0, 0, 0, 200)),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_mask_marks_the_same(name, tmp_path):
    assert np.array_equal(np.asarray(mask_levels(FORMS[name])), INSIDE)
    FORMS[name].save(tmp_path / "mask.tif" if FORMS[name].mode in ("F", "I") else tmp_path / "mask.png")
    read = read_mask(next(tmp_path.iterdir()))
    assert np.array_equal(np.asarray(read), INSIDE)


@pytest.mark.parametrize("mode", ["La", "RGBa", "PA", "LAB", "HSV", "YCbCr", "CMYK", "RGBX"])
def test_modes_that_few_files_have(mode):
    if mode == "LAB":
        mask = Image.merge("LAB", [Image.fromarray(INSIDE), *[Image.new("L", (4, 2), 128)] * 2])
    else:
        through = {"La": "LA", "RGBa": "RGBA", "PA": "P"}.get(mode, "RGB")
        mask = Image.fromarray(INSIDE).convert(through).convert(mode)
    assert np.abs(np.asarray(mask_levels(mask)).astype(int) - INSIDE).max() <= 2


def test_a_clear_mask_marks_nothing():
    assert not np.asarray(mask_levels(Image.new("LA", (2, 2), (200, 0)))).any()
    assert read_mask(None) is None


def test_masks_are_turned_as_their_orientation_says_and_then_scaled():
    mask, file, exif = np.zeros((20, 40), np.uint8), BytesIO(), Image.Exif()
    mask[:, :10], exif[0x0112] = 255, 6
    Image.fromarray(mask).save(file, "PNG", exif=exif)
    assert (np.asarray(decode_mask(file.getvalue())) == np.rot90(mask, -1)).all()
    assert (
        np.asarray(decode_mask(file.getvalue(), size=(40, 80))) == np.rot90(mask, -1).repeat(2, 0).repeat(2, 1)
    ).all()


@pytest.mark.parametrize(("mode", "scale"), [("I;16", 257), ("I;16B", 257), ("I", 1), ("I", 257)])
def test_masks_of_more_than_8_bits(tmp_path, mode, scale):
    """Levels of 16 bits are scaled in either order of bytes; those of 32 bits are of 8 or 16 bits by their range."""
    levels = (np.arange(32) * 8 + 7) * scale
    dtype = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[mode]
    Image.frombytes(mode, (32, 1), levels.astype(dtype).tobytes()).save(tmp_path / "mask.tif")
    assert Image.open(tmp_path / "mask.tif").mode == mode
    assert np.asarray(read_mask(tmp_path / "mask.tif")).tolist() == (levels // scale)[None].tolist()


@pytest.mark.parametrize(
    ("levels", "why"),
    [
        (np.eye(8, dtype=np.float32) * 2, "of floats must have levels from 0 to 1, got 0 to 2; scale them"),
        (np.full((8, 8), np.nan, np.float32), "of floats must have levels from 0 to 1, got nan to nan; scale them"),
        (np.eye(8, dtype=np.int32) * 70_000, "must have levels from 0 to 65535, got 0 to 70000; scale them"),
        (-np.eye(8, dtype=np.int32), "must have levels from 0 to 65535, got -1 to 0; scale them"),
    ],
)
def test_masks_whose_levels_say_nothing(tmp_path, levels, why):
    Image.fromarray(levels).save(tmp_path / "mask.tif")
    with pytest.raises(MaskError, match=f"mask .*mask.tif {why}"):
        read_mask(tmp_path / "mask.tif")
    with pytest.raises(MaskError, match=f"mask {why}"):
        decode_mask((tmp_path / "mask.tif").read_bytes())


def test_a_huge_mask_is_refused_by_its_header(tmp_path):
    for side, words in ((12_000, "12000x12000"), (20_000, "huge.png")):
        Image.new("1", (side, side)).save(tmp_path / "huge.png")
        with pytest.raises(MaskError, match=words):
            read_mask(tmp_path / "huge.png")
    with pytest.raises(MaskError, match="at most 64 million pixels, got 12000x12000"):
        mask_levels(Image.new("1", (12_000, 12_000)))


def test_a_pipe_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "mask.png")
    with pytest.raises(MaskError, match="no plain file"):
        read_mask(tmp_path / "mask.png")
