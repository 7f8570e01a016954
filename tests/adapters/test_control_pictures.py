"""Edges as control pictures: beside what they are of, through the API and the command line."""

from __future__ import annotations

from io import BytesIO

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
    source = editor.open(picture, CAT, control="canny", num_inference_steps=3)
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
    options = {"region": Region.box(40, 40, 100, 100), "num_inference_steps": 3}
    part = editor.open(large, CAT, control=canny(large), **options)
    left, top, right, bottom = part.config.crop
    edit = editor.edit(DOG, region=Region.box(60, 60, 90, 90), control=canny(large, 5, 10))
    for made in (part, edit):
        (like,) = made.config.like
        assert editor._engine.references.pictures[like.reference].size == (right - left, bottom - top)
    (like,) = editor.open(large, CAT, control="canny", **options).config.like
    assert editor._engine.references.pictures[like.reference].size == (part.config.width, part.config.height)


def test_a_batch_follows_the_edges_of_each_picture(pipelines, control_net, tmp_path):
    from fisedit.batch.values import BatchAdapters, BatchItem, BatchSettings
    from fisedit.batch.worker import BatchWorker
    from fisedit.values import AdapterUse

    model = tmp_path / "model"
    pipelines["sd15"].save_pretrained(model, safe_serialization=True)
    scene().save(tmp_path / "a.png")
    Image.fromarray(SQUARE.repeat(8, 0).repeat(8, 1).astype(np.uint8) * 255).save(tmp_path / "mask.png")
    item = BatchItem(tmp_path / "a.png", "a.png", CAT, DOG, tmp_path / "mask.png", "a.png", tmp_path / "out.png")

    def output(adapters):
        settings = BatchSettings(
            str(model), num_inference_steps=2, device="cpu", dtype="fp32", adapters=adapters, guidance_scale=3.0
        )
        made = BatchWorker(settings).process(item)
        return np.asarray(Image.open(BytesIO(made.data)))

    plain = output(None)
    edges = output(BatchAdapters((str(control_net),), (AdapterUse(0.7),), control="canny"))
    assert not np.array_equal(edges, plain)
    inside = SQUARE.repeat(8, 0).repeat(8, 1)
    assert np.array_equal(edges[~inside], np.asarray(scene())[~inside])
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    editor.load_adapter(control_net, 0.7)
    editor.open(scene(), CAT, control="canny", num_inference_steps=2, guidance_scale=3.0)
    assert np.array_equal(np.asarray(editor.edit(DOG, mask=SQUARE).image), edges)


def test_commands_take_edges(pipelines, control_net, tmp_path, fisedit):
    model, picture = tmp_path / "model", tmp_path / "a.png"
    pipelines["sd15"].save_pretrained(model, safe_serialization=True)
    scene().save(picture)
    (tmp_path / "in").mkdir()
    scene().save(tmp_path / "in" / "a.png")
    common = ("--model", model, "--control-net", control_net, "--control", "canny", "--num-inference-steps", "2")
    common += ("--prompt", DOG, "--source-prompt", CAT, "--device", "cpu", "--dtype", "fp32")
    Image.fromarray(SQUARE.repeat(8, 0).repeat(8, 1).astype(np.uint8) * 255).save(tmp_path / "mask.png")
    one = ("--picture", picture, "--mask", tmp_path / "mask.png", "--output", tmp_path / "one.png")
    assert fisedit("edit", *one, *common, "--inversion", "ddim").status == 0
    (tmp_path / "masks").mkdir()
    (tmp_path / "mask.png").rename(tmp_path / "masks" / "a.png")
    assert fisedit("batch", tmp_path / "in", tmp_path / "out", "--masks", tmp_path / "masks", *common).status == 0
    first, second = (np.asarray(Image.open(tmp_path / name)) for name in ("one.png", "out/a.png"))
    inside = SQUARE.repeat(8, 0).repeat(8, 1)
    assert np.array_equal(first, second) and not np.array_equal(first[inside], np.asarray(scene())[inside])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("generate", CAT, "--control", "canny"), "--control canny is of a picture that is opened"),
        (
            ("edit", "--source-prompt", CAT, "--prompt", DOG, "--guess-mode"),
            "--guess-mode is of an --adapter",
        ),
        (("edit", "--source-prompt", CAT, "--prompt", DOG, "--adapter-scale", ".5"), "--adapter-scale is of --adapter"),
        (("edit", "--source-prompt", CAT, "--prompt", DOG, "--image-encoder", "x"), "--image-encoder is of an"),
        (
            ("batch", "in", "out", "--prompt", DOG, "--adapter", "demo-look", "--reference", "missing.png"),
            "reference must be an image file, got missing.png: no such file",
        ),
        (("edit", "--source-prompt", CAT, "--prompt", DOG, "--control", "canny"), "--control canny is of a --picture"),
        (("batch", "in", "out", "--prompt", DOG, "--control", "canny"), "--control needs an --adapter that reads it"),
        (("batch", "in", "out", "--prompt", DOG, "--adapter", "demo-look"), "needs a --reference or a --control"),
        (
            ("batch", "in", "out", "--prompt", DOG, "--adapter", "x", "--control", "canny", "--adapter-scale", "99"),
            "scale must be a number in [-10, 10]",
        ),
    ],
)
def test_what_commands_refuse(fisedit, command, message):
    fisedit(*command).refused("input", message)


def test_what_the_study_of_references_refuses(study):
    study("quality", "--adapter", "x", "--kinds", "swap").refused("input", "--kinds is of edits without --adapter")
