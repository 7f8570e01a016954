"""A session on disk: pictures, masks, and one JSON file with prompts, seeds, lineage and parameters.

What was recorded is not stored: it is rebuilt from the recipes when an edit needs it. Every file is whole or absent,
and the JSON comes last, so a session that can be read is complete. Knows results, no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from fisedit.errors import FisEditError, SessionError
from fisedit.history import EditResult, History
from fisedit.storage.files import write_image, write_json
from fisedit.storage.image_metadata import Metadata
from fisedit.storage.images import upright
from fisedit.values import LATENT_FACTOR, EditMask, EditScript, EditStats, MaskSource, make_generation_config

VERSION = 1
_INDEX = "session.json"


@dataclass(frozen=True, eq=False)
class Looks:
    """Adapters, by where they came from, with their scales; and reference pictures, by their digests."""

    adapters: Mapping[str, float]
    references: Mapping[str, Image.Image]


NOBODYS = Looks({}, {})


def save(
    history: History,
    folder: Path,
    model: str,
    dtype: str,
    made: Callable[[EditResult], Metadata | None],
    before: Collection[str] = (),
    looks: Looks = NOBODYS,
    others: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write all results of a session.

    Args:
        folder: made if it is not there; files of a former save are replaced one by one.
        model, dtype: what to load when the session is resumed. made: what a picture tells of its making.
        before: ids of the results that this session wrote there before; those that it has no more are removed.
        looks: what its results refer to. others: ids of results -> the model that made them, where it was another.
    """
    current = history.current.id
    folder.mkdir(parents=True, exist_ok=True)
    for result in history:
        if result.id in before:
            continue
        write_image(result.image, folder / f"{result.id}{_ending(result.image)}", made(result))
        if result.painted is not None:
            write_image(result.painted, folder / f"{result.id}.canvas.png")
        write_image(Image.fromarray(result.mask.grid), folder / f"{result.id}.mask.png")
    for digest, picture in looks.references.items():
        write_image(picture, folder / f"reference-{digest}.png")
    index: dict[str, Any] = {"version": VERSION, "model": model, "dtype": dtype, "current": current}
    if looks.adapters:
        index["adapters"] = [{"source": source, "scale": scale} for source, scale in looks.adapters.items()]
    index["results"] = [
        _entry(result) | ({"model": others[result.id]} if result.id in others else {}) for result in history
    ]
    write_json(index, folder / _INDEX)
    for name in set(before) - {result.id for result in history}:
        for ending in (".png", ".tif", ".canvas.png", ".mask.png"):
            (folder / f"{name}{ending}").unlink(missing_ok=True)


def read_index(folder: Path) -> dict[str, Any]:
    """The session's JSON.

    Raises:
        SessionError: there is no session, or one of another version, or a damaged one.
    """
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        version, names, results = index["version"], [index[k] for k in ("model", "dtype", "current")], index["results"]
        whole = isinstance(results, list) and all(isinstance(name, str) for name in names)
    except FileNotFoundError as error:
        raise SessionError(f"there is no session in {folder} (no {_INDEX}); give a folder written by save") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, _INDEX) from error
    if version != VERSION:
        raise SessionError(f"session in {folder} must be of version {VERSION}, got {version}; use a newer fisedit")
    if not whole:
        raise _damaged(folder, _INDEX)
    return dict(index)


def others(folder: Path, index: dict[str, Any]) -> dict[str, str]:
    """Ids of results -> the model that made them, where it is not the session's. Raises SessionError: damaged."""
    try:
        return {str(int(entry["id"])): str(entry["model"]) for entry in index["results"] if "model" in entry}
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, _INDEX) from error


def load(folder: Path, index: dict[str, Any], diff: Callable[[str, str, str], EditScript]) -> History:
    """The results of a session.

    Args:
        index: from `read_index`. diff: makes the script of a result's id, between two prompts.

    Raises:
        SessionError: a damaged or missing picture, or an entry that does not fit.
    """
    history = History()
    for entry in index["results"]:
        try:
            history.add(_result(folder, entry, history, diff))
        except (FileNotFoundError, UnidentifiedImageError, OSError, SyntaxError) as error:
            raise _damaged(folder, f"a picture of result {entry.get('id')}") from error
        except (KeyError, TypeError, ValueError, FisEditError) as error:
            raise _damaged(folder, _INDEX) from error
    history.checkout(index["current"])
    return history


def load_looks(folder: Path, index: dict[str, Any]) -> Looks:
    """What a session's results refer to.

    Raises:
        SessionError: a damaged picture or entry.
    """
    try:
        adapters = {str(one["source"]): float(one["scale"]) for one in index.get("adapters", ())}
        paths = {path.stem.removeprefix("reference-"): path for path in folder.glob("reference-*.png")}
        return Looks(adapters, {digest: _opened(path) for digest, path in paths.items()})
    except (OSError, SyntaxError, KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, "its adapters or references") from error


def _opened(path: Path) -> Image.Image:
    with Image.open(path, formats=["PNG"]) as image:
        return image.convert("RGB")


def _entry(result: EditResult) -> dict[str, Any]:
    return {
        "id": result.id,
        "parent": result.parent,
        "recipe": asdict(result.config),
        "change": str(result.diff),
        "growth": result.growth,
        "structure": result.structure,
        "start": result.start,
        "checked": result.checked,
        "mask": {"source": result.mask.source, "confidence": result.mask.confidence},
        "stats": result.stats.as_dict(),
    }


def _result(
    folder: Path, entry: dict[str, Any], history: History, diff: Callable[[str, str, str], EditScript]
) -> EditResult:
    name, parent = str(int(entry["id"])), entry["parent"]
    config = make_generation_config(**entry["recipe"])
    before = {r.id: r.prompt for r in history}[parent] if parent is not None else config.prompt
    cells = (config.width // LATENT_FACTOR, config.height // LATENT_FACTOR)
    grid = np.asarray(_picture(folder / f"{name}.mask.png", "1", cells))
    mask = EditMask(grid, MaskSource(entry["mask"]["source"]), entry["mask"]["confidence"])
    size, aside = (config.width, config.height), folder / f"{name}.canvas.png"
    painted = _picture(aside, "RGB", size) if aside.exists() else None
    image = _original(folder, name) if painted else _picture(folder / f"{name}.png", "RGB", size)
    growth = tuple(entry["growth"])
    if growth and [type(cells) for cells in growth] != [int] * config.num_inference_steps:
        raise ValueError(f"growth must be a whole number for each step, got {growth}")
    structure, start = float(entry.get("structure", 0.0)), int(entry.get("start", 0))
    if not 0 <= start < config.num_inference_steps:
        raise ValueError(f"start must leave a step to run, got {start}")
    script, stats = diff(name, before, config.prompt), _stats(entry["stats"])
    checked = bool(entry.get("checked", False))
    return EditResult(name, parent, config, image, mask, script, stats, growth, painted, structure, start, checked)


def _stats(entry: dict[str, Any]) -> EditStats:
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return EditStats(**(entry | lists | {"mask_source": MaskSource(entry["mask_source"])}))


def _ending(image: Image.Image) -> str:
    """Of a format that holds the picture as it is."""
    return ".tif" if image.mode == "CMYK" else ".png"


def _picture(path: Path, mode: str, size: tuple[int, int]) -> Image.Image:
    """A picture that the model painted, or a mask."""
    with Image.open(path, formats=["PNG"]) as image:
        if image.size != size:
            raise OSError(f"{path.name} must have {size} pixels, got {image.size}")
        result = image.convert(mode)
        result.info = {}
        return result


def _original(folder: Path, name: str) -> Image.Image:
    """A picture that is larger, smaller or of another kind than what the model painted of it."""
    path = folder / f"{name}.tif"
    with Image.open(path if path.exists() else folder / f"{name}.png", formats=["PNG", "TIFF"]) as image:
        return upright(image)


def _damaged(folder: Path, what: str) -> SessionError:
    return SessionError(f"the session in {folder} is damaged ({what}); restore it from a copy")
