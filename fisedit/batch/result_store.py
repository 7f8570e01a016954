"""What became of every item of a job, in memory and in its journal; the only place that writes outputs.

Knows files and plain values, and neither pictures nor who edits them.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from fisedit.batch import digest, journal
from fisedit.batch.journal import Entry, Journal
from fisedit.batch.manifest import Plan
from fisedit.batch.values import Failed, Item, Job, Made, Outcome, Record, Settings, Status
from fisedit.storage import files

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
"""Errors after which the output folder takes no other file either."""


class Ledger:
    """What became of every item.

    Args:
        model: the identity of its files. plan: the job's items. held: the journal, which tells what is done already.
    """

    def __init__(self, job: Job, settings: Settings, model: str, plan: Plan, held: Journal) -> None:
        self._settings, self._model, self._journal, self._overwrite = settings, model, held, job.overwrite
        self._records = {item: self._standing(item) for item in plan.items}
        damaged = (f"lines of the journal that cannot be read, whose items are not taken as done: {held.damaged}",)
        self._notes = plan.notes + damaged * (held.damaged > 0)
        self.full = False
        self.settled = 0

    def left(self) -> list[Item]:
        """Items still to do."""
        return [item for item, record in self._records.items() if record.status is Status.LEFT]

    def outcome(self) -> Outcome:
        """How the job stands."""
        return Outcome(tuple(self._records.values()), self._notes)

    def settle(self, item: Item, result: Made | Failed) -> Record:
        """Write an output, or why there is none."""
        self.settled += 1
        try:
            entry = self._failed(item, result) if isinstance(result, Failed) else self._write(item, result)
            record = entry.record(item, Status.FAILED if entry.reason else Status.DONE)
        except OSError as error:
            self.full = True
            why = f"the journal in OUT cannot be written: {error.strerror}; make room and run again"
            record = Record(item, Status.FAILED, why)
        self._records[item] = record
        return record

    def _write(self, item: Item, made: Made) -> Entry:
        """The line first, then the file: the line counts only where the file is as it says."""
        key = digest.key(self._settings, self._model, item, made.picture, made.mask)
        entry = journal.done(item, made, key, digest.of_bytes(made.data))
        self._journal.append(entry)
        try:
            files.write_bytes(made.data, item.target)
        except OSError as error:
            self.full = error.errno in _FULL
            return self._failed(item, Failed(f"{item.output} cannot be written: {error.strerror}", made.seconds))
        return entry

    def _failed(self, item: Item, failed: Failed) -> Entry:
        entry = journal.failed(item, failed.reason, failed.seconds)
        self._journal.append(entry)
        return entry

    def _standing(self, item: Item) -> Record:
        """Done before, not to be done, or left to do."""
        if item.problem:
            return Record(item, Status.FAILED, item.problem)
        entry = self._journal.entries.get(item.output)
        there = digest.of_file(item.target)
        if entry and entry.key and there == entry.sha256 and entry.key == self._key(item):
            return entry.record(item, Status.BEFORE)
        if os.path.lexists(item.target) and not self._journal.wrote(item.output, there) and not self._overwrite:
            why = f"OUT has another {item.output}, which this would replace; use --overwrite, or another folder"
            return Record(item, Status.FAILED, why)
        return Record(item, Status.LEFT)

    def _key(self, item: Item) -> str:
        picture, mask = digest.of_file(item.picture), digest.of_file(item.mask)
        return digest.key(self._settings, self._model, item, picture, mask)


def sweep(items: Iterable[Item]) -> None:
    """Remove what a killed run left of unfinished files."""
    names = defaultdict[Path, list[str]](list)
    for item in items:
        names[item.target.parent].append(item.target.name)
    for folder, within in names.items():
        files.sweep(folder, within)
