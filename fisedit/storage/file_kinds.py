"""Tells by its first bytes what image a file is. Knows no image library, and opens nothing but plain files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_HEAD = 32
_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
)
_OTHER_STARTS = (
    *(
        b"8BPS",
        b"%!PS-Adobe",
        b"%PDF-",
        b"<svg",
        b"\xff\x0a",
        b"\0\0\0\x0cJXL ",
        b"\0\0\0\x0cjP  ",
        b"\0\0\1\0",
        b"DDS ",
    ),
    *(b"v/1\x01", b"qoif"),
)
_OTHER_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"mif1", b"msf1", b"avif", b"avis", b"crx ")
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
OTHER = "other"
"""The kind of images that are not read here."""


def file_kind(path: Path) -> str:
    """Pillow's name of a plain file's image format, `OTHER` for an image of another, "" for what is none.

    Args:
        path: The file; a pipe or a device is not opened.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return ""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a pipe by now
        with os.fdopen(descriptor, "rb") as file:
            return _kind(file.read(_HEAD) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b"")
    except OSError:
        return ""


def _kind(head: bytes) -> str:
    for start, kind in _STARTS:
        if head.startswith(start):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return "BMP"
    is_other = head.startswith(_OTHER_STARTS) or (head[4:8] == b"ftyp" and head[8:12] in _OTHER_BRANDS)
    return OTHER if is_other else ""
