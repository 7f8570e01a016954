"""LoRAs that a studio offers. They lie in the model that all share, so that who needs others waits for who is at work.

A picture is painted with what was chosen for it, and every edit of it with the same. Knows LoRAs and threads; neither
pages nor sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING

from app.limits import Busy
from fisedit.errors import InputError, SessionError
from fisedit.graph import loras

if TYPE_CHECKING:
    from fisedit import Editor

Scales = Mapping[str, float]
"""Names of LoRAs -> how much they count."""

_MOMENT = 0.1
"""Seconds between two looks whether who waits was stopped."""


class Wardrobe:
    """The LoRAs of one model, of which some count at a time.

    Args:
        editor: of the model; it loads them. sources: files or folders, as in `Editor.load_lora`.

    Raises:
        AdapterError: one cannot be loaded. InputError: two of one label, or one that pictures cannot tell of.
    """

    def __init__(self, editor: Editor, sources: Sequence[str | Path]) -> None:
        self._editor = editor
        self._names: dict[str, str] = {}  # by label
        self._units: dict[str, float] = {}  # by name: what a recipe tells of the scale 1
        for source in sources:
            self._take_in(Path(source))
        self._on: Scales = {}
        self._at_work, self._line, self._changed = 0, deque[object](), Condition()
        if self._names:
            editor.scale_loras({})

    @property
    def labels(self) -> tuple[str, ...]:
        """What people choose from."""
        return tuple(self._names)

    def chosen(self, label: str, scale: float) -> Scales:
        """What a choice puts on; nothing for "". Raises InputError for a label that is not offered."""
        if not label:
            return {}
        if label not in self._names:
            raise InputError(f"lora must be one of {', '.join(self.labels) or 'none'}, got {label!r:.40}")
        return {self._names[label]: round(float(scale), 2)} if round(float(scale), 2) else {}

    def told(self, recorded: Sequence[tuple[str, float]]) -> Scales:
        """What a picture was made with, from its recipe.

        Raises:
            SessionError: something that is not offered here.
        """
        most: dict[str, float] = {}
        for name, scaling in recorded:
            most[name] = max(most.get(name, 0.0), scaling, key=abs)
        if missing := ", ".join(most.keys() - self._units.keys()):
            raise SessionError(f"the picture was made with the LoRA {missing}; start the app with it, as --lora")
        return {name: round(scaling / self._units[name], 2) for name, scaling in most.items()}

    def choice(self, recorded: Sequence[tuple[str, float]]) -> tuple[str, float]:
        """The same as label and scale, ("", 1.0) for nothing. Raises SessionError as `told`, and for several."""
        scales = self.told(recorded)
        if len(scales) > 1:
            raise SessionError(f"the picture was made with {len(scales)} LoRAs, and here one at a time is chosen")
        labels = {name: label for label, name in self._names.items()}
        return next(((labels[name], scale) for name, scale in scales.items()), ("", 1.0))

    def words(self, recorded: Sequence[tuple[str, float]]) -> str:
        """The same for people: "style at 0.8"; "" for nothing."""
        labels = {name: label for label, name in self._names.items()}
        known = [one for one in recorded if one[0] in labels]
        return ", ".join(f"{labels[name]} at {scale:g}" for name, scale in self.told(known).items())

    @contextmanager
    def worn(self, scales: Scales, check: Callable[[], None] = lambda: None, patience: float = inf) -> Iterator[None]:
        """The model with these and no others, for as long as the block runs. Who asks first is served first.

        Args:
            check: called while waiting; may raise. patience: seconds to wait for who is at work with others.

        Raises:
            Busy: patience is over.
        """
        ticket = object()
        with self._changed:
            self._line.append(ticket)
            try:
                while self._line[0] is not ticket or (self._at_work and scales != self._on):
                    check()
                    if patience <= 0:
                        raise Busy("somebody paints with other LoRAs; try again in a moment")
                    self._changed.wait(_MOMENT)
                    patience -= _MOMENT
                if scales != self._on:
                    self._editor.scale_loras(scales)
                    self._on = scales
                self._at_work += 1
            finally:
                self._line.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def _take_in(self, source: Path) -> None:
        label = source.expanduser().resolve().stem
        if label in self._names:
            raise InputError(f"two LoRAs are called {label}; rename one of them")
        name = self._editor.load_lora(source)
        self._editor.scale_loras({name: 1.0})
        layers = [scaling for of, scaling in loras(self._editor.pipe.unet) if of == name]
        if not layers:
            raise InputError(f"the LoRA {source} changes no layer of the UNet; give one that does")
        self._names[label], self._units[name] = name, max(layers, key=abs)
