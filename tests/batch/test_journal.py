"""`fisedit batch` killed, interrupted and taken up again: the outputs are those of a run that went through."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fisedit import Editor, cli
from fisedit.batch import runner as running
from fisedit.batch.journal import BatchJournal, JournalEntry
from fisedit.batch.values import BatchItem, BatchJob, BatchSettings, ItemFailure, OnError
from fisedit.errors import InputError
from fisedit.storage import files
from tests.support.batches import AFTER, BEFORE, SAID, arguments, batch
from tests.support.folders import JOURNAL, lines, picture, pictures, tree, whole
from tests.support.pipelines import build_pipeline

__all__ = ["arguments", "batch"]  # fixtures


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
            torch.set_num_threads(torch.get_num_threads())  # makes a pool anew, which two threads at once may not
            spoil()
            sys.argv = ["fisedit", *arguments, *map(str, given)]
            cli.main()
        except SystemExit as ended:
            os._exit(int(ended.code))
        finally:
            os._exit(99)

    return start


def ended(child: int) -> int:
    """The exit status of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory) -> Path:
    """A folder with "in" and what an uninterrupted run makes of it, "clean"."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = BatchJob(pictures(folder / "in"), folder / "clean", AFTER, BEFORE)
    settings = BatchSettings(str(model), num_inference_steps=2)
    done = running.run_batch(job, settings, workers=0, on_error=OnError.STOP, on_step=lambda *_: None)
    assert done.exit_status == 0
    return folder


ITEM = BatchItem(Path("in.png"), "in.png", BEFORE, AFTER, None, "out.png", Path("out.png"))
FAILED = JournalEntry.of_failure(ITEM, ItemFailure("no"))


class TestTheFile:
    def test_a_folder_in_its_place(self, tmp_path):
        (tmp_path / JOURNAL).mkdir()
        assert not BatchJournal.read(tmp_path).entries
        with (
            pytest.raises(InputError, match=r"read and written, got .* \(Is a directory\)"),
            BatchJournal.lock(tmp_path),
        ):
            pass

    def test_a_link_or_a_pipe_in_its_place(self, tmp_path):
        (tmp_path / JOURNAL).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InputError, match="must hold a journal"), BatchJournal.lock(tmp_path):
            pass
        assert not (tmp_path / "elsewhere").exists()
        (tmp_path / JOURNAL).unlink()
        os.mkfifo(tmp_path / JOURNAL)
        with pytest.raises(InputError, match=r"a plain file, got .*; remove it"), BatchJournal.lock(tmp_path):
            pass

    def test_what_cannot_be_read_or_locked(self, tmp_path, monkeypatch):
        (tmp_path / JOURNAL).touch()

        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", fail)
            with pytest.raises(InputError, match=r"\(Input/output error\)"):
                BatchJournal.read(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(fcntl, "flock", fail)
            with pytest.raises(InputError, match=r"\(Input/output error\)"), BatchJournal.lock(tmp_path):
                pass
        with BatchJournal.lock(tmp_path) as journal:
            assert not journal.entries

    def test_a_line_that_is_not_on_the_disk_is_taken_back(self, tmp_path, monkeypatch):
        with BatchJournal.lock(tmp_path) as journal:
            journal.append(FAILED)
            before = (tmp_path / JOURNAL).read_bytes()

            def full(_: int) -> None:
                raise OSError(28, "No space left on device")

            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", full)
                with pytest.raises(OSError, match="No space left"):
                    journal.append(FAILED)
            assert (tmp_path / JOURNAL).read_bytes() == before
        assert BatchJournal.read(tmp_path).entries.keys() == journal.entries.keys() and before.count(b"\n") == 1

    def test_lines_of_a_later_version_are_left_alone(self):
        later = BatchJournal(json.dumps({"version": 999, "anything": 1}).encode() + b"\n")
        assert not later.entries and later.damaged == 0


TRAPS = {
    "line": (BatchJournal, "append"),
    "file": (files, "write_bytes"),
    "rename": (Path, "replace"),
    "sync": (files, "_sync"),
    "edit": (Editor, "edit"),
}
"""Functions before or after one of whose calls a run is killed: every write is among them."""


class TestResuming:
    @pytest.fixture
    def clean(self, uninterrupted, tmp_path) -> dict[str, str]:
        shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
        return tree(tmp_path / "clean")

    @pytest.mark.slow
    @pytest.mark.parametrize("trap", TRAPS)
    @pytest.mark.parametrize("call", [1, 2, 3])
    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_killed_anywhere(self, batch, forked, tmp_path, clean, trap, call, moment):
        place, name = TRAPS[trap]

        def spoil() -> None:
            really, calls = getattr(place, name), []

            def trapped(*given, **options):
                calls.append(given)
                answer = really(*given, **options) if moment == "after" or len(calls) < call else None
                if len(calls) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return answer

            setattr(place, name, trapped)

        assert ended(forked("in", "out", *SAID, spoil=spoil)) == -signal.SIGKILL
        survived = whole(tmp_path / "out")
        assert survived.items() <= clean.items()
        before = len(lines(tmp_path / "out"))
        again = batch("in", "out", *SAID, "--json")
        assert (again.status, tree(tmp_path / "out")) == (0, clean)
        assert len(lines(tmp_path / "out")) - before == again.counts.get("done", 0), "nothing is done twice"
        assert again.counts.get("done before", 0) == len(survived) >= min(call - 1, 1)

    def test_a_torn_last_line_and_a_damaged_one(self, batch, tmp_path, clean):
        journal = tmp_path / "clean" / JOURNAL
        first, second, third = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(first + b"{damaged\n" + second + third[:50])
        (tmp_path / "clean" / json.loads(third)["output"]).unlink()  # a line is on the disk before its file
        again = batch("in", "clean", *SAID, "--json")
        assert (again.status, again.counts) == (0, {"done": 1, "done before": 2})
        assert tree(tmp_path / "clean") == clean and "cannot be read" in again.told["notes"][0]

    def test_a_line_whose_fields_have_other_types_counts_for_none(self, tmp_path, clean):
        line = json.loads((tmp_path / "clean" / JOURNAL).read_bytes().splitlines()[0])
        wrong = [
            ("area", 5),
            ("area", "QUJ"),
            ("seconds", "x"),
            ("change", 5),
            ("reason", None),
            ("notes", [1]),
            ("key", 5),
        ]
        lines = [json.dumps({**line, field: value}) for field, value in [*wrong, ("output", 5), ("sha256", 5)]]
        read = BatchJournal("\n".join([*lines, json.dumps(line)]).encode())
        assert (read.damaged, len(read.entries)) == (len(lines), 1)

    @pytest.mark.parametrize(
        "change",
        [
            ("--prompt", "a bird and a cake on a beach", "--source-prompt", BEFORE),
            ("--prompt", AFTER, "--source-prompt", "a cat on a beach"),
            pytest.param((*SAID, "--guidance-scale", "3"), marks=pytest.mark.slow),
            pytest.param((*SAID, "--negative-prompt", "snow"), marks=pytest.mark.slow),
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
        with BatchJournal.lock(tmp_path / "out"):
            batch("in", "out", *SAID).refused("input", "another run is working on")
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
        said = tmp_path / "said"

        def spoil() -> None:
            really = Editor.open
            sys.stderr = said.open("w", buffering=1)

            def tell(*given, **options):
                sys.stderr.write("started\n")
                return really(*given, **options)

            Editor.open = tell

        def until(words: str) -> None:
            while not (said.exists() and words in said.read_text()):
                assert os.waitpid(child, os.WNOHANG) == (0, 0), f"ended before it said {words!r}"
                time.sleep(0.01)

        child = forked("in", "out", *SAID, "--num-inference-steps", "900", spoil=spoil)
        until("started")
        os.kill(child, signal.SIGINT)
        until("interrupt again")  # two signals that a long operation takes at once are one to Python
        os.kill(child, signal.SIGINT)
        assert ended(child) == 130
        assert tree(tmp_path / "out") == {}
