"""Pages on disk: tensors in one safetensors file, whole or absent, compared with its digest whenever it is read.

A folder of pages belongs to a process that is alive: it goes with its owner, and at the next start of any process if
that was killed. Knows tensors, nothing about what they hold; torch is imported when a page is written or read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from weakref import finalize

from fisedit.errors import PageError
from fisedit.models.paths import user_cache_folder

if TYPE_CHECKING:
    from torch import Tensor

FREE_SHARE = 0.1
"""Share of a disk that pages never take."""

DISK_SHARE = 0.25
"""Share of what is free on a disk that pages take by default."""


@dataclass(frozen=True)
class Page:
    """A page that was written.

    Args:
        path: of its file.
        sha256: of the file's bytes, in hexadecimal digits.
    """

    path: Path
    sha256: str

    def read(self) -> dict[str, Tensor]:
        """The page's tensors.

        Raises:
            PageError: the file is gone, cannot be read, or is damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            if not self.path.is_file():  # a pipe or a device would never end
                raise FileNotFoundError(errno.ENOENT, "no file")
            data = self.path.read_bytes()
        except OSError as error:
            raise PageError(f"recorded features cannot be read ({self.path.name}: {error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise PageError(f"recorded features are damaged ({self.path.name})")
        try:
            tensors: dict[str, Tensor] = load(data)
        except SafetensorError as error:
            raise PageError(f"recorded features are damaged ({self.path.name})") from error
        return tensors


def encode_page(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a page's file.

    Args:
        tensors: of any names, on any device.
    """
    from safetensors.torch import save

    data: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return data


def default_folder() -> Path | None:
    """The folder in which processes have theirs; None where FISEDIT_PAGES=0 keeps pages off the disk.

    FISEDIT_PAGES names another one than the user's cache folder.
    """
    return user_cache_folder("FISEDIT_PAGES", "pages")


def free_page_bytes() -> int:
    """Bytes of pages that the default folder's disk may take by default; 0 where pages are kept off it."""
    place = default_folder()
    while place is not None and not place.exists():
        place = place.parent
    return 0 if place is None else int(DISK_SHARE * shutil.disk_usage(place).free)


class PageFolder:
    """The pages of this process: made when the first is written, removed when this object goes or the process ends.

    Args:
        parent: the folder in which it is made.
        max_bytes: of all pages; None for `DISK_SHARE` of what is free when the first is written.
    """

    def __init__(self, parent: Path, max_bytes: int | None = None) -> None:
        self.parent, self.max_bytes = parent, max_bytes
        self.bytes = 0
        self._count = 0
        self._lock = Lock()
        self._folder: Path | None = None

    def write(self, tensors: Mapping[str, Tensor]) -> Page:
        """Write a page, which is removed when its last user is gone.

        Raises:
            OSError: it cannot be written, or there is no room for it; nothing of it stays.
        """
        data = encode_page(tensors)
        with self._lock:
            folder = self._folder = self._folder or self._make()
            self._check_room(folder, len(data))
            self._count += 1
            self.bytes += len(data)
            path = folder / f"{self._count}.safetensors"
        try:
            path.write_bytes(data)
        except BaseException:
            self._remove(path, len(data))
            raise
        page = Page(path, hashlib.sha256(data).hexdigest())
        finalize(page, self._remove, path, len(data)).atexit = False
        return page

    def _check_room(self, folder: Path, size: int) -> None:
        disk = shutil.disk_usage(folder)
        if self.max_bytes is None:
            self.max_bytes = int(DISK_SHARE * disk.free)
        if self.bytes + size > self.max_bytes or disk.free - size < FREE_SHARE * disk.total:
            raise OSError(f"no room for pages: {self.bytes / 1e9:.1f} GB are on disk, {disk.free / 1e9:.1f} GB free")

    def _make(self) -> Path:
        """The folder, locked for as long as this process lives."""
        self.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.parent):
            sweep(self.parent)
            folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self.parent))
            descriptor = _lock(folder)
        finalize(self, _remove_folder, folder, descriptor, os.getpid())
        return folder

    def _remove(self, path: Path, size: int) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        self.bytes -= size


def sweep(parent: Path) -> None:
    """Remove the folders whose processes are gone.

    Args:
        parent: of the folders, which no other process may be adding to.
    """
    for folder in parent.iterdir():
        try:
            descriptor = _lock(folder)
        except OSError:
            continue  # its process is alive, or it is none of ours
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _lock(folder: Path) -> int:
    """A descriptor that locks a folder until it is closed. Raises OSError: another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let no other process make or remove folders during the block."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_folder(folder: Path, descriptor: int, owner: int) -> None:
    """Remove a folder with its pages; a forked process leaves it to its owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
