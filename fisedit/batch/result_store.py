"""The result of every item of a job, in memory and in the journal; the only module that writes outputs.

Knows files and plain values, no image and no pool.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from fisedit.batch.journal import BatchJournal, JournalEntry
from fisedit.batch.manifest import BatchPlan
from fisedit.batch.values import (
    BatchItem,
    BatchJob,
    BatchOutcome,
    BatchSettings,
    ItemFailure,
    ItemOutput,
    ItemRecord,
    ItemStatus,
)
from fisedit.storage import files
from fisedit.values import Quality

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
"""Errors after which the output folder takes no other file either."""

_NOT_IN_KEY = {"timeout", "local_files_only", "model"}
"""Settings that no pixel depends on, and the model's name, which the digest of its files replaces."""


_OF_DETECTION = {"detect", "labels", "threshold", "instance"}
"""Settings that matter where things are detected; jobs of versions without them keep their keys."""


class ResultStore:
    """The results of a job's items.

    Args:
        job: The job.
        settings: Options of every edit.
        model: Identity of the model's files.
        plan: The job's items.
        journal: Results of former runs; locked if results are committed.

    Attributes:
        full: Whether the output folder takes no more files.
        committed: Number of results of this run.
    """

    def __init__(
        self, job: BatchJob, settings: BatchSettings, model: str, plan: BatchPlan, journal: BatchJournal
    ) -> None:
        self._settings, self._model, self._journal, self._overwrite = settings, model, journal, job.overwrite
        self._records = {item: self._initial_record(item) for item in plan.items}
        damaged = (f"lines of the journal that cannot be read, whose items are not taken as done: {journal.damaged}",)
        self._notes = plan.notes + damaged * (journal.damaged > 0)
        self.full = False
        self.committed = 0

    def remaining(self) -> list[BatchItem]:
        """Items to edit."""
        return [item for item, record in self._records.items() if record.status is ItemStatus.LEFT]

    def outcome(self) -> BatchOutcome:
        """The records of all items."""
        return BatchOutcome(tuple(self._records.values()), self._notes)

    def commit(self, item: BatchItem, result: ItemOutput | ItemFailure) -> ItemRecord:
        """Write an item's output, or its failure, to the journal and the output folder.

        Args:
            item: The item.
            result: Its output or failure.

        Returns:
            The item's record; failed as well if the output or the journal could not be written.
        """
        self.committed += 1
        try:
            entry = self._add_failure(item, result) if isinstance(result, ItemFailure) else self._write(item, result)
            record = entry.to_record(item, ItemStatus.FAILED if entry.reason else ItemStatus.DONE)
        except OSError as error:
            self.full = True
            reason = f"the journal in OUT cannot be written: {error.strerror}; make room and run again"
            record = ItemRecord(item, ItemStatus.FAILED, reason)
        self._records[item] = record
        return record

    def _write(self, item: BatchItem, output: ItemOutput) -> JournalEntry:
        """The line first, then the file: a line counts only while the file has its digest."""
        key = item_key(self._settings, self._model, item, output.picture, output.mask)
        entry = JournalEntry.of_output(item, output, key, hashlib.sha256(output.data).hexdigest())
        self._journal.append(entry)
        try:
            files.write_bytes(output.data, item.target)
        except OSError as error:
            self.full = error.errno in _DISK_ERRORS
            reason = f"{item.output} cannot be written: {error.strerror}"
            return self._add_failure(item, ItemFailure(reason, output.seconds))
        return entry

    def _add_failure(self, item: BatchItem, failure: ItemFailure) -> JournalEntry:
        entry = JournalEntry.of_failure(item, failure)
        self._journal.append(entry)
        return entry

    def _initial_record(self, item: BatchItem) -> ItemRecord:
        if item.problem:
            return ItemRecord(item, ItemStatus.FAILED, item.problem)
        if problem := _path_problem(item.target):
            return ItemRecord(item, ItemStatus.FAILED, f"{item.output} cannot be written: {problem}")
        entry = self._journal.entries.get(item.output)
        present = _file_digest(item.target)
        if entry and entry.key and present == entry.sha256 and entry.key == self._key(item):
            return entry.to_record(item, ItemStatus.BEFORE)
        if os.path.lexists(item.target) and not self._journal.has_written(item.output, present) and not self._overwrite:
            reason = f"OUT has another {item.output}, which this would replace; use --overwrite, or another folder"
            return ItemRecord(item, ItemStatus.FAILED, reason)
        return ItemRecord(item, ItemStatus.LEFT)

    def _key(self, item: BatchItem) -> str:
        return item_key(self._settings, self._model, item, _file_digest(item.picture), _file_digest(item.mask))


def item_key(settings: BatchSettings, model: str, item: BatchItem, picture: str, mask: str) -> str:
    """SHA-256 over everything that an item's output depends on.

    Args:
        settings: Options of the edit.
        model: Identity of the model's files.
        item: The item.
        picture: SHA-256 of the input's bytes.
        mask: SHA-256 of the mask's bytes, or "".
    """
    unused = _NOT_IN_KEY if settings.detect else _NOT_IN_KEY | _OF_DETECTION
    shared = {name: value for name, value in asdict(settings).items() if name not in unused}
    if settings.quality == Quality.BALANCED:  # as in batches that began before there was a choice
        del shared["quality"]
    for name in ("adapters", "loras"):
        if not getattr(settings, name):
            del shared[name]
    own = [item.source_prompt, item.prompt, picture, mask, PurePosixPath(item.output).suffix.lower()]
    return hashlib.sha256(json.dumps([shared, model, own], sort_keys=True).encode()).hexdigest()


def remove_partial_files(items: Iterable[BatchItem]) -> None:
    """Remove the unfinished output files of a killed run."""
    names = defaultdict[Path, list[str]](list)
    for item in items:
        names[item.target.parent].append(item.target.name)
    for folder, within in names.items():
        files.remove_partial(folder, within)


def _path_problem(path: Path) -> str:
    """Return why no file can have this path, or ""; one that is missing can be written."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _file_digest(path: Path | None) -> str:
    """SHA-256 of a file's bytes; "" for None or a file that cannot be read."""
    try:
        if path is None or not path.is_file():
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
