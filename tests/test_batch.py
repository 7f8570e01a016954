"""`fisedit batch` as its users meet it: folders before and after, exit statuses, one line for every trouble."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from fisedit import Editor, cli, files
from fisedit.batch import pool
from fisedit.batch import run as running
from fisedit.batch.hand import Hand
from fisedit.batch.items import make_plan
from fisedit.batch.journal import Journal
from fisedit.batch.pictures import MOST_PIXELS, decode, encode, levels
from fisedit.batch.tables import read_captions, read_edits
from fisedit.batch.values import Executor, Failed, Job, Made, OnError, Settings
from fisedit.errors import InputError, NumericsError
from tests.folders import JOURNAL, claims, half, lines, picture, pictures, tree, whole
from tests.pipelines import build_pipeline

BEFORE, AFTER = "a cat and a cake on a beach", "a dog and a cake on a beach"
SAID = ("--prompt", AFTER, "--source-prompt", BEFORE)
QUICK = ("--num-inference-steps", "2", "--workers", "0")


@dataclass(frozen=True)
class Run:
    """What a run left on its streams."""

    status: int
    out: str
    err: str

    def refused(self, *words: str, status: int = 2) -> None:
        assert (self.status, self.out) == (status, ""), self
        assert self.err.startswith("error[") and self.err.count("\n") == 1, self.err
        assert all(word in self.err for word in words), self.err

    @property
    def told(self) -> dict:
        return json.loads(self.out)

    @property
    def counts(self) -> dict[str, int]:
        return {status: count for status, count in self.told["counts"].items() if count}

    @property
    def reasons(self) -> dict[str, str]:
        return {item["image"]: item["reason"] for item in self.told["items"] if item["reason"]}


@pytest.fixture
def arguments(model) -> Callable[..., list[str]]:
    return lambda *given: ["fisedit", "batch", *QUICK, "--model", str(model), *map(str, given)]


@pytest.fixture
def batch(tmp_path, monkeypatch, capfd, arguments):
    """Runs `fisedit batch` in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*given: object) -> Run:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", arguments(*given))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Run(int(ended.value.code), *capfd.readouterr())

    return run


@pytest.fixture
def forked(tmp_path, monkeypatch, arguments):
    """Starts `fisedit batch` in a copy of this process, where `spoil` may set a trap first; returns its id."""
    monkeypatch.chdir(tmp_path)

    def start(*given: object, spoil: Callable[[], object] = lambda: None) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads; none of them computes
            child = os.fork()
        if child:
            return child
        try:
            spoil()
            sys.argv = arguments(*given)
            cli.main()
        except SystemExit as ended:
            os._exit(int(ended.code))
        finally:
            os._exit(99)

    return start


def ended(child: int) -> int:
    """The exit status of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TestAFolder:
    def test_every_picture_is_edited_and_no_input_touched(self, batch, tmp_path):
        pictures(tmp_path / "in")
        picture(tmp_path / "in/deep/odd.jpg", 5, (70, 97))
        before = tree(tmp_path / "in")
        run = batch("in", "out", *SAID, "--recursive", "--json")
        assert (run.status, run.err, run.counts) == (0, "", {"done": 4})
        assert tree(tmp_path / "in") == before
        assert set(tree(tmp_path / "out")) == set(before)
        assert Image.open(tmp_path / "out/deep/odd.jpg").size == (70, 97)
        assert all(tree(tmp_path / "out")[name] != before[name] for name in before)

    def test_a_summary_for_people(self, batch, tmp_path):
        pictures(tmp_path / "in", 1)
        (tmp_path / "in/[red]bad.png").write_text("no picture")
        run = batch("in", "out", *SAID)
        assert run.status == 1 and run.err == ""
        assert "[red]bad.png" in run.out and "must be a PNG" in run.out and "done before" in run.out

    def test_subfolders_are_left_alone_unless_asked_for(self, batch, tmp_path):
        pictures(tmp_path / "in", 1)
        picture(tmp_path / "in/deep/a.png")
        assert batch("in", "out", *SAID, "--json").counts == {"done": 1}

    def test_a_second_run_does_nothing(self, batch, tmp_path, monkeypatch):
        pictures(tmp_path / "in")
        batch("in", "out", *SAID)
        made, told = tree(tmp_path / "out"), lines(tmp_path / "out")
        monkeypatch.setattr(Editor, "from_pretrained", None)
        again = batch("in", "out", *SAID, "--json")
        assert (again.status, again.counts) == (0, {"done before": 3})
        assert tree(tmp_path / "out") == made and lines(tmp_path / "out") == told

    def test_most_work_first_and_a_source_is_opened_once(self, batch, tmp_path, monkeypatch):
        pictures(tmp_path / "in")
        rows = [("0.png", AFTER), ("2.png", AFTER), ("2.png", "a bird and a cake on a beach"), ("1.png", AFTER)]
        text = "\n".join(json.dumps({"image": image, "prompt": prompt}) for image, prompt in rows)
        (tmp_path / "edits.jsonl").write_text(text)
        opened = []
        really = Editor.open

        def count(editor, image, *given, **options):
            opened.append(image.tobytes())
            return really(editor, image, *given, **options)

        monkeypatch.setattr(Editor, "open", count)
        run = batch("in", "out", "--edits", "edits.jsonl", "--source-prompt", BEFORE, "--json")
        assert run.counts == {"done": 4} and len(opened) == len(set(opened)) == 3
        assert [line["output"] for line in lines(tmp_path / "out")][:2] == ["2-1.png", "2-2.png"]
        made = tree(tmp_path / "out")
        assert set(made) == {"0.png", "1.png", "2-1.png", "2-2.png"}
        alone = batch("in", "alone", *SAID, "--json")
        assert alone.status == 0 and tree(tmp_path / "alone")["2.png"] == made["2-1.png"]

    def test_a_mask_says_where(self, batch, tmp_path):
        pictures(tmp_path / "in", 4)
        half(tmp_path / "masks/0.png")
        half(tmp_path / "masks/1.jpg", (256, 256))
        Image.new("L", (64, 64)).save(tmp_path / "masks/2.png")
        (tmp_path / "masks/3.png").write_bytes(b"")
        run = batch("in", "out", *SAID, "--masks", "masks", "--json")
        assert run.reasons == {"3.png": "mask must be an image, got an empty file"} and run.status == 1
        for name in ("0.png", "1.png"):
            before, after = (np.asarray(Image.open(tmp_path / where / name)) for where in ("in", "out"))
            assert (before[:, 32:] == after[:, 32:]).all() and (before[:, :32] != after[:, :32]).any()
        assert tree(tmp_path / "in")["2.png"] == tree(tmp_path / "out")["2.png"], "nothing to do: the same bytes"

    def test_source_prompts_from_beside_or_from_nobody(self, batch, tmp_path):
        pictures(tmp_path / "in", 3)
        (tmp_path / "in/0.txt").write_bytes(b"\xef\xbb\xbfa cat on a beach\r\n")
        (tmp_path / "in/1.txt").write_bytes(b"\xff\xfe bad")
        run = batch("in", "out", "--prompt", "{source}, a dog", "--json")
        said = {item["image"]: (item["source_prompt"], item["prompt"]) for item in run.told["items"]}
        assert said["0.png"] == ("a cat on a beach", "a cat on a beach, a dog") and said["2.png"] == (None, ", a dog")
        assert run.reasons == {"1.png": "1.txt beside it must be UTF-8 text"}


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory) -> Path:
    """A folder with "in" and what an uninterrupted run makes of it, "clean"."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = Job(pictures(folder / "in"), folder / "clean", AFTER, BEFORE)
    settings = Settings(str(model), num_inference_steps=2)
    done = running.run(job, settings, workers=0, on_error=OnError.STOP, on_step=lambda *_: None)
    assert done.status == 0
    return folder


TRAPS = {
    "before the line": (Journal, "append"),
    "before the file": (files, "write_bytes"),
    "before the rename": (Path, "replace"),
    "after the rename": (files, "_sync"),
    "before the edit": (Editor, "edit"),
}
"""Instants at which a run is killed: the function whose call it does not live to see."""


class TestResuming:
    @pytest.fixture
    def clean(self, uninterrupted, tmp_path) -> dict[str, str]:
        shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
        return tree(tmp_path / "clean")

    @pytest.mark.parametrize("trap", TRAPS)
    def test_killed_anywhere(self, batch, forked, tmp_path, clean, trap):
        place, name = TRAPS[trap]

        def spoil() -> None:
            really, calls = getattr(place, name), []

            def trapped(*given, **options):
                calls.append(given)
                if len(calls) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                return really(*given, **options)

            setattr(place, name, trapped)

        assert ended(forked("in", "out", *SAID, spoil=spoil)) == -signal.SIGKILL
        survived = whole(tmp_path / "out")
        assert survived.items() <= clean.items()
        before = len(lines(tmp_path / "out"))
        again = batch("in", "out", *SAID, "--json")
        assert (again.status, tree(tmp_path / "out")) == (0, clean)
        assert len(lines(tmp_path / "out")) - before == again.counts.get("done", 0), "nothing is done twice"
        assert again.counts.get("done before", 0) == len(survived) >= 1

    def test_a_torn_last_line_and_a_damaged_one(self, batch, tmp_path, clean):
        journal = tmp_path / "clean" / JOURNAL
        first, second, third = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(first + b"{damaged\n" + second + third[:50])
        (tmp_path / "clean" / json.loads(third)["output"]).unlink()  # a line is on the disk before its file
        again = batch("in", "clean", *SAID, "--json")
        assert (again.status, again.counts) == (0, {"done": 1, "done before": 2})
        assert tree(tmp_path / "clean") == clean and "cannot be read" in again.told["notes"][0]

    @pytest.mark.parametrize(
        "change",
        [
            ("--prompt", "a bird and a cake on a beach", "--source-prompt", BEFORE),
            ("--prompt", AFTER, "--source-prompt", "a cat on a beach"),
            (*SAID, "--guidance-scale", "3"),
            (*SAID, "--negative-prompt", "snow"),
        ],
    )
    def test_what_changed_is_done_again(self, batch, tmp_path, clean, change):
        again = batch("in", "clean", *change, "--json")
        assert (again.status, again.counts) == (0, {"done": 3})
        assert not set(tree(tmp_path / "clean").values()) & set(clean.values())

    def test_a_changed_input_model_or_lost_output_is_done_again(self, batch, tmp_path, clean, model):
        picture(tmp_path / "in/1.png", 77)
        assert batch("in", "clean", *SAID, "--json").counts == {"done": 1, "done before": 2}
        (tmp_path / "clean/2.png").unlink()
        assert batch("in", "clean", *SAID, "--json").counts == {"done": 1, "done before": 2}
        other = tmp_path / "other"
        build_pipeline("demo", seed=1).save_pretrained(other)
        assert batch("in", "clean", *SAID, "--json", "--model", other).counts == {"done": 3}

    def test_a_file_that_no_batch_wrote_stays(self, batch, tmp_path, clean):
        (tmp_path / "clean/1.png").write_text("mine")
        again = batch("in", "clean", *SAID, "--json")
        assert again.status == 1 and "--overwrite" in again.reasons["1.png"]
        assert (tmp_path / "clean/1.png").read_text() == "mine"
        assert batch("in", "clean", *SAID, "--overwrite").status == 0 and tree(tmp_path / "clean") == clean

    def test_a_second_run_on_the_folder_is_told(self, batch, tmp_path):
        pictures(tmp_path / "in", 1)
        with Journal.hold(tmp_path / "out"):
            batch("in", "out", *SAID).refused("another run is working on")
        assert batch("in", "out", *SAID).status == 0

    def test_one_interrupt_finishes_the_item_in_hand(self, batch, forked, tmp_path, clean):
        def spoil() -> None:
            really, calls = Editor.edit, []

            def interrupted(*given, **options):
                calls.append(given)
                if len(calls) == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                return really(*given, **options)

            Editor.edit = interrupted

        assert ended(forked("in", "out", *SAID, spoil=spoil)) == 130
        made = tree(tmp_path / "out")
        assert len(made) == 2 and made.items() < clean.items()
        assert batch("in", "out", *SAID).status == 0 and tree(tmp_path / "out") == clean

    def test_two_interrupts_stop_at_once(self, forked, tmp_path, clean):
        def spoil() -> None:
            really = Editor.open

            def tell(*given, **options):
                (tmp_path / "started").touch()
                return really(*given, **options)

            Editor.open = tell

        child = forked("in", "out", *SAID, "--num-inference-steps", "900", spoil=spoil)
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        os.kill(child, signal.SIGINT)
        time.sleep(0.2)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the first only asks"
        start = time.monotonic()
        os.kill(child, signal.SIGINT)
        assert ended(child) == 130 and time.monotonic() - start < 5
        assert tree(tmp_path / "out") == {}


class TestBadFiles:
    def test_each_is_named_and_the_good_are_done(self, batch, tmp_path):
        folder = pictures(tmp_path / "in", 1)
        whole = picture(tmp_path / "whole.png").read_bytes()
        (folder / "zero.png").touch()
        (folder / "text.png").write_text("hello")
        (folder / "psd.png").write_bytes(b"8BPS\0\1" + bytes(100))
        (folder / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n")
        (folder / "svg.png").write_bytes(b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>')
        (folder / "real.psd").write_bytes(b"8BPS\0\1" + bytes(100))
        (folder / "loop.png").symlink_to("loop.png")
        (folder / "nowhere.png").symlink_to("not-there.png")
        (folder / "device.png").symlink_to("/dev/zero")
        os.mkfifo(folder / "pipe.png")
        for n in range(1, 10):
            (folder / f"cut{n}.png").write_bytes(whole[: len(whole) * n // 10])
        (folder / "-rf.png").write_bytes(whole)
        (folder / "a b\nc.png").write_bytes(whole)
        (folder / ("ü" * 125 + "x.png")).write_bytes(whole)  # 255 bytes, the most that a name may have
        (folder / "\N{CAT FACE}.png").write_bytes(whole)
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.png")).write_bytes(whole)
        before = {name: (folder / name).stat().st_mtime_ns for name in ("0.png", "zero.png", "cut5.png")}
        run = batch("in", "out", *SAID, "--json", "--report", "r.html")
        assert run.status == 1 and run.counts == {"done": 6, "failed": 18}
        assert run.told["notes"] == ["left out, as they are of other formats: 1, such as real.psd; save them as PNG"]
        assert all(reason and "\n" not in reason for reason in run.reasons.values())
        assert "pipe" in run.reasons["pipe.png"] and "device" in run.reasons["device.png"]
        assert "empty" in run.reasons["zero.png"] and "damaged" in run.reasons["cut7.png"]
        assert len(tree(tmp_path / "out")) == 6
        assert before == {name: (folder / name).stat().st_mtime_ns for name in before}
        assert well_formed(tmp_path / "r.html") == 24

    def test_stop_stops(self, batch, tmp_path):
        pictures(tmp_path / "in")
        (tmp_path / "in/big.png").write_bytes(bytes(100_000))
        run = batch("in", "out", *SAID, "--on-error", "stop", "--json")
        assert run.status == 1 and run.counts == {"failed": 1, "left": 3}

    def test_a_bug_in_one_item_is_that_item_s(self, batch, tmp_path, monkeypatch):
        pictures(tmp_path / "in")
        really = Editor.open

        def odd(editor, image, *given, **options):
            if image.getpixel((0, 0)) == Image.open(tmp_path / "in/1.png").getpixel((0, 0)):
                raise KeyError("a bug")
            return really(editor, image, *given, **options)

        monkeypatch.setattr(Editor, "open", odd)
        run = batch("in", "out", *SAID, "--json")
        assert run.counts == {"done": 2, "failed": 1} and run.reasons == {"1.png": "KeyError: 'a bug'"}

    def test_a_picture_that_vanishes(self, batch, tmp_path, monkeypatch):
        pictures(tmp_path / "in")
        really = Editor.open

        def last(*given, **options):
            for path in (tmp_path / "in").iterdir():
                path.unlink()
            return really(*given, **options)

        monkeypatch.setattr(Editor, "open", last)
        run = batch("in", "out", *SAID, "--json")
        assert run.counts == {"done": 1, "failed": 2}
        assert set(run.reasons.values()) == {"cannot be read: No such file or directory"}

    def test_an_item_that_takes_too_long(self, batch, tmp_path):
        pictures(tmp_path / "in", 1)
        run = batch("in", "out", *SAID, "--json", "--timeout", "1e-9")
        assert run.reasons == {"0.png": "took longer than 1e-09 seconds; see --timeout"}

    def test_two_pictures_of_one_name(self, batch, tmp_path):
        picture(tmp_path / "in/a.png", 1)
        picture(tmp_path / "in/a.jpg", 2)
        picture(tmp_path / "in/b.jpg", 3)
        assert batch("in", "out", *SAID, "--format", "png").status == 0
        assert set(tree(tmp_path / "out")) == {"a.png", "a.jpg.png", "b.png"}
        assert batch("in", "kept", *SAID).status == 0
        assert set(tree(tmp_path / "kept")) == {"a.png", "a.jpg", "b.jpg"}

    @pytest.mark.parametrize("error", ["write_bytes", "append"])
    def test_a_full_disk_stops_the_run_and_loses_nothing(self, batch, tmp_path, monkeypatch, error):
        pictures(tmp_path / "in")
        full = OSError(28, "No space left on device")
        with monkeypatch.context() as patch:
            place = files if error == "write_bytes" else Journal
            really, calls = getattr(place, error), []

            def fail(*given):
                calls.append(given)
                if len(calls) > 1:
                    raise full
                really(*given)

            patch.setattr(place, error, fail)
            run = batch("in", "out", *SAID, "--json")
        assert (run.status, run.err) == (1, "") and len(tree(tmp_path / "out")) == 1
        assert run.counts == {"done": 1, "failed": 1, "left": 1}
        assert all("cannot be written: No space left on device" in why for why in run.reasons.values())
        assert batch("in", "out", *SAID, "--json").counts == {"done": 2, "done before": 1}


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
    "SDXL": (told_as("StableDiffusionXLPipeline"), "Stable Diffusion XL"),
    "inpainting": (told_as("StableDiffusionInpaintPipeline"), "inpainting"),
    "a pickle": (lambda folder: torch.save(os.mkdir, (folder / UNET).with_suffix(".bin")) or (folder / UNET).unlink(),
                 "run code"),
}  # fmt: skip
"""Fault -> what brings it about in a model's folder, and words of the refusal."""


def test_a_page_that_cannot_be_written_takes_nothing_with_it(batch, tmp_path, monkeypatch):
    pictures(tmp_path / "in", 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_text", full)
    run = batch("in", "out", *SAID, "--json", "--report", "r.html")
    assert (run.status, run.counts) == (1, {"done": 1}) and len(tree(tmp_path / "out")) == 1
    assert "No space left" in run.err and run.err.count("\n") == 1


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
            (("in", "out", *SAID, "--report", "page.txt"), ("report must be an .html file",)),
            (("in", "out", *SAID, "--num-inference-steps", "0"), ("num_inference_steps",)),
            (("in", "out", *SAID, "--timeout", "0"), ("timeout",)),
        ],
    )
    def test_what_cannot_start(self, early, tmp_path, given, words):
        before = tree(tmp_path)
        early(*given).refused(*words)
        assert tree(tmp_path) == before

    def test_the_model_itself(self, early, tmp_path):
        early("in", "out", *SAID).refused("./nowhere")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("fault", [*MODEL_FAULTS])
    def test_a_model_that_cannot_be_loaded(self, batch, tmp_path, model, fault):
        pictures(tmp_path / "in", 1)
        spoil, *words = MODEL_FAULTS[fault]
        spoil(Path(shutil.copytree(model, tmp_path / "model")))
        batch("in", "out", *SAID, "--model", "model").refused(*words)
        assert tree(tmp_path / "out") == {} and lines(tmp_path / "out") == []

    def test_a_dry_run_writes_nothing(self, batch, tmp_path):
        pictures(tmp_path / "in")
        os.mkfifo(tmp_path / "in/pipe.png")
        before = sorted(tmp_path.rglob("*"))
        run = batch("in", "out", *SAID, "--dry-run", "--json")
        assert (run.status, run.counts) == (0, {"left": 3, "failed": 1})
        assert sorted(tmp_path.rglob("*")) == before
        shown = batch("in", "out", *SAID, "--dry-run").out
        assert "edit" in shown and "0.png" in shown

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

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("c.csv", b"image,caption\na.png,x\na.png,y\n", ("line 3", "line 2 says something else")),
            ("c.csv", b"image,caption\na.png\n", ("line 2", "2 columns")),
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
        plan = make_plan(Job(tmp_path / "in", tmp_path / "out", edits=tmp_path / "e.jsonl"))
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
            assert time.process_time() - start < 0.1 and side**2 > MOST_PIXELS

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
        data, notes = encode(Image.new(mode, (8, 8), colour), name)
        back = decode(data).image
        assert back.mode == expected[0] and expected[1] in (None, back.getpixel((0, 0)))
        assert all(said in note for note in notes) and bool(notes) == bool(said)

    def test_masks_of_every_kind(self, tmp_path):
        wide = np.repeat(np.array([[0, 128 * 257], [65535, 0]], np.uint16), 8, 0).repeat(8, 1)
        Image.fromarray(wide).save(tmp_path / "m.png")
        got = np.asarray(levels((tmp_path / "m.png").read_bytes(), (16, 16)))[::8, ::8]
        assert got.tolist() == [[0, 128], [255, 0]]
        Image.new("RGBA", (16, 16), (255, 255, 255, 0)).save(tmp_path / "m.png")
        assert not np.asarray(levels((tmp_path / "m.png").read_bytes(), (8, 8))).any()


class TestRelief:
    """The ladder: what ran out of memory is tried again, and the next item is unharmed."""

    @pytest.fixture
    def hand(self, model) -> Hand:
        return Hand(Settings(str(model), num_inference_steps=2, device="cpu", dtype="fp32"))

    @pytest.fixture
    def item(self, tmp_path):
        pictures(tmp_path / "in", 1)
        return make_plan(Job(tmp_path / "in", tmp_path / "out", AFTER, BEFORE)).items[0]

    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ],
    )
    def test_memory_that_ran_out_once(self, hand, item, monkeypatch, error):
        expected = hand.attempt(item)
        hand._source = None
        really, calls = Editor.open, []

        def scarce(*given, **options):
            calls.append(given)
            if len(calls) == 1:
                raise error
            return really(*given, **options)

        monkeypatch.setattr(Editor, "open", scarce)
        made = hand.attempt(item)
        assert made.data == expected.data and made.notes == (*expected.notes, "memory ran out once and was freed")

    def test_each_rung_helps_a_little_more(self, hand, item, monkeypatch):
        """Freed, evicted, sliced; then the model and the next source are as if nothing had been."""
        expected = hand.attempt(item)
        really, tried = Editor.edit, []

        def scarce(editor, *given, **options):
            tried.append((editor, {type(one).__name__ for one in editor.pipe.unet.attn_processors.values()}))
            if len(tried) < 4:
                raise MemoryError
            return really(editor, *given, **options)

        monkeypatch.setattr(Editor, "edit", scarce)
        made = hand.attempt(item)
        assert made.notes == (*expected.notes, "made with sliced attention, as memory ran out")
        ours, theirs = (np.asarray(decode(one.data).image).astype(int) for one in (made, expected))
        assert np.abs(ours - theirs).max() <= 2
        editors, processors = zip(*tried, strict=True)
        assert editors[0] is editors[1] and len(set(map(id, editors[1:]))) == 3, "the open source is kept at first"
        assert processors[:3] == ({"AttnProcessor2_0"},) * 3 and processors[3] == {"SlicedAttnProcessor"}
        assert hand.attempt(item) == replace(expected, seconds=ANY) and tried[4][1] == {"AttnProcessor2_0"}

    def test_what_lacks_memory_in_a_crowd_is_tried_alone(self, model, tmp_path, monkeypatch):
        pictures(tmp_path / "in")
        crowds = []

        @contextmanager
        def crowd(workers: int, settings: Settings):
            crowds.append(workers)
            with pool.open_pool(0, settings) as one:
                really = one._hand.attempt
                lacking = Failed("memory ran out", broken=True, memory=True)
                one._hand.attempt = lambda item: lacking if workers > 1 and item.name != "1.png" else really(item)
                yield one

        monkeypatch.setitem(running._POOLS, Executor.LOCAL, crowd)
        job, settings = (
            Job(tmp_path / "in", tmp_path / "out", AFTER, BEFORE),
            Settings(str(model), num_inference_steps=2),
        )
        steps = []
        done = running.run(job, settings, workers=2, on_error=OnError.STOP, on_step=lambda *told: steps.append(told))
        assert done.status == 0 and crowds == [2, 1] and len(lines(tmp_path / "out")) == 3
        assert steps == [(1, 3, None), (2, 3, None), (3, 3, None)]

    def test_memory_that_stays_out(self, hand, item, monkeypatch):
        expected = hand.attempt(item)
        with monkeypatch.context() as patch:
            patch.setattr(Editor, "edit", lambda *_, **__: bytes(1 << 60))
            failed = hand.attempt(item)
        assert isinstance(failed, Failed) and failed.reason.startswith("memory ran out")
        assert failed.broken and failed.memory
        assert hand.attempt(item).data == expected.data

    def test_a_device_that_stays_full(self, hand, item, monkeypatch):
        """The picture is made on the CPU, and the next one where it was meant to be."""
        expected, home, tried = hand.attempt(item), hand._home, []
        really = Editor.open
        where = property(lambda pipe: torch.device("cuda" if pipe is home else "cpu"))
        monkeypatch.setattr(type(home), "device", where)

        def full(editor, *given, **options):
            tried.append(editor.pipe is home)
            if editor.pipe is home:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return really(editor, *given, **options)

        monkeypatch.setattr(Editor, "open", full)
        hand._source = None
        made = hand.attempt(item)
        assert made.data == expected.data and tried == [True, True, True, True, False]
        assert made.notes[-1] == "made on the CPU, as the device's memory ran out"
        assert hand._pipe is home and hand._source is None

    def test_nan_is_tried_in_fp32(self, model, item, monkeypatch):
        hand = Hand(Settings(str(model), num_inference_steps=2, device="cpu", dtype="bf16"))
        really = Editor.edit

        def strict(editor, *given, **options):
            if editor.pipe.unet.dtype is not torch.float32:
                raise NumericsError("latents turned NaN")
            return really(editor, *given, **options)

        monkeypatch.setattr(Editor, "edit", strict)
        made = hand.attempt(item)
        assert isinstance(made, Made) and made.notes[-1].startswith("made in fp32")
        assert hand._pipe.unet.dtype is torch.bfloat16, "for one picture only"
        monkeypatch.setattr(Editor, "edit", lambda *_, **__: (_ for _ in ()).throw(NumericsError("NaN again")))
        assert hand.attempt(item) == Failed("NaN again", pytest.approx(0, abs=60))


def test_a_killed_worker_fails_its_item_only(model, tmp_path):
    """Also: the pixels are those of this process."""
    pictures(tmp_path / "in", 2)
    items = make_plan(Job(tmp_path / "in", tmp_path / "out", AFTER, BEFORE)).items
    settings = Settings(str(model), num_inference_steps=2)
    with pool.open_pool(1, settings) as workers:
        workers.give(0, items[0])
        while not workers._workers[0].ready:
            assert not list(workers.results())
        os.kill(workers._workers[0].process.pid, signal.SIGKILL)
        [(_, item, failed)] = waited(workers)
        assert item is items[0] and failed.reason == "its worker ended with signal 9 (Killed)"
        workers.give(workers.idle()[0], items[1])
        [(_, item, made)] = waited(workers)
    assert item is items[1] and made.data == Hand(settings).attempt(items[1]).data


def waited(workers: pool.Pool) -> list:
    while not (out := list(workers.results())):
        pass
    return out


def test_the_page_escapes_and_links(batch, tmp_path):
    nasty = "<script>alert(1)</script>"
    picture(tmp_path / "in/a&b #%.png")
    picture(tmp_path / "in/bad'\"<i>.png").write_text("no picture")
    run = batch("in", "out", "--prompt", f"a dog {nasty}", "--source-prompt", BEFORE, "--report", "pages/r.html")
    assert run.status == 1 and well_formed(tmp_path / "pages/r.html") == 2
    text = (tmp_path / "pages/r.html").read_text()
    assert nasty not in text and "<i>" not in text and "&lt;script&gt;" in text
    assert "../in/a%26b%20%23%25.png" in text and "../out/a%26b%20%23%25.png" in text


def well_formed(path: Path) -> int:
    """Check that a page's elements nest; returns its table's rows."""
    parser = _Nesting()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.open == []
    return parser.rows - 1


class _Nesting(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.rows += tag == "tr"
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
