"""Pages on disk come back to the bit or are refused; their folder goes with its process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fisedit.errors import PageError
from fisedit.features.pages import PageFolder, sweep

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b/last": torch.tensor([-3, 7], dtype=torch.int8),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "empty": torch.empty(0, 2),
}


@pytest.fixture
def written(tmp_path):
    folder = PageFolder(tmp_path)
    return SimpleNamespace(folder=folder, page=folder.write(TENSORS))


def test_a_page_comes_back_to_the_bit(written):
    found = written.page.read()
    assert found.keys() == TENSORS.keys()
    assert all(found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in TENSORS.items())


def test_views_of_one_memory_are_each_written(written):
    memory = torch.arange(12.0)
    found = written.folder.write({"first": memory[:6], "last": memory[6:]}).read()
    assert torch.equal(torch.cat([found["first"], found["last"]]), memory)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "folder"])
def test_a_damaged_page_is_refused(written, damage):
    path = written.page.path
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    with pytest.raises(PageError, match="recorded features"):
        written.page.read()


def test_a_file_goes_with_its_page(written):
    path, bytes_before = written.page.path, written.folder.bytes
    assert path.exists() and bytes_before == path.stat().st_size
    del written.page
    assert not path.exists() and written.folder.bytes == 0


def test_a_folder_goes_with_its_owner(tmp_path):
    folder = PageFolder(tmp_path)
    page = folder.write(TENSORS)
    assert list(tmp_path.iterdir())
    del folder, page
    assert not list(tmp_path.iterdir())


def test_nothing_is_made_before_the_first_page(tmp_path):
    PageFolder(tmp_path / "pages")
    assert not list(tmp_path.iterdir())


def test_what_there_is_no_room_for_is_not_written(written, monkeypatch):
    size = written.page.path.stat().st_size
    written.folder.max_bytes = 2 * size - 1
    with pytest.raises(OSError, match="no room for pages"):
        written.folder.write(TENSORS)
    written.folder.max_bytes = 2 * size
    disk = SimpleNamespace(total=1000 * size, free=100 * size)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    with pytest.raises(OSError, match="no room for pages"):
        written.folder.write(TENSORS)
    disk.free = 101 * size
    second = written.folder.write(TENSORS)
    assert second.path.exists() and written.folder.bytes == 2 * size


def test_a_write_that_fails_leaves_nothing(written, monkeypatch):
    before = written.folder.bytes

    def write_bytes(path, data):
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="No space"):
        written.folder.write(TENSORS)
    assert written.folder.bytes == before and len(list(written.page.path.parent.iterdir())) == 1


CHILD = """import os, sys, time, torch
from pathlib import Path
from fisedit.features.pages import PageFolder
folder = PageFolder(Path(sys.argv[1]))
page = folder.write({"a": torch.ones(3)})
print("written", flush=True)
sys.stdin.readline()
"""


def start(folder):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "written\n"
    return child


def test_a_killed_process_s_folder_is_swept_and_a_living_one_s_is_not(tmp_path):
    others = {"a file", "123-abcdefgh", "fisedit-notes", "folder"}
    (tmp_path / "a file").write_text("of somebody else")
    for name in ("123-abcdefgh", "fisedit-notes", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.safetensors").write_text("of somebody else")
    killed, living = start(tmp_path), start(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    left = next(path for path in tmp_path.iterdir() if f"-{killed.pid}-" in path.name)
    assert list(left.glob("*.safetensors"))
    own = PageFolder(tmp_path)
    assert not left.exists(), "as soon as another process wants pages"
    page = own.write(TENSORS)
    owners = [int(path.name.split("-")[1]) for path in tmp_path.glob("fisedit-*-*")]
    assert sorted(owners) == sorted([living.pid, os.getpid()]) and page.path.exists()
    living.communicate("\n")
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others | {page.path.parent.name}
    assert all((tmp_path / name / "1.safetensors").exists() for name in others - {"a file"})


def test_what_else_lies_in_a_killed_process_s_folder_stays(tmp_path):
    folder = tmp_path / "fisedit-1-abcdefgh"
    folder.mkdir()
    for name in ("1.safetensors", "notes.txt"):
        (folder / name).write_text("left")
    PageFolder(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
