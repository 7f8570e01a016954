"""Checks and writes output files. An output is complete or absent. Knows no image library and nothing of editing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import IO, TypeVar

from fisedit.errors import InputError

T = TypeVar("T")

IMAGE_FORMATS: Mapping[str, str] = {
    ".png": "PNG",
    ".webp": "WEBP",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jfif": "JPEG",
    ".jpe": "JPEG",
    ".tif": "TIFF",
    ".tiff": "TIFF",
}
"""File name suffix -> format of the images that are written."""

SESSION_INDEX = "session.json"
"""The file that makes a folder a session's. Outputs are never written beside it."""

_READS_UMASK = Lock()
_MAX_STEM_LETTERS = 40
"""Letters of a file's name in the name of its unfinished copy."""


def check_plain_file(what: str, path: Path) -> None:
    """Check that a path to read is no pipe, device or folder, which may have no end; one that is missing passes.

    Args:
        what: The name of the file in errors.
        path: The file.

    Raises:
        InputError: It is one of them.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{what} must be a plain file, got {path}")


def check_image_path(path: Path, *inputs: Path | None) -> Path:
    """Check, before any work, that an image can be written to a path.

    Args:
        path: The output.
        inputs: Files that it must not replace.

    Returns:
        The path.

    Raises:
        InputError: The suffix is unknown, the path is an input, or as `check_file_path`.
    """
    if path.suffix.lower() not in IMAGE_FORMATS:
        raise InputError(f"output must end in {', '.join(IMAGE_FORMATS)}, got {path}")
    check_file_path(path)
    if is_among(path, inputs):
        raise InputError(f"output must not be an input, got {path} for both; choose another name")
    return path


def is_among(path: Path, others: Iterable[Path | None]) -> bool:
    """Return whether a path is that of another file, links followed as far as they lead; None is no file."""
    return _real_path(path) in {_real_path(other) for other in others if other is not None}


def _real_path(path: Path) -> str:
    try:
        return os.path.realpath(path)  # unlike `Path.resolve` takes links that lead in a circle
    except ValueError:  # a name that no file can have
        return os.path.abspath(path)  # noqa: PTH100 (the same for text)


def why_no_file(path: Path) -> str:
    """Return the kind of a path that is no plain file, in words."""
    if path.is_dir():
        return "a folder"
    return "no plain file" if path.exists() else "no such file"


def check_file_path(path: Path | None) -> None:
    """Check, before any work, that a file can be written to a path; None passes.

    Args:
        path: The output.

    Raises:
        InputError: A folder, a name that the disk does not take, or a folder that cannot be written or is a session's.
    """
    if path is None:
        return
    if _exists(path) and path.is_dir():
        raise InputError(f"output must be a file, got the folder {path}")
    check_output_folder(path.parent)


def check_page_path(path: Path | None) -> None:
    """Check, before any work, that an HTML page can be written to a path; None passes.

    Args:
        path: The output.

    Raises:
        InputError: Another suffix, or as `check_file_path`.
    """
    _check_suffix(path, "report", (".html", ".htm"))


def check_trace_path(path: Path | None, *inputs: Path | None) -> None:
    """Check, before any work, that a trace can be written to a path; None passes.

    Args:
        path: The output.
        inputs: Files that must not be overwritten.

    Raises:
        InputError: Another suffix, the path is an input, or as `check_file_path`.
    """
    _check_suffix(path, "trace", (".json",))
    if path is not None and is_among(path, inputs):
        raise InputError(f"trace must not be an input, got {path} for both; choose another name")
    if path is not None and path.name == SESSION_INDEX:
        raise InputError(f"trace must not be named as a session's index is, got {path}; choose another")


def _check_suffix(path: Path | None, what: str, suffixes: tuple[str, ...]) -> None:
    if path is not None and path.suffix.lower() not in suffixes:
        raise InputError(f"{what} must be a file that ends in {suffixes[0]}, got {path}")
    check_file_path(path)


def check_output_folder(folder: Path) -> Path:
    """Check, before any work, that outputs can be written to a folder, which need not exist yet.

    Args:
        folder: The folder.

    Returns:
        The folder.

    Raises:
        InputError: It cannot be written, or holds a session.
    """
    if _exists(folder / SESSION_INDEX):
        raise InputError(f"outputs must not be in a session's folder, got {folder}; choose another")
    return check_writable(folder)


def check_writable(folder: Path) -> Path:
    """Check that files can be written to a folder, which need not exist yet.

    Args:
        folder: The folder.

    Returns:
        The folder.

    Raises:
        InputError: It cannot be written.
    """
    parent = next(place for place in (folder.absolute(), *folder.absolute().parents) if _exists(place))
    try:
        with tempfile.TemporaryFile(dir=parent):  # permissions show neither read-only disks nor full ones
            return folder
    except OSError as error:
        raise InputError(f"output folder must be writable, got {parent} ({error.strerror}); choose another") from error


def _exists(path: Path) -> bool:
    """Return whether anything has this path, links to nowhere included. Raises InputError for impossible names."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"output must have a path that can be written, got {path} ({why}); choose another") from error
    return True


def write_json(value: object, path: Path) -> None:
    """Write a value as indented JSON; paths and enums as text."""
    write_file(path, lambda file: file.write(json.dumps(value, indent=2, default=str).encode() + b"\n"))


def write_text(text: str, path: Path) -> None:
    """Write text as UTF-8."""
    write_file(path, lambda file: file.write(text.encode()))


def write_bytes(data: bytes, path: Path) -> None:
    """Write bytes."""
    write_file(path, lambda file: file.write(data))


def write_file(path: Path, write: Callable[[IO[bytes]], T]) -> T:
    """Write a file through an unfinished copy beside it, so that a kill leaves the old contents or the new ones.

    Args:
        path: The file; its folder is created if missing.
        write: Writes the contents.

    Returns:
        What `write` returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.stem[:_MAX_STEM_LETTERS]}-", suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o666 & ~_umask())
        part.replace(path)
        _sync(path.parent)
        return result
    finally:
        part.unlink(missing_ok=True)


def remove_partial(folder: Path, names: Collection[str]) -> None:
    """Remove the unfinished copies that killed writes left in a folder.

    Args:
        folder: The folder.
        names: Names of the files that were written. None of them may be written at this time.
    """
    stems = {Path(name).stem[:_MAX_STEM_LETTERS] for name in names}
    for part in folder.glob(".*.part"):
        if part.name[1:].rpartition("-")[0] in stems:
            part.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Sync a folder's new names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting another; one thread at a time does."""
    with _READS_UMASK:
        mask = os.umask(0o077)
        os.umask(mask)
        return mask
