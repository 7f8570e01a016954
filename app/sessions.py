"""All users' sessions over the shared models, and the worker that runs them.

A caller is identified by the name of its connection (gradio's session hash). A session is identified by its secret key,
so that a page finds it after a reload. Knows models and folders; neither gradio nor pages.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from app.model_pool import ModelPool, OfferedModel
from app.session import Session
from app.validation import MAX_PICTURE_BYTES, Busy
from app.worker import InferenceWorker
from fisedit.errors import Cancelled, FisEditError

if TYPE_CHECKING:
    from app.lora_catalog import Scales
    from app.model_pool import LoadedModel
    from app.validation import SourceSettings
    from fisedit.history import EditResult

CAPACITY = 32
"""Sessions in memory at once; others wait on disk."""

_log = logging.getLogger(__name__)
_KEY = re.compile(r"[0-9a-f]{32}")
_CALLERS = 64
"""Connections that are remembered, for each session in memory."""


@dataclass(frozen=True)
class ModelChoice:
    """The model and the LoRAs that a picture is made with.

    Args:
        model: an offered one.
        loras: names of LoRAs -> their scales.
    """

    model: OfferedModel
    loras: Scales

    @property
    def weights(self) -> object:
        """Equal for choices of the same model with the same LoRAs."""
        return self.model.label, frozenset(self.loras.items())


class AppState:
    """The worker, the models that it runs, and all users' sessions.

    Args:
        pool: the models that are offered.
        worker: runs them.
        capacity: greatest number of sessions in memory, 1 or more. For one more, the one that has been idle longest is
            dropped from memory; its pictures are on disk.
        folder: where sessions are stored, each in a folder of its own; None for a temporary one, which `close` removes.

    Attributes:
        feature_bytes: limit in bytes of the recorded features of all sessions together. Beyond it those of the session
            that has been idle longest are dropped, and rebuilt when an edit needs them.
    """

    def __init__(
        self, pool: ModelPool, worker: InferenceWorker, *, capacity: int = CAPACITY, folder: str | Path | None = None
    ) -> None:
        self.pool, self.worker, self.capacity, self.feature_bytes = pool, worker, capacity, pool.feature_bytes
        self._closing = ExitStack()
        self._temporary = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="fisedit-")))
        self.folder = self._temporary / "sessions" if folder is None else Path(folder).resolve()
        for each in (self.folder, self._temporary / "programs"):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = Lock()  # callers come in many threads; never held while a session is read from disk
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # by key, longest idle first
        self._loading: dict[str, Future[Session]] = {}  # by key, sessions that are being read from disk
        self._callers: OrderedDict[str, str] = OrderedDict()  # caller -> key
        self._away = set[str]()  # callers whose connection ended; it may come again
        self._of_programs = set[str]()  # keys of sessions that end with the app
        self._parking: dict[str, Future[None]] = {}  # by key, sessions whose recorded features are being written
        self._parker = ThreadPoolExecutor(1, thread_name_prefix="fisedit-parking")

    @classmethod
    def open(
        cls, *models: str | Path, folder: str | Path | None = None, loras: Sequence[str | Path] = (), **options: Any
    ) -> Self:
        """A state with a worker and a pool of its own.

        Args:
            models: names, folders or files, as `Editor.from_pretrained` takes them; none for the demo model.
            folder: where sessions are stored, each in a folder of its own; None for a temporary one.
            loras: files or folders, as in `Editor.load_lora`.
            options: further arguments of `ModelPool`.

        Raises:
            ModelError, AdapterError: one of these cannot be loaded.
            InputError: two models or LoRAs of one name.
        """
        worker = InferenceWorker()
        try:
            pool = worker.call(lambda: ModelPool(models or ("demo",), loras=loras, **options))
            state = cls(pool, worker, folder=folder)
        except BaseException:
            worker.close()
            raise
        state._closing.callback(worker.close)
        state._measure_when_idle(pool.first)
        return state

    def close(self) -> None:
        """Stop all work, and remove temporary files."""
        with self._lock:
            sessions = list(self._sessions.values())
            for session in sessions:
                session.stop()
        self._parker.shutdown()
        for session in sessions:
            if self._is_kept(session.key):
                _park_features(session)
        self._closing.close()

    def select(self, settings: SourceSettings) -> ModelChoice:
        """Return the model and LoRAs of a new picture. Raises InputError for what is not offered."""
        return ModelChoice(self.pool.select(settings.model), self.pool.loras.select(settings.loras))

    def select_recorded(self, session: Session, result: EditResult) -> ModelChoice:
        """Return the model and LoRAs of a picture and of its edits. Raises SessionError for what is not offered."""
        model = self.pool.require(session.model_name(result))
        return ModelChoice(model, self.pool.loras.select_recorded(result.config.loras))

    def load(self, choice: ModelChoice) -> LoadedModel:
        """The model of a choice with its LoRAs and no others; called on the worker's thread.

        Raises:
            ModelError: the model cannot be loaded.
            InputError: a LoRA does not fit it.
        """
        model = self.pool.load(choice.model)
        model.activate_loras(choice.loras)
        self._measure_when_idle(choice.model)
        return model

    def measure_again(self, session: Session) -> Future[str]:
        """Measure the cost table of the current picture's model once no run waits, or the first model's.

        Returns:
            The reason why no new table is kept; "" for one that is.
        """
        model = self.pool.require(session.model_name(session.current)) if len(session.history) else self.pool.first
        told = Future[str]()
        self._measure_when_idle(model, told)
        return told

    def _measure_when_idle(self, model: OfferedModel, told: Future[str] | None = None) -> None:
        """Measure the machine's cost table of a model while no run waits, if there is none yet.

        Args:
            model: the model.
            told: gets how it ended, and has the table measured even where there is one; None to measure a missing one.
        """
        if model.measured and told is None:
            return

        def measure(interrupted: Callable[[], bool]) -> bool:
            def check() -> None:
                if interrupted():
                    raise Cancelled("a run waits")

            why = f"the model {model.label} is not loaded: make a picture with it first"
            if model.loaded is not None:
                model.use_threads(self.pool.thread_choice.threads)
                try:
                    why = model.measure(check)
                except Cancelled:
                    return False
            if told is not None:
                told.set_result(why)
            return True

        self.worker.when_idle(told or model, measure)

    def session(self, caller: str) -> Session:
        """The session of a caller, a new one for a new caller. Raises Busy: every session in memory is at work."""
        return self._open_session(caller)

    def adopt(self, caller: str, key: str) -> Session:
        """The session of a key, for a page that was loaded again; the caller's own for an unknown key. Raises Busy."""
        session = self._open_session(caller, key)
        session.has_page = True
        return session

    def program_session(self, key: str = "") -> Session:
        """The session of a key, or a new one for a program, which ends with the app. Raises Busy."""
        with self._lock:
            if not self._exists(key):
                key = secrets.token_hex(16)
                self._of_programs.add(key)
        return self._open_session("", key)

    def remove_session(self, key: str) -> None:
        """Remove a program's session with its pictures, unless work goes on there."""
        with self._lock:
            session = self._sessions.get(key)
            if key not in self._of_programs or key in self._loading or (session is not None and not session.idle):
                return
            self._sessions.pop(key, None)
            self._of_programs.discard(key)
        for folder in (self._temporary / "programs" / key, self._temporary / "out" / key):
            shutil.rmtree(folder, ignore_errors=True)

    def leave(self, caller: str) -> None:
        """Note that a caller's connection ended: a program's work ends before the next step, unless another caller has
        its session open. A page's run goes on. The caller finds the session again."""
        with self._lock:
            key = self._callers.get(caller)
            if key is None:
                return
            self._away.add(caller)
            is_open = any(own == key and other not in self._away for other, own in self._callers.items())
            if key in self._sessions and not is_open:
                self._sessions[key].leave()

    def limit_memory(self) -> None:
        """Drop recorded features of idle sessions, longest idle first, until all of them are within the bound.

        Then put idle sessions on disk until their pictures are within their bound too.
        """
        with self._lock:
            self._limit_pictures()
            held = {session: session.recorded_bytes for session in self._sessions.values()}
            for session in held:
                if sum(held.values()) <= self.feature_bytes:
                    return
                if session.drop_editors_if_idle():
                    held[session] = 0

    def _limit_pictures(self) -> None:
        """Put idle sessions on disk, longest idle first, until the pictures in memory are within the bound."""
        held = {key: session.picture_bytes for key, session in self._sessions.items()}
        for key in tuple(held)[:-1]:
            if sum(held.values()) <= MAX_PICTURE_BYTES:
                return
            if self._sessions[key].idle:
                self._drop_session(key)
                held[key] = 0

    def _drop_session(self, key: str) -> None:
        """Drop a session from memory; its pictures are on disk, and what was recorded goes there if there is room.
        A request for it waits until that is done."""
        session = self._sessions.pop(key)
        self._parking[key] = self._parker.submit(self._park, key, session)

    def _park(self, key: str, session: Session) -> None:
        if self._is_kept(key):
            _park_features(session)
        shutil.rmtree(session.out, ignore_errors=True)
        with self._lock:
            self._parking.pop(key, None)

    def _is_kept(self, key: str) -> bool:
        """Return whether a session outlives the app."""
        return self.folder.parent != self._temporary and key not in self._of_programs

    def _folder(self, key: str) -> Path:
        """Return the folder of a session's pictures."""
        return (self._temporary / "programs" if key in self._of_programs else self.folder) / key

    def __len__(self) -> int:
        """Sessions in memory."""
        return len(self._sessions)

    def _open_session(self, caller: str, key: str = "") -> Session:
        """The session of a key if there is one, else the caller's own, from memory or disk. Raises Busy.

        The lock is free while a session is read: callers of the same key share one read, and others do not wait.
        """
        with self._lock:
            key = key if self._exists(key) else self._callers.get(caller) or secrets.token_hex(16)
            if caller:
                self._remember_caller(caller, key)
            if key in self._sessions:
                self._sessions.move_to_end(key)
                return self._sessions[key]
            is_loading = key in self._loading
            if not is_loading:
                self._evict_sessions()
                self._loading[key] = Future()
            loading = self._loading[key]
        if not is_loading:
            self._load_session(key, loading)
        return loading.result()

    def _load_session(self, key: str, loading: Future[Session]) -> None:
        """Read a session from disk and put it into memory; the future gets the session or the error."""
        if parking := self._parking.get(key):
            parking.result()
        try:
            session = Session(self.pool, self._folder(key), self._temporary / "out" / key)
            session.resume()
        except BaseException as error:  # noqa: BLE001 (every caller that waits for it raises it; none may hang)
            with self._lock:
                del self._loading[key]
            loading.set_exception(error)
            return
        with self._lock:
            self._sessions[key] = session
            del self._loading[key]
        loading.set_result(session)

    def _exists(self, key: str) -> bool:
        """Return whether a key is that of a session in memory or on disk."""
        if not _KEY.fullmatch(key):
            return False
        return key in self._sessions or key in self._loading or key in self._of_programs or self._folder(key).is_dir()

    def _remember_caller(self, caller: str, key: str) -> None:
        self._callers[caller] = key
        self._callers.move_to_end(caller)
        self._away.discard(caller)
        while len(self._callers) > _CALLERS * self.capacity:
            self._away.discard(self._callers.popitem(last=False)[0])

    def _evict_sessions(self) -> None:
        """Make room for one more session; those that are being read count as at work."""
        while len(self._sessions) + len(self._loading) >= self.capacity:
            longest = next((key for key, session in self._sessions.items() if session.idle), None)
            if longest is None:
                raise Busy(f"all {self.capacity} sessions are at work; try again in a moment")
            self._drop_session(longest)


def _park_features(session: Session) -> None:
    """Write a session's recorded features; where that cannot be done, they are made again when they are needed."""
    try:
        session.park()
    except (OSError, FisEditError) as error:
        _log.warning("recorded features of a session are dropped: %s", error)
    except Exception:  # noqa: BLE001 (a fault of ours: its traceback is logged, and the pictures are on disk already)
        _log.exception("recorded features of a session are dropped")
