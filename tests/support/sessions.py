"""Saved sessions for tests: found, compared and damaged without a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from fisedit.errors import SessionError
from fisedit.sessions.files import file_name
from fisedit.sessions.index import encode_index
from fisedit.sessions.store import SessionContents, SessionStore
from fisedit.values import EditKind, EditScript

STORED = Path(__file__).parents[1] / "fixtures" / "sessions"
NAMES = ("generated", "opened", "look")


def diff(model, before, after):
    """Stands for a model's: nothing is known of its tokens."""
    return EditScript(before, after, EditKind.IDENTICAL, ())


def saved(folder, name="generated"):
    """A copy of a stored session, saved by this version."""
    save(SessionStore(STORED / name).load(diff), SessionStore(folder))
    return folder


def save(loaded, store, pages=None, **options):
    """Save what was loaded, with pages of results if some are given: id -> their bytes."""
    index, returning = (
        loaded.index,
        {result: [partial(bytes, page) for page in each] for result, each in (pages or {}).items()},
    )
    saved = SessionContents(loaded.history, index.model, index.dtype, loaded.assets, pages=returning)
    store.save(saved, lambda result: None, **options)


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
    rim = None if result.run.rim is None else result.run.rim.tobytes()
    rest = (result.run.growth, result.run.structure, result.run.start, result.run.checked, rim)
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
    path.write_bytes(encode_index(index))


def entry(**changes):
    return lambda index: index["results"][1].update(changes)


def stats(**changes):
    return lambda index: index["results"][1]["stats"].update(changes)


def settings(**changes):
    return lambda index: index["results"][1]["recipe"].update(changes)


INDEX_CHANGES = {
    "growth of 1e9": entry(growth=[10**9] * 8),
    "growth of 2^70": entry(growth=[2**70] * 8),
    "growth below 0": entry(growth=[-1] * 8),
    "growth of floats": entry(growth=[1.0] * 8),
    "structure NaN": entry(structure=float("nan")),
    "structure infinite": entry(structure=float("inf")),
    "structure 1e308": entry(structure=1e308),
    "structure of text": entry(structure="1"),
    "start after the end": entry(start=8),
    "start below 0": entry(start=-1),
    "start of 2^70": entry(start=2**70),
    "checked of another kind": entry(checked=2),
    "an id of 400 digits": entry(id="1" * 400),
    "an id with a zero before": entry(id="01"),
    "an id in other digits": entry(id="١"),
    "an id twice": entry(id="0"),
    "its own parent": entry(parent="1"),
    "a later parent": entry(parent="3"),
    "an unknown field": entry(more=1),
    "a mask's source of another kind": entry(mask={"source": [], "confidence": 1.0}),
    "a mask's confidence of text": entry(mask={"source": "given", "confidence": "1"}),
    "a mask's confidence NaN": entry(mask={"source": "given", "confidence": float("nan")}),
    "another size than its parent": settings(width=64, height=64),
    "other steps than its parent": settings(num_inference_steps=4),
    "a seed that is none": settings(seed=-1),
    "a prompt of another kind": settings(prompt=["a cat"]),
    "a prompt that is no Unicode": settings(prompt="a \ud800 cat"),
    "a prompt of a million letters": settings(prompt="a" * 10**6),
    "LoRAs of another kind": settings(loras=[[1, "x"]]),
    "a LoRA's scale NaN": settings(loras=[["x", float("nan")]]),
    "a look of another kind": settings(like=[{"adapter": 1, "scale": 1.0, "reference": "x"}]),
    "10,000 looks": settings(like=[{"adapter": "x", "scale": 1.0, "reference": "x"}] * 10_000),
    "seconds empty": stats(seconds={}),
    "seconds of text": stats(seconds={"total": "1"}),
    "seconds NaN": stats(seconds={"total": float("nan")}),
    "no seconds at all": stats(seconds={"total": 0}),
    "seconds of another kind": stats(seconds=[]),
    "99 shared steps": stats(steps_shared=99),
    "notes that are numbers": stats(notes=[1, 2]),
    "notes of another kind": stats(notes={}),
    "rows of text": stats(active_rows=["a"]),
    "no rows for a growth": stats(active_rows=[]),
    "evaluations of text": stats(unet_evaluations_dense="8"),
    "evaluations below 0": stats(unet_evaluations_sparse=-1),
    "operations of 2^70": stats(macs=2**70),
    "operations of text": stats(macs_dense="x"),
    "an area of 2": stats(mask_area=2),
    "a fallback of another kind": stats(fallback=None),
    "bytes of another kind": stats(recorded_bytes=[]),
    "true for a number": stats(macs=True),
    "a dtype of another kind": lambda index: index.update(dtype=7),
    "a model of another kind": lambda index: index.update(model=["demo"]),
    "adapters of another kind": lambda index: index.update(adapters=[7]),
    "an adapter's scale of 1e308": lambda index: index.update(adapters=[{"source": "x", "scale": 1e308}]),
    "an unknown field at the top": lambda index: index.update(more={}),
    "version true": lambda index: index.update(version=True),
    "10,004 results": lambda index: index.update(results=index["results"] * 2501),
    "files with a path": lambda index: index["results"][1].update(files={".png": "../" * 16}),
    "files of another kind": lambda index: index["results"][1].update(files={"/x": "0" * 64}),
    "references with a path": lambda index: index.update(references={"../0123456789abc": "0" * 64}),
}
"""Name -> a change of a session's index that no reader may believe."""


def load(folder):
    return SessionStore(folder).load(diff)


def written_again(parts, folder):
    folder.mkdir()
    for name, data in parts.items():
        (folder / name).write_bytes(data)
    return folder


def one_line(error):
    return "\n" not in str(error) and len(str(error)) < 400


def refused(folder):
    """Why a session is refused; "" where it is not."""
    try:
        load(folder)
    except SessionError as error:
        return str(error) if one_line(error) else ""
    return ""
