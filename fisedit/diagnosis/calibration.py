"""Measures this machine's cost table of a model: sources and edits of given masks, recorded layer by layer.

Every run is made twice, with and without recording, and what recording adds is taken off. Sources and edits are made in
turns, so that other programs slow both. Knows the pipeline; writes no table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from statistics import mean, median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from fisedit.costs import store as cost_store
from fisedit.costs.macs import decode_work
from fisedit.costs.schedules import find_shallow_steps
from fisedit.costs.spans import recorded_spans
from fisedit.costs.table import Measurements, step_work
from fisedit.decoder.tiles import box_areas, frame_areas
from fisedit.diagnosis.layer_times import layer_seconds
from fisedit.diagnosis.transfer_rates import transfer_rates
from fisedit.errors import InputError, as_text
from fisedit.machine.contention import check_repeats, waited_seconds
from fisedit.machine.stopwatch import NO_LEVEL, OTHER, STEP, STEP_DENSE, STEP_SPARSE
from fisedit.masking.region import Region
from fisedit.values import LATENT_FACTOR, Step, are_numbers, make_generation_config

if TYPE_CHECKING:
    from fisedit.costs.model import Costs
    from fisedit.costs.table import CostTable
    from fisedit.edits.pipeline import EditPipeline
    from fisedit.edits.requests import EditRequest
    from fisedit.history import EditResult
    from fisedit.machine.stopwatch import Span
    from fisedit.values import BoolGrid, GenerationConfig, OnStep

SECONDS = 20.0
"""The approximate time of a calibration; measurements that every table needs are made however long they take."""

PATTERN = (1, 1, 1, Step.DENSE, 1, 1)
"""Dilations of an edit's steps: sparse ones before and behind a dense one. The first takes longer, which is setup."""

LARGEST = 256
"""Side in pixels of the picture that is measured, unless the model was made for less, or another is asked for."""

AREAS = (0.25, 0.06, 0.6, 0.02, 0.12, 0.4, 0.8)
"""Shares of the picture that edits cover, the most informative first; each once in a square and once in discs."""

FEWEST = 3
"""Runs of edits that a table needs."""

_LAYERS_SHARE = 0.15
"""The share of the seconds that goes to single layers, which `fisedit doctor` compares with."""

_PROMPTS = ("a cat and a cake on a beach", "a dog and a cake on a beach")
_STATIONS = ("text", "plan", "denoise", "decode")


@dataclass(frozen=True)
class CalibrationSettings:
    """The measurements of a calibration, and their time.

    Args:
        seconds: The approximate time that it takes; at least 0.
        size: side of the pictures in pixels, 64 to 2048, divisible by 8; None for the model's own, at most `LARGEST`.

    Raises:
        InputError: seconds below 0, or no number.
    """

    seconds: float = SECONDS
    size: int | None = None

    def __post_init__(self) -> None:
        if not are_numbers((self.seconds,), 1) or self.seconds < 0:
            raise InputError(f"seconds must be a number, 0 or more, got {as_text(self.seconds)}; 20 is usual")


def calibrate(
    pipeline: EditPipeline,
    settings: CalibrationSettings = CalibrationSettings(),
    on_step: OnStep | None = None,
    clock: Callable[[], float] = perf_counter,
) -> CostTable:
    """Measure the table of a pipeline's model on this machine; the pipeline is left as it is.

    Args:
        pipeline: The pipeline of the model.
        settings: for how long, and at which size.
        on_step: called before every step of every run; may raise `Cancelled`.
        clock: returns seconds.

    Raises:
        InputError: a size out of range. MeasurementError: sources took too differently. Cancelled: by `on_step`.
    """
    began, waited, trial = clock(), waited_seconds(), _Trial(pipeline.beside(), on_step)
    native = int(pipeline.state.engine.pipe.unet.config.sample_size) * LATENT_FACTOR
    size = _config(min(native, LARGEST) if settings.size is None else settings.size, len(PATTERN)).width  # checked
    trial.source(_config(max(64, size // 2 // LATENT_FACTOR * LATENT_FACTOR), 2), warm=False)
    for done, (area, discs) in enumerate(_shapes()):
        if done >= FEWEST and clock() - began > (1 - _LAYERS_SHARE) * settings.seconds:
            break
        trial.turn(_config(size, len(PATTERN)), area, discs=discs)
    check_repeats(trial.dense_seconds, (waited_seconds() - waited) / (clock() - began))
    about = cost_store.describe(pipeline.state.engine.pipe) | {"pixels": size, "seconds": round(clock() - began, 1)}
    about["record_bytes"] = trial.record_bytes
    about["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    layers = layer_seconds(pipeline.state.engine.pipe, size, _LAYERS_SHARE * settings.seconds, on_step)
    return never_falling(trial.measured().table(about, transfer_rates(), layers))


def never_falling(table: CostTable) -> CostTable:
    """Return a table in which no work takes longer than more of it, by isotonic regression.

    Beside other work a calibration measures small edits slower than large ones.

    Args:
        table: The table that was measured.
    """
    from scipy.optimize import isotonic_regression

    curves = {
        key: replace(curve, seconds=tuple(isotonic_regression(curve.seconds).x.tolist()))
        for key, curve in table.curves.items()
    }
    return replace(table, curves=curves)


def predictions(pipeline: EditPipeline, areas: Sequence[float], size: int, steps: int) -> list[dict[str, object]]:
    """Predicted seconds of a source and of edits in square masks, as the planner would run them, ready for JSON.

    Args:
        pipeline: A pipeline with a table.
        areas: shares of the picture, each in (0, 1].
        size: side of the picture in pixels.
        steps: The number of the source's steps.
    """
    costs = pipeline.planner.costs(_config(size, steps))
    rows: list[dict[str, object]] = [{"run": "source", "seconds": costs.seconds(None, ())}]
    for area in areas:
        grid = shape_mask(area, size // LATENT_FACTOR, discs=False)
        growth = costs.choose_dilations(grid, shallow=find_shallow_steps(steps))
        dense = bool(costs.dense_is_cheaper(grid, growth))
        seconds = costs.seconds(grid, () if dense else growth)
        rows.append({"run": f"edit of {area:.0%}{', dense' if dense else ''}", "seconds": seconds})
    return rows


def _shapes() -> Iterator[tuple[float, bool]]:
    """Areas in turns, in squares and in discs, without end."""
    for turn in count():
        for i, area in enumerate(AREAS):
            yield area, bool((i + turn) % 2)


def _config(size: int, steps: int) -> GenerationConfig:
    return make_generation_config(
        _PROMPTS[0],
        seed=7,
        negative_prompt="",
        num_inference_steps=steps,
        guidance_scale=7.5,
        width=size,
        height=size,
        scheduler="ddim",
    )


def shape_mask(area: float, side: int, *, discs: bool, seed: int = 0) -> BoolGrid:
    """A mask to measure with.

    Args:
        area: approximate share of the cells, in (0, 1].
        side: The side of the grid, in latent cells.
        discs: three discs instead of a square.
        seed: where the discs lie.

    Returns:
        Booleans [side, side].
    """
    ys, xs = np.mgrid[:side, :side] + 0.5
    if not discs:
        edge = max(1, round(area**0.5 * side))
        low = (side - edge) // 2
        return np.asarray((ys >= low) & (ys < low + edge) & (xs >= low) & (xs < low + edge))
    centres = np.random.default_rng(seed).uniform(0.15, 0.85, (3, 2)) * side
    distance = np.min([np.hypot(ys - y, xs - x) for y, x in centres], axis=0)
    nearest = np.sort(distance, axis=None)[max(1, round(area * side * side)) - 1]
    return np.asarray(distance <= nearest)


class _Trial:
    """Runs pictures and edits, and notes what their parts take.

    Attributes:
        dense_seconds: What the steps of each turn's source took.
        record_bytes: The bytes that the last source recorded, for each step, latent cell and item.
    """

    def __init__(self, pipeline: EditPipeline, on_step: OnStep | None) -> None:
        self._pipeline, self._on_step, self._seed = pipeline, on_step, 0
        self._first, self._turns = Measurements(), list[Measurements]()
        self._measured, self.record_bytes, self.dense_seconds = self._first, 0.0, list[float]()

    def measured(self) -> Measurements:
        """The parts' seconds, all as if each turn's source had taken the median: a slow turn is slow as a whole."""
        return joined(self._turns, median(self.dense_seconds) / np.array(self.dense_seconds), self._first)

    def turn(self, config: GenerationConfig, area: float, *, discs: bool) -> None:
        """Make a source in place of the one before, and an edit of it; other arguments as in `shape_mask`."""
        before, self._measured = tuple(self._pipeline.state.history), Measurements()
        self.dense_seconds.append(self.source(config, warm=True))
        self._turns.append(self._measured)
        for result in before:
            self._remove(result)
        self._edit(area, discs=discs)

    def source(self, config: GenerationConfig, *, warm: bool) -> float:
        """Make a source, which later edits are of; returns the seconds of its steps without recording.

        Args:
            config: The settings of the source.
            warm: whether one was made before; else the first run counts for nothing.
        """
        for _ in range(1 if warm else 2):
            spans, result, scale = self._twice(
                lambda: self._pipeline.requests.source(config, on_step=self._on_step), None
            )
        cells = self._pipeline.planner.costs(result.config).sizes[0] * self._pipeline.state.engine.batch(result.config)
        self.record_bytes = result.stats.recorded_bytes / (cells * config.num_inference_steps)
        self._note(spans, result, scale, None)
        return result.stats.seconds["denoise"]

    def _edit(self, area: float, *, discs: bool) -> None:
        self._seed += 1
        side = self._pipeline.state.history.current.config.width // LATENT_FACTOR
        grid = shape_mask(area, side, discs=discs, seed=self._seed)

        def request() -> EditRequest:
            return self._pipeline.requests.edit(_PROMPTS[1], Region.mask(grid), on_step=self._on_step)

        self._note(*self._twice(request, grid), grid)

    def _twice(self, request: Callable[[], EditRequest], grid: BoolGrid | None) -> tuple[list[Span], EditResult, float]:
        """A run's spans, its result without recording, and how much faster its steps are without."""
        pipe, seconds = self._pipeline.state.engine.pipe, list[float]()
        for recorded in (False, True):
            with recorded_spans(pipe) if recorded else nullcontext() as recorder:
                result = self._run(request(), grid)
            seconds.append(result.stats.seconds["denoise"])
            if recorder is None:
                plain = result
            else:
                spans = recorder.spans
        return spans, plain, min(1.0, seconds[0] / seconds[1])

    def _run(self, request: EditRequest, grid: BoolGrid | None) -> EditResult:
        pipeline, before = self._pipeline, request.parent
        if grid is None:
            return pipeline.run(request, pipeline.plan(request))
        captured = pipeline.state.engine.graphs.is_enabled(
            pipeline.state.engine.pipe.unet.device
        )  # which have no dense steps in between
        plan = pipeline.plan(request).with_dilation((1,) * len(PATTERN) if captured else PATTERN)
        result = pipeline.run(request, plan)
        assert before is not None
        self._remove(result)
        pipeline.state.history.checkout(before.id)
        return result

    def _remove(self, result: EditResult) -> None:
        self._pipeline.state.cache.drop(self._pipeline.state.history.delete(result.id))

    def _note(self, spans: Sequence[Span], result: EditResult, scale: float, grid: BoolGrid | None) -> None:
        costs = self._pipeline.planner.costs(result.config)
        rows = costs.sizes if grid is None else costs.rows(grid, (1,))
        steps = _steps(spans)
        first = self._note_steps(steps, (rows, costs, result), scale)
        inner = _own_by_kind([span for span in spans if span.step < 0])
        per_step = inner.get("denoise", 0.0) * scale / len(steps)
        if "shift" in inner:
            self._measured.add(("edit", "shift", NO_LEVEL), costs.sizes[0], inner["shift"] * scale)
        self._measured.add(("edit", "loop", NO_LEVEL), costs.sizes[0], per_step)
        setup = inner.get("setup", 0.0) + first
        self._measured.add(("edit", "setup" if grid is not None else "first", NO_LEVEL), rows[0], setup)
        taken = result.stats.seconds
        for kind in ("text", "plan") if grid is not None else ("text",):
            self._measured.add(("edit", kind, NO_LEVEL), 1.0, taken[kind])
        once = taken["total"] - sum(taken.get(station, 0.0) for station in _STATIONS)
        self._measured.add(("edit", "once", NO_LEVEL), 1.0, once)
        self._note_decode(inner, taken["decode"], grid, costs)

    def _note_steps(
        self,
        steps: Sequence[tuple[str, Layers]],
        run: tuple[Sequence[int], Costs, EditResult],
        scale: float,
    ) -> float:
        """Note the layers of a run's steps; how many seconds longer the first step took than the others."""
        rows, costs, result = run
        batch = self._pipeline.state.engine.batch(result.config)
        runs: dict[str, list[Layers]] = defaultdict(list)
        for run_name, layers in _runs(steps)[1:]:
            runs[run_name].append(layers)
        if rows != costs.sizes:
            runs.pop("dense", None)  # which sources measure
        for name, found in runs.items():
            for (kind, level), seconds in _typical(found).items():
                work = step_work(kind, level, rows, costs.sizes, batch)
                self._measured.add((name, kind, level), work, seconds * scale)
        alike = [sum(layers.values()) for kind, layers in steps[1:3] if kind == steps[0][0]]
        return max(0.0, sum(steps[0][1].values()) - median(alike)) * scale

    def _note_decode(self, inner: dict[str, float], seconds: float, grid: BoolGrid | None, costs: Costs) -> None:
        """Note a decode's levels, in sum what the decode took without recording."""
        kinds = {kind: own for kind, own in inner.items() if kind.startswith("decode")}
        scale = seconds / sum(kinds.values())
        areas = frame_areas(costs.sizes[0])
        decoded = areas if grid is None else box_areas(grid)
        run = "decode dense" if decoded == areas else "decode sparse"
        works = decode_work(decoded) if run == "decode sparse" else {}
        for kind, own in kinds.items():
            self._measured.add((run, kind, NO_LEVEL), works.get(kind, float(costs.sizes[0])), own * scale)


def joined(turns: Sequence[Measurements], scales: Iterable[float], first: Measurements) -> Measurements:
    """Measurements of several turns as one.

    Args:
        turns: each turn's.
        scales: factor of each turn's seconds.
        first: those before, whose seconds stay.
    """
    found = Measurements()
    for measured, scale in zip((first, *turns), (1.0, *scales), strict=True):
        for key, work, seconds in measured:
            found.add(key, work, seconds * scale)
    return found


Layers = dict[tuple[str, int], float]
"""(kind of layer, level) -> seconds of a step."""


def _steps(spans: Sequence[Span]) -> list[tuple[str, Layers]]:
    """The kind of every step's span, and its seconds by kind of layer and level."""
    steps: dict[int, dict[tuple[str, int], float]] = defaultdict(lambda: defaultdict(float))
    kinds: dict[int, str] = {}
    for span in spans:
        if span.step < 0:
            continue
        whole = span.kind.startswith(STEP)
        if whole:
            kinds[span.step] = span.kind
        steps[span.step][OTHER if whole else span.kind, span.level] += span.own
    return [(kinds[i], dict(steps[i])) for i in sorted(kinds)]


def _runs(steps: Sequence[tuple[str, Layers]]) -> list[tuple[str, Layers]]:
    """A run's steps by the names of the table: dense, sparse, and those that read features shifted by a dense one."""
    kinds = [kind for kind, _ in steps]
    if STEP_SPARSE not in kinds:
        return [("dense", layers) for _, layers in steps]
    first = kinds.index(STEP_DENSE) if STEP_DENSE in kinds else len(kinds)
    return [
        ("dense" if kind == STEP_DENSE else "shifted" if i > first else "sparse", layers)
        for i, (kind, layers) in enumerate(steps)
    ]


def _typical(steps: Sequence[Layers]) -> Layers:
    """The layers' medians over steps, in sum what a step took in the mean: a busy machine interrupts any of them."""
    medians = {key: median(layers.get(key, 0.0) for layers in steps) for key in {key for one in steps for key in one}}
    whole = mean(sum(layers.values()) for layers in steps)
    return {key: seconds * whole / sum(medians.values()) for key, seconds in medians.items()}


def _own_by_kind(spans: Sequence[Span]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for span in spans:
        found[span.kind] += span.own
    return dict(found)
