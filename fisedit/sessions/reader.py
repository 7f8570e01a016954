"""Reads a session's folder: every file is compared with its digest, and an image's size with its config's.

Knows results, no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from fisedit.errors import InputError, SessionError
from fisedit.history import EditResult, History, SessionAssets
from fisedit.metadata.cell_runs import is_rim
from fisedit.sessions.files import CANVAS_ENDING, IMAGE_ENDINGS, MASK_ENDING, PIXELS_ENDING, file_name
from fisedit.sessions.index import ResultEntry, SessionIndex, damaged, decode_index
from fisedit.storage.canvas import to_editable
from fisedit.storage.files import SESSION_INDEX
from fisedit.storage.images import decode, read_bytes, read_size
from fisedit.values import LATENT_FACTOR, EditMask, EditScript, soft_levels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.values import Box

Diff = Callable[[str, str, str], EditScript]
"""(model, prompt before, prompt after) -> what changes."""

_ATTEMPTS = 3


@dataclass(frozen=True, eq=False)
class LoadedSession:
    """The loaded results, with their assets and index.

    Args:
        history: The results.
        assets: Adapters and reference images of the results.
        index: The index that it was loaded by.
    """

    history: History
    assets: SessionAssets
    index: SessionIndex


class SessionReader:
    """Reads one session's folder.

    Args:
        folder: The folder.
        name: What errors call it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def read_index(self) -> SessionIndex:
        """The index of the folder. Raises SessionError as `load`."""
        return decode_index(self._read(SESSION_INDEX), self._name)[1]

    def load(self, diff: Diff) -> LoadedSession:
        """Load everything.

        Args:
            diff: What changes from one prompt to another.

        Raises:
            SessionError: There is no session, or one of another version, or a damaged one.
        """
        for _ in range(_ATTEMPTS):
            index = self.read_index()
            try:
                return LoadedSession(self._load_history(index, diff), self._load_assets(index), index)
            except SessionError as error:
                failure = error
            if self.read_index().digest == index.digest:
                break  # else another run saved meanwhile, and what it replaced is gone
        raise failure

    def _read(self, name: str, sha256: str = "") -> bytes:
        """The bytes of a file, which must have a digest."""
        try:
            data = read_bytes(self._folder / name)
        except FileNotFoundError as error:
            if name == SESSION_INDEX:
                raise SessionError(
                    f"there is no session in {self._name} (no {name}); give a folder written by save"
                ) from error
            raise damaged(self._name, f"no {name}") from error
        except OSError as error:
            raise SessionError(f"the session in {self._name} cannot be read ({name}: {error.strerror})") from error
        except InputError as error:
            raise damaged(self._name, name) from error
        if sha256 and hashlib.sha256(data).hexdigest() != sha256:
            raise damaged(self._name, name)
        return data

    def _load_history(self, index: SessionIndex, diff: Diff) -> History:
        history = History()
        for entry in index.results:
            parent = None if entry.parent is None else history.find(entry.parent)
            try:
                history.add(self._load_result(entry, parent, diff))
            except InputError as error:
                raise damaged(self._name, f"a picture of result {entry.id}") from error
        history.checkout(index.current)
        return history

    def _load_result(self, entry: ResultEntry, parent: EditResult | None, diff: Diff) -> EditResult:
        config = entry.config
        read = {end: self._read(file_name(entry.id, end, sha256), sha256) for end, sha256 in entry.files.items()}
        cells = (config.width // LATENT_FACTOR, config.height // LATENT_FACTOR)
        levels = np.asarray(_decode_sized(read[MASK_ENDING], "L", cells))
        image, painted = _decode_pictures(read, (config.width, config.height))
        if parent is not None and image.size != parent.size:
            raise InputError(f"the picture must have its parent's size, got {image.size}")
        if config.crop and (config.crop[2] > image.width or config.crop[3] > image.height or painted is None):
            raise InputError(f"the part {config.crop} must lie on the picture, got {image.size}")
        is_hard = soft_levels(levels) is None
        if (rim := entry.run.rim) is not None and not (parent is not None and is_hard and is_rim(rim, levels > 0)):
            raise InputError("a rim must be a part of an edit's mask")
        return EditResult(
            entry.id,
            entry.parent,
            config,
            image,
            EditMask(
                levels > 0,
                entry.mask_source,
                entry.mask_confidence,
                levels=soft_levels(levels),
                pixels=_decode_pixels(read.get(PIXELS_ENDING), config.crop or (0, 0, *image.size)),
            ),
            diff(entry.model, parent.prompt if parent else config.prompt, config.prompt),
            entry.stats,
            entry.run,
            painted,
            entry.extends,
        )

    def _load_assets(self, index: SessionIndex) -> SessionAssets:
        try:
            images = {digest: self._load_reference(digest, sha256) for digest, sha256 in index.references.items()}
        except InputError as error:
            raise damaged(self._name, "a reference") from error
        return SessionAssets(index.adapters, images)

    def _load_reference(self, digest: str, sha256: str) -> Image.Image:
        data = self._read(file_name(f"reference-{digest}", ".png", sha256), sha256)
        return decode(data, formats=("PNG",)).image.convert("RGB")


def _decode_pictures(read: Mapping[str, bytes], size: tuple[int, int]) -> tuple[Image.Image, Image.Image | None]:
    """A result's picture, and its canvas where that is another."""
    data = next(read[ending] for ending in IMAGE_ENDINGS if ending in read)
    if CANVAS_ENDING not in read:
        return _decode_sized(data, "RGB", size), None
    read_size(data)
    image = to_editable(decode(data, formats=("PNG", "TIFF")).image)
    return image, _decode_sized(read[CANVAS_ENDING], "RGB", size)


def _decode_pixels(data: bytes | None, part: Box) -> NDArray[np.uint8] | None:
    """The pixels of a mask of a part of a picture; None where there is no file of them."""
    left, top, right, bottom = part
    return None if data is None else np.asarray(_decode_sized(data, "L", (right - left, bottom - top)))


def _decode_sized(data: bytes, mode: str, size: tuple[int, int]) -> Image.Image:
    """An image of the model's size, or a mask."""
    if (found := read_size(data, formats=("PNG",))) != size:
        raise InputError(f"the image must have {size} pixels, got {found}")
    result = decode(data, formats=("PNG",)).image.convert(mode)
    result.info = {}
    return result
