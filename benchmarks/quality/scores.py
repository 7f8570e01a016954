"""All metrics of one method's result of one edit, and whether the edit succeeded. Knows cases, not methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image as PIL

from benchmarks.classifier import WORDS, classify
from benchmarks.quality import pie_bench
from benchmarks.quality.artefacts import Artefacts, EditedPicture, find_artefacts
from benchmarks.quality.drawn_truth import DrawnTruth, drawn_truth
from benchmarks.quality.scene_edits import DELETE
from benchmarks.scenes.scene import Scene, render
from fisedit.bench import metrics
from fisedit.decoder.decode import decode
from fisedit.models.vae import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL.Image import Image

    from benchmarks.classifier import SceneClassifier, ScenePredictions
    from benchmarks.scenes.drawing import Bytes
    from benchmarks.scenes.layout import SceneChange
    from fisedit.bench.edit_case import EditCase, MethodResult
    from fisedit.values import BoolGrid

ADJECTIVE_KINDS = ("recolour", "resize")
"""Kinds of change that an adjective expresses."""

VISIBLE_SHARE = 0.02
"""Share of a removed object's visible pixels that are left, from which they are noticed: an ear, a wheel."""

UNTRAINED_KINDS = ("weather",)
"""Kinds of change that the classifier was not trained on."""


@dataclass(frozen=True)
class EditScore:
    """A result's metrics; None where one does not apply or the truth is unknown.

    Args:
        kind: the edit's.
        drawn: whether the source is an opened picture; else it was generated.
        evaluations: The number of evaluations of the UNet.
        macs: multiply-accumulates of UNet and decoder.
        reason: why the method fell back to a dense run, or "".
        area: share of latent cells in the mask, 0 to 1.
        whole: whether the mask covers all cells.
        fit: The fit of the mask to the truth.
        leftover: share of a removed object's visible pixels that lie outside the mask and so stay, 0 to 1.
        success: whether the classifier finds the edit done.
        gone: whether the classifier does not see what was removed; None where nothing was.
        truth_psnr: dB to the drawn scene after the edit, in the true pixels, of deletes of opened pictures. It tells
            how far what was behind the object is as it was drawn.
        background_psnr: dB to the source, outside the truth; of generated sources outside our own mask.
        exact: whether all bytes outside the method's own mask are the source's.
        inside_psnr: dB to the dense blended edit inside the method's own mask, of sparse runs.
        seam: visibility of the mask's boundary, over that of the dense blended edit, of sparse runs.
        dense_psnr: dB to the dense blended edit, of runs that fell back to dense ones, which should equal it.
        kept_psnr: dB to the source inside the method's own mask: how much of the content it keeps.
        again_psnr: dB to the source of the whole picture, of methods that reconstruct it.
        artefacts: strengths by name, as in `artefacts.Artefacts`; None for pictures that were not drawn.
        published: PIE-Bench's own background metrics.
    """

    kind: str
    drawn: bool
    evaluations: int
    macs: int
    reason: str
    area: float | None
    whole: bool | None
    fit: metrics.MaskFit | None
    leftover: float | None
    success: bool | None
    gone: bool | None
    truth_psnr: float | None
    background_psnr: float | None
    exact: bool | None
    inside_psnr: float | None
    seam: float | None
    dense_psnr: float | None
    kept_psnr: float | None
    again_psnr: float | None
    artefacts: Mapping[str, float] | None
    published: pie_bench.BackgroundMetrics | None

    @property
    def gmacs(self) -> float:
        """Multiply-accumulates in 1e9."""
        return self.macs / 1e9

    @property
    def leaves_parts(self) -> bool | None:
        """Return whether a part of a removed object is still seen; None where none was removed."""
        return None if self.leftover is None else self.leftover > VISIBLE_SHARE

    @property
    def flawed(self) -> bool | None:
        """Return whether a person sees an artefact; None where none was looked for."""
        return None if self.artefacts is None else bool(Artefacts(self.artefacts).seen)

    @property
    def fell_back(self) -> bool:
        """Return whether the method fell back to a dense run."""
        return bool(self.reason)


def score_edit(case: EditCase, result: MethodResult, classifier: SceneClassifier | None) -> EditScore:
    """Measure a method's result.

    Args:
        case: the edit and its source.
        result: the method's.
        classifier: None where success is not measured.
    """
    edit, picture, source = case.edit, result.picture, case.source.image
    known, dataset = edit.true_mask, edit.change is None
    return EditScore(
        kind=edit.kind,
        drawn=edit.picture is not None,
        evaluations=result.evaluations,
        macs=result.macs,
        reason=result.reason,
        success=edit_succeeded(classifier, edit.change, picture) if classifier and edit.change else None,
        gone=object_is_gone(classifier, edit.change, picture) if classifier and edit.change else None,
        truth_psnr=_truth_psnr(case, picture),
        background_psnr=_background(case, picture),
        again_psnr=metrics.psnr(picture, source, np.ones(picture.size[::-1], bool)) if result.reconstructs else None,
        artefacts=_strengths(case, result, classifier),
        published=pie_bench.background_metrics(picture, source, known) if known is not None and dataset else None,
        **(_NO_MASK if result.grid is None else _score_mask(case, result, result.grid)),
    )


def _strengths(case: EditCase, result: MethodResult, classifier: SceneClassifier | None) -> Mapping[str, float] | None:
    """The artefacts of a method that edits a picture of known scenes."""
    if case.edit.change is None or result.reconstructs:
        return None
    return measure_artefacts(case, result, classifier).strengths


def measure_artefacts(case: EditCase, result: MethodResult, classifier: SceneClassifier | None) -> Artefacts:
    """Measure what a person sees in a method's result of an edit of known scenes.

    Args:
        case: the edit and its source.
        result: the method's.
        classifier: None where things are not recognised.
    """
    painted = case.everywhere if result.painted is None else result.painted
    picture, source = (np.array(shown.convert("RGB")) for shown in (result.picture, case.source.image))
    truth = None if case.edit.picture is None or case.edit.is_global else _decoded_truth(case, picture, source, painted)
    return find_artefacts(EditedPicture(picture, source, painted), case.edit.change, truth, classifier)


@torch.inference_mode()
def _decoded_truth(case: EditCase, picture: Bytes, source: Bytes, painted: BoolGrid) -> DrawnTruth:
    """The drawn truth, as the autoencoder shows it where a method paints, and where else its picture was decoded."""
    truth, vae = drawn_truth(case.edit.change, PIL.fromarray(picture)), case.editor.pipe.vae
    shown = np.asarray(decode(vae, encode(vae, PIL.fromarray(truth.pixels)))[0])
    decoded = metrics.cells_to_pixels(painted) | np.any(picture != source, axis=-1)
    return DrawnTruth(np.where(decoded[..., None], shown, truth.pixels), truth.thing)


_NO_MASK: dict[str, Any] = dict.fromkeys(
    ("area", "whole", "fit", "leftover", "exact", "inside_psnr", "seam", "dense_psnr", "kept_psnr")
)


def _score_mask(case: EditCase, result: MethodResult, grid: BoolGrid) -> dict[str, Any]:
    """The metrics of a method's own mask [h, w]: what the edit itself reaches, and of all that is painted."""
    picture, source, true_mask = result.picture, case.source.image, case.edit.true_mask
    painted = grid if result.painted is None else result.painted
    inside = metrics.cells_to_pixels(grid)
    reference = case.blended(grid) if result.sparse or result.reason else None
    psnr = None if reference is None else metrics.psnr(picture, reference, inside)
    return {
        "area": float(painted.mean()),
        "whole": bool(grid.all()),
        "fit": None if true_mask is None else metrics.mask_fit(painted, true_mask),
        "leftover": None if case.edit.removed is None else metrics.share_outside(case.edit.removed, painted),
        "exact": None if painted.all() else metrics.equal_outside(picture, source, painted),
        "inside_psnr": psnr if result.sparse else None,
        "seam": metrics.seam(picture, reference, source, painted) if reference and result.sparse else None,
        "dense_psnr": None if result.sparse else psnr,
        "kept_psnr": metrics.psnr(picture, source, inside) if grid.any() else None,
    }


def _background(case: EditCase, picture: Image) -> float | None:
    """PSNR where the picture should have stayed as it was."""
    edited = _edited_pixels(case)
    return None if edited is None or edited.all() else metrics.psnr(picture, case.source.image, ~edited)


def _truth_psnr(case: EditCase, picture: Image) -> float | None:
    """PSNR to what was drawn behind a deleted object; None for other edits."""
    edit = case.edit
    if edit.change is None or edit.kind != DELETE or edit.true_mask is None:
        return None
    drawn = render(edit.change.after, len(edit.true_mask)).pixels
    return metrics.psnr(picture, PIL.fromarray(drawn), edit.true_mask)


def _edited_pixels(case: EditCase) -> BoolGrid | None:
    """The pixels that may change: the truth, or our own mask where it is unknown; None for the whole picture."""
    if case.edit.is_global or case.edit.true_mask is not None:
        return case.edit.true_mask
    return None if case.plain.painted is None else metrics.cells_to_pixels(case.plain.painted)


def edit_succeeded(classifier: SceneClassifier, change: SceneChange, picture: Image) -> bool | None:
    """Return whether a picture shows all of the new scene, nothing removed, and the object's new colour or size.

    Args:
        classifier: the scene classifier.
        change: the scenes before and after.
        picture: the edited one.

    Returns:
        None for kinds of change that the classifier was not trained on.
    """
    if change.kind in UNTRAINED_KINDS:
        return None
    predictions = classify(classifier, np.array(picture.convert("RGB"))[None])
    complete = all(predictions.objects_found(0, change.after)) and predictions.background_correct(0, change.after)
    return (
        complete
        and not _remaining(predictions, change)
        and (change.kind not in ADJECTIVE_KINDS or _adjectives_succeeded(predictions, change))
    )


def object_is_gone(classifier: SceneClassifier, change: SceneChange, picture: Image) -> bool | None:
    """Return whether a picture shows nothing of what a change removes.

    Args:
        classifier: the scene classifier.
        change: the scenes before and after.
        picture: the edited one.

    Returns:
        None for changes that remove nothing.
    """
    if set(change.before.words) <= set(change.after.words):
        return None
    return not _remaining(classify(classifier, np.array(picture.convert("RGB"))[None]), change)


def _remaining(predictions: ScenePredictions, change: SceneChange) -> bool:
    removed = set(change.before.words) - set(change.after.words)
    return any(bool(predictions.objects[0, WORDS.index(word)]) for word in removed)


def _adjectives_succeeded(predictions: ScenePredictions, change: SceneChange) -> bool:
    """Return whether the changed object has its new adjectives."""
    after = change.after
    single_object = Scene(after.background, after.horizon, (after.objects[change.index],))
    return all(predictions.adjectives_correct(0, single_object))
