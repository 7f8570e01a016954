"""Streams that cannot be written: what was not written is dropped, and the exit status is what remains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fisedit.cli import console


@pytest.fixture
def full():
    """A stream onto a full disk, whose file is its own."""
    stream = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 (closed below)
    yield stream
    stream.close()


def test_an_error_that_cannot_be_printed_keeps_its_status(monkeypatch, full):
    monkeypatch.setattr(sys, "stderr", full)
    assert console.print_error_line("input", "nothing", 2) == 2
    full.write("goes nowhere\n")  # the stream's file is the null device by now


def test_what_cannot_be_flushed_is_an_error_once(monkeypatch):
    with Path("/dev/full").open("w") as stream:
        stream.write("unwritten")
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(OSError, match="No space left"):
            console.flush()
        console.flush()


def test_a_process_without_stdout_has_nothing_to_flush(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    console.flush()


def test_text_that_an_encoding_lacks_is_escaped(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console.escape_unprintable_text()
        stream.write("a café")
    assert (tmp_path / "out").read_text() == "a caf\\xe9"


def test_a_process_without_stderr_prints_no_error_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert console.print_error_line("input", "nothing", 2) == 2
    assert capsys.readouterr().out == ""


def test_rows_of_a_tables_notes_are_single_lines(capsys):
    console._show_notes(["a\nb", "c"])
    assert capsys.readouterr().out.splitlines() == ["note: a b", "note: c"]


def test_progress_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("Measuring", lines=True) as on_step:
        on_step(1, 3, None)
    assert capsys.readouterr().err.endswith(" Measuring: 1 of 3\n")
    with console.progress("Editing") as on_step:
        on_step(1, 3, None)
    assert not capsys.readouterr().err
