"""Strokes as the page sends them, and where before and after meet."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from app import views
from fisedit.errors import InputError, MaskError
from fisedit.values import EditMask, MaskSource
from tests.support.app.requests import as_url


def test_strokes_become_areas_and_points():
    painted = Image.new("RGBA", (64, 32))
    painted.paste((255, 64, 96, 255), (0, 0, 8, 8))
    painted.paste((48, 112, 255, 255), (32, 16, 64, 32))
    painted.paste((0, 176, 80, 255), (10, 10, 13, 13))
    painted.paste((0, 176, 80, 255), (20, 4, 23, 7))
    painted.paste((255, 170, 0, 255), (40, 3, 43, 6))
    marked = views.decode_strokes(as_url(painted), (128, 64))
    assert np.asarray(marked.add)[:16, :16].all() and np.asarray(marked.add).sum() == 255 * 16 * 16
    assert np.asarray(marked.protect)[32:, 64:].all() and np.asarray(marked.protect).sum() == 255 * 32 * 64
    assert set(marked.inside) == {(23, 23), (43, 11)} and marked.outside == ((83, 9),)


def test_no_strokes_mark_nothing():
    for sent in ("", as_url(Image.new("RGBA", (8, 8)))):
        assert vars(views.decode_strokes(sent, (8, 8))) == vars(views.Strokes())


@pytest.mark.parametrize(
    "sent",
    ["data:image/svg+xml;base64,AAAA", "data:image/png;base64,AAAA", "data:image/png;base64,%", {"a": 1}, "x" * 2**21],
)
def test_strokes_that_are_none(sent):
    with pytest.raises((MaskError, InputError)):
        views.decode_strokes(sent, (8, 8))


def test_base64_as_programs_send_it():
    data = bytes(range(64, 256)) * 2 + b"?"
    plain, url_safe = base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()
    assert "+" in plain and "-" in url_safe
    broken = base64.encodebytes(data).decode()
    for text in (plain, plain.rstrip("="), url_safe, broken, broken.replace("\n", "\r\n\t")):
        for head in ("", "data:image/png;base64,", "data:image/png;charset=utf-8;BASE64,"):
            assert views.decode_base64(head + text, "mask") == data
    for text in (plain.replace("+", " "), f"data:image/png,{plain}", "a cat.png", "%", 7, None):
        with pytest.raises(InputError, match=r"mask must be base64, got ['\d\w]"):
            views.decode_base64(text, "mask")


def test_before_and_after_meet_within_the_mask():
    grid = np.zeros((8, 16), bool)
    whole = (128, 64), None
    assert views.border(None, *whole) == views.border(EditMask(grid, MaskSource.NOWHERE), *whole) == 50
    assert views.border(EditMask(~grid, MaskSource.GIVEN), *whole) == 50
    grid[2:4, 12:15] = True
    assert views.border(EditMask(grid, MaskSource.GIVEN), *whole) == 13.5 / 16 * 100
    assert views.border(EditMask(grid, MaskSource.GIVEN), (1000, 500), (200, 0, 360, 64)) == 33.5
    grid[:, 0] = True
    assert views.border(EditMask(grid, MaskSource.GIVEN), *whole) == 0.5 / 16 * 100


def test_the_mask_of_a_part_lies_where_the_part_is():
    grid = np.zeros((8, 8), bool)
    grid[:, :4] = True
    mask, place = EditMask(grid, MaskSource.GIVEN), ((2560, 1280), (1280, 640, 1920, 1280))
    assert views.area_of(mask, *place) == 0.5 / 8 and views.area_of(mask, (64, 64), None) == 0.5
    for shown, mode in (
        (views.region(mask, *place), "RGBA"),
        (views.preview_overlay(Image.new("RGB", (8, 8), "red"), mask, *place), "RGBA"),
    ):
        drawn = Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))).convert(mode)
        inside = np.asarray(drawn)[..., 3] > 0
        expected = np.zeros((640, 1280), bool)
        expected[320:640, 640:800] = True
        assert (inside | ~expected).all() and not inside[:, 830:].any() and not inside[:290].any()
    told = np.asarray(views.mask_image(mask, *place))
    assert told.shape == (1280, 2560) and (told > 0).sum() == 640 * 320 and told[700, 1300] == 255


def test_a_part_is_shown_in_its_picture():
    url = views.part((2560, 1280), (640, 0, 1280, 640))
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
    assert shown.shape == (640, 1280, 4)
    assert not shown[100, 400, 3] and shown[100, 100].tolist() == [0, 0, 0, 120] == shown[500, 400].tolist()
    assert shown[100, 320].tolist() == shown[100, 639].tolist() == [*views.TINT, 255]


def test_a_region_of_little_confidence_is_hatched():
    grid = np.zeros((8, 8), bool)
    grid[1:7, 1:7] = True
    sure, unsure = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))))[12:52, 12:52, 3]
        for shown in (views.region(EditMask(grid, MaskSource.ATTENTION, c), (64, 64), None) for c in (0.6, 0.59))
    )
    assert len(np.unique(sure)) == 1 and np.unique(unsure).tolist() == [sure[0, 0] // 3, sure[0, 0]]


def test_a_picture_larger_than_the_screen_is_made_smaller():
    def shown(size):
        kind, _, data = views.screen_url(Image.new("RGB", size, "teal")).partition(";base64,")
        return kind, Image.open(io.BytesIO(base64.b64decode(data))).size

    assert shown((64, 48)) == ("data:image/png", (64, 48))
    kind, (width, height) = shown((4000, 2000))
    assert kind == "data:image/jpeg" and width == 2 * height < 4000


def test_strokes_on_a_canvas_that_is_no_screens():
    file = io.BytesIO()
    Image.new("1", (2049, 1)).save(file, "PNG")
    with pytest.raises(MaskError, match="at most 2048 pixels, got 2049x1"):
        views.decode_strokes(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}", (64, 64))


def test_a_painted_area_has_a_soft_border_inside_it_unless_it_is_thin():
    painted = np.zeros((512, 512, 4), np.uint8)
    painted[100:300, 100:300] = painted[400:404, :200] = 255, 64, 96, 255
    url = as_url(Image.fromarray(painted))
    hard, soft = (np.asarray(views.decode_strokes(url, (1024, 1024), soft=soft).add) for soft in (False, True))
    assert set(np.unique(hard)) == {0, 255} and ((soft > 0) <= (hard > 0)).all()
    assert (soft[216:584, 216:584] == 255).all() and 0 < soft[400, 202] < soft[400, 206] < 255
    painted[:396] = 0
    thin = views.decode_strokes(as_url(Image.fromarray(painted)), (512, 512), soft=True).add
    assert set(np.unique(np.asarray(thin))) == {0, 255}


def test_a_region_covers_its_cells_and_has_no_steps():
    grid = np.tri(32, 32, dtype=bool)
    url = views.region(EditMask(grid, MaskSource.GIVEN), (256, 256), None)
    alpha = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))[..., 3].astype(int)
    assert (alpha[np.kron(grid, np.ones((8, 8), bool))] > 0).all()
    edge = np.argmax(alpha[20:-20] < 60, axis=1)  # of each row, where the region ends
    assert np.abs(np.diff(edge)).max() <= 3 and np.ptp(edge) > 180
