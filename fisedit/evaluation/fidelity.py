"""`fisedit bench fidelity`: how close a sparse edit comes to the dense blended one, by dilation schedule.

The reference is diffusers' own pipeline on the new prompt with the same seed, its latents outside the mask replaced by
the source's after every step. PSNR is taken over the pixels inside the mask alone. Masks are given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, islice, permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from fisedit.editor import Editor
from fisedit.evaluation.quality import metrics
from fisedit.evaluation.quality.edit_case import EditCase, trajectory_of
from fisedit.evaluation.quality.scene_edits import BenchmarkEdit
from fisedit.sparse.cost_model import GROWTHS, mixed, spread
from fisedit.values import OnStep

if TYPE_CHECKING:
    from fisedit.evaluation.settings import EvaluationSettings
    from fisedit.values import BoolGrid

OBJECTS = "cat dog fox panda frog lion cake pumpkin car castle".split()
BACKGROUND_PHRASES = ("on a beach", "in the snow", "on the grass", "at sunset")
AREA = 0.19
"""Share of the picture that the given square masks cover."""

SCHEDULES: dict[str, Callable[[int], tuple[int, ...] | None]] = {
    "default": lambda _: None,
    "0": partial(spread, 0, 0),
    "1": partial(spread, 1, 1),
    "2": partial(spread, 2, 2),
    "3": partial(spread, 3, 3),
    "3, then 1 from 1/4": partial(spread, 3, 1, share=1 / 4),
    "3, then 1 from 1/2": partial(spread, 3, 1),
    "2, then 1 from 1/2": partial(spread, 2, 1),
    "5": partial(spread, 5, 5),
    "1, 2 of 25 steps dense": partial(mixed, share=2 / 25),
    "1, 7 of 25 steps dense": partial(mixed, share=7 / 25),
}
"""Name -> from a number of steps to the dilation of every step, in latent cells."""


def measure_fidelity(settings: EvaluationSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Edit pictures with every dilation schedule, and compare each with the dense blended edit.

    Args:
        settings: model, sampling and number of word swaps; the prompts name what the demo model can draw.
        on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "rows", "values"}: per schedule the median, tenth percentile and worst PSNR in dB, and the share of
        dense multiply-accumulates; "values" lists the default's PSNR of every edit.
    """
    editor = Editor.from_pretrained(
        settings.model, device=settings.device, dtype=settings.dtype, local_files_only=settings.local_files_only
    )
    psnr: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    share: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for i, (prompt, changed) in enumerate(swaps(settings.edits)):
        if on_step is not None:
            on_step(i, settings.edits, None)
        source = editor.generate(
            prompt,
            seed=1000 + settings.seed + i,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
        )
        grid = attended_square(editor, changed)
        case = EditCase(editor, BenchmarkEdit("swap", prompt, changed), source, trajectory_of(editor, source))
        reference, inside = case.blended(grid), metrics.cells_to_pixels(grid)
        for name, schedule in SCHEDULES.items():
            editor.checkout(source.id)
            result = editor.edit(changed, mask=grid, growth=schedule(settings.num_inference_steps))
            psnr[name].append(metrics.psnr(result.image, reference, inside))
            share[name].append(result.stats.macs / result.stats.macs_dense)
    rows = [_row(name, psnr[name], share[name]) for name in SCHEDULES]
    dtype = str(editor.pipe.unet.dtype).removeprefix("torch.")
    return {"settings": _settings_dict(settings, dtype), "rows": rows, "values": psnr["default"]}


def _settings_dict(settings: EvaluationSettings, dtype: str) -> dict[str, Any]:
    return {
        "model": settings.model,
        "edits": settings.edits,
        "num_inference_steps": settings.num_inference_steps,
        "mask_area": AREA,
        "default_growths": GROWTHS,
        "dtype": dtype,
        "guidance_scale": settings.guidance_scale,
        "scheduler": "ddim",
    }


def swaps(count: int) -> list[tuple[str, str]]:
    """Prompt pairs that differ in one object: "a cat and a cake on a beach" -> "a dog and a cake on a beach"."""
    triples = permutations(OBJECTS, 3)
    step = len(OBJECTS) * (len(OBJECTS) - 1) * (len(OBJECTS) - 2) // count
    chosen = zip(islice(triples, 0, None, max(1, step)), cycle(BACKGROUND_PHRASES), strict=False)
    pairs = [(f"a {old} and a {kept} {where}", f"a {new} and a {kept} {where}") for (old, kept, new), where in chosen]
    return pairs[:count]


def attended_square(editor: Editor, changed: str) -> BoolGrid:
    """A square mask of `AREA` where the changed words attend most.

    Args:
        editor: its current result is the source.
        changed: the new prompt.

    Returns:
        Booleans [h, w].
    """
    heatmap = editor.attention(changed)
    height, width = heatmap.shape
    edge = max(1, round((AREA * height * width) ** 0.5))
    sums = np.lib.stride_tricks.sliding_window_view(heatmap, (edge, edge)).sum((2, 3))
    top, left = np.unravel_index(sums.argmax(), sums.shape)
    grid = np.zeros(heatmap.shape, bool)
    grid[top : top + edge, left : left + edge] = True
    return grid


def _row(name: str, psnr: list[float], share: list[float]) -> dict[str, Any]:
    return {
        "growth": name,
        "psnr_median": float(np.median(psnr)),
        "psnr_p10": float(np.percentile(psnr, 10)),
        "psnr_min": float(np.min(psnr)),
        "macs_ratio": len(share) / sum(share),
    }
