"""`python -m benchmarks.picks`: how well points pick things of drawn scenes, whose masks are known.

A scene is opened and one of its things is picked by the point deepest inside it. The next points are where a user
would correct: deepest inside the largest error, of what is missing or of what is too much. Knows the editor and scenes.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.ndimage import distance_transform_edt

from benchmarks.quality.scene_edits import DELETE, known_words, sample_edits
from fisedit.bench.metrics import bootstrap_interval, cells_to_pixels, mask_overlap, pixels_to_cells
from fisedit.editor import Editor
from fisedit.masking.region import Region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fisedit.bench.edit_case import BenchmarkEdit
    from fisedit.bench.settings import EvaluationSettings
    from fisedit.values import BoolGrid, OnStep

POINTS = 3
"""Points of a thing, at most."""

Point = tuple[int, int]


def measure_picks(settings: EvaluationSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Pick things by one to three points.

    Args:
        settings: The settings of the benchmark; `edits` is the number of things.
        on_step: called before every scene with (i, n, None).

    Returns:
        {"settings", "rows", "summary", "notes"}, ready for JSON.

    Raises:
        ModelError: the model cannot be loaded. InputError: it does not know the scenes' words.
    """
    editor = Editor.from_pretrained(
        settings.model, device=settings.device, dtype=settings.dtype, local_files_only=settings.local_files_only
    )
    rows = []
    for i, edit in enumerate(_things(editor, settings)):
        if on_step:
            on_step(i, settings.edits, None)
        assert edit.removed is not None
        rows.append(
            {"prompt": edit.source_prompt, "area": float(edit.removed.mean()), **_measure(editor, edit, settings)}
        )
    notes = (
        "IoU is by latent cells of 8x8 pixels; one is true if any of its pixels is",
        "in square brackets the bootstrap's 95 % interval of the median",
    )
    return {"settings": vars(settings), "rows": rows, "summary": _summary(rows), "notes": notes}


def _things(editor: Editor, settings: EvaluationSettings) -> Iterator[BenchmarkEdit]:
    """Deletions of drawn scenes, each of one visible thing."""
    words = known_words(editor.pipe)
    found = sample_edits(10 * settings.edits, editor.native_size, words, (DELETE,), settings.seed)
    return islice((edit for edit in found if edit.removed is not None and edit.removed.any()), settings.edits)


def _measure(editor: Editor, edit: BenchmarkEdit, settings: EvaluationSettings) -> dict[str, float]:
    assert edit.removed is not None
    assert edit.picture is not None
    source = editor.open(
        edit.picture,
        edit.source_prompt,
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
    )
    true, ious = pixels_to_cells(edit.removed), {"area": float(edit.removed.mean())}
    inside, outside = [_deepest(edit.removed)], list[Point]()
    for count in range(1, POINTS + 1):
        region = Region.points(*inside, outside=outside)
        grid = editor.preview(edit.prompt, region=region).mask.grid
        ious[f"iou_{count}"] = mask_overlap(grid, true).iou
        wrong = cells_to_pixels(grid) & ~cells_to_pixels(true) | edit.removed & ~cells_to_pixels(grid)
        if wrong.any():  # else there is nothing to mend
            at = _deepest(wrong)
            (inside if edit.removed[at[1], at[0]] else outside).append(at)
    editor.delete(source.id)
    return ious


def _deepest(pixels: BoolGrid) -> Point:
    """(x, y) of the pixel that is furthest from all that is outside."""
    depth = distance_transform_edt(np.pad(pixels, 1))[1:-1, 1:-1]
    row, column = np.unravel_index(int(depth.argmax()), depth.shape)
    return int(column), int(row)


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    table = []
    for count in range(1, POINTS + 1):
        ious = [row[f"iou_{count}"] for row in rows]
        low, high = bootstrap_interval(ious, np.median)
        table.append(
            {
                "points": count,
                "things": len(ious),
                "IoU": f"{np.median(ious):.3f} [{low:.3f}, {high:.3f}]",
                "10th percentile": float(np.percentile(ious, 10)),
            }
        )
    return table


if __name__ == "__main__":
    from benchmarks.commands import run

    run("picks")
