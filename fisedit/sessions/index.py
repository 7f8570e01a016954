"""session.json: its text to frozen, checked values and back. Every field is checked before anything is built of it.

It has a digest of its own fields and one of every file. Knows JSON and values; neither files nor pictures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fisedit.errors import FisEditError, SessionError
from fisedit.metadata.cell_runs import parse_run, run_entry
from fisedit.metadata.json_checks import (
    Check,
    checked_fields,
    flag,
    mapping,
    none,
    number,
    one_of,
    refuse_constant,
    require,
    text,
    tuple_of,
    whole,
)
from fisedit.sessions.files import ENDINGS, IMAGE_ENDINGS, MASK_ENDING, file_name, page_name
from fisedit.values import (
    MAX_DILATION,
    MAX_PROMPT_CHARS,
    STEPS,
    AdapterUse,
    EditStats,
    GenerationConfig,
    MaskSource,
    SavedAdapter,
    SchedulerName,
    config_to_dict,
    make_adapter_use,
    make_generation_config,
    num_timesteps,
)

if TYPE_CHECKING:
    from fisedit.history import EditResult
    from fisedit.values import EditMode

VERSION = 5
_OLDEST = 2
"""The first version with digests; those up to `VERSION` differ in nothing but what a result may have."""

_MAX_COUNT = 2**63 - 1
_MAX_TIMESTEPS = num_timesteps(SchedulerName.HEUN, STEPS[1])
_MAX_TEXT, _MAX_ITEMS, _MAX_REFERENCES = 10_000, 100, 16
_MAX_LORA_SCALES = 4_000  # a LoRA may have another in every layer
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, FisEditError)


@dataclass(frozen=True)
class Limits:
    """The limits of an index.

    Args:
        index_bytes: Bytes of its text.
        results: Results.
        characters: Letters of a prompt.
    """

    index_bytes: int = 64 << 20
    results: int = 10_000
    characters: int = MAX_PROMPT_CHARS


LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class ResultEntry:
    """One result of an index; the fields that are not named here are those of `EditResult`.

    Args:
        id: Digits.
        parent: Id of an entry before this one; None for a source.
        config: The config, as in `EditResult`.
        mask_source: The source of its mask.
        mask_confidence: The confidence of its mask, 0 to 1.
        stats: The statistics, as in `EditResult`.
        run: The run, as in `EditResult`.
        model: The model that made it.
        files: Ending -> SHA-256 of the file's bytes, in hexadecimal digits.
        pages: SHA-256 of every page of its recorded features; empty where they were not saved.
        extends: Id of an entry before this one whose picture it continues, as in `EditResult`.
    """

    id: str
    parent: str | None
    config: GenerationConfig
    mask_source: MaskSource
    mask_confidence: float
    stats: EditStats
    run: EditMode
    model: str
    files: Mapping[str, str]
    pages: tuple[str, ...] = ()
    extends: str | None = None

    def page_names(self) -> dict[str, str]:
        """Names of the files of its pages, in their order -> SHA-256 of their bytes."""
        return {page_name(self.id, i, sha256): sha256 for i, sha256 in enumerate(self.pages)}


@dataclass(frozen=True, eq=False)
class SessionIndex:
    """The contents of session.json.

    Args:
        model: Name or path of the model.
        dtype: Precision to load it in.
        current: Id of the result that the next edit begins with.
        adapters: Path or hub id of an adapter -> how it takes part, and what it is loaded with.
        references: Digest of a reference image -> SHA-256 of its file's bytes.
        results: Parents before their children.
        digest: SHA-256 of the text.
        vae: Path of the autoencoder; "" for the model's own.
        variant: Name of the variant of the model's weights; "" for none.
    """

    model: str
    dtype: str
    current: str
    adapters: Mapping[str, AdapterUse]
    references: Mapping[str, str]
    results: tuple[ResultEntry, ...]
    digest: str
    vae: str = ""
    variant: str = ""

    def files(self) -> dict[str, str]:
        """Names of the files that the index needs, without pages -> SHA-256 of their bytes."""
        references = [(f"reference-{digest}", ".png", sha) for digest, sha in self.references.items()]
        own = [(entry.id, *file) for entry in self.results for file in entry.files.items()]
        return {file_name(*one): one[2] for one in references + own}

    def page_names(self) -> set[str]:
        """Names of the files of all pages."""
        return {name for entry in self.results for name in entry.page_names()}


def make_entry(
    result: EditResult, files: Mapping[str, str], model: str = "", pages: Collection[str] = ()
) -> dict[str, Any]:
    """A result's entry.

    Args:
        result: The result.
        files: The files' digests, as in `ResultEntry`.
        model: The model that made it, "" for the session's.
        pages: The pages' digests, as in `ResultEntry`.
    """
    entry = {
        "id": result.id,
        "parent": result.parent,
        "recipe": {"like": (), "loras": ()} | config_to_dict(result.config),
        "change": str(result.diff),
        **run_entry(result.run),
        "mask": {"source": result.mask.source, "confidence": result.mask.confidence},
        "stats": result.stats.as_dict(),
        "files": dict(files),
    }
    optional = {"model": model, "pages": list(pages), "extends": result.extends}
    return entry | {name: value for name, value in optional.items() if value}


def encode_index(index: Mapping[str, Any]) -> bytes:
    """The text of an index, with its digest."""
    return json.dumps({**index, "sha256": _digest(index)}, indent=2, default=str).encode() + b"\n"


def decode_index(data: bytes, where: object, limits: Limits = LIMITS) -> tuple[dict[str, Any], SessionIndex]:
    """The JSON of an index, and its checked values.

    Args:
        data: The text.
        where: What it was read from, for errors.
        limits: What it may hold at most.

    Raises:
        SessionError: Another version, or anything that no session has.
    """
    _limit(where, "bytes of session.json", len(data), limits.index_bytes)
    try:
        index: Any = json.loads(data, parse_constant=refuse_constant)
        version = index["version"]
        is_supported = type(version) is int and _OLDEST <= version <= VERSION
        count = len(index["results"]) if is_supported else 0
        _limit(where, "results", count, limits.results)
        found = _parse(index, data) if is_supported else None
    except SessionError:
        raise
    except _ERRORS as error:
        raise damaged(where, "session.json") from error
    if found is None:
        raise SessionError(
            f"session in {where} must be of version {VERSION}, got {version!r:.20}; use the fisedit that wrote it"
        )
    longest = max(len(text) for one in found.results for text in _prompts(one))
    _limit(where, "letters in a prompt", longest, limits.characters)
    return index, found


def _prompts(entry: ResultEntry) -> tuple[str, ...]:
    return entry.config.prompt, entry.config.negative_prompt, *(each.prompt for each in entry.run.regional)


def _limit(where: object, what: str, count: int, limit: int) -> None:
    if count > limit:
        raise SessionError(f"the session in {where} must have at most {limit} {what}, got {count}")


def damaged(where: object, what: str) -> SessionError:
    """The error for a session that cannot be read."""
    return SessionError(f"the session in {where} is damaged ({what}); restore it from a copy")


def _digest(index: Mapping[str, Any]) -> str:
    """SHA-256 of an index's fields without the digest itself, independent of the text's layout."""
    fields = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _parse(index: dict[str, Any], data: bytes) -> SessionIndex:
    require(index["sha256"] == _digest(index))
    found = checked_fields(index, _INDEX, optional={"adapters", "vae", "variant"})
    require(found["results"])
    entries: dict[str, ResultEntry] = {}
    for one in found["results"]:
        entry = _parse_entry(one, found["model"])
        require(entry.id not in entries)
        _check_lineage(entry, None if entry.parent is None else entries[entry.parent])
        require(entry.extends is None or (entry.config.opened and not entry.parent and entry.extends in entries))
        entries[entry.id] = entry
    require(found["current"] in entries)
    return SessionIndex(
        found["model"],
        found["dtype"],
        found["current"],
        found.get("adapters", MappingProxyType({})),
        found["references"],
        tuple(entries.values()),
        hashlib.sha256(data).hexdigest(),
        found.get("vae", ""),
        found.get("variant", ""),
    )


def _parse_entry(entry: Any, model: str) -> ResultEntry:
    found = checked_fields(
        entry, _RESULT, optional={"model", "pages", "extends", "erased", "shallow", "regional", "rim"}
    )
    config: GenerationConfig = found["recipe"]
    stats, run = found["stats"], parse_run(found, config)
    require((stats.growth, stats.steps_shared) == (run.growth, run.start) and (stats.active_rows or not run.growth))
    return ResultEntry(
        found["id"],
        found["parent"],
        config,
        found["mask"]["source"],
        found["mask"]["confidence"],
        stats,
        run,
        found.get("model", model),
        found["files"],
        found.get("pages", ()),
        found.get("extends"),
    )


def _check_lineage(entry: ResultEntry, parent: ResultEntry | None) -> None:
    """An edit has its source's settings; a source has no edit's."""
    if parent is None:
        require(not (entry.run.growth or entry.run.start or entry.run.structure or entry.run.needs_mask))
        require(entry.config.opened or entry.config.prompt)
    else:
        own = entry.config
        changed = {name: getattr(own, name) for name in ("prompt", "seed", "like", "loras", "textual_inversions")}
        require(own == replace(parent.config, **changed))
        require(entry.model == parent.model)


def _config(value: Any) -> GenerationConfig:
    names_nothing = value["prompt"] == ""  # of an opened picture, or where all that was named is erased
    config = make_generation_config(**(value | {"prompt": "a picture"} if names_nothing else value))
    config = replace(config, prompt="") if names_nothing else config
    require(len(config.like) <= _MAX_REFERENCES)
    require(len(config.loras) <= _MAX_LORA_SCALES and len(config.textual_inversions) <= _MAX_ITEMS)
    return config


def _seconds(value: Any) -> dict[str, float]:
    found = dict(mapping(text(_MAX_TEXT), number(0, 1e12), _MAX_ITEMS)(value))
    require(found["total"] > 0)
    return found


def _stats(value: Any) -> EditStats:
    optional_fields = {"fallback", "notes", "steps_shared", "unet_evaluations_captured", "uncaptured"}
    return EditStats(**checked_fields(value, _STATS, optional=optional_fields))


def _adapters(value: Any) -> dict[str, AdapterUse]:
    usual: Mapping[str, Check] = {
        "control_guidance_start": _SHARE,
        "control_guidance_end": _SHARE,
        "guess_mode": flag,
        "image_encoder": _NAME,
    }
    checks: Mapping[str, Check] = {"source": text(_MAX_TEXT), "scale": number(-10, 10), **usual}
    found = tuple_of(lambda one: checked_fields(one, checks, optional=usual.keys()), _MAX_ITEMS)(value)
    return {one.pop("source"): _adapter(**one) for one in found}


def _adapter(image_encoder: str = "", **use: Any) -> SavedAdapter:
    return SavedAdapter(**asdict(make_adapter_use(**use)), image_encoder=image_encoder)


def _files(value: Any) -> Mapping[str, str]:
    found: Mapping[str, str] = mapping(text(16), _SHA256, len(ENDINGS))(value)
    require(found.keys() <= set(ENDINGS) and MASK_ENDING in found and len(found.keys() & set(IMAGE_ENDINGS)) == 1)
    return found


_SHA256, _COUNT, _SHARE = text(64, "[0-9a-f]{64}"), whole(0, _MAX_COUNT), number(0, 1)
_ID = text(9, "0|[1-9][0-9]*")
_CELLS = tuple_of(whole(0, MAX_DILATION), _MAX_TIMESTEPS)
_NAME = text(_MAX_TEXT)

_STATS: Mapping[str, Check] = {
    "mask_area": _SHARE,
    "mask_source": MaskSource,
    "mask_confidence": _SHARE,
    "active_rows": tuple_of(_COUNT, _MAX_ITEMS),
    "growth": _CELLS,
    "unet_evaluations_dense": _COUNT,
    "unet_evaluations_sparse": _COUNT,
    "macs": _COUNT,
    "macs_dense": _COUNT,
    "seconds": _seconds,
    "recorded_bytes": _COUNT,
    "fallback": _NAME,
    "notes": tuple_of(_NAME, _MAX_ITEMS),
    "steps_shared": whole(0, _MAX_TIMESTEPS),
    "unet_evaluations_captured": _COUNT,
    "uncaptured": _NAME,
}
_MASK: Mapping[str, Check] = {"source": MaskSource, "confidence": _SHARE}
_RESULT: Mapping[str, Check] = {
    "id": _ID,
    "parent": one_of(none, _ID),
    "recipe": _config,
    "change": text(8 * MAX_PROMPT_CHARS),
    **dict.fromkeys(("growth", "structure", "start", "checked", "erased"), lambda value: value),
    **dict.fromkeys(("shallow", "regional", "rim"), lambda value: value),
    "mask": lambda value: checked_fields(value, _MASK),
    "stats": _stats,
    "model": _NAME,
    "files": _files,
    "pages": tuple_of(_SHA256, _MAX_TIMESTEPS + 1),
    "extends": _ID,
}
_INDEX: Mapping[str, Check] = {
    "version": lambda version: version,
    "model": _NAME,
    "vae": _NAME,
    "variant": _NAME,
    "dtype": text(20),
    "current": _ID,
    "adapters": _adapters,
    "results": lambda value: value,
    "sha256": _SHA256,
    "references": mapping(text(16, "[0-9a-f]{16}"), _SHA256, LIMITS.results),
}
"""Field of session.json -> what checks and converts it."""
