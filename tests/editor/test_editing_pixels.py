"""A given mask is kept to the pixel: black keeps its bytes at every size, grey is mixed, what is clear is filled."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageDraw

from fisedit import Editor, Region
from fisedit.storage.images import encode
from fisedit.values import EditMask, MaskSource
from tests.support.edits import CAT, DOG
from tests.support.pictures import scene

QUICK = {"num_inference_steps": 2, "guidance_scale": 1.0}
SIZES = {"the canvas": (128, 128), "enlarged": (100, 51), "a whole photograph": (301, 203), "a part": (500, 260)}


def disc(size: tuple[int, int]) -> np.ndarray:
    """A disc with soft borders, in levels."""
    large = Image.new("L", (size[0] * 4, size[1] * 4))
    x, y, radius = size[0] * 1.7 + 3, size[1] * 1.9, min(size)
    ImageDraw.Draw(large).ellipse([x - radius, y - radius, x + radius, y + radius], fill=255)
    return np.asarray(large.resize(size, Image.Resampling.BOX))


def box(size: tuple[int, int], sides: tuple[int, int, int, int]) -> np.ndarray:
    levels = np.zeros(size[::-1], np.uint8)
    levels[sides[1] : sides[3], sides[0] : sides[2]] = 255
    return levels


def odd(size: tuple[int, int]) -> tuple[int, int, int, int]:
    return size[0] // 3 | 1, size[1] // 4 | 1, size[0] // 3 + 21, size[1] // 4 + 19


KINDS = {  # of a size: the region, and how much of every pixel it marks
    "mask": lambda size: (Region.mask(disc(size)), disc(size)),
    "picture": lambda size: (Region.mask(Image.fromarray(disc(size))), disc(size)),
    "soft": lambda size: (Region.mask(disc(size) // 4 * 3, soft=True), disc(size) // 4 * 3),
    "box": lambda size: (Region.box(*odd(size)), box(size, odd(size))),
    "border": lambda size: (Region.border(right=5, bottom=3), 255 - box(size, (0, 0, size[0] - 5, size[1] - 3))),
    "rest": lambda size: (Region.box(0, 0, *size) - Region.mask(disc(size)), 255 - disc(size)),
    "union": lambda size: (
        Region.mask(disc(size)) | Region.box(*odd(size)),
        np.maximum(disc(size), box(size, odd(size))),
    ),
    "shared": lambda size: (
        Region.mask(disc(size)) & Region.box(*odd(size)),
        np.minimum(disc(size), box(size, odd(size))),
    ),
}


def changed(one: Image.Image, other: Image.Image) -> np.ndarray:
    return (np.asarray(one.convert("RGB")) != np.asarray(other.convert("RGB"))).any(-1)


@pytest.mark.parametrize("name", SIZES)
def test_what_is_black_keeps_its_bytes_and_what_is_white_is_painted(editor, name):
    picture = scene(*SIZES[name])
    for kind, of in KINDS.items():
        region, levels = of(picture.size)
        source = editor.open(picture, CAT, region=region, **QUICK)
        result = editor.edit(DOG, region=region)
        different = changed(picture, result.image)
        assert not different[levels == 0].any(), (name, kind)
        assert different[levels == levels.max()].mean() > 0.9, (name, kind)
        assert result.changed_outside(source) == 0, (name, kind)


def test_words_are_cut_where_given_pixels_limit_them_and_nowhere_else(editor):
    size, crop = (128, 128), box((128, 128), (3, 5, 90, 101)) > 0
    source = editor.open(scene(*size), CAT, **QUICK)
    words = editor.preview(DOG, region=Region.words("cake")).mask
    shown = {
        name: editor.preview(DOG, region=region).mask.painted(size)
        for name, region in {
            "both": Region.words("cake") & Region.mask(crop),
            "either": Region.words("cake") | Region.mask(crop),
            "without": Region.words("cake") - Region.mask(crop),
        }.items()
    }
    assert words.pixels is None
    if words.source is MaskSource.ATTENTION:
        assert not (shown["both"] & ~crop).any() and not (shown["without"] & crop).any()
        assert (shown["either"] >= (crop | words.painted(size))).all()
    result = editor.edit(DOG, region=Region.words("cake") & Region.mask(crop))
    assert not changed(source.image, result.image)[~crop].any()


def test_grey_pixels_are_mixed(editor):
    """Half of what white takes; of a soft mask, whose cells change half as much, all of that."""
    picture, white = scene(128, 128), box((128, 128), (32, 32, 96, 96))
    editor.open(picture, CAT, **QUICK)
    whole = editor.edit(DOG, mask=white)
    editor.undo()
    half = editor.edit(DOG, mask=white // 255 * 128)
    before, full, got = (np.asarray(each, int) for each in (picture, whole.image, half.image))
    assert np.abs(got - before - (full - before) * 128 / 255).max() <= 1
    editor.undo()
    assert editor.preview(DOG, region=Region.mask(white // 255 * 128, soft=True)).mask.pixels is None


def test_a_dense_edit_is_cut_as_well(editor):
    picture, mask = scene(100, 51), 255 - box((100, 51), (50, 20, 53, 22))
    editor.open(picture, CAT, **QUICK)
    result = editor.edit(DOG, mask=mask)
    assert result.stats.fallback and not changed(picture, result.image)[mask == 0].any()


@pytest.mark.parametrize("size", [(128, 128), (100, 51)])
def test_a_session_keeps_what_an_edit_of_the_edit_needs(pipelines, tmp_path, size):
    """Saved and loaded, undone and done again, and with what was recorded gone, the next edit has the same pixels."""
    editor, masks = Editor(pipelines["shallow"], model="x"), [disc(size), box(size, odd(size))]
    editor.open(scene(*size), CAT, **QUICK)
    first = editor.edit(DOG, mask=masks[0])
    expected = editor.edit(CAT, mask=masks[1])
    editor.save(tmp_path / "s")
    other = Editor(pipelines["shallow"], model="x")
    other.load(tmp_path / "s")
    for loaded, made in zip(other.history, editor.history, strict=True):
        assert loaded.image.tobytes() == made.image.tobytes() and loaded.canvas.tobytes() == made.canvas.tobytes()
        assert loaded.mask.pixels is None or np.array_equal(loaded.mask.pixels, made.mask.pixels)
        assert (loaded.mask.pixels is None) == (made.mask.pixels is None)
    for each in (editor, other):
        each.undo()
        assert each.current.image.tobytes() == first.image.tobytes()
        assert each.edit(CAT, mask=masks[1]).image.tobytes() == expected.image.tobytes()


def test_an_edit_is_made_again_to_the_pixel_from_its_file(tmp_path):
    editor = Editor.from_pretrained("demo", device="cpu", dtype="fp32", local_files_only=True)
    editor.generate(CAT, seed=7, width=128, height=128, **QUICK)
    result = editor.edit(DOG, mask=disc((128, 128)))
    data, _ = encode(result.image, ".png", editor.metadata())
    again = Editor.remake(Image.open(BytesIO(data)), device="cpu").current
    assert again.image.tobytes() == result.image.tobytes() and np.array_equal(again.mask.pixels, result.mask.pixels)


def test_a_clear_hole_is_filled_where_a_mask_is_given(editor):
    picture, hole = scene(100, 51).convert("RGBA"), (20, 10, 60, 40)
    picture.paste((0, 0, 0, 0), hole)
    editor.open(picture, CAT, **QUICK)
    result = editor.edit(DOG, mask=box(picture.size, hole))
    assert (np.asarray(result.image)[..., 3] == 255).all()
    assert "transparent pixels in the mask were filled, and are opaque now" in result.stats.notes
    editor.undo()
    half = np.asarray(editor.edit(DOG, mask=box(picture.size, hole) // 255 * 128).image)
    assert (half[10:40, 20:60, 3] == 128).all()


def test_a_mask_that_marks_nothing_or_is_scaled_is_told(editor):
    editor.open(scene(128, 128), CAT, **QUICK)
    nothing = editor.edit(DOG, mask=Image.new("L", (128, 128), 100))
    assert nothing.stats.notes == ("nothing was edited: the mask is empty",)
    large = Image.new("L", (256, 64))
    large.paste(255, (0, 0, 128, 32))
    notes = editor.edit(DOG, mask=large).stats.notes
    assert "the mask of 256x64 pixels was scaled to the picture's 128x128" in notes


def test_pixels_of_a_mask_over_more_cells():
    grid, pixels = np.zeros((2, 2), bool), np.zeros((16, 16), np.uint8)
    grid[0, 0], pixels[2:4, 2:4] = True, 200
    grown = EditMask(grid, MaskSource.GIVEN, pixels=pixels).with_cells(np.array([[True, True], [False, False]]))
    assert grown.painted((16, 16)).sum() == 4 + 64 and (grown.pixels[:8, 8:] == 255).all()
    assert np.array_equal(grown.canvas_pixels, grown.pixels)
