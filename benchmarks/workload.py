"""`python -m benchmarks.workload`: what edits cost whose masks have the areas that people's masks have.

Of three published traces mean and median of the masks' area are known (FlashPS, EuroSys 2026). Areas are the evenly
spaced quantiles of the lognormal distribution with these two. Every trace is run as a whole, over one recorded source,
beside as many runs of the fastest dense pipeline of this machine. Knows the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Any

import torch

from fisedit.bench.dense_pipelines import DensePipelines
from fisedit.bench.speed import RANDOM_NOTE, settings_dict
from fisedit.bench.timing import Calls, interval, interval_text, ratio, seconds_by_round
from fisedit.bench.workload import PROMPTS, load_workload, square_mask
from fisedit.editor import Editor
from fisedit.machine.malloc import keep_freed_memory
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from fisedit.bench.settings import SpeedSettings
    from fisedit.bench.workload import Workload
    from fisedit.values import OnStep

Row = dict[str, Any]

EDITS = 8
"""Edits of a trace."""


@dataclass(frozen=True)
class MaskTrace:
    """The areas of the masks of one use, shares of the picture.

    Args:
        use: what people do.
        mean: The mean of the areas.
        median: The median of the areas.
    """

    use: str
    mean: float
    median: float

    def areas(self, count: int) -> tuple[float, ...]:
        """Evenly spaced quantiles, smallest first, at most 1.

        Args:
            count: how many.
        """
        from scipy.special import ndtri

        deviation = sqrt(2 * log(self.mean / self.median))
        quantiles = ((i + 0.5) / count for i in range(count))
        return tuple(min(1.0, self.median * exp(deviation * float(ndtri(q)))) for q in quantiles)


TRACES = (
    MaskTrace("face swaps", 0.112, 0.095),
    MaskTrace("automatic detail fixing", 0.029, 0.023),
    MaskTrace("inpainting", 0.35, 0.22),
)


def measure_workload(settings: SpeedSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Search for the fastest dense run, and time the edits of every trace in turns with it.

    Args:
        settings: The settings of the benchmark; areas are the traces'.
        on_step: called before the search and every round with (i, n, None).

    Returns:
        {"settings", "search", "rows", "turns", "summary", "notes"}, ready for JSON.

    Raises:
        InputError: the device is not on this machine.
        ModelError: the model cannot be loaded.
    """
    keep_freed_memory()
    workload, progress, done = load_workload(settings), on_step or (lambda *_: None), iter(range(settings.repeats + 2))
    progress(next(done), settings.repeats + 2, None)
    with torch.inference_mode():
        dense = DensePipelines(workload.pipe, workload.config, compiled=settings.compiled)
        search = dense.search()
        runs = _Runs(workload)
        calls: Calls = {"dense": partial(dense.run, search.best), "source": runs.generate}
        calls |= {trace.use: partial(runs.edit_all, trace) for trace in TRACES}
        turns = seconds_by_round(calls, settings.repeats, {}, lambda: progress(next(done), settings.repeats + 2, None))
    rows = [_row(trace, turns, runs) for trace in TRACES]
    return {
        "settings": settings_dict(workload, settings) | {"dense_baseline": f"diffusers, {search.best.name}"},
        "search": search.as_dict(),
        "rows": rows,
        "turns": turns,
        "summary": [_summary_row(row) for row in rows],
        "notes": [*dense.notes, *([] if settings.model else [RANDOM_NOTE])],
    }


class _Runs:
    """The source, and edits of it."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._editor = workload, Editor(workload.pipe)
        self.macs: dict[str, tuple[int, int]] = {}

    def generate(self) -> None:
        """Record the source anew."""
        config, self._editor = self._workload.config, Editor(self._workload.pipe)
        self._editor.generate(
            config.prompt,
            seed=config.seed,
            guidance_scale=config.guidance_scale,
            width=config.width,
            height=config.height,
            num_inference_steps=config.num_inference_steps,
        )

    def edit_all(self, trace: MaskTrace) -> None:
        """Every edit of a trace, each of the source."""
        side, macs = self._workload.config.width // LATENT_FACTOR, []
        for area in trace.areas(EDITS):
            result = self._editor.edit(PROMPTS[1], mask=square_mask(area, side))
            macs.append((result.stats.macs, result.stats.macs_dense))
            self._editor.delete(result.id)
        spent, dense = zip(*macs, strict=True)
        self.macs[trace.use] = sum(spent), sum(dense)


def _row(trace: MaskTrace, turns: dict[str, list[float]], runs: _Runs) -> Row:
    ours, dense = turns[trace.use], [EDITS * seconds for seconds in turns["dense"]]
    with_source = [a + b for a, b in zip(ours, turns["source"], strict=True)]
    spent, dense_macs = runs.macs[trace.use]
    return {
        "use": trace.use,
        "areas": trace.areas(EDITS),
        "macs": spent,
        "macs_dense": dense_macs,
        "seconds": interval(ours).as_dict(),
        "dense_seconds": interval(dense).as_dict(),
        "ratio": ratio(dense, ours).as_dict(),
        "ratio_with_source": ratio([a + b for a, b in zip(dense, turns["dense"], strict=True)], with_source).as_dict(),
    }


def _summary_row(row: Row) -> Row:
    areas = row["areas"]
    return {
        "use": row["use"],
        "areas": f"{areas[0]:.1%} to {areas[-1]:.0%}",
        "MACs": f"{row['macs_dense'] / row['macs']:.1f}x",
        "edits": interval_text(row["ratio"]),
        "with their source": interval_text(row["ratio_with_source"]),
    }


if __name__ == "__main__":
    from benchmarks.commands import run

    run("workload")
