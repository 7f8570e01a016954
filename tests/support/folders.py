"""Folders of small pictures, and what is in a folder. Knows Pillow and nothing of fisedit."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

JOURNAL = ".fisedit-batch.jsonl"


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (64, 64)) -> Path:
    """Write a picture of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*reversed(size), 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def pictures(folder: Path, count: int = 3) -> Path:
    """Write so many pictures: 0.png, 1.png, ..."""
    for n in range(count):
        picture(folder / f"{n}.png", n)
    return folder


def half(path: Path, size: tuple[int, int] = (64, 64)) -> Path:
    """Write a mask of the left half."""
    pixels = np.zeros((size[1], size[0]), np.uint8)
    pixels[:, : size[0] // 2] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def tree(folder: Path) -> dict[str, str]:
    """Every file of a folder but the journal, with its SHA-256."""
    return _digests(folder, lambda path: path.name != JOURNAL)


def whole(folder: Path) -> dict[str, str]:
    """The same without the unfinished files that a kill may leave, which the next run removes."""
    return _digests(folder, lambda path: path.name != JOURNAL and path.suffix != ".part")


def _digests(folder: Path, wanted: Callable[[Path], bool]) -> dict[str, str]:
    """Name -> SHA-256 of the wanted files; the others are not opened, for a run may be writing them."""
    found = [path for path in folder.rglob("*") if wanted(path) and path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def claims(png: bytes, side: int) -> bytes:
    """A PNG whose header says that it has so many pixels across and down, with the right check sum."""
    header = png[12:16] + side.to_bytes(4, "big") * 2 + png[24:29]
    return png[:12] + header + zlib.crc32(header).to_bytes(4, "big") + png[33:]


def lines(folder: Path) -> list[dict]:
    """The journal's lines."""
    return [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]


def bomb(side: int) -> bytes:
    """A PNG of a few bytes whose header promises so many pixels each way."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")
