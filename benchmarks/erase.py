"""`python -m benchmarks.erase`: things of drawn scenes are erased, beside inpainting, with the truth behind them.

Methods get the same true cells, or find them by words. Whether the thing is gone, the scene classifier says. Knows the
editor and scenes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from benchmarks.classifier import WORDS, classify
from benchmarks.quality.artefacts import Artefacts
from benchmarks.quality.diffusers_baselines import inpaint_empty, inpaint_true
from benchmarks.quality.edit_quality import find_classifier
from benchmarks.quality.scene_edits import DELETE, known_words, sample_edits
from benchmarks.quality.scores import measure_artefacts
from benchmarks.scenes.scene import render
from fisedit.bench.edit_case import EditCase, MethodResult, make_case
from fisedit.bench.metrics import bootstrap_interval, cells_to_pixels, psnr
from fisedit.masking.region import Region
from fisedit.models.loader import load
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffusers import StableDiffusionPipeline

    from benchmarks.classifier import SceneClassifier
    from benchmarks.scenes.layout import SceneChange
    from fisedit.bench.edit_case import BenchmarkEdit
    from fisedit.bench.settings import EvaluationSettings
    from fisedit.values import OnStep

Row = dict[str, Any]
Method = Callable[[EditCase], MethodResult | None]


def _erase(case: EditCase) -> MethodResult:
    """Our erasing of the true cells."""
    case.editor.checkout(case.source.id)
    assert case.true_grid is not None
    result = case.editor.erase(Region.mask(case.true_grid))
    stats = result.stats
    return MethodResult(result.image, result.mask.grid, case.steps, stats.macs, sparse=True)


def _edit(case: EditCase) -> MethodResult:
    """Our edit of the true cells to the prompt without the thing."""
    return case.edited(case.true_grid)


def _erase_words(case: EditCase) -> MethodResult:
    """Our erasing of where the thing's word points, and a cell around."""
    case.editor.checkout(case.source.id)
    region = Region.words(*sorted(_gone(case.edit.change))).grow(1)
    result = case.editor.erase(region)
    return MethodResult(result.image, result.mask.grid, case.steps, result.stats.macs, sparse=True)


def _edit_words(case: EditCase) -> MethodResult:
    """Our edit to the prompt without the thing, where words point."""
    return case.edited()


METHODS: dict[str, Method] = {
    "erase": _erase,
    "erase, by words": _erase_words,
    "edit, by words": _edit_words,
    "edit, prompt without the thing": _edit,
    "inpainting, empty prompt": inpaint_empty,
    "inpainting, prompt without the thing": inpaint_true,
}
"""Name -> what makes a picture without the thing."""


def measure_erasing(settings: EvaluationSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Erase things of drawn scenes by every method.

    Args:
        settings: The settings of the benchmark; `edits` is the number of things.
        on_step: called before every scene with (i, n, None).

    Returns:
        {"settings", "rows", "summary", "notes"}, ready for JSON.

    Raises:
        ModelError: the model cannot be loaded. InputError: it does not know the scenes' words, or has no classifier.
    """
    pipe = load(
        settings.model, device=settings.device, dtype=settings.dtype, local_files_only=settings.local_files_only
    )
    classifier, missing = find_classifier(settings.model, None)
    rows = list[Row]()
    for i, edit in enumerate(_deletions(settings, pipe)):
        if on_step:
            on_step(i, settings.edits, None)
        case = make_case(
            pipe,
            edit,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
        )
        rows += [_measure(name, case, method, classifier) for name, method in METHODS.items()]
    notes = (
        *missing,
        "methods paint the cells with a visible pixel of the thing, or where words point",
        "gone is what the scene classifier does not find",
        "artefacts: a person would see one; see benchmarks.quality.artefacts",
        "PSNR is of those cells and two around, to the drawn scene without the thing",
        "in square brackets the bootstrap's 95 % interval",
    )
    return {"settings": vars(settings), "rows": rows, "summary": _summary(rows), "notes": notes}


def _deletions(settings: EvaluationSettings, pipe: StableDiffusionPipeline) -> Iterator[BenchmarkEdit]:
    """Deletions in drawn scenes of the model's size."""
    side, words = pipe.unet.config.sample_size * LATENT_FACTOR, known_words(pipe)
    found = sample_edits(10 * settings.edits, side, words, (DELETE,), settings.seed)
    return islice((edit for edit in found if edit.picture is not None), settings.edits)


def _measure(name: str, case: EditCase, method: Method, classifier: SceneClassifier | None) -> Row:
    result, change = method(case), case.edit.change
    assert result is not None
    assert change is not None
    assert case.true_grid is not None
    behind = Image.fromarray(render(change.after, result.picture.width).pixels)
    return {
        "method": name,
        "prompt": case.edit.source_prompt,
        "dB": psnr(result.picture, behind, cells_to_pixels(dilate(case.true_grid, 2))),
        "gone": None if classifier is None else _is_gone(classifier, result.picture, change),
        "artefacts": dict(measure_artefacts(case, result, classifier).strengths),
        "gmacs": result.macs / 1e9,
    }


def _is_gone(classifier: SceneClassifier, picture: Image.Image, change: SceneChange) -> bool:
    """Return whether the classifier finds no thing more than the scene without it has."""
    found = classify(classifier, np.array(picture.convert("RGB"))[None])
    return not any(bool(found.objects[0, WORDS.index(word)]) for word in _gone(change))


def _gone(change: SceneChange) -> set[str]:
    """The words of the things that a change takes away."""
    return set(change.before.words) - set(change.after.words)


def _summary(rows: list[Row]) -> list[Row]:
    table = []
    for name in METHODS:
        of_method = [row for row in rows if row["method"] == name]
        levels, gone = [row["dB"] for row in of_method], [row["gone"] for row in of_method]
        low, high = bootstrap_interval(levels, np.median)
        table.append(
            {
                "method": name,
                "things": len(of_method),
                "gone": None if None in gone else float(np.mean(gone)),
                "artefacts": float(np.mean([bool(Artefacts(row["artefacts"]).seen) for row in of_method])),
                "inside dB": f"{np.median(levels):.1f} [{low:.1f}, {high:.1f}]",
                "tenth percentile dB": float(np.percentile(levels, 10)),
                "GMACs": float(np.median([row["gmacs"] for row in of_method])),
            }
        )
    return table


if __name__ == "__main__":
    from benchmarks.commands import run

    run("erase")
