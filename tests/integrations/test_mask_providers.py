"""What finds things in pictures: detectors of transformers, files of annotations, alpha; and batches by them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file
from scipy.ndimage import binary_dilation

from fisedit.errors import InputError, MaskError, ModelError
from fisedit.integrations.mask_providers import Detection, find, open_provider
from fisedit.masking.region_values import RegionCanvas
from tests.support.folders import picture
from training.detector import HELD_OUT_SEED, OBJECTS, draw

DETECTOR = Path(__file__).resolve().parents[1] / "fixtures/detector"
PICTURE = Image.new("RGB", (96, 64))
CAT, DOG, MOUSE = (
    Detection((40, 0, 60, 30), "Cat", 0.9),
    Detection((0, 0, 30, 60), "dog", 0.6),
    Detection((70, 10, 75, 15), "mouse", 0.4),
)


def three(picture, name):
    return [CAT, DOG, MOUSE]


def labels(found) -> list[str]:
    return [each.label for each in found]


def test_boxes_beside_the_picture_are_left_out():
    odd = Detection((10, 10, 10, 30), "cat"), Detection((200, 0, 300, 30), "cat"), Detection((-9, 0, 8, 8), "cat")
    (found,) = find(lambda picture, name: odd, PICTURE)
    assert found.box == (0, 0, 8, 8)
    with pytest.raises(MaskError, match="four numbers"):
        find(lambda picture, name: [Detection((float("nan"), 0, 8, 8))], PICTURE)


def test_annotations_by_folder_and_name(tmp_path):
    path = tmp_path / "boxes.csv"
    path.write_text("file,left,top,right,bottom\na/1.png,0,0,8,8\nb/1.png,8,8,16,16\n2.png,0,0,4,4\nx/3.png,0,0,5,5\n")
    boxes = {
        name: find(open_provider(str(path)), PICTURE, name)[0].box
        for name in ("a/1.png", "b/1.png", "c/2.png", "3.png")
    }
    assert boxes == {"a/1.png": (0, 0, 8, 8), "b/1.png": (8, 8, 16, 16), "c/2.png": (0, 0, 4, 4), "3.png": (0, 0, 5, 5)}
    with pytest.raises(InputError, match=r"says nothing of c/1\.png"):
        find(open_provider(str(path)), PICTURE, "c/1.png")


def test_what_counts_and_in_which_order():
    assert labels(find(three, PICTURE)) == ["dog", "Cat"]
    assert labels(find(three, PICTURE, threshold=0)) == ["dog", "Cat", "mouse"]
    assert labels(find(three, PICTURE, labels=["cat", "mouse"])) == ["Cat"]
    assert labels(find(three, PICTURE, instance="largest")) == ["dog"]
    assert labels(find(three, PICTURE, instance="1")) == ["Cat"]
    assert find(three, PICTURE, instance="7") == find(three, PICTURE, labels=["lion"]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 2}, "threshold must be in [0, 1], got 2"),
        ({"instance": "-1"}, "instance must be largest, all or a number from 0, got '-1'"),
        ({"instance": None}, "instance must be largest, all or a number from 0, got None"),
        ({"instance": "9" * 5000}, f"instance must be largest, all or a number from 0, got '{'9' * 39}"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(InputError) as raised:
        find(three, PICTURE, **arguments)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        ([Detection((0, 0, float("nan"), 9))], "a detector's box must be four numbers"),
        ([Detection((0, 0, 9))], "a detector's box must be four numbers"),
        ([Detection((0, 0, 10**400, 9))], "a detector's box must be four numbers"),
        ([Detection((0, 0, 9, 9), score=None)], "a detector's box must be four numbers and its score one"),
        ([Detection((0, 0, 9, 9), mask=np.ones((9, 9), bool))], "a detector's mask must have the picture's 96x64"),
        (["a cat"], "a detector must give Detections, got str"),
        (None, "the detector failed on the picture: 'NoneType' object is not iterable"),
        (ZeroDivisionError("by nothing\nat all"), "the detector failed on the picture: by nothing"),
    ],
)
def test_a_provider_that_says_nonsense_is_told_of_in_one_line(gives, message):
    def provider(picture, name):
        if isinstance(gives, Exception):
            raise gives
        return gives

    with pytest.raises(MaskError) as raised:
        find(provider, PICTURE)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_a_box_is_cut_to_its_picture_and_a_mask_is_exact():
    (cut,) = find(lambda *_: [Detection((-5, 50, 20, 90))], PICTURE)
    assert cut.box == (0, 50, 20, 64) and cut.area == 20 * 14
    mask = np.zeros((64, 96), bool)
    mask[8:16, 24:40] = True
    (found,) = find(lambda *_: [Detection((24, 8, 40, 16), mask=mask)], PICTURE)
    cells = found.region.bind(RegionCanvas(64, 96, (96, 64))).resolve(None).mask.grid
    assert found.area == 128 and cells.sum() == 2 and cells[1, 3:5].all()


def test_alpha_is_one_thing():
    assert find(open_provider("alpha"), PICTURE) == []
    assert find(open_provider("alpha"), PICTURE.convert("RGBA")) == []
    pixels = np.full((64, 96, 4), 255, np.uint8)
    pixels[10:20, 30:50, 3] = 0
    (found,) = find(open_provider("alpha"), Image.fromarray(pixels))
    assert found.box == (30, 10, 50, 20) and found.area == 200


COCO = {
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 8, "file_name": "b.png"}],
    "categories": [{"id": 1, "name": "cat"}],
    "annotations": [
        {"image_id": 7, "category_id": 1, "bbox": [10, 20, 30, 40], "score": 0.75},
        {"image_id": 7, "bbox": [0, 0, 8, 8], "segmentation": [[0, 0, 8, 0, 0, 8]]},
    ],
}


def test_annotations_in_cocos_layout(tmp_path):
    path = tmp_path / "boxes.json"
    path.write_text(json.dumps(COCO))
    corner, cat = find(open_provider(str(path)), PICTURE, "a.png")
    assert (cat.box, cat.label, cat.score) == ((10, 20, 40, 60), "cat", 0.75)
    assert 30 < corner.area < 50 and corner.mask is not None
    assert find(open_provider(str(path)), PICTURE, "b.png") == []
    with pytest.raises(InputError, match=r"boxes\.json says nothing of c\.png"):
        find(open_provider(str(path)), PICTURE, "c.png")


def test_annotations_in_columns(tmp_path):
    path = tmp_path / "boxes.csv"
    path.write_text("file,left,top,right,bottom,label\na.png,1,2,30,40,cat\nb.png,,,,,\n")
    (cat,) = find(open_provider(str(path)), PICTURE, "a.png")
    assert (cat.box, cat.label, cat.score) == ((1, 2, 30, 40), "cat", 1)
    assert find(open_provider(str(path)), PICTURE, "b.png") == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[]", "annotations in a.json must have COCO's layout ("),
        ("a.json", "{", "annotations in a.json must have COCO's layout ("),
        ("a.json", "[" * 10**5, "annotations in a.json must have COCO's layout ("),
        ("a.json", json.dumps(COCO).replace("30", "9" * 400), "annotations in a.json must have COCO's layout ("),
        ("a.json", json.dumps(COCO | {"images": []}), "annotations in a.json must have COCO's layout ("),
        ("a.csv", "file,left\na.png,1\n", "annotations in a.csv must have columns file, left, top, right, bottom ("),
        ("a.csv", "file,left,top,right,bottom\na.png,1,2,x,4\n", "annotations in a.csv must have columns file"),
        ("none.csv", None, "annotations must be a file, got"),
    ],
)
def test_files_of_another_layout(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as raised:
        open_provider(str(tmp_path / name))
    assert str(raised.value).startswith(message)


@pytest.fixture(scope="module")
def detr(tmp_path_factory):
    """A random model of DETR's architecture, saved as transformers does."""
    from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessor, ResNetConfig

    folder = tmp_path_factory.mktemp("detr")
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], out_features=["stage4"])
    config = DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        use_pretrained_backbone=False,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=5,
        num_labels=3,
        id2label={0: "cat", 1: "dog", 2: "cake"},
    )
    torch.manual_seed(0)
    DetrForObjectDetection(config).save_pretrained(folder)
    DetrImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


def test_a_detector_of_transformers_is_read(detr):
    provider = open_provider(str(detr), local_files_only=True)
    found = find(provider, PICTURE, threshold=0)
    assert {each.label for each in found} <= {"cat", "dog", "cake"} and len(found) <= 5
    assert all(0 <= each.score <= 1 and each.mask is None for each in found)


@pytest.mark.parametrize("part", [None, "backbone_config"])
def test_kernels_that_a_detector_names_are_not_fetched(detr, tmp_path, part):
    folder = shutil.copytree(detr, tmp_path / "detr")
    config = json.loads((folder / "config.json").read_text())
    (config[part] if part else config)["attn_implementation"] = "kernels-community/flash-attn3"
    (folder / "config.json").write_text(json.dumps(config))
    find(open_provider(str(folder), local_files_only=True), PICTURE, threshold=0)


def test_a_trained_model_finds_drawn_things():
    """`tests/fixtures/detector` was trained by `python -m training.detector`, without these scenes."""
    provider = open_provider(str(DETECTOR), local_files_only=True)
    there = right = told = 0
    for index in range(25):
        pixels, classes = draw(HELD_OUT_SEED, index)
        truth = {word: classes == 1 + i for i, word in enumerate(OBJECTS) if (classes == 1 + i).any()}
        found = find(provider, Image.fromarray(pixels))
        told, there = told + len(found), there + len(truth)
        right += sum(
            each.label in truth and (each.mask & truth[each.label]).sum() >= 0.5 * (each.mask | truth[each.label]).sum()
            for each in found
        )
    assert there >= 40 and right >= 0.95 * max(there, told)


def test_a_batch_edits_what_a_trained_model_finds(fisedit, tmp_path, model):
    """Every cat, and no pixel of anything else."""
    pixels, is_cat = scene(tmp_path / "in")
    words = ("--prompt", "a dog", "--source-prompt", "a cat", "--detect", DETECTOR, "--label", "cat", "--model", model)
    ran = fisedit("batch", "in", "out", *words, "--num-inference-steps", 2, "--workers", 0, "--json")
    assert ran.status == 0, ran.out
    (item,) = json.loads(ran.out)["items"]
    assert item["notes"][0] == "found 1: cat (100%)"
    after = np.asarray(Image.open(tmp_path / "out/scene.png").convert("RGB"))
    changed = (after != pixels).any(-1)
    assert changed[is_cat].mean() > 0.9 and not changed[~binary_dilation(is_cat, iterations=12)].any()


def scene(folder) -> tuple[np.ndarray, np.ndarray]:
    """A scene with a cat and something else in folder/scene.png: its pixels and the cat's."""
    cat, scenes = 1 + OBJECTS.index("cat"), (draw(HELD_OUT_SEED, index) for index in range(100))
    pixels, classes = next(each for each in scenes if (each[1] == cat).sum() > 300 and len(np.unique(each[1])) > 2)
    folder.mkdir(exist_ok=True)
    Image.fromarray(pixels).save(folder / "scene.png")
    return pixels, classes == cat


def test_an_edit_goes_where_a_trained_model_finds_its_label(fisedit, tmp_path, model):
    pixels, is_cat = scene(tmp_path)
    words = ("--picture", "scene.png", "--source-prompt", "a cat", "--model", model, "--num-inference-steps", 2)
    found = ("--detect", DETECTOR, "--label", "cat")
    for what in (("--prompt", "a dog", *found), ("--erase", *found, "--instance", 0)):
        assert fisedit("edit", *words, *what, "--output", "edit.png").status == 0
        changed = (np.asarray(Image.open(tmp_path / "edit.png").convert("RGB")) != pixels).any(-1)
        assert changed[is_cat].mean() > 0.9 and not changed[~binary_dilation(is_cat, iterations=12)].any()
    for options, why in (
        (
            ("--prompt", "a dog", "--detect", DETECTOR, "--label", "moon"),
            "the detector must find moon in the picture, got nothing",
        ),
        (("--prompt", "a dog", "--label", "cat"), "--label and --threshold are of --detect, got none"),
    ):
        ran = fisedit("edit", *words, *options)
        assert ran.status and why in ran.err and ran.err.count("\n") == 1, ran.err
    alone = fisedit("edit", "--source-prompt", "a cat", "--prompt", "a dog", "--detect", DETECTOR, "--model", model)
    alone.refused("input", "--detect is of a --picture or --from, got none; give one")


def test_parts_of_a_class_are_things_of_their_own(monkeypatch):
    provider = open_provider(str(DETECTOR), local_files_only=True)
    mask = np.zeros((64, 96), np.uint8)
    mask[4:20, 4:20] = mask[30:50, 40:70] = 255
    mask[60, 90] = 255  # a speck
    seen = [{"label": label, "score": None, "mask": Image.fromarray(mask)} for label in ("background", "cat")]
    monkeypatch.setattr(provider, "_run", lambda picture, **options: seen)
    assert [each.box for each in find(provider, PICTURE)] == [(4, 4, 20, 20), (40, 30, 70, 50)]


def test_a_mask_of_nothing_is_no_thing(detr, monkeypatch):
    provider, mask = open_provider(str(detr), local_files_only=True), np.zeros((64, 96), np.uint8)
    masks = [Image.fromarray(each) for each in (mask, np.where(np.arange(96) < 20, 255, mask).astype(np.uint8))]
    seen = [{"label": "cat", "score": 0.9, "mask": each} for each in masks]
    monkeypatch.setattr(provider, "_run", lambda picture, **options: seen)
    assert [each.box for each in find(provider, PICTURE)] == [(0, 0, 20, 64)]


@pytest.mark.parametrize("change", ["pickled", "another kind", "not whole", "cut", "nothing there"])
def test_what_is_no_detector(detr, tmp_path, change, model):
    from shutil import copytree

    folder = copytree(detr, tmp_path / "copy")
    if change == "pickled":
        weights = folder / "model.safetensors"
        weights.rename(folder / "pytorch_model.bin")
    elif change == "another kind":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["DetrModel"]}))
    elif change == "not whole":
        weights = folder / "model.safetensors"
        whole = load_file(weights)
        save_file({name: t for name, t in whole.items() if "class_labels" not in name}, weights, {"format": "pt"})
    elif change == "cut":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        folder = tmp_path / "nothing"
    with pytest.raises(ModelError, match=r"(a detector must|lacks \d+ of its weights)") as raised:
        open_provider(str(folder), local_files_only=True)
    assert "\n" not in str(raised.value)


def test_a_batch_edits_what_is_found(fisedit, tmp_path, model):
    """Together, or in a large picture each on a part of its own; and says what that was."""
    for name, size in (("small.png", (64, 64)), ("large.png", (400, 300)), ("empty.png", (64, 64))):
        picture(tmp_path / "in" / name, size=size)
    (tmp_path / "boxes.csv").write_text(
        "file,left,top,right,bottom,label,score\n"
        "small.png,0,0,16,16,cat,.9\nsmall.png,40,40,64,64,cat,.8\nsmall.png,20,20,30,30,dog,.9\n"
        "large.png,0,0,24,24,cat,.9\nlarge.png,300,200,330,230,cat,.9\nempty.png,,,,,,\n"
    )
    words = ("--prompt", "a dog", "--source-prompt", "a cat", "--detect", "boxes.csv", "--label", "cat")
    ran = fisedit("batch", "in", "out", *words, "--model", model, "--num-inference-steps", 2, "--workers", 0, "--json")
    assert ran.status == 0, ran.out
    notes = {item["image"]: item["notes"] for item in json.loads(ran.out)["items"]}
    assert notes["small.png"][0] == "found 2: cat (90%), cat (80%)" and notes["large.png"][0].startswith("found 2: cat")
    assert notes["empty.png"] == ["nothing was found, and nothing edited"]
    assert (tmp_path / "out/empty.png").read_bytes() == (tmp_path / "in/empty.png").read_bytes()
    for name, kept in (("small.png", (slice(16, 40), slice(16, 40))), ("large.png", (slice(40, 180), slice(0, 400)))):
        before, after = (np.asarray(Image.open(tmp_path / folder / name).convert("RGB")) for folder in ("in", "out"))
        assert np.array_equal(before[kept], after[kept])
        assert (before[:16, :16] != after[:16, :16]).any() and (before != after)[200:, 300:].any() == (name[0] == "l")


def test_what_is_transparent_is_painted_and_seen(fisedit, tmp_path, model):
    pixels = np.full((64, 64, 4), 255, np.uint8)
    pixels[16:40, 16:40, 3] = 0
    (tmp_path / "in").mkdir()
    Image.fromarray(pixels).save(tmp_path / "in/hole.png")
    words = ("--prompt", "a dog", "--source-prompt", "a cat", "--detect", "alpha", "--model", model)
    ran = fisedit("batch", "in", "out", *words, "--num-inference-steps", 2, "--workers", 0)
    assert ran.status == 0, ran.out
    after = Image.open(tmp_path / "out/hole.png")
    assert not after.has_transparency_data and (np.asarray(after.convert("RGB"))[16:40, 16:40] != 255).any()


@pytest.mark.parametrize("source", ["--picture", "--from"])
def test_clear_palette_colours_are_painted_and_seen(fisedit, tmp_path, model, source):
    colours, says = Image.new("P", (64, 64), 1), PngInfo()
    colours.putpalette((0, 0, 0, 0, 128, 128))
    colours.paste(0, (16, 16, 40, 40))
    says.add_text("parameters", "a cat\nSteps: 2, Sampler: DDIM, CFG scale: 7.5, Seed: 0, Size: 64x64")
    colours.save(tmp_path / "hole.png", transparency=0, pnginfo=says)
    words = ("--prompt", "a dog", "--detect", "alpha", *(("--source-prompt", "a cat") if source == "--picture" else ()))
    ran = fisedit("edit", source, "hole.png", *words, "--model", model, "--num-inference-steps", 2)
    assert ran.status == 0, ran.err
    after = Image.open(tmp_path / "edit.png")
    assert not after.has_transparency_data and (np.asarray(after.convert("RGB"))[16:40, 16:40] != 0).any()


def test_a_batch_notices_other_annotations(fisedit, tmp_path, model):
    picture(tmp_path / "in/a.png")
    words = ("--prompt", "a dog", "--source-prompt", "a cat", "--detect", "boxes.csv", "--model", model)
    told = []
    for box in ("0,0,16,16", "0,0,16,16", "40,40,64,64"):
        (tmp_path / "boxes.csv").write_text(f"file,left,top,right,bottom\na.png,{box}\n")
        ran = fisedit("batch", "in", "out", *words, "--num-inference-steps", 2, "--workers", 0, "--overwrite", "--json")
        assert ran.status == 0, ran.out
        told.append(json.loads(ran.out)["items"][0]["status"])
    assert told == ["done", "done before", "done"]


def test_nothing_found_is_no_other_format(fisedit, tmp_path, model):
    (tmp_path / "in").mkdir()
    Image.new("RGB", (64, 64), "teal").save(tmp_path / "in/a.jpg")
    (tmp_path / "boxes.csv").write_text("file,left,top,right,bottom\na.jpg,,,,\n")
    words = ("--prompt", "a dog", "--detect", "boxes.csv", "--model", model, "--format", "png", "--workers", 0)
    assert fisedit("batch", "in", "out", *words).status == 0
    assert Image.open(tmp_path / "out/a.png").format == "PNG"


def test_nothing_found_in_palettes_with_clear_colours(fisedit, tmp_path, model):
    (tmp_path / "in").mkdir()
    colours = Image.new("P", (64, 64), 1)
    colours.putpalette((0, 0, 0, 0, 128, 128))
    colours.paste(0, (0, 0, 16, 16))
    for name in ("a.gif", "b.png"):
        colours.save(tmp_path / "in" / name, transparency=0)
    (tmp_path / "boxes.csv").write_text("file,left,top,right,bottom\na.gif,,,,\nb.png,,,,\n")
    words = ("--prompt", "a dog", "--detect", "boxes.csv", "--model", model, "--format", "webp", "--workers", 0)
    ran = fisedit("batch", "in", "out", *words)
    assert ran.status == 0, ran.out
    for name in ("a.webp", "b.webp"):
        written = Image.open(tmp_path / "out" / name)
        assert [written.getpixel((at, at)) for at in (0, 63)] == [(0, 0, 0, 0), (0, 128, 128, 255)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--detect", "boxes.csv", "--threshold", "2"), "threshold must be in [0, 1]"),
        (("--detect", "boxes.csv", "--instance", "first"), "instance must be"),
        (("--detect", "none.csv"), "no such file"),
        (("--threshold", "0.7"), "are of --detect"),
        (("--detect", "boxes.csv", "--edits", "rows.csv"), "has a mask"),
    ],
)
def test_detection_options_that_do_not_fit(fisedit, tmp_path, options, why):
    picture(tmp_path / "in/a.png")
    picture(tmp_path / "in/m.png")
    (tmp_path / "boxes.csv").write_text("file,left,top,right,bottom\na.png,0,0,8,8\nm.png,0,0,8,8\n")
    (tmp_path / "rows.csv").write_text("image,prompt,mask\na.png,a dog,m.png\n")
    ran = fisedit("batch", "in", "out", *(() if "--edits" in options else ("--prompt", "a dog")), *options, "--dry-run")
    assert ran.status and why in ran.err and ran.err.count("\n") == 1, ran.err


def test_masks_and_detectors_exclude_each_other(fisedit, tmp_path):
    (tmp_path / "in").mkdir()
    ran = fisedit("batch", "in", "out", "--prompt", "a dog", "--detect", "alpha", "--masks", "in")
    assert ran.status and "give either --detect or --masks, got both" in ran.err
