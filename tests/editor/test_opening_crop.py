"""A part of a large picture on the canvas, and a larger canvas around a picture."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageCms
from skimage import data

from fisedit import Editor, Region
from fisedit.errors import Cancelled, InputError, MaskError, SessionError
from fisedit.storage.canvas import crop_around, paste_edit, to_editable
from fisedit.values import LATENT_FACTOR, cell_pixels, config_to_dict, make_generation_config
from tests.support.edits import CAT, DOG, same
from tests.support.grids import square

QUICK = {"num_inference_steps": 5, "guidance_scale": 3.0}
SIZE = (600, 400)
BOX = (300, 100, 340, 140)
"""Of a picture much larger than the demo model's 256 pixels."""


def photo(mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    return Image.fromarray(data.astronaut()).resize(size).convert(mode)


@pytest.fixture(scope="module")
def shipped():
    return Editor.from_pretrained("demo", local_files_only=True).pipe


@pytest.fixture
def editor(shipped):
    return Editor(shipped, model="demo")


def changed(before: Image.Image, after: Image.Image) -> np.ndarray:
    different = np.asarray(before) != np.asarray(after)
    return different if different.ndim == 2 else different.any(2)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK"])
def test_the_part_around_a_region_is_edited_at_full_resolution_and_set_back(editor, mode):
    picture, region = photo(mode), Region.box(*BOX)
    source = editor.open(picture, CAT, region=region, **QUICK)
    left, top, right, bottom = source.config.crop
    assert left <= BOX[0] and top <= BOX[1] and right >= BOX[2] and bottom >= BOX[3]
    assert (right - left, bottom - top) == (source.config.width, source.config.height)  # nothing is resized
    assert source.size == SIZE and source.image.mode == mode and not changed(picture, source.image).any()
    told = f"{right - left}x{bottom - top} of 600x400 pixels, from column {left} and row {top} on"
    assert [note for note in source.stats.notes if told in note]
    if mode == "RGB":
        part = np.asarray(picture)[top:bottom, left:right]
        assert np.array_equal(np.asarray(source.canvas), part)
    edit = editor.edit(DOG, region=region)
    different, inside = changed(picture, edit.image), np.zeros(SIZE[::-1], bool)
    inside[BOX[1] - 8 : BOX[3] + 8, BOX[0] - 8 : BOX[2] + 8] = True  # whole cells
    assert different.any() and not different[~inside].any() and edit.changed_outside(source) == 0


def test_profile_and_metadata_stay(editor):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    file = BytesIO()
    exif = Image.Exif()
    exif[0x010E] = "mine"
    photo().save(file, "JPEG", icc_profile=profile, exif=exif, quality=95)
    picture = Image.open(file)
    source = editor.open(picture, CAT, region=Region.box(*BOX), **QUICK)
    edit = editor.edit(DOG, region=Region.box(*BOX))
    assert edit.image.info["icc_profile"] == profile and source.config.crop
    assert edit.image.info["exif"] and not changed(to_editable(picture), edit.image)[:90].any()


def test_a_turned_photograph(editor):
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    photo().save(file, "JPEG", exif=exif)
    picture = Image.open(file)
    assert to_editable(picture).size == SIZE[::-1]
    source = editor.open(picture, CAT, region=Region.box(10, 10, 60, 60), **QUICK)
    assert source.config.crop and source.size == SIZE[::-1]


def test_masks_of_the_whole_picture_and_boxes_mean_the_same_place(editor):
    picture, mask = photo(), np.zeros(SIZE[::-1], np.uint8)
    mask[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 255
    editor.open(picture, CAT, region=Region.mask(mask), **QUICK)
    by_box, by_mask = (editor.preview(DOG, region=region).mask.grid for region in (Region.box(*BOX), Region.mask(mask)))
    by_words = editor.preview(DOG, region=Region.words("cat") & Region.box(*BOX)).mask.grid
    assert np.array_equal(by_box, by_mask) and by_mask.any() and not (by_words & ~by_box).any()
    crop = editor.current.config.crop
    assert (cell_pixels(by_mask, SIZE, crop) >= (mask > 0)).all()
    outside = np.zeros(SIZE[::-1], bool)
    outside[-8:, :8] = True
    for region in (Region.mask(outside), Region.box(0, 392, 8, 400)):
        with pytest.raises(MaskError, match="must lie on the opened part"):
            editor.edit(DOG, region=region)


def test_a_session_a_rebuild_and_a_file_know_the_part(editor, tmp_path):
    editor.open(photo(), CAT, region=Region.box(*BOX), **QUICK)
    crop = editor.current.config.crop
    edit = editor.edit(DOG, region=Region.box(*BOX))
    editor.save(tmp_path / "session")
    loaded = Editor.from_pretrained("demo", local_files_only=True)
    loaded.load(tmp_path / "session")
    loaded.undo()
    assert same(loaded.edit(DOG, region=Region.box(*BOX)), edit) and loaded.current.config.crop == crop
    editor.write(tmp_path / "edit.png")
    remade = Editor.remake(Image.open(tmp_path / "edit.png"), local_files_only=True)
    assert remade.current.config.crop == crop and same(remade.current, edit)


def test_what_is_opened_in_part_is_not_advised_to_be(editor):
    half, large = Region.box(0, 0, 1000, 400), photo(size=(1200, 800))
    assert editor.open(large, CAT, region=half, context=0.0, **QUICK).config.crop
    (note,) = [note for note in editor.edit(DOG, region=half).stats.notes if "enlarged" in note]
    assert "enlarged" in note and "open" not in note
    whole = editor.open(large, CAT, **QUICK)
    assert not any("a part of the picture is opened" in note for note in whole.stats.notes)
    (note,) = [note for note in editor.edit(DOG, region=half).stats.notes if "enlarged" in note]
    assert "part of the picture" in note


def test_small_pictures_and_empty_regions_are_opened_whole(editor):
    assert editor.open(photo(size=(152, 104)), CAT, region=Region.box(0, 0, 9, 9), **QUICK).config.crop is None
    nothing = Region.mask(np.zeros(SIZE[::-1], bool))
    assert editor.open(photo(), CAT, region=nothing, **QUICK).config.crop is None
    assert editor.open(photo(), CAT, region=Region.everywhere(), **QUICK).config.crop is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"region": Region.words("cat")}, "words attend to a picture once it is opened"),
        ({"region": Region.box(0, 0, 9, 9), "context": -1}, "context must be in [0, 8.0], got -1"),
        ({"region": "the cat"}, "region must be a Region, got str; use Region.mask or Region.box"),
        ({"extend": (0, 0, 0, 0)}, "a border must be pixels at the left, top, right and bottom, not all 0"),
        ({"extend": (601, 0, 0, 0)}, "a picture of 600x400 pixels can be extended by as many, got (601, 0, 0, 0)"),
    ],
)
def test_arguments_out_of_range(editor, arguments, message):
    with pytest.raises(InputError) as raised:
        editor.open(photo(), CAT, **arguments, **QUICK)
    assert str(raised.value).startswith(message) and not len(editor.history)


@pytest.mark.parametrize("native", [128, 512])
@pytest.mark.parametrize("size", [(4000, 3000), (600, 400), (513, 2000)])
def test_a_crop_holds_the_region_and_what_is_around_it(native, size):
    width, height = size
    chance = np.random.default_rng(0)
    for _ in range(50):
        grid = np.zeros((-(-height // 8), -(-width // 8)), bool)
        top, left = (chance.integers(0, n) for n in grid.shape)
        grid[top : top + chance.integers(1, 30), left : left + chance.integers(1, 30)] = True
        left, top, right, bottom = crop_around(grid, size, native)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert (cell_pixels(grid, size)[top:bottom, left:right]).sum() == cell_pixels(grid, size).sum()
        sides = right - left, bottom - top
        assert all(side % LATENT_FACTOR == 0 or side == n for side, n in zip(sides, size, strict=True))
        wanted = min(native**2, width * height, native * min(size)) * 0.9
        assert np.prod(sides) >= wanted


def test_the_border_of_resized_paint_is_blended_inside_the_mask():
    picture, painted = Image.new("RGB", (640, 640)), Image.new("RGB", (128, 128), (200, 200, 200))
    grid = square(16, 16, 4, 4, 8)
    inside = cell_pixels(grid, (640, 640))
    result = np.asarray(paste_edit(picture, painted, grid))[..., 0].astype(int)
    assert not result[~inside].any() and result[320, 320] == 200
    row = result[320, 160:320]
    assert 0 < row[0] < 20 and (np.diff(row) >= 0).all() and (row == 200).argmax() == 16  # half of what 40 exceed 8 by
    unresized = np.asarray(paste_edit(picture.resize((128, 128)), painted, grid))[..., 0]
    assert set(np.unique(unresized)) == {0, 200}


def test_a_config_with_a_crop_is_checked():
    settings = {
        "seed": 0,
        "negative_prompt": "",
        "num_inference_steps": 5,
        "guidance_scale": 1.0,
        "width": 128,
        "height": 128,
        "scheduler": "ddim",
        "inversion": "ddim",
    }
    config = make_generation_config("a cat", crop=[1, 2, 3, 4], **settings)
    assert config.crop == (1, 2, 3, 4) and config_to_dict(config)["crop"] == (1, 2, 3, 4)
    assert "crop" not in config_to_dict(make_generation_config("a cat", crop=None, **settings))
    for crop in ([1, 2, 1, 4], [1, 2, 3], [0, 0, 1.5, 2], [-1, 0, 5, 5], [0, 0, 1, 2**40]):
        with pytest.raises(InputError, match="crop must"):
            make_generation_config("a cat", crop=crop, **settings)


def test_a_larger_canvas_keeps_pixels_and_paints_the_border(editor):
    """And the last cells of what a decoder painted, which it tints: kept, they would be a line."""
    editor.generate(CAT, seed=7, num_inference_steps=5, guidance_scale=3.0)
    made, before, side = editor.current, editor.current.image, editor.native_size
    right, top = side // 4, side // 8
    after = editor.extend(right=right, top=top)
    assert after.size == (side + right, side + top) and after.prompt == CAT
    kept = np.asarray(after.image)[top + 8 :, : side - 8]
    assert np.array_equal(kept, np.asarray(before)[8:, :-8])
    grid, (rows, columns) = after.mask.grid, (top // 8 + 1, side // 8 - 1)
    assert grid[:rows].all() and grid[:, columns:].all() and not grid[rows:, :columns].any()
    source = editor.history.find(after.parent)
    mirrored = np.asarray(source.image)
    assert np.array_equal(mirrored[top:, side:], np.asarray(before)[:, -right:][:, ::-1])
    assert (np.asarray(after.image) != mirrored)[:, side:].mean() > 0.5  # painted, and not what was mirrored
    assert editor.undo() is made and editor.redo() is after


def test_what_was_painted_at_the_old_border_is_painted_again(editor):
    picture = photo(size=(128, 96))
    editor.open(picture, CAT, **QUICK)
    first, second = (editor.extend(right=more) for more in (64, 16))
    painted = second.mask.painted(second.size, second.config.crop)
    assert painted[:, 191].all() and not painted[:, :160].any()  # the last cell of what was added before
    for larger in (first, second):
        assert np.array_equal(np.asarray(larger.image)[:, :128], np.asarray(picture))


def test_a_larger_canvas_is_one_step(editor, tmp_path):
    made = editor.generate(CAT, seed=7, num_inference_steps=4)
    larger = editor.extend(right=32)
    assert editor.history.steps == [made, larger] and larger.parent not in (None, made.id)
    dog = editor.edit(DOG)
    editor.save(tmp_path)
    saved = editor.beside()
    saved.load(tmp_path)
    for history in (editor.history, saved.history):
        assert [result.id for result in history.steps] == [made.id, larger.id, dog.id]
        assert [history.undo().id, history.undo().id, history.redo().id] == [larger.id, made.id, larger.id]
        with pytest.raises(SessionError, match="nothing to undo"):
            history.undo(), history.undo()
    assert set(saved.delete(larger.id)) == {larger.parent, larger.id, dog.id}
    assert [result.id for result in saved.history] == [made.id] and saved.current.id == made.id
    editor.delete(made.id)
    assert not len(editor.history) and not editor.recorded_bytes


def test_several_edits_of_a_larger_canvas_share_it(editor):
    made = editor.generate(CAT, seed=7, num_inference_steps=4)
    larger = editor.extend(right=32)
    editor.checkout(larger.parent)
    other = editor.erase(Region.border(0, 0, 32, 0), seed=3)
    assert editor.history.step_before(other) is made and editor.delete(other.id) == (other.id,)
    assert editor.history.steps == [made, larger] and editor.current is made


def test_a_larger_canvas_shows_things_again_where_words_name_others(editor):
    editor.generate(CAT, seed=7, num_inference_steps=4)
    assert editor.extend(right=32).run.erases
    assert not editor.extend(right=32, prompt=DOG).run.erases


def test_a_photograph_of_odd_sides_is_extended_at_full_resolution(editor):
    picture = photo(size=(601, 403))
    editor.open(picture, CAT, **QUICK)
    after = editor.extend(left=50, seed=3)
    assert after.size == (651, 403) and after.config.crop is not None
    assert not changed(picture, after.image.crop((50, 0, 651, 403))).any()
    with pytest.raises(InputError, match="a border must be pixels"):
        editor.extend(left=-8)
    with pytest.raises(InputError, match="a border must be pixels"):
        editor.extend()


@pytest.mark.parametrize("at", ["open", "edit"])
def test_extending_is_all_or_nothing(editor, at):
    source = editor.generate(CAT, seed=7, num_inference_steps=4)
    told = []

    def stop(i, n, preview):
        told.append(i)
        if len(told) == (1 if at == "open" else 5):
            raise Cancelled

    with pytest.raises(Cancelled):
        editor.extend(right=32, on_step=stop)
    assert list(editor.history) == [source] and editor.current is source
    larger = editor.extend(right=32, seed=0)
    assert larger.size == (source.size[0] + 32, source.size[1]) and larger.mask.grid.any()
    assert editor.history.steps == [source, larger]


@pytest.mark.parametrize(("side", "added"), [(128, 5), (601, 3)])
def test_a_border_narrower_than_a_cell_is_painted(editor, side, added):
    editor.open(photo(size=(side, side - 24)), CAT, **QUICK)
    before = np.asarray(editor.current.image)
    after = editor.extend(right=added)
    mirrored, got = (np.asarray(each) for each in (editor.history.find(after.parent).image, after.image))
    assert np.array_equal(got[:, :side], before)
    assert (got != mirrored).any(-1)[:, side:].mean(0).min() > 0.9  # in every column


def test_one_number_extends_a_picture_at_all_sides(editor):
    editor.open(photo(size=(96, 80)), CAT, extend=16, **QUICK)
    assert editor.current.size == (128, 112)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"extend": 16.0}, "a border must be pixels at the left, top, right and bottom, not all 0, got 16.0"),
        ({"extend": 0}, "a border must be pixels at the left, top, right and bottom, not all 0, got 0"),
        ({"extend": (8, 8, 8)}, r"a border must be pixels .*, got \(8, 8, 8\)"),
        ({"extend": "8,8,8,8"}, "a border must be pixels .*, got '8,8,8,8'"),
        ({"extend": (10**5000, 0, 0, 0)}, "a border must be pixels .* too large to print"),
        ({"context": float("nan")}, r"context must be in \[0, 8.0\], got nan"),
        ({"context": "wide"}, r"context must be in \[0, 8.0\], got 'wide'"),
    ],
)
def test_what_no_picture_is_opened_with(editor, given, message):
    with pytest.raises(InputError, match=message):
        editor.open(photo(size=(96, 80)), CAT, **QUICK, **given)
    assert not len(editor.history)
