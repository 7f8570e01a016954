"""The journal of an output folder: one JSON line per item. Knows files and plain values, no image.

A line is written and synced before the output that it describes. An item is done only if the output's bytes have the
line's digest, so a kill at any instant leaves a valid journal. One run at a time holds the lock of a journal.
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
from types import NoneType
from typing import Any

from fisedit.batch.values import BatchItem, ItemFailure, ItemOutput, ItemRecord, ItemStatus
from fisedit.errors import InputError

NAME = ".fisedit-batch.jsonl"
VERSION = 1

_KINDS: dict[str, tuple[type, ...]] = {"source_prompt": (str, NoneType), "seconds": (int, float), "notes": (tuple,)}
"""Types of a line's fields that are no texts."""


@dataclass(frozen=True)
class JournalEntry:
    """One line; the fields are its JSON keys.

    Args:
        output: The output's name in the output folder.
        picture: The input's name in the input folder.
        prompt: The prompt, as in `BatchItem`.
        source_prompt: The input's prompt, as in `BatchItem`.
        key: Digest of everything that the output depends on; "" for a failure.
        sha256: SHA-256 of the output's bytes; "" for a failure.
        reason: The error; "" for an output.
        change: The changed words as text.
        area: The mask of `ItemOutput` in base64.
        seconds: Duration.
        notes: Remarks for the user.
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

    @classmethod
    def of_output(cls, item: BatchItem, output: ItemOutput, key: str, sha256: str) -> JournalEntry:
        """The line of an output that is about to be written.

        Args:
            item: The item.
            output: Its output.
            key: Digest of everything that the output depends on.
            sha256: SHA-256 of the output's bytes.
        """
        names = (item.output, item.name, item.prompt, item.source_prompt)
        area = b64encode(output.area).decode()
        return cls(*names, key, sha256, "", output.change, area, round(output.seconds, 3), output.notes)

    @classmethod
    def of_failure(cls, item: BatchItem, failure: ItemFailure) -> JournalEntry:
        """The line of an item without output."""
        names = (item.output, item.name, item.prompt, item.source_prompt)
        return cls(*names, reason=failure.reason, seconds=round(failure.seconds, 3))

    def to_record(self, item: BatchItem, status: ItemStatus) -> ItemRecord:
        """The item's record for the report."""
        return ItemRecord(item, status, self.reason, self.change, self.seconds, b64decode(self.area), self.notes)


class BatchJournal:
    """The lines of one output folder.

    Args:
        lines: Contents of the file.
        file: Descriptor to append to, or None to read only.

    Attributes:
        entries: The last line of each output, by the output's name.
        damaged: Number of lines that could not be read; their items count as not done.
    """

    def __init__(self, lines: bytes, file: int | None = None) -> None:
        self.entries: dict[str, JournalEntry] = {}
        self.damaged = 0
        self._file = file
        self._written = defaultdict[str, set[str]](set)
        for line in lines.splitlines():
            self._parse(line)

    @classmethod
    def read(cls, folder: Path) -> BatchJournal:
        """The folder's journal, read only; empty if there is none."""
        try:
            return cls((folder / NAME).read_bytes() if (folder / NAME).is_file() else b"")
        except OSError as error:
            raise _unusable(folder, error) from error

    @classmethod
    @contextmanager
    def lock(cls, folder: Path) -> Iterator[BatchJournal]:
        """Open a folder's journal for this run alone; an incomplete last line is removed.

        Args:
            folder: The output folder; created if missing.

        Raises:
            InputError: Another run holds the lock, or the file cannot be read and written.
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
            os.close(file)  # releases the lock

    def append(self, entry: JournalEntry) -> None:
        """Add a line and sync it to the disk.

        Args:
            entry: The line.

        Raises:
            OSError: It could not be written; the journal is unchanged.
        """
        assert self._file is not None, "opened by lock, not by read"
        line = json.dumps({"version": VERSION} | asdict(entry)).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            _write_all(self._file, line)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)
            raise
        self._add(entry)

    def has_written(self, output: str, sha256: str) -> bool:
        """Return whether any batch ever wrote this output with these bytes."""
        return sha256 in self._written[output]

    def _parse(self, line: bytes) -> None:
        try:
            fields: dict[str, Any] = json.loads(line)
            if fields.pop("version") == VERSION:
                self._add(_checked(JournalEntry(**(fields | {"notes": tuple(fields["notes"])}))))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.damaged += 1

    def _add(self, entry: JournalEntry) -> None:
        self.entries[entry.output] = entry
        if entry.sha256:
            self._written[entry.output].add(entry.sha256)


def _checked(entry: JournalEntry) -> JournalEntry:
    """An entry whose fields have their types. Raises TypeError for others, ValueError for a mask that is not base64."""
    for name, value in [*vars(entry).items(), *(("", note) for note in entry.notes)]:
        if not isinstance(value, _KINDS.get(name, str)):
            raise TypeError(f"no journal has this {name}")
    b64decode(entry.area, validate=True)
    return entry


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
