"""What a written picture tells of its making: as web UIs read it, and enough to make every pixel again."""

from __future__ import annotations

import json
import re
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import piexif.helper
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from fisedit import Editor, Region, __version__
from fisedit.decoder import compositing
from fisedit.errors import InputError, ModelError
from fisedit.metadata import image_metadata, provenance
from fisedit.metadata.generation_parameters import parse_parameters
from fisedit.metadata.image_metadata import Metadata, owner_info
from fisedit.models import paths
from fisedit.sparse_kernels.dilation import dilate
from fisedit.storage import images
from fisedit.storage.images import decode
from fisedit.values import SchedulerName
from tests.support.edits import BIRD, CAT, DOG
from tests.support.folders import bomb
from tests.support.grids import grids
from tests.support.sessions import file_of

SQUARE, CORNER, MOST = (grids(16, 16)[name] for name in ("square", "corner", "all_but_one"))
QUICK = {"seed": 7, "num_inference_steps": 3}
SHORT = ("--num-inference-steps", "2")
ENDINGS = ("png", "jpg", "webp", "tif")
FOREIGN = "a knight, (armour:1.2)\nNegative prompt: blurry\nSteps: 20, Sampler: Euler a, CFG scale: 7, Size: 512x768"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            'Steps: 20, Sampler: DPM++ SDE Karras, CFG scale: 7.5, Seed: 3, Size: 512x768, TI: "a: 1, Seed: 9"',
            {
                "num_inference_steps": 20,
                "scheduler": SchedulerName.DPM_SDE_KARRAS,
                "guidance_scale": 7.5,
                "seed": 3,
                "width": 512,
                "height": 768,
            },
        ),
        (
            "Steps: 4, Sampler: DPM++ 2M, Schedule type: Karras",
            {"num_inference_steps": 4, "scheduler": SchedulerName.DPM_SOLVER_KARRAS},
        ),
        ("Steps: many, Sampler: DPM9, CFG scale: x, Size: 12", {}),
        ("Steps: 4" + ", x: 5" * 100_000 + ", Seed: 5", {"num_inference_steps": 4}),
        ("Seed: 7, Steps: 4, CFG scale: 2", {"seed": 7, "num_inference_steps": 4, "guidance_scale": 2.0}),
        ("  Model: x, Seed: 7, Version: 1", {"seed": 7}),
    ],
)
@pytest.mark.parametrize("start", ["\n", "\r\n", "\n  "])
def test_settings_of_web_uis_are_read(line, found, start):
    assert parse_parameters(f"a cat{start}Negative prompt: rain{start}{line}") == (
        "a cat",
        {"negative_prompt": "rain"} | found,
    )


@pytest.mark.parametrize(
    "prompt", ["a cat\non a beach", "Style: photo, Light: soft, Camera: old", "a dance, Steps: 2", "Steps: up, down"]
)
def test_prompts_without_settings_stay_whole(prompt):
    assert parse_parameters(prompt) == (prompt, {"negative_prompt": ""})


def written(editor, ending="png", **options):
    """The current picture as a file, opened again."""
    path = Path(f"picture.{ending}")
    editor.write(path, **options)
    return Image.open(BytesIO(path.read_bytes()))


def told_in(ending, editor):
    """A TIFF holds the origin alone."""
    whole = editor.metadata()
    return Metadata("", whole.origin) if ending == "tif" else whole


def plain(words=None, exif=None, kind="PNG", **options):
    """A small grey picture that carries texts."""
    file = BytesIO()
    if kind == "PNG":
        options["pnginfo"] = chunks(words or {})
    Image.new("RGB", (64, 64), "grey").save(file, kind, **options, exif=b"" if exif is None else exif)
    file.seek(0)
    return Image.open(file)


def chunks(words):
    """Texts of a PNG."""
    made = PngInfo()
    for key, text in words.items():
        made.add_text(key, text)
    return made


def as_uis_read(picture):
    """A PNG's chunk, or EXIF's UserComment by the library that those UIs read it with."""
    if picture.format == "PNG":
        return picture.text["parameters"]
    return piexif.helper.UserComment.load(piexif.load(picture.info["exif"])["Exif"][piexif.ExifIFD.UserComment])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def editor(model):
    return Editor.from_pretrained(model)


class TestParameters:
    @pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
    def test_uis_read_them(self, editor, ending):
        editor.generate("a cat, «Müller» 猫🐈", negative_prompt="big red\ncar", guidance_scale=4.0, **QUICK)
        assert as_uis_read(written(editor, ending)) == (
            "a cat, «Müller» 猫🐈\nNegative prompt: big red\ncar\n"
            "Steps: 3, Sampler: DDIM, CFG scale: 4, Seed: 7, Size: 128x128, Model: model, "
            f"Version: fisedit {__version__}"
        )

    @pytest.mark.parametrize("ending", ENDINGS)
    def test_we_read_them(self, editor, ending):
        editor.generate(CAT, **QUICK)
        assert image_metadata.read_metadata(written(editor, ending)) == told_in(ending, editor)
        assert image_metadata.read_metadata(written(editor, ending, metadata=False)) == Metadata()

    def test_an_edit_tells_its_own(self, editor):
        editor.generate(CAT, scheduler="euler_a", seed=7, num_inference_steps=4)
        editor.edit(DOG, mask=SQUARE, strength=0.5)
        first, last = as_uis_read(written(editor)).split("\n")
        assert first == DOG and "Sampler: Euler a" in last and "Denoising strength: 0.5" in last

    def test_a_value_with_a_comma_is_quoted(self, pipelines):
        editor = Editor(pipelines["shallow"], model="/models/a, b.safetensors")
        editor.generate(CAT, **QUICK)
        assert 'Model: "a, b"' in editor.metadata().parameters

    @pytest.mark.parametrize(
        ("text", "prompts"),
        [
            (FOREIGN, ("a knight, (armour:1.2)", "blurry")),
            ("a knight\nin armour\nSteps: 20, Sampler: LCM", ("a knight\nin armour", "")),
            ("Negative prompt: a,\nb\nSteps: 20, Sampler: LCM", ("", "a,\nb")),
            ("Steps: 20, Sampler: LCM", ("", "")),
            ("just words", ("just words", "")),
        ],
    )
    def test_prompts_of_other_programs(self, text, prompts):
        past = provenance.parse_origin(Metadata(text))
        assert (past.config.prompt, past.config.negative_prompt) == prompts and past.config.opened

    @pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
    def test_either_order_of_utf16(self, order):
        exif = Image.Exif()
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"UNICODE\0" + f"é {FOREIGN}".encode(order)
        assert image_metadata.read_metadata(plain(exif=exif, kind="JPEG")).parameters == f"é {FOREIGN}"

    def test_an_owners_comment_is_no_prompt(self):
        exif = Image.Exif()
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"ASCII\0\0\0Screenshot"
        picture = plain(exif=exif, kind="JPEG", comment=b"at the sea")
        assert image_metadata.read_metadata(picture) == Metadata()
        assert b"Screenshot" in owner_info(picture)["exif"]


def trajectory(editor):
    """A source and edits of every kind, each of the one before; yields after each."""
    yield editor.generate(CAT, **QUICK)
    yield editor.edit(DOG, mask=SQUARE, growth=(1, 1, 0), structure=1.0)
    yield editor.edit(DOG)
    yield editor.edit(BIRD, words=["dog"], grow=1, verify=True)
    yield editor.edit(CAT, mask=CORNER, strength=0.7)
    yield editor.edit("a cat and a cake at night", protect=SQUARE)
    yield editor.edit(DOG, mask=MOST, growth=1, seed=8)
    yield editor.edit(DOG, mask=SQUARE, strength=0.7, seed=9)
    yield editor.edit(CAT, mask=CORNER)


class TestRemake:
    @pytest.mark.slow
    def test_every_pixel_is_made_again(self, editor, model):
        for number, result in enumerate(trajectory(editor)):
            picture = written(editor)
            again = Editor.remake(picture, model=model)
            assert np.array_equal(np.asarray(picture), np.asarray(again.current.image)), number
            assert again.current.image.tobytes() == result.image.tobytes()
            assert again.metadata() == editor.metadata()
        assert len(again.history) == len(editor.history) - 1, "the edit that changed nothing is no part of it"

    @pytest.mark.slow
    def test_an_edit_that_was_checked_for_leaks(self, model):
        """The check moves roundings, so it is made again as well."""
        editor = Editor.from_pretrained("demo", dtype="fp32")
        editor.generate("a cat and a cake on a beach", seed=7, guidance_scale=4, num_inference_steps=10)
        first = editor.edit("a dog and a cake on a beach")
        editor.undo()
        second = editor.edit("a dog and a cake on a beach", verify=False)
        assert (first.run.checked, second.run.checked) == (True, False)
        for result in (first, second):
            editor.checkout(result.id)
            again = Editor.remake(written(editor)).current
            assert again.image.tobytes() == result.image.tobytes()
            assert result.run.rim.any() and np.array_equal(again.run.rim, result.run.rim)

    @pytest.mark.parametrize("place", ["protected", "boxed"])
    def test_cells_beside_a_mask_stay_out_of_what_is_protected(self, editor, model, monkeypatch, place):
        """Where every cell beside it would be painted too; it is remembered which were."""
        monkeypatch.setattr(compositing, "VISIBLE_CHANGE", 1e-9)
        barred = grids(8, 8)["checkerboard"]
        editor.generate(CAT, seed=7, num_inference_steps=2, width=64, height=64)
        region = Region.words() - Region.mask(barred) if place == "protected" else Region.words() & Region.mask(~barred)
        result = editor.edit(DOG, region=region, verify=False)
        beside = dilate(result.latent_cells, 1) & ~result.latent_cells
        assert (beside & barred).any() and np.array_equal(result.run.rim, beside & ~barred)
        again = Editor.remake(written(editor), model=model).current
        assert np.array_equal(again.mask.grid, result.mask.grid) and again.image.tobytes() == result.image.tobytes()

    @pytest.mark.slow
    def test_edits_go_on_from_there(self, editor, model):
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE)
        again = Editor.remake(written(editor), model=model)
        here, there = (one.edit(BIRD, mask=CORNER) for one in (editor, again))
        assert here.image.tobytes() == there.image.tobytes()
        assert [result.prompt for result in again.history] == [CAT, DOG, BIRD]

    def test_dtype_is_that_of_then(self, model):
        editor = Editor.from_pretrained(model, dtype="bf16")
        editor.generate(CAT, **QUICK)
        again = Editor.remake(written(editor), model=model)
        assert again.pipe.unet.dtype == editor.pipe.unet.dtype
        assert again.current.image.tobytes() == editor.current.image.tobytes()

    @pytest.mark.slow
    def test_changes_replace_what_is_told(self, editor, model):
        editor.generate(CAT, **QUICK)
        editor.edit(DOG, mask=SQUARE)
        changes = {"seed": 8, "num_inference_steps": 2, "width": 64}
        again = Editor.remake(written(editor), model=model, changes=changes)
        source, edit = again.history
        assert (source.config.seed, source.config.num_inference_steps, source.image.size) == (8, 2, (64, 128))
        expected = Editor.from_pretrained(model).generate(CAT, seed=8, num_inference_steps=2, width=64)
        assert source.image.tobytes() == expected.image.tobytes()
        assert np.array_equal(edit.mask.grid, SQUARE[:, ::2] | SQUARE[:, 1::2]), "a given mask, at the new size"

    def test_noise_of_an_edits_own_stays_its_own(self, editor, model):
        editor.generate(CAT, **QUICK)
        editor.edit(CAT, mask=SQUARE, seed=8)
        editor.edit(DOG, mask=CORNER)
        again = Editor.remake(written(editor), model=model, changes={"seed": 5})
        assert [result.config.seed for result in again.history] == [5, 8, 8]

    def test_words_find_their_place_again(self, editor, model):
        editor.generate(CAT, **QUICK)
        editor.edit(DOG)
        again = Editor.remake(written(editor), model=model, changes={"seed": 8})
        fresh = Editor.from_pretrained(model)
        fresh.generate(CAT, **(QUICK | {"seed": 8}))
        assert again.current.image.tobytes() == fresh.edit(DOG).image.tobytes()

    def test_a_model_that_was_here_must_be_given(self, editor):
        editor.generate(CAT, **QUICK)
        with pytest.raises(InputError, match=r"a model of its maker's, model; give --model"):
            Editor.remake(written(editor))

    def test_a_picture_brings_no_model_from_the_network(self, editor, monkeypatch):
        editor.generate(CAT, **QUICK)
        editor.model, asked = "some/body", []
        monkeypatch.setattr(
            paths, "download_files", lambda *_, local_files_only: asked.append(local_files_only) or _missing()
        )
        with pytest.raises(ModelError):
            Editor.remake(written(editor))
        assert asked == [True], "what is on this machine, alone"

    def test_a_change_must_mean_something(self, editor, model):
        editor.generate(CAT, **QUICK)
        with pytest.raises(InputError, match="was generated, where inversion means nothing"):
            Editor.remake(written(editor), model=model, changes={"inversion": "ddpm"})


def _missing():
    raise ModelError("not here")


class TestOpened:
    def exif(self, orientation=6):
        """A camera's, with a thumbnail."""
        told = {
            "0th": {piexif.ImageIFD.Make: b"Leica", piexif.ImageIFD.Orientation: orientation},
            "Exif": {piexif.ExifIFD.DateTimeOriginal: b"2020:02:02 02:02:02", piexif.ExifIFD.MakerNote: b"secret" * 9},
            "GPS": {piexif.GPSIFD.GPSLatitudeRef: b"N"},
            "1st": {piexif.ImageIFD.Make: b"small"},
            "thumbnail": plain(kind="JPEG").fp.getvalue(),
        }
        return piexif.dump(told)

    @pytest.mark.sweep(1)
    @pytest.mark.parametrize("made", [True, False])
    @pytest.mark.parametrize("ending", ENDINGS)
    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
    def test_the_owners_words_stay(self, editor, kind, ending, made):
        xmp = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'></x:xmpmeta>"
        options = {"xmp": xmp, "comment": b"mine"} if kind == "JPEG" else {}
        words = {"Title": "at the sea", "Author": "Zoë 猫"} if kind == "PNG" else {}
        editor.open(plain(words, self.exif(), kind, **options), CAT, **QUICK)
        editor.edit(DOG, mask=np.arange(64 * 64).reshape(64, 64) < 999)
        picture = written(editor, ending, metadata=made)
        exif = picture.getexif()
        assert exif[ExifTags.Base.Make] == "Leica" and ExifTags.Base.Orientation not in exif
        assert exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] == "2020:02:02 02:02:02"
        assert exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.MakerNote] == b"secret" * 9
        assert exif.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitudeRef] == "N"
        assert not exif.get_ifd(ExifTags.IFD.IFD1), "a thumbnail would show the picture of before"
        if kind == "PNG" and ending == "png":
            assert {key: picture.text[key] for key in words} == words
        if kind == "JPEG":
            assert picture.info["xmp"] == xmp
            assert picture.info.get("comment", picture.info.get("Comment", b"mine")) in (b"mine", "mine")
        assert image_metadata.read_metadata(picture) == (told_in(ending, editor) if made else Metadata())

    @pytest.mark.parametrize("read", [Image.open, lambda file: decode(file.getvalue()).image])
    def test_those_of_a_tiff(self, editor, read):
        file, exif = BytesIO(), Image.Exif()
        exif[ExifTags.Base.Artist] = "Zoe"
        exif[ExifTags.IFD.Exif] = {ExifTags.Base.DateTimeOriginal: "2020:02:02 02:02:02"}
        Image.new("RGB", (64, 64), "grey").save(file, "TIFF", exif=exif.tobytes())
        editor.open(read(file), CAT, **QUICK)
        seen = written(editor, "jpg").getexif()
        assert seen[ExifTags.Base.Artist] == "Zoe" and set(seen) <= {ExifTags.Base.Artist, 0x8769, 0x9213}
        assert seen.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] == "2020:02:02 02:02:02"

    def test_it_is_opened_again(self, editor, model):
        editor.open(plain(), CAT, **QUICK, inversion="ddpm", negative_prompt="snow")
        editor.edit(DOG, mask=np.eye(64, dtype=bool))
        picture = written(editor)
        again = Editor.remake(picture, model=model, changes={"guidance_scale": 3})
        (source,) = again.history
        assert np.array_equal(np.asarray(source.image), np.asarray(picture))
        expected = {"inversion": "ddpm", "negative_prompt": "snow", "guidance_scale": 3, "prompt": DOG} | QUICK
        assert {name: getattr(source.config, name) for name in expected} == expected
        with pytest.raises(InputError, match="was opened, where scheduler means nothing"):
            Editor.remake(picture, model=model, changes={"scheduler": "euler"})

    @pytest.mark.parametrize("kind", ["PNG", pytest.param("JPEG", marks=pytest.mark.slow)])
    def test_what_another_program_said_is_what_was_before(self, editor, model, kind):
        exif = Image.Exif()
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"UNICODE\0" + FOREIGN.encode("utf-16-be")
        foreign = plain({"parameters": FOREIGN}) if kind == "PNG" else plain(exif=exif, kind=kind)
        first = Editor.remake(foreign, model=model, changes={"num_inference_steps": 2})
        assert first.current.prompt == "a knight, (armour:1.2)"
        first.edit("a dog, (armour:1.2)", mask=np.eye(64, dtype=bool))
        for ending in ENDINGS:
            picture = written(first, ending)
            assert FOREIGN not in image_metadata.read_metadata(picture).parameters
            assert provenance.parse_origin(image_metadata.read_metadata(picture)).before == FOREIGN
            assert image_metadata.read_metadata(written(first, ending, metadata=False)) == Metadata()
        second = Editor.from_pretrained(model)
        second.open(picture, DOG, num_inference_steps=2)
        assert provenance.parse_origin(second.metadata()).before == FOREIGN

    def test_a_session_keeps_them(self, editor):
        editor.model = str(editor.model)
        editor.open(plain({"Title": "mine", "parameters": FOREIGN}), CAT, **QUICK)
        editor.edit(DOG, mask=np.eye(64, dtype=bool))
        editor.save("session")
        resumed = Editor.resume("session")
        assert resumed.metadata() == editor.metadata() and provenance.parse_origin(resumed.metadata()).before == FOREIGN
        assert written(resumed).text["Title"] == "mine"

    def test_a_full_jpeg(self, editor):
        """A segment has 64 KiB: the owner's words stay, and what there is no room for is said."""
        exif = Image.Exif()
        exif[ExifTags.Base.Artist] = "Z" * 65_000
        editor.open(plain(exif=exif, kind="JPEG"), CAT, **QUICK)
        assert editor.write("a.jpg") == ("left out, as a JPEG has no room for it: how to make it again",)
        assert as_uis_read(Image.open("a.jpg")) == editor.metadata().parameters
        exif[ExifTags.Base.Artist] = "Z" * 65_400
        editor.open(plain(exif=exif, kind="JPEG"), CAT, **QUICK)
        assert editor.write("a.jpg") == ("left out, as a JPEG has no room for it: how it was made",)
        assert Image.open("a.jpg").getexif()[ExifTags.Base.Artist] == "Z" * 65_400
        exif[ExifTags.Base.Artist] = "Z" * 70_000
        editor.open(plain(exif=exif), CAT, **QUICK)
        assert editor.write("a.jpg") == ("left out, as a JPEG has no room for it: the picture's exif",)
        assert image_metadata.read_metadata(Image.open("a.jpg")) == editor.metadata()


class TestPrivate:
    def test_no_place_is_named(self, editor, model):
        editor.generate(CAT, **QUICK)
        editor.save("session")
        for ending in ENDINGS:
            written(editor, ending)
        for path in (*Path().glob("picture.*"), *Path("session").glob("*.png")):
            content = path.read_bytes()
            assert not any(part.encode() in content for part in (str(model.parent), model.parent.name, str(Path.cwd())))

    @pytest.mark.parametrize("name", ["/home/zoe/secret/sd.st", "~/secret/sd.st", "../sd.st", "sd.st"])
    def test_of_a_local_model_only_its_own_name(self, name):
        assert provenance.model_name(name) == "./sd.st"
        assert [provenance.model_name(kept) for kept in ("demo", "some/body", "")] == ["demo", "some/body", ""]


GOOD = {
    "fisedit": __version__,
    "version": 3,
    "model": "demo",
    "dtype": "float32",
    "device": "cpu",
    "source": {
        "prompt": CAT,
        "seed": 7,
        "negative_prompt": "",
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        "width": 64,
        "height": 64,
        "scheduler": "ddim",
        "inversion": None,
    },
    "edits": [
        {
            "prompt": DOG,
            "change": "cat -> dog",
            "mask": {"source": "given", "confidence": 1.0, "runs": [10, 5, 49]},
            "growth": [1, 1],
            "structure": 0.0,
            "start": 0,
            "checked": False,
        }
    ],
}
BAD = {
    "no JSON": "{",
    "another kind of JSON": "[]",
    "deep": "[" * 100_000,
    "a long number": '{"fisedit": 1, "version": ' + "9" * 5000 + "}",
    "long": '{"fisedit": "' + "a" * 5_000_000 + '"}',
    "nothing": "{}",
    "no source": {"source": None},
    "a strange source": {"source": {"prompt": CAT}},
    "too many edits": {"edits": GOOD["edits"] * 1001},
    "no list of edits": {"edits": 3},
    "a number for a model": {"model": 3},
}
BAD_SOURCE = {"width": 10**9, "height": 1, "num_inference_steps": 10**9, "seed": -1, "scheduler": "?", "prompt": ""}
BAD_EDIT = {
    "prompt": 3,
    "growth": [1],
    "structure": float("nan"),
    "start": 2,
    "rim": [63],
    "mask": {"source": "given", "confidence": 1, "runs": [10**18, 5]},
}
BAD |= {f"source {name}": {"source": GOOD["source"] | {name: value}} for name, value in BAD_SOURCE.items()}
BAD |= {f"edit {name}": {"edits": [GOOD["edits"][0] | {name: value}]} for name, value in BAD_EDIT.items()}
BAD |= {
    f"a rim that is {what}": {"edits": [GOOD["edits"][0] | {"rim": runs}]}
    for what, runs in {"all of the mask": [10, 5, 49], "beside it": [0, 1, 63]}.items()
}


def bad(name):
    return BAD[name] if isinstance(BAD[name], str) else json.dumps(GOOD | BAD[name])


class TestHostile:
    def test_the_good_one_is_good(self):
        past = provenance.parse_origin(Metadata(origin=json.dumps(GOOD)))
        assert past.prompt == DOG and past.edits[0].mask.grid.sum() == 5
        assert json.loads(provenance.to_metadata(past).origin) | {"torch": 0} == GOOD | {"torch": 0}
        assert provenance.parse_origin(Metadata(origin=json.dumps(GOOD | {"version": 1}))).config == past.config

    def test_damaged_origins_are_refused(self):
        for name in BAD:
            with pytest.raises(InputError, match="what the picture says of its making is damaged; edit it as --pic"):
                provenance.parse_origin(Metadata("a cat", bad(name)))

    def test_a_newer_one_is_named(self):
        with pytest.raises(InputError, match="must be of version 3, got 4; update fisedit"):
            provenance.parse_origin(Metadata("", json.dumps(GOOD | {"version": 4})))

    @settings(deadline=None, max_examples=150)
    @given(st.data())
    def test_whatever_is_in_its_place(self, data):
        """Any value anywhere: an origin or one line, nothing else."""
        values = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=5,
        )
        told = json.loads(json.dumps(GOOD))
        place = data.draw(st.sampled_from([told, told["source"], told["edits"][0], told["edits"][0]["mask"]]))
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(values)
        try:
            past = provenance.parse_origin(Metadata(origin=json.dumps(told)))
        except InputError:
            return
        assert provenance.to_metadata(past).parameters

    @settings(deadline=None, max_examples=150)
    @given(st.binary(max_size=200), st.sampled_from([b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08", b""]))
    def test_made_up_exif(self, data, head):
        picture = Image.new("RGB", (8, 8))
        picture.info["exif"] = b"Exif\0\0" + head + data
        assert isinstance(image_metadata.read_metadata(picture), Metadata)
        file = BytesIO()
        picture.info = owner_info(picture)
        picture.save(file, "JPEG", **image_metadata.save_options(picture, "JPEG", Metadata("a", '{"fisedit"}'))[0])
        assert image_metadata.read_metadata(Image.open(file)) == Metadata("a", '{"fisedit"}')

    def test_show_says_it_in_a_line(self, fisedit):
        for name in BAD:
            images.write_image(Image.new("RGB", (64, 64)), Path("a.png"), Metadata("", bad(name)))
            for verb in (("show", "a.png"), ("edit", "--from", "a.png", "--prompt", DOG)):
                fisedit(*verb).refused("input", "damaged")

    def test_a_text_that_unpacks_to_too_much(self, fisedit):
        def chunk(kind, data):
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        whole, text = plain().fp.getvalue(), b"parameters\0\0" + zlib.compress(b"a" * 300_000_000)
        Path("a.png").write_bytes(whole[:33] + chunk(b"zTXt", text) + whole[33:])
        fisedit("show", "a.png").refused("input", "damaged file")

    @pytest.mark.parametrize("content", [b"", b"a cat", bomb(100_000), b"%!PS-Adobe-3.0 EPSF-3.0\n"])
    def test_what_is_no_picture(self, fisedit, content):
        Path("a.png").write_bytes(content)
        fisedit("show", "a.png").refused("input", "picture a.png")
        fisedit("edit", "--from", "a.png", "--prompt", DOG).refused("input", "picture a.png")

    def test_terminals_are_safe(self, fisedit):
        plain().save("a.png", pnginfo=chunks({"parameters": "a \x1b[31mcat\x07\nSteps: 2, Sampler: \x1b]0;x\x07"}))
        run = fisedit("show", "a.png")
        assert run.status == 0 and "cat" in run.out and not re.search("[\x00-\x09\x0b-\x1f]", run.out)


class TestCommands:
    def made(self, fisedit, model, *options, output="cat.png"):
        run = fisedit("generate", CAT, "--seed", "7", *SHORT, "--model", model, "--output", output, *options)
        assert (run.status, run.err) == (0, "")

    def test_show(self, fisedit, model):
        self.made(fisedit, model)
        assert fisedit("edit", "--from", "cat.png", "--model", model, "--prompt", DOG, "--output", "dog.jpg").err == ""
        run = fisedit("show", "dog.jpg")
        lines = run.out.splitlines()
        assert lines[0] == DOG and lines[1].startswith(
            "Steps: 2, Sampler: DDIM, CFG scale: 7.5, Seed: 7, Size: 128x128"
        )
        assert "generated" in run.out and "cat -> dog" in run.out
        told = json.loads(fisedit("show", "dog.jpg", "--json").out)
        assert told["parameters"].startswith(DOG) and told["fisedit"]["source"]["prompt"] == CAT
        assert told["fisedit"]["edits"][0]["change"] == "cat -> dog"

    def test_nothing_to_show(self, fisedit):
        plain().save("a.png")
        fisedit("show", "a.png").refused("input", "says nothing of how it was made")
        fisedit("edit", "--from", "a.png", "--prompt", DOG).refused("input", "says nothing of how it was made")
        fisedit("show", "b.png").refused("input", "no such file")

    @pytest.mark.parametrize(
        "output", ["cat.png", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cat.jpg", "cat.webp"))]
    )
    def test_from_is_as_if_it_was_never_left(self, fisedit, model, output):
        self.made(fisedit, model, output=output)
        common = ("--model", model, "--prompt", DOG, "--json")
        run = fisedit("edit", "--from", output, *common, "--output", "a.png")
        assert json.loads(run.out)["notes"] == ["made again: every pixel is the file's"]
        fisedit("edit", "--source-prompt", CAT, "--seed", "7", *SHORT, *common, "--output", "b.png")
        ours, direct = (np.asarray(Image.open(name)) for name in ("a.png", "b.png"))
        assert np.array_equal(ours, direct)

    @pytest.mark.slow
    def test_options_override(self, fisedit, model):
        self.made(fisedit, model)
        common = ("--model", model, "--prompt", DOG, "--json")
        run = fisedit("edit", "--from", "cat.png", "--seed", "9", *common, "--output", "a.png")
        assert json.loads(run.out)["notes"] == []
        fisedit("edit", "--source-prompt", CAT, "--seed", "9", *SHORT, *common, "--output", "b.png")
        ours, direct = (np.asarray(Image.open(name)) for name in ("a.png", "b.png"))
        assert np.array_equal(ours, direct)

    def test_a_picture_that_was_touched_is_told(self, fisedit, model):
        self.made(fisedit, model)
        told, touched = Image.open("cat.png"), Image.open("cat.png").rotate(180)
        touched.save("cat.png", pnginfo=chunks(told.text))
        run = fisedit("edit", "--from", "cat.png", "--model", model, "--prompt", DOG, "--json")
        assert "not every pixel is the file's" in json.loads(run.out)["notes"][0]

    @pytest.mark.slow
    def test_a_session_begins_there(self, fisedit, model):
        self.made(fisedit, model)
        options = ("--from", "cat.png", "--model", model, "--session", "s", "--prompt")
        assert fisedit("edit", *options, DOG).status == 0
        assert fisedit("edit", "--session", "s", "--prompt", BIRD).status == 0
        fisedit("edit", *options, DOG).refused("input", "s holds a session")
        index = json.loads(Path("s/session.json").read_text())
        assert [entry["recipe"]["prompt"] for entry in index["results"]] == [CAT, DOG, BIRD]

    def test_show_tells_the_prompts_in_another_programs_json(self, fisedit):
        told = {"prompt": "a knight", "negative_prompt": "blurry", "seed": 1, "metadata_scheme": "fooocus"}
        plain().save("a.png", pnginfo=chunks({"parameters": json.dumps(told)}))
        lines = fisedit("show", "a.png").out.splitlines()
        assert lines[:2] == ["a knight", "Negative prompt: blurry"] and json.loads(lines[2]) == told
        plain().save("a.png", pnginfo=chunks({"workflow": '{"nodes": []}'}))
        fisedit("show", "a.png").refused("input", "must name its prompt, got workflow; edit it as --picture")

    def test_a_picture_of_another_program(self, fisedit, model):
        plain().save("a.png", pnginfo=chunks({"parameters": FOREIGN}))
        run = fisedit("edit", "--from", "a.png", "--model", model, *SHORT, "--prompt", DOG, "--json")
        assert json.loads(run.out)["notes"] == ['taken for "a knight, (armour:1.2)"']

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (("--source-prompt", CAT), "give one of"),
            (("--picture", "cat.png"), "give one of"),
            (("--caption-model", "blip"), "leave --caption-model out"),
            (("--inversion", "ddpm"), "was generated, where inversion means nothing"),
            (("--output", "cat.png"), "must not be an input"),
            (("--seed", "-1"), "seed must be"),
        ],
    )
    def test_what_does_not_go_with_it(self, fisedit, model, options, why):
        self.made(fisedit, model)
        fisedit("edit", "--from", "cat.png", "--prompt", DOG, "--model", model, *options).refused("input", why)

    @pytest.mark.slow
    def test_without_metadata(self, fisedit, model):
        self.made(fisedit, model, "--no-metadata", "--session", "s")
        self.made(fisedit, model, output="b.png")
        bare, told = Image.open("cat.png"), Image.open("b.png")
        assert not bare.text and set(told.text) == {"parameters", "fisedit"}
        assert np.array_equal(np.asarray(bare), np.asarray(told))
        fisedit("edit", "--session", "s", "--prompt", DOG, "--output", "a.jpg", "--no-metadata")
        assert not Image.open("a.jpg").getexif()
        assert all(not Image.open(path).text for path in Path("s").glob("*.png"))

    @pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.slow)])
    def test_a_batch(self, fisedit, model, told):
        Path("in").mkdir()
        plain({"Title": "mine"}).save("in/a.png", pnginfo=chunks({"Title": "mine"}))
        plain(exif=TestOpened().exif(), kind="JPEG").save("in/b.jpg", exif=TestOpened().exif())
        options = ("--source-prompt", CAT, "--prompt", DOG, "--model", model, *SHORT, "--workers", "0")
        assert fisedit("batch", "in", "out", *options, *([] if told else ["--no-metadata"])).status == 0
        png, jpg = Image.open("out/a.png"), Image.open("out/b.jpg")
        assert png.text["Title"] == "mine" and jpg.getexif()[ExifTags.Base.Make] == "Leica"
        for picture in (png, jpg):
            made = image_metadata.read_metadata(picture)
            assert bool(made.parameters) == bool(made.origin) == told
            if told:
                past = provenance.parse_origin(made)
                assert (past.config.prompt, past.prompt, past.model) == (CAT, DOG, "./model")
                assert as_uis_read(picture) == made.parameters

    @pytest.mark.parametrize("options", [(), ("--no-metadata",)])
    @pytest.mark.slow
    def test_the_demo(self, fisedit, options):
        assert fisedit("demo", "--output", "d", "--num-inference-steps", "2", *options).status == 0
        told = {path.name for path in Path("d").glob("*.png") if Image.open(path).text}
        assert told == (set() if options else {"0-source.png", "1-edit.png", "2-edit.png"})

    def test_a_session_tells_of_every_result(self, fisedit, model):
        self.made(fisedit, model, "--session", "s")
        fisedit("edit", "--session", "s", "--prompt", DOG)
        written = [image_metadata.read_metadata(Image.open(file_of(Path("s"), n))) for n in (0, 1)]
        assert [metadata.parameters.split("\n")[0] for metadata in written] == [CAT, DOG]
