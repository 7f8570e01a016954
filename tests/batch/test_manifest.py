"""What `fisedit batch` is given: refusals before the model loads, tables, bytes of pictures and masks."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from fisedit.batch.input_tables import EditRow, read_captions, read_edits
from fisedit.batch.manifest import plan_batch
from fisedit.batch.values import BatchJob
from fisedit.errors import InputError
from fisedit.storage.canvas import MAX_PIXELS
from fisedit.storage.images import decode, encode
from tests.support.batches import AFTER, BEFORE, SAID, arguments, batch
from tests.support.folders import claims, half, lines, picture, pictures, tree

__all__ = ["arguments", "batch"]  # fixtures


UNET = "unet/diffusion_pytorch_model.safetensors"


def told_as(name: str) -> Callable[[Path], object]:
    """Makes a model say that it is another."""

    def spoil(folder: Path) -> None:
        index = folder / "model_index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": name}))

    return spoil


def no_numbers(folder: Path) -> None:
    tensors = load_file(folder / UNET)
    tensors["conv_in.weight"].view(-1)[0] = torch.nan
    save_file(tensors, folder / UNET)


MODEL_FAULTS = {
    "truncated": (lambda folder: os.truncate(folder / UNET, 1000), "truncated"),
    "LFS pointer": (lambda folder: (folder / UNET).write_text("version https://git-lfs.github.com/spec/v1\n"), "LFS"),
    "NaN": (no_numbers, "conv_in.weight", "NaN"),
    "Kolors": (told_as("KolorsPipeline"), "Kolors"),
    "a pickle": (lambda folder: torch.save(os.mkdir, (folder / UNET).with_suffix(".bin")) or (folder / UNET).unlink(),
                 "run code"),
}  # fmt: skip
"""Fault -> what brings it about in a model's folder, and words of the refusal."""


class TestBeforeTheModelLoads:
    """Refusals that need no model: the one named here does not exist, and is not what is complained of."""

    @pytest.fixture
    def early(self, batch, tmp_path):
        pictures(tmp_path / "in", 1)
        half(tmp_path / "masks/0.png")
        (tmp_path / "file").touch()
        (tmp_path / "empty").mkdir()
        return lambda *given: batch(*given, "--model", "./nowhere")

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (("nothing", "out", *SAID), ("IN must be a folder", "not there")),
            (("file", "out", *SAID), ("IN must be a folder", "a file")),
            (("empty", "out", *SAID), ("must hold pictures", "--recursive")),
            (("in", "in", *SAID), ("OUT must not be",)),
            (("in", "./masks/../in", *SAID), ("OUT must not be",)),
            (("in", "masks", *SAID, "--masks", "masks"), ("OUT must not be",)),
            (("in", "file", *SAID), ("OUT must be a folder",)),
            (("in", "/proc/out", *SAID), ("writable",)),
            (("in", "out"), ("--prompt or --edits", "none")),
            (("in", "out", *SAID, "--edits", "e.jsonl"), ("--prompt or --edits",)),
            (("in", "out", *SAID, "--captions", "c.csv"), ("--source-prompt or --captions",)),
            (("in", "out", "--prompt", " "), ("--prompt must say something",)),
            (("in", "out", "--prompt", AFTER, "--captions", "c.csv"), ("c.csv", "nothing there")),
            (("in", "out", *SAID, "--masks", "nothing"), ("--masks must be a folder",)),
            (("in", "out", *SAID, "--report", "page.txt"), ("report must be a file that ends in .html",)),
            (("in", "out", *SAID, "--num-inference-steps", "0"), ("num_inference_steps",)),
            (("in", "out", *SAID, "--timeout", "0"), ("timeout",)),
            (("in", "out", *SAID, "--timeout", "nan"), ("timeout must be above 0 seconds, got nan",)),
        ],
    )
    def test_what_cannot_start(self, early, tmp_path, given, words):
        before = tree(tmp_path)
        early(*given).refused("input", *words)
        assert tree(tmp_path) == before

    def test_syntax_that_is_not_read(self, fisedit):
        call = fisedit("batch", "in", "out", "--prompt", "a [cat|dog]")
        call.refused("prompt", "--prompt has [cat|dog], which changes with every step")

    def test_the_model_itself(self, early, tmp_path):
        early("in", "out", *SAID).refused("model", "./nowhere")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("fault", [*MODEL_FAULTS])
    def test_a_model_that_cannot_be_loaded(self, batch, tmp_path, model, fault):
        pictures(tmp_path / "in", 1)
        spoil, *words = MODEL_FAULTS[fault]
        spoil(Path(shutil.copytree(model, tmp_path / "model")))
        batch("in", "out", *SAID, "--model", "model").refused("model", *words)
        assert tree(tmp_path / "out") == {} and lines(tmp_path / "out") == []

    def test_a_dry_run_writes_nothing(self, batch, tmp_path):
        pictures(tmp_path / "in")
        os.mkfifo(tmp_path / "in/pipe.png")
        before = sorted(tmp_path.rglob("*"))
        run = batch("in", "out", *SAID, "--dry-run", "--json")
        assert (run.status, run.counts) == (1, {"left": 3, "failed": 1})
        assert sorted(tmp_path.rglob("*")) == before
        shown = batch("in", "out", *SAID, "--dry-run").out
        assert "edit" in shown and "0.png" in shown

    def test_a_dry_run_tells_all_of_every_item(self, batch, tmp_path):
        name = f"{'x' * 200}.png"
        picture(tmp_path / "in" / name)
        half(tmp_path / "masks" / name)
        run = batch("in", "out", *SAID, "--masks", "masks", "--dry-run", "--json")
        assert run.status == 0 and [item["mask"] for item in run.told["items"]] == [f"masks/{name}"]
        shown = batch("in", "out", *SAID, "--masks", "masks", "--dry-run").out
        assert f" {name} " in shown and f" masks/{name} " in shown and "\u2026" not in shown

    def test_outputs_within_the_inputs_are_never_inputs(self, batch, tmp_path):
        pictures(tmp_path / "in", 1)
        for _ in range(2):
            run = batch("in", "in/out", *SAID, "--recursive", "--json")
            assert run.status == 0 and [item["image"] for item in run.told["items"]] == ["0.png"]

    def test_an_output_that_is_an_input(self, batch, tmp_path):
        picture(tmp_path / "all/in/a.png")
        (tmp_path / "e.jsonl").write_text(json.dumps({"image": "a.png", "prompt": AFTER, "output": "in/a.png"}))
        before = tree(tmp_path / "all/in")
        run = batch("all/in", "all", "--edits", "e.jsonl", "--json", "--overwrite")
        assert (
            run.status == 1 and "would replace an input" in run.reasons["a.png"] and tree(tmp_path / "all/in") == before
        )

    def test_an_output_that_is_an_input_behind_a_link(self, batch, tmp_path):
        picture(tmp_path / "in/deep/a.png")
        (tmp_path / "out").mkdir()
        (tmp_path / "out/deep").symlink_to(tmp_path / "in/deep")
        before = tree(tmp_path / "in")
        run = batch("in", "out", *SAID, "--recursive", "--json", "--overwrite")
        assert "would replace an input" in run.reasons["deep/a.png"] and tree(tmp_path / "in") == before

    def test_links_that_lead_nowhere(self, batch, tmp_path):
        pictures(tmp_path / "in", 1)
        (tmp_path / "masks").mkdir()
        (tmp_path / "masks/0.png").symlink_to("0.png")
        (tmp_path / "in/self").symlink_to(tmp_path / "in")
        run = batch("in", "out", *SAID, "--masks", "masks", "--recursive", "--json")
        assert run.reasons == {"0.png": "mask cannot be read: Too many levels of symbolic links"}


class TestTables:
    def test_captions(self, tmp_path):
        path = tmp_path / "c.csv"
        rows = (
            "image,caption,more",
            './a.png,"a cat,\r\nasleep",1',
            "b/c.png,a dog,2",
            'a.png,"a cat,\r\nasleep",3',
            "",
        )
        path.write_bytes("\r\n".join(rows).encode("utf-8-sig"))
        assert read_captions(path) == {"a.png": "a cat,\r\nasleep", "b/c.png": "a dog"}
        lines_ = tmp_path / "c.jsonl"
        lines_.write_text('{"file_name": "a.png", "text": "a cat\u2028there"}\r\n\n{"image": "b.png", "caption": "x"}')
        assert read_captions(lines_) == {"a.png": "a cat\u2028there", "b.png": "x"}

    @pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
    @pytest.mark.parametrize("end", ["\n", "\r\n"])
    @pytest.mark.parametrize("start", ["", "sep={}\n", '"sep={}"\r\n'])
    def test_tables_of_spreadsheets(self, tmp_path, separator, end, start):
        """Separated as their header is, with empty columns and rows behind."""
        rows = (("Image", " Prompt", ""), ("a.png", '"a dog, brown; or\tblack|white"', ""), ("", "", ""))
        text = start.format(separator) + end.join(separator.join(row) for row in rows)
        (tmp_path / "e.csv").write_bytes(text.encode("utf-8-sig"))
        line = 3 if start else 2
        assert read_edits(tmp_path / "e.csv") == [EditRow("a.png", "a dog, brown; or\tblack|white", line=line)]

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("c.csv", b"image,caption\na.png,x\na.png,y\n", ("line 3", "line 2 says something else")),
            ("c.csv", b"image,caption\na.png\n", ("line 2", "2 columns")),
            ("c.csv", b"sep=;\nimage;caption\na.png;x;y\n", ("line 3", "2 columns", "';'", "got 3")),
            ("c.csv", b"\nimage,Image,caption\na.png,b.png,x\n", ("line 2", "'image' twice")),
            ("c.csv", b"image:caption\na.png:x\n", ("line 2", "'image'", "beside image:caption")),
            ("c.csv", b"image,caption\nsub\\a.png,x\n", ("line 2", "/ between folders")),
            ("c.csv", b"image,caption\na.png,x,y\n", ("line 2", "2 columns")),
            ("c.csv", b"picture,caption\na.png,x\n", ("line 2", "'image'")),
            ("c.csv", b'image,caption\na.png,"x\n', ("CSV",)),
            ("c.csv", b"image,caption\na.png,\xff\n", ("line 2", "UTF-8")),
            ("c.jsonl", b'{"image": "a.png", "caption": "x"}\n{"image": \n', ("line 2", "JSON")),
            ("c.jsonl", b"[1]\n", ("line 1", "JSON object")),
            ("c.jsonl", b"[" * 100_000, ("line 1", "JSON object")),
            ("c.jsonl", b'{"image": "a.png"}\n', ("line 1", "'caption'", "nothing")),
            ("c.jsonl", b'{"image": "a.png", "caption": 7}\n', ("line 1", "'caption'", "7")),
            ("c.jsonl", b'{"image": "../a.png", "caption": "x"}\n', ("line 1", "inside its folder")),
            ("c.jsonl", b'{"image": "/a.png", "caption": "x"}\n', ("line 1", "inside its folder")),
            ("c.jsonl", b'{"image": "a.png", "caption": "\\ud800"}', ("line 1", "'caption'", "Unicode", "\\ud800")),
            ("c.jsonl", b'{"image": "a\\udcff.png", "caption": "x"}', ("line 1", "'image'", "Unicode", "\\udcff")),
            ("c.txt", b"", (".csv or .jsonl",)),
        ],
    )
    def test_a_bad_table_is_told_with_its_line(self, tmp_path, name, content, words):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError) as caught:
            read_captions(tmp_path / name)
        assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400

    def test_edits(self, tmp_path):
        path = tmp_path / "e.jsonl"
        row = {"image": "a.png", "prompt": "a dog"}
        path.write_text("\n".join(map(json.dumps, (row, row, row | {"mask": "m.png"}, row | {"mask": None}))))
        assert [(edit.mask, edit.line) for edit in read_edits(path)] == [(None, 1), ("m.png", 3)]
        path.write_text(json.dumps(row | {"promt": "x"}))
        with pytest.raises(InputError, match=r"line 1 .*'promt'"):
            read_edits(path)
        path.write_text("\n")
        with pytest.raises(InputError, match="at least one line"):
            read_edits(path)

    def test_masks_of_rows(self, tmp_path):
        """A row's mask lies in the folder of masks, or beside the pictures where there is none."""
        pictures(tmp_path / "in", 1)
        for folder in ("in", "masks"):
            half(tmp_path / folder / "half.png")
        (tmp_path / "e.jsonl").write_text(json.dumps({"image": "0.png", "prompt": "x", "mask": "half.png"}))
        for masks, folder in ((None, "in"), (tmp_path / "masks", "masks")):
            job = BatchJob(tmp_path / "in", tmp_path / "out", edits=tmp_path / "e.jsonl", masks=masks)
            assert [item.mask for item in plan_batch(job).items] == [tmp_path / folder / "half.png"]

    def test_suffixes_of_masks_and_texts_in_capitals(self, tmp_path):
        """As those of pictures; what has no counterpart is told."""
        for name in ("a.PNG", "b.jpg", "c.png", "d.png", "e.png"):
            picture(tmp_path / "in" / name)
        for name in ("a.png", "b.TIFF", "c.Png", "c.png", "f.png", "deep/g.png"):
            half(tmp_path / "masks" / name)
        (tmp_path / "masks/notes.txt").touch()
        (tmp_path / "in/a.TXT").write_text(BEFORE)
        plan = plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", AFTER, masks=tmp_path / "masks"))
        assert [item.mask and item.mask.name for item in plan.items] == ["a.png", "b.TIFF", "c.png", None, None]
        assert [item.source_prompt for item in plan.items] == [BEFORE, None, None, None, None]
        assert plan.notes == (
            "pictures without a mask: 2, such as d.png; the changed words decide there",
            "masks that fit no picture: 2, such as c.Png",
        )

    def test_captions_missing_and_too_many(self, batch, tmp_path):
        pictures(tmp_path / "in", 2)
        (tmp_path / "c.csv").write_text(f"image,caption\n0.png,{BEFORE}\n9.png,x\n")
        run = batch("in", "out", "--prompt", AFTER, "--captions", "c.csv", "--json")
        assert run.reasons == {"1.png": "c.csv has no caption for it"} and run.counts == {"done": 1, "failed": 1}
        assert run.told["notes"] == ["captions for pictures that are not edited: 1, such as 9.png"]

    def test_outputs_of_rows(self, tmp_path):
        pictures(tmp_path / "in", 2)
        rows = [
            {"image": "0.png", "prompt": "x", "output": "new/night.webp"},
            {"image": "0.png", "prompt": "y"},
            {"image": "1.png", "prompt": "x", "output": "0-2.png"},
            {"image": "1.png", "prompt": "x", "output": "a.gif"},
            {"image": "7.png", "prompt": "x"},
        ]
        (tmp_path / "e.jsonl").write_text("\n".join(map(json.dumps, rows)))
        plan = plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", edits=tmp_path / "e.jsonl"))
        assert [item.output for item in plan.items] == ["new/night.webp", "0-2.png", "0-2.png", "a.gif", "7.png"]
        problems = [item.problem for item in plan.items]
        assert problems[:2] == ["", ""] and "0-2.png is that of 0.png as well" in problems[2]
        assert "must end in" in problems[3] and "No such file" in problems[4]


class TestPictures:
    def test_a_bomb_is_refused_by_its_header(self, tmp_path):
        Image.new("1", (12_000, 12_000)).save(tmp_path / "huge.png")
        data = (tmp_path / "huge.png").read_bytes()
        assert claims(data, 12_000) == data
        for side in (12_000, 100_000, 2**31 - 1):
            start = time.process_time()
            with pytest.raises(InputError, match="at most 64 million pixels"):
                decode(claims(data, side))
            assert time.process_time() - start < 0.1 and side**2 > MAX_PIXELS

    def test_metadata_that_unpacks_to_too_much(self, tmp_path):
        said = PngInfo()
        said.add_text("Comment", "x" * 100_000_000, zip=True)
        Image.new("L", (64, 64)).save(tmp_path / "a.png", pnginfo=said)
        assert (tmp_path / "a.png").stat().st_size < 200_000
        with pytest.raises(InputError, match="damaged"):
            decode((tmp_path / "a.png").read_bytes())

    def test_the_first_of_many_frames(self, tmp_path):
        frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
        frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
        found = decode((tmp_path / "a.webp").read_bytes())
        assert found.image.getpixel((0, 0)) == (255, 0, 0) and found.notes == (
            "animated: the first of 2 frames was edited",
        )

    @pytest.mark.parametrize(
        ("mode", "colour", "name", "expected", "said"),
        [
            ("RGBA", (9, 9, 9, 0), "a.jpg", ("RGB", (255, 255, 255)), ".jpg holds no RGBA"),
            ("LA", (9, 0), "a.png", ("LA", (9, 0)), ""),
            ("I;16", 32896, "a.webp", ("RGB", (128, 128, 128)), "holds no I;16"),
            ("CMYK", (0, 0, 0, 0), "a.JPG", ("CMYK", (0, 0, 0, 0)), ""),
        ],
    )
    def test_what_a_format_cannot_hold_is_told(self, mode, colour, name, expected, said):
        data, notes = encode(Image.new(mode, (8, 8), colour), Path(name).suffix)
        back = decode(data).image
        assert back.mode == expected[0] and expected[1] in (None, back.getpixel((0, 0)))
        assert all(said in note for note in notes) and bool(notes) == bool(said)


class TestTextsBesidePictures:
    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", "must say what the picture shows, got nothing"),
            (b" \n", "must say what the picture shows, got nothing"),
            (b"a" * 2_000_000, "must say what the picture shows, got too much"),
            (None, "must be a plain file"),
        ],
    )
    def test_what_says_nothing(self, tmp_path, content, problem):
        pictures(tmp_path / "in", 1)
        text = tmp_path / "in/0.txt"
        os.mkfifo(text) if content is None else text.write_bytes(content)
        (item,) = plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", AFTER)).items
        assert item.problem == f"0.txt beside it {problem}" and item.source_prompt is None

    def test_what_cannot_be_read(self, tmp_path):
        pictures(tmp_path / "in", 1)
        (tmp_path / "in/0.txt").symlink_to("0.txt")
        (item,) = plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", AFTER)).items
        assert item.problem.startswith("0.txt beside it cannot be read: ")

    @pytest.mark.parametrize("prompt", ["{source}", "{source}, in the snow"])
    def test_a_prompt_with_a_source_that_is_missing(self, tmp_path, prompt):
        pictures(tmp_path / "in", 1)
        (item,) = plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", prompt)).items
        assert item.problem.startswith("a prompt with {source} needs what the picture shows, got none")


class TestWhatIsAPicture:
    def planned(self, tmp_path, **options):
        return plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", "{source} at night", **options))

    def test_is_decided_by_content_and_what_is_left_out_is_told(self, tmp_path):
        folder = pictures(tmp_path / "in", 1)
        for name, kind in {"a.jfif": "JPEG", "b": "PNG", "c.dat": "WEBP", "d.v1": "BMP", "e.old": "TIFF"}.items():
            Image.new("RGB", (8, 8)).save(folder / name, kind)
        for name, content in {
            "photo.bin": b"\0\0\0\x18ftypheic",
            "raw.NEF": b"II*\0",
            ".hidden.png": b"",
            "notes.json": b"{}",
            "BMW.md": b"BMW is no bitmap",
            "0.caption": b"a cat",
            "a.txt": b"a dog",
            "a.caption": b"a wolf",
            "lost.txt": b"nobody's",
        }.items():
            (folder / name).write_bytes(content)
        (folder / "link.jpg").symlink_to("0.png")
        (folder / "nowhere").symlink_to("gone")
        (folder / "deep").mkdir()
        (folder / ".cache").mkdir()
        (folder / "elsewhere").symlink_to(tmp_path)
        os.mkfifo(folder / "pipe")
        plan = self.planned(tmp_path)
        outputs = {item.name: item.output for item in plan.items}
        expected = {"0.png": "0.png", "a.jfif": "a.jfif", "b": "b.png", "c.dat": "c.png", "d.v1": "d.png"}
        assert outputs == expected | {"e.old": "e.png", "link.jpg": "link.jpg"}
        assert {item.name: item.prompt for item in plan.items if item.source_prompt} == {
            "0.png": "a cat at night",
            "a.jfif": "a dog at night",
        }
        assert plan.notes == (
            "files left out, as they are no pictures: 4, such as BMW.md",
            "hidden folders left out: 1, such as .cache",
            "hidden pictures left out: 1, such as .hidden.png",
            "left out, as they are of other formats: 2, such as photo.bin; save them as PNG",
            "links to folders left out, as they are not followed: 1, such as elsewhere",
            "links to nowhere left out: 1, such as nowhere",
            "subfolders left out, as --recursive is not given: 1, such as deep",
            "texts beside pictures not read, as others are: 1, such as a.caption",
        )

    def test_other_words_than_those_beside_are_told(self, tmp_path):
        (pictures(tmp_path / "in", 1) / "0.txt").write_text("a cat")
        notes = self.planned(tmp_path, source_prompt="a dog").notes
        assert notes == ("texts beside pictures not read, as others are: 1, such as 0.txt",)

    def test_masks_too(self, tmp_path):
        pictures(tmp_path / "in", 2)
        half(tmp_path / "masks/0.jpg").rename(tmp_path / "masks/0.jfif")
        half(tmp_path / "masks/1.png").rename(tmp_path / "masks/1.mask")
        plan = self.planned(tmp_path, masks=tmp_path / "masks")
        assert [item.mask and item.mask.name for item in plan.items] == ["0.jfif", "1.mask"] and plan.notes == ()

    def test_a_folder_of_none_says_what_it_has(self, tmp_path):
        (tmp_path / "in").mkdir()
        (tmp_path / "in/a.heic").write_bytes(b"")
        with pytest.raises(InputError, match=r"got none in .*other formats: 1, such as a.heic; save them as PNG"):
            self.planned(tmp_path)


def test_folders_that_cannot_be_listed(tmp_path, monkeypatch):
    """Rights say nothing to root: the refusal is the system's, put in its place."""
    pictures(tmp_path / "in/a", 1)
    pictures(tmp_path / "in/b", 1)
    scan = os.scandir

    def closed(*names):
        def refuse(path):
            if Path(path).name in names:
                raise PermissionError(13, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", refuse)

    job = BatchJob(tmp_path / "in", tmp_path / "out", AFTER, BEFORE, recursive=True)
    closed("b")
    plan = plan_batch(job)
    assert [item.name for item in plan.items] == ["a/0.png"]
    assert plan.notes == (f"folder left out, as it cannot be read (Permission denied): {tmp_path / 'in/b'}",)
    closed("in")
    with pytest.raises(InputError, match=r"IN must be readable, got .*in \(Permission denied\)"):
        plan_batch(job)
