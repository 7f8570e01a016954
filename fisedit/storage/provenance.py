"""Where a picture came from: the source's config and every edit since, as JSON and as AUTOMATIC1111's `parameters`.

An origin is all that it takes to make a picture again, but for the model, which it names, and for a picture that was
opened, which no words can make. It names no file and no folder. Knows plain values; neither files nor models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fisedit import __version__
from fisedit.errors import FisEditError, InputError
from fisedit.models.hub import HUB_ID
from fisedit.storage.image_metadata import Metadata
from fisedit.values import (
    LATENT_FACTOR,
    MAX_DILATION,
    EditMask,
    GenerationConfig,
    Likeness,
    MaskSource,
    SchedulerName,
    likenesses,
    make_generation_config,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit.history import EditResult
    from fisedit.values import BoolGrid

VERSION = 1
_LOCAL = "./"
_MOST_LETTERS, _MOST_EDITS = 4_000_000, 1_000

_GENERATED = {field.name for field in fields(GenerationConfig)} - {"inversion", "like", "loras"}
_OPENED = {field.name for field in fields(GenerationConfig)} - {"scheduler", "like", "loras"}
_ELSEWHERE: Mapping[str, Any] = {
    "seed": 0,
    "num_inference_steps": 25,
    "guidance_scale": 7.5,
    "width": 512,
    "height": 512,
    "scheduler": "ddim",
    "inversion": "ddim",
}
"""How a picture of another program is opened."""

_SAMPLERS = {
    SchedulerName.DDIM: "DDIM",
    SchedulerName.DPM_SOLVER: "DPM++ 2M",
    SchedulerName.EULER: "Euler",
    SchedulerName.EULER_ANCESTRAL: "Euler a",
    SchedulerName.LCM: "LCM",
}
"""Names by which web UIs know them."""


@dataclass(frozen=True, eq=False)
class PastEdit:
    """One edit of a picture's past.

    Args:
        prompt, mask, growth, structure, start, checked: as in `EditResult`. change: what its words changed, for people.
        like: whose look it took.
    """

    prompt: str
    mask: EditMask
    growth: tuple[int, ...]
    structure: float
    start: int
    checked: bool
    change: str
    like: tuple[Likeness, ...] = ()


@dataclass(frozen=True, eq=False)
class Origin:
    """A picture's past.

    Args:
        model: "demo", a hub id, "./name" for a file or folder whose place is nobody's business, or "" for no name.
        dtype, device: what it ran in and on. config: of the source. edits: since then, each of the one before.
        before: `parameters` that a picture had when it was opened, or "".
    """

    model: str
    dtype: str
    device: str
    config: GenerationConfig
    edits: tuple[PastEdit, ...] = ()
    before: str = ""

    @property
    def prompt(self) -> str:
        """What the picture shows."""
        return self.edits[-1].prompt if self.edits else self.config.prompt


def model_name(model: str) -> str:
    """A model's name as a picture may tell it: of what lies on this machine the last part alone."""
    path = Path(model).expanduser()
    if model in ("demo", "") or (HUB_ID.fullmatch(model) and not path.exists()):
        return model
    return _LOCAL + path.resolve().name


def model(past: Origin, given: str | Path | None) -> str | Path:
    """The model to make a picture again with.

    Raises:
        InputError: none was given, and the picture's own cannot be known.
    """
    if given is not None:
        return given
    if not past.model or past.model.startswith(_LOCAL):
        of = f"a model of its maker's, {past.model.removeprefix(_LOCAL)}" if past.model else "a model without a name"
        raise InputError(f"the picture was made with {of}; give --model, a file or folder that holds it")
    return past.model


def arguments(past: Origin, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What `Editor.generate` makes the source of, or `Editor.open` opens the picture itself with.

    Raises:
        InputError: a change that means nothing there.
    """
    way, takes = ("opened", _OPENED) if past.config.opened else ("generated", _GENERATED)
    if strange := sorted(set(changes) - takes):
        raise InputError(f"the picture was {way}, where {strange[0]} means nothing; leave it out")
    if past.config.like or any(edit.like for edit in past.edits):
        raise InputError("the picture took the look of another, which its file does not hold; edit it as --picture")
    if past.config.loras:
        names = ", ".join(name for name, _ in past.config.loras)
        raise InputError(
            f"the picture was made with LoRAs ({names}), which its file does not hold; edit it as --picture"
        )
    told = {name: value for name, value in asdict(past.config).items() if name in takes}
    if past.config.opened:
        told |= {"prompt": past.prompt or None, "width": None, "height": None}  # whatever suits its size now
    return {**told, **changes}


def origin(lineage: Sequence[EditResult], model: str, dtype: str, device: str) -> Origin:
    """The origin of the last result of a lineage that begins with a source; edits that changed nothing do not count."""
    source, *edits = lineage
    past = (edit for edit in edits if edit.mask.source is not MaskSource.NOWHERE)
    return Origin(
        model_name(model),
        dtype,
        device,
        source.config,
        tuple(
            PastEdit(e.prompt, e.mask, e.growth, e.structure, e.start, e.checked, str(e.diff), e.config.like)
            for e in past
        ),
        str(source.image.info.get("before", "")),
    )


def metadata(past: Origin) -> Metadata:
    """Both texts of an origin."""
    return Metadata(_parameters(past), _json(past))


def of(made: Metadata) -> Origin:
    """What a picture's texts tell. Of one that was made elsewhere the prompts alone count, and it can only be opened.

    Raises:
        InputError: they tell nothing, or are damaged, or come from a newer version.
    """
    if made.origin:
        return _read(made.origin)
    if not made.parameters:
        raise InputError("the picture says nothing of how it was made; edit it as --picture")
    prompt, negative = _prompts(made.parameters)
    return Origin("demo", "", "", make_generation_config(prompt, negative_prompt=negative, **_ELSEWHERE))


def _parameters(past: Origin) -> str:
    """As AUTOMATIC1111's web UI writes it: prompts, then one line of settings."""
    config, model = past.config, Path(past.model).name
    start = past.edits[-1].start if past.edits else 0
    settings = {
        "Steps": config.num_inference_steps,
        "Sampler": _SAMPLERS[config.scheduler],
        "CFG scale": f"{config.guidance_scale:g}",
        "Seed": config.seed,
        "Size": f"{config.width}x{config.height}",
        "Model": model.removesuffix(".safetensors"),
        "Denoising strength": f"{1 - start / config.num_inference_steps:.4g}" if start else "",
        "Version": f"fisedit {__version__}",
    }
    line = ", ".join(f"{name}: {_quoted(str(value))}" for name, value in settings.items() if value != "")
    negative = [f"Negative prompt: {config.negative_prompt}"] if config.negative_prompt else []
    return "\n".join([past.prompt, *negative, line])


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if set(value) & set(',:\n"') else value


def _prompts(parameters: str) -> tuple[str, str]:
    """Prompt and negative prompt of a `parameters` text."""
    words, _, last = f"\n{parameters.strip()}".rpartition("\n")
    prompt, _, negative = (words if last.startswith("Steps: ") else f"{words}\n{last}").partition("\nNegative prompt:")
    return prompt.strip(), negative.strip()


def _json(past: Origin) -> str:
    edits = [
        {
            "prompt": edit.prompt,
            "change": edit.change,
            "mask": {"source": edit.mask.source, "confidence": edit.mask.confidence, "runs": _runs(edit.mask.grid)},
            "growth": edit.growth,
            "structure": edit.structure,
            "start": edit.start,
            "checked": edit.checked,
            **_like(edit.like),
        }
        for edit in past.edits
    ]
    told = {
        "fisedit": __version__,
        "version": VERSION,
        "torch": version("torch"),
        "model": past.model,
        "dtype": past.dtype,
        "device": past.device,
        "source": {k: v for k, v in asdict(past.config).items() if v or k not in ("like", "loras")},
        "edits": edits,
    }
    return json.dumps(told | ({"before": past.before} if past.before else {}))


def _like(like: tuple[Likeness, ...]) -> dict[str, Any]:
    """As pictures without one say nothing of it, older versions read them."""
    return {"like": [asdict(one) for one in like]} if like else {}


def _read(text: str) -> Origin:
    """An origin of which nothing is believed before it is checked."""
    try:
        told: Any = json.loads(_checked(text, len(text) <= _MOST_LETTERS))
        found = told["version"]
        if found == VERSION:
            config, names = make_generation_config(**told["source"]), (told["model"], told["dtype"], told["device"])
            before = told.get("before", "")
            _checked(
                told, all(isinstance(name, str) for name in (*names, before)) and len(told["edits"]) <= _MOST_EDITS
            )
            return Origin(*names, config, tuple(_edit(entry, config) for entry in told["edits"]), before)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, FisEditError) as error:
        raise InputError("what the picture says of its making is damaged; edit it as --picture") from error
    wanted = f"of version {VERSION}, got {found!r:.20}; update fisedit"
    raise InputError(f"what the picture says of its making must be {wanted}, or edit it as --picture")


def _edit(told: Any, config: GenerationConfig) -> PastEdit:
    steps, mask = config.num_inference_steps, told["mask"]
    grid = _grid(mask["runs"], config.height // LATENT_FACTOR, config.width // LATENT_FACTOR)
    growth, structure, start = tuple(told["growth"]), told["structure"], told["start"]
    fits = len(growth) in (0, steps) and all(type(cells) is int and 0 <= cells <= MAX_DILATION for cells in growth)
    return PastEdit(
        _checked(told["prompt"], isinstance(told["prompt"], str) and told["prompt"].strip() and grid.any()),
        EditMask(grid, MaskSource(mask["source"]), float(_checked(mask["confidence"], 0 <= mask["confidence"] <= 1))),
        _checked(growth, fits),
        float(_checked(structure, 0 <= structure <= 1)),
        _checked(start, type(start) is int and 0 <= start < steps),
        bool(told["checked"]),
        str(told["change"]),
        likenesses(told.get("like", ())),
    )


def _checked(value: Any, holds: object) -> Any:
    if not holds:
        raise ValueError(f"out of range: {value!r:.80}")
    return value


def _runs(grid: BoolGrid) -> list[int]:
    """Lengths of runs of equal cells, row by row, the first outside (perhaps 0)."""
    cells: NDArray[np.bool_] = np.concatenate([[False], grid.ravel()])
    edges = np.flatnonzero(cells[1:] != cells[:-1])
    runs: list[int] = np.diff([0, *edges, grid.size]).tolist()
    return runs


def _grid(runs: list[int], height: int, width: int) -> BoolGrid:
    """Booleans [h, w] of runs."""
    _checked(runs, all(type(n) is int and n >= 0 for n in runs) and sum(runs) == height * width)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width)
