"""One method's outcome of one edit, in numbers; and whether the judge sees the edit done. Knows cases, not methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fisedit.evaluation import classifier as judging
from fisedit.evaluation.quality import metrics, pie_bench
from fisedit.evaluation.scenes.scene import Scene

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.evaluation.classifier import SceneClassifier
    from fisedit.evaluation.quality.edit_case import EditCase, MethodResult
    from fisedit.evaluation.scenes.layout import SceneChange
    from fisedit.values import BoolGrid

DESCRIBED = ("recolour", "resize")
"""Kinds of change that an adjective tells."""

UNSEEN = ("weather",)
"""Kinds of change that the judge was not taught to see."""


@dataclass(frozen=True)
class EditScore:
    """What was measured; None where it does not apply or nobody knows the truth.

    Args:
        kind, drawn: the edit's kind, and whether its source was opened or generated.
        evaluations, macs: of the UNet; of UNet and decoder. reason: why the method fell back to a dense run.
        area: share of latent cells in the mask. whole: whether that is all of them.
        fit: of the mask to the truth.
        success: whether the judge sees the edit done.
        background_psnr: dB to the source, outside the truth; of generated sources outside our own mask.
        exact: whether all bytes outside the method's own mask are the source's.
        inside_psnr, seam: in dB and as a ratio, to the dense blended edit with the method's own mask; of sparse runs.
        dense_psnr: the same in dB, of the editor's runs that fell back to dense ones: they should be the same.
        kept_psnr: dB to the source inside the method's own mask: how much of what was there it keeps.
        again_psnr: dB to the source of the whole picture, of methods that mean to show it again.
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
    success: bool | None
    background_psnr: float | None
    exact: bool | None
    inside_psnr: float | None
    seam: float | None
    dense_psnr: float | None
    kept_psnr: float | None
    again_psnr: float | None
    published: pie_bench.Background | None

    @property
    def gmacs(self) -> float:
        """Multiply-accumulates in thousand millions."""
        return self.macs / 1e9

    @property
    def fell_back(self) -> bool:
        """Whether there is a reason."""
        return bool(self.reason)


def score(case: EditCase, outcome: MethodResult, judge: SceneClassifier | None) -> EditScore:
    """Measure an outcome."""
    edit, picture, grid, source = case.edit, outcome.picture, outcome.grid, case.source.image
    true_mask = edit.true_mask
    reference = case.blended(grid) if grid is not None and (outcome.sparse or outcome.reason) else None
    inside = metrics.psnr(picture, reference, metrics.pixels(grid)) if grid is not None and reference else None
    return EditScore(
        kind=edit.kind,
        drawn=edit.picture is not None,
        evaluations=outcome.evaluations,
        macs=outcome.macs,
        reason=outcome.reason,
        area=None if grid is None else float(grid.mean()),
        whole=None if grid is None else bool(grid.all()),
        fit=metrics.fit(grid, true_mask) if grid is not None and true_mask is not None else None,
        success=edit_succeeded(judge, edit.change, picture) if judge is not None and edit.change is not None else None,
        background_psnr=_background(case, picture),
        exact=metrics.equal_outside(picture, source, grid) if grid is not None and not grid.all() else None,
        inside_psnr=inside if outcome.sparse else None,
        seam=metrics.seam(picture, reference, grid) if grid is not None and reference and outcome.sparse else None,
        dense_psnr=None if outcome.sparse else inside,
        kept_psnr=metrics.psnr(picture, source, metrics.pixels(grid)) if grid is not None and grid.any() else None,
        again_psnr=metrics.psnr(picture, source, metrics.pixels(case.everywhere)) if outcome.again else None,
        published=pie_bench.background(picture, source, true_mask)
        if true_mask is not None and edit.change is None
        else None,
    )


def _background(case: EditCase, picture: Image) -> float | None:
    """PSNR where the picture should have stayed as it was."""
    concerned = _concerned(case)
    return None if concerned is None or concerned.all() else metrics.psnr(picture, case.source.image, ~concerned)


def _concerned(case: EditCase) -> BoolGrid | None:
    """The pixels that may change: the truth, or where nobody knows it our own mask; None for the whole picture."""
    if case.edit.whole or case.edit.true_mask is not None:
        return case.edit.true_mask
    return None if case.ours.grid is None else metrics.pixels(case.ours.grid)


def edit_succeeded(judge: SceneClassifier, change: SceneChange, picture: Image) -> bool | None:
    """Whether a picture shows the change done: all that the new scene names, its background, nothing that was removed,
    and the changed thing's new colour or size. None for what the judge was not taught to see.
    """
    if change.kind in UNSEEN:
        return None
    seen = judging.classify(judge, np.array(picture.convert("RGB"))[None])
    gone = set(change.before.words) - set(change.after.words)
    there = all(seen.objects_found(0, change.after)) and seen.background_correct(0, change.after)
    still = any(bool(seen.objects[0, judging.WORDS.index(word)]) for word in gone)
    return there and not still and (change.kind not in DESCRIBED or _described(seen, change))


def _described(seen: judging.ScenePredictions, change: SceneChange) -> bool:
    """Whether the changed thing has its new adjectives."""
    after = change.after
    thing = Scene(after.background, after.horizon, (after.objects[change.index],))
    return all(seen.adjectives_correct(0, thing))
