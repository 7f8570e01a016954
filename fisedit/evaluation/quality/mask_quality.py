"""`fisedit bench masks`: the same edits' masks by every config, beside the truth. Nothing is edited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fisedit import __version__
from fisedit.evaluation.quality.edit_case import make_case
from fisedit.evaluation.quality.metrics import MaskFit, fit, median_and_tail
from fisedit.evaluation.quality.scene_edits import GENERATED_EVERY, WHOLE, expressible_kinds, sample_edits, vocabulary
from fisedit.evaluation.quality.tables import ALL, table
from fisedit.masking.localize import LATENTS, METHODS, THINGS
from fisedit.models.loader import load
from fisedit.values import LATENT_FACTOR, OnStep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fisedit.evaluation.quality.edit_case import EditCase
    from fisedit.evaluation.quality.scene_edits import BenchmarkEdit

ObjectRequest = Mapping[str, Any]
"""Arguments of `Editor.preview`."""

MASK_CONFIGS: dict[str, ObjectRequest] = {
    THINGS: {},
    f"{THINGS}, no probe": {"probe_steps": 0},
    **{name: {"mask_method": name} for name in METHODS if name not in (THINGS, LATENTS)},
    f"{LATENTS}, a fifth": {"mask_method": LATENTS, "share": 0.2},
    f"{LATENTS}, two fifths": {"mask_method": LATENTS, "share": 0.4},
}
"""Name -> how to ask for it; `share` of the steps is spent on looking. FISEdit spends 10 of 50."""

NOTES = (
    "in brackets the 10th percentile, or the 90th where low is good",
    "IoU, precision and recall are by latent cells of 8x8 pixels; one is true if any of its pixels is",
    "coverage is the mask's area over the true pixels; the true cells themselves have more than 1",
    "GMACs are those of the whole edit that would follow, looking included",
    "an inserted thing's truth is the box of the one that was drawn; where in the sky it hangs, no prompt tells",
)


@dataclass(frozen=True)
class MaskResult:
    """A config's mask of one edit: how it fits, what the edit would cost, and whether it would run dense."""

    fit: MaskFit
    gmacs: float
    fell_back: bool


FIGURES: dict[str, tuple[Callable[[MaskResult], float], bool]] = {
    "IoU": (lambda found: found.fit.cells.iou, True),
    "recall": (lambda found: found.fit.cells.recall, True),
    "precision": (lambda found: found.fit.cells.precision, True),
    "coverage": (lambda found: found.fit.coverage, False),
    "GMACs": (lambda found: found.gmacs, False),
}
"""Figure -> how to read it, and whether high is good."""


def run(
    *,
    model: str = "demo",
    edits: int = 120,
    num_inference_steps: int = 25,
    guidance_scale: float = 4.0,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    local_files_only: bool = False,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Look for the masks of edits of drawn scenes, whose truth is known, by every config.

    Args:
        model: as in `fisedit.models.loader.load`; drawn scenes use the words that are one token to it.
        edits: how many. guidance_scale: 4, which suits the demo model. seed: of the edits.
        local_files_only: never reach for the network. on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "notes", "summary", "classes", "rows", "edits"}, ready for JSON: the recipes in one short table,
        the shipped one's kinds of edit in another, all figures, and every edit's prompts and fits.

    Raises:
        InputError: a model that knows no scene's words. ModelError: it cannot be loaded.
    """
    pipe = load(model, device=device, dtype=dtype, local_files_only=local_files_only)
    side = pipe.unet.config.sample_size * LATENT_FACTOR
    found: list[dict[str, MaskResult]] = []
    told: list[dict[str, Any]] = []
    for i, edit in enumerate(_drawn(pipe.tokenizer, edits, side, seed)):
        if on_step is not None:
            on_step(i, edits, None)
        case = make_case(pipe, edit, num_inference_steps=num_inference_steps, guidance_scale=guidance_scale)
        found.append({name: _find(case, how) for name, how in MASK_CONFIGS.items()})
        told.append({"kind": edit.kind, "source_prompt": edit.source_prompt, "prompt": edit.prompt})
    every = rows([edit["kind"] for edit in told], found)
    settings = {"model": model, "pixels": side, "edits": len(told), "num_inference_steps": num_inference_steps}
    settings |= {"guidance_scale": guidance_scale, "seed": seed, "fisedit": __version__}
    settings |= {"dtype": str(pipe.unet.dtype).removeprefix("torch.")}
    names = (*FIGURES, "fell back")
    return {
        "settings": settings,
        "notes": NOTES,
        "summary": table([row for row in every if row["kind"] == ALL], ("recipe", "edits"), names),
        "classes": table([row for row in every if row["kind"] != ALL], ("kind", "recipe", "edits"), names),
        "rows": every,
        "edits": [
            edit | {"found": {name: _told(one) for name, one in by.items()}}
            for edit, by in zip(told, found, strict=True)
        ],
    }


def _told(found: MaskResult) -> dict[str, Any]:
    return {name: round(read(found), 4) for name, (read, _) in FIGURES.items()} | {"fell back": found.fell_back}


def _drawn(tokenizer: Any, count: int, side: int, seed: int) -> Iterator[BenchmarkEdit]:
    """So many edits of drawn scenes that have a place."""
    words = vocabulary(tokenizer)
    classes = [kind for kind in expressible_kinds(words, seed) if kind not in WHOLE]
    enough = (count + len(classes)) * GENERATED_EVERY // (GENERATED_EVERY - 1) + len(classes) * GENERATED_EVERY
    return islice((edit for edit in sample_edits(enough, side, words, classes, seed) if edit.picture), count)


def _find(case: EditCase, how: ObjectRequest) -> MaskResult:
    asked = dict(how)
    if "share" in asked:
        asked["probe_steps"] = max(1, round(asked.pop("share") * case.steps))
    seen = case.editor.preview(case.edit.prompt, **asked)
    assert case.edit.true_mask is not None, "edits of drawn scenes that have a place have a truth"
    return MaskResult(fit(seen.mask.grid, case.edit.true_mask), seen.macs / 1e9, bool(seen.fallback))


def rows(kinds_of: Sequence[str], found: Sequence[Mapping[str, MaskResult]]) -> list[dict[str, Any]]:
    """All figures of every config, of all edits and of every kind.

    Args:
        kinds_of: every edit's kind. found: every edit's masks, by config.

    Returns:
        {"config", "kind", "edits"}, for every figure {"median", "tail", "edits"}, and "fell back": {"mean", "edits"}.
    """
    told = []
    for kind, name in product((ALL, *dict.fromkeys(kinds_of)), found[0]):
        mine = [by[name] for of, by in zip(kinds_of, found, strict=True) if kind in (ALL, of)]
        row: dict[str, Any] = {"recipe": name, "kind": kind, "edits": len(mine)}
        for figure, (read, high_is_good) in FIGURES.items():
            middle, tail = median_and_tail([read(one) for one in mine], high_is_good=high_is_good)
            row[figure] = {"median": middle, "tail": tail, "edits": len(mine)}
        told.append(row | {"fell back": {"mean": fmean(one.fell_back for one in mine), "edits": len(mine)}})
    return told
