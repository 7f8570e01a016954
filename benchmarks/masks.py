"""`python -m benchmarks.masks`: every method's predicted masks of the same edits, beside the truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.quality.metric_tables import ALL, format_table, median_row, share_row
from benchmarks.quality.scene_edits import (
    GENERATED_EVERY,
    GLOBAL_KINDS,
    available_kinds,
    known_words,
    sample_edits,
)
from benchmarks.quality.scores import VISIBLE_SHARE
from fisedit import __version__
from fisedit.bench.edit_case import make_case
from fisedit.bench.metrics import MaskFit, mask_fit, share_outside
from fisedit.masking.mask_options import LATENTS, METHODS, OBJECT_MASKS
from fisedit.models.loader import load
from fisedit.values import LATENT_FACTOR, OnStep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffusers import StableDiffusionPipeline

    from fisedit.bench.edit_case import BenchmarkEdit, EditCase
    from fisedit.bench.settings import EvaluationSettings

MASK_METHODS: dict[str, Mapping[str, Any]] = {
    OBJECT_MASKS: {},
    f"{OBJECT_MASKS}, no probe": {"probe_steps": 0},
    **{name: {"mask_method": name} for name in METHODS if name not in (OBJECT_MASKS, LATENTS)},
    f"{LATENTS}, a fifth": {"mask_method": LATENTS, "share": 0.2},
    f"{LATENTS}, two fifths": {"mask_method": LATENTS, "share": 0.4},
}
"""Name -> arguments of `Editor.preview`, with probe steps as a `share` of all. FISEdit probes in 10 of 50."""

MIN_CORRECT_IOU = 0.5
"""IoU with the true cells from which a mask is right."""

CONFIDENCES = (0.0, 0.5, 0.8, 0.9, 0.95, 1.0)
"""Bounds of the bins in which confidence is compared with the share of masks that are right."""

NOTES = (
    "in square brackets the bootstrap's 95 % interval, in round ones the 10th percentile (90th where low is good)",
    "IoU, precision and recall are by latent cells of 8x8 pixels; one is true if any of its pixels is",
    "coverage is the mask's area over the true pixels; the true cells themselves have more than 1",
    "GMACs are those of the whole edit that would follow, probe steps included",
    "an inserted object's truth is the outline of the one that was drawn; no prompt says where in the sky it is",
    "parts are left where more than 2 % of a removed object's visible pixels lie outside the mask",
    "a mask is right where its IoU is at least a half",
)


@dataclass(frozen=True)
class MaskResult:
    """A method's mask of one edit.

    Args:
        fit: The fit of the mask to the truth.
        leftover: share of a removed object's visible pixels outside the mask, 0 to 1; None where none was removed.
        gmacs: what the edit would cost, in 1e9 multiply-accumulates.
        fell_back: whether it would run dense.
        confidence: The confidence of the mask, 0 to 1.
    """

    fit: MaskFit
    leftover: float | None
    gmacs: float
    fell_back: bool
    confidence: float

    @property
    def correct(self) -> bool:
        """Return whether the mask is right, as `masking.masks.confidence` has it."""
        return self.fit.cells.iou >= MIN_CORRECT_IOU


METRICS: dict[str, tuple[Callable[[MaskResult], float], bool]] = {
    "IoU": (lambda result: result.fit.cells.iou, True),
    "recall": (lambda result: result.fit.cells.recall, True),
    "precision": (lambda result: result.fit.cells.precision, True),
    "coverage": (lambda result: result.fit.coverage, False),
    "GMACs": (lambda result: result.gmacs, False),
}
"""Metric -> its value, and whether high is good."""

SHARES: dict[str, Callable[[MaskResult], bool | None]] = {
    "leaves parts": lambda result: None if result.leftover is None else result.leftover > VISIBLE_SHARE,
    "fell back": lambda result: result.fell_back,
}
"""Share of edits -> whether one counts, or None where that is no question."""


def measure_mask_quality(settings: EvaluationSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Predict the masks of edits of drawn scenes, whose truth is known, by every method.

    Args:
        settings: model, sampling and number of edits.
        on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "notes", "summary", "classes", "calibration", "rows", "edits"}, ready for JSON.
        The methods are in one short table, their kinds of edit in another. A third has confidence beside the share of
        masks that are right. Then come all metrics, and every edit's prompts and metrics.

    Raises:
        InputError: a model that knows no scene's words.
        ModelError: it cannot be loaded.
    """
    pipe = load(
        settings.model, device=settings.device, dtype=settings.dtype, local_files_only=settings.local_files_only
    )
    results: list[dict[str, MaskResult]] = []
    edits: list[dict[str, Any]] = []
    for i, edit in enumerate(_local_edits(pipe, settings)):
        if on_step is not None:
            on_step(i, settings.edits, None)
        case = make_case(
            pipe, edit, num_inference_steps=settings.num_inference_steps, guidance_scale=settings.guidance_scale
        )
        results.append({name: _measure_mask(case, arguments) for name, arguments in MASK_METHODS.items()})
        edits.append({"kind": edit.kind, "source_prompt": edit.source_prompt, "prompt": edit.prompt})
    rows = mask_rows([edit["kind"] for edit in edits], results)
    shown = (*METRICS, *SHARES)
    return {
        "settings": _settings_dict(settings, pipe, len(edits)),
        "notes": NOTES,
        "summary": format_table([row for row in rows if row["kind"] == ALL], ("recipe", "edits"), shown),
        "classes": format_table([row for row in rows if row["kind"] != ALL], ("kind", "recipe", "edits"), shown),
        "calibration": calibration_rows([by_method[OBJECT_MASKS] for by_method in results]),
        "rows": rows,
        "edits": [
            edit | {"found": {name: _result_dict(result) for name, result in by_method.items()}}
            for edit, by_method in zip(edits, results, strict=True)
        ],
    }


def _local_edits(pipe: StableDiffusionPipeline, settings: EvaluationSettings) -> Iterator[BenchmarkEdit]:
    """`settings.edits` edits of drawn scenes that concern a part of an opened picture."""
    words, count = known_words(pipe), settings.edits
    kinds = [kind for kind in available_kinds(words, settings.seed) if kind not in GLOBAL_KINDS]
    num_sampled = (count + len(kinds)) * GENERATED_EVERY // (GENERATED_EVERY - 1) + len(kinds) * GENERATED_EVERY
    edits = sample_edits(num_sampled, pipe.unet.config.sample_size * LATENT_FACTOR, words, kinds, settings.seed)
    return islice((edit for edit in edits if edit.picture), count)


def _measure_mask(case: EditCase, arguments: Mapping[str, Any]) -> MaskResult:
    options = dict(arguments)
    if "share" in options:
        options["probe_steps"] = max(1, round(options.pop("share") * case.steps))
    preview = case.editor.preview(case.edit.prompt, **options)
    assert case.edit.true_mask is not None, "edits of a part of an opened drawn scene have a truth"
    mask, removed = preview.mask, case.edit.removed
    leftover = None if removed is None else share_outside(removed, mask.grid)
    return MaskResult(
        mask_fit(mask.grid, case.edit.true_mask), leftover, preview.macs / 1e9, bool(preview.fallback), mask.confidence
    )


def _settings_dict(settings: EvaluationSettings, pipe: StableDiffusionPipeline, edits: int) -> dict[str, Any]:
    return {
        "model": settings.model,
        "pixels": pipe.unet.config.sample_size * LATENT_FACTOR,
        "edits": edits,
        "num_inference_steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale,
        "seed": settings.seed,
        "fisedit": __version__,
        "dtype": str(pipe.unet.dtype).removeprefix("torch."),
    }


def _result_dict(result: MaskResult) -> dict[str, Any]:
    figures = {name: round(value(result), 4) for name, (value, _) in METRICS.items()}
    return figures | {name: share(result) for name, share in SHARES.items()} | {"confidence": result.confidence}


def mask_rows(kinds: Sequence[str], results: Sequence[Mapping[str, MaskResult]]) -> list[dict[str, Any]]:
    """All metrics of every mask method, over all edits and over those of every kind.

    Args:
        kinds: every edit's kind.
        results: every edit's masks, by method.

    Returns:
        {"recipe", "kind", "edits"}, for every metric {"median", "tail", "interval", "edits"}, and for every share
        {"mean", "interval", "edits"}.
    """
    rows = []
    for kind, name in product((ALL, *dict.fromkeys(kinds)), results[0]):
        chosen = [by_method[name] for own, by_method in zip(kinds, results, strict=True) if kind in (ALL, own)]
        row: dict[str, Any] = {"recipe": name, "kind": kind, "edits": len(chosen)}
        for metric, (value, high_is_good) in METRICS.items():
            row[metric] = median_row([value(result) for result in chosen], high_is_good=high_is_good)
        for label, share in SHARES.items():
            row[label] = share_row([vote for result in chosen if (vote := share(result)) is not None])
        rows.append(row)
    return rows


def calibration_rows(results: Sequence[MaskResult]) -> list[dict[str, str]]:
    """Confidence beside the share of masks that are right, in bins of `CONFIDENCES` that are not empty.

    Args:
        results: The results of one method.
    """
    rows = []
    for low, high in pairwise(CONFIDENCES):
        chosen = [result for result in results if low <= result.confidence < high or result.confidence == high == 1.0]
        if chosen:
            right = share_row([result.correct for result in chosen])
            rows.append(
                {
                    "confidence": f"{low:.0%} to {high:.0%}",
                    "edits": str(len(chosen)),
                    "mean": f"{np.mean([result.confidence for result in chosen]):.1%}",
                    "right": "{:.1%} [{:.1%}, {:.1%}]".format(right["mean"], *right["interval"]),
                }
            )
    return rows


if __name__ == "__main__":
    from benchmarks.commands import run

    run("masks")
