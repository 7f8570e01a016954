"""LoRAs that the app offers, several at a time: by label, by name, and as generation configs record them.

A picture is generated with the LoRAs that were chosen for it, and every edit of it with the same. Knows editors;
neither pages nor sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fisedit.adapters.lora import FILE, suggested_sampling, weight_file
from fisedit.errors import AdapterError, InputError, SessionError
from fisedit.features.sites import loras
from fisedit.models.paths import DEMO_LORAS

if TYPE_CHECKING:
    from fisedit import Editor
    from fisedit.adapters.lora import SuggestedSampling

Scales = Mapping[str, float]
"""Names of LoRAs -> their scales."""

Recorded = Sequence[tuple[str, float]]
"""Names of LoRAs and what their layers are scaled by, as a generation config has them."""


def shipped() -> list[str]:
    """The demo model's LoRAs, where peft can load them."""
    return list(DEMO_LORAS) if find_spec("peft") else []


class LoraCatalog:
    """The LoRAs that are offered.

    Args:
        editor: editor of the model that all of them must fit; it loads them.
        sources: files or folders, as in `Editor.load_lora`.

    Raises:
        AdapterError: one cannot be loaded.
        InputError: two have one label.
    """

    def __init__(self, editor: Editor, sources: Sequence[str | Path]) -> None:
        self._files: dict[str, Path] = {}  # by label
        self._names: dict[str, str] = {}  # by label
        self._units: dict[str, float] = {}  # by name: what a config records of the scale 1
        self._sampling: dict[str, SuggestedSampling] = {}  # by label
        for source in sources:
            self._add(editor, source)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that users choose from."""
        return tuple(self._names)

    @property
    def sampling(self) -> Mapping[str, SuggestedSampling]:
        """The sampling that some of them suggest for new pictures, by label."""
        return self._sampling

    def load_into(self, editor: Editor) -> dict[str, str]:
        """Load all of them into another model; names and labels of those that do not fit it."""
        unsupported = {}
        for label, file in self._files.items():
            try:
                editor.load_lora(file)
            except AdapterError:
                unsupported[self._names[label]] = label
        return unsupported

    def select(self, scales: Mapping[str, float]) -> Scales:
        """Scales by name for scales by label. Raises InputError for a label that is not offered."""
        if unknown := [label for label in scales if label not in self._names]:
            raise InputError(f"lora must be one of {', '.join(self.labels) or 'none'}, got {unknown[0]!r:.40}")
        rounded = {self._names[label]: round(float(scale), 2) for label, scale in scales.items()}
        return {name: scale for name, scale in rounded.items() if scale}

    def select_recorded(self, recorded: Recorded) -> Scales:
        """Scales by name for what a config records. Raises SessionError for a LoRA that is not offered."""
        largest: dict[str, float] = {}
        for name, scaling in recorded:
            largest[name] = max(largest.get(name, 0.0), scaling, key=abs)
        if missing := ", ".join(largest.keys() - self._units.keys()):
            raise SessionError(f"the picture was made with the LoRA {missing}; start the app with it, as --lora")
        return {name: round(scaling / self._units[name], 2) for name, scaling in largest.items()}

    def scales_by_label(self, recorded: Recorded) -> dict[str, float]:
        """Scales by label for what a config records. Raises SessionError for a LoRA that is not offered."""
        scales = self.select_recorded(recorded)
        return {label: scales[name] for label, name in self._names.items() if name in scales}

    def as_text(self, recorded: Recorded) -> str:
        """Return the LoRAs that a config records, as "ink at 0.8 and oil at 1"; "" for nothing."""
        known = [one for one in recorded if one[0] in self._units]
        return " and ".join(f"{label} at {scale:g}" for label, scale in self.scales_by_label(known).items())

    def _add(self, editor: Editor, source: str | Path) -> None:
        file = weight_file(source).resolve()
        label = file.parent.name if file.name == FILE else file.stem
        if label in self._files:
            raise InputError(f"two LoRAs are called {label}; rename one of them")
        name = editor.load_lora(file)
        editor.scale_loras({name: 1.0})
        layers = [scaling for of, scaling in loras(editor.pipe.unet, editor.pipe.text_encoder) if of == name]
        self._files[label], self._names[label], self._units[name] = file, name, max(layers, key=abs)
        if sampling := suggested_sampling(file):
            self._sampling[label] = sampling
