"""LoRAs that a studio offers, several at a time. They lie in a model that all share, so that who needs others waits.

A picture is painted with what was chosen for it, and every edit of it with the same. Knows LoRAs and threads; neither
pages nor sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from app.fair_lock import Line
from fisedit.errors import AdapterError, InputError, SessionError
from fisedit.sparse.modules import loras

if TYPE_CHECKING:
    from fisedit import Editor

Scales = Mapping[str, float]
"""Names of LoRAs -> how much they count."""

Recorded = Sequence[tuple[str, float]]
"""Names of LoRAs and what their layers are scaled by, as a config tells."""


class Wardrobe:
    """The LoRAs that are offered, by label, and what recipes tell of them.

    Args:
        editor: of the model that all of them must fit; it loads them. sources: files or folders, as in
            `Editor.load_lora`.

    Raises:
        AdapterError: one cannot be loaded. InputError: two of one label, or one that pictures cannot tell of.
    """

    def __init__(self, editor: Editor, sources: Sequence[str | Path]) -> None:
        self._sources: dict[str, Path] = {}  # by label
        self._names: dict[str, str] = {}  # by label
        self._units: dict[str, float] = {}  # by name: what a config tells of the scale 1
        for source in sources:
            self._take_in(editor, Path(source).expanduser().resolve())

    @property
    def labels(self) -> tuple[str, ...]:
        """What people choose from."""
        return tuple(self._names)

    def hang(self, editor: Editor) -> dict[str, str]:
        """Load them all into another model; names and labels of those that do not fit it."""
        misfits = {}
        for label, source in self._sources.items():
            try:
                editor.load_lora(source)
            except AdapterError:
                misfits[self._names[label]] = label
        return misfits

    def chosen(self, scales: Mapping[str, float]) -> Scales:
        """What a choice puts on, by label. Raises InputError for a label that is not offered."""
        if strange := [label for label in scales if label not in self._names]:
            raise InputError(f"lora must be one of {', '.join(self.labels) or 'none'}, got {strange[0]!r:.40}")
        rounded = {self._names[label]: round(float(scale), 2) for label, scale in scales.items()}
        return {name: scale for name, scale in rounded.items() if scale}

    def told(self, recorded: Recorded) -> Scales:
        """What a picture was made with, from its config.

        Raises:
            SessionError: something that is not offered here.
        """
        most: dict[str, float] = {}
        for name, scaling in recorded:
            most[name] = max(most.get(name, 0.0), scaling, key=abs)
        if missing := ", ".join(most.keys() - self._units.keys()):
            raise SessionError(f"the picture was made with the LoRA {missing}; start the app with it, as --lora")
        return {name: round(scaling / self._units[name], 2) for name, scaling in most.items()}

    def choice(self, recorded: Recorded) -> dict[str, float]:
        """The same by label. Raises SessionError as `told`."""
        scales = self.told(recorded)
        return {label: scales[name] for label, name in self._names.items() if name in scales}

    def words(self, recorded: Recorded) -> str:
        """The same for people: "ink at 0.8 and oil at 1"; "" for nothing."""
        known = [one for one in recorded if one[0] in self._units]
        return " and ".join(f"{label} at {scale:g}" for label, scale in self.choice(known).items())

    def _take_in(self, editor: Editor, source: Path) -> None:
        label = source.stem
        if label in self._sources:
            raise InputError(f"two LoRAs are called {label}; rename one of them")
        name = editor.load_lora(source)
        editor.scale_loras({name: 1.0})
        layers = [scaling for of, scaling in loras(editor.pipe.unet) if of == name]
        if not layers:
            raise InputError(f"the LoRA {source} changes no layer of the UNet; give one that does")
        self._sources[label], self._names[label], self._units[name] = source, name, max(layers, key=abs)


class Rail:
    """The LoRAs in one model, of which some count at a time.

    Args:
        editor: of the model. misfits: names and labels of LoRAs that do not fit it.
    """

    def __init__(self, editor: Editor, misfits: Mapping[str, str] = MappingProxyType({})) -> None:
        self._editor, self._misfits = editor, misfits
        self._on: Scales = {}
        self._at_work, self._line = 0, Line()
        editor.scale_loras({})

    @contextmanager
    def worn(self, scales: Scales, check: Callable[[], None] = lambda: None, patience: float = inf) -> Iterator[None]:
        """The model with these and no others, for as long as the block runs. Who asks first is served first.

        Args:
            check: called while waiting; may raise. patience: seconds to wait for who is at work with others.

        Raises:
            InputError: one that does not fit. Busy: patience is over.
        """
        if misfits := ", ".join(self._misfits[name] for name in scales if name in self._misfits):
            raise InputError(f"the LoRA {misfits} does not fit the model; choose another one")
        why = "somebody paints with other LoRAs; try again in a moment"
        with self._line.turn(lambda: not self._at_work or scales == self._on, check, patience, why):
            if scales != self._on:
                self._editor.scale_loras(scales)
                self._on = scales
            self._at_work += 1
        try:
            yield
        finally:
            with self._line.told():
                self._at_work -= 1
