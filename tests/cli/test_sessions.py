"""What the command line does with a session that is there: it goes on with it or refuses, and never loses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fisedit import Editor
from tests.support.sessions import files

SMALL = ("--num-inference-steps", "2", "--width", "64", "--height", "64")
BEFORE, AFTER = "a cat and a cake on a beach", "a dog and a cake on a beach"
HOLDING = """
import sys, time
from pathlib import Path
from fisedit.storage.session_folder import lock
with lock(Path("s")):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(fisedit, model, tmp_path):
    """The files of a session of two results in the folder `s`."""
    generate = ("generate", BEFORE, "--model", model, *SMALL, "--session", "s", "--output", "cat.png")
    assert fisedit(*generate).status == 0
    assert fisedit("edit", "--session", "s", "--prompt", AFTER, "--output", "dog.png").status == 0
    return files(tmp_path / "s")


def test_a_new_source_does_not_replace_a_session(fisedit, model, tmp_path, held):
    """The model is a place that is none: the refusal comes before it is looked for."""
    generate = ("generate", AFTER, *SMALL, "--session", "s", "--output", "new.png")
    fisedit(*generate, "--model", "./nowhere").refused("session", "s holds a session", "--overwrite")
    assert files(tmp_path / "s") == held and not (tmp_path / "new.png").exists()
    (tmp_path / "s" / "notes.txt").write_text("mine")
    assert fisedit(*generate, "--model", model, "--overwrite").status == 0
    left = files(tmp_path / "s")
    assert len(json.loads(left["session.json"])["results"]) == 1
    assert len(left) == 4 and left["notes.txt"] == b"mine"


def test_no_picture_is_written_into_a_session(fisedit, tmp_path, held):
    edit = ("edit", "--session", "s", "--prompt", AFTER)
    own = next(name for name in held if name.startswith("0-") and name.count(".") == 1)
    for name in (own, "0.png", "new.jpg"):
        fisedit(*edit, "--output", f"s/{name}").refused("input", "session's folder")
    (tmp_path / "link").symlink_to("s")
    fisedit(*edit, "--output", "link/0.png").refused("input", "session's folder")
    new = ("generate", BEFORE, *SMALL, "--session", "other", "--model", "./nowhere")
    fisedit(*new, "--output", "other/source.png").refused("input", "session's folder")
    fisedit("demo", "--output", "s").refused("input", "session's folder")
    (tmp_path / "in").mkdir()
    fisedit("batch", "in", "s", "--prompt", AFTER).refused("input")
    assert files(tmp_path / "s") == held


def test_two_runs_do_not_edit_one_session_at_once(fisedit, tmp_path, held):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"held\n"
        edit = ("edit", "--session", "s", "--prompt", BEFORE, "--output", "again.png")
        fisedit(*edit).refused("session", "another run is working on the session in s")
        other.stdin.close()
        assert other.wait(60) == 0
    assert files(tmp_path / "s") == held and not (tmp_path / "again.png").exists()
    assert fisedit(*edit).status == 0


def test_an_edit_is_in_its_file_where_its_session_cannot_be_saved(fisedit, tmp_path, held, monkeypatch):
    """Another run that needs no lock, such as an app, saves while an edit runs."""
    saving = Editor.save

    def save(editor, folder, **options):
        other = Editor.resume(folder, device="cpu")
        other.edit("a fox and a cake on a beach")
        saving(other, folder)
        saving(editor, folder, **options)

    monkeypatch.setattr(Editor, "save", save)
    fisedit("edit", "--session", "s", "--prompt", BEFORE, "--output", "new.png").refused("session", "another run")
    assert (tmp_path / "new.png").exists()
    monkeypatch.undo()
    assert [result.prompt for result in Editor.resume(tmp_path / "s", device="cpu").history][-1].startswith("a fox")
