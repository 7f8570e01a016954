"""`python -m benchmarks.drive`: how well edits follow a drive, by the truth of drawn heads.

A drawn head is opened at rest and edited to another drive. What comes is compared with the renderer's own picture of
that drive: its tilt is the one whose picture is nearest, its place is where it differs from the scene without a head.
Beside it stands the picture as it was opened, at rest. Knows the editor and scenes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from benchmarks.scenes.held_out import is_unseen
from benchmarks.scenes.posed import TILT, render_posed, sample_posed
from benchmarks.scenes.prompts import describe_scene
from benchmarks.scenes.scene import render
from benchmarks.scenes.vocabulary import FULL_VOCABULARY
from fisedit.bench.metrics import bootstrap_interval, equal_outside
from fisedit.editor import Editor
from fisedit.masking.region import Region
from fisedit.models.vocabulary import vocabulary_of
from fisedit.values.drive import Drive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.scenes.drawing import Bytes, Mask
    from benchmarks.scenes.posed import PosedScene
    from benchmarks.settings import DriveQualitySettings
    from fisedit.values import OnStep

Row = dict[str, Any]

_HEAD_LEVELS = 40
"""The difference from the scene without the head, in levels of 255, above which a pixel shows the head."""

_FURTHEST_TILT = 1.5 * TILT
_GOOD_TILT = 5.0


def measure_drive_quality(settings: DriveQualitySettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Measure edits of drawn heads.

    Args:
        settings: The settings of the benchmark.
        on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "rows", "summary", "notes"}, ready for JSON; angles are in degrees.

    Raises:
        ModelError, AdapterError: the model or its adapter cannot be loaded.
    """
    editor = Editor.from_pretrained(
        settings.model, device=settings.device, dtype=settings.dtype, local_files_only=settings.local_files_only
    )
    editor.load_adapter(settings.adapter, local_files_only=settings.local_files_only)
    rows = list[Row]()
    for i, posed in enumerate(_sampled(editor, settings.seed, settings.edits)):
        if on_step:
            on_step(i, settings.edits, None)
        rows.append(_measure(editor, posed, settings))
    notes = (
        "tilts are found among whole degrees, by the drawn picture that is nearest",
        "scenes have combinations of words or layouts that no training run saw",
    )
    return {"settings": vars(settings), "rows": rows, "summary": _summary(rows), "notes": notes}


def _sampled(editor: Editor, seed: int, count: int) -> Iterator[PosedScene]:
    """Posed scenes of the model's words that are held out of training; scene i depends on (seed, i) alone."""
    known = vocabulary_of(editor.pipe)
    ground = tuple(word for word in FULL_VOCABULARY.ground if known is None or not known.unknown_words(word))
    vocabulary, made, i = replace(FULL_VOCABULARY, ground=ground), 0, 0
    while made < count:
        posed = sample_posed(np.random.default_rng((seed, i)), vocabulary)
        i += 1
        if is_unseen(posed.scene):
            made += 1
            yield posed


def _measure(editor: Editor, posed: PosedScene, settings: DriveQualitySettings) -> Row:
    side, prompt, rest = editor.native_size, describe_scene(posed.scene).text, posed.at_rest
    picture, before = render_posed(rest, side)
    head = render_posed(posed, side)[1]
    source = editor.open(
        Image.fromarray(picture),
        prompt,
        drive=rest.drive,
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
    )
    region = Region.mask(before | head).grow(1)
    made = editor.edit(prompt, region=region, drive=posed.drive)
    found = np.asarray(made.image.convert("RGB"))
    behind = render(posed.scene.without(posed.index), side).pixels
    editor.delete(source.id)
    return {
        "prompt": prompt,
        "tilt": posed.drive.pose[2],
        "tilt_error": abs(_tilt(found, posed, head) - posed.drive.pose[2]),
        "tilt_error_at_rest": abs(_tilt(picture, posed, head) - posed.drive.pose[2]),
        "iou": _iou(_shown(found, behind), head),
        "iou_at_rest": _iou(_shown(picture, behind), head),
        "area": made.mask.area,
        "macs_ratio": made.stats.macs / made.stats.macs_dense,
        "seconds": made.stats.seconds["total"],
        "identical_outside": equal_outside(made.image, source.image, made.mask.grid),
    }


def _tilt(found: Bytes, posed: PosedScene, head: Mask) -> float:
    """The whole degrees whose drawn picture is nearest to a picture, around where the head belongs."""
    side, (*_, x, y, scale) = len(found), posed.drive.pose
    degrees = np.arange(-int(_FURTHEST_TILT), int(_FURTHEST_TILT) + 1)
    rows, columns = np.nonzero(head)
    part = slice(rows.min(), rows.max() + 1), slice(columns.min(), columns.max() + 1)

    def distance(tilt: int) -> float:
        drive = Drive((0, 0, float(tilt), x, y, scale), posed.drive.expression)
        drawn, _ = render_posed(replace(posed, drive=drive), side)
        return float(np.abs(drawn[part].astype(np.int16) - found[part]).mean())

    return float(degrees[int(np.argmin([distance(int(each)) for each in degrees]))])


def _shown(found: Bytes, behind: Bytes) -> Mask:
    shown: Mask = np.abs(found.astype(np.int16) - behind).max(-1) > _HEAD_LEVELS
    return shown


def _iou(one: Mask, other: Mask) -> float:
    return float((one & other).sum() / max(1, (one | other).sum()))


def _summary(rows: list[Row]) -> list[Row]:
    """One row for the edits, one for the pictures at rest."""
    table = list[Row]()
    for name, ending in (("driven", ""), ("at rest", "_at_rest")):
        errors, ious = ([row[f"{what}{ending}"] for row in rows] for what in ("tilt_error", "iou"))
        low, high = bootstrap_interval(errors, np.median)
        table.append(
            {
                "edit": name,
                "edits": len(rows),
                "tilt_error": float(np.median(errors)),
                "tilt_error_interval": f"{low:.1f} to {high:.1f}",
                "within_5_degrees": float(np.mean(np.array(errors) <= _GOOD_TILT)),
                "iou": float(np.median(ious)),
                "area": float(np.median([row["area"] for row in rows])),
                "macs_ratio": float(np.median([row["macs_ratio"] for row in rows])),
            }
        )
    return table


if __name__ == "__main__":
    from benchmarks.commands import run

    run("drive")
