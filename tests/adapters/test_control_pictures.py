"""Edges as control pictures: beside what they are of, through the API and the command line."""

from __future__ import annotations

import numpy as np
import pytest
from diffusers import ControlNetModel
from PIL import Image

from fisedit import Editor
from fisedit.adapters.control_pictures import canny
from fisedit.errors import InputError
from tests.support.adapters import filled
from tests.support.edits import CAT, DOG, pixels_outside
from tests.support.grids import grids
from tests.support.pictures import scene

SQUARE = grids(16, 16)["square"]


def disc(mode="RGB"):
    """A bright disc of radius 20 on dark, and a faint one."""
    rows, columns = np.mgrid[:96, :96]
    levels = np.full((96, 96), 20, np.uint8)
    levels[(rows - 40) ** 2 + (columns - 40) ** 2 < 400] = 220
    levels[(rows - 80) ** 2 + (columns - 80) ** 2 < 64] = 30
    return Image.fromarray(levels).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_edges_run_along_what_is_seen(mode):
    picture = canny(disc(mode))
    levels = np.asarray(picture)
    assert picture.mode == "RGB" and picture.size == (96, 96) and set(np.unique(levels)) == {0, 255}
    rows, columns = np.nonzero(levels[..., 0])
    away = np.hypot(rows - 40, columns - 40)
    assert len(rows) > 100 and (np.abs(away - 20) < 2).all()  # the faint one has none


def test_lower_thresholds_find_fainter_edges():
    faint = np.asarray(canny(disc(), 5, 10))[70:, 70:, 0]
    assert faint.any()


@pytest.mark.parametrize(("low", "high"), [(-1, 100), (200, 100), (0, 5000), (float("nan"), 100)])
def test_thresholds_out_of_range(low, high):
    with pytest.raises(InputError, match="canny's thresholds must be in"):
        canny(disc(), low, high)


@pytest.fixture
def control_net(pipelines, tmp_path):
    model = filled(ControlNetModel.from_unet(pipelines["sd15"].unet))
    for layer in (*model.controlnet_down_blocks, model.controlnet_mid_block):
        layer.weight.data.mul_(0.3)
    model.save_pretrained(tmp_path / "control")
    return tmp_path / "control"


def test_a_picture_is_opened_with_its_edges_and_edits_read_what_was_recorded(pipelines, control_net):
    editor = Editor(pipelines["sd15"], model="demo")
    editor.load_adapter(control_net, 0.7)
    picture = scene()
    source = editor.open(picture, CAT, control=canny(picture), num_inference_steps=3)
    edit = editor.edit(DOG, mask=SQUARE)
    assert edit.config.like == source.config.like != ()
    assert editor._engine.has_adapter_features(editor._trajectory_cache.get(source.id)[0], edit.config)
    assert pixels_outside(edit, source)
    plain = Editor(pipelines["sd15"], model="demo")
    plain.open(picture, CAT, num_inference_steps=3)
    assert not np.array_equal(np.asarray(plain.edit(DOG, mask=SQUARE).image), np.asarray(edit.image))


def test_a_control_of_a_large_picture_is_cut_as_the_picture_is(pipelines, control_net):
    from fisedit import Region

    editor = Editor(pipelines["sd15"], model="demo")
    editor.load_adapter(control_net)
    large = scene().resize((512, 384))
    part = editor.open(large, CAT, region=Region.box(40, 40, 100, 100), control=canny(large), num_inference_steps=3)
    assert part.config.crop is not None
    (like,) = part.config.like
    assert editor._engine.references.pictures[like.reference].size == (
        part.config.crop[2] - part.config.crop[0],
        part.config.crop[3] - part.config.crop[1],
    )
