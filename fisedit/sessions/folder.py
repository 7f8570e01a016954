"""The folder of a session: one run at a time writes to it, and nothing else is written beside its index.

Knows files alone, so that the command line can ask before anything is loaded.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from fisedit.errors import InputError, SessionError
from fisedit.storage.files import SESSION_INDEX, check_writable, is_among

_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of network disks that cannot lock folders; there only the index's digest shows another writer."""

_UNFINISHED = re.compile(
    r"\.(session|\d+(\.\d{4})?-[0-9a-f]{16}(\.mask|\.canvas|\.pixels)?|reference-[0-9a-f]{16}-[0-9a-f]*)-\w*\.part"
)
"""Names of the unfinished copies of a session's files; see `files.write_file`."""

_held: ContextVar[frozenset[tuple[int, int]]] = ContextVar("_held", default=frozenset())


def check_outputs(folder: Path, *outputs: Path | None) -> None:
    """Check, before any work, that a session can be written to a folder, and other files beside it.

    Args:
        folder: The session's folder, which need not exist yet.
        outputs: The other files; None passes.

    Raises:
        InputError: The folder cannot be written, or one of the files is to be in it, or the session in that file.
    """
    check_writable(folder)
    for output in outputs:
        if output is not None and is_among(folder, (output.parent, output)):
            raise InputError(f"output must not be in the session's folder, got {output}; choose another")


def check_new(folder: Path, *outputs: Path | None, overwrite: bool) -> None:
    """Check, before any work, that a new session can be written to a folder, and other files beside it.

    Args:
        folder: The folder, as in `check_outputs`.
        outputs: The outputs, as in `check_outputs`.
        overwrite: Whether a session that is there may be replaced.

    Raises:
        SessionError: The folder holds a session.
        InputError: As in `check_outputs`.
    """
    check_outputs(folder, *outputs)
    if os.path.lexists(folder / SESSION_INDEX) and not overwrite:
        raise SessionError(f"{folder} holds a session, which this would replace; choose another folder, or --overwrite")


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Let no other run write to a session during the block; a lock that this run has already is enough.

    Args:
        folder: The session's folder. One that does not exist needs no lock.

    Raises:
        SessionError: Another run holds the lock.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)
        if key not in _held.get():
            _lock(descriptor, folder)
        token = _held.set(_held.get() | {key})
        try:
            yield
        finally:
            _held.reset(token)
    finally:
        os.close(descriptor)  # releases the lock


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished copies that killed saves left in a folder, which must be locked."""
    for path in folder.glob(".*.part"):
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SessionError(
            f"another run is working on the session in {folder}; wait for it, or use another folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
