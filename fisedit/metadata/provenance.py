"""An image's origin: the source's config and every edit since, as JSON and as AUTOMATIC1111's `parameters`.

An origin suffices to make the image again, except for the model, which it names, and for a source that was opened from
a file. It names no path. Knows plain values; neither files nor models.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fisedit import __version__
from fisedit.errors import FisEditError, InputError
from fisedit.metadata.cell_runs import decode_runs, is_rim, parse_run, run_entry, run_lengths
from fisedit.metadata.generation_parameters import FOREIGN_DEFAULTS, format_parameters, parse_parameters
from fisedit.metadata.image_metadata import Metadata, parameters_before
from fisedit.models.paths import HUB_ID, expand_home
from fisedit.values import (
    LATENT_FACTOR,
    AdapterReference,
    EditMask,
    EditMode,
    GenerationConfig,
    MaskSource,
    SchedulerName,
    check_seed,
    config_to_dict,
    make_generation_config,
    make_lora_entry,
    over_pixels,
    parse_adapter_references,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.history import EditResult
    from fisedit.values import BoolGrid

VERSION = 3
"""The version of the JSON; those before it differ in nothing but what an edit may have."""

_LOCAL = "./"
_MAX_CHARACTERS, _MAX_EDITS = 4_000_000, 1_000

_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    *(zlib.error, FisEditError),
)
"""The exceptions that reading an untrusted origin may raise."""

_OF_THE_MODEL = ("like", "loras", "textual_inversions")
_GENERATED = {field.name for field in fields(GenerationConfig)} - {"inversion", "crop", *_OF_THE_MODEL}
_OPENED = {field.name for field in fields(GenerationConfig)} - {"scheduler", "crop", *_OF_THE_MODEL}

_DISTILLED, _MIN_STEPS = (SchedulerName.LCM, SchedulerName.TCD), 10
"""The schedulers of few steps, and the fewest steps with which another picture is inverted."""


@dataclass(frozen=True, eq=False)
class PastEdit:
    """One edit of an origin.

    Args:
        prompt: The prompt, as in `EditResult`.
        mask: The mask, as in `EditResult`.
        run: The run, as in `EditResult`.
        change: The changed words as text.
        like: The references that it used.
        textual_inversions: The textual inversions, as in `GenerationConfig`.
        seed: The seed of its own noise inside the mask; None for that of the picture it was made of.
        loras: The LoRAs, as in `GenerationConfig`.
    """

    prompt: str
    mask: EditMask
    run: EditMode
    change: str
    like: tuple[AdapterReference, ...] = ()
    textual_inversions: tuple[str, ...] = ()
    seed: int | None = None
    loras: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Origin:
    """The origin of an image: how it was made.

    Args:
        model: "demo", a hub id, "./name" for a local file or folder (its path stays private), or "" if unknown.
        dtype: Precision that it was made in.
        device: Type of the torch device.
        config: Generation config of the source.
        edits: The edits, each of the result before it.
        before: `parameters` that the image had when it was opened, or "".
    """

    model: str
    dtype: str
    device: str
    config: GenerationConfig
    edits: tuple[PastEdit, ...] = ()
    before: str = ""

    @property
    def prompt(self) -> str:
        """The prompt of the last edit."""
        return self.edits[-1].prompt if self.edits else self.config.prompt


def model_name(model: str) -> str:
    """A model's name for `Origin.model`: of a local path only the last part."""
    path = expand_home(model)
    if model in ("demo", "") or (HUB_ID.fullmatch(model) and not path.exists()):
        return model
    return _LOCAL + path.resolve().name


def choose_model(origin: Origin, given: str | Path | None) -> str | Path:
    """The model to make an image again with.

    Args:
        origin: The image's origin.
        given: The user's choice, or None.

    Raises:
        InputError: None was given, and the image's own is a local file or unknown.
    """
    if given is not None:
        return given
    if not origin.model or origin.model.startswith(_LOCAL):
        of = (
            f"a model of its maker's, {origin.model.removeprefix(_LOCAL)}" if origin.model else "a model without a name"
        )
        raise InputError(f"the picture was made with {of}; give --model, a file or folder that holds it")
    return origin.model


def source_arguments(origin: Origin, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Editor.generate` for the source, or of `Editor.open` if the source was opened.

    Args:
        origin: The image's origin.
        changes: Arguments that replace the origin's.

    Raises:
        InputError: A change that does not apply, or an origin with references or LoRAs.
    """
    kind, allowed = ("opened", _OPENED) if origin.config.opened else ("generated", _GENERATED)
    if unknown := sorted(set(changes) - allowed):
        raise InputError(f"the picture was {kind}, where {unknown[0]} means nothing; leave it out")
    if origin.config.like or any(edit.like for edit in origin.edits):
        raise InputError(
            "the picture was made with an adapter, which its file does not hold; "
            "open it as a picture (edit --picture, drive --source-prompt)"
        )
    if loras := [*origin.config.loras, *(lora for edit in origin.edits for lora in edit.loras)]:
        names = ", ".join(sorted({name for name, _ in loras}))
        raise InputError(
            f"the picture was made with LoRAs ({names}), which its file does not hold; edit it as --picture"
        )
    words = {*origin.config.textual_inversions, *(name for edit in origin.edits for name in edit.textual_inversions)}
    if words:
        names = ", ".join(sorted(words))
        raise InputError(
            f"the picture was made with textual inversions ({names}), which its file does not hold; "
            "edit it as --picture"
        )
    result = {name: value for name, value in asdict(origin.config).items() if name in allowed}
    if origin.config.opened:
        result |= {"prompt": origin.prompt or None, "width": None, "height": None}  # chosen again for its present size
    return {**result, **changes}


def make_origin(lineage: Sequence[EditResult], model: str, dtype: str, device: str) -> Origin:
    """The origin of the last result of a lineage; edits that changed nothing are left out.

    Args:
        lineage: A source and its edits, each of the one before.
        model: The model's name or path.
        dtype: Precision.
        device: Type of the torch device.
    """
    source, *edits = lineage
    effective = (edit for edit in edits if edit.mask.source is not MaskSource.NOWHERE)
    return Origin(
        model_name(model),
        dtype,
        device,
        source.config,
        tuple(
            PastEdit(
                e.prompt,
                e.mask,
                e.run,
                str(e.diff),
                e.config.like,
                e.config.textual_inversions,
                None if e.config.seed == before.config.seed else e.config.seed,
                e.config.loras,
            )
            for before, e in pairwise((source, *effective))
        ),
        parameters_before(source.image),
    )


def to_metadata(origin: Origin) -> Metadata:
    """Both texts of an origin."""
    return Metadata(_parameters(origin), _to_json(origin))


def complete_metadata(metadata: Metadata, origin: Origin) -> Metadata:
    """A file's texts; parameters that it lacks, as a TIFF does, as the version that wrote it would tell them.

    Args:
        metadata: The texts of the file.
        origin: The origin that it tells.
    """
    if metadata.parameters or not metadata.origin:
        return metadata
    return Metadata(_parameters(origin, str(json.loads(metadata.origin).get("fisedit", ""))), metadata.origin)


def parse_origin(metadata: Metadata) -> Origin:
    """The origin of an image. One with `parameters` alone is opened as a source; of few steps or a distilled model's
    scheduler, only its prompts and seed are used.

    Args:
        metadata: The texts of the image's file.

    Raises:
        InputError: They are missing, damaged or of a newer version.
    """
    if metadata.origin:
        return _parse_json(metadata.origin)
    if not metadata.parameters:
        raise InputError("the picture says nothing of how it was made; edit it as --picture")
    prompt, settings = parse_parameters(metadata.parameters)
    negative, defaults = {"negative_prompt": settings["negative_prompt"]}, dict(FOREIGN_DEFAULTS)
    few = settings.get("scheduler") in _DISTILLED or settings.get("num_inference_steps", _MIN_STEPS) < _MIN_STEPS
    unused = {"width", "height"} | ({"num_inference_steps", "guidance_scale"} if few else set())
    opening = {name: value for name, value in settings.items() if name in _OPENED - unused}
    try:
        config = make_generation_config(prompt, **(defaults | opening))
    except InputError:  # a number out of range
        config = make_generation_config(prompt, **(defaults | negative))
    return Origin("demo", "", "", config)


def _parameters(origin: Origin, version: str = __version__) -> str:
    start = origin.edits[-1].run.start if origin.edits else 0
    return format_parameters(origin.prompt, origin.config, origin.model, start, version)


def _to_json(origin: Origin) -> str:
    edits = [
        {
            "prompt": edit.prompt,
            "change": edit.change,
            "mask": _mask_entry(edit.mask, with_pixels=not origin.config.opened),
            **run_entry(edit.run),
            **({"like": [reference.as_dict() for reference in edit.like]} if edit.like else {}),
            **({"textual_inversions": edit.textual_inversions} if edit.textual_inversions else {}),
            **({} if edit.seed is None else {"seed": edit.seed}),
            **({"loras": edit.loras} if edit.loras else {}),
        }
        for edit in origin.edits
    ]
    entry = {
        "fisedit": __version__,
        "version": VERSION,
        "torch": version("torch"),
        "model": origin.model,
        "dtype": origin.dtype,
        "device": origin.device,
        "source": config_to_dict(origin.config),
        "edits": edits,
    }
    return json.dumps(entry | ({"before": origin.before} if origin.before else {}))


def _mask_entry(mask: EditMask, *, with_pixels: bool) -> dict[str, Any]:
    """A mask; its pixels where its picture can be made again, whose canvas is the picture."""
    more = {}
    if mask.levels is not None:
        more["levels"] = _packed(mask.levels[mask.grid])
    if with_pixels and mask.pixels is not None:
        more["pixels"] = _packed(mask.pixels[over_pixels(mask.grid, mask.pixels.shape[::-1])])
    return {"source": mask.source, "confidence": mask.confidence, "runs": run_lengths(mask.grid), **more}


def _parse_json(text: str) -> Origin:
    """The origin of an untrusted text; every value is checked."""
    try:
        data: Any = json.loads(_checked(text, len(text) <= _MAX_CHARACTERS))
        found = data["version"]
        if type(found) is int and 1 <= found <= VERSION:
            config, names = make_generation_config(**data["source"]), (data["model"], data["dtype"], data["device"])
            before, edits = data.get("before", ""), data["edits"]
            _checked(data, all(isinstance(name, str) for name in (*names, before)) and len(edits) <= _MAX_EDITS)
            return Origin(*names, config, tuple(_parse_edit(entry, config) for entry in edits), before)
    except _DAMAGE as error:
        raise InputError("what the picture says of its making is damaged; edit it as --picture") from error
    required = f"of version {VERSION}, got {found!r:.20}; update fisedit"
    raise InputError(f"what the picture says of its making must be {required}, or edit it as --picture")


def _parse_edit(data: Any, config: GenerationConfig) -> PastEdit:
    mask = data["mask"]
    grid = decode_runs(mask["runs"], config.height // LATENT_FACTOR, config.width // LATENT_FACTOR)
    run = parse_run(data, config)
    _checked(run.growth, run.growth or not run.needs_mask)
    _checked(run.rim, run.rim is None or (is_rim(run.rim, grid) and "levels" not in mask))
    says_something = isinstance(data["prompt"], str) and (data["prompt"].strip() or run.needs_mask)
    return PastEdit(
        _checked(data["prompt"], says_something and grid.any()),
        EditMask(
            grid,
            MaskSource(mask["source"]),
            float(_checked(mask["confidence"], 0 <= mask["confidence"] <= 1)),
            levels=_decode_levels(mask["levels"], grid) if "levels" in mask else None,
            pixels=_unpacked(mask["pixels"], over_pixels(grid, (config.width, config.height)))
            if "pixels" in mask
            else None,
        ),
        run,
        str(data["change"]),
        parse_adapter_references(data.get("like", ())),
        tuple(_checked(name, isinstance(name, str)) for name in data.get("textual_inversions", ())),
        None if data.get("seed") is None else check_seed(data["seed"]),
        tuple(make_lora_entry(name, scale) for name, scale in data.get("loras", ())),
    )


def _checked(value: Any, condition: object) -> Any:
    if not condition:
        raise ValueError(f"out of range: {value!r:.80}")
    return value


def _decode_levels(levels: Any, grid: BoolGrid) -> NDArray[np.uint8]:
    """Levels uint8 [h, w] of a soft mask, from those of its cells."""
    found = _unpacked(levels, grid)
    return cast("NDArray[np.uint8]", _checked(found, found[grid].all()))


def _packed(values: NDArray[np.uint8]) -> str:
    """Values row by row, as bytes that are deflated, in base64."""
    return b64encode(zlib.compress(values.tobytes())).decode()


def _unpacked(packed: Any, inside: BoolGrid) -> NDArray[np.uint8]:
    """Values uint8 of what is inside, booleans [H, W], from `_packed`; 0 elsewhere."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(b64decode(packed, validate=True), int(inside.sum()))
    _checked(packed, unpacker.eof and len(data) == inside.sum())
    found = np.zeros(inside.shape, np.uint8)
    found[inside] = np.frombuffer(data, np.uint8)
    return found
