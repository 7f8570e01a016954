"""Several people over one shared model: each has an editor, a folder and a turn of their own.

Knows editors and folders; neither gradio nor pages. Whoever calls is known by a name that their connection brings
(gradio's session hash); a session by its key, which its owner alone knows, so that a page finds it after a reload.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, RLock
from time import perf_counter
from typing import TYPE_CHECKING, Self

import numpy as np

from app.limits import Busy
from app.pace import Pace
from app.wardrobe import Wardrobe
from fisedit import Editor
from fisedit.errors import Cancelled, SessionError
from fisedit.origin import model_name

if TYPE_CHECKING:
    from fisedit.editor import Preview

CAPACITY = 32
"""Sessions in memory at once; others wait on disk."""

_KEY = re.compile(r"[0-9a-f]{32}")
_MOMENT = 10.0
"""Seconds to wait for somebody's brief work."""

_CALLERS = 64
"""Connections that are remembered, for each session in memory."""


class Session:
    """One person's pictures.

    Args:
        editor: their own, over the shared model. folder: theirs alone, named by their key. out: where files lie that
            their browser fetches.

    Attributes:
        key: what its owner finds it again by. seen: the last preview.
        measured: seconds of dense runs, by what they were compared with.
        lost: whether what was saved could not be read.
    """

    def __init__(self, editor: Editor, folder: Path, out: Path) -> None:
        self.editor, self.folder, self.out, self.key = editor, folder, out, folder.name
        self.seen: Preview | None = None
        self.measured: dict[str, float] = {}
        self.lost = False
        self._turn, self._stop, self._brief = Lock(), Event(), False

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

    def take(self, *, brief: bool = False) -> Editor:
        """The editor, for one piece of work at a time, until `release`.

        Args:
            brief: whether the work is over in a moment. Who comes meanwhile waits for it.

        Raises:
            Busy: longer work goes on here.
        """
        if not (self._turn.acquire(blocking=False) or (self._brief and self._turn.acquire(timeout=_MOMENT))):
            raise Busy("this session is at work; stop that or wait for it")
        self._brief = brief
        self._stop.clear()
        return self.editor

    def release(self) -> None:
        """The work is over, in whatever thread."""
        self._turn.release()

    @contextmanager
    def work(self) -> Iterator[Editor]:
        """The editor for a moment. Raises Busy as `take`."""
        editor = self.take(brief=True)
        try:
            yield editor
        finally:
            self.release()

    def resume(self) -> None:
        """Take up what was saved; what is damaged is put aside."""
        try:
            if self.folder.is_dir():
                self.editor.load(self.folder)
        except SessionError:
            self.lost = True
            self.folder.replace(self.folder.with_name(f"{self.key}.{secrets.token_hex(4)}"))

    def save(self) -> None:
        """Write what is new into the session's folder; a session without pictures has none."""
        if len(self.editor.history):
            self.editor.save(self.folder)
        elif self.folder.exists():
            shutil.rmtree(self.folder)


class Studio:
    """The shared model and everybody's sessions.

    Args:
        model, device, dtype: as in `Editor.from_pretrained`; loaded at once.
        capacity: sessions in memory. One more puts the one that has been idle longest on disk, where its pictures are.
        feature_bytes: recorded features of all sessions together; beyond that those of the session that has been idle
            longest are dropped, and rebuilt when an edit needs them. None for half of the machine's memory.
        folder: where sessions live, each in a folder of its own under its model's; None for a temporary one that goes
            with the studio.
        loras, adapter: what people may choose, as `Editor.load_lora` and `Editor.load_adapter` take them.

    Raises:
        ModelError, AdapterError: one of these cannot be loaded. InputError: two LoRAs of one name.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        device: str | None = None,
        dtype: str | None = None,
        capacity: int = CAPACITY,
        feature_bytes: int | None = None,
        folder: str | Path | None = None,
        loras: Sequence[str | Path] = (),
        adapter: str | Path | None = None,
    ) -> None:
        self.first = Editor.from_pretrained(model, device=device, dtype=dtype, max_recorded_bytes=feature_bytes)
        if adapter is not None:
            self.first.load_adapter(adapter)
        self.reads_looks, self.wardrobe = adapter is not None, Wardrobe(self.first, loras)
        self._begin(capacity, folder)
        self.warm()

    def warm(self, patience: float = 0.5) -> None:
        """Draw a small picture, so that nobody waits for what only the first run does; where that takes less than
        `patience` seconds, draw and edit one of the model's own size as well, to learn the pace."""
        editor, began = self.first.beside(), perf_counter()
        editor.generate("a cat", num_inference_steps=2, width=64, height=64)
        if perf_counter() - began < patience:
            for prompt in ("a cat", "a dog"):
                self.pace.saw(editor.generate(prompt, num_inference_steps=4).stats)
            half = np.zeros((self.native_size, self.native_size), bool)
            half[: self.native_size // 2] = True
            self.pace.saw(editor.edit("a fox", mask=half).stats)

    @property
    def native_size(self) -> int:
        """The side in pixels of the square that the model was made for."""
        return self.first.native_size

    def another(self, folder: str | Path | None = None) -> Self:
        """Another studio over the same model, with other sessions."""
        studio = object.__new__(type(self))
        studio.first, studio.wardrobe, studio.reads_looks = self.first, self.wardrobe, self.reads_looks
        studio._begin(self.capacity, folder)
        return studio

    def _begin(self, capacity: int, folder: str | Path | None) -> None:
        self.pace = Pace()
        self.capacity, self.feature_bytes = capacity, self.first.max_recorded_bytes
        self._temporary = tempfile.TemporaryDirectory(prefix="fisedit-")
        model = re.sub(r"[^\w.-]+", "-", model_name(self.first.model)).strip(".-") or "model"
        self.folder = Path(self._temporary.name if folder is None else folder).resolve() / model
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
    def name(self) -> str:
        """What is loaded, for people: no place on this machine."""
        unet = self.first.pipe.unet
        return f"{model_name(self.first.model)}, {str(unet.dtype).removeprefix('torch.')} on {unet.device.type}"

    @property
    def guidance(self) -> float:
        """The guidance to begin with; strong guidance hurts a model as small as the demo model."""
        return 4.0 if self.first.model == "demo" else 7.5

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
            held = {key: session.editor.recorded_bytes for key, session in self._sessions.items()}
            for key, session in self._sessions.items():
                if sum(held.values()) <= self.feature_bytes:
                    return
                if not session.idle:
                    continue
                with suppress(Busy), session.work() as editor:
                    editor.forget()
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
            session = Session(self.first.beside(), self.folder / key, Path(self._temporary.name) / "out" / key)
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
            del self._sessions[longest]
