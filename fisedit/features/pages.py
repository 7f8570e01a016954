"""Pages on disk: tensors in one safetensors file, whole or absent, compared with its digest whenever it is read.

A folder of pages belongs to a process that is alive. It goes with its owner and the last page. If the process was
killed, it goes when another process wants pages. Knows tensors, nothing about what they hold; imports torch when a page
is written or read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
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
        path: The path of its file.
        sha256: The SHA-256 of the file's bytes, in hexadecimal digits.
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


_FOLDER = re.compile(r"fisedit-\d+-\w{8}")
_FILE = re.compile(r"\d+\.safetensors")


def encode_page(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a page's file.

    Args:
        tensors: The tensors, of any names, on any device.
    """
    from safetensors.torch import save

    data: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return data


def default_folder() -> Path | None:
    """The folder in which processes have theirs; None where FISEDIT_PAGES=0 keeps pages off the disk.

    FISEDIT_PAGES names another one than the user's cache folder.
    """
    return user_cache_folder("FISEDIT_PAGES", "pages")


def free_page_bytes(place: Path | None = None) -> int:
    """Bytes of pages that a disk may take by default; 0 where pages are kept off disks.

    Args:
        place: on the disk; None for the default folder's.
    """
    default = default_folder()
    place = default if place is None else place
    if default is None or place is None:
        return 0
    while not place.exists():
        place = place.parent
    disk = shutil.disk_usage(place)
    return max(0, int(min(DISK_SHARE * disk.free, disk.free - FREE_SHARE * disk.total)))


class PageFolder:
    """The pages of this process: made when the first is written, removed with this object and its pages, or at the end
    of the process.

    Args:
        parent: the folder in which it is made.
        max_bytes: The bytes of all pages at most; None for `DISK_SHARE` of what is free when the first is written.
    """

    def __init__(self, parent: Path, max_bytes: int | None = None) -> None:
        self.parent, self.max_bytes = parent, max_bytes
        self.bytes = 0
        self._count = 0
        self._lock = Lock()
        self._folder: Path | None = None
        with suppress(OSError):
            sweep(parent)

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
            folder = Path(tempfile.mkdtemp(prefix=f"fisedit-{os.getpid()}-", dir=self.parent))
            descriptor = _lock(folder)
        finalize(self, _remove_folder, folder, descriptor, os.getpid())
        return folder

    def _remove(self, path: Path, size: int) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        self.bytes -= size


def sweep(parent: Path) -> None:
    """Remove the folders of pages whose processes are gone; nothing else that lies there.

    Args:
        parent: The parent of the folders.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    with _locked(parent):
        for folder in [path for path in parent.iterdir() if _FOLDER.fullmatch(path.name)]:
            try:
                descriptor = _lock(folder)
            except OSError:
                continue  # its process is alive
            _remove_pages(folder)
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
        _remove_pages(folder)
        os.close(descriptor)


def _remove_pages(folder: Path) -> None:
    """Remove the pages in a folder, and the folder if nothing else is in it."""
    with suppress(OSError):
        for path in folder.iterdir():
            if _FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        folder.rmdir()
