"""Saves and loads sessions: images, masks, and one JSON file with prompts, seeds, lineage and parameters.

Cached features are not stored; an edit rebuilds them from the generation configs. Every file is complete or absent, and
the JSON is written last, so a session that can be read is complete. Knows results, no model.
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
from fisedit.storage.canvas import to_editable
from fisedit.storage.files import write_json
from fisedit.storage.image_metadata import Metadata
from fisedit.storage.images import write_image
from fisedit.values import LATENT_FACTOR, EditMask, EditScript, EditStats, MaskSource, make_generation_config

VERSION = 1
_INDEX = "session.json"


@dataclass(frozen=True, eq=False)
class SessionAssets:
    """What the results of a session refer to.

    Args:
        adapters: Path or hub id of an adapter -> its scale.
        references: Digest of a reference image -> the image.
    """

    adapters: Mapping[str, float]
    references: Mapping[str, Image.Image]


NO_ASSETS = SessionAssets({}, {})


def save(
    history: History,
    folder: Path,
    model: str,
    dtype: str,
    metadata_of: Callable[[EditResult], Metadata | None],
    saved_before: Collection[str] = (),
    assets: SessionAssets = NO_ASSETS,
    other_models: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write all results of a session.

    Args:
        history: The results.
        folder: The session's folder, created if missing; files of a former save are replaced one by one.
        model: Name or path of the model to load when the session is resumed.
        dtype: Precision to load it in.
        metadata_of: Metadata of a result's image file, or None.
        saved_before: Ids of the results that this session has written to the folder. They are not written again; those
            that are no longer in the history are removed.
        assets: Adapters and reference images of the results.
        other_models: Id of a result -> the model that made it, if it is not `model`.
    """
    current = history.current.id
    folder.mkdir(parents=True, exist_ok=True)
    for result in history:
        if result.id in saved_before:
            continue
        write_image(result.image, folder / f"{result.id}{_suffix(result.image)}", metadata_of(result))
        if result.painted is not None:
            write_image(result.painted, folder / f"{result.id}.canvas.png")
        write_image(Image.fromarray(result.mask.grid), folder / f"{result.id}.mask.png")
    for digest, picture in assets.references.items():
        write_image(picture, folder / f"reference-{digest}.png")
    index: dict[str, Any] = {"version": VERSION, "model": model, "dtype": dtype, "current": current}
    if assets.adapters:
        index["adapters"] = [{"source": source, "scale": scale} for source, scale in assets.adapters.items()]
    index["results"] = [
        _entry(result) | ({"model": other_models[result.id]} if result.id in other_models else {}) for result in history
    ]
    write_json(index, folder / _INDEX)
    for name in set(saved_before) - {result.id for result in history}:
        for ending in (".png", ".tif", ".canvas.png", ".mask.png"):
            (folder / f"{name}{ending}").unlink(missing_ok=True)


def read_index(folder: Path) -> dict[str, Any]:
    """The session's JSON.

    Args:
        folder: The session's folder.

    Raises:
        SessionError: There is no session, or one of another version, or a damaged one.
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


def read_other_models(folder: Path, index: dict[str, Any]) -> dict[str, str]:
    """Id of a result -> the model that made it, if it is not the session's.

    Args:
        folder: The session's folder.
        index: From `read_index`.

    Raises:
        SessionError: A damaged entry.
    """
    try:
        return {str(int(entry["id"])): str(entry["model"]) for entry in index["results"] if "model" in entry}
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, _INDEX) from error


def load(folder: Path, index: dict[str, Any], diff: Callable[[str, str, str], EditScript]) -> History:
    """Load the results of a session.

    Args:
        folder: The session's folder.
        index: From `read_index`.
        diff: (id of a result, prompt before, prompt after) -> its edit script.

    Raises:
        SessionError: A damaged or missing image, or an invalid entry.
    """
    history = History()
    for entry in index["results"]:
        try:
            history.add(_load_result(folder, entry, history, diff))
        except (FileNotFoundError, UnidentifiedImageError, OSError, SyntaxError) as error:
            raise _damaged(folder, f"a picture of result {entry.get('id')}") from error
        except (KeyError, TypeError, ValueError, FisEditError) as error:
            raise _damaged(folder, _INDEX) from error
    history.checkout(index["current"])
    return history


def load_assets(folder: Path, index: dict[str, Any]) -> SessionAssets:
    """Load the adapters' names and the reference images of a session.

    Args:
        folder: The session's folder.
        index: From `read_index`.

    Raises:
        SessionError: A damaged image or entry.
    """
    try:
        adapters = {str(one["source"]): float(one["scale"]) for one in index.get("adapters", ())}
        paths = {path.stem.removeprefix("reference-"): path for path in folder.glob("reference-*.png")}
        return SessionAssets(adapters, {digest: _load_reference(path) for digest, path in paths.items()})
    except (OSError, SyntaxError, KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, "its adapters or references") from error


def _load_reference(path: Path) -> Image.Image:
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


def _load_result(
    folder: Path, entry: dict[str, Any], history: History, diff: Callable[[str, str, str], EditScript]
) -> EditResult:
    name, parent = str(int(entry["id"])), entry["parent"]
    config = make_generation_config(**entry["recipe"])
    before = {r.id: r.prompt for r in history}[parent] if parent is not None else config.prompt
    cells = (config.width // LATENT_FACTOR, config.height // LATENT_FACTOR)
    grid = np.asarray(_load_picture(folder / f"{name}.mask.png", "1", cells))
    mask = EditMask(grid, MaskSource(entry["mask"]["source"]), entry["mask"]["confidence"])
    size, canvas = (config.width, config.height), folder / f"{name}.canvas.png"
    painted = _load_picture(canvas, "RGB", size) if canvas.exists() else None
    image = _load_original(folder, name) if painted else _load_picture(folder / f"{name}.png", "RGB", size)
    growth = tuple(entry["growth"])
    if growth and [type(cells) for cells in growth] != [int] * config.num_inference_steps:
        raise ValueError(f"growth must be a whole number for each step, got {growth}")
    structure, start = float(entry.get("structure", 0.0)), int(entry.get("start", 0))
    if not 0 <= start < config.num_inference_steps:
        raise ValueError(f"start must leave a step to run, got {start}")
    script, stats = diff(name, before, config.prompt), _parse_stats(entry["stats"])
    checked = bool(entry.get("checked", False))
    return EditResult(name, parent, config, image, mask, script, stats, growth, painted, structure, start, checked)


def _parse_stats(entry: dict[str, Any]) -> EditStats:
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return EditStats(**(entry | lists | {"mask_source": MaskSource(entry["mask_source"])}))


def _suffix(image: Image.Image) -> str:
    """The suffix of a format that stores the image without loss."""
    return ".tif" if image.mode == "CMYK" else ".png"


def _load_picture(path: Path, mode: str, size: tuple[int, int]) -> Image.Image:
    """An image of the model's size, or a mask."""
    with Image.open(path, formats=["PNG"]) as image:
        if image.size != size:
            raise OSError(f"{path.name} must have {size} pixels, got {image.size}")
        result = image.convert(mode)
        result.info = {}
        return result


def _load_original(folder: Path, name: str) -> Image.Image:
    """An image of another size or mode than its canvas."""
    path = folder / f"{name}.tif"
    with Image.open(path if path.exists() else folder / f"{name}.png", formats=["PNG", "TIFF"]) as image:
        return to_editable(image)


def _damaged(folder: Path, what: str) -> SessionError:
    return SessionError(f"the session in {folder} is damaged ({what}); restore it from a copy")
