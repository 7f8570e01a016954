"""What an output depends on, as one SHA-256: the job's settings, the model's files, the inputs' bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from fisedit.batch.values import Item, Settings

_FREE = {"timeout", "local_files_only", "model"}
"""Settings that no pixel depends on, and the model's name, for which its content stands."""


def of_bytes(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def of_file(path: Path | None) -> str:
    """SHA-256 of a file's bytes; "" for None or where there is no file to read."""
    if path is None or not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def key(settings: Settings, model: str, item: Item, picture: str, mask: str) -> str:
    """SHA-256 over everything that decides an item's output.

    Args:
        model: the identity of its files. picture, mask: SHA-256 of the inputs' bytes, mask "" for none.
    """
    common = {name: value for name, value in asdict(settings).items() if name not in _FREE}
    said = [item.source_prompt, item.prompt, picture, mask, PurePosixPath(item.output).suffix.lower()]
    return of_bytes(json.dumps([common, model, said], sort_keys=True).encode())
