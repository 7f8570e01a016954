"""One person's pictures, whichever models made them: on disk, in memory, and one piece of work at a time.

Knows a history, a folder and who is offered which models; neither gradio nor who else is there.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING

from app.validation import Busy
from fisedit.errors import Cancelled, SessionError
from fisedit.history import EditResult, History
from fisedit.models.paths import absolute_name
from fisedit.storage import provenance
from fisedit.storage import session as files

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.model_pool import Shelf
    from fisedit.editor import Preview
    from fisedit.storage.image_metadata import Metadata
    from fisedit.values import EditScript

_MOMENT = 10.0
"""Seconds to wait for somebody's brief work."""


class Session:
    """One person's pictures, whichever models made them.

    Args:
        shelf: of the models. folder: theirs alone, named by their key. out: where files lie that their browser fetches.

    Attributes:
        history, references: results; pictures whose look they take, by digest. models: sources' ids -> their models.
        key: what its owner finds it again by. seen: the last preview.
        measured: seconds of dense runs, by what they were compared with.
        lost: whether what was saved could not be read.
    """

    def __init__(self, shelf: Shelf, folder: Path, out: Path) -> None:
        self.folder, self.out, self.key = folder, out, folder.name
        self.history, self.references = History(), dict[str, "Image"]()
        self.models: dict[str, str] = {}
        self.seen: Preview | None = None
        self.measured: dict[str, float] = {}
        self.lost = False
        self._shelf, self._adapters, self._saved = shelf, dict[str, float](), frozenset[str]()
        self._turn, self._stop, self._brief = Lock(), Event(), False

    @property
    def current(self) -> EditResult:
        """Where its owner stands. Raises SessionError before the first source."""
        return self.history.current

    def model(self, result: EditResult) -> str:
        """What made a result, and its edits."""
        return self.models[self.history.lineage(result.id)[0].id]

    def metadata(self, result: EditResult) -> Metadata:
        """How a result was made, for its picture's file."""
        lineage = self.history.lineage(result.id)
        return provenance.to_metadata(
            provenance.make_origin(lineage, self.model(result), self._shelf.dtype, self._shelf.device)
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is being done here."""
        return not self._turn.locked()

    def stop(self) -> None:
        """Ask the work that goes on here to end before its next step."""
        self._stop.set()

    def check(self) -> None:
        """Raise Cancelled if the work that goes on here was asked to end."""
        if self._stop.is_set():
            raise Cancelled("stopped; nothing was changed")

    def take(self, *, brief: bool = False) -> None:
        """Begin one piece of work, the only one at a time, until `release`.

        Args:
            brief: whether the work is over in a moment. Who comes meanwhile waits for it.

        Raises:
            Busy: longer work goes on here.
        """
        if not (self._turn.acquire(blocking=False) or (self._brief and self._turn.acquire(timeout=_MOMENT))):
            raise Busy("this session is at work; stop that or wait for it")
        self._brief = brief
        self._stop.clear()

    def release(self) -> None:
        """The work is over, in whatever thread."""
        self._turn.release()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Work for a moment. Raises Busy as `take`."""
        self.take(brief=True)
        try:
            yield
        finally:
            self.release()

    def delete(self, result_id: str) -> tuple[str, ...]:
        """Remove a result, what was made from it and what was recorded of them; their ids. Raises SessionError."""
        desk = self._shelf.desk(self, self.model(self.history.find(result_id)))
        return (desk or self.history).delete(result_id)

    def resume(self) -> None:
        """Take up what was saved; what is damaged is put aside."""
        try:
            if self.folder.is_dir():
                self.load(self.folder)
                self._saved = frozenset(result.id for result in self.history)
        except SessionError:
            self.lost = True
            self.folder.replace(self.folder.with_name(f"{self.key}.{secrets.token_hex(4)}"))

    def load(self, folder: Path) -> None:
        """Take up a saved session instead of what is here; pictures of models that are not offered can be looked at.

        Raises:
            SessionError: a damaged one. All is as it was then.
        """
        index = files.read_index(folder)
        others = files.read_other_models(folder, index)

        def diff(result: str, old: str, new: str) -> EditScript:
            model = self._shelf.known(others.get(result, index["model"])) or self._shelf.first
            return model.diff(old, new)

        history, looks = files.load(folder, index, diff), files.load_assets(folder, index)
        self._shelf.forget(self)
        self.history, self.references, self._adapters = history, dict(looks.references), dict(looks.adapters)
        self.models = {result.id: others.get(result.id, index["model"]) for result in history if result.parent is None}
        self.seen, self.measured, self._saved = None, {}, frozenset()

    def save(self) -> None:
        """Write what is new into the session's folder; a session without pictures has none."""
        if not len(self.history):
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self._saved = frozenset()
            return
        names = {result.id: self.model(result) for result in self.history}
        first, shelf = names[self.history[0].id], self._shelf
        others = {result: name for result, name in names.items() if name != first}
        files.save(
            self.history,
            self.folder,
            first,
            shelf.dtype,
            self.metadata,
            self._saved,
            self._looks(),
            other_models=others,
        )
        self._saved = frozenset(names)

    def _looks(self) -> files.SessionAssets:
        """The references of what is here, and adapters that read them."""
        likes = [like for result in self.history for like in result.config.like]
        if likes and self._shelf.adapter is not None:
            self._adapters[absolute_name(self._shelf.adapter)] = likes[-1].scale
        used = {like.reference for like in likes} & self.references.keys()
        return files.SessionAssets(
            self._adapters if likes else {}, {digest: self.references[digest] for digest in used}
        )
