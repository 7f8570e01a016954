"""A session as one file, to download and to open again: a zip of its pictures, masks and index.

Knows files; neither pages nor models. An uploaded zip is untrusted: sizes, names and every field of its
index are checked before anything of it is written, decoded or built.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.validation import MAX_PIXELS, MAX_PROMPT_CHARACTERS, MAX_RESULTS, label
from fisedit.errors import FisEditError, InputError, SessionError
from fisedit.metadata import provenance
from fisedit.sessions.index import Limits, damaged, decode_index, encode_index
from fisedit.storage.files import SESSION_INDEX, write_bytes
from fisedit.storage.images import read_size

MAX_BYTES, MAX_UNPACKED, MAX_FILES = 256 << 20, 512 << 20, 2_000
MAX_DECODED_PIXELS = 350_000_000
"""Pixels of all pictures together, which take a gigabyte in RGB."""

LIMITS = Limits(index_bytes=8 << 20, results=MAX_RESULTS, characters=MAX_PROMPT_CHARACTERS)

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_OTHER_FILE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,  # of a header that is cut
    RuntimeError,  # encrypted, or compressed in a way that zipfile does not know
    EOFError,
    OSError,
    ValueError,
    LookupError,
    OverflowError,
)
"""The errors that zipfile raises for damaged and forged files."""


ARCHIVE = "the saved file"
"""Name of an uploaded session in errors."""

_NAME = re.compile(
    r"session\.json|\d{1,9}-[0-9a-f]{16}(\.mask|\.canvas|\.pixels)?\.(png|tif)|reference-[0-9a-f]{16}-[0-9a-f]{16}\.png"
)


def pack(folder: Path) -> bytes:
    """A saved session as a zip, without the places of its models and adapters on this machine.

    Raises:
        SessionError: a session that could not be opened again, as it is damaged or too large.
    """
    found, index = decode_index((folder / SESSION_INDEX).read_bytes(), "this app")
    members = {name: (folder / name).read_bytes() for name in index.files()}
    members[SESSION_INDEX] = _with_models(found, provenance.model_name)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as packed:
        for name in sorted(members):
            packed.writestr(name, members[name])
    try:
        _read_members(file.getvalue())
    except FisEditError as error:
        raise SessionError(f"it could not be opened again: {error}; delete some pictures") from error
    return file.getvalue()


def unpack(data: bytes, folder: Path, models: Sequence[str]) -> None:
    """Write what `pack` made into a new folder.

    Args:
        data: the zip's bytes.
        folder: is made.
        models: names of this machine's models, which replace models of the same names in the index. Other paths and
            hub ids of the zip become names of files that do not exist.

    Raises:
        InputError: another file, or one too large. SessionError: a damaged session.
    """
    here = {provenance.model_name(model): model for model in models}
    found, members = _read_members(data)
    members[SESSION_INDEX] = _with_models(found, lambda name: here.get(name) or f"./{label(name)}")
    for name, content in members.items():
        write_bytes(content, folder / name)


def _with_models(index: dict[str, Any], rename: Callable[[str], str]) -> bytes:
    """An index with other names for its models, that of the session and those of its results, and without adapters."""
    results = [entry | ({"model": rename(entry["model"])} if "model" in entry else {}) for entry in index["results"]]
    named = index | {"model": rename(index["model"]), "results": results}
    named.pop("adapters", None)
    return encode_index(named)


def _read_members(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The JSON and the files of a saved session, and no others."""
    _check_size("MiB", len(data) >> 20, MAX_BYTES >> 20)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            sizes = _sizes(packed.infolist())
            found, index = decode_index(_read(packed, SESSION_INDEX, LIMITS.index_bytes), ARCHIVE, LIMITS)
            if (expected := index.files()).keys() != sizes.keys() - {SESSION_INDEX}:
                raise InputError("a saved session must be a zip that was downloaded here, got one with other files")
            members = {name: _read(packed, name, sizes[name]) for name in expected}
    except FisEditError:
        raise
    except _OTHER_FILE as error:
        raise InputError("a saved session must be a zip that was downloaded here, got something else") from error
    _check_pictures(members, expected)
    return found, members


def _sizes(members: Sequence[zipfile.ZipInfo]) -> dict[str, int]:
    """Name -> size in bytes of the files by the zip's directory; `_read` enforces it."""
    sizes = {member.filename: member.file_size for member in members}
    usual = all(_NAME.fullmatch(member.filename) and member.compress_type in _METHODS for member in members)
    if len(members) > MAX_FILES or len(sizes) < len(members) or not usual or SESSION_INDEX not in sizes:
        raise InputError("a saved session must be a zip that was downloaded here, got one with other files")
    _check_size("MiB unpacked", sum(sizes.values()) >> 20, MAX_UNPACKED >> 20)
    return sizes


def _read(packed: zipfile.ZipFile, name: str, most: int) -> bytes:
    with packed.open(name) as file:
        content = file.read(most + 1)
    _check_size(f"bytes in {name}", len(content), most)
    return content


def _check_pictures(members: Mapping[str, bytes], digests: Mapping[str, str]) -> None:
    """Digests, and sizes by the pictures' headers: nothing is decoded."""
    total = 0
    for name, content in members.items():
        if hashlib.sha256(content).hexdigest() != digests[name]:
            raise damaged(ARCHIVE, name)
        width, height = read_size(content, name, ("PNG", "TIFF"))
        _check_size(f"million pixels in {name}", width * height // 10**6, MAX_PIXELS // 10**6)
        total += width * height
    _check_size("million pixels in all pictures", total // 10**6, MAX_DECODED_PIXELS // 10**6)


def _check_size(what: str, got: int, most: int) -> None:
    if got > most:
        raise InputError(f"a saved session must have at most {most} {what}, got {got}")
