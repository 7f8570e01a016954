"""One user's pictures, whichever models made them: on disk, in memory, and one piece of work at a time.

Knows a history, a folder, its editors and which models are offered; neither gradio nor other sessions.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from app.validation import Busy
from fisedit.errors import Cancelled, FisEditError, SessionError
from fisedit.features.pages import free_page_bytes
from fisedit.history import EditResult, History, SessionAssets
from fisedit.metadata import provenance
from fisedit.sessions.store import SessionContents, SessionStore
from fisedit.values import AdapterUse

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.model_pool import LoadedModel, ModelPool
    from fisedit import Editor
    from fisedit.editor import Preview
    from fisedit.features.pages import Page
    from fisedit.integrations.mask_providers import Detection
    from fisedit.metadata.image_metadata import Metadata
    from fisedit.values import EditScript

_log = logging.getLogger(__name__)

_BRIEF_WORK_TIMEOUT = 10.0
"""Seconds that work waits for brief work, and for a live edit to stop, of the same session."""


class WorkKind(Enum):
    """The kind of work in a session: a run, refused to others; brief work, waited for; a live edit, which gives way."""

    RUN = "run"
    BRIEF = "brief"
    LIVE = "live"


@dataclass(frozen=True, eq=False)
class LiveRequest:
    """A request for an edit that is drawn while its prompt is typed; no two are the same.

    Args:
        prompt: what the picture should show.
    """

    prompt: str


@dataclass(frozen=True)
class LiveEdit:
    """An edit that was drawn while its prompt was typed, beside the current picture.

    Args:
        result_id: id of its result, which the history has until another one takes its place.
        key: what it was asked for by.
    """

    result_id: str
    key: object


class Session:
    """One user's pictures, whichever models made them.

    Args:
        pool: the models that are offered.
        folder: folder of this session alone, named by its key.
        out: folder of the files that the user's browser fetches.

    Attributes:
        history: all results.
        references: reference pictures by digest.
        models: ids of results -> names of the models that made them; those of sources count.
        editors: one for each loaded model that was used here; dropped when the model is unloaded.
        key: the secret name by which its owner opens it again.
        last_preview: the last preview.
        detections: id of the picture in which a detector last looked, and what it found there.
        measured: seconds of dense runs, by the id of the result that they were compared with.
        was_damaged: whether what was saved could not be read.
        live: the edit that was drawn last while its prompt was typed, or None.
        live_request: the newest request for such an edit since the page showed none, or None.
        notice: what its page says until the next run; "" for nothing.
        has_page: whether a page showed it. Its runs end though the page is left, as it may come again.
        progress: finished steps of the run that goes on here, all steps and seconds left; None before the first one.
        unsaved: why the last result is not in its folder; "" if it is.
    """

    def __init__(self, pool: ModelPool, folder: Path, out: Path) -> None:
        self.folder, self.out, self.key = folder, out, folder.name
        self.history, self.references = History(), dict[str, "Image"]()
        self.models: dict[str, str] = {}
        self.editors: WeakKeyDictionary[LoadedModel, Editor] = WeakKeyDictionary()
        self.last_preview: Preview | None = None
        self.detections: tuple[str, tuple[Detection, ...]] = "", ()
        self.measured: dict[str, float] = {}
        self.was_damaged = False
        self.notice = self.unsaved = ""
        self.has_page = False
        self.progress: tuple[int, int, float | None] | None = None
        self.live: LiveEdit | None = None
        self.live_request: LiveRequest | None = None
        self._pool, self._adapters, self._store = pool, dict[str, AdapterUse](), SessionStore(folder)
        self._pages: Mapping[str, Sequence[Page]] = {}  # of sources, as far as they were on disk
        self._candidates: tuple[str, ...] = ()
        self._work, self._stop, self._stops, self._kind = Lock(), Event(), 0, WorkKind.RUN

    @property
    def current(self) -> EditResult:
        """The result that the next edit begins with. Raises SessionError before the first source."""
        return self.history.current

    def model_name(self, result: EditResult) -> str:
        """The name of the model that made a result, and makes its edits."""
        return self.models[self.history.lineage(result.id)[0].id]

    def metadata(self, result: EditResult) -> Metadata:
        """Return how a result was made, for its picture's file."""
        lineage = self.history.lineage(result.id)
        return provenance.to_metadata(
            provenance.make_origin(lineage, self.model_name(result), self._pool.dtype, self._pool.device)
        )

    def editor(self, model: LoadedModel) -> Editor:
        """This session's editor over a loaded model."""
        if model not in self.editors:
            editor = self.editors[model] = model.editor.beside(self.history, self.references)
            editor.load_pages({source: self._pages[source] for source in self._sources_of(editor) & self._pages.keys()})
        return self.editors[model]

    def _sources_of(self, editor: Editor) -> set[str]:
        """Ids of the sources that an editor's model made."""
        sources = [result.id for result in self.history if result.parent is None]
        return {source for source in sources if self.models.get(source) == editor.model}

    @property
    def recorded_bytes(self) -> int:
        """Bytes of features that the editors hold."""
        return sum(editor.recorded_bytes for editor in self.editors.values())

    @property
    def picture_bytes(self) -> int:
        """Bytes of the decoded pictures of the history."""
        return sum(result.image_bytes for result in self.history)

    def drop_editors(self) -> None:
        """Drop the editors and the features that they hold; pictures stay."""
        self.editors.clear()

    # One piece of work at a time

    @property
    def idle(self) -> bool:
        """True if no work goes on here."""
        return not self._work.locked()

    @property
    def running(self) -> bool:
        """True if a run goes on here, or waits for the worker."""
        return not self.idle and self._kind is WorkKind.RUN

    @property
    def stopping(self) -> bool:
        """True if the work that goes on here was asked to end."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the work that goes on or waits here to end before its next step."""
        self._stops += 1
        self.stop_work()

    def stop_work(self) -> None:
        """Ask the work that goes on here to end before its next step, not what waits for it."""
        self._stop.set()

    def leave(self) -> None:
        """End a program's work before its next step as its caller has left; of a page, live edits alone."""
        if self.has_page:
            self.stop_live()
        else:
            self.stop()

    def stop_live(self, except_prompt: str | None = None) -> None:
        """Stop a live edit that is being drawn before its next step; other work goes on.

        Args:
            except_prompt: prompt of which a live edit is not stopped.
        """
        asked = self.live_request.prompt if self.live_request else None
        if not self.idle and self._kind is WorkKind.LIVE and (except_prompt is None or asked != except_prompt):
            self.stop_work()

    def raise_if_stopped(self) -> None:
        """Raise Cancelled if the work that goes on here was asked to end."""
        if self.stopping:
            raise Cancelled("stopped; nothing was changed")

    def begin_work(self, kind: WorkKind = WorkKind.RUN, *, stops_live: bool = True) -> None:
        """Begin one piece of work, the only one at a time, until `end_work`.

        It waits for brief work and for a live edit, at most 10 seconds.

        Args:
            kind: kind of the work.
            stops_live: whether a live edit is stopped; else it is waited for.

        Raises:
            Busy: other work goes on here.
            Cancelled: this run was stopped while it waited.
        """
        stops = self._stops
        if stops_live:
            self.stop_live()
        waits = self._kind in (WorkKind.BRIEF, WorkKind.LIVE)
        if not (self._work.acquire(blocking=False) or (waits and self._work.acquire(timeout=_BRIEF_WORK_TIMEOUT))):
            raise Busy("this session is at work; stop that or wait for it")
        if kind is WorkKind.RUN and self._stops != stops:
            self._work.release()
            raise Cancelled("stopped; nothing was changed")
        self._kind = kind
        self.notice = "" if kind is WorkKind.RUN else self.notice
        self._stop.clear()

    def end_work(self) -> None:
        """End the work, in any thread; the page shows no live edit after a run."""
        if self._kind is WorkKind.RUN:
            self.live_request = self.progress = None
        self._work.release()

    @contextmanager
    def work(self, *, stops_live: bool = True) -> Iterator[None]:
        """Occupy the session with brief work during the block; argument and errors as in `begin_work`."""
        self.begin_work(WorkKind.BRIEF, stops_live=stops_live)
        try:
            yield
        finally:
            self.end_work()

    def drop_editors_if_idle(self) -> bool:
        """Drop the editors, unless work goes on here; returns whether they were dropped."""
        if not self._work.acquire(blocking=False):
            return False
        self.drop_editors()
        self._work.release()
        return True

    # Files

    def delete(self, result_id: str) -> tuple[str, ...]:
        """Remove a result, all edits of it and their features; returns the ids. Raises SessionError: unknown id."""
        name = self.model_name(self.history.find(result_id))
        owner = next((editor for editor in self.editors.values() if editor.model == name), self.history)
        return owner.delete(result_id)

    def drop_live(self) -> None:
        """Remove the edit that was drawn while its prompt was typed, if there is one."""
        live, self.live = self.live, None
        if live is not None and live.result_id in [result.id for result in self.history]:
            self.delete(live.result_id)

    @property
    def candidates(self) -> list[EditResult]:
        """The results of a run of several that were neither kept nor discarded."""
        return [result for result in self.history if result.id in self._candidates]

    @property
    def kept(self) -> History:
        """The history without candidates: what is saved."""
        return self.history.without(self._candidates) if self.candidates else self.history

    def set_candidates(self, *results: EditResult, kept: EditResult | None = None) -> None:
        """Let results be chosen from, instead of the candidates before, which go.

        Args:
            results: the new candidates; none for none.
            kept: a result that stays, as does what it was made from; None for none.
        """
        needed = {each.id for result in filter(None, (*results[:1], kept)) for each in self.history.lineage(result.id)}
        before, self._candidates = self.candidates, tuple(result.id for result in results)
        for candidate in before:
            if candidate.id not in needed:
                self.delete(candidate.id)

    def resume(self) -> None:
        """Load what was saved; a damaged folder is renamed, and the session is empty."""
        try:
            if self.folder.is_dir():
                self._load_from(self._store)
        except SessionError:
            self.was_damaged = True
            self.folder.replace(self.folder.with_name(f"{self.key}.{secrets.token_hex(4)}"))

    def load(self, other: SessionStore) -> None:
        """Load a saved session from another folder instead of what is here, on disk too.

        Pictures of models that are not offered can be looked at.

        Raises:
            SessionError: a damaged one. All is as it was then.
        """
        loaded = "history", "references", "_adapters", "models", "_pages", "live", "_candidates"
        before = {name: getattr(self, name) for name in loaded}
        self._load_from(other)
        try:
            self.save(overwrite=True)
        except BaseException:
            vars(self).update(before)
            raise

    def _load_from(self, store: SessionStore) -> None:
        """Replace this session's pictures by those of a folder."""

        def diff(name: str, old: str, new: str) -> EditScript:
            return (self._pool.find(name) or self._pool.first).diff(old, new)

        loaded = store.load(diff)
        self.drop_editors()
        self.history, self.references = loaded.history, dict(loaded.assets.references)
        self._adapters = dict(loaded.assets.adapters)
        self.models = {entry.id: entry.model for entry in loaded.index.results if entry.parent is None}
        self._pages = store.pages(loaded.index)
        self.last_preview, self.measured, self.live, self.live_request = None, {}, None, None
        self._candidates = ()

    def park(self) -> None:
        """Write what was recorded with sources into the session's folder, so that its next edit need not make it again.

        Nothing is written where the disk has no room for it, or where work goes on here.
        """
        if not self._work.acquire(blocking=False):
            return
        try:
            self.drop_live()
            sources = [self.history.find(each) for editor in self.editors.values() for each in self._sources_of(editor)]
            if 0 < sum(source.stats.recorded_bytes for source in sources) <= free_page_bytes(self.folder):
                self.save(features=True)
        finally:
            self._work.release()

    def save(self, *, overwrite: bool = False, features: bool = False) -> None:
        """Write what is new into the session's folder, recorded features too if asked for; a session without pictures
        has none."""
        kept = self.kept
        if not len(kept):
            if self.folder.exists():
                shutil.rmtree(self.folder)
            return
        names = {result.id: self.model_name(result) for result in kept}
        first, dtype = names[kept[0].id], self._pool.dtype
        others = {result: name for result, name in names.items() if name != first}
        contents = SessionContents(
            kept, first, dtype, self._assets(kept), others, self._recorded(kept) if features else {}
        )
        self._store.save(contents, self.metadata, overwrite=overwrite)

    def save_or_say(self) -> None:
        """Write what is new; where that fails, all is as if it were written, and the page says that it is not."""
        self.unsaved = ""
        try:
            self.save()
        except (OSError, FisEditError) as error:  # whose own words may name a path of this machine
            _log.warning("a session was not saved: %s", error)
            self.unsaved = f"This is not saved: {getattr(error, 'strerror', None) or 'see the log of the server'}."

    def _recorded(self, kept: History) -> dict[str, list[Callable[[], bytes]]]:
        """The pages of every source of a history whose features its editor keeps."""
        return {
            source: pages
            for editor in self.editors.values()
            for source, pages in editor.recorded_pages().items()
            if source in self._sources_of(editor) and source in [result.id for result in kept]
        }

    def _assets(self, kept: History) -> SessionAssets:
        """The reference pictures of a history's results, and the adapters that read them."""
        likes = [like for result in kept for like in result.config.like]
        sources = self._pool.adapter_sources
        self._adapters |= {sources[like.adapter]: like.use for like in likes if like.adapter in sources}
        used = {like.reference for like in likes} & self.references.keys()
        return SessionAssets(self._adapters if likes else {}, {digest: self.references[digest] for digest in used})
