"""A session on disk: images, masks, and one JSON file with prompts, seeds, lineage and parameters.

Recorded features are stored as pages where that is asked for. Without them, or where they are damaged, an edit rebuilds
them from the generation configs. Files are named by their contents and never written over; the JSON, which has the
digest of every file, is replaced last. So a session is the old one or the new one, whole, wherever a save ends. Knows
results, no model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from PIL import Image

from fisedit.errors import InputError, SessionError
from fisedit.features.pages import Page
from fisedit.history import NO_ASSETS, EditResult, History, SessionAssets
from fisedit.metadata.image_metadata import Metadata
from fisedit.sessions import index as session_index
from fisedit.sessions.files import (
    CANVAS_ENDING,
    MASK_ENDING,
    PAGE_ENDING,
    PIXELS_ENDING,
    file_name,
    is_page_name,
    page_name,
)
from fisedit.sessions.folder import lock, remove_unfinished
from fisedit.sessions.index import LIMITS, ResultEntry, SessionIndex, decode_index, encode_index
from fisedit.sessions.reader import Diff, LoadedSession, SessionReader
from fisedit.storage.files import SESSION_INDEX, write_bytes
from fisedit.storage.images import encode, read_bytes


@dataclass(frozen=True, eq=False)
class SessionContents:
    """The contents of a session that are saved.

    Args:
        history: The results.
        model: Name or path of the model to load when the session is resumed.
        dtype: Precision to load it in.
        assets: Adapters and reference images of the results.
        other_models: Id of a result -> the model that made it, if it is not `model`.
        pages: Id of a result -> what returns the bytes of each page of its recorded features. Without them those that
            are in the folder stay.
        vae: Path of the autoencoder to load; "" for the model's own.
        variant: Name of the variant of the model's weights to load; "" for none.
    """

    history: History
    model: str
    dtype: str
    assets: SessionAssets = NO_ASSETS
    other_models: Mapping[str, str] = field(default_factory=dict)
    pages: Mapping[str, Sequence[Callable[[], bytes]]] = field(default_factory=dict)
    vae: str = ""
    variant: str = ""


class SessionStore:
    """One session's folder, and what of it was loaded from it or saved to it here.

    Args:
        folder: The folder, which need not exist yet.
        name: What errors call it; "" for its path.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder = folder.resolve()
        self._reader = SessionReader(self.folder, name or str(folder))
        self._own: set[str] = set()  # digests of the JSON as it was read or written here
        self._files = WeakKeyDictionary[EditResult, Mapping[str, str]]()  # ending -> digest, of what is there
        self._pages = WeakKeyDictionary[EditResult, tuple[str, ...]]()  # digests

    def read_index(self) -> SessionIndex:
        """The index of the folder.

        Raises:
            SessionError: There is no session, or one of another version, or a damaged one.
        """
        return self._reader.read_index()

    def load(self, diff: Diff) -> LoadedSession:
        """Load the results, and let later saves replace what was loaded.

        Args:
            diff: What changes from one prompt to another.

        Raises:
            SessionError: There is no session, or one of another version, or a damaged one.
        """
        loaded = self._reader.load(diff)
        self._own = {loaded.index.digest}
        for entry in loaded.index.results:
            result = loaded.history.find(entry.id)
            self._files[result], self._pages[result] = entry.files, entry.pages
        return loaded

    def pages(self, index: SessionIndex) -> dict[str, list[Page]]:
        """Id of a result -> the pages of its recorded features, if the first is there.

        Args:
            index: The index of the folder.
        """
        found = {entry.id: self._pages_of(entry) for entry in index.results if entry.pages}
        return {result: pages for result, pages in found.items() if pages[0].path.is_file()}

    def _pages_of(self, entry: ResultEntry) -> list[Page]:
        return [Page(self.folder / name, sha256) for name, sha256 in entry.page_names().items()]

    def save(
        self,
        contents: SessionContents,
        metadata_of: Callable[[EditResult], Metadata | None],
        *,
        overwrite: bool = False,
    ) -> None:
        """Write all results; files of results that are here already are not written again, but for pages.

        Args:
            contents: What is saved.
            metadata_of: Metadata of a result's image file, or None.
            overwrite: Replace what was not loaded or saved here.

        Raises:
            SessionError: Nothing to save, another session in the folder, or another run that saves into it.
            OSError: A file could not be written; the session that was there stays.
        """
        _ = contents.history.current  # raises where there is nothing
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock(self.folder):
            before, replaced = self._check_before(overwrite=overwrite)
            remove_unfinished(self.folder)
            written: list[Path] = []
            try:
                data = self._write_files(contents, metadata_of, written)
                names = _names_of(data)
                self._own.add(hashlib.sha256(data).hexdigest())
                write_bytes(data, self.folder / SESSION_INDEX)
            except BaseException:
                if self._digest() == before:
                    _remove(written)
                raise
            strays = (path.name for path in self.folder.glob(f"*{PAGE_ENDING}") if is_page_name(path.name))
            _remove([self.folder / name for name in {*replaced, *strays} - names])  # a killed save's pages too

    def _check_before(self, *, overwrite: bool) -> tuple[str, list[str]]:
        """The digest of the JSON that a save replaces, "" for none, and the names of the files that it removes."""
        before = self._digest()
        if before and before not in self._own and not overwrite:
            raise SessionError(
                f"{self.folder} holds another session, or this one as another run changed it; "
                "save to another folder, or use overwrite=True"
            )
        try:
            index = self.read_index() if before else None
        except SessionError:  # its files are unknown, so that none is removed
            index = None
        return before, [] if index is None else [*index.files(), *index.page_names()]

    def _digest(self) -> str:
        """The digest of the JSON, "" for none."""
        if not os.path.lexists(self.folder / SESSION_INDEX):
            return ""
        try:
            return hashlib.sha256(read_bytes(self.folder / SESSION_INDEX)).hexdigest()
        except (InputError, OSError):
            return "unreadable"

    def _write_files(
        self, contents: SessionContents, metadata_of: Callable[[EditResult], Metadata | None], written: list[Path]
    ) -> bytes:
        """Write the files that are not here; returns the JSON."""

        def write(stem: str, ending: str, data: bytes) -> str:
            digest = hashlib.sha256(data).hexdigest()
            path = self.folder / file_name(stem, ending, digest)
            if not os.path.lexists(path):
                written.append(path)
            write_bytes(data, path)
            return digest

        for result in contents.history:
            files = self._files.get(result, {})
            if not files or not all((self.folder / file_name(result.id, *one)).is_file() for one in files.items()):
                images = _images(result, metadata_of(result))
                self._files[result] = {ending: write(result.id, ending, data) for ending, data in images}
            if pages := contents.pages.get(result.id):
                self._pages[result] = tuple(
                    write(f"{result.id}.{i:04}", PAGE_ENDING, page()) for i, page in enumerate(pages)
                )
        references = contents.assets.references.items()
        return encode_index(
            {
                "version": session_index.VERSION,
                "model": contents.model,
                **{name: given for name in ("vae", "variant") if (given := getattr(contents, name))},
                "dtype": contents.dtype,
                "current": contents.history.current.id,
                "adapters": [{"source": name, **use.as_dict()} for name, use in contents.assets.adapters.items()],
                "references": {name: write(f"reference-{name}", ".png", _encode(image)) for name, image in references},
                "results": [
                    session_index.make_entry(
                        result,
                        self._files[result],
                        contents.other_models.get(result.id, ""),
                        self._kept_pages(result),
                    )
                    for result in contents.history
                ],
            }
        )

    def _kept_pages(self, result: EditResult) -> tuple[str, ...]:
        """Digests of a result's pages, if the first is there, without which the others mean nothing."""
        pages = self._pages.get(result, ())
        return pages if pages and (self.folder / page_name(result.id, 0, pages[0])).is_file() else ()


def _names_of(data: bytes) -> set[str]:
    """The names of the files that an index needs, which must be one that can be read again."""
    try:
        index = decode_index(data, "memory")[1]
        return index.files().keys() | index.page_names()
    except SessionError as error:
        raise SessionError(
            f"the session holds more than can be saved, such as over {LIMITS.results} results; delete some"
        ) from error


def _images(result: EditResult, metadata: Metadata | None) -> list[tuple[str, bytes]]:
    """The ending and the bytes of each of a result's files."""
    image, painted = result.image, result.painted
    ending = ".tif" if image.mode == "CMYK" else ".png"  # which stores it without loss
    found = [(ending, _encode(image, ending, metadata)), (MASK_ENDING, _encode(Image.fromarray(result.mask.raster)))]
    found += [(CANVAS_ENDING, _encode(painted))] if painted is not None else []
    pixels = result.mask.pixels
    return found + ([] if pixels is None else [(PIXELS_ENDING, _encode(Image.fromarray(pixels)))])


def _encode(image: Image.Image, ending: str = ".png", metadata: Metadata | None = None) -> bytes:
    return encode(image, ending, metadata, keeps_form=True)[0]


def _remove(paths: Collection[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
