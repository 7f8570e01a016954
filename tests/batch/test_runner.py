"""`fisedit batch` as its users meet it: folders before and after, bad files."""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import save_file

from fisedit import Editor
from fisedit.batch import runner as running
from fisedit.batch.journal import BatchJournal
from fisedit.batch.values import BatchAdapters, BatchItem, BatchJob, BatchSettings
from fisedit.errors import InputError
from fisedit.models import paths
from fisedit.storage import files
from fisedit.values import AdapterUse
from tests.support.batches import AFTER, BEFORE, SAID, arguments, batch
from tests.support.documents import well_formed
from tests.support.folders import half, lines, picture, pictures, tree

__all__ = ["arguments", "batch"]  # fixtures


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

    def test_without_metadata_an_unchanged_picture_says_nothing_of_its_making(self, batch, tmp_path):
        told = PngInfo()
        told.add_text("parameters", "a secret\nSteps: 20, Sampler: Euler")
        (tmp_path / "in").mkdir()
        Image.new("RGB", (64, 64), "grey").save(tmp_path / "in/0.png", pnginfo=told)
        (tmp_path / "masks").mkdir()
        Image.new("L", (64, 64)).save(tmp_path / "masks/0.png")
        assert batch("in", "out", *SAID, "--masks", "masks", "--no-metadata").status == 0
        assert b"secret" not in (tmp_path / "out/0.png").read_bytes()

    def test_source_prompts_from_beside_or_from_nobody(self, batch, tmp_path):
        pictures(tmp_path / "in", 3)
        (tmp_path / "in/0.txt").write_bytes(b"\xef\xbb\xbfa cat on a beach\r\n")
        (tmp_path / "in/1.txt").write_bytes(b"\xff\xfe bad")
        run = batch("in", "out", "--prompt", "{source}, a dog", "--json")
        said = {item["image"]: (item["source_prompt"], item["prompt"]) for item in run.told["items"]}
        assert said["0.png"] == ("a cat on a beach", "a cat on a beach, a dog")
        assert run.reasons["1.png"] == "1.txt beside it must be UTF-8 text"
        assert run.reasons.keys() == {"1.png", "2.png"} and "needs what the picture shows" in run.reasons["2.png"]


class TestBadFiles:
    def test_an_output_name_that_the_disk_does_not_take(self, batch, tmp_path):
        folder, name = pictures(tmp_path / "in", 1), f"{'x' * 251}.jpg"
        picture(folder / name, 1)
        (tmp_path / "out").mkdir()
        run = batch("in", "out", *SAID, "--format", "webp", "--json")
        assert (run.status, run.err, run.counts) == (1, "", {"done": 1, "failed": 1})
        assert run.reasons == {name: f"{'x' * 251}.webp cannot be written: File name too long"}
        assert [*tree(tmp_path / "out")] == ["0.webp"]

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

    @pytest.mark.parametrize("error", ["write_bytes", pytest.param("append", marks=pytest.mark.slow)])
    def test_a_full_disk_stops_the_run_and_loses_nothing(self, batch, tmp_path, monkeypatch, error):
        pictures(tmp_path / "in")
        full = OSError(28, "No space left on device")
        with monkeypatch.context() as patch:
            place = files if error == "write_bytes" else BatchJournal
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


class TestInterrupts:
    def test_the_first_asks_and_the_second_stops(self, capsys):
        before = signal.getsignal(signal.SIGINT)
        with running._sigint_requests() as asked:
            assert not asked()
            signal.raise_signal(signal.SIGINT)
            assert asked() and "interrupt again to stop at once" in capsys.readouterr().err
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before

    def test_a_thread_that_is_not_the_first_leaves_signals_alone(self):
        def handler() -> tuple[object, bool]:
            with running._sigint_requests() as asked:
                return signal.getsignal(signal.SIGINT), asked()

        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(handler).result() == (signal.getsignal(signal.SIGINT), False)


def test_a_picture_that_is_gone_is_little_work(tmp_path):
    """What has most edits comes first, then what has the largest file."""
    picture(tmp_path / "large.png", 1, (90, 90))
    picture(tmp_path / "small.png", 2, (8, 8))

    def item(path: Path) -> BatchItem:
        return BatchItem(path, path.name, BEFORE, AFTER, None, path.name, path)

    gone = tmp_path / "gone.png"
    queue = running._Queue([item(path) for path in (gone, tmp_path / "small.png", tmp_path / "large.png", gone)])
    assert [queue.pop(0).name for _ in range(4)] == ["gone.png", "gone.png", "large.png", "small.png"]
    assert queue.pop(0) is None and queue.in_progress == 4
    assert running._estimated_work(deque([item(gone)])) == (1, 0)


def test_weights_of_an_adapter_that_ships_count(model, tmp_path, monkeypatch):
    settings = BatchSettings(str(model), adapters=BatchAdapters(("demo-look",), (AdapterUse(),)))
    shipped = running._model_identity(settings)
    (tmp_path / "demo-look").mkdir()
    save_file({"weight": torch.zeros(1)}, tmp_path / "demo-look" / "model.safetensors")
    monkeypatch.setattr(paths, "_WEIGHT_FOLDERS", (tmp_path,))
    assert running._model_identity(settings) != shipped


@pytest.mark.parametrize(
    ("adapter", "beside"),
    [("ip/adapter.safetensors", "ip/image_encoder/config.json"), ("control_base", "control_proj/config.json")],
)
def test_what_lies_beside_an_adapter_counts(model, tmp_path, adapter, beside):
    """Its image encoder, or its projection: another one is another batch."""
    for name in (f"{adapter}/config.json" if "base" in adapter else "ip/readme.txt", beside):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    if "base" not in adapter:
        save_file({"ip_adapter.1.to_k_ip.weight": torch.zeros(1)}, tmp_path / adapter)
    settings = BatchSettings(str(model), adapters=BatchAdapters((str(tmp_path / adapter),), (AdapterUse(),)))
    before = running._model_identity(settings)
    assert running._model_identity(settings) == before
    (tmp_path / beside).write_text('{"other": 1}')
    assert running._model_identity(settings) != before


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ((None,), {}, "give either --prompt or --edits"),
        ((7,), {}, "--prompt must be text, got int"),
        (("a dog", 7), {}, "--source-prompt must be text, got int"),
        (("a dog",), {"timeout": None}, "timeout must be above 0 seconds, got None"),
        (
            ("a dog",),
            {"detect": "alpha", "instance": None},
            "instance must be largest, all or a number from 0, got None",
        ),
    ],
)
def test_what_a_program_gives_is_checked_too(tmp_path, prompts, settings, message):
    picture(tmp_path / "in/a.png")
    with pytest.raises(InputError, match=message):
        running.preview_batch(BatchJob(tmp_path / "in", tmp_path / "out", *prompts), BatchSettings(**settings))
