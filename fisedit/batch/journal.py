"""What a batch has done, one JSON line an item, in the output folder. Knows files and plain values, no picture.

A line is written, and on the disk, before the output that it tells of: an item is done only where the output's bytes
are those the line names. So a kill at any instant leaves a journal that is right. One run holds it at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fisedit.batch.values import Item, Made, Record, Status
from fisedit.errors import InputError

NAME = ".fisedit-batch.jsonl"
VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One line.

    Args:
        output, picture: names in their folders. prompt, source_prompt: as in `Item`.
        key: of all that the output depends on; "" for a failure. sha256: of the output's bytes.
        reason: why it failed, "" for what is done. area: as in `Made`, base64.
    """

    output: str
    picture: str
    prompt: str
    source_prompt: str | None
    key: str = ""
    sha256: str = ""
    reason: str = ""
    change: str = ""
    area: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def record(self, item: Item, status: Status) -> Record:
        """What the report tells of it."""
        return Record(item, status, self.reason, self.change, self.seconds, b64decode(self.area), self.notes)


def done(item: Item, made: Made, key: str, sha256: str) -> Entry:
    """The line of an item whose output is about to be written."""
    area = b64encode(made.area).decode()
    said = (item.output, item.name, item.prompt, item.source_prompt)
    return Entry(*said, key, sha256, "", made.change, area, round(made.seconds, 3), made.notes)


def failed(item: Item, reason: str, seconds: float) -> Entry:
    """The line of an item that came to nothing."""
    said = (item.output, item.name, item.prompt, item.source_prompt)
    return Entry(*said, reason=reason, seconds=round(seconds, 3))


class Journal:
    """The lines of one output folder.

    Args:
        entries: output -> its last line. damaged: lines that could not be read; their items count as not done.
    """

    def __init__(self, lines: bytes, file: int | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        self.damaged = 0
        self._file = file
        self._written = defaultdict[str, set[str]](set)
        for line in lines.splitlines():
            self._take(line)

    @classmethod
    def read(cls, folder: Path) -> Journal:
        """What a folder's journal says now, to look at only; empty where there is none."""
        try:
            return cls((folder / NAME).read_bytes() if (folder / NAME).is_file() else b"")
        except OSError as error:
            raise _unusable(folder, error) from error

    @classmethod
    @contextmanager
    def hold(cls, folder: Path) -> Iterator[Journal]:
        """Open a folder's journal for this run alone; a last line torn by a kill is cut off.

        Raises:
            InputError: another run holds it, or it cannot be read and written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            _lock(file, folder)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise InputError(f"OUT must hold a journal that is a plain file, got {folder / NAME}; remove it")
            lines = (folder / NAME).read_bytes()
            whole = lines.rfind(b"\n") + 1
            if whole < len(lines):
                os.ftruncate(file, whole)
            yield cls(lines[:whole], file)
        finally:
            os.close(file)  # which unlocks

    def append(self, entry: Entry) -> None:
        """Add a line; it is on the disk when this returns.

        Raises:
            OSError: it could not be written; the journal is as it was.
        """
        assert self._file is not None, "held, not only read"
        line = json.dumps({"version": VERSION} | asdict(entry)).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            _write_all(self._file, line)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)
            raise
        self._keep(entry)

    def wrote(self, output: str, sha256: str) -> bool:
        """Whether a batch wrote this output with these bytes, now or ever."""
        return sha256 in self._written[output]

    def _take(self, line: bytes) -> None:
        try:
            told: dict[str, Any] = json.loads(line)
            if told.pop("version") == VERSION:
                self._keep(Entry(**(told | {"notes": tuple(told["notes"])})))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.damaged += 1

    def _keep(self, entry: Entry) -> None:
        self.entries[entry.output] = entry
        if entry.sha256:
            self._written[entry.output].add(entry.sha256)


def _write_all(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]


def _lock(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"OUT must be free, got {folder}, which another run is working on; wait for it or choose another"
        ) from error
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> InputError:
    return InputError(f"OUT must hold a journal that can be read and written, got {folder / NAME} ({error.strerror})")
