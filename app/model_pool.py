"""Models that a studio offers. They are loaded when somebody first needs them, and some at a time are.

All share one copy; a model that is not there takes the place of the one that has been idle longest. With a model go the
editors over it, and what they recorded; pictures stay. Knows editors and threads; neither pages nor folders.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import inf
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from app.eta import Pace
from app.fair_lock import Line
from app.lora_catalog import Rail, Wardrobe
from app.thread_budget import Cores
from app.validation import label
from fisedit import Editor
from fisedit.errors import AdapterError, FisEditError, InputError, ModelError, SessionError
from fisedit.models.loader import config_folder, load_tokenizer
from fisedit.models.paths import absolute_name
from fisedit.models.weight_files import read_json
from fisedit.pipeline import changed
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from app.user_session import Session
    from fisedit.values import EditScript

MOST_LOADED = 2
"""Models in memory at once."""

_QUICK = 0.5
"""Seconds for a first small picture, within which a model is worth a few more to learn its pace by."""

_log = logging.getLogger(__name__)


class Model:
    """One model, and what is known of it while it is not loaded.

    Args:
        place: as `Editor.from_pretrained` takes it.

    Attributes:
        name, label: what sessions call it, and people. pace: of its runs. quick: whether its steps are short.
        editor, rail: over it, and its LoRAs, while it is loaded. reads_looks: whether the adapter fits it.
        desks: sessions' editors over it. users: how many are at work with it. opening: held by who loads it.

    Raises:
        ModelError: its configuration or headers tell that it cannot be used.
    """

    def __init__(self, place: str | Path) -> None:
        self.place, self.name = place, absolute_name(place)
        self.label, self.pace = label(self.name), Pace()
        self.editor: Editor | None = None
        self.rail: Rail | None = None
        self.reads_looks, self.quick, self.users, self.opening = False, False, 0, Lock()
        self._config_folder = config_folder(place)
        self.desks: WeakKeyDictionary[Session, Editor] = WeakKeyDictionary()

    @cached_property
    def native_size(self) -> int:
        """The side in pixels of the square that it was made for."""
        return int(read_json(self._config_folder / "unet" / "config.json")["sample_size"]) * LATENT_FACTOR

    @property
    def guidance(self) -> float:
        """The guidance to begin with; strong guidance hurts a model as small as the demo model."""
        return 4.0 if self.name == "demo" else 7.5

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._config_folder)

    def diff(self, old: str, new: str) -> EditScript:
        """What changes for it from one prompt to another; it need not be loaded."""
        return changed(old, new, self._tokenizer)

    def desk(self, session: Session) -> Editor:
        """A session's own editor over it; it must be loaded."""
        assert self.editor is not None
        if session not in self.desks:
            self.desks[session] = self.editor.beside(session.history, session.references)
        return self.desks[session]

    def recorded_bytes(self, session: Session) -> int:
        """Bytes of features that a session recorded with it."""
        desk = self.desks.get(session)
        return desk.recorded_bytes if desk else 0

    def forget(self, session: Session) -> None:
        """Let go of a session's editor, and what that recorded."""
        self.desks.pop(session, None)

    def open(self, editor: Editor, rail: Rail, cores: Cores) -> None:
        """It is loaded, and ready once a small picture is drawn, so that nobody waits for what only a first run does.
        Where that is quick, one of its own size is drawn and edited as well, to learn the pace."""
        trial, began = editor.beside(), perf_counter()
        trial.generate("a cat", num_inference_steps=2, width=64, height=64)
        self.quick = perf_counter() - began < _QUICK
        if self.quick and self.pace.dense(1) is None:
            with cores.shared(quick=True):
                self._try(trial)
        self.editor, self.rail = editor, rail

    def _try(self, trial: Editor) -> None:
        """Learn the pace; the first run of a kind takes longer, and does not count."""
        corner = np.zeros((self.native_size, self.native_size), bool)
        corner[: self.native_size // 3, : self.native_size // 3] = True
        for _ in range(2):
            made = trial.generate("a cat", num_inference_steps=6)
        self.pace.saw(made.stats, trial=True)
        for prompt in ("a dog", "a fox"):
            made = trial.edit(prompt, mask=corner)
        self.pace.saw(made.stats, trial=True)

    def drop(self) -> None:
        """Let go of it, and of what was recorded with it."""
        self.editor = self.rail = None
        self.desks.clear()
        gc.collect()  # modules and what is hooked into them refer to each other


class Shelf:
    """The models that are offered.

    Args:
        places, device, dtype: as in `Editor.from_pretrained`; the first model is loaded at once.
        loras, adapter: for all models that they fit; they must fit the first.
        most: models in memory at once. feature_bytes: recorded features of one editor.

    Raises:
        ModelError, AdapterError: one of these cannot be loaded. InputError: two models or LoRAs of one name.
    """

    def __init__(
        self,
        places: Sequence[str | Path],
        *,
        device: str | None = None,
        dtype: str | None = None,
        loras: Sequence[str | Path] = (),
        adapter: str | Path | None = None,
        most: int = MOST_LOADED,
        feature_bytes: int | None = None,
    ) -> None:
        self._models: dict[str, Model] = {}  # by label
        for model in map(Model, places):
            if model.label in self._models:
                raise InputError(f"two models are called {model.label}; rename one of them")
            self._models[model.label] = model
        self.most, self.adapter = most, adapter
        self.cores, self._line = Cores(), Line()
        self._held: OrderedDict[Model, None] = OrderedDict()  # longest idle first
        self._how: dict[str, Any] = {"device": device, "dtype": dtype, "max_recorded_bytes": feature_bytes}
        self.first = next(iter(self._models.values()))
        editor = Editor.from_pretrained(self.first.place, **self._how)
        if adapter is not None:
            editor.load_adapter(adapter)
        self.wardrobe, self.first.reads_looks = Wardrobe(editor, loras), adapter is not None
        unet, self.feature_bytes = editor.pipe.unet, editor.max_recorded_bytes
        self.dtype, self.device = str(unet.dtype).removeprefix("torch."), str(unet.device.type)
        self.first.open(editor, Rail(editor), self.cores)
        self._held[self.first] = None

    @property
    def models(self) -> tuple[Model, ...]:
        """All that are offered, loaded or not."""
        return tuple(self._models.values())

    def chosen(self, name: str) -> Model:
        """The model of a label, the first for "". Raises InputError for one that is not offered."""
        if name and name not in self._models:
            raise InputError(f"model must be one of {', '.join(self._models)}, got {name!r:.40}")
        return self._models[name] if name else self.first

    def known(self, name: str) -> Model | None:
        """The model that sessions or pictures call so; None for one that is not offered."""
        return self._models.get(label(name))

    def own(self, name: str) -> Model:
        """The same. Raises SessionError for one that is not offered."""
        if model := self.known(name):
            return model
        raise SessionError(f"the picture was made with the model {label(name)}; start the app with it, as --model")

    def desk(self, session: Session, name: str) -> Editor | None:
        """A session's editor over a model, where there is one by now."""
        model = self.known(name)
        return model.desks.get(session) if model else None

    def recorded_bytes(self, session: Session) -> int:
        """Bytes of features that a session recorded with any model."""
        return sum(model.recorded_bytes(session) for model in self.models)

    def forget(self, session: Session) -> None:
        """Let go of a session's editors, and what they recorded."""
        for model in self.models:
            model.forget(session)

    @contextmanager
    def lent(self, model: Model, check: Callable[[], None] = lambda: None, patience: float = inf) -> Iterator[Model]:
        """The model, loaded for as long as the block runs. Who asks first is served first.

        Args:
            check: called while waiting for others; may raise. patience: seconds to wait for them.

        Raises:
            ModelError: it cannot be loaded. Busy: patience is over.
        """
        why = "others are at work with other models; try again in a moment"
        with self._line.turn(lambda: self._room(model), check, patience, why):
            self._make_room(model)
            self._held[model] = None
            self._held.move_to_end(model)
            model.users += 1
        try:
            with model.opening:
                if model.editor is None:
                    self._load(model)
            yield model
        finally:
            with self._line.told():
                model.users -= 1
                if model.editor is None and not model.users:
                    del self._held[model]

    def _room(self, model: Model) -> bool:
        return model in self._held or len(self._held) < self.most or not all(held.users for held in self._held)

    def _make_room(self, model: Model) -> None:
        if model not in self._held and len(self._held) >= self.most:
            longest = next(held for held in self._held if not held.users)
            longest.drop()
            del self._held[longest]

    def _load(self, model: Model) -> None:
        try:
            editor = Editor.from_pretrained(model.place, **self._how)
            model.reads_looks = self._reads(editor)
            model.open(editor, Rail(editor, self.wardrobe.hang(editor)), self.cores)
        except FisEditError as error:  # which may name places on this machine
            _log.error("%s", error)
            raise ModelError(f"the model {model.label} cannot be loaded; the app's own output says why") from error

    def _reads(self, editor: Editor) -> bool:
        """Whether the adapter fits."""
        try:
            if self.adapter is not None:
                editor.load_adapter(self.adapter)
        except AdapterError:
            return False
        return self.adapter is not None
