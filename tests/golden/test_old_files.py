"""Files of version 0.1.0, written at commit 7d06e12, are read, gone on with and made again.

What is only read must be equal everywhere. They were made with the demo model that shipped then, under whose name there
is another now: what is computed anew is another picture, of the same size, prompt and history. The look is
another, too: an edit of a picture that was made with it says so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fisedit import Editor
from fisedit.errors import AdapterError
from tests.golden.old_files import (
    ENDINGS,
    FILES,
    FURTHER,
    INDEX,
    JOBS,
    JOURNAL,
    PLACE,
    pixels,
    told_of_result,
    told_of_session,
    untimed,
)
from tests.support.processes import Run
from tests.support.sessions import file_of

EXPECTED = json.loads(INDEX.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _one_thread():
    """As the files were written."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def files(tmp_path) -> Path:
    """A copy of the files, which a test may change."""
    return Path(shutil.copytree(FILES, tmp_path / "files"))


@pytest.fixture
def command(fisedit, monkeypatch) -> Callable[..., Run]:
    """Runs the command line in a folder, in this process."""

    def run(folder: Path, *arguments: str) -> Run:
        monkeypatch.chdir(folder)
        return fisedit(*arguments)

    return run


def check_anew(ours: Image.Image, path: Path) -> None:
    """Compare a picture that another model computed with a stored one."""
    with Image.open(path) as stored:
        assert (ours.size, ours.mode) == (stored.size, stored.mode)
    assert np.asarray(ours).std() > 10


def resumed(folder: Path) -> Editor:
    return Editor.resume(folder, device="cpu", local_files_only=True)


@pytest.mark.parametrize("name", FURTHER)
class TestSessions:
    def test_all_is_read(self, files, name):
        expected = {key: value for key, value in EXPECTED["sessions"][name].items() if key != "further"}
        assert told_of_session(resumed(files / "sessions" / name)) == expected

    def test_saved_again_it_says_the_same(self, files, name):
        before, after = files / "sessions" / name, files / "again"
        resumed(before).save(after)
        old, new = (json.loads((folder / "session.json").read_text(encoding="utf-8")) for folder in (before, after))
        assert [{**entry, "files": None} for entry in old["results"]] == [
            {**entry, "files": None} for entry in new["results"]
        ]
        same = {key: value for key, value in new.items() if key not in ("version", "sha256", "references", "results")}
        kept = {**old, "adapters": []}  # under the name of the look there is another now
        assert kept == {**same, "version": 1, "results": old["results"]}
        assert told_of_session(resumed(after)) == told_of_session(resumed(before))
        for entry in old["results"]:
            for ending in (".png", ".mask.png", ".canvas.png"):
                if (before / f"{entry['id']}{ending}").exists():
                    path = file_of(after, entry["id"], ending)
                    with Image.open(before / f"{entry['id']}{ending}") as one, Image.open(path) as other:
                        assert pixels(one) == pixels(other), path.name

    def test_a_further_edit(self, files, name):
        """In the region of then: where words point has changed since, and with it what is said of the region."""
        editor, expected = resumed(files / "sessions" / name), dict(EXPECTED["sessions"][name]["further"])
        path = FILES / "further" / f"{name}.png"
        with Image.open(path) as stored:
            differs = (np.asarray(stored) != np.asarray(editor.current.image)).any(-1)
        source = editor.current
        if name == "look":
            with pytest.raises(AdapterError, match=r"made with the adapter \w+, which is not loaded; load it"):
                editor.edit(FURTHER[name], mask=differs)
            return
        further = editor.edit(FURTHER[name], mask=differs)
        check_anew(further.image, path)
        assert further.changed_outside(source) == 0
        told = told_of_result(further)
        for key in ("picture", "canvas", "mask", "stats", "checked"):
            del told[key], expected[key]
        assert told == expected


@pytest.mark.parametrize(
    "ending", [pytest.param(e, marks=[pytest.mark.slow] * (e not in ("png", "jpg"))) for e in ENDINGS]
)
def test_a_picture_is_made_again(ending):
    with Image.open(FILES / "pictures" / f"edited.{ending}") as picture:
        editor = Editor.remake(picture, device="cpu", local_files_only=True)
    check_anew(editor.current.image, FILES / "further" / "edited.png")
    assert len(editor.history) == 4


def test_a_source_is_made_again():
    path = FILES / "pictures" / "source.png"
    with Image.open(path) as picture:
        editor = Editor.remake(picture, device="cpu", local_files_only=True)
    check_anew(editor.current.image, path)


def test_an_opened_picture_is_opened_again():
    with Image.open(FILES / "pictures" / "opened.jpg") as picture:
        editor = Editor.remake(picture, device="cpu", local_files_only=True)
        assert pixels(editor.current.image) == pixels(picture)
    assert (editor.current.prompt, editor.current.recipe.opened) == ("a dog and a cake on a beach", True)


@pytest.mark.parametrize("name", EXPECTED["pictures"])
def test_what_a_picture_tells_is_shown(command, name):
    shown = command(FILES / "pictures", "show", name, "--json")
    assert shown.status == 0 and json.loads(shown.out) == EXPECTED["pictures"][name], shown.err


def test_an_edit_begins_at_a_picture(files, command):
    place = [word for word in PLACE if word not in ("--model", "demo")]
    words = ("edit", "--from", "edited.webp", "--prompt", "a fox on a beach", "--output", "next.png", "--json")
    made = command(files / "pictures", *words, *place)
    assert made.status == 0, made.err
    told = json.loads(made.out)
    assert [note.partition(":")[0] for note in told["notes"]] == ["made again, but not every pixel is the file's"]
    assert (files / "pictures" / "next.png").is_file()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the journal."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != JOURNAL)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def printed(run: Run) -> dict[str, object]:
    """What a batch printed and how it ended, but for its seconds."""
    told = {"status": run.status} | untimed(json.loads(run.out))
    told["notes"] = [note for note in told["notes"] if "mask" not in note and "left out" not in note]
    for item in told["items"]:  # version 0.1.0 said nothing of masks, folders, nor which words a model does not know
        del item["mask"]
        item["notes"] = [note for note in item["notes"] if "it does not know" not in note]
    return told


def expected_batch(name: str, before: list[str]) -> dict[str, object]:
    """What the first run of a job printed, with these outputs done before instead of done."""
    told = json.loads(json.dumps(EXPECTED["batch"]["printed"][name]))
    for item in told["items"]:
        if item["status"] == "done" and item["output"] in before:
            item["status"] = "done before"
    counts = [item["status"] for item in told["items"]]
    told["counts"] = {status: counts.count(status) for status in told["counts"]}
    return told


@pytest.mark.parametrize("name", ["finished", pytest.param("rows", marks=pytest.mark.slow)])
def test_a_finished_batch_is_done_again_by_another_model_once(files, command, name):
    folder = files / "batch" / name
    before, journal = contents(folder), (folder / JOURNAL).read_bytes()
    told = printed(command(files / "batch", *JOBS[name], "--json"))
    assert told == expected_batch(name, [])
    after = contents(folder)
    idle = {item["output"] for item in told["items"] if item["change"] == "identical"}
    assert after.keys() == before.keys() and {path for path in after if after[path] == before[path]} <= idle
    lines = (folder / JOURNAL).read_bytes().removeprefix(journal)
    again = printed(command(files / "batch", *JOBS[name], "--json"))
    assert again == expected_batch(name, [item["output"] for item in again["items"]])
    assert contents(folder) == after and lines.count(b"\n") == len(told["items"])


TORN = b'{"version": 1, "output": "b.j'


@pytest.mark.parametrize("torn", [pytest.param(b"", marks=pytest.mark.slow, id="whole"), pytest.param(TORN, id="torn")])
def test_an_interrupted_batch_is_gone_on_with(files, command, torn):
    folder, done = files / "batch" / "interrupted", EXPECTED["batch"]["interrupted"]
    before = contents(folder)
    assert sorted(before) == sorted(done)
    with (folder / JOURNAL).open("ab") as journal:
        journal.write(torn)
    told = printed(command(files / "batch", *JOBS["interrupted"], "--json"))
    assert told == expected_batch("finished", [])  # what another model did is done again
    after = contents(folder)
    assert sorted(after) == sorted(contents(FILES / "batch/finished"))
    for name in after:
        with Image.open(folder / name) as image:
            check_anew(image, FILES / "batch" / "finished" / name)


def test_every_job_is_there():
    assert {path.name for path in (FILES / "batch").iterdir() if (path / JOURNAL).is_file()} == set(JOBS)
