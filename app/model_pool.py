"""Models that the app offers. They are loaded when they are first needed, and only so many are loaded at a time.

All sessions share one copy of a model. A model that is not loaded takes the place of the least recently used one.
Loading, unloading and activating LoRAs happen on the inference worker's thread alone, so that they need no lock. Knows
editors; neither pages, folders nor sessions.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import get_num_threads, set_num_threads

from app.eta import RuntimeEstimator
from app.lora_catalog import LoraCatalog, Scales
from app.validation import label
from app.word_edits import NounEdits, noun_edits
from fisedit import Editor
from fisedit.edits.requests import diff_prompts
from fisedit.errors import (
    AdapterError,
    Cancelled,
    FisEditError,
    InputError,
    MeasurementError,
    ModelError,
    SessionError,
)
from fisedit.integrations.mask_providers import open_provider
from fisedit.machine.contention import ThreadChoice
from fisedit.models.loader import config_folder, load_tokenizer
from fisedit.models.paths import absolute_name
from fisedit.models.validation import reads_sizes, sample_size
from fisedit.models.vocabulary import Vocabulary, read_vocabulary
from fisedit.models.weight_files import read_json
from fisedit.prompts.chunks import context_length, split_chunks
from fisedit.prompts.weighting import parse
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from torch.nn import Module

    from fisedit.integrations.mask_providers import MaskProvider
    from fisedit.values import EditScript

MAX_LOADED = 2
"""Models in memory at once."""

FEATURES_PER_WEIGHT, MIN_FEATURE_BYTES = 4, 512 << 20
"""Bytes of recorded features for each byte of a model's weights, and at least; never more than half of the memory."""

_QUICK_SECONDS = 0.5
"""Seconds of a first small picture, below which a model's steps count as short."""

_MOST_REFUSALS = 3
"""Refused measurements after which the machine is measured again only where a user asks for it."""

_log = logging.getLogger(__name__)


def _feature_bound(editor: Editor) -> int:
    """Bytes of recorded features that suit a model: enough for some of its sources, however large the memory is."""
    parts = (editor.pipe.unet, editor.pipe.vae, editor.pipe.text_encoder)
    weights: int = sum(weight.nbytes for part in parts for weight in part.parameters())
    return min(editor.max_recorded_bytes, max(MIN_FEATURE_BYTES, FEATURES_PER_WEIGHT * weights))


@contextmanager
def called_before_layers(unet: Module, check: Callable[[], None]) -> Iterator[None]:
    """Call a function before every layer of a UNet, in this thread or any other; steps of large models take seconds.

    Args:
        unet: the UNet.
        check: may raise `Cancelled`.
    """
    with ExitStack() as hooks:
        for layer in unet.modules():
            if not any(layer.children()):
                hooks.callback(layer.register_forward_pre_hook(lambda *_: check()).remove)
        yield


class LoadedModel:
    """A model in memory, and which LoRAs are active in it.

    Args:
        editor: over the model; sessions' editors are made beside it.
        unsupported: names and labels of offered LoRAs that do not fit it.
    """

    def __init__(self, editor: Editor, unsupported: Mapping[str, str] = MappingProxyType({})) -> None:
        self.editor = editor
        self._unsupported, self._active = unsupported, dict[str, float]()
        editor.scale_loras({})

    def activate_loras(self, scales: Scales) -> None:
        """Activate these LoRAs and no others. Raises InputError for one that does not fit."""
        if names := ", ".join(self._unsupported[name] for name in scales if name in self._unsupported):
            raise InputError(f"the LoRA {names} does not fit the model; choose another one")
        if scales != self._active:
            self.editor.scale_loras(scales)
            self._active = dict(scales)


class OfferedModel:
    """One model, and what is known of it while it is not loaded.

    Args:
        place: name, folder or file, as `Editor.from_pretrained` takes it.
        local_files_only: whether the network is never used.

    Attributes:
        name: what sessions call it.
        label: what users call it.
        estimator: estimator of the seconds of its runs.
        quick: whether its steps are short.
        loaded: the model in memory, or None.
        measured: whether this machine has its cost table, or cannot keep or measure one.

    Raises:
        ModelError: its configuration or headers show that it cannot be used.
    """

    def __init__(self, place: str | Path, *, local_files_only: bool = False) -> None:
        self.place, self.name = place, absolute_name(place)
        self.label, self.estimator, self.quick = label(self.name), RuntimeEstimator(), False
        self.loaded: LoadedModel | None = None
        self.measured, self._refusals = False, 0
        self._config_folder = config_folder(place, local_files_only=local_files_only)

    @cached_property
    def _unet_config(self) -> Mapping[str, Any]:
        return read_json(self._config_folder / "unet" / "config.json")

    @property
    def native_size(self) -> int:
        """The side in pixels of the square that it was made for."""
        return sample_size(self._unet_config) * LATENT_FACTOR

    @property
    def reads_sizes(self) -> bool:
        """True if it is told the sizes of the original, the crop and the target."""
        return reads_sizes(self._unet_config)

    @property
    def guidance(self) -> float:
        """The default guidance scale; strong guidance hurts a model as small as the demo model."""
        return 4.0 if self.name == "demo" else 7.5

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The words that it knows; None where its folder lists none."""
        return read_vocabulary(self._config_folder)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._config_folder)

    def diff(self, old: str, new: str) -> EditScript:
        """Return the changes for it from one prompt to another; it need not be loaded."""
        return diff_prompts(old, new, self._tokenizer)

    def noun_edits(self, prompt: str) -> tuple[NounEdits, ...]:
        """Return what the nouns of a prompt can be changed to; it need not be loaded."""
        return noun_edits(prompt, self._tokenizer)

    @property
    def chunk_room(self) -> int:
        """Tokens that its text encoder reads at once."""
        return context_length(self._tokenizer) - 2

    def count_tokens(self, prompt: str) -> tuple[int, ...]:
        """Tokens of each chunk of a prompt, and of what is not read; it need not be loaded."""
        chunks = split_chunks(parse(prompt), self._tokenizer)
        return tuple(len(self._tokenizer(chunk.text, verbose=False)["input_ids"]) - 2 for chunk in chunks)

    def use_threads(self, available: int) -> None:
        """Set the number of OpenMP threads. A model of short steps leaves one core free for the server and the browser,
        as every step waits for the slowest thread."""
        set_num_threads(max(1, available - self.quick))

    def warm_up(self, editor: Editor, threads: int) -> None:
        """Generate a small picture, as a first run takes longer. Where that is quick, generate and edit pictures of the
        model's own size as well, to observe the seconds of its runs."""
        trial, began = editor.beside(), perf_counter()
        trial.generate("a cat", num_inference_steps=2, width=64, height=64)
        self.quick = perf_counter() - began < _QUICK_SECONDS
        self.use_threads(threads)
        self.measured = editor.calibrated in (None, True)
        if self.quick and self.estimator.dense_seconds(1) is None:
            self._observe_trials(trial)

    def measure(self, check: Callable[[], None]) -> str:
        """Measure this machine's cost table of the model, which must be loaded.

        Args:
            check: called before every step and every layer; may raise `Cancelled`.

        Returns:
            The reason why no table is kept; "" for one that is.
        """
        assert self.loaded is not None
        measured, why = True, ""
        try:
            with called_before_layers(self.loaded.editor.pipe.unet, check):
                self.loaded.editor.calibrate(on_step=lambda *_: check())
        except (OSError, MeasurementError) as error:
            why = str(error)
            _log.warning("no cost table is kept: %s", why)
            self._refusals += isinstance(error, MeasurementError)
            measured = isinstance(error, OSError) or self._refusals >= _MOST_REFUSALS
        except Cancelled:
            measured = False
            raise
        finally:
            self.measured = measured
        return why

    def _observe_trials(self, trial: Editor) -> None:
        """Learn from runs; the first run of a kind takes longer, and does not count."""
        mask = np.zeros((self.native_size, self.native_size), bool)
        mask[: self.native_size // 3, : self.native_size // 3] = True
        for _ in range(2):
            result = trial.generate("a cat", num_inference_steps=6)
        self.estimator.observe(result.stats, trial=True)
        for prompt in ("a dog", "a fox"):
            result = trial.edit(prompt, mask=mask)
        self.estimator.observe(result.stats, trial=True)


class ModelPool:
    """The models that are offered.

    Args:
        places: names, folders or files, as `Editor.from_pretrained` takes them; the first model is loaded at once.
        loras: for all models that they fit; they must fit the first.
        adapters: for all models that they fit; they must fit the first.
        detector: what finds things in pictures, as `open_provider` takes it; None for nothing.
        max_loaded: models in memory at once.
        feature_bytes: recorded features of one editor; None for `FEATURES_PER_WEIGHT` bytes a byte of weights.
        loading: further arguments of `Editor.from_pretrained`, such as `device` and `preview_vae`.

    Attributes:
        first: the model of requests that choose none.
        loras: the LoRAs that are offered.
        reads: "reference", "control" and "drive", as far as an adapter reads them.
        detector: what finds things in pictures, or None.
        adapter_sources: identity of an adapter -> where it came from.
        dtype, device: dtype and device of the models, as text.
        thread_choice: The number of CPU threads that the models may compute with.

    Raises:
        ModelError, AdapterError: one of these cannot be loaded.
        InputError: two models or LoRAs of one name.
    """

    def __init__(
        self,
        places: Sequence[str | Path],
        *,
        loras: Sequence[str | Path] = (),
        adapters: Sequence[str | Path] = (),
        detector: str | Path | None = None,
        max_loaded: int = MAX_LOADED,
        feature_bytes: int | None = None,
        **loading: Any,
    ) -> None:
        self._models: dict[str, OfferedModel] = {}  # by label
        offline = bool(loading.get("local_files_only"))
        for place in places:
            model = OfferedModel(place, local_files_only=offline)
            if model.label in self._models:
                raise InputError(f"two models are called {model.label}; rename one of them")
            self._models[model.label] = model
        self.max_loaded, self.adapters, self.thread_choice = (
            max_loaded,
            tuple(adapters),
            ThreadChoice(get_num_threads()),
        )
        self._recent: OrderedDict[OfferedModel, None] = OrderedDict()  # least recently used first
        self._options: dict[str, Any] = loading | {"max_recorded_bytes": feature_bytes}
        self.detector: MaskProvider | None = None
        if detector is not None:  # which tells of things whatever their score is: requests name thresholds of their own
            self.detector = open_provider(str(detector), threshold=0, local_files_only=offline)
        self.first = next(iter(self._models.values()))
        editor = self._load_first(loras)
        self.feature_bytes = editor.max_recorded_bytes
        self.dtype, self.device = str(editor.pipe.unet.dtype).removeprefix("torch."), str(editor.pipe.unet.device.type)

    @property
    def models(self) -> tuple[OfferedModel, ...]:
        """All that are offered, loaded or not."""
        return tuple(self._models.values())

    def select(self, name: str) -> OfferedModel:
        """The model of a label, the first for "". Raises InputError for one that is not offered."""
        if name and name not in self._models:
            raise InputError(f"model must be one of {', '.join(self._models)}, got {name!r:.40}")
        return self._models[name] if name else self.first

    def find(self, name: str) -> OfferedModel | None:
        """The model that sessions or pictures call so; None for one that is not offered."""
        return self._models.get(label(name))

    def require(self, name: str) -> OfferedModel:
        """The model that sessions or pictures call so. Raises SessionError for one that is not offered."""
        if model := self.find(name):
            return model
        raise SessionError(f"the picture was made with the model {label(name)}; start the app with it, as --model")

    def load(self, model: OfferedModel) -> LoadedModel:
        """A model in memory, in place of the least recently used one where there is no room.

        Raises:
            ModelError: it cannot be loaded.
        """
        if model.loaded is None:
            self._evict_models()
            model.loaded = self._load(model)
        self._recent[model] = None
        self._recent.move_to_end(model)
        model.use_threads(self.thread_choice.threads)
        return model.loaded

    def unload(self, model: OfferedModel) -> None:
        """Drop a model, and with it all editors over it."""
        self._recent.pop(model, None)
        model.loaded = None
        gc.collect()  # modules and what is hooked into them refer to each other

    def _evict_models(self) -> None:
        while len(self._recent) >= self.max_loaded:
            self.unload(next(iter(self._recent)))

    def _load_first(self, loras: Sequence[str | Path]) -> Editor:
        editor = self._load_editor(self.first)
        for source in self.adapters:
            editor.load_adapter(source)
        self.reads = frozenset(each.adapter.argument for each in editor.adapters)
        self.adapter_sources = {each.adapter.identity: each.source for each in editor.adapters}
        self.loras = LoraCatalog(editor, loras)
        self.first.loaded = LoadedModel(editor)
        self.first.warm_up(editor, self.thread_choice.threads)
        self._recent[self.first] = None
        return editor

    def _load_editor(self, model: OfferedModel) -> Editor:
        editor = Editor.from_pretrained(model.place, **self._options)
        if self._options["max_recorded_bytes"] is not None:
            return editor
        return Editor(editor.pipe, model=editor.model, max_recorded_bytes=_feature_bound(editor))

    def _load(self, model: OfferedModel) -> LoadedModel:
        try:
            editor = self._load_editor(model)
            for source in self.adapters:
                with suppress(AdapterError):  # for another model
                    editor.load_adapter(source)
            loaded = LoadedModel(editor, self.loras.load_into(editor))
            model.warm_up(editor, self.thread_choice.threads)
        except FisEditError as error:  # which may name places on this machine
            _log.error("%s", error)
            raise ModelError(f"the model {model.label} cannot be loaded; the app's own output says why") from error
        return loaded
