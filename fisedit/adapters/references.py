"""Loaded adapters, the pictures and drives that they read, and what they read of them, once for all steps.

Knows a pipeline and the adapters' common form (`picture_adapter`); neither their kinds nor history.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
from scipy.ndimage import binary_fill_holes
from torch import nn

from fisedit.adapters.picture_adapter import AdapterInputs
from fisedit.errors import AdapterError, InputError
from fisedit.history import SessionAssets
from fisedit.models.injection import exclusive
from fisedit.models.weight_changes import check_files, count_changes
from fisedit.storage.canvas import to_canvas, to_editable
from fisedit.values import CONTROL, DRIVE, MOTION, REFERENCE, AdapterReference, AdapterUse, SavedAdapter, check_scale
from fisedit.values.drive import Drive

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.adapters.base import UNetAdapter
    from fisedit.adapters.picture_adapter import PictureAdapter
    from fisedit.features.cache import CachedFeatures
    from fisedit.machine.model import Model
    from fisedit.sparse.executor import Executor
    from fisedit.values import Box, GenerationConfig

_SAME_LEVEL = 16
"""Levels of 255 up to which pixels of two control pictures are alike."""

_READERS = {REFERENCE: "an adapter", CONTROL: "a control adapter", DRIVE: "a control network"}

_KEPT = 4
"""Readings of pictures that stay in memory, the last ones used."""


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """A loaded adapter.

    Args:
        adapter: The adapter that reads pictures.
        source: where it came from.
        use: The use in new pictures.
        image_encoder: folder of its image encoder, "" for the one beside its file.
    """

    adapter: PictureAdapter
    source: str
    use: AdapterUse
    image_encoder: str = ""


class References:
    """The adapters and pictures of an engine.

    Args:
        pipe: The pipeline that is conditioned.
        executor: The executor of its UNet.
    """

    def __init__(self, pipe: Model, executor: Executor) -> None:
        self._pipe, self._executor = pipe, executor
        self.adapters: dict[str, LoadedAdapter] = {}
        self.pictures: dict[str, Image] = {}
        self._kept: OrderedDict[tuple[str, str, int, int, int], Any] = OrderedDict()

    def load(self, adapter: PictureAdapter, source: str, use: AdapterUse, image_encoder: str = "") -> str:
        """Load an adapter.

        Args:
            adapter: moved to the UNet's device and dtype.
            source: where it came from.
            use: The use in new pictures.
            image_encoder: folder of its image encoder, "" for the one beside its file.

        Returns:
            Its identity.

        Raises:
            AdapterError: it is loaded already, or was made for another UNet.
            InputError: a use that this kind does not have.
        """
        adapter.check_use(use)
        adapter.check_fit(self._pipe.unet)
        name = adapter.identity
        if name in self.adapters:
            raise AdapterError(f"the adapter {source} is loaded already; change its scale with scale_adapter")
        adapter.match(self._pipe.unet)
        for module in _modules(adapter):
            count_changes(module)
        self.adapters[name] = LoadedAdapter(adapter, source, use, image_encoder)
        return name

    def loaded(self, source: str) -> bool:
        """Return whether an adapter of this source is loaded."""
        return any(loaded.source == source for loaded in self.adapters.values())

    def unload(self, source: str | None) -> None:
        """Unload an adapter.

        Args:
            source: where it came from; None for all.

        Raises:
            AdapterError: no such adapter is loaded.
        """
        for name in self._named(source):
            del self.adapters[name]
        self.forget()

    def set_scale(self, source: str | None, scale: float) -> None:
        """Set an adapter's scale.

        Args:
            source: where it came from; None for all.
            scale: The scale in new pictures.

        Raises:
            AdapterError: no such adapter is loaded.
            InputError: a scale out of range.
        """
        scale = check_scale(scale)
        for name in self._named(source):
            loaded = self.adapters[name]
            self.adapters[name] = replace(loaded, use=replace(loaded.use, scale=scale))

    def _named(self, source: str | None) -> list[str]:
        named = [name for name, loaded in self.adapters.items() if source in (None, loaded.source, name)]
        if not named:
            sources = ", ".join(loaded.source for loaded in self.adapters.values()) or "none"
            raise AdapterError(f"no adapter {source} is loaded; loaded are {sources}")
        return named

    def forget(self) -> None:
        """Drop what was read."""
        self._kept.clear()

    def check_files(self) -> None:
        """Check the files that adapters' weights are mapped from.

        Raises:
            ModelError: one of them was written to in place.
        """
        for loaded in self.adapters.values():
            for module in _modules(loaded.adapter):
                check_files(module)

    def refresh(self) -> None:
        """Drop what was read and move adapters to where the UNet is, for when the model was changed or moved."""
        self.forget()
        for loaded in self.adapters.values():
            loaded.adapter.match(self._pipe.unet)

    def entries(
        self, given: object, argument: str, crop: Box | None = None, size: tuple[int, int] | None = None
    ) -> tuple[AdapterReference, ...]:
        """Return a config's entries for a picture or a drive: one for every loaded adapter that reads it.

        Args:
            given: a PIL image, or a `Drive`.
            argument: `REFERENCE`, `CONTROL` or `DRIVE`, which it was given as.
            crop: the part of the edited picture that is on the canvas, which a picture of its size is cut to; or None.
            size: width and height of the edited picture, or None.

        Raises:
            InputError: it is no picture, or no drive.
            AdapterError: no adapter that reads it is loaded.
        """
        readers = {name: each for name, each in self.adapters.items() if each.adapter.argument == argument}
        if not readers:
            raise AdapterError(f"a {argument} needs {_READERS[argument]} that reads it; call load_adapter first")
        if argument == DRIVE:
            if not isinstance(given, Drive):
                raise InputError(f"drive must be a Drive, got {type(given).__name__}; see fisedit.Drive")
            return tuple(AdapterReference(name, each.use, given.digest, given) for name, each in readers.items())
        if not isinstance(given, PIL.Image.Image):
            what = type(given).__name__
            raise InputError(f"{argument} must be a PIL image, got {what}; open files with PIL.Image.open")
        upright = to_editable(given)
        upright = to_canvas(upright, upright.size)
        upright = upright.crop(crop) if crop is not None and upright.size == size else upright
        digest = hashlib.sha256(f"{upright.size}".encode() + upright.tobytes()).hexdigest()[:16]
        with exclusive(self):
            self.pictures[digest] = upright
        return tuple(AdapterReference(name, loaded.use, digest) for name, loaded in readers.items())

    def reads(self, entry: AdapterReference, argument: str) -> bool:
        """Return whether a loaded adapter reads an entry's picture as this argument."""
        return entry.adapter in self.adapters and self.adapters[entry.adapter].adapter.argument == argument

    def picture_of(self, entries: Sequence[AdapterReference], argument: str) -> Image | None:
        """The picture that entries of `GenerationConfig.like` name for an argument, if it is here."""
        named = (entry.reference for entry in entries if self.reads(entry, argument))
        return next((self.pictures[name] for name in named if name in self.pictures), None)

    def changed_control(
        self, before: Sequence[AdapterReference], after: Sequence[AdapterReference], size: tuple[int, int]
    ) -> Image | None:
        """Find the part of the picture where the control pictures of two configs differ.

        Args:
            before: entries of `GenerationConfig.like`.
            after: entries of another one.
            size: width and height of the picture in pixels.

        Returns:
            Mode L, white where they differ, with what their differences enclose; None where no adapter reads another
            control than before, or had none.
        """
        old = {entry.adapter: entry.reference for entry in before if self.reads(entry, CONTROL)}
        changed = np.zeros(size[::-1], bool)
        for entry in after:
            names = old.get(entry.adapter), entry.reference
            if names[0] != names[1] and all(name in self.pictures for name in names):
                first, second = (np.asarray(to_canvas(self.pictures[str(name)], size), np.int16) for name in names)
                changed |= np.abs(first - second).max(-1) > _SAME_LEVEL
        filled = binary_fill_holes(changed).astype(np.uint8) * 255
        return PIL.Image.fromarray(filled) if changed.any() else None

    def prepare(self, config: GenerationConfig, branches: int) -> int:
        """Read the references of a config that were not read yet.

        Args:
            config: The config of the picture.
            branches: guidance branches, 1 or 2.

        Returns:
            Multiply-accumulates spent.

        Raises:
            AdapterError: an adapter or a picture is missing.
            InputError: a size that the adapter cannot take.
        """
        return sum(self._read(entry, config, branches) for entry in config.like)

    def used(self, entries: Iterable[AdapterReference]) -> SessionAssets:
        """The adapters and pictures that entries of `GenerationConfig.like` name, if they are here."""
        named = tuple(entries)
        adapters = {name: loaded for name, loaded in self.adapters.items() if any(one.adapter == name for one in named)}
        pictures = {one.reference: self.pictures[one.reference] for one in named if one.reference in self.pictures}
        saved = {
            loaded.source: SavedAdapter(**asdict(loaded.use), image_encoder=loaded.image_encoder)
            for loaded in adapters.values()
        }
        return SessionAssets(saved, pictures)

    def keep(self, named: Collection[str]) -> None:
        """Let pictures go that nothing names any more, and what was read of them.

        Args:
            named: digests of pictures and drives that are needed.
        """
        for name in self.pictures.keys() - named:
            del self.pictures[name]
        for key in [key for key in self._kept if key[1] not in named]:
            del self._kept[key]

    def conditions(self, config: GenerationConfig, branches: int, step: int) -> tuple[UNetAdapter, ...]:
        """The adapters that take part in a config's step, with what they read of its pictures.

        Args:
            config: The config of the picture.
            branches: guidance branches, 1 or 2.
            step: its index.

        Raises:
            AdapterError, InputError: as in `prepare`.
        """
        self.prepare(config, branches)
        return tuple(
            self._adapter(one).condition(self._kept[_key(one, config, branches)], one.use, branches)
            for one in config.like
            if one.use.covers(step, config.num_timesteps)
        )

    def clip_conditions(
        self, configs: Sequence[GenerationConfig], pads: Sequence[Image], branches: int
    ) -> Callable[[int], tuple[UNetAdapter, ...]]:
        """The adapters that take part in the frames of a clip, with what they read, and all loaded motion modules.

        Args:
            configs: The configs of the frames; they differ in what adapters read alone.
            pads: pictures before the first frame and after the last, for motion modules that read them; () for none.
            branches: guidance branches, 1 or 2.

        Returns:
            Gives those of a step by its index.

        Raises:
            AdapterError: one is not loaded, or one of which frames share what it reads reads several.
            InputError: a size that one cannot take.
        """
        config, found = configs[0], list["tuple[AdapterUse, UNetAdapter]"]()
        for entries in zip(*(each.like for each in configs), strict=True):
            reads = [self._reading(*each, branches) for each in zip(entries, configs, strict=True)]
            adapter, use = self._adapter(entries[0]), entries[0].use
            read = reads[0] if all(each is reads[0] for each in reads) else adapter.joined(reads)
            found.append((use, adapter.condition(read, use, branches)))
        for loaded in self.motion:
            sides = [
                loaded.adapter.read(AdapterInputs(self._pipe, self._executor, pad, config, branches))[0] for pad in pads
            ]
            found.append((loaded.use, loaded.adapter.condition(sides, loaded.use, branches)))
        return lambda step: tuple(one for use, one in found if use.covers(step, config.num_timesteps))

    @property
    def motion(self) -> list[LoadedAdapter]:
        """The loaded motion modules."""
        return [loaded for loaded in self.adapters.values() if loaded.adapter.argument == MOTION]

    def _reading(self, entry: AdapterReference, config: GenerationConfig, branches: int) -> Any:
        self._read(entry, config, branches)
        return self._kept[_key(entry, config, branches)]

    def unread_conditions(self, config: GenerationConfig, branches: int) -> tuple[tuple[UNetAdapter, float], ...]:
        """The adapters of a config without its pictures, for costs, and the share of the steps that each takes part in.

        Args:
            config: The config of the picture.
            branches: guidance branches, 1 or 2.

        Raises:
            AdapterError: one is not loaded.
        """
        steps = config.num_timesteps
        return tuple(
            (self._adapter(one).condition(None, one.use, branches), len(one.use.covered_steps(steps)) / steps)
            for one in config.like
        )

    def are_recorded(self, config: GenerationConfig, features: Sequence[CachedFeatures]) -> bool:
        """Return whether features of all steps were recorded with all adapters of a config; the first steps tell."""
        firsts = ((one, one.use.covered_steps(config.num_timesteps)[:1]) for one in config.like)
        return all(self._adapter(one).is_recorded(features[step], one.use) for one, first in firsts for step in first)

    def _adapter(self, entry: AdapterReference) -> PictureAdapter:
        """The adapter that an entry of `GenerationConfig.like` names. Raises AdapterError where it is not loaded."""
        if entry.adapter not in self.adapters:
            raise AdapterError(f"the picture was made with the adapter {entry.adapter}, which is not loaded; load it")
        return self.adapters[entry.adapter].adapter

    def _read(self, entry: AdapterReference, config: GenerationConfig, branches: int) -> int:
        key = _key(entry, config, branches)
        if key in self._kept:
            self._kept.move_to_end(key)
            return 0
        adapter = self._adapter(entry)
        given = entry.drive or self.pictures.get(entry.reference)
        if given is None or isinstance(given, Drive) is not (adapter.argument == DRIVE):
            raise AdapterError(f"the {adapter.argument} picture {entry.reference} is not here; give it again")
        self._kept[key], macs = adapter.read(AdapterInputs(self._pipe, self._executor, given, config, branches))
        while len(self._kept) > max(_KEPT, len(config.like)):
            self._kept.popitem(last=False)
        return macs


def _key(entry: AdapterReference, config: GenerationConfig, branches: int) -> tuple[str, str, int, int, int]:
    return entry.adapter, entry.reference, config.width, config.height, branches


def _modules(adapter: PictureAdapter) -> list[nn.Module]:
    """The networks that an adapter holds."""
    return [part for part in vars(adapter).values() if isinstance(part, nn.Module)]
