"""Writing pictures and sessions, and reading what was recorded with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fisedit.errors import PageError, SessionError
from fisedit.history import EditResult
from fisedit.machine.device import default_torch_state
from fisedit.metadata import provenance
from fisedit.metadata.image_metadata import Metadata
from fisedit.sessions.store import SessionContents, SessionStore
from fisedit.storage.files import check_image_path
from fisedit.storage.images import write_image

if TYPE_CHECKING:
    from fisedit.features.pages import Page


from fisedit.editor.base import EditorBase


class SessionMixin(EditorBase):
    """Files of an editor: pictures, sessions, and pictures that are made again."""

    def metadata(self, result: EditResult | None = None) -> Metadata:
        """Return how a result was made, or the current one without it, for its picture's file.

        Raises:
            SessionError: the result is not one of this editor's.
        """
        result = result or self.current
        if self.history.find(result.id) is not result:
            raise SessionError(f"result {result.id} was made by another editor; ask that one")
        lineage = self.history.lineage(result.id)
        return provenance.to_metadata(
            provenance.make_origin(lineage, self.model, self._dtype, self.pipe.unet.device.type)
        )

    def write(self, path: str | Path, *, metadata: bool = True) -> tuple[str, ...]:
        """Write the current picture in the format of its file's ending, whole or not at all.

        Args:
            path: path of the file.
            metadata: tell in the file how it was made, for web UIs to read and for `remake`. An opened picture's own
                metadata stays either way.

        Returns:
            What the format could not hold.
        """
        return write_image(self.current.image, check_image_path(Path(path)), self.metadata() if metadata else None)

    @default_torch_state()
    def save(
        self, folder: str | Path, *, metadata: bool = True, features: bool = False, overwrite: bool = False
    ) -> None:
        """Write the session: pictures, masks, prompts, seeds, lineage, parameters. Wherever that ends, what is in the
        folder is the old session or the new one, whole.

        Args:
            folder: folder of the session; made if it is not there.
            metadata: tell in every picture's file how it was made.
            features: write what was recorded with sources too, as far as it is kept: then the first edit after `resume`
                need not make them again. `recorded_bytes` of their `stats` tells what that takes; where there is no
                room for it, the session is saved without, with a warning. Features that are in the folder stay.
            overwrite: replace a session in the folder that is not this one, or that another run has changed since.

        Raises:
            SessionError: there is nothing to save, the model has no name to load it by again, another session is in the
                folder, or another run is saving into it. OSError: a file could not be written.
        """
        if not self.model and len(self.history):
            raise SessionError(
                "a saved session names its model, and this editor's has no name; use Editor(pipe, model=)"
            )
        references = self._engine.references.used(like for result in self.history for like in result.config.like)
        metadata_of = self.metadata if metadata else lambda _: None
        pages = self.recorded_pages() if features else {}
        contents = SessionContents(
            self.history, self.model, self._dtype, references, pages=pages, vae=self.vae, variant=self.variant
        )
        try:
            self._store(folder).save(contents, metadata_of, overwrite=overwrite)
        except (OSError, MemoryError, PageError) as error:
            if not pages:
                raise
            self._store(folder).save(replace(contents, pages={}), metadata_of, overwrite=overwrite)
            logging.getLogger(__name__).warning("the session was saved without recorded features: %s", error)

    @default_torch_state()
    def recorded_pages(self) -> dict[str, list[Callable[[], bytes]]]:
        """Id of every source whose features are kept -> what returns the bytes of each of their pages."""
        return self._pipeline.pages()

    @default_torch_state()
    def load_pages(self, pages: Mapping[str, Sequence[Page]]) -> None:
        """Read features of sources from their pages when edits need them; pages of no use are ignored.

        Args:
            pages: id of a source -> its pages.
        """
        self._pipeline.load_pages(pages)

    def _store(self, folder: str | Path) -> SessionStore:
        """A session's folder, as far as this editor has loaded or saved what is in it."""
        resolved = Path(folder).resolve()
        return self._stores.setdefault(resolved, SessionStore(resolved))
