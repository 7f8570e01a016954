"""`python -m benchmarks.costs`: seconds that this machine's cost table predicts beside those that runs take.

The table is measured first, in the same process, from shapes of its own. Then a source, a dense edit and sparse edits
of other masks take turns. Knows the pipeline; the figures of `bench edit` are not its business.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from fisedit.bench.speed import RANDOM_NOTE, settings_dict
from fisedit.bench.timing import interval
from fisedit.bench.workload import PROMPTS, load_workload, masks_of_areas
from fisedit.diagnosis.calibration import CalibrationSettings, calibrate
from fisedit.edits.pipeline import EditPipeline
from fisedit.edits.state import EditState
from fisedit.features.codec import choose_encoding
from fisedit.machine.malloc import keep_freed_memory
from fisedit.masking.region import Region
from fisedit.runners.stepping import Graphs
from fisedit.sampling.trajectory_cache import TrajectoryCache

if TYPE_CHECKING:
    from fisedit.bench.settings import SpeedSettings
    from fisedit.costs.model import Costs
    from fisedit.edits.planner import EditPlan
    from fisedit.edits.requests import EditRequest
    from fisedit.values import BoolGrid, GenerationConfig, OnStep

Row = dict[str, Any]

MIN_RATIO = 1.1
"""The least ratio of the slower run's seconds to the faster's for the choice between dense and sparse to count."""

_UNLIMITED_BYTES = 1 << 62


def measure_predictions(settings: SpeedSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Calibrate, then compare predicted and measured seconds of whole runs, in turns.

    Args:
        settings: The settings of the benchmark; `repeats` turns, whose medians count.
        on_step: called before the calibration and every turn with (i, n, None).

    Returns:
        {"settings", "table", "rows", "summary", "notes"}, ready for JSON.

    Raises:
        InputError: the device is not on this machine. ModelError: the model cannot be loaded.
    """
    keep_freed_memory()
    workload, progress = load_workload(settings), on_step or (lambda *_: None)
    pipeline = EditPipeline(
        EditState(
            workload.pipe, TrajectoryCache(_UNLIMITED_BYTES), Graphs(None), choose_encoding("auto", workload.device)
        )
    )
    progress(0, settings.repeats + 1, None)
    table = calibrate(pipeline, CalibrationSettings())
    pipeline.requests.source(workload.config)
    pipeline.state.engine.table = table
    runs = _Runs(pipeline, workload.config, masks_of_areas(settings.areas, settings.size))
    for i in range(settings.repeats):
        progress(i + 1, settings.repeats + 1, None)
        runs.measure()
    rows = runs.rows()
    return {
        "settings": settings_dict(workload, settings),
        "table": table.as_dict(),
        "rows": rows,
        "summary": [summary(rows)],
        "notes": [] if settings.model else [RANDOM_NOTE],
    }


class _Runs:
    """Whole runs, timed, and what the table says of them."""

    def __init__(
        self, pipeline: EditPipeline, config: GenerationConfig, masks: list[tuple[str, float, BoolGrid]]
    ) -> None:
        self._pipeline, self._config, self._masks = pipeline, config, masks
        self._costs: Costs = pipeline.planner.costs(config)
        self._seconds: dict[tuple[str, float], list[float]] = {}
        self._predicted: dict[tuple[str, float], float] = {}
        self._chosen: dict[tuple[str, float], str] = {}

    def measure(self) -> None:
        """A source, an edit that runs dense, and one in every mask that runs sparse; all are forgotten then."""
        pipeline = self._pipeline
        request = pipeline.requests.source(self._config)
        self._run(("source", 1.0), request, pipeline.plan(request))
        source = pipeline.state.history.current
        for name, area, grid in [("dense", 1.0, self._masks[0][2]), *self._masks]:
            request = pipeline.requests.edit(PROMPTS[1], Region.mask(grid))
            plan = pipeline.plan(request)
            growth = () if name == "dense" else self._costs.choose_dilations(grid)
            self._chosen[name, area] = "dense" if plan.fallback else "sparse"
            plan = plan.with_dilation(growth, "" if growth else "to compare")
            self._run((name, area), request, plan)
            pipeline.state.cache.drop(pipeline.state.history.delete(pipeline.state.history.current.id))
            pipeline.state.history.checkout(source.id)
        pipeline.state.cache.drop(pipeline.state.history.delete(source.id))

    def _run(self, name: tuple[str, float], request: EditRequest, plan: EditPlan) -> None:
        seconds = self._pipeline.run(request, plan).stats.seconds["total"]
        self._seconds.setdefault(name, []).append(seconds)
        predicted = self._pipeline.planner.seconds(request, plan)
        assert predicted is not None
        self._predicted[name] = predicted

    def rows(self) -> list[Row]:
        """Predicted and measured seconds of every run, and of edits whether dense or sparse was chosen right."""
        dense, rows = median(self._seconds["dense", 1.0]), []
        for key, seconds in self._seconds.items():
            measured, predicted = interval(seconds), self._predicted[key]
            row: Row = {"run": key[0], "area": key[1], "measured": measured.as_dict(), "predicted": predicted}
            row["error"] = predicted / median(seconds) - 1
            if key[0] not in ("source", "dense"):
                row |= {
                    "chosen": self._chosen[key],
                    "right": is_faster_choice(self._chosen[key], median(seconds), dense),
                }
            rows.append(row)
        return rows


def is_faster_choice(chosen: str, sparse: float, dense: float) -> bool | None:
    """Return whether the faster run was chosen; None where they differ by no more than `MIN_RATIO`.

    Args:
        chosen: "sparse" or "dense".
        sparse: seconds.
        dense: seconds.
    """
    if max(sparse, dense) <= MIN_RATIO * min(sparse, dense):
        return None
    return chosen == ("sparse" if sparse < dense else "dense")


def summary(rows: list[Row]) -> Row:
    """The errors' median and largest, and how often dense or sparse was chosen right where it matters.

    Args:
        rows: The rows of a report.
    """
    errors = [abs(row["error"]) for row in rows]
    choices = [row["right"] for row in rows if row.get("right") is not None]
    return {
        "runs": len(rows),
        "median error": f"{median(errors):.1%}",
        "largest error": f"{max(errors):.1%}",
        "chosen right": f"{sum(choices)} of {len(choices)}",
    }


if __name__ == "__main__":
    from benchmarks.commands import run

    run("costs")
