"""Several people over shared models: each has a history, a folder and a turn of their own.

Knows models and folders; neither gradio nor pages. Whoever calls is known by a name that their connection brings
(gradio's session hash); a session by its key, which its owner alone knows, so that a page finds it after a reload.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Self

from app.model_pool import MOST_LOADED, Model, Shelf
from app.thread_budget import apart
from app.user_session import Session
from app.validation import Busy

if TYPE_CHECKING:
    from app.lora_catalog import Scales, Wardrobe
    from app.validation import Settings
    from fisedit import Editor
    from fisedit.history import EditResult

CAPACITY = 32
"""Sessions in memory at once; others wait on disk."""

_KEY = re.compile(r"[0-9a-f]{32}")
_CALLERS = 64
"""Connections that are remembered, for each session in memory."""


@dataclass(frozen=True)
class Choice:
    """What a picture is painted with: a model, and LoRAs by their names."""

    model: Model
    loras: Scales


class Studio:
    """The shared models and everybody's sessions.

    Args:
        models, device, dtype: as in `Editor.from_pretrained`, one or several; the first is loaded at once, others when
            they are first needed.
        loaded: models in memory at once; the one that has been idle longest makes room, and what was recorded with it.
        capacity: sessions in memory. One more puts the one that has been idle longest on disk, where its pictures are.
        feature_bytes: recorded features of all sessions together; beyond that those of the session that has been idle
            longest are dropped, and rebuilt when an edit needs them. None for half of the machine's memory.
        folder: where sessions live, each in a folder of its own; None for a temporary one that goes with the studio.
        loras, adapter: what people may choose, as `Editor.load_lora` and `Editor.load_adapter` take them.

    Raises:
        ModelError, AdapterError: one of these cannot be loaded. InputError: two models or LoRAs of one name.
    """

    def __init__(
        self,
        *models: str | Path,
        device: str | None = None,
        dtype: str | None = None,
        loaded: int = MOST_LOADED,
        capacity: int = CAPACITY,
        feature_bytes: int | None = None,
        folder: str | Path | None = None,
        loras: Sequence[str | Path] = (),
        adapter: str | Path | None = None,
    ) -> None:
        self.shelf = apart(
            lambda: Shelf(
                models or ("demo",),
                device=device,
                dtype=dtype,
                loras=loras,
                adapter=adapter,
                most=loaded,
                feature_bytes=feature_bytes,
            )
        )
        self._begin(capacity, folder)

    def another(self, folder: str | Path | None = None) -> Self:
        """Another studio over the same models, with other sessions."""
        studio = object.__new__(type(self))
        studio.shelf = self.shelf
        studio._begin(self.capacity, folder)
        return studio

    def _begin(self, capacity: int, folder: str | Path | None) -> None:
        self.capacity, self.feature_bytes = capacity, self.shelf.feature_bytes
        self._temporary = tempfile.TemporaryDirectory(prefix="fisedit-")
        self.folder = Path(self._temporary.name) / "sessions" if folder is None else Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = RLock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # by key, longest idle first
        self._callers: OrderedDict[str, str] = OrderedDict()  # caller -> key

    def close(self) -> None:
        """Stop all work; what is temporary goes."""
        for session in self._sessions.values():
            session.stop()
        self._temporary.cleanup()

    @property
    def wardrobe(self) -> Wardrobe:
        """The LoRAs that are offered."""
        return self.shelf.wardrobe

    @property
    def reads_looks(self) -> bool:
        """Whether an adapter is offered."""
        return self.shelf.adapter is not None

    def chosen(self, settings: Settings) -> Choice:
        """What a new picture is painted with. Raises InputError for what is not offered."""
        return Choice(self.shelf.chosen(settings.model), self.wardrobe.chosen(settings.loras))

    def own(self, session: Session, result: EditResult) -> Choice:
        """What a picture was painted with, and its edits are. Raises SessionError for what is not offered."""
        return Choice(self.shelf.own(session.model(result)), self.wardrobe.told(result.config.loras))

    @contextmanager
    def painting(
        self, session: Session, choice: Choice, check: Callable[[], None], patience: float = inf
    ) -> Iterator[Editor]:
        """A session's editor over the model of a choice, with its LoRAs and no others; arguments as of `Shelf.lent`.

        The calling thread is one that ends soon; `app.thread_budget` says why.

        Raises:
            ModelError: the model cannot be loaded. InputError: a LoRA does not fit it. Busy: patience is over.
        """
        with self.shelf.lent(choice.model, check, patience) as model:
            assert model.rail is not None
            with model.rail.worn(choice.loras, check, patience), self.shelf.cores.shared(quick=model.quick):
                yield model.desk(session)

    def session(self, caller: str) -> Session:
        """The session of a caller, a new one for a new caller.

        Raises:
            Busy: every session in memory is at work.
        """
        with self._lock:
            return self._open(caller, self._callers.get(caller) or secrets.token_hex(16))

    def adopt(self, caller: str, key: str) -> Session:
        """The session of a key, for a page that was loaded again; a new one where nobody knows the key.

        Raises:
            Busy: as above.
        """
        with self._lock:
            known = bool(_KEY.fullmatch(key)) and (key in self._sessions or (self.folder / key).is_dir())
            return self._open(caller, key) if known else self.session(caller)

    def leave(self, caller: str) -> None:
        """A caller is gone: its session's work ends before the next step, unless others have the session open."""
        with self._lock:
            key = self._callers.pop(caller, None)
            if key and key in self._sessions and key not in self._callers.values():
                self._sessions[key].stop()

    def make_room(self) -> None:
        """Drop recorded features of idle sessions, longest idle first, until all of them are within the bound."""
        with self._lock:
            held = {key: self.shelf.recorded_bytes(session) for key, session in self._sessions.items()}
            for key, session in self._sessions.items():
                if sum(held.values()) <= self.feature_bytes:
                    return
                if not session.idle:
                    continue
                with suppress(Busy), session.work():
                    self.shelf.forget(session)
                    held[key] = 0

    def __len__(self) -> int:
        """Sessions in memory."""
        return len(self._sessions)

    def _open(self, caller: str, key: str) -> Session:
        self._callers[caller] = key
        self._callers.move_to_end(caller)
        while len(self._callers) > _CALLERS * self.capacity:
            self._callers.popitem(last=False)
        if key not in self._sessions:
            self._put_aside()
            session = Session(self.shelf, self.folder / key, Path(self._temporary.name) / "out" / key)
            session.resume()
            self._sessions[key] = session
        self._sessions.move_to_end(key)
        return self._sessions[key]

    def _put_aside(self) -> None:
        """Make room for one more session."""
        while len(self._sessions) >= self.capacity:
            longest = next((key for key, session in self._sessions.items() if session.idle), None)
            if longest is None:
                raise Busy(f"all {self.capacity} sessions are at work; try again in a moment")
            shutil.rmtree(self._sessions.pop(longest).out, ignore_errors=True)
