"""A session as one file, to keep and to take up again: a zip of its pictures, masks and index.

Knows files; neither pages nor models. A zip that comes back is believed in nothing.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.validation import label
from fisedit.errors import FisEditError, InputError, SessionError
from fisedit.storage import provenance
from fisedit.storage.files import write_bytes

MAX_BYTES, MAX_UNPACKED, MAX_FILES = 256 << 20, 512 << 20, 2_000

_MEMBER = re.compile(r"session\.json|\d{1,6}(\.mask|\.canvas)?\.(png|tif)|reference-[0-9a-f]{16}\.png")
_INDEX = "session.json"
_KEPT = ("version", "model", "dtype", "current", "results")


def pack(folder: Path) -> bytes:
    """A saved session as a zip, without the places of its models on this machine."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as packed:
        for path in sorted(folder.iterdir()):
            if _MEMBER.fullmatch(path.name):
                packed.writestr(path.name, _read_member(path))
    return file.getvalue()


def unpack(data: bytes, folder: Path, models: Sequence[str]) -> None:
    """Write what `pack` made into a new folder.

    Args:
        data: the zip's bytes.
        folder: is made.
        models: this machine's, which the index gets where it has their names.

    Raises:
        InputError: another file, or one too large. SessionError: a damaged index.
    """
    _unpack_files(data, folder)
    _name_local_models(folder / _INDEX, {provenance.model_name(model): model for model in models})


def _read_member(path: Path) -> bytes:
    """A file of a session as it may leave this machine: without the places of its model and adapters."""
    if path.name != _INDEX:
        return path.read_bytes()
    index = json.loads(path.read_bytes())
    return json.dumps(_without_sources(_rename_models(index, provenance.model_name)), indent=2).encode()


def _name_local_models(path: Path, models: Mapping[str, str]) -> None:
    """Let an index name this machine's models, where it has their names, and nothing else that could be loaded: a
    place or hub id that a zip tells becomes the name of a file that is nowhere."""
    try:
        index = json.loads(path.read_bytes())
        named = _rename_models(index, lambda name: models.get(name) or f"./{label(name)}")
        data = json.dumps(_without_sources(named)).encode()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SessionError("the saved session is damaged (session.json); save it again") from error
    write_bytes(data, path)


def _rename_models(index: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """An index with other names for its models, that of the session and those of its results."""
    results = [
        entry | ({"model": rename(entry["model"])} if "model" in entry else {}) for entry in index.get("results", ())
    ]
    return index | {"model": rename(index["model"]), "results": results}


def _without_sources(index: dict[str, Any]) -> dict[str, Any]:
    """What the results are, without what they were made with."""
    return {key: index[key] for key in _KEPT if key in index}


def _unpack_files(data: bytes, folder: Path) -> None:
    """The files of a saved session, and no others; nothing is believed of what the zip says."""
    if len(data) > MAX_BYTES:
        raise InputError(f"a saved session must have at most {MAX_BYTES >> 20} MiB, got {len(data) / 2**20:.0f}")
    for name, content in _iterate_members(data):
        write_bytes(content, folder / name)


def _iterate_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents. What writing them fails of is not the zip's fault, so it is done elsewhere."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            members = packed.infolist()
            if len(members) > MAX_FILES or not all(_MEMBER.fullmatch(member.filename) for member in members):
                raise InputError("a saved session must be a zip that was downloaded here, got one with other files")
            left = MAX_UNPACKED
            for member in members:
                with packed.open(member) as file:
                    content = file.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise InputError(f"a saved session must have at most {MAX_UNPACKED >> 20} MiB unpacked, got more")
                yield member.filename, content
    except FisEditError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise InputError("a saved session must be a zip that was downloaded here, got something else") from error
