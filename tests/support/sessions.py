"""Saved sessions for tests: found, compared and damaged without a model."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fisedit.storage.session_index import encode_index, file_name
from fisedit.storage.session_store import SessionContents, SessionStore
from fisedit.values import EditKind, EditScript

OLD = Path(__file__).parents[1] / "fixtures" / "v0.1.0" / "sessions"
"""Sessions of version 1, which have no digests."""


def diff(model, before, after):
    """Stands for a model's: nothing is known of its tokens."""
    return EditScript(before, after, EditKind.IDENTICAL, ())


def saved(folder, name="generated"):
    """A copy of an old session, saved by this version."""
    save(SessionStore(OLD / name).load(diff), SessionStore(folder))
    return folder


def save(loaded, store, **options):
    index = loaded.index
    store.save(SessionContents(loaded.history, index.model, index.dtype, loaded.assets), lambda result: None, **options)


def copied(name, folder):
    """A copy of an old session as it is."""
    return Path(shutil.copytree(OLD / name, folder))


def contents(loaded):
    """All that a session holds, to compare."""
    index = loaded.index
    pictures = {digest: picture.tobytes() for digest, picture in loaded.assets.references.items()}
    head = (index.model, index.dtype, index.current, dict(loaded.assets.adapters), pictures)
    return head, [_result(result) for result in loaded.history]


def _result(result):
    images = [
        None if image is None else (image.mode, image.size, image.tobytes()) for image in (result.image, result.painted)
    ]
    mask = (np.asarray(result.mask.grid).tobytes(), result.mask.source, result.mask.confidence)
    rest = (result.growth, result.structure, result.start, result.checked)
    return result.id, result.parent, asdict(result.config), images, mask, result.stats.as_dict(), rest


def files(folder):
    """Name -> bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def file_of(folder, result, ending=".png"):
    """A result's file."""
    index = json.loads((folder / "session.json").read_text())
    (entry,) = (entry for entry in index["results"] if entry["id"] == str(result))
    return folder / file_name(entry["id"], ending, entry["files"][ending])


def change_index(path, change):
    """Change the JSON, and let its digest be that of the change."""
    index = json.loads(path.read_text())
    change(index)
    path.write_bytes(
        encode_index(index) if isinstance(index, dict) and "sha256" in index else json.dumps(index).encode()
    )
